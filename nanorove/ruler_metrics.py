"""RULER (arXiv 2404.06654): its tasks, what their answers look like, how they are scored.

No model in here: strings and numbers alone. docs/ruler.md says what is measured and why.
"""

import re
from collections.abc import Sequence
from typing import Any

# the 13 tasks, in the categories that results are told in
CATEGORIES = {
    "niah": (
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1",
        "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery",
    ),
    "vt": ("vt",),
    "cwe": ("cwe",),
    "fwe": ("fwe",),
    "qa": ("qa_1", "qa_2"),
}  # fmt: skip
TASKS = tuple(task for tasks in CATEGORIES.values() for task in tasks)

# several answers, in an order that the prompt does not ask for
ANY_ORDER = ("niah_multivalue", "niah_multiquery", "cwe")
MEASURES = ("nll", "exact", "first", "order_free", "prefix_only", "shuffled", "generation")


def answers(task: str, outputs: Sequence[str]) -> list[str]:
    """What follows the prompt if the model is right; each string begins with a space.

    One string with all outputs, in their order, in the format that the prompt asks for; for
    question answering each reference alone, every one once.
    """
    if task.startswith("qa_"):
        return [f" {output}" for output in dict.fromkeys(outputs)]
    if task == "cwe":
        return ["".join(f" {i}. {word}" for i, word in enumerate(outputs, 1))]
    if task.startswith("niah_"):
        return [" " + ", ".join(outputs)]
    return [" " + " ".join(outputs)]  # vt, fwe


def single_answers(task: str, outputs: Sequence[str]) -> list[str]:
    """Each output alone, as if it were the first of the answer: no order is asked for."""
    return [answers(task, [output])[0] for output in outputs]


def derangement(n: int) -> list[int] | None:
    """For each of n samples another one whose answers it borrows; None if there is no other.

    Half way round: neighbours may be questions about one article, with one answer.
    """
    return [(i + max(1, n // 2)) % n for i in range(n)] if n > 1 else None


# -----------------------------------------------------------------------------
# generated text, by the benchmark's own rules


def post_process(prediction: str) -> str:
    """What RULER compares: control characters become newlines, both ends are stripped."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def match_all(prediction: str, references: Sequence[str]) -> float:
    """The fraction of references that stand in the prediction, whatever their case.

    Raises ValueError for a string in place of the list of references: it would be taken letter by
    letter, and most letters are found (NVIDIA/RULER#30).
    """
    found = _found(prediction, references)
    return sum(found) / len(found)


def match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if any of the references stands in the prediction, else 0. Raises ValueError as above."""
    return float(any(_found(prediction, references)))


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    if isinstance(references, str) or not isinstance(prediction, str) or not references:
        raise ValueError(
            f"one prediction and a list of references are compared, not {type(prediction).__name__}"
            f" and {type(references).__name__} {references!r}"
        )
    return [reference.lower() in prediction.lower() for reference in references]


MATCH = {"all": match_all, "part": match_part}


# -----------------------------------------------------------------------------
# from samples to tasks to categories


def summarise_task(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The samples of one task -> its numbers; a measure that no sample has is None.

    nll: mean over samples of the mean NLL per answer token, in nats (first, prefix_only, shuffled:
    likewise; order_free is a mean per token already); token_nll: all NLL by all tokens; exact: the
    part of samples whose every answer token is the likeliest one; generation: 0 to 100.
    """
    scored = [s for s in samples if s["nll"] is not None]
    nll, tokens = sum(s["nll"] for s in scored), sum(s["tokens"] for s in scored)

    def per_token(key: str) -> float | None:
        return _mean([s[key]["nll"] / s[key]["tokens"] for s in samples if s.get(key)])

    generated = [s["score"] for s in samples if "score" in s]
    summary = {
        "samples": len(samples),
        "scored": len(scored),
        "nll": _mean([s["nll"] / s["tokens"] for s in scored]),
        "token_nll": nll / tokens if scored else None,
        "sum_nll": nll,
        "tokens": tokens,
        "exact": _mean([float(s["exact"]) for s in scored]),
        "first": per_token("first"),
        "order_free": _mean([s["order_free"] for s in samples if s.get("order_free") is not None]),
        "prefix_only": per_token("prefix_only"),
        "shuffled": per_token("shuffled"),
        "generation": round(100 * _mean(generated), 2) if generated else None,
    }
    if generated:  # a zero is to be looked into before it is believed (NVIDIA/RULER#3)
        summary["empty_predictions"] = sum(not post_process(s["prediction"]) for s in samples)
    return summary


def combine(tasks: dict[str, dict[str, Any]], wanted: Sequence[str]) -> dict[str, Any]:
    """The unweighted mean over those of the `wanted` tasks that there are, and how many these are.

    A task is there if it has an NLL. A measure that one of these lacks (`first` is of questions
    alone) is None: never a mean over other tasks than the NLL is of.
    """
    there = [task for task in wanted if tasks.get(task, {}).get("nll") is not None]
    result: dict[str, Any] = {
        "tasks": len(there),
        "of": len(wanted),
        "missing": [task for task in wanted if task not in there],
    }
    for measure in MEASURES:
        values = [tasks[task][measure] for task in there]
        result[measure] = _mean(values) if None not in values else None
    return result


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
