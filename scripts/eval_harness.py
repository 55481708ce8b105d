"""
Tasks of EleutherAI's lm-evaluation-harness on our models:
    python -m scripts.eval_harness runs/gpt2_124m_rove --tasks lambada_openai,wikitext
    torchrun --nproc_per_node 8 -m scripts.eval_harness runs/gpt2_124m_rove --tasks hellaswag

The harness makes the prompts and the metrics; this file answers its three kinds of questions with
our scoring core. Its numbers are its own: prompts, splits and normalisation differ from those of
scripts.eval_core and scripts.eval_hellaswag, also where a task has the same name.
"""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

from data.tokenizer import EOT_TEXT, Tokenizer, recorded_tokenizer
from model import GPT
from nanorove.distributed import DistInfo, init_distributed, run_distributed
from nanorove.errors import UserError
from nanorove.evaluation import finish, header, open_output, open_subject, resumable, score_all
from nanorove.sampling import TextStream, generate
from nanorove.scoring import Scored, Span

VERSION = "0.4.13"  # of the harness
MAX_GEN_TOKS = 256  # the harness's default
SEED = 1234  # the harness's, of few-shot examples and sampling
BOOTSTRAPS = 1000  # for the standard error of metrics that are no means


@dataclass(frozen=True)
class Args:
    """Tasks of lm-evaluation-harness, with its prompts and metrics."""

    run: tyro.conf.Positional[Path]
    """A run folder (its last checkpoint), a step folder, or a folder with HuggingFace's GPT-2."""
    tasks: str
    """Names, with commas between: tasks, groups or tags of the harness or of --include-path."""
    include_path: Path | None = None
    """A folder with task files (YAML) of your own. They can name Python functions, which run."""
    limit: int | None = None
    """Only the first N items of each task."""
    num_fewshot: int | None = None
    """Examples in the prompt; default, and for tasks that fix it at 0: as the task says."""
    max_length: int | None = None
    """Tokens the model may see; longer prompts lose their beginning, and the result says how many
    did. Default: its context."""
    yarn_factor: float | None = None
    """Instead of the model's own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the transformer (bfloat16: autocast); head and loss are always float32."""
    out: Path | None = None
    """Result file; default: RUN/eval/harness_TASKS.json."""


def main(args: Args) -> dict[str, Any] | None:
    """Evaluate and write the result file; gives back its content, on rank 0 alone."""
    names = list(dict.fromkeys(name.strip() for name in args.tasks.split(",")))
    for option, least in (("limit", 1), ("num_fewshot", 0), ("max_length", 1)):
        if (value := getattr(args, option)) is not None and value < least:
            raise UserError(f"--{option.replace('_', '-')} {value}: at least {least}")
    evaluator = import_harness()
    subject = open_subject(args.run)
    tokenizer = recorded_tokenizer(subject.tokenizer, args.run)
    tasks, manager = load_tasks(names, args.include_path)

    info = init_distributed()
    name = "harness_" + "_".join(names)
    out, journal = open_output(subject, name, args.out, info=info, limit=args.limit)
    model = subject.load(max_len=args.max_length, yarn_factor=args.yarn_factor, device=info.device)
    settings = {
        "tasks": names,
        "limit": args.limit,
        "num_fewshot": args.num_fewshot,
        "max_length": model.max_len,
        "yarn_factor": model.config.yarn_factor,
        "harness": VERSION,
        "bootstraps": BOOTSTRAPS,
    }
    head = header("harness", subject, info, args.dtype)
    answers = Answers(model, tokenizer, args.dtype, info, journal, {"settings": settings} | head)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # it would fork the process that has the model
    # every rank asks all questions and hears all answers; score_all and resumable share the work
    found = evaluator.simple_evaluate(
        as_harness_model(answers),
        tasks=tasks,
        task_manager=manager,  # or it would read its thousands of task files again
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        bootstrap_iters=BOOTSTRAPS,
        fewshot_random_seed=SEED,
    )
    record = None
    if info.rank == 0:
        from lm_eval.utils import handle_non_serializable

        found = json.loads(json.dumps(found, default=handle_non_serializable))
        items = {name: [item_of(s) for s in found["samples"][name]] for name in found["samples"]}
        record = head | {
            "settings": settings,
            "seed": SEED,
            "protocol": {
                "bos": "End-of-text is given only to an empty context and to the first window of a"
                " rolled document, as the harness does for GPT-2",
                "truncation": "the last max_length + 1 tokens of context and continuation",
            },
            "data": {name: {"sha256": sha256_of_items(s)} for name, s in items.items()},
            "counts": {
                "items": {name: n["effective"] for name, n in found["n-samples"].items()},
                "of": {name: n["original"] for name, n in found["n-samples"].items()},
                "requests": answers.requests,
                "truncated": answers.truncated,
                "skipped": 0,
            },
            "num_fewshot": found["n-shot"],
            "task_versions": found["versions"],
            "higher_is_better": found["higher_is_better"],
            "results": found["results"],
            "groups": found.get("groups", {}),
            "items": items,
        }
        for name, metrics in record["results"].items():
            shown = [f"{key.removesuffix(',none')} {value:.4f}" for key, value in metrics.items()
                     if isinstance(value, float) and "stderr" not in key]  # fmt: skip
            print(f"{name}: {', '.join(shown)}")
    finish(out, record or {}, journal, info)
    return record


