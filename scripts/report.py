"""Compare trained runs on one page: perplexity beyond the context, loss, samples, cost.

    python -m scripts.report runs/demo_rope runs/demo_rove --out runs/demo

Writes report.html (one file, nothing else to load), report.md and the figures as PNG. The first run
is the baseline. Every sentence is made from the numbers, whichever way they point.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
import tyro

from nanorove import figures, stats
from nanorove.errors import UserError, run_cli
from nanorove.files import write_text_atomic
from nanorove.results import (
    Pair,
    Row,
    Run,
    check_comparable,
    differing_keys,
    make_rows,
    name_runs,
    pair_up,
    read_run,
    yarn_words,
)

COMPARED = (
    "Of all settings, torch version, device, processes, threads and code revision, the runs differ"
    " in these alone; data and number of steps are the same"
)
QUANTITIES = {"last": "Same last tokens", "disjoint": "Disjoint windows"}


@dataclass(frozen=True)
class Args:
    """Compare runs: report.html, report.md and PNG figures in one folder."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders; the first is what the others are compared with."""
    out: Path
    """Folder for the report."""
    title: str = "RoVE or RoPE?"


def main(args: Args) -> Path:
    """Write the report of args.runs into args.out; returns the path of report.html."""
    if not args.runs:
        raise UserError("no runs: name at least one run folder, e.g. runs/demo_rope")
    if len({path.resolve() for path in args.runs}) < len(args.runs):
        raise UserError("the same run is given twice; name each run folder once")
    runs = [read_run(path) for path in args.runs]
    check_comparable(runs)
    name_runs(runs)
    pairs = pair_up(runs)
    rows = make_rows(runs, pairs)
    args.out.mkdir(parents=True, exist_ok=True)
    page = {
        "title": args.title,
        "answer": answer(runs, rows, pairs),
        "claims": claims(rows, pairs),
        "differing": differing_keys(runs),
        "compared": COMPARED,
        "runs": runs,
        "pairs": pairs,
        "unit": runs[0].unit,
        "tables": {q: perplexity_table(q, runs, rows, pairs) for q in QUANTITIES} if rows else {},
        "quantities": QUANTITIES,
        "figures": draw(runs, rows, pairs, args.out),
        "samples": samples(runs),
        "cost": cost_table(runs),
        "made": made_table(runs),
        "protocol": protocol(runs),
        "one_seed": seeds_per_arm(pairs) == 1,
    }
    page["cards"] = cards(page)
    jinja = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    jinja.filters["unbroken"] = lambda text: text.replace(" %", "\u00a0%")
    template = Path(__file__).with_name("report_template.html").read_text(encoding="utf-8")
    write_text_atomic(args.out / "report.html", jinja.from_string(template).render(page))
    write_text_atomic(args.out / "report.md", to_markdown(page))
    print_table(page)
    print(f"\n{page['answer']}\nreport: {args.out / 'report.html'}")
    return args.out / "report.html"


def draw(
    runs: Sequence[Run], rows: Sequence[Row], pairs: Sequence[Pair], out: Path
) -> dict[str, list[Any]]:
    """Save perplexity.png and loss.png; returns the same figures as SVG for the page."""
    svgs: dict[str, list[Any]] = {"perplexity": [], "loss": []}
    with matplotlib.rc_context(figures.STYLE):
        if any(e and e["nll"] is not None for r in rows if r.quantity == "last" for e in r.entries):
            yarns = list(dict.fromkeys(row.yarn for row in rows))
            combined = figures.perplexity_figure(runs, rows, pairs, yarns)
            combined.savefig(out / "perplexity.png", dpi=160)
            for i, yarn in enumerate(yarns):
                figure = figures.perplexity_figure(runs, rows, pairs, [yarn])
                alt = f"Perplexity and its ratio against context length, {yarn_words(yarn)}"
                svgs["perplexity"].append(figures.to_svg(figure, f"perplexity{i}", alt))
        figures.loss_figures(runs, pairs, together=True)[0].savefig(out / "loss.png", dpi=160)
        alts = ("Training and validation loss against step", "Paired difference of the losses")
        separate = figures.loss_figures(runs, pairs, together=False)
        for i, (figure, alt) in enumerate(zip(separate, alts, strict=False)):
            svgs["loss"].append(figures.to_svg(figure, f"loss{i}", alt))
    return svgs


# -----------------------------------------------------------------------------
# sentences


