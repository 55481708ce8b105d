"""Compare trained runs on one page: perplexity beyond the context, RULER, CORE, loss, cost.

    python -m scripts.report runs/demo_rope runs/demo_rove --out runs/demo

Runs that differ in the seed alone are one arm; the first arm is the baseline. Writes report.html
(one file, nothing else to load), report.md, the figures as PNG and every number as CSV. Every
sentence is made from the numbers, whichever way they point.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
import tyro

from nanorove import figures, stats
from nanorove.errors import UserError, run_cli
from nanorove.figures import Effects, Panel
from nanorove.files import write_text_atomic
from nanorove.results import (
    PAPER_CATEGORIES,
    Arm,
    Comparison,
    Effect,
    Key,
    Run,
    check_comparable,
    compare_arms,
    differing_keys,
    effect,
    make_arms,
    read_run,
    yarn_words,
)
from nanorove.ruler_metrics import CATEGORIES, TASKS

COMPARED = (
    "Of all settings, torch version, device, processes, threads and code revision, the runs differ"
    " in these alone; data and number of steps are the same"
)
QUANTITIES = {
    "last": "Same last tokens",
    "disjoint": "Disjoint windows",
    "sliding": "Sliding windows",
}
PERPLEXITIES = {"perplexity": "", "perplexity_packed": ", packed stream"}

# what the RoVE paper reports, arXiv 2606.11275, known to us from second-hand notes: CORE,
# perplexity by length, RULER's NLL at 4k by category and its average over 4k and 8k
PAPER = {
    ("124M", "rope", False): {"CORE": 0.1375, 512: 25.23, 1024: 22.37},
    ("124M", "rove", False): {"CORE": 0.1416, 512: 25.05, 1024: 22.30},
    ("354M", "rope", False): {"CORE": 0.1664, 512: 17.68, 1024: 15.64,
                              2048: 293.24, 4096: 840.10, 8192: 1412.76, 16384: 1630.72},
    ("354M", "rove", False): {"CORE": 0.1856, 512: 17.52, 1024: 15.52,
                              2048: 133.68, 4096: 311.38, 8192: 458.15, 16384: 583.84},
    ("354M", "rope", True): {2048: 16.05, 4096: 48.61, 8192: 154.61, 16384: 270.98,
                             "cwe": 4.31, "niah": 7.61, "qa": 6.40, "vt": 4.53, "average": 6.62},
    ("354M", "rove", True): {2048: 15.78, 4096: 18.40, 8192: 35.95, 16384: 124.82,
                             "cwe": 4.39, "niah": 3.63, "qa": 5.61, "vt": 2.11, "average": 4.33},
}  # fmt: skip
SHAPES = {(12, 12, 768): "124M", (24, 16, 1024): "354M"}  # n_layer, n_head, n_embd
PAPER_CONTEXT = 1024
PAPER_RULER = [4096, 8192]

OPEN = [
    "What we know of the paper (arXiv 2606.11275) are second-hand notes; its code could not be read"
    " by us. Known: GPT-2's shapes, RoPE with base 10,000 over the whole head, context 1,024, one"
    " epoch of FineWebEdu-10B, DCLM CORE, YaRN applied at evaluation to the same checkpoints.",
    "Optimiser: not known. The 124M and 354M configs follow the public GPT-2 124M reproduction:"
    " 524,288 tokens per step, AdamW 0.9/0.95, weight decay 0.1 on matrices, peak 6e-4 (124M) or"
    " 3e-4 (354M), 715 steps of warm-up, cosine to a tenth, clipping at 1.",
    "YaRN's factor: not known, one for all lengths or length / 1,024 for each. Both can be"
    " evaluated, and stand beside the same numbers of the paper.",
    "Perplexity: text and windows are not known. Assumed in the paper's tables here: disjoint"
    " windows over long held-out documents. Our claims are about the same last tokens at every"
    " length, where nothing but the context changes.",
    "RULER: number of samples, form of the answers and the average are not known. Here an answer's"
    " NLL is a mean over its tokens, then over samples, then over the tasks of a category; the"
    " average in the paper's table is assumed to be over its four categories and both lengths.",
    "CORE: which baselines and prompt lengths is not known. Here nanochat's (v1), prompts of at"
    " most 1,024 tokens.",
    "Seeds: the paper's numbers come to us without a spread, so that nothing can be said of theirs"
    " against ours but the size.",
]


@dataclass(frozen=True)
class Args:
    """Compare runs: report.html, report.md, PNG figures and CSV tables in one folder."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders; the first one's arm is what the others are compared with."""
    out: Path
    """Folder for the report."""
    title: str = "RoVE or RoPE?"


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

    def keys(self, evaluation: str, quantity: str | None = None) -> list[Key]:
        """Of all runs, in the order of the result files."""
        keys = dict.fromkeys(key for run in self.runs for key in run.numbers)
        return [k for k in keys if k.evaluation == evaluation and quantity in (None, k.quantity)]