def import_harness() -> Any:
    """The module lm_eval.evaluator. Raises UserError if the harness is not installed."""
    try:
        import lm_eval
        from lm_eval import evaluator
    except ImportError as error:
        raise UserError(
            f"lm-evaluation-harness is not there ({error}): pip install lm-eval=={VERSION}"
        ) from None
    if lm_eval.__version__ != VERSION:
        raise UserError(
            f"lm-evaluation-harness {lm_eval.__version__}, but its answers and this file belong to"
            f" {VERSION}: pip install lm-eval=={VERSION}"
        )
    return evaluator


def load_tasks(names: list[str], include_path: Path | None) -> tuple[list[Any], Any]:
    """The harness's Task and Group objects, and its TaskManager.

    Raises UserError for a name that it does not know, for data that cannot be had, and for tasks
    that run the model's code or show pictures.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--include-path {include_path}: no such folder")
    manager = TaskManager(include_path=include_path)
    tasks = []
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"--tasks {name}: neither the harness nor --include-path has it")
        try:
            found = manager.load([name])
        except Exception as error:  # of whatever loads the data: libraries have no common class
            line = " ".join(str(error).split())
            raise UserError(f"--tasks {name}: cannot be loaded: {line[:300]}") from None
        for task in found["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise UserError(
                    f"--tasks {name}: runs the model's code or needs pictures; not here"
                )
        group = found["groups"].get(name)
        tasks += [group] if group is not None else found["tasks"].values()
    return tasks, manager


def item_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Of the harness's record of an item: which it was, what was answered, and its metrics."""
    keys = ("doc_id", "doc_hash", "prompt_hash", "target_hash", "filter", "filtered_resps")
    return {key: sample[key] for key in (*keys, *sample["metrics"])}


def sha256_of_items(items: Sequence[dict[str, Any]]) -> str:
    hashes = [[item[k] for k in ("doc_hash", "prompt_hash", "target_hash")] for item in items]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


# -----------------------------------------------------------------------------
# the three kinds of questions


