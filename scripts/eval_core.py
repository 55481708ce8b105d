"""
CORE, the mean of 22 few-shot tasks (DCLM), as nanochat runs it; docs/core.md says more:
    python -m scripts.eval_core runs/gpt2_124m_rove
    python -m scripts.eval_core runs/gpt2_124m_rove --bundle ~/eval_bundle.zip --limit 100
    torchrun --nproc_per_node=8 -m scripts.eval_core gpt2_folder --out gpt2_core.json
"""

import csv
import hashlib
import io
import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
import yaml
from tqdm import tqdm

from data.download import fetch
from data.tokenizer import Tokenizer, recorded_tokenizer
from model import GPT
from nanorove import core_tasks
from nanorove.core_tasks import MAX_LENGTH, TASKS, Outcome, Task, name_of
from nanorove.distributed import DistInfo, init_distributed, run_distributed
from nanorove.errors import UserError
from nanorove.evaluation import Subject, finish, header, open_output, open_subject, score_all
from nanorove.files import sha256_file
from nanorove.scoring import Span

# the address in nanochat's scripts/base_eval.py; it publishes no hash, this is what others found
BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
BUNDLE_SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
BUNDLE_PATH = Path("data/eval_bundle/eval_bundle.zip")

KINDS = {"MC": "multiple_choice", "SC": "schema", "LM": "language_modeling"}
MAX_FILE = 2**28  # bytes; the whole public bundle has 162 MB
LONGEST = 2**16  # tokens; no prompt of CORE has as many

# encrypted, of an unknown method, cut or altered: zipfile has many words for it
BAD_ZIP = (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, OSError, ValueError)

Bundle = Path | zipfile.Path  # a folder, or a place in a zip, which is read where it is


@dataclass(frozen=True)
class Args:
    """CORE: accuracy on 22 few-shot tasks, each centered on what guessing gives, and their mean."""

    run: tyro.conf.Positional[Path]
    """A run folder (its last checkpoint), a step folder, or a HuggingFace folder of GPT-2."""
    bundle: Path | None = None
    """The tasks: a folder or a zip; default: the public bundle, fetched once to
    data/eval_bundle."""
    tasks: str | None = None
    """Only these, separated by commas; default: all that the bundle has."""
    limit: int | None = None
    """At most so many items of each task; also changes the examples in front of each item."""
    max_length: int = MAX_LENGTH
    """Tokens of a prompt of which the end is kept; more is the long-prompt variant."""
    yarn_factor: float | None = None
    """Instead of the model's own, to read prompts beyond the length it was trained at."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the transformer (bfloat16: autocast); head and loss are always float32."""
    out: Path | None = None
    """Result file; default: RUN/eval/core.json, with the settings in its name if these are
    others."""