def main(args: Args) -> Path:
    """Write the report of args.runs into args.out; returns the path of report.html."""
    if not args.runs:
        raise UserError("no runs: name at least one run folder, e.g. runs/demo_rope")
    if len({path.resolve() for path in args.runs}) < len(args.runs):
        raise UserError("the same run is given twice; name each run folder once")
    report = read_report(args.runs)
    args.out.mkdir(parents=True, exist_ok=True)
    page = make_page(report, args.title) | {"figures": draw(report, args.out)}
    jinja = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    jinja.filters["unbroken"] = lambda text: text.replace(" %", "\u00a0%")
    template = Path(__file__).with_name("report_template.html").read_text(encoding="utf-8")
    for name, lines in csv_tables(report).items():
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(lines)
        write_text_atomic(args.out / f"{name}.csv", buffer.getvalue())
    write_text_atomic(args.out / "report.md", to_markdown(page))
    write_text_atomic(args.out / "report.html", jinja.from_string(template).render(page))
    print_table(page)
    print(f"\n{page['answer']}\nreport: {args.out / 'report.html'}")
    return args.out / "report.html"


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


def make_page(report: Report, title: str) -> dict[str, Any]:
    """What the HTML and the Markdown show, but for the figures."""
    return {
        "title": title,
        "answer": answer(report),
        "claims": claims_by_arm(report),
        "correction": stats.correction([c.verdict for c in report.claims]) if report.claims else "",
        "one_seed": all(len(c.pairs) == 1 for c in report.comparisons),
        "notes": seed_notes(report),
        "cards": cards(report),
        "paper": paper_tables(report),
        "paper_scale": paper_scale(report.arms[0]),
        "differing": differing_keys(report.arms),
        "compared": COMPARED,
        "runs": report.runs,
        "arms": report.arms,
        "comparisons": report.comparisons,
        "unit": report.unit,
        "tables": perplexity_tables(report),
        "ruler": ruler_tables(report),
        "ruler_notes": ruler_notes(report),
        "core": core_table(report),
        "hellaswag": hellaswag_table(report),
        "samples": samples(report),
        "cost": cost_table(report),
        "made": made_table(report),
        "trained": run_table(report),
        "protocol": protocol(report),
        "open": OPEN,
        "not_evaluated": [r for r in report.runs if "perplexity" not in r.evaluations],
        "losses": any(run.metrics for run in report.runs),
        "same_seeds": all(c.same_seeds for c in report.comparisons),
    }


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
    """The one sentence on top, about the second arm: perplexity at the longest length, without
    YaRN and fitted to it, and at the training context."""
    if not report.comparisons:
        seeds = len(report.runs)
        what = "One run" if seeds == 1 else f"{seeds} seeds of one arm"
        return f"{what} ({report.arms[0].label}), so nothing to compare."
    comparison = report.comparisons[0]
    first, second = comparison.first.label, comparison.second.label
    said = {s.kind: s for s in report.claims if s.comparison == 0}
    far = {kind: said[kind] for kind in ("none", "auto") if kind in said}
    if not far and "context" in said:
        far = {"none": said["context"]}
    if not far:
        a, b = (arm.values(Key("training", "validation loss")) for arm in (
            comparison.first, comparison.second))  # fmt: skip
        if not a or not b:
            return "Nothing has been evaluated yet."
        return (
            f"The last validation loss is {np.mean(b):.4f} with {second} and {np.mean(a):.4f} with"
            f" {first}; perplexity against length has not been evaluated."
        )
    verdicts = [s.verdict for s in far.values()]
    longest, seeds = next(iter(far.values())).key.length, verdicts[0].seeds
    where = "beyond" if longest > report.context else "at"
    where = "below" if longest < report.context else where
    where += " the training context"
    ways = {direction(v) for v in verdicts}
    verb = {"lower": "beats", "higher": "does worse than", "": "does not beat"}
    few = [p.documents for v in verdicts for p in v.claim.per_seed]
    if ways == {""} and seeds == 1 and min(few) < stats.FEWEST_DOCUMENTS:
        lead = f"{min(few)} documents are too few to tell whether {second} beats {first} {where}"
    elif ways == {""}:
        lead = f"it cannot be told whether {second} beats {first} {where}"
    elif len(ways) == 1:
        lead = f"{second} {verb[ways.pop()]} {first} {where}"
    else:
        lead = f"whether {second} beats {first} {where} depends on YaRN"
    found = ", ".join(f"{clause(s.verdict)} {yarn_words(s.key.yarn)}" for s in far.values())
    its = "its perplexity is "
    found = found.replace(f", {its}", ", ") if found.startswith(its) else found  # once is enough
    sentence = f"{lead}: {place(longest, report)} {found}"
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


def direction(verdict: stats.Verdict) -> str:
    """ "lower", "higher", or "" where no difference can be told."""
    if not verdict.told:
        return ""
    return "lower" if verdict.difference.value < 0 else "higher"


def clause(verdict: stats.Verdict) -> str:
    """ "its perplexity is 41 % lower [35, 47]", or that nothing can be told."""
    ratio, interval = verdict.difference.exp(), verdict.difference
    if not verdict.told:
        known = np.isfinite([interval.low, interval.high]).all() and interval.high < math.log(100)
        between = f" {interval_text(interval, 'ppl')}" if known else ""
        return f"no difference in perplexity can be told{between}"
    if ratio.value >= 2:
        times = f"{ratio.value:.3g} times as high"
        return f"its perplexity is {times} [{ratio.low:.3g}, {ratio.high:.3g}]"
    digits = percent_digits(interval)
    value, *ends = (abs(100 * (x - 1)) for x in (ratio.value, ratio.low, ratio.high))
    between = ", ".join(f"{x:.{digits}f}" for x in sorted(ends))
    return f"its perplexity is {value:.{digits}f} % {direction(verdict)} [{between}]"


def place(length: int, report: Report) -> str:
    """ "at 4,096 bytes (16 times the training context)"."""
    times = length / report.context
    note = "the training context" if times == 1 else f"{times:g} times the training context"
    return f"at {length:,} {report.unit}s ({note})"