def answer(runs: Sequence[Run], rows: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """The one sentence on top. What it speaks of is fixed before the numbers are seen: the same
    last tokens at the longest length, without YaRN and fitted to it, and at the training context.
    """
    if not pairs:
        return f"One run ({runs[0].label}), so nothing to compare."
    first, second = pairs[0]
    own = {(r.yarn, r.length): r.paired[0] for r in rows if r.quantity == "last" and r.paired[0]}
    longest = max((length for _, length in own), default=0)
    far = {yarn: own[yarn, longest] for yarn in ("none", "auto") if (yarn, longest) in own}
    if not far:
        a, b = (last(run, "val/loss") for run in (first, second))
        if a is None or b is None:
            return "Nothing has been evaluated yet."
        return (
            f"The last validation loss is {b:.4f} with {second.label} and {a:.4f} with"
            f" {first.label}; perplexity against length has not been evaluated."
        )
    where = "beyond" if longest > first.context else "below" if longest < first.context else "at"
    where += " the training context"
    ways = {direction(paired) for paired in far.values()}
    verdict = {"lower": "beats", "higher": "does worse than", "": "does not beat"}
    documents = min(paired.documents for paired in far.values())
    if ways == {""} and documents < stats.FEWEST_DOCUMENTS:
        lead = (
            f"{documents} documents are too few to tell whether {second.label} beats {first.label}"
            f" {where}"
        )
    elif len(ways) == 1:
        lead = f"{second.label} {verdict[ways.pop()]} {first.label} {where}"
    else:
        lead = f"whether {second.label} beats {first.label} {where} depends on YaRN"
    found = ", ".join(f"{clause(p, 'its', '')} {yarn_words(yarn)}" for yarn, p in far.items())
    sentence = f"{stats.scope(seeds_per_arm(pairs))}, {lead}: {place(longest, first)} {found}"
    if ("none", first.context) in own and longest != first.context:
        paired = own["none", first.context]
        sentence += f"; {place(first.context, first)} {clause(paired, 'its', '')}"
    others = [i for i, (a, b) in enumerate(pairs) if i and b.arm == second.arm and a.seed == b.seed]
    if others:
        agree = sum(
            all(
                row.paired[i] and direction(row.paired[i]) == direction(row.paired[0])
                for row in rows
                if row.quantity == "last" and row.length == longest and row.yarn in far
            )
            for i in others
        )
        sentence += f"; {agree} of the {len(others)} other seeds agree {where}"
    if first.seed != second.seed:
        seeds = f"{first.seed} and {second.seed}"
        sentence += f"; their seeds differ ({seeds}), which may be part of any difference"
    return sentence[0].upper() + sentence[1:] + "."


def claims(rows: Sequence[Row], pairs: Sequence[Pair]) -> list[str]:
    """For each pair and YaRN setting a sentence at the training context and at the longest."""
    found = []
    for i, (first, second) in enumerate(pairs):
        own = [row for row in rows if row.quantity == "last" and row.paired[i]]
        longest = max((row.length for row in own), default=0)
        seen = set()  # auto is often the same as none or as a fixed factor
        for row in own:
            place_and_factor = row.length, second.entries["last", row.yarn, row.length]["factor"]
            if row.length in (first.context, longest) and place_and_factor not in seen:
                seen.add(place_and_factor)
                text = clause(row.paired[i], f"{second.label}'s", f" than {first.label}'s")
                found.append(f"{place(row.length, first)}, {yarn_words(row.yarn)}: {text}.")
    return [sentence[0].upper() + sentence[1:] for sentence in found]


def direction(paired: stats.Paired) -> str:
    """ "lower", "higher", or "" where no difference can be told."""
    if not paired.told:
        return ""
    return "lower" if paired.difference.value < 0 else "higher"


def clause(paired: stats.Paired, whose: str, than: str) -> str:
    """ "RoVE's perplexity is 41 % lower than RoPE's [35, 47]", or that nothing can be told."""
    ratio = paired.difference.exp()
    value, low, high = ((x - 1) * 100 for x in (ratio.value, ratio.low, ratio.high))
    digits = 0 if abs(value) >= 10 else 1 if abs(value) >= 1 else 2
    if not paired.told:
        ends = ", ".join(f"{x:+.{digits}f} %".replace("-", "−") for x in (low, high))
        return f"no difference in perplexity can be told [{ends}], p = {paired.p:.2g}"
    if ratio.value >= 2:
        times = f"{ratio.value:.3g} times{than.removeprefix(' than') or ' as high'}"
        return f"{whose} perplexity is {times} [{ratio.low:.3g}, {ratio.high:.3g}]"
    ends = ", ".join(f"{x:.{digits}f}" for x in sorted((abs(low), abs(high))))
    return f"{whose} perplexity is {abs(value):.{digits}f} % {direction(paired)}{than} [{ends}]"


def place(length: int, run: Run) -> str:
    """ "at 4,096 bytes (16 times the training context)"."""
    times = length / run.context
    note = "the training context" if times == 1 else f"{times:g} times the training context"
    return f"at {length:,} {run.unit}s ({note})"


def seeds_per_arm(pairs: Sequence[Pair]) -> int:
    """How many distinct seeds both arms of the first pair have, at least one."""
    compared = [pair for pair in pairs if pair[1].arm == pairs[0][1].arm]
    return max(1, min(len({pair[side].seed for pair in compared}) for side in (0, 1)))


def protocol(runs: Sequence[Run]) -> list[str]:
    """How the perplexities were measured, from the first evaluation there is."""
    found = next((run.perplexity for run in runs if run.perplexity), None)
    if found is None:
        return []
    documents, rules = found["documents"], found["protocol"]
    enough = documents["in_split"] - documents["skipped_too_short"]
    return [
        f"Held-out text: {documents['used']} documents, the first of the {enough} (of"
        f" {documents['in_split']}) in the validation split that have at least"
        f" {max(found['settings']['lengths']):,} tokens. Each gives {rules['segment']}.",
        f"“Same last tokens”, the headline: {rules['last']}. Only the context before them grows.",
        f"“Disjoint windows”: {rules['disjoint']}.",
        f"{rules['bos']}. {rules['weighting']}. Computed in {found['dtype']}, the loss in float32.",
        "Intervals are 95 %, from 10,000 bootstrap draws of documents, paired: both models score"
        " the same tokens. p is that of a sign-flip permutation test over documents. Neither is"
        " corrected for the number of lines in the table.",
        "YaRN: “none” is the model as trained, “auto” sets the factor to length / training"
        " context, a number is one factor for every length.",
    ]


# -----------------------------------------------------------------------------
# tables


def number(x: float) -> str:
    """A perplexity to three or four digits."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" if x >= 100 else f"{x:.{2 + (x < 10)}f}"


def perplexity_table(
    quantity: str, runs: Sequence[Run], rows: Sequence[Row], pairs: Sequence[Pair]
) -> list[dict[str, Any]]:
    """The lines of one quantity as strings, for HTML, Markdown and the terminal alike."""
    lines = []
    for row in rows:
        if row.quantity != quantity:
            continue
        cells, ratios = [], []
        for entry in row.entries:
            if entry is None:
                cells.append({"text": "–", "note": "not evaluated"})
            elif entry["nll"] is None:
                cells.append({"text": "n/a", "note": entry["reason"]})
            else:
                note = f"YaRN factor {entry['factor']:g}"
                cells.append({"text": number(entry["ppl"]), "note": note})
        for paired, (first, second) in zip(row.paired, pairs, strict=True):
            if paired is None:
                ratios.append({"text": "–", "p": "–", "better": ""})
                continue
            r = paired.difference.exp()
            p = f"{paired.p:.2g}" if paired.p > 2e-4 else "< 0.0002"
            better = {"lower": second.pos_emb, "higher": first.pos_emb, "": ""}[direction(paired)]
            text = f"{r.value:.3f} [{r.low:.3f}, {r.high:.3f}]"
            ratios.append({"text": text, "p": p, "better": better})
        lines.append(
            {
                "yarn": row.yarn,
                "length": f"{row.length:,}",
                "times": f"{row.length / runs[0].context:g}×",
                "cells": cells,
                "ratios": ratios,
            }
        )
    return lines


def cards(page: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """(title, a value per run) of the few numbers to see first."""
    lines = page["tables"].get("last", [])
    found = []
    for line in lines:
        at_training_context = line["times"] == "1×" and line["yarn"] == "none"
        if at_training_context or line["length"] == lines[-1]["length"]:
            title = f"Perplexity at {line['length']} ({line['times']}), YaRN {line['yarn']}"
            found.append((title, [cell["text"] for cell in line["cells"]]))
    losses = [show(last(run, "val/loss"), ".4f") for run in page["runs"]]
    return [*found, (f"Validation loss, nats per {page['unit']}", losses)]


def last(run: Run, key: str) -> float | None:
    """The last value of a metric."""
    return next((m[key] for m in reversed(run.metrics) if key in m), None)


def show(value: Any, form: str = "") -> str:
    return "–" if value is None else format(value, form)


def cost_table(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """What training took: medians over the lines of the log, and the peak of the memory."""

    def metric(key: str, form: str, reduce: Any = np.median) -> list[str]:
        series = [run.series(key)[1] for run in runs]
        return [show(reduce(values) if len(values) else None, form) for values in series]

    return [
        ("tokens per second", metric("perf/tokens_per_s", ",.0f")),
        ("milliseconds per step", metric("perf/step_ms", ",.0f")),
        ("peak memory, GiB", metric("mem/peak_gib", ".2f", np.max)),
        ("parameters", [show(run.meta.get("params"), ",") for run in runs]),
        ("device", [show(run.meta.get("device")) for run in runs]),
        ("processes × threads",
         [f"{show(r.meta.get('world_size'))} × {show(r.meta.get('threads'))}" for r in runs]),
    ]  # fmt: skip


def made_table(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """How the runs came about, from what they recorded themselves."""

    def versions(run: Run) -> str:
        return ", ".join(f"{k} {v}" for k, v in run.meta.get("versions", {}).items()) or "–"

    data = [run.checkpoint.get("data", {}) for run in runs]
    evaluations = [run.perplexity or {} for run in runs]
    return [
        ("run", [show(run.config.get("run_name")) for run in runs]),
        ("seed", [show(run.seed) for run in runs]),
        ("steps", [show(last(run, "step"), ",") for run in runs]),
        ("tokens seen", [show(last(run, "tokens"), ",") for run in runs]),
        ("last validation loss, nats", [show(last(run, "val/loss"), ".4f") for run in runs]),
        ("data", [show(run.config.get("data", {}).get("dir")) for run in runs]),
        ("data manifest, sha256", [show(d.get("manifest_sha256"))[:16] for d in data]),
        ("tokenizer", [show(d.get("tokenizer", {}).get("name")) for d in data]),
        ("evaluated weights, sha256", [show(e.get("model_sha256"))[:16] for e in evaluations]),
        ("evaluated on", [show(e.get("device")) for e in evaluations]),
        ("code revision", [run.revision for run in runs]),
        ("versions", [versions(run) for run in runs]),
    ]  # fmt: skip


def samples(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(prompt, what each run wrote after it)."""
    prompts = dict.fromkeys(s["prompt"] for run in runs for s in run.samples)
    texts = [{s["prompt"]: s["text"] for s in run.samples} for run in runs]
    return [(prompt, [text.get(prompt, "–") for text in texts]) for prompt in prompts]


# -----------------------------------------------------------------------------
# Markdown and the terminal


def grid(page: dict[str, Any], quantity: str) -> list[list[str]]:
    """Head and lines of a perplexity table as plain cells."""
    head = ["YaRN", f"{page['unit']}s", *(run.label for run in page["runs"])]
    for first, second in page["pairs"]:
        head += [f"{second.label} / {first.label} [95 %]", "p"]
    lines = [
        [line["yarn"], line["length"], *(cell["text"] for cell in line["cells"])]
        + [text for ratio in line["ratios"] for text in (ratio["text"], ratio["p"])]
        for line in page["tables"].get(quantity, [])
    ]
    return [head, *lines]


def print_table(page: dict[str, Any]) -> None:
    lines = grid(page, "last")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if len(lines) > 1:
        print("perplexity of the same last tokens, by context length")
        for line in lines:
            print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))


