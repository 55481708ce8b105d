"""RULER at and beyond the training context: can the model use what stands far back?

    python -m data.ruler --tokenizer gpt2 --lengths 4096,8192 --out data/ruler_gpt2
    python -m scripts.eval_ruler runs/gpt2_124m_rove --data data/ruler_gpt2 --yarn none,auto

The headline is the NLL of the reference answer per token, which tells models apart that are far too
small to answer; --generate adds RULER's own score. docs/ruler.md says what is measured and why.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

from data.ruler import load_manifest, parse_lengths
from data.shards import MANIFEST
from data.tokenizer import Tokenizer, check_tokenizer, recorded_tokenizer
from model import GPT
from nanorove import ruler_metrics as ruler
from nanorove.distributed import DistInfo, init_distributed, run_distributed
from nanorove.errors import UserError
from nanorove.evaluation import (
    finish,
    header,
    open_output,
    open_subject,
    parse_yarn,
    resumable,
    score_all,
    yarn_factor,
)
from nanorove.files import sha256_file
from nanorove.sampling import generate
from nanorove.scoring import Scored, Span

FIELDS = {
    "index": int, "task": str, "input": str, "answer_prefix": str, "outputs": list,
    "length": int, "prompt_tokens": int, "control": str, "depth": (float, int, type(None)),
}  # fmt: skip


@dataclass(frozen=True)
class Args:
    """RULER: NLL of the reference answers, and with --generate RULER's own score."""

    run: tyro.conf.Positional[Path]
    """A run folder (its last checkpoint), a step folder, or a folder with a HuggingFace GPT-2."""
    data: Path
    """A folder that data.ruler made, with the model's tokenizer."""
    lengths: str | None = None
    """Of those in the data, in tokens; default: all."""
    tasks: str | None = None
    """Of those in the data, e.g. niah_single_1,vt; default: all."""
    limit: int | None = None
    """The first N samples of each task and length; default: all."""
    yarn: str = "none,auto"
    """YaRN settings: none (as trained), auto (factor = length / block_size), or a number."""
    generate: bool = False
    """Also let the model write, greedily, and look for the answers in it (slow)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the transformer when answers are scored (bfloat16: autocast); head and loss are always
    float32, and so is --generate."""
    out: Path | None = None
    """Result file; default: RUN/eval/ruler.json."""


@dataclass(frozen=True)
class Task:
    """One file of the data: the samples of one task at one length."""

    name: str
    length: int
    sha256: str
    metric: str
    new_tokens: int
    variant: bool
    samples: list[dict[str, Any]]

    @property
    def partners(self) -> list[int] | None:
        """Whose answers each sample borrows for the shuffled control."""
        return ruler.derangement(len(self.samples))