def seed_notes(report: Report) -> list[str]:
    """Which runs have no partner."""
    notes = []
    for c in report.comparisons:
        paired = {run.path for pair in c.pairs for run in pair}
        alone = [run.name for run in (*c.first.runs, *c.second.runs) if run.path not in paired]
        if alone:
            notes.append(
                f"{c.second.label} against {c.first.label}: without a partner of the same seed, so"
                f" in no difference: {', '.join(alone)}."
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
    """Decimals that say something beside the interval's half width, two at most."""
    half = 50 * (math.exp(min(interval.high, 700)) - math.exp(interval.low))
    return min(2, max(0, -math.floor(math.log10(half / 2)))) if half else 2


def signed(value: float, form: str, digits: int | None = None) -> str:
    """A difference: of perplexities in percent, else as it is; the minus is one."""
    if form == "ppl":
        percent = math.expm1(min(value, 700)) * 100
        if digits is None:
            digits = 0 if abs(percent) >= 10 else 1 if abs(percent) >= 1 else 2
        text = f"{percent:+,.{digits}f} %" if abs(percent) < 1e5 else f"{percent:+.0e} %"
    else:
        text = f"{value:+.{form}f}"
    return text.replace("-", "−")


def interval_text(interval: stats.Interval, form: str) -> str:
    """ "[−47 %, −35 %]", nothing if there is none (one seed without documents)."""
    if not np.isfinite([interval.low, interval.high]).all():
        return ""
    digits = percent_digits(interval)
    return f"[{signed(interval.low, form, digits)}, {signed(interval.high, form, digits)}]"


def value_cell(arm: Arm, key: Key, form: str) -> dict[str, str]:
    """The mean over an arm's seeds; its note has each of them."""
    runs = [(run, run.numbers[key]) for run in arm.runs if key in run.numbers]
    values = [(run, n.value) for run, n in runs if n.value is not None]
    if values:
        note = "; ".join(f"seed {run.seed}: {shown(v, form)}" for run, v in values)
        return {"text": shown(float(np.mean([v for _, v in values])), form), "note": note}
    if runs:
        return {"text": "n/a", "note": runs[0][1].reason}
    return {"text": "–", "note": "not evaluated"}


def change_cell(
    found: Effect | None, comparison: Comparison, form: str, higher_is_better: bool
) -> dict[str, str]:
    """Second against first with the 95 % interval, and whose colour it has."""
    if found is None:
        return {"text": "–", "interval": "", "better": ""}
    better = ""
    if found.told:
        second_is_better = (found.interval.value > 0) == higher_is_better
        better = (comparison.second if second_is_better else comparison.first).pos_emb
    return {
        "text": signed(found.interval.value, form, percent_digits(found.interval)),
        "interval": interval_text(found.interval, form),
        "better": better,
    }


def make_table(
    report: Report,
    heads: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Key]],
    form: str,
    *,
    higher_is_better: bool = False,
) -> dict[str, Any] | None:
    """A table of numbers for HTML, Markdown and the terminal alike: leading columns, a mean per
    arm, and each arm against the first. None without rows."""
    lines = []
    for leads, key in rows:
        changes = [
            change_cell(report.effects.get((i, key)), c, form, higher_is_better)
            for i, c in enumerate(report.comparisons)
        ]
        lines.append(
            {
                "leads": list(leads),
                "trained": key.evaluation in PERPLEXITIES and key.length == report.context,
                "cells": [value_cell(arm, key, form) for arm in report.arms],
                "changes": changes,
            }
        )
    return {"heads": list(heads), "lines": lines} if lines else None


# -----------------------------------------------------------------------------
# tables


def perplexity_tables(report: Report) -> dict[str, dict[str, Any]]:
    """{title: table} of every quantity that was evaluated, the headline first."""
    tables = {}
    for evaluation, where in PERPLEXITIES.items():
        for quantity, title in QUANTITIES.items():
            rows = [
                ([key.yarn, f"{key.length:,}", f"{key.length / report.context:g}×"], key)
                for key in report.keys(evaluation, quantity)
            ]
            table = make_table(report, ["YaRN", f"{report.unit}s", "context"], rows, "ppl")
            if table:
                tables[title + where] = table
    return tables


def ruler_tables(report: Report) -> dict[str, dict[str, Any]]:
    """By category, and by task."""
    order = [*CATEGORIES, ""]  # "" is the average of a length
    averages = report.keys("ruler", "average nll")
    if len({key.length for key in averages}) == 2:  # one length, and all of them
        averages = [key for key in averages if key.length]
    keys = report.keys("ruler", "category nll") + averages
    yarns = [key.yarn for key in keys]
    keys.sort(
        key=lambda k: (yarns.index(k.yarn), k.length or math.inf, k.length and order.index(k.task))
    )
    heads = ["YaRN", f"{report.unit}s"]
    rows = [
        (
            [
                key.yarn,
                f"{key.length:,}" if key.length else "all",
                category_label(report, key.task) if key.quantity == "category nll" else "average",
            ],
            key,
        )
        for key in keys
    ]
    by_task = [([k.yarn, f"{k.length:,}", k.task], k) for k in report.keys("ruler", "nll")]
    control = [(leads, k._replace(quantity="prefix_only")) for leads, k in by_task]
    control = [(leads, k) for leads, k in control if any(arm.values(k) for arm in report.arms)]
    tables = {
        "By category": make_table(report, [*heads, "category"], rows, "3"),
        "By task": make_table(report, [*heads, "task"], by_task, "3"),
        "Control: the same answers without the context": make_table(
            report, [*heads, "task"], control, "3"
        ),
    }
    return {title: table for title, table in tables.items() if table}