def to_markdown(page: dict[str, Any]) -> str:
    """The content of the HTML page, with the PNG figures beside it."""
    labels = [run.label for run in page["runs"]]
    parts = [f"# {plain(page['title'])}", f"**{plain(page['answer'])}**"]
    if page["claims"]:
        parts.append("\n".join(f"- {plain(sentence)}" for sentence in page["claims"]))
    if page["differing"]:
        body = [[key, *map(str, row)] for key, row in page["differing"].items()]
        parts += [COMPARED + ":", table([["", *labels], *body])]
    if page["figures"]["perplexity"]:
        parts += ["## Perplexity against context", "![perplexity](perplexity.png)"]
    for quantity in page["tables"]:
        parts += [f"### {QUANTITIES[quantity]}", table(grid(page, quantity))]
    parts += [f"Not evaluated: `python -m scripts.eval_perplexity {run.path}`"
              for run in page["runs"] if run.perplexity is None]  # fmt: skip
    parts += ["## Loss", "![loss](loss.png)"]
    if page["samples"]:
        parts.append("## Samples")
    for prompt, texts in page["samples"]:
        for label, text in zip(labels, texts, strict=True):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", prompt + text)), default=0))
            parts += [f"{plain(label)}:", f"{fence}text\n{prompt}{text}\n{fence}"]
    parts += ["## Cost", table([["", *labels], *([k, *v] for k, v in page["cost"])])]
    parts += ["## How it was made", table([["", *labels], *([k, *v] for k, v in page["made"])])]
    parts.append("\n".join(f"- {plain(sentence)}" for sentence in page["protocol"]))
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
