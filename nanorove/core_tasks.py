"""CORE (DCLM, arXiv 2406.11794) as nanochat runs it: 22 tasks, their prompts and what is scored.

No file, no model, no randomness but the two seeds that the procedure prescribes; docs/core.md says
where it departs from DCLM's own. scripts/eval_core.py puts a bundle and a model to it.

    MC  several continuations of one query; the one with the lowest mean NLL is the prediction
    SC  several contexts of one continuation; the same, over the continuation alone
    LM  one continuation; right if every token of it is the most likely one (greedy, teacher-forced)
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nanorove.scoring import Scored, Span

SHUFFLE_SEED = 1337  # of the rows of a file
SHOTS_SEED = 1234  # plus the index of the item after the shuffle
MAX_LENGTH = 1024  # tokens of a prompt; what GPT-2 can take, and what the headline is made with

Kind = Literal["MC", "SC", "LM"]
Row = dict[str, Any]

SPACE = " "
ANSWER = "\nAnswer: "


@dataclass(frozen=True)
class Task:
    """One of the 22. v1, v2: accuracy in percent that counts as nothing; rows: of the public file.

    v1 is nanochat's (and DCLM's before September 2025), v2 is DCLM's since. Three differ: the old
    ones are below what the commonest answer, or a guess among the choices, gives. boolq's 62 is
    that of the commonest answer on purpose (nanochat#349).
    """

    label: str
    folder: str
    kind: Kind
    shots: int
    delimiter: str
    v1: float
    v2: float
    rows: int
    file: str | None = None
    """Its name without .jsonl where that is not the label."""

    @property
    def uri(self) -> str:
        return f"{self.folder}/{self.file or self.label}.jsonl"


LANGUAGE, WORLD = "language_understanding", "world_knowledge"
SENSE, SYMBOLS = "commonsense_reasoning", "symbolic_problem_solving"
READING = "reading_comprehension"

TASKS = (
    Task("hellaswag_zeroshot", LANGUAGE, "MC", 0, SPACE, 25, 25, 10042, "hellaswag"),
    Task("jeopardy", WORLD, "LM", 10, ANSWER, 0, 0, 2117, "jeopardy_all"),
    Task("bigbench_qa_wikidata", WORLD, "LM", 10, SPACE, 0, 0, 20321),
    Task("arc_easy", WORLD, "MC", 10, ANSWER, 25, 25, 2376),
    Task("arc_challenge", WORLD, "MC", 10, ANSWER, 25, 25, 1172),
    Task("copa", SENSE, "MC", 0, SPACE, 50, 50, 100),
    Task("commonsense_qa", SENSE, "MC", 10, SPACE, 20, 40.3, 1221),
    Task("piqa", SENSE, "MC", 10, ANSWER, 50, 50, 1838),
    Task("openbook_qa", SENSE, "MC", 0, SPACE, 25, 25, 500),
    Task("lambada_openai", LANGUAGE, "LM", 0, SPACE, 0, 0, 5153),
    Task("hellaswag", LANGUAGE, "MC", 10, SPACE, 25, 25, 10042),
    Task("winograd", LANGUAGE, "SC", 0, SPACE, 50, 50, 273, "winograd_wsc"),
    Task("winogrande", LANGUAGE, "SC", 0, SPACE, 50, 50, 1267),
    Task("bigbench_dyck_languages", SYMBOLS, "LM", 10, SPACE, 0, 0, 1000),
    Task("agi_eval_lsat_ar", SYMBOLS, "MC", 3, SPACE, 20, 25, 230),
    Task("bigbench_cs_algorithms", SYMBOLS, "LM", 10, SPACE, 0, 0, 1320),
    Task("bigbench_operators", SYMBOLS, "LM", 10, SPACE, 0, 0, 210),
    Task("bigbench_repeat_copy_logic", SYMBOLS, "LM", 10, SPACE, 0, 0, 32),
    Task("squad", READING, "LM", 10, SPACE, 0, 0, 10570),
    Task("coqa", READING, "LM", 0, SPACE, 0, 0, 7983),
    Task("boolq", READING, "MC", 10, ANSWER, 62, 62, 3270),
    Task("bigbench_language_identification", LANGUAGE, "MC", 10, SPACE, 9.1, 25, 10000),
)

# -----------------------------------------------------------------------------
# rows

OPTIONS = {"MC": "choices", "SC": "context_options"}
SHARED = {"MC": "query", "SC": "continuation"}


def check_row(kind: Kind, row: Any) -> str | None:
    """What is wrong with a row of a file, in words; None if nothing is."""
    if not isinstance(row, dict):
        return f"{type(row).__name__} instead of an object"
    strings = ("context", "continuation") if kind == "LM" else (SHARED[kind],)
    for field in strings:
        if not isinstance(row.get(field), str):
            return f"{field!r} is missing or no string"
    if kind == "LM":
        return None if row["continuation"].strip() else "'continuation' is empty"
    options, gold = row.get(OPTIONS[kind]), row.get("gold")
    if not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        return f"{OPTIONS[kind]!r} is missing or no list of strings"
    if len(options) < 2:
        return f"{OPTIONS[kind]!r} has {len(options)} entries, at least 2 are needed to choose from"
    if type(gold) is not int or not 0 <= gold < len(options):
        return f"'gold' is {gold!r}, not an index into {len(options)} {OPTIONS[kind]}"
    return None


def order(n: int) -> list[int]:
    """Indices of n rows in the order in which they are evaluated."""
    indices = list(range(n))
    random.Random(SHUFFLE_SEED).shuffle(indices)
    return indices


def shot_indices(n: int, index: int, k: int) -> list[int]:
    """Which of n items (in evaluation order) are the k examples in front of item `index`.

    k is at most n - 1: an item is no example of itself. nanochat draws from a list of all other
    indices in ascending order, of which this is an equal without writing it out.
    """
    drawn = random.Random(SHOTS_SEED + index).sample(range(n - 1), k)
    return [j + (j >= index) for j in drawn]


# -----------------------------------------------------------------------------
# prompts


def render(kind: Kind, delimiter: str, row: Row, shots: Sequence[Row]) -> list[str]:
    """The texts of one item. MC, SC: one per option. LM: without and with the continuation.

    Nothing is stripped but what the procedure strips: a query of piqa ends in a newline, one of
    language_identification in a space.
    """
    examples = "".join(_example(kind, delimiter, shot) + "\n\n" for shot in shots)
    if kind == "MC":
        return [examples + row["query"] + delimiter + choice for choice in row["choices"]]
    if kind == "SC":
        tail = delimiter + row["continuation"]
        return [examples + context + tail for context in row["context_options"]]
    without = examples + row["context"].strip() + delimiter
    # a space at the end would be a token of its own there, and part of the next word here
    return [without.strip(), without + row["continuation"]]


def _example(kind: Kind, delimiter: str, row: Row) -> str:
    if kind == "MC":
        return row["query"] + delimiter + row["choices"][row["gold"]]
    if kind == "SC":
        return row["context_options"][row["gold"]] + delimiter + row["continuation"]
    return row["context"].strip() + delimiter + row["continuation"]


def spans(kind: Kind, tokens: Sequence[np.ndarray]) -> list[Span]:
    """What is scored in the texts of one item: one span per option, for LM a single one.

    tokens: of render()'s texts in order, end-of-text in front. MC: what follows the prefix that
    all options share (also where it reaches into the choices). SC: the suffix that all share.
    Raises ValueError for an LM text whose first tokens are not those without the continuation.
    """
    if kind == "LM":
        without, whole = tokens
        start = len(without)
        if start >= len(whole) or not np.array_equal(without, whole[:start]):
            raise ValueError("the tokens without the continuation are no prefix of those with it")
        return [Span(whole, start, len(whole))]
    if kind == "MC":
        start = common(tokens)
        return [Span(ids, start, len(ids)) for ids in tokens]
    length = common([ids[::-1] for ids in tokens])
    # end-of-text itself is never scored, though contexts that are equal share it, too
    return [Span(ids, max(1, len(ids) - length), len(ids)) for ids in tokens]


def common(tokens: Sequence[np.ndarray]) -> int:
    """How many tokens at the beginning are the same in all sequences."""
    n = min(map(len, tokens))
    same = np.all([ids[:n] == tokens[0][:n] for ids in tokens], axis=0)
    return n if same.all() else int(same.argmin())


def crop(span: Span, length: int) -> tuple[Span, bool]:
    """(the span in the last `length` tokens of its text, was any of it lost).

    End-of-text and the first examples are what falls off. The first token that is left is scored
    by nothing, so a span begins at 1 at the earliest.
    """
    cut = max(0, len(span.ids) - length)
    start = span.start - cut
    clamped = Span(span.ids[cut:], max(1, start), span.end - cut)
    return clamped, start < 1


# -----------------------------------------------------------------------------
# results


@dataclass(frozen=True)
class Outcome:
    """Of one item: nll is the mean over the scored tokens of each option, None for an empty span;
    prediction and gold are indices of options, None for LM."""

    correct: bool
    prediction: int | None
    gold: int | None
    nll: list[float | None]

    @property
    def undecided(self) -> bool:
        """Is the text of one option a beginning of another's, so that it has no NLL at all?"""
        return None in self.nll


def judge(kind: Kind, row: Row, scored: Sequence[Scored]) -> Outcome:
    """The outcome of one item, `scored` in the order of its spans.

    The first of equal options is taken, and option 0 if an option has nothing to score: in
    nanochat its NLL is NaN, which of two options always leaves the first.
    """
    nll = [math.fsum(s.nll) / len(s.nll) if len(s.nll) else None for s in scored]
    if kind == "LM":
        return Outcome(bool(scored[0].greedy.all()), None, None, nll)
    prediction = 0 if None in nll else min(range(len(nll)), key=nll.__getitem__)
    return Outcome(prediction == row["gold"], prediction, row["gold"], nll)


def centered(accuracy: float, baseline: float) -> float:
    """Accuracy (0 to 1) on a scale where `baseline` (percent) is 0 and 1 is 1; may be negative."""
    b = baseline / 100
    return (accuracy - b) / (1 - b)


def name_of(tasks: int, *, whole: bool, limit: int | None, length: int) -> str:
    """What a result may be called: "CORE" is all 22 tasks, whole and with prompts of 1,024 tokens.

    tasks: how many; whole: is every file as long as the public one; limit: items per task.
    """
    name = "CORE" if tasks == len(TASKS) else f"CORE-{tasks}"
    if length != MAX_LENGTH:
        name = f"{'long' if length > MAX_LENGTH else 'short'}-prompt {name} ({length} tokens)"
    if limit is not None:
        name += f", at most {limit} items per task"
    return name if whole else f"{name}, on other data"
