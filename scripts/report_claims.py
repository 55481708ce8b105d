"""What the comparison of runs says in words: the family of claims, and the one sentence on top.

docs/statistics.md says what is told and what is not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanorove import stats
from nanorove.figures import Effects
from nanorove.results import (
    Arm,
    Comparison,
    Key,
    Run,
    averaged,
    check_comparable,
    compare_arms,
    effect,
    make_arms,
    read_run,
    yarn_words,
)


@dataclass(frozen=True)
class Report:
    """What all parts of the report are made from."""

    runs: list[Run]
    arms: list[Arm]
    comparisons: list[Comparison]
    effects: Effects
    claims: "list[Said]"

    @property
    def unit(self) -> str:
        return self.runs[0].unit

    @property
    def context(self) -> int:
        return self.runs[0].context

    def mean(self, arm: Arm, key: Key) -> float | None:
        """What stands for an arm, see `averaged`; None if no run has the number."""
        runs = averaged(arm, self.arms, key)
        return float(np.mean([run.numbers[key].value for run in runs])) if runs else None

    def keys(self, evaluation: str, quantity: str | None = None) -> list[Key]:
        """Of all runs, in the order of the result files."""
        keys = dict.fromkeys(key for run in self.runs for key in run.numbers)
        return [k for k in keys if k.evaluation == evaluation and quantity in (None, k.quantity)]


def read_report(paths: Sequence[Path]) -> Report:
    """Read the runs and compare them. Raises UserError for what cannot be compared."""
    runs = [read_run(path) for path in paths]
    check_comparable(runs)
    arms = make_arms(runs)
    comparisons = compare_arms(arms)
    keys = dict.fromkeys(key for run in runs for key in run.numbers)
    effects = {
        (i, key): found
        for i, comparison in enumerate(comparisons)
        for key in keys
        if (found := effect(comparison, key)) is not None
    }
    report = Report(runs, arms, comparisons, effects, [])
    report.claims.extend(claim(report))
    return report


# -----------------------------------------------------------------------------
# claims


@dataclass(frozen=True)
class Said:
    """A claim of the family, by which comparison it is about and what it is about."""

    comparison: int
    kind: str
    """context, none, auto (at the longest length), ruler, core, loss."""
    key: Key
    verdict: stats.Verdict


def declared(report: Report) -> list[tuple[str, Key, dict[str, str]]]:
    """The family: (kind, number, its words). It is fixed here, before any number is seen, and
    depends only on what was evaluated: perplexity of the same last tokens at the training context
    and, without YaRN and with it fitted, at the longest length; RULER's average NLL; CORE; the
    validation loss."""
    last = report.keys("perplexity", "last")
    longest = max((key.length for key in last), default=0)
    found = []
    for kind, yarn, length in (
        ("context", "none", report.context),
        ("none", "none", longest),
        ("auto", "auto", longest),
    ):
        key = Key("perplexity", "last", yarn, length)
        # at the training context YaRN has nothing to fit, and once is enough
        if key in last and (kind == "context" or length != report.context):
            where = place(length, report)
            words = where if kind == "context" else f"{where} {yarn_words(yarn)}"
            found.append((kind, key, {"quantity": "perplexity", "where": words}))
    averages = [k for k in report.keys("ruler", "average nll") if k.task]
    if averages:
        key = next((k for k in averages if k.yarn == "auto"), averages[0])
        lengths = sorted({k.length for k in report.keys("ruler", "average nll") if k.length})
        at = join([f"{length:,}" for length in lengths])
        words = f"at {at} {report.unit}s {yarn_words(key.yarn)}"
        words = {"quantity": "RULER NLL per answer token", "where": words, "unit": "nats"}
        found.append(("ruler", key, words))
    cores = [k for k in report.keys("core") if not k.task and "baselines v2" not in k.quantity]
    if cores:
        key = min(cores, key=lambda k: k.quantity)  # "CORE" before its variants
        found.append(("core", key, {"quantity": key.quantity, "where": "", "unit": ""}))
    key = Key("training", "validation loss")
    if any(len(c.pairs) > 1 for c in report.comparisons):  # one seed has no spread to judge it by
        found.append(("loss", key, {"quantity": "validation loss", "where": "", "unit": "nats"}))
    return found


def claim(report: Report) -> list[Said]:
    """The verdicts on the whole family, all comparisons together."""
    family = [
        (i, kind, key, stats.Claim(comparison.second.label, per_seed=e.per_seed, **words))
        for i, comparison in enumerate(report.comparisons)
        for kind, key, words in declared(report)
        if (e := report.effects.get((i, key))) is not None
    ]
    verdicts = stats.judge([claim for *_, claim in family])
    return [Said(*said[:3], verdict) for said, verdict in zip(family, verdicts, strict=True)]


def claims_by_arm(report: Report) -> list[tuple[str, list[tuple[bool, str]]]]:
    """(heading, [(told, sentence)]) for each comparison."""
    found = []
    for i, c in enumerate(report.comparisons):
        said = [s.verdict for s in report.claims if s.comparison == i]
        lines = [(v.told, sentence_case(v.words()) + ".") for v in said]
        if lines:
            found.append((f"{c.second.label} against {c.first.label}", lines))
    return found


def answer(report: Report) -> str:
    """The one sentence on top, about the first comparison that there are lengths of: perplexity at
    the longest one, without YaRN and fitted to it, and at the training context."""
    if not report.comparisons:
        seeds = len(report.runs)
        what = "One run" if seeds == 1 else f"{seeds} seeds of one arm"
        return f"{what} ({report.arms[0].label}), so nothing to compare."
    lengths = ("context", "none", "auto")
    i = next((s.comparison for s in report.claims if s.kind in lengths), 0)
    comparison = report.comparisons[i]
    first, second = comparison.first.label, comparison.second.label
    said = {s.kind: s for s in report.claims if s.comparison == i and s.kind in lengths}
    if not said:
        a, b = (report.mean(arm, Key("training", "validation loss")) for arm in (
            comparison.first, comparison.second))  # fmt: skip
        if a is None or b is None:
            return "Nothing has been evaluated yet."
        return (
            f"The last validation loss is {b:.4f} with {second} and {a:.4f} with"
            f" {first}; no perplexity against length is there for both."
        )
    # seeds of which only some were evaluated are not spoken of in one breath with the others
    seeds = max(s.verdict.seeds for s in said.values())
    said = {kind: s for kind, s in said.items() if s.verdict.seeds == seeds}
    far = {kind: said[kind] for kind in ("none", "auto") if kind in said} or said
    verdicts = [s.verdict for s in far.values()]
    longest = next(iter(far.values())).key.length
    where = place(longest, report)
    ways = {direction(v) for v in verdicts}
    named = ""  # the YaRN setting, if the sentence begins with it
    few = [p.documents for v in verdicts for p in v.claim.per_seed]
    if ways == {""} and seeds == 1 and min(few) < stats.FEWEST_DOCUMENTS:
        lead = f"{min(few)} documents are too few to tell whether {second} beats {first} {where}"
    elif ways == {""}:
        lead = f"it cannot be told whether {second} beats {first} {where}"
    elif ways == {"lower", "higher"}:
        lead = f"whether {second} beats {first} {where} depends on YaRN"
    else:
        verb = "beats" if "lower" in ways else "does worse than"
        lead = f"{second} {verb} {first} {where}"
        told = [s.key.yarn for s in far.values() if s.verdict.told]
        if len(told) < len(far):
            named = yarn_words(told[0])
            lead += f" {named}"
    told_first = sorted(far.values(), key=lambda s: not s.verdict.told)
    words = [f"{clause(s.verdict)} {yarn_words(s.key.yarn)}" for s in told_first]
    found = ", and ".join(words)
    found = found.replace(f" {named}", "", 1) if named else found  # once is enough
    its = "its perplexity is "
    found = found.replace(f"and {its}", "and ") if found.startswith(its) else found
    sentence = f"{lead}: {found}"
    sentence += next((v.reserve for v in verdicts if v.reserve), "")
    if "context" in said and longest != report.context:
        sentence += f"; {place(report.context, report)} {clause(said['context'].verdict)}"
    if seeds == 1:
        sentence = f"{stats.scope(1)}, {sentence}"
    else:
        sentence += f" ({seeds} seeds of each)"
    if not comparison.same_seeds:
        a, b = comparison.pairs[0]
        sentence += f"; their seeds differ ({a.seed} and {b.seed}), which may be part of any difference"  # noqa: E501  # fmt: skip
    return sentence_case(sentence) + "."


def by_length(report: Report) -> list[str]:
    """Per comparison and YaRN setting at which lengths the perplexity of the same last tokens is
    lower, higher or neither: each interval by itself, which the family's claims are not."""
    keys = report.keys("perplexity", "last")
    found = []
    for i, comparison in enumerate(report.comparisons):
        for yarn in dict.fromkeys(key.yarn for key in keys):
            lengths: dict[str, list[str]] = {"lower": [], "higher": [], "neither": []}
            for key in keys:
                if key.yarn == yarn and (e := report.effects.get((i, key))) is not None:
                    way = "lower" if e.interval.value < 0 else "higher"
                    lengths[way if e.told else "neither"].append(f"{key.length:,}")
            parts = [f"{way} at {join(at)}" for way, at in lengths.items() if at]
            if parts:
                who = f"{comparison.second.label} against {comparison.first.label}"
                found.append(f"{who}, {yarn_words(yarn)}: {'; '.join(parts)}.")
    return found