def category_label(report: Report, category: str) -> str:
    """ "NIAH", or "NIAH (2 of 8 tasks)"."""
    there, of = category_tasks(report, category)
    return category.upper() + ("" if len(there) == of else f" ({len(there)} of {of} tasks)")


def category_tasks(report: Report, category: str) -> tuple[list[str], int]:
    """(its tasks that have a number at every length, how many it has)."""
    members = CATEGORIES[category]
    keys = report.keys("ruler", "nll")
    lengths = {k.length for k in keys}
    there = [t for t in members if {k.length for k in keys if k.task == t} == lengths]
    return there, len(members)


def ruler_notes(report: Report) -> list[str]:
    """What is missing of RULER's 13 tasks, and what the numbers are."""
    keys = report.keys("ruler", "nll")
    if not keys:
        return []
    notes, absent = [], []
    for category, members in CATEGORIES.items():
        there, of = category_tasks(report, category)
        missing = [task for task in members if task not in there]
        if not there:
            absent.append(category.upper())
        elif missing:
            notes.append(
                f"{category.upper()} is the mean of {len(there)} of its {of} tasks; missing:"
                f" {', '.join(missing)}."
            )
    if absent:
        notes.append(f"Without a task: {', '.join(absent)}.")
    count = sum(len(category_tasks(report, c)[0]) for c in CATEGORIES)
    return [
        "Nats per token of the reference answer: the mean over its tokens, then over samples, then"
        f" over the tasks of a category. The average is over the {count} of RULER's {len(TASKS)}"
        " tasks that there are, and over lengths where it says all. A model that finds the answer"
        " is far below the control.",
        *notes,
    ]


def core_table(report: Report) -> dict[str, Any] | None:
    """CORE and its tasks, centered accuracies."""
    keys = [k for k in report.keys("core") if not k.quantity.endswith(" accuracy")]
    rows = [([k.task or k.quantity, f"{k.length:,}", k.yarn or "–"], k) for k in keys]
    heads = ["task, centered accuracy", "prompt, at most", "YaRN"]
    return make_table(report, heads, rows, "4", higher_is_better=True)


def hellaswag_table(report: Report) -> dict[str, Any] | None:
    rows = [([k.quantity], k) for k in report.keys("hellaswag")]
    return make_table(report, ["accuracy"], rows, "4", higher_is_better=True)


def cards(report: Report) -> list[tuple[str, list[str]]]:
    """(title, a value per arm) of the few numbers to see first: those of the claims."""
    found = []
    for kind, key, words in declared(report):
        form = "ppl" if "unit" not in words else {"ruler": "3"}.get(kind, "4")
        title = words["quantity"]
        if key.length and form == "ppl":
            title = f"Perplexity at {key.length:,} ({key.length / report.context:g}×)"
            title += f", YaRN {key.yarn}" if kind != "context" else ""
        elif kind == "ruler":
            title = f"RULER, nats per answer token, YaRN {key.yarn}"
        found.append((sentence_case(title), key, form))
    if not any(key.evaluation == "training" for _, key, _ in found):
        found.append(("Validation loss", Key("training", "validation loss"), "4"))
    return [
        (title, [value_cell(arm, key, form)["text"] for arm in report.arms])
        for title, key, form in found
        if any(arm.values(key) for arm in report.arms)
    ]


def show(value: Any, form: str = "") -> str:
    return "–" if value is None else format(value, form)


def cost_table(report: Report) -> list[tuple[str, list[str]]]:
    """What training took: medians over the lines of the log and the peak of the memory, then the
    median over seeds."""

    def metric(quantity: str, form: str) -> tuple[str, list[str]]:
        cells = []
        for arm in report.arms:
            values = arm.values(Key("training", quantity))
            text = format(np.median(values), form) if values else "–"
            if len(values) > 1:
                text += f" ({min(values):{form}} to {max(values):{form}})"
            cells.append(text)
        return quantity, cells

    def fact(name: str, form: str = "") -> list[str]:
        return [same(show(run.meta.get(name), form) for run in arm.runs) for arm in report.arms]

    processes, threads = fact("world_size"), fact("threads")
    return [
        metric("tokens per second", ",.0f"),
        metric("milliseconds per step", ",.0f"),
        metric("peak memory, GiB", ".2f"),
        ("parameters", fact("params", ",")),
        ("device", fact("device")),
        ("processes × threads",
         [f"{p} × {t}" for p, t in zip(processes, threads, strict=True)]),
    ]  # fmt: skip


def same(values: Iterable[str]) -> str:
    """What an arm's runs have in common, or all of it."""
    return ", ".join(dict.fromkeys(values))


def made_table(report: Report) -> list[tuple[str, list[str]]]:
    """How the arms came about, from what their runs recorded themselves."""

    def versions(run: Run) -> str:
        return ", ".join(f"{k} {v}" for k, v in run.meta.get("versions", {}).items()) or "–"

    def row(name: str, of: Any) -> tuple[str, list[str]]:
        return name, [same(of(run) for run in arm.runs) for arm in report.arms]

    def data(run: Run) -> dict[str, Any]:
        return run.checkpoint.get("data", {})

    def evaluated_on(run: Run) -> str:
        return same(show(e.get("device")) for e in run.evaluations.values()) or "–"

    return [
        row("seeds", lambda run: show(run.seed)),
        row("steps", lambda run: show(run.checkpoint.get("step"), ",")),
        row("tokens seen", lambda run: show(run.last("tokens"), ",")),
        row("data", lambda run: show(run.config.get("data", {}).get("dir"))),
        row("data manifest, sha256", lambda run: show(data(run).get("manifest_sha256"))[:16]),
        row("tokenizer", lambda run: show(run.tokenizer)),
        row("evaluated on", evaluated_on),
        row("code revision", lambda run: run.revision),
        row("versions", versions),
    ]