@dataclass
class Answers:
    """What the harness asks, answered with token ids and text alone.

    `key` is everything that the answers depend on besides the questions.
    """

    model: GPT
    tokenizer: Tokenizer
    dtype: str
    info: DistInfo
    journal: Path
    key: dict[str, Any]
    requests: dict[str, int] = dataclasses.field(default_factory=dict)
    """How many of each kind there were."""
    truncated: dict[str, int] = dataclasses.field(default_factory=dict)
    """How many of them lost their beginning."""

    @property
    def max_length(self) -> int:
        return self.model.max_len

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    def loglikelihood(
        self, pairs: Sequence[tuple[tuple[str, str], list[int], list[int]]]
    ) -> list[tuple[float, bool]]:
        """((context, continuation), their token ids) -> (log-probability of the continuation in
        nats, is it what greedy decoding gives?), for each pair.

        Neighbours with one context are answered together. Raises UserError for a continuation
        that has no token of its own (its text is inside a token of the context's) or too many.
        """
        spans = []
        self.requests["loglikelihood"] = len(pairs)
        self.truncated["loglikelihood"] = 0
        for (context, continuation), before, after in pairs:
            if not 0 < len(after) <= self.max_length:
                raise UserError(
                    f"the continuation {continuation[:60]!r} of {context[-60:]!r} has {len(after)}"
                    f" tokens; 1 to {self.max_length} can be scored"
                )
            # a context of spaces alone went into the continuation; then it is empty, as far as
            # the model is concerned
            ids = (before or [self.tokenizer.eot]) + after
            self.truncated["loglikelihood"] += len(ids) > self.max_length + 1
            ids = np.array(ids[-(self.max_length + 1) :])
            spans.append(Span(ids, len(ids) - len(after), len(ids)))
        groups = itertools.groupby(range(len(pairs)), key=lambda i: pairs[i][1])
        groups = [[spans[i] for i in members] for _, members in groups]
        scored = itertools.chain.from_iterable(self._score(groups, "loglikelihood"))
        return [(-float(s.nll.sum()), bool(s.greedy.all())) for s in scored]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each whole text in nats, in windows of max_length.

        The windows do not overlap in what they score (lm-evaluation-harness#369); the first begins
        with end-of-text, the last reaches back to be full.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        groups = []
        for text in texts:
            windows = get_rolling_token_windows(
                self.encode(text), self.tokenizer.eot, self.max_length, context_len=1
            )
            group = []
            for before, after in map(make_disjoint_window, windows):
                ids = np.array(before + after)
                group.append(Span(ids, len(before), len(ids)))
            groups.append(group)
        self.requests["loglikelihood_rolling"] = len(texts)
        # windows share nothing: each is a unit of its own, so that long texts are spread as well
        scored = iter(
            self._score([[span] for group in groups for span in group], "loglikelihood_rolling")
        )
        return [-sum(float(next(scored)[0].nll.sum()) for _ in group) for group in groups]

    def _score(self, groups: list[list[Span]], label: str) -> list[list[Scored]]:
        return score_all(
            self.model,
            groups,
            info=self.info,
            journal=self.journal,
            key=self.key,
            label=label,
            dtype=self.dtype,
        )

    def generate(self, prompts: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """(prompt, the task's generation settings) -> the text that follows, up to the first of
        the stop strings. Prompts lose their beginning where prompt and answer do not fit.

        Raises UserError for a setting that is unknown here, and for an answer as long as the
        context.
        """
        jobs = [self._job(*prompt) for prompt in prompts]
        kept = [ids[-(self.max_length - job["max_new_tokens"]) :] for ids, job in jobs]
        self.requests["generate_until"] = len(jobs)
        self.truncated["generate_until"] = sum(
            len(k) < len(ids) for k, (ids, _) in zip(kept, jobs, strict=True)
        )
        asked = hashlib.sha256(
            repr([(k, job) for k, (_, job) in zip(kept, jobs, strict=True)]).encode()
        )
        return resumable(
            [len(k) + job["max_new_tokens"] for k, (_, job) in zip(kept, jobs, strict=True)],
            lambda i: self._continue(kept[i], **jobs[i][1], seed=SEED + i),
            info=self.info,
            journal=self.journal,
            key=self.key | {"prompts_sha256": asked.hexdigest()},
            label="generate_until",
        )

    def _job(self, prompt: str, options: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        options = normalize_gen_kwargs(options, MAX_GEN_TOKS)
        stop = handle_stop_sequences(options.pop("until", None), eos=EOT_TEXT)
        job = {
            "max_new_tokens": options.pop("max_gen_toks"),
            "stop": [s for s in stop if s],
            # 0 is greedy decoding, also where the task says do_sample: false
            "temperature": float(options.pop("temperature", options.pop("do_sample"))),
            "top_k": int(options.pop("top_k", 0)),
            "top_p": float(options.pop("top_p", 1.0)),
        }
        unknown = {k: v for k, v in options.items() if (k, v) not in NEUTRAL}
        if unknown:
            raise UserError(f"a task asks for generation with {unknown}, which is not known here")
        if not 0 < job["max_new_tokens"] < self.max_length:
            raise UserError(
                f"a task asks for {job['max_new_tokens']} new tokens, but prompt and answer have"
                f" {self.max_length} together: see --max-length"
            )
        return self.encode(prompt) or [self.tokenizer.eot], job

    def _continue(
        self, ids: list[int], *, max_new_tokens: int, stop: list[str], seed: int, **how: float
    ) -> str:
        stream = TextStream(self.tokenizer.decode, stop)
        with torch.autocast(
            self.info.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"
        ):
            for (token,) in generate(
                self.model,
                torch.tensor([ids]),
                max_new_tokens,
                eot=self.tokenizer.eot,
                generators=[torch.Generator().manual_seed(seed)],
                ended=lambda row: stream.stopped,
                **how,
            ):
                stream.push(token)
        stream.finish()
        return stream.text


# settings of HuggingFace's generate that change nothing at these values
NEUTRAL = (("num_beams", 1), ("repetition_penalty", 1.0), ("num_return_sequences", 1))


def as_harness_model(answers: Answers) -> Any:
    """An lm_eval LM that passes everything on to `answers`.

    TemplateLM moves the spaces at a context's end to the continuation and encodes both together
    (lm-evaluation-harness#63: tokens do not end where strings do).
    """
    from lm_eval.api.model import TemplateLM

    class NanoRoVE(TemplateLM):
        eot_token_id = answers.tokenizer.eot
        max_length = answers.max_length
        max_gen_toks = MAX_GEN_TOKS

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: object
        ) -> list[int]:
            return answers.encode(string)

        def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list:
            for request in requests:
                if request.args == ("", ""):
                    raise UserError(f"an item of {request.task_name} has neither context nor text")
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: list, **_: object) -> list[tuple[float, bool]]:
            return answers.loglikelihood(requests)

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
            return answers.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
            return answers.generate([request.args for request in requests])

    return NanoRoVE()


if __name__ == "__main__":
    run_distributed(lambda: main(tyro.cli(Args, prog="python -m scripts.eval_harness")))
