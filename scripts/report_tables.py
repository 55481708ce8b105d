"""The tables of the comparison: each is made once, for HTML, Markdown and the terminal alike."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from nanorove.results import PAPER_CATEGORIES, Arm, Comparison, Effect, Key, Run
from nanorove.ruler_metrics import CATEGORIES, TASKS
from scripts.report_claims import (
    Report,
    declared,
    interval_text,
    percent_digits,
    sentence_case,
    shown,
    signed,
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


# -----------------------------------------------------------------------------
# a table


def value_cell(report: Report, arm: Arm, key: Key, form: str) -> dict[str, str]:
    """The mean over an arm's seeds; its note has each of them."""
    mean = report.mean(arm, key)
    if mean is not None:
        values = [(run.seed, run.numbers[key].value) for run in arm.having(key)]
        note = "; ".join(f"seed {seed}: {shown(v, form)}" for seed, v in values)
        return {"text": shown(mean, form), "note": note}
    if reasons := [run.numbers[key].reason for run in arm.runs if key in run.numbers]:
        return {"text": "n/a", "note": reasons[0]}
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
                "cells": [value_cell(report, arm, key, form) for arm in report.arms],
                "changes": changes,
            }
        )
    return {"heads": list(heads), "lines": lines} if lines else None


# -----------------------------------------------------------------------------
# all of them


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
        (title, [value_cell(report, arm, key, form)["text"] for arm in report.arms])
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
            " checkpoints alone. They are not corrected for being many; what corrects the claims on"
            " top is said there."
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


def paper_quantity(report: Report) -> str:
    """Which of our perplexities stands for the paper's, of which we do not know the windows."""
    return next((q for q in ("disjoint", "last", "sliding") if report.keys("perplexity", q)), "")


def paper_tables(report: Report) -> list[dict[str, Any]]:
    """The three tables in the paper's layout: methods as lines, quantities as columns; under each
    arm that is compared its difference. Beside ours the paper's numbers, at the paper's scales."""
    context, keys = report.context, dict.fromkeys(k for run in report.runs for k in run.numbers)
    yarns = list(dict.fromkeys(k.yarn for k in keys if k.evaluation in ("perplexity", "ruler")))
    quantity = paper_quantity(report)
    windows = f" ({QUANTITIES[quantity].lower()}, assumed)" if quantity else ""

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
                paper_table(report, f"Few-shot accuracy and perplexity within the context{windows}",
                            columns, ["none"]),
                paper_table(report, f"Perplexity beyond the context{windows}",
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
    neither a run nor the paper has is left out; None if no run has any."""

    def ours(column: tuple[str, Any, str, Any]) -> bool:
        return any(arm.values(column[1](yarn)) for arm in report.arms for yarn in yarns)

    def papers(column: tuple[str, Any, str, Any]) -> bool:
        return any(in_paper(arm, yarn, column[3]) for arm in report.arms for yarn in yarns)

    if not any(map(ours, columns)):
        return None
    there = [column for column in columns if ours(column) or papers(column)]
    lines: list[dict[str, Any]] = []
    for yarn in yarns:
        for arm in report.arms:
            if not any(arm.values(key_of(yarn)) for _, key_of, *_ in there):
                continue
            label = arm.label if yarn == "none" else f"{arm.label} + YaRN ({yarn})"
            cells = []
            for _, key_of, form, name in there:
                paper, mean = in_paper(arm, yarn, name), report.mean(arm, key_of(yarn))
                cells.append(
                    {
                        "paper": paper_text(paper, form),
                        "ours": value_cell(report, arm, key_of(yarn), form)["text"],
                        "interval": beside_paper(paper, mean, form),
                        "better": "",
                    }
                )
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
    paper = any(cell["paper"] != "–" for line in lines for cell in line["cells"])
    return {"title": title, "heads": [c[0] for c in there], "lines": lines, "paper": paper}


def in_paper(arm: Arm, yarn: str, name: Any) -> float | None:
    """The paper's number for this arm; its "YaRN" stands beside each of our settings."""
    return PAPER.get((paper_scale(arm), arm.pos_emb, yarn != "none"), {}).get(name)


def beside_paper(paper: float | None, mean: float | None, form: str) -> str:
    """How far ours is from the paper's, which has no interval: "(−1.2 % to paper)"."""
    if paper is None or mean is None:
        return ""
    change = mean - math.log(paper) if form == "ppl" else mean - paper
    return f"({signed(change, form)} to paper)"


def paper_text(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if form == "ppl" else f"{value:.{form}f}"