def run_table(report: Report) -> list[list[str]]:
    """Head and a line per run."""
    lines = [["run", "arm", "seed", "validation loss", "weights, sha256"]]
    for arm in report.arms:
        for run in arm.runs:
            weights = run.checkpoint.get("files", {}).get("model.safetensors", {}).get("sha256")
            loss = show(run.last("val/loss"), ".4f")
            lines.append([run.name, arm.label, show(run.seed), loss, show(weights)[:16]])
    return lines


def samples(report: Report) -> list[tuple[str, list[str]]]:
    """(prompt, what the first run of each arm wrote after it)."""
    texts = [{s["prompt"]: s["text"] for s in arm.runs[0].samples} for arm in report.arms]
    prompts = dict.fromkeys(prompt for text in texts for prompt in text)
    return [(prompt, [text.get(prompt, "–") for text in texts]) for prompt in prompts]


def protocol(report: Report) -> list[str]:
    """How the numbers were measured, from the first evaluation of each kind that there is."""

    def first(name: str) -> dict[str, Any] | None:
        return next((e for r in report.runs for n, e in r.evaluations.items() if n == name), None)

    lines = []
    if found := first("perplexity"):
        documents, rules = found["documents"], found["protocol"]
        enough = documents["in_split"] - documents["skipped_too_short"]
        lines += [
            f"Held-out text: {documents['used']} documents, the first of the {enough} (of"
            f" {documents['in_split']}) in the validation split that have at least"
            f" {max(found['settings']['lengths']):,} tokens. Each gives {rules['segment']}.",
            f"“Same last tokens”, the headline: {rules['last']}. Only the context before them"
            " grows.",
            f"“Disjoint windows”: {rules['disjoint']}.",
            f"{rules['bos']}. {rules['weighting']}. Computed in {found['dtype']}, the loss in"
            " float32. A mean over seeds is one of nats, so of perplexities a geometric one.",
            "YaRN: “none” is the model as trained, “auto” sets the factor to length / training"
            " context, a number is one factor for every length.",
        ]
    if found := first("perplexity_packed"):
        rules = found["protocol"]
        lines.append(f"Packed stream: {rules['segment']}. {rules['bos']}.")
    if found := first("ruler"):
        kinds = {s["task"] for s in found["samples"]}
        count = found["counts"]["items"]
        lines.append(
            f"RULER: {count:,} answers of {len(kinds)} tasks scored, seed {found['seed']},"
            f" {found['counts']['skipped']} skipped."
        )
    for name in dict.fromkeys(n for r in report.runs for n in r.evaluations if n[:4] == "core"):
        found = first(name)
        result, counts = found["results"], found["counts"]
        line = f"{result['name']}: {counts['items']:,} items, {counts['cropped']:,} prompts cropped"
        if result["missing"]:
            line += f"; without {', '.join(result['missing'])}"
        lines.append(f"{line}. Baselines are nanochat's (v1); v2 are DCLM's since September 2025.")
    if found := first("hellaswag"):
        lines.append(f"HellaSwag: {found['counts']['items']:,} items, build-nanogpt's definition.")
    if lines and report.comparisons:
        lines.append(
            "Intervals in tables and figures are 95 %. With several seeds: a t interval over the"
            " seeds' paired differences, which speaks of the method on these documents. With one:"
            " 10,000 bootstrap draws of documents or items, paired, which speaks of these"
            " checkpoints alone. They are not corrected for being many; the claims on top are."
        )
    return lines


# -----------------------------------------------------------------------------
# the paper's tables


def paper_scale(arm: Arm) -> str | None:
    """ "124M" or "354M" if the arm is what the paper trained, by its shape, tokenizer and
    context."""
    run, model = arm.runs[0], arm.runs[0].config["model"]
    shape = tuple(model.get(key) for key in ("n_layer", "n_head", "n_embd"))
    fits = run.tokenizer == "gpt2" and run.context == model["block_size"] == PAPER_CONTEXT
    fits = fits and model.get("rope_base", 10_000) == 10_000 and not run.derived_from
    return SHAPES.get(shape) if fits and run.pos_emb in ("rope", "rove") else None