def direction(verdict: stats.Verdict) -> str:
    """ "lower", "higher", or "" where no difference can be told."""
    return ("lower" if verdict.lower else "higher") if verdict.told else ""


def clause(verdict: stats.Verdict) -> str:
    """ "its perplexity is 41 % lower [35, 47]", or that nothing can be told."""
    if not verdict.told:
        known = verdict.difference.high < math.log(100)
        between = verdict.ends(verdict.difference) if known else ""
        return f"no difference in perplexity can be told{between}"
    amount, between = verdict.size()
    way = "as high" if verdict.is_factor else direction(verdict)
    return f"its perplexity is {amount} {way} {between}"


def place(length: int, report: Report) -> str:
    """ "at 4,096 bytes (16 times the training context)"."""
    times = length / report.context
    note = "the training context" if times == 1 else f"{times:g} times the training context"
    return f"at {length:,} {report.unit}s ({note})"


def missing_notes(report: Report) -> list[str]:
    """What is in no difference, and why: runs without a partner, evaluations that one of a pair
    does not have, and numbers whose items differ."""
    notes = []
    for i, c in enumerate(report.comparisons):
        who = f"{c.second.label} against {c.first.label}"
        paired = {run.path: run for pair in c.pairs for run in pair}
        runs = (*c.first.runs, *c.second.runs)
        if alone := [run.name for run in runs if run.path not in paired]:
            why = "without a partner of the same seed, so in no difference"
            notes.append(f"{who}: {why}: {', '.join(alone)}.")
        for name in dict.fromkeys(name for run in paired.values() for name in run.evaluations):
            without = [run.name for run in paired.values() if name not in run.evaluations]
            if without:
                notes.append(
                    f"{who}: without {name}, so in no difference of it, nor their partners:"
                    f" {', '.join(without)}."
                )
        unpaired = {
            key.evaluation: key
            for a, b in c.pairs
            for key in a.numbers.keys() & b.numbers.keys()
            if a.numbers[key].items is not None and (i, key) not in report.effects
        }
        for name in sorted(unpaired):
            notes.append(
                f"{who}: {name} has numbers that cannot be paired (other items, or a single one)."
            )
    return notes