def main(args: Args) -> dict[str, Any]:
    """Evaluate and write the result file; returns its content."""
    settings = parse_yarn(args.yarn)
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit}: at least 1")
    info = init_distributed()
    subject = open_subject(args.run)
    out, journal = open_output(subject, "ruler", args.out, info=info, limit=args.limit)
    tokenizer = recorded_tokenizer(subject.tokenizer, args.run)
    manifest = load_manifest(args.data)
    check_tokenizer(tokenizer, manifest["tokenizer"], f"{args.data}/{MANIFEST}")
    tasks = [
        read_task(args.data, entry, args.limit)
        for entry in choose(manifest, args.lengths, args.tasks, args.data)
    ]
    lengths = sorted({task.length for task in tasks})
    for task, reason in ({} if args.tasks else manifest["skipped"]).items():
        info.print0(f"note: {task} is not everywhere in {args.data}: {reason}")

    # none and auto are one factor up to block_size: what is equal is computed once
    factors = {
        (setting, length): yarn_factor(setting, length, subject.config)
        for setting in settings
        for length in lengths
    }
    jobs = sorted({(f, length) for (_, length), f in factors.items() if isinstance(f, float)})
    record = header("ruler", subject, info, args.dtype)
    found: dict[tuple[float, int], dict[str, list[dict[str, Any]]]] = {}
    for factor, length in jobs:
        here = [task for task in tasks if task.length == length]
        max_len = reach(here)
        if subject.config.pos_emb == "learned":
            max_len = min(max_len, subject.config.block_size)
        model = subject.load(max_len=max_len, yarn_factor=factor, device=info.device)
        found[factor, length] = {}
        for task in here:
            key = record | {"data": task.sha256, "factor": factor, "new_tokens": task.new_tokens}
            work = dict(info=info, journal=journal, key=key)
            work["label"] = f"{task.name} {length} YaRN {factor:g}"
            samples = score_task(model, task, tokenizer, args.dtype, work)
            if args.generate:
                generate_task(model, task, samples, tokenizer, work)
            found[factor, length][task.name] = samples
    results, samples = [], []
    for (setting, length), factor in factors.items():
        entry = {"length": length, "yarn": setting}
        if isinstance(factor, str):
            results.append(entry | {"factor": None, "reason": factor})
            info.print0(f"{length:>6} tokens, YaRN {setting}: n/a, {factor}")
            continue
        here = [task for task in tasks if task.length == length]
        results.append(entry | {"factor": factor, **summarise(here, found[factor, length])})
        samples += [entry | s for task in here for s in found[factor, length][task.name]]
        show(results[-1], info)

    record |= {
        "data": {
            "dir": str(args.data),
            "manifest_sha256": sha256_file(args.data / MANIFEST),
            "files": [{"task": t.name, "length": t.length, "sha256": t.sha256} for t in tasks],
            "skipped": manifest["skipped"],
        },
        "settings": {
            "lengths": lengths, "yarn": settings, "tasks": args.tasks, "limit": args.limit,
            "generate": args.generate,
        },
        "seed": manifest["seed"],
        "protocol": {
            "bos": "end-of-text opens every prompt; it is an id, never text",
            "nll": "mean over samples of the mean NLL per token of the reference answer, in nats;"
            " of several references (qa) the one with the lowest",
            "first": "the same for the first of several references",
            "exact": "samples whose every answer token is the likeliest one, given those before it",
            "order_free": "mean over the references of the NLL of each as the next thing written",
            "prefix_only": "the same answer, the prompt without its context",
            "shuffled": "the same prompt, the answer of the sample half the file away",
            "generation": "RULER's string match, 0 to 100, greedy, in float32",
            "average": "unweighted, over tasks; `tasks` of `of` says over how many",
        },
        "counts": {
            "items": len(samples),
            "truncated": 0,
            "skipped": sum(s["nll"] is None for s in samples),  # each says why
        },
        "results": results,
        "samples": samples,
    }  # fmt: skip
    finish(out, record, journal, info)
    return record


# -----------------------------------------------------------------------------
# the data


def choose(
    manifest: dict[str, Any], lengths: str | None, tasks: str | None, folder: Path
) -> list[dict[str, Any]]:
    """The manifest's files of these lengths and tasks, in the order of the manifest.

    Raises UserError for a length and for a task that the data has not, alone or together.
    """
    files = manifest["files"]
    there = {f["length"] for f in files}, {f["task"] for f in files}
    wanted = (
        set(parse_lengths(lengths)) if lengths is not None else there[0],
        {t.strip() for t in tasks.split(",")} if tasks is not None else there[1],
    )
    for option, want, have in zip(("lengths", "tasks"), wanted, there, strict=True):
        if missing := sorted(want - have):
            reason = manifest["skipped"].get(missing[0])
            raise UserError(
                f"--{option}: {folder} has no {missing[0]}"
                + (f" ({reason})" if reason else "")
                + f", but {', '.join(str(h) for h in sorted(have))}"
            )
    chosen = [f for f in files if f["length"] in wanted[0] and f["task"] in wanted[1]]
    if missing := sorted(wanted[0] - {f["length"] for f in chosen}):
        raise UserError(f"--tasks {tasks}: {folder} has none of these at {missing[0]} tokens")
    return chosen


def read_task(folder: Path, entry: dict[str, Any], limit: int | None) -> Task:
    """A file of the data, its hash and every sample checked. Raises UserError with the line."""
    name, length = entry["task"], entry["length"]
    path = folder / str(length) / f"{name}.jsonl"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make the data again") from None
    if (found := hashlib.sha256(content).hexdigest()) != entry["sha256"]:
        raise UserError(
            f"{path}: sha256 {found[:12]}, but {MANIFEST} says {entry['sha256'][:12]};"
            " make the data again"
        )
    samples = []
    for number, line in enumerate(content.splitlines()[:limit], 1):
        try:
            sample = json.loads(line)
            for key, kind in FIELDS.items():
                if not isinstance(sample[key], kind):
                    raise ValueError(f"{key} is {sample[key]!r}")
            if not sample["outputs"] or not all(isinstance(o, str) for o in sample["outputs"]):
                raise ValueError(f"outputs is {sample['outputs']!r}, texts are needed")
            if sample["task"] != name or sample["index"] != number - 1:
                raise ValueError(f"it is sample {sample['index']} of {sample['task']}")
            if (needed := sample["prompt_tokens"] + entry["tokens_to_generate"]) > length:
                raise ValueError(f"prompt and answer take {needed} tokens")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else error
            raise UserError(
                f"{path}:{number}: not a sample of {name} at {length} tokens ({what});"
                " make the data again"
            ) from None
        samples.append(sample)
    if not samples:
        raise UserError(f"{path}: no samples; make the data again")
    facts = (entry["sha256"], entry["metric"], entry["tokens_to_generate"], entry["variant"])
    return Task(name, length, *facts, samples)