def paper_tables(report: Report) -> list[dict[str, Any]]:
    """The three tables in the paper's layout: methods as lines, quantities as columns; under each
    arm that is compared its difference. Beside ours the paper's numbers, at the paper's scales."""
    context, keys = report.context, dict.fromkeys(k for run in report.runs for k in run.numbers)
    yarns = list(dict.fromkeys(k.yarn for k in keys if k.evaluation in ("perplexity", "ruler")))
    quantity = next((q for q in ("disjoint", "last", "sliding") if report.keys("perplexity", q)), "")  # noqa: E501  # fmt: skip

    def perplexity(factor: float) -> tuple[str, Any, str, Any]:
        length = round(factor * context)
        key = partial(Key, "perplexity", quantity, length=length)
        return f"PPL@{length}", lambda yarn: key(yarn=yarn), "ppl", length

    def category(name: str) -> tuple[str, Any, str, Any]:
        label = category_label(report, name) if report.keys("ruler", "nll") else name.upper()
        key = partial(Key, "ruler", "category nll", length=4 * context, task=name)
        return f"{label} @{4 * context}", lambda yarn: key(yarn=yarn), "2", name

    core = next((k for k in keys if k.evaluation == "core" and k.quantity == "CORE"), None)
    core = core or next((k for k in keys if k.evaluation == "core" and not k.task), None)
    lengths = sorted({k.length for k in report.keys("ruler", "average nll") if k.length})
    average = partial(Key, "ruler", "four categories nll", length=None, task="all lengths")
    at = ", ".join(map(str, lengths))
    columns = [perplexity(0.5), perplexity(1)]
    if core:
        same_as_paper = "CORE" if core.quantity == "CORE" else None
        columns = [(core.quantity, lambda yarn: core, "4", same_as_paper), *columns]
    same_as_paper = "average" if lengths == PAPER_RULER else None
    return list(
        filter(
            None,
            [
                paper_table(report, "Few-shot accuracy and perplexity within the context",
                            columns, ["none"]),
                paper_table(report, "Perplexity beyond the context",
                            [perplexity(2**i) for i in range(1, 5)], yarns),
                paper_table(report, "RULER, nats per answer token",
                            [*map(category, PAPER_CATEGORIES),
                             (f"average of the four @{at}", lambda yarn: average(yarn=yarn), "2",
                              same_as_paper)],
                            yarns),
            ],
        )
    )  # fmt: skip


def paper_table(
    report: Report,
    title: str,
    columns: Sequence[tuple[str, Any, str, Any]],
    yarns: Sequence[str],
) -> dict[str, Any] | None:
    """columns: (heading, YaRN setting -> number, form, what it is called in PAPER). A column that
    no run has is left out; None if that is all of them."""
    there = [
        column
        for column in columns
        if any(arm.values(column[1](yarn)) for arm in report.arms for yarn in yarns)
    ]
    lines: list[dict[str, Any]] = []
    for yarn in yarns:
        for arm in report.arms:
            if not any(arm.values(key_of(yarn)) for _, key_of, *_ in there):
                continue
            label = arm.label if yarn == "none" else f"{arm.label} + YaRN ({yarn})"
            cells = [
                {
                    "paper": paper_text(in_paper(arm, yarn, name), form),
                    "ours": value_cell(arm, key_of(yarn), form)["text"],
                    "interval": "",
                    "better": "",
                }
                for _, key_of, form, name in there
            ]
            lines.append({"label": label, "arm": arm, "cells": cells})
            index = next((i for i, c in enumerate(report.comparisons) if c.second is arm), None)
            if index is None:
                continue
            c, cells = report.comparisons[index], []
            for _, key_of, form, name in there:
                found = report.effects.get((index, key_of(yarn)))
                higher = key_of(yarn).evaluation == "core"
                cell = change_cell(found, c, form, higher)
                a, b = in_paper(c.first, yarn, name), in_paper(c.second, yarn, name)
                paper = "–"
                if a is not None and b is not None:
                    paper = signed(math.log(b / a) if form == "ppl" else b - a, form)
                cells.append({"paper": paper, "ours": cell["text"], **{
                    k: cell[k] for k in ("interval", "better")}})  # fmt: skip
            lines.append({"label": "difference", "arm": None, "cells": cells})
    if not there or not lines:
        return None
    paper = any(cell["paper"] != "–" for line in lines for cell in line["cells"])
    return {"title": title, "heads": [c[0] for c in there], "lines": lines, "paper": paper}


def in_paper(arm: Arm, yarn: str, name: Any) -> float | None:
    """The paper's number for this arm; its "YaRN" stands beside each of our settings."""
    return PAPER.get((paper_scale(arm), arm.pos_emb, yarn != "none"), {}).get(name)