def join(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


# -----------------------------------------------------------------------------
# numbers as text


def number(x: float) -> str:
    """A perplexity to three or four digits."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" if x >= 100 else f"{x:.{2 + (x < 10)}f}"


def shown(value: float, form: str) -> str:
    """A mean over seeds: form "ppl" of nats, else digits."""
    return number(math.exp(value)) if form == "ppl" else f"{value:.{form}f}"


def percent_digits(interval: stats.Interval) -> int:
    """Decimals of a difference in nats that is shown in per cent."""
    ends = (100 * math.expm1(min(x, 700)) for x in (interval.low, interval.high))
    return stats.decimals(*ends, told=interval.excludes_zero)


def signed(value: float, form: str, digits: int | None = None) -> str:
    """A difference: of perplexities in percent, else as it is; the minus is one."""
    if form == "ppl":
        percent = math.expm1(min(value, 700)) * 100
        if digits is None:
            digits = 0 if abs(percent) >= 10 else 1 if abs(percent) >= 1 else 2
        text = f"{percent:+,.{digits}f} %" if abs(percent) < 1e5 else f"{percent:+.0e} %"
    else:
        text = f"{value:+.{form}f}"
    if not text.strip("+-0. %"):
        text = text[1:]  # no sign before nothing
    return text.replace("-", "−")


def interval_text(interval: stats.Interval, form: str) -> str:
    """ "[−47 %, −35 %]", nothing if there is none (one seed without documents)."""
    if not np.isfinite([interval.low, interval.high]).all():
        return ""
    digits = percent_digits(interval)
    return f"[{signed(interval.low, form, digits)}, {signed(interval.high, form, digits)}]"