def main(args: Args) -> dict[str, Any]:
    """Evaluate and write the result file; returns its content."""
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit}: at least 1 item of each task")
    if not 2 <= args.max_length <= LONGEST:
        raise UserError(f"--max-length {args.max_length}: 2 to {LONGEST:,} tokens")
    info = init_distributed()
    subject = open_subject(args.run)
    config = subject.config
    if config.pos_emb == "learned" and args.max_length > config.block_size:
        raise UserError(
            f"--max-length {args.max_length}: learned positions end at {config.block_size} tokens;"
            f" evaluate {args.run} with --max-length {config.block_size}"
        )
    tokenizer = recorded_tokenizer(subject.tokenizer, subject.path)

    path = args.bundle or info.from_rank0(public_bundle)
    bundle = open_bundle(path)
    listed = check_tables(bundle)
    tasks = choose(bundle, listed, args.tasks)
    rows = {task.label: read_rows(bundle, task) for task in tasks}
    resized = {t.label: len(rows[t.label][0]) for t in tasks if len(rows[t.label][0]) != t.rows}
    name = name_of(len(tasks), whole=not resized, limit=args.limit, length=args.max_length)
    missing = [task.label for task in TASKS if task not in tasks]
    info.print0(f"{name} of {subject.path}, prompts of at most {args.max_length} tokens")
    if missing:
        info.print0(f"note: no CORE without {', '.join(missing)}")
    for label, n in resized.items():
        info.print0(f"note: {label} has {n} rows, not those of the public bundle")
    if listed is None:
        info.print0(f"note: no core.yaml in {path}, its files are taken for the public ones")

    out, journal = open_output(subject, file_name(args, len(tasks)), args.out, info=info)
    model = subject.load(max_len=args.max_length, yarn_factor=args.yarn_factor, device=info.device)
    results = []
    for task in tasks:
        result = evaluate(task, *rows[task.label], model, tokenizer, subject, args, info, journal)
        results.append(result)
        shown = ", ".join(f"{v} {result['centered'][v]:+.4f}" for v in ("v1", "v2"))
        if info.rank == 0:
            tqdm.write(f"{task.label:34} accuracy {result['accuracy']:.4f}  centered {shown}")

    means = {v: float(np.mean([r["centered"][v] for r in results])) for v in ("v1", "v2")}
    info.print0(f"{name}: {means['v1']:.4f} (baselines v1), {means['v2']:.4f} (v2)")
    record = header("core", subject, info, args.dtype) | {
        "data": {
            "bundle": str(path),
            "sha256": sha256_file(path) if path.is_file() else None,
            "core_yaml": listed is not None,
            "files": {task.uri: rows[task.label][1] for task in tasks},
        },
        "settings": {
            "tasks": args.tasks,
            "limit": args.limit,
            "max_length": args.max_length,
            "yarn_factor": args.yarn_factor,
        },
        "seed": {"order": core_tasks.SHUFFLE_SEED, "examples": core_tasks.SHOTS_SEED},
        "protocol": {
            "bos": "End-of-text opens every prompt; the end of a longer prompt is kept",
            "v1": "baselines of nanochat, of the published GPT-2 numbers",
            "v2": "baselines of DCLM since September 2025",
            "nll": "mean over the scored tokens, nats, one per option; null if there are none",
            "line": "of the file, from 1",
        },
        "results": {
            "name": name,
            **means,
            "mean_accuracy": float(np.mean([r["accuracy"] for r in results])),
            "missing": missing,
            "other_rows": resized,
            "fewer_examples": {
                t.label: r["examples"]
                for t, r in zip(tasks, results, strict=True)
                if r["examples"] < t.shots
            },
        },
        "counts": {
            "items": sum(r["items"] for r in results),
            "skipped": 0,  # whatever cannot be evaluated is an error
            **{key: sum(r[key] for r in results) for key in ("cropped", "clamped", "undecided")},
        },
        "tasks": results,
    }
    finish(out, record, journal, info)
    return record


def evaluate(
    task: Task,
    rows: list[dict[str, Any]],
    sha256: str,
    model: GPT,
    tokenizer: Tokenizer,
    subject: Subject,
    args: Args,
    info: DistInfo,
    journal: Path,
) -> dict[str, Any]:
    """One task's part of the result file."""
    order = core_tasks.order(len(rows))[: args.limit]
    items = [rows[i] for i in order]
    # with fewer rows than examples nanochat stops (nanochat#550); here the result says so
    examples = min(task.shots, len(items) - 1)
    if examples < task.shots:
        info.print0(f"note: {task.label}: {examples} examples instead of {task.shots}")
    groups: list[list[Span]] = []
    cropped = clamped = 0
    eot = np.array([tokenizer.eot], dtype=np.uint16)
    quiet = None if info.rank == 0 else True
    for index, row in enumerate(
        tqdm(items, desc=f"{task.label}: prompts", leave=False, disable=quiet)
    ):
        shots = [items[j] for j in core_tasks.shot_indices(len(items), index, examples)]
        texts = core_tasks.render(task.kind, task.delimiter, row, shots)
        tokens = [np.concatenate((eot, ids)) for ids in tokenizer.encode_many(texts)]
        try:
            spans = core_tasks.spans(task.kind, tokens)
        except ValueError as error:
            raise UserError(f"{task.uri}, line {order[index] + 1}: {error}") from None
        cropped += any(len(span.ids) > args.max_length for span in spans)
        pairs = [core_tasks.crop(span, args.max_length) for span in spans]
        clamped += any(lost for _, lost in pairs)
        groups.append([span for span, _ in pairs])
    key = {
        "model": [subject.identity["model_sha256"], subject.identity["config_sha256"]],
        "yarn_factor": args.yarn_factor,
    }
    scored = score_all(
        model, groups, info=info, journal=journal, key=key, label=task.label, dtype=args.dtype
    )
    outcomes = [core_tasks.judge(task.kind, row, s) for row, s in zip(items, scored, strict=True)]
    accuracy = sum(o.correct for o in outcomes) / len(outcomes)
    return {
        "task": task.label,
        "kind": task.kind,
        "examples": examples,
        "items": len(items),
        "accuracy": accuracy,
        "baseline_percent": {"v1": task.v1, "v2": task.v2},
        "centered": {v: core_tasks.centered(accuracy, getattr(task, v)) for v in ("v1", "v2")},
        "tokens": sum(len(span.ids) for group in groups for span in group),
        "cropped": cropped,
        "clamped": clamped,
        "undecided": sum(o.undecided for o in outcomes),
        "file_sha256": sha256,
        "per_item": per_item(order, outcomes),
    }