def paper_text(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if form == "ppl" else f"{value:.{form}f}"


# -----------------------------------------------------------------------------
# figures


def draw(report: Report, out: Path) -> dict[str, list[Any]]:
    """Save the figures as PNG; returns them as SVG for the page, a panel each."""
    with matplotlib.rc_context(figures.STYLE):
        found = {
            "perplexity": draw_lines(report, out, "perplexity", perplexity_panels(report), True),
            "position": draw_lines(report, out, "position", position_panels(report), False),
            "ruler": draw_dots(report, out, "ruler", ruler_panels(report), "nats per answer token"),
            "core": draw_dots(report, out, "core", core_panels(report), "centered accuracy"),
            "loss": [],
        }
        together = figures.loss_figures(report.arms, report.comparisons, together=True)
        for figure in together:
            figure.savefig(out / "loss.png", dpi=160)
        alts = ("Training and validation loss against step", "Paired difference of the losses")
        separate = figures.loss_figures(report.arms, report.comparisons, together=False)
        for i, (figure, alt) in enumerate(zip(separate, alts, strict=False)):
            found["loss"].append(figures.to_svg(figure, f"loss{i}", alt))
    return found


def draw_lines(
    report: Report, out: Path, name: str, panels: Sequence[Panel], ratio: bool
) -> list[Any]:
    what = "perplexity" if ratio else "nats"
    options = {"ylabel": f"{what} per {report.unit}", "ratio": ratio, "all_panels": panels,
               "xlabel": f"context in {report.unit}s" if ratio else "position"}  # fmt: skip
    content = report.arms, report.comparisons, report.effects
    svgs = []
    for i, panel in enumerate(panels):
        figure = figures.lines_figure([panel], *content, **options)
        against = "context length" if ratio else "position"
        alt = f"{sentence_case(what)} and its change against {against}: {panel.title}"
        svgs.append(figures.to_svg(figure, f"{name}{i}", alt))
    if panels:
        figure = figures.lines_figure(panels, *content, **options)
        figure.savefig(out / f"{name}.png", dpi=160)
    return svgs


def draw_dots(
    report: Report, out: Path, name: str, panels: Sequence[Panel], xlabel: str
) -> list[Any]:
    svgs = []
    for i, panel in enumerate(panels):
        figure = figures.dots_figure([panel], report.arms, xlabel=xlabel)
        svgs.append(figures.to_svg(figure, f"{name}{i}", f"{xlabel}: {panel.title}"))
    if panels:
        figure = figures.dots_figure(panels, report.arms, xlabel=xlabel)
        figure.savefig(out / f"{name}.png", dpi=160)
    return svgs


def with_values(report: Report, panel: Panel) -> Panel | None:
    """The panel without what no arm has; None if nothing is left."""
    keys = {x: k for x, k in panel.keys.items() if any(arm.values(k) for arm in report.arms)}
    return Panel(panel.title, keys) if keys else None


def perplexity_panels(report: Report) -> list[Panel]:
    keys = report.keys("perplexity", "last")
    panels = [
        Panel(title(yarn_words(yarn)), {k.length: k for k in keys if k.yarn == yarn})
        for yarn in dict.fromkeys(key.yarn for key in keys)
    ]
    return [p for panel in panels if (p := with_values(report, panel))]


def position_panels(report: Report) -> list[Panel]:
    """The validation loss within the context, and long documents to their end."""

    def panel(words: str, keys: Sequence[Key]) -> Panel:
        middles = {}
        for key in keys:
            first, _, end = key.task.partition("-")
            middles[math.sqrt((int(first) + 1) * (int(end or first) + 1))] = key
        return Panel(words, middles)

    panels = [panel("Validation loss", report.keys("training", "validation loss by position"))]
    keys = report.keys("perplexity", "curve")
    for yarn in dict.fromkeys(key.yarn for key in keys):
        words = f"Long documents, {yarn_words(yarn)}"
        panels.append(panel(words, [k for k in keys if k.yarn == yarn]))
    return [p for panel in panels if (p := with_values(report, panel))]


def ruler_panels(report: Report) -> list[Panel]:
    keys = report.keys("ruler", "category nll")
    panels = []
    for yarn, length in dict.fromkeys((key.yarn, key.length) for key in keys):
        lines = {
            category_label(report, k.task): k for k in keys if (k.yarn, k.length) == (yarn, length)
        }
        lines["average"] = Key("ruler", "average nll", yarn, length)
        panels.append(Panel(f"{length:,} {report.unit}s, YaRN {yarn}", lines))
    return [p for panel in panels if (p := with_values(report, panel))]


def core_panels(report: Report) -> list[Panel]:
    keys = [k for k in report.keys("core") if k.quantity.endswith(" centered")]
    panels = [
        Panel(quantity.removesuffix(" centered"), {k.task: k for k in keys if k[1] == quantity})
        for quantity in dict.fromkeys(key.quantity for key in keys)
    ]
    return [p for panel in panels if (p := with_values(report, panel))]


def title(words: str) -> str:
    return sentence_case(words).replace("yarn", "YaRN")


# -----------------------------------------------------------------------------
# CSV


def csv_tables(report: Report) -> dict[str, list[list[Any]]]:
    """{name: head and lines}: every number of every run, every comparison, the claims, and the
    curves of the training."""
    arms = [(arm, run) for arm in report.arms for run in arm.runs]
    numbers = [["run", "arm", "seed", *Key._fields, "value", "n"]]
    losses = [["run", "arm", "seed", "step", "tokens", "train_loss", "val_loss"]]
    for arm, run in arms:
        who = [run.name, arm.label, run.seed]
        for key, found in run.numbers.items():
            if key.evaluation in PERPLEXITIES and found.sums is not None:
                numbers.append([*who, *key._replace(quantity=f"{key.quantity} nll"), found.value, found.n])  # noqa: E501  # fmt: skip
                ppl = math.exp(found.value)
                numbers.append([*who, *key._replace(quantity=f"{key.quantity} ppl"), ppl, found.n])
            else:
                numbers.append([*who, *key, found.value, found.n])
        for m in run.metrics:
            if "train/loss" in m or "val/loss" in m:
                line = [m.get(k) for k in ("step", "tokens", "train/loss", "val/loss")]
                losses.append([*who, *line])
    return {
        "numbers": numbers,
        "comparisons": comparison_lines(report),
        "claims": [
            ["arm", "baseline", *Key._fields, "seeds", "difference", "low", "high", "p", "told",
             "sentence"],
            *([report.comparisons[s.comparison].second.label,
               report.comparisons[s.comparison].first.label, *s.key, v.seeds,
               *finite(v.difference), v.p, v.told, v.words()]
              for s in report.claims for v in [s.verdict]),
        ],
        "loss": losses,
    }  # fmt: skip


def comparison_lines(report: Report) -> list[list[Any]]:
    """A line per pair of runs, and one over the seeds: second minus first (nats, or points), 95 %
    interval, p; n is documents or items, and seeds."""
    lines = [["arm", "baseline", *Key._fields, "seed", "difference", "low", "high", "p", "n",
              "speaks_about"]]  # fmt: skip
    for (i, key), found in report.effects.items():
        c = report.comparisons[i]
        who = [c.second.label, c.first.label, *key]
        for seed, p in zip(found.seeds, found.per_seed, strict=True):
            if isinstance(p, stats.Paired):
                line = [*finite(p.difference), p.p, p.documents, "these checkpoints"]
            else:
                line = [p, None, None, None, None, "these checkpoints"]
            lines.append([*who, seed, *line])
        if len(found.seeds) > 1:
            values = [p.difference.value if isinstance(p, stats.Paired) else p for p in found.per_seed]  # noqa: E501  # fmt: skip
            p = stats.seed_p(values)
            about = "the method on these documents"
            lines.append([*who, "all", *finite(found.interval), p, len(values), about])
    return lines


def finite(interval: stats.Interval) -> list[float | None]:
    """[value, low, high] with nothing in place of what is infinite."""
    ends = (interval.value, interval.low, interval.high)
    return [x if math.isfinite(x) else None for x in ends]


# -----------------------------------------------------------------------------
# Markdown and the terminal


def grid(page: dict[str, Any], made: dict[str, Any]) -> list[list[str]]:
    """Head and lines of a table as plain cells."""
    versus = [f"{c.second.label} vs {c.first.label} [95 %]" for c in page["comparisons"]]
    head = [*made["heads"], *(arm.label for arm in page["arms"]), *versus]
    lines = [
        line["leads"]
        + [cell["text"] for cell in line["cells"]]
        + [f"{change['text']} {change['interval']}".strip() for change in line["changes"]]
        for line in made["lines"]
    ]
    return [head, *lines]


def paper_grid(made: dict[str, Any]) -> list[list[str]]:
    heads = [h for head in made["heads"] for h in ([f"{head}, paper", "ours"] if made["paper"] else [head])]  # noqa: E501  # fmt: skip
    lines = [["", *heads]]
    for line in made["lines"]:
        cells = [
            text
            for cell in line["cells"]
            for text in ([cell["paper"]] if made["paper"] else [])
            + [f"{cell['ours']} {cell['interval']}".strip()]
        ]
        lines.append([line["label"], *cells])
    return lines


def print_table(page: dict[str, Any]) -> None:
    made = page["tables"].get(QUANTITIES["last"])
    if made:
        lines = grid(page, made)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print("perplexity of the same last tokens, by context length")
        for line in lines:
            print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))