def reach(tasks: Sequence[Task]) -> int:
    """Tokens that a model must be able to read for these tasks; no token is less than a byte."""
    longest = 0
    for task in tasks:
        answer = max(
            len(text.encode())
            for sample in task.samples
            for text in ruler.answers(task.name, sample["outputs"])
        )
        prompt = max(sample["prompt_tokens"] for sample in task.samples)
        longest = max(longest, 1 + prompt + max(answer, task.new_tokens))
    return longest


# -----------------------------------------------------------------------------
# NLL of the answers


@dataclass
class Plan:
    """What is to be scored for one sample: a list of spans for each measure, or why it is not."""

    spans: dict[str, list[Span]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def make_plan(task: Task, index: int, tokenizer: Tokenizer, max_len: int) -> Plan:
    """The spans of sample `index` (of those read): its answers, those of another sample, each
    answer alone, and its answers without the context.

    A model input is end-of-text and encode(prompt + answer). The tokens of the prompt must be a
    prefix of it: else an answer would begin within a token, and what is scored would not be the
    answer.
    """
    sample = task.samples[index]
    own = ruler.answers(task.name, sample["outputs"])
    prompt = sample["input"] + sample["answer_prefix"]
    wanted = {"reference": (prompt, own)}
    if task.partners is not None:
        other = task.samples[task.partners[index]]["outputs"]
        wanted["shuffled"] = prompt, ruler.answers(task.name, other)
    if task.name in ruler.ANY_ORDER:
        wanted["order_free"] = prompt, ruler.single_answers(task.name, sample["outputs"])
    wanted["prefix_only"] = sample["control"], own
    plan = Plan()
    for measure, (text, references) in wanted.items():
        head = tokenizer.encode(text)
        if measure == "reference" and len(head) != sample["prompt_tokens"]:
            raise UserError(
                f"{task.name} at {task.length} tokens, index {sample['index']}: {len(head)} tokens"
                f" in the prompt, the file says {sample['prompt_tokens']}; make the data again"
            )
        spans = []
        for reference in references:
            ids = tokenizer.encode(text + reference)
            if len(ids) <= len(head) or (ids[: len(head)] != head).any():
                plan.problems[measure] = "prompt is no prefix"
            elif len(ids) > max_len:  # with end-of-text one more, but the last is never read
                plan.problems[measure] = f"longer than {max_len} tokens"
            else:
                ids = np.concatenate([[tokenizer.eot], ids]).astype(np.uint16)
                spans.append(Span(ids, 1 + len(head), len(ids)))
        if measure not in plan.problems:
            plan.spans[measure] = spans
    return plan


def score_task(
    model: GPT,
    task: Task,
    tokenizer: Tokenizer,
    dtype: str,
    work: dict[str, Any],
) -> list[dict[str, Any]]:
    """The samples of the result file, in the order of the file: what each measure says of each.

    work: info, journal, key and label of `resumable`.
    """
    plans = [make_plan(task, i, tokenizer, model.max_len) for i in range(len(task.samples))]
    groups, owners = [], []  # what shares a prompt is one group, whose prompt is read once
    for i, plan in enumerate(plans):
        for measures in (("reference", "shuffled", "order_free"), ("prefix_only",)):
            here = [m for m in measures if m in plan.spans]
            if here:
                groups.append([span for m in here for span in plan.spans[m]])
                owners.append((i, here))
    found = score_all(model, groups, dtype=dtype, **work)
    scored: list[dict[str, list[Scored]]] = [{} for _ in plans]
    for (i, measures), spans in zip(owners, found, strict=True):
        rest = iter(spans)
        for measure in measures:
            scored[i][measure] = [next(rest) for _ in plans[i].spans[measure]]
    return [
        outcome(task, sample, plan, parts)
        for sample, plan, parts in zip(task.samples, plans, scored, strict=True)
    ]


def outcome(
    task: Task, sample: dict[str, Any], plan: Plan, scored: dict[str, list[Scored]]
) -> dict[str, Any]:
    """One sample of the result file."""
    row: dict[str, Any] = {key: sample[key] for key in ("task", "index", "prompt_tokens", "depth")}
    row |= best(scored.get("reference")) or {"nll": None, "tokens": None, "exact": None}
    if task.name.startswith("qa_"):
        row["first"] = best(scored.get("reference", [])[:1])
    if task.name in ruler.ANY_ORDER:
        alone = scored.get("order_free")
        row["order_free"] = alone and float(np.mean([s.nll.mean() for s in alone]))
    row["prefix_only"] = best(scored.get("prefix_only"))
    row["shuffled"] = best(scored.get("shuffled"))
    if plan.problems:
        row["problems"] = plan.problems
    return row


def best(scored: Sequence[Scored] | None) -> dict[str, Any] | None:
    """Of several references the one with the lowest mean NLL; exact if any is."""
    if not scored:
        return None
    lowest = min(scored, key=lambda s: s.nll.mean())
    return {
        "nll": float(lowest.nll.sum()),
        "tokens": len(lowest.nll),
        "exact": any(bool(s.greedy.all()) for s in scored),
    }


# -----------------------------------------------------------------------------
# what the model writes


def generate_task(
    model: GPT,
    task: Task,
    rows: list[dict[str, Any]],
    tokenizer: Tokenizer,
    work: dict[str, Any],
) -> None:
    """Put into `rows`, the samples of the result, what the model writes and RULER's score of it."""

    def write(i: int) -> str:
        sample = task.samples[i]
        prompt = tokenizer.encode(sample["input"] + sample["answer_prefix"]).tolist()
        prompt = torch.tensor([[tokenizer.eot, *prompt]])
        # end-of-text is one token more than RULER counts: learned positions may end one earlier
        new = min(task.new_tokens, model.max_len - prompt.size(1))
        steps = generate(model, prompt, new, temperature=0, eot=tokenizer.eot)
        return tokenizer.decode([token for (token,) in steps if token is not None])

    costs = [sample["prompt_tokens"] + task.new_tokens for sample in task.samples]
    predictions = resumable(costs, write, **work | {"label": f"{work['label']} generate"})
    match = ruler.MATCH[task.metric]
    for sample, row, prediction in zip(task.samples, rows, predictions, strict=True):
        row["prediction"] = prediction
        row["score"] = match(ruler.post_process(prediction), sample["outputs"])


# -----------------------------------------------------------------------------
# the results


def summarise(tasks: Sequence[Task], found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The numbers of one length and YaRN setting: by task, by category, and their average."""
    by_task = {}
    for task in tasks:
        rows = found[task.name]
        by_task[task.name] = ruler.summarise_task(rows) | {"variant": task.variant}
        problems: dict[str, dict[str, list[int]]] = {}
        for row in rows:
            for measure, reason in row.get("problems", {}).items():
                problems.setdefault(measure, {}).setdefault(reason, []).append(row["index"])
        if problems:
            by_task[task.name]["problems"] = problems
    categories = {
        name: ruler.combine(by_task, members) for name, members in ruler.CATEGORIES.items()
    }
    return {
        "tasks": by_task,
        "categories": categories,
        "average": ruler.combine(by_task, ruler.TASKS),
    }


def show(result: dict[str, Any], info: DistInfo) -> None:
    """Print one length and YaRN setting."""
    info.print0(f"{result['length']:>6} tokens, YaRN {result['yarn']}, nats per answer token:")
    variants = {name: row for name, row in result["tasks"].items() if name not in ruler.TASKS}
    for name, row in (result["categories"] | variants | {"average": result["average"]}).items():
        if row["nll"] is None:
            info.print0(f"    {name:10} n/a")
            continue
        line = f"    {name:10} {row['nll']:7.3f}"
        for measure in ("prefix_only", "shuffled", "exact", "generation"):
            if row[measure] is not None:
                line += f"   {measure} {row[measure]:.3f}"
        if row.get("missing"):
            line += f"   ({row['tasks']} of {row['of']} tasks)"
        info.print0(line)
    for task, row in result["tasks"].items():
        for measure, reasons in row.get("problems", {}).items():
            for reason, indices in reasons.items():
                info.print0(
                    f"    note: {task}: {measure} of {len(indices)} samples is n/a: {reason}"
                )


if __name__ == "__main__":
    run_distributed(lambda: main(tyro.cli(Args, prog="python -m scripts.eval_ruler")))