def per_item(order: list[int], outcomes: list[Outcome]) -> dict[str, list]:
    """What a paired comparison needs, a list for each quantity: line says which item is which."""
    return {
        "line": [i + 1 for i in order],
        "correct": [o.correct for o in outcomes],
        "prediction": [o.prediction for o in outcomes],
        "gold": [o.gold for o in outcomes],
        "nll": [o.nll for o in outcomes],
    }


def file_name(args: Args, tasks: int) -> str:
    """ "core", or one that says what is not CORE about it, so that neither replaces the other."""
    parts = ["core"]
    parts += [] if tasks == len(TASKS) else [f"{tasks}_tasks"]
    parts += [] if args.max_length == MAX_LENGTH else [f"length_{args.max_length}"]
    parts += [] if args.limit is None else [f"limit_{args.limit}"]
    parts += [] if args.yarn_factor is None else [f"yarn_{args.yarn_factor:g}"]
    return "_".join(parts)


# -----------------------------------------------------------------------------
# the bundle


def public_bundle() -> Path:
    """The public bundle, fetched if it is not there. Raises UserError."""
    try:
        fetch(BUNDLE_URL, BUNDLE_PATH, sha256=BUNDLE_SHA256)
    except UserError as error:
        raise UserError(
            f"{error}, or get the file (sha256 {BUNDLE_SHA256}) elsewhere and name it with --bundle"
        ) from None
    return BUNDLE_PATH


def open_bundle(path: Path) -> Bundle:
    """The place where core.yaml and eval_data lie, in a folder or a zip, or one level below.

    A zip is read where it is and nothing of it is ever written, so no name in it can do harm.
    Raises UserError for what is neither.
    """
    root: Bundle = path
    if path.is_file():
        try:
            root = zipfile.Path(zipfile.ZipFile(path))
        except BAD_ZIP as error:
            raise UserError(
                f"{path}: not a zip, or a damaged one ({error}); get it again"
            ) from None
    for place in (root, root / "eval_bundle"):
        if any(is_file(place, uri) for task in TASKS for uri in ("core.yaml", task.uri)):
            return place
        if any(is_file(place, f"eval_data/{task.uri}") for task in TASKS):
            return place
    raise UserError(
        f"{path}: no bundle of CORE: neither core.yaml nor eval_data/{TASKS[0].uri} or another task"
    )


def is_file(bundle: Bundle, name: str) -> bool:
    return (bundle / name).is_file()


def read(bundle: Bundle, name: str) -> bytes:
    """A file of the bundle, which is there. Raises UserError for a damaged or an absurd one."""
    place = bundle / name
    try:
        with place.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except BAD_ZIP as error:
        raise UserError(f"{place}: cannot be read ({error}); get the bundle again") from None
    if len(data) > MAX_FILE:
        raise UserError(f"{place}: more than {MAX_FILE:,} bytes, which no file of CORE has")
    return data