def to_markdown(page: dict[str, Any]) -> str:
    """The content of the HTML page, with the PNG figures beside it."""
    labels = [arm.label for arm in page["arms"]]
    parts = [f"# {plain(page['title'])}", f"**{plain(page['answer'])}**"]

    def add(heading: str, figure: str, tables: dict[str, Any]) -> None:
        if page["figures"][figure] or tables:
            parts.append(f"## {heading}")
        if page["figures"][figure]:
            parts.append(f"![{figure}]({figure}.png)")
        for title, made in tables.items():
            parts.extend([f"### {plain(title)}", table(grid(page, made))])

    def bullets(lines: Iterable[str]) -> None:
        text = "\n".join(f"- {plain(line)}" for line in lines)
        parts.extend([text] if text else [])

    for heading, lines in page["claims"]:
        parts.append(f"## {plain(heading)}")
        bullets(line for _, line in lines)
    parts += [plain(page["correction"])] if page["correction"] else []
    bullets(page["notes"])
    if page["paper"]:
        scale = page["paper_scale"]
        parts.append("## The paper's tables, and ours" if scale else "## In the paper's layout")
    for made in page["paper"]:
        parts += [f"### {plain(made['title'])}", table(paper_grid(made))]
    if page["differing"]:
        body = [[key, *row] for key, row in page["differing"].items()]
        parts += ["## What differs", COMPARED + ":", table([["", *labels], *body])]
    add("Perplexity against context", "perplexity", page["tables"])
    parts += [f"Not evaluated: `python -m scripts.eval_perplexity {run.path}`"
              for run in page["not_evaluated"]]  # fmt: skip
    add("Loss", "loss", {})
    add("Loss by position", "position", {})
    add("RULER", "ruler", page["ruler"])
    bullets(page["ruler_notes"])
    add("CORE", "core", {"By task": page["core"]} if page["core"] else {})
    if page["hellaswag"]:
        parts += ["## HellaSwag", table(grid(page, page["hellaswag"]))]
    if page["samples"]:
        parts.append("## Samples")
    for prompt, texts in page["samples"]:
        for label, text in zip(labels, texts, strict=True):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", prompt + text)), default=0))
            parts += [f"{plain(label)}:", f"{fence}text\n{prompt}{text}\n{fence}"]
    parts += ["## Cost", table([["", *labels], *([k, *v] for k, v in page["cost"])])]
    parts += ["## What the paper leaves open, and how we chose"]
    bullets(page["open"])
    parts += ["## How it was made", table([["", *labels], *([k, *v] for k, v in page["made"])])]
    parts.append(table(page["trained"]))
    bullets(page["protocol"])
    return "\n\n".join(parts) + "\n"


def table(lines: list[list[str]]) -> str:
    """A Markdown table that no cell can break."""
    head, *body = ["| " + " | ".join(map(plain, line)) + " |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *body])


def plain(text: str) -> str:
    """Text that means itself in Markdown."""
    text = re.sub(r"([\\`*_\[\]#|])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Args, prog="python -m scripts.report")))