def read_text(bundle: Bundle, name: str) -> str:
    try:
        return read(bundle, name).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{bundle / name}: not UTF-8 ({error}); get the bundle again") from None


def data_name(bundle: Bundle, task: Task) -> str:
    """Of a task's file; llm-foundry's local_data, where they come from, has no eval_data."""
    name = f"eval_data/{task.uri}"
    return name if is_file(bundle, name) else task.uri


def check_tables(bundle: Bundle) -> set[str] | None:
    """Compare core.yaml and eval_meta_data.csv with our table; gives back the labels that are in
    core.yaml, None if there is no such file.

    Raises UserError for a table that is damaged or says something else: that is another benchmark.
    """
    if not is_file(bundle, "core.yaml"):
        return None
    listed: set[str] = set()
    ours = {task.label: task for task in TASKS}
    where = bundle / "core.yaml"
    try:
        for entry in yaml.safe_load(read_text(bundle, "core.yaml"))["icl_tasks"]:
            task = ours.get(entry["label"])
            if task is None:
                raise UserError(f"{where}: {entry['label']!r} is none of the 22 tasks of CORE")
            listed.add(task.label)
            for field, wanted in (
                ("dataset_uri", task.uri),
                ("num_fewshot", [task.shots]),
                ("icl_task_type", KINDS[task.kind]),
                ("continuation_delimiter", task.delimiter),
            ):
                found = entry.get(field, core_tasks.SPACE if "delimiter" in field else None)
                if found != wanted:
                    raise UserError(
                        f"{where}: {task.label}: {field} is {found!r}, CORE has {wanted!r}"
                    )
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"{where}: damaged ({type(error).__name__}: {line})") from None

    where = bundle / "eval_meta_data.csv"
    if not is_file(bundle, "eval_meta_data.csv"):
        raise UserError(f"{where}: missing; get the bundle again")
    reader = csv.DictReader(io.StringIO(read_text(bundle, "eval_meta_data.csv")))
    try:
        for entry in reader:
            task = ours.get(entry["Eval Task"])  # it lists many more tasks than CORE has
            if task and float(entry["Random baseline"]) not in (task.v1, task.v2):
                raise UserError(
                    f"{where}, line {reader.line_num}: baseline {entry['Random baseline']} of"
                    f" {task.label}, CORE has {task.v1} (v1) or {task.v2} (v2)"
                )
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}, line {reader.line_num}: damaged ({error!r})") from None
    return listed


def choose(bundle: Bundle, listed: set[str] | None, wanted: str | None) -> list[Task]:
    """The tasks to evaluate, in the order of the table: those of --tasks, or all that are there.

    Raises UserError for a name that is none, and for a task that is asked for and not there.
    """
    there = [
        task
        for task in TASKS
        if (listed is None or task.label in listed) and is_file(bundle, data_name(bundle, task))
    ]
    if wanted is None:
        if not there:
            raise UserError(f"{bundle}: not one task's file is there; get the bundle again")
        return there
    labels = [label.strip() for label in wanted.split(",")]
    for label in labels:
        task = next((t for t in TASKS if t.label == label), None)
        if task is None:
            known = ", ".join(t.label for t in TASKS)
            raise UserError(f"--tasks {wanted}: {label!r} is none of {known}")
        if task not in there:
            raise UserError(f"--tasks {label}: {bundle / data_name(bundle, task)} is missing")
    return [task for task in there if task.label in labels]


def read_rows(bundle: Bundle, task: Task) -> tuple[list[dict[str, Any]], str]:
    """(rows, sha256 of the file). Raises UserError with file and line for one that is wrong."""
    name = data_name(bundle, task)
    data = read(bundle, name)
    # by bytes: other line separators of Unicode may stand inside a string
    lines = data.removesuffix(b"\n").split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            problem = f"not JSON in UTF-8 ({error})"
        else:
            problem = core_tasks.check_row(task.kind, row)
        if problem:
            raise UserError(f"{bundle / name}, line {number}: {problem}; get the bundle again")
        rows.append(row)
    return rows, hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    run_distributed(lambda: main(tyro.cli(Args, prog="python -m scripts.eval_core")))
