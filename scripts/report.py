"""Compare trained runs on one page: perplexity beyond the context, RULER, CORE, loss, cost.

    python -m scripts.report runs/demo_rope runs/demo_rove --out runs/demo

Runs that differ in the seed alone are one arm; the first arm is the baseline. Writes report.html
(one file, nothing else to load), report.md, the figures as PNG and every number as CSV. Every
sentence is made from the numbers, whichever way they point.
"""

import csv
import math
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import tyro

from nanorove import stats
from nanorove.errors import UserError, run_cli
from nanorove.results import Key, averaged, differing_keys
from scripts import report_tables as tables
from scripts.report_claims import (
    Report,
    answer,
    by_length,
    claims_by_arm,
    missing_notes,
    read_report,
)
from scripts.report_figures import FIGURES, draw

COMPARED = (
    "Of all settings, torch version, device, processes, threads and code revision, the runs differ"
    " in these alone; data and number of steps are the same"
)
BY_LENGTH = (
    "Perplexity of the same last tokens at every length, each interval by itself and not corrected"
    " for being one of many:"
)
OPEN = [
    "What we know of the paper (arXiv 2606.11275) are second-hand notes; its code could not be read"
    " by us. Known: GPT-2's shapes, RoPE with base 10,000 over the whole head, context 1,024, one"
    " epoch of FineWebEdu-10B, DCLM CORE, YaRN applied at evaluation to the same checkpoints.",
    "Optimiser: not known. The 124M and 354M configs follow the public GPT-2 124M reproduction:"
    " 524,288 tokens per step, AdamW 0.9/0.95, weight decay 0.1 on matrices, peak 6e-4 (124M) or"
    " 3e-4 (354M), 715 steps of warm-up, cosine to a tenth, clipping at 1.",
    "YaRN's factor: not known, one for all lengths or length / 1,024 for each. Both can be"
    " evaluated, and stand beside the same numbers of the paper.",
    "Perplexity: text and windows are not known. Assumed in the paper's tables here: {windows}"
    " of long held-out documents. Our claims are about the same last tokens at every"
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


def main(args: Args) -> Path:
    """Write the report of args.runs into args.out; returns the path of report.html."""
    if not args.runs:
        raise UserError("no runs: name at least one run folder, e.g. runs/demo_rope")
    if len({path.resolve() for path in args.runs}) < len(args.runs):
        raise UserError("the same run is given twice; name each run folder once")
    report = read_report(args.runs)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"--out {args.out}: a file; name a folder") from None
    with tempfile.TemporaryDirectory(dir=args.out) as folder:  # all of it, or nothing
        write(report, args.title, Path(folder))
        for name in FIGURES:  # an earlier report may have had more of them
            (args.out / f"{name}.png").unlink(missing_ok=True)
        for path in Path(folder).iterdir():
            path.replace(args.out / path.name)
    return args.out / "report.html"


def write(report: Report, title: str, out: Path) -> None:
    """All files of the report."""
    page = make_page(report, title) | {"figures": draw(report, out)}
    jinja = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    jinja.filters["unbroken"] = lambda text: text.replace(" %", "\u00a0%")
    template = Path(__file__).with_name("report_template.html").read_text(encoding="utf-8")
    for name, lines in csv_tables(report, page["paper"]).items():
        with (out / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
    (out / "report.md").write_text(to_markdown(page), encoding="utf-8")
    (out / "report.html").write_text(jinja.from_string(template).render(page), encoding="utf-8")
    print_table(page)
    print(f"\n{page['answer']}")


def make_page(report: Report, title: str) -> dict[str, Any]:
    """What the HTML and the Markdown show, but for the figures."""
    scale = next(filter(None, map(tables.paper_scale, report.arms)), None)
    windows = tables.QUANTITIES.get(tables.paper_quantity(report), "disjoint windows").lower()
    return {
        "title": title,
        "answer": answer(report),
        "claims": claims_by_arm(report),
        "correction": stats.correction([c.verdict for c in report.claims]) if report.claims else "",
        "one_seed": one_seed(report),
        "caveat": caveat(report),
        "by_length": by_length(report),
        "by_length_note": BY_LENGTH,
        "notes": missing_notes(report),
        "cards": tables.cards(report),
        "paper": tables.paper_tables(report),
        "paper_scale": scale,
        "paper_note": paper_note(report, scale),
        "differing": differing_keys(report.arms),
        "compared": COMPARED,
        "runs": report.runs,
        "arms": report.arms,
        "comparisons": report.comparisons,
        "unit": report.unit,
        "tables": tables.perplexity_tables(report),
        "ruler": tables.ruler_tables(report),
        "ruler_notes": tables.ruler_notes(report),
        "core": tables.core_table(report),
        "hellaswag": tables.hellaswag_table(report),
        "samples": tables.samples(report),
        "cost": tables.cost_table(report),
        "made": tables.made_table(report),
        "trained": tables.run_table(report),
        "protocol": tables.protocol(report),
        "open": [line.format(windows=windows) for line in OPEN],
        "not_evaluated": [r for r in report.runs if "perplexity" not in r.evaluations],
        "losses": any(run.metrics for run in report.runs),
        "same_seeds": all(c.same_seeds for c in report.comparisons),
    }


def one_seed(report: Report) -> bool:
    return all(len(c.pairs) == 1 for c in report.comparisons)


def caveat(report: Report) -> str:
    """What the brackets in the claims are, and are not."""
    if one_seed(report):
        return (
            "In brackets: 95 % intervals over documents or items. They hold for these checkpoints."
            " With one training seed per arm nothing here says whether the method is better:"
            " another seed could move the small differences, so run several."
        )
    return (
        "In brackets: intervals over training seeds. “No difference can be told” is not “there is"
        " none”."
    )


def paper_note(report: Report, scale: str | None) -> str:
    """What stands beside what in the paper's tables."""
    if scale is None:
        return (
            "The same quantities at the same multiples of the training context. The paper has no"
            " numbers at this scale, so none stand beside them."
        )
    run = next(arm.runs[0] for arm in report.arms if tables.paper_scale(arm))
    return (
        f"Paper: arXiv 2606.11275 at {scale}, one epoch of FineWebEdu-10B, by second-hand notes."
        f" Ours: {run.last('tokens') or 0:,} tokens of {run.config.get('data', {}).get('dir')},"
        " means over seeds. The windows of perplexity and the average of RULER are assumed, see"
        " below. “YaRN” of the paper stands beside each of our settings: which it used is not"
        " known."
    )


# -----------------------------------------------------------------------------
# CSV


def csv_tables(report: Report, paper: Sequence[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """{name: head and lines}: every number of every run, the arms' means, every comparison, the
    claims, the paper's tables as they are shown, and the curves of the training."""
    arms = [(arm, run) for arm in report.arms for run in arm.runs]
    numbers = [["run", "arm", "seed", *Key._fields, "value", "n"]]
    losses = [["run", "arm", "seed", "step", "tokens", "train_loss", "val_loss"]]
    for arm, run in arms:
        who = [run.name, arm.label, run.seed]
        for key, found in run.numbers.items():
            if key.evaluation in tables.PERPLEXITIES and found.sums is not None:
                numbers.append([*who, *key._replace(quantity=f"{key.quantity} nll"), found.value, found.n])  # noqa: E501  # fmt: skip
                ppl = math.exp(found.value)
                numbers.append([*who, *key._replace(quantity=f"{key.quantity} ppl"), ppl, found.n])
            else:
                numbers.append([*who, *key, found.value, found.n])
        for m in run.metrics:
            if "train/loss" in m or "val/loss" in m:
                line = [m.get(k) for k in ("step", "tokens", "train/loss", "val/loss")]
                losses.append([*who, *line])
    means = [["arm", *Key._fields, "mean", "perplexity", "seeds"]]
    for arm in report.arms:
        for key in dict.fromkeys(key for run in arm.runs for key in run.numbers):
            if (mean := report.mean(arm, key)) is not None:
                of_nats = key.evaluation in tables.PERPLEXITIES and "bits" not in key.quantity
                ppl, runs = math.exp(mean) if of_nats else None, averaged(arm, report.arms, key)
                means.append([arm.label, *key, mean, ppl, len(runs)])
    return {
        "numbers": numbers,
        "means": means,
        "comparisons": comparison_lines(report),
        "claims": [
            ["arm", "baseline", *Key._fields, "seeds", "difference", "low", "high", "p", "told",
             "with_other_documents_low", "with_other_documents_high", "sentence"],
            *([report.comparisons[s.comparison].second.label,
               report.comparisons[s.comparison].first.label, *s.key, v.seeds,
               *finite(v.difference), v.p, v.told,
               *(finite(v.everything)[1:] if v.everything else (None, None)), v.words()]
              for s in report.claims for v in [s.verdict]),
        ],
        "paper": [
            ["table", "line", "column", "paper", "ours", "interval"],
            *([made["title"], line["label"], head, cell["paper"], cell["ours"], cell["interval"]]
              for made in paper for line in made["lines"]
              for head, cell in zip(made["heads"], line["cells"], strict=True)),
        ],
        "loss": losses,
    }  # fmt: skip


def comparison_lines(report: Report) -> list[list[Any]]:
    """A line per pair of runs, and one over the seeds: second minus first (nats, or points), 95 %
    interval, p; n is documents or items, and seeds."""
    lines = [["arm", "baseline", *Key._fields, "seed", "difference", "low", "high", "p", "n",
              "speaks_about", "unit"]]  # fmt: skip
    for (i, key), found in report.effects.items():
        c = report.comparisons[i]
        who = [c.second.label, c.first.label, *key]
        unit = "points" if key.evaluation in ("core", "hellaswag") else "nats"
        for seed, p in zip(found.seeds, found.per_seed, strict=True):
            if isinstance(p, stats.Paired):
                line = [*finite(p.difference), p.p, p.documents, "these checkpoints"]
            else:
                line = [p, None, None, None, None, "these checkpoints"]
            lines.append([*who, seed, *line, unit])
        if len(found.seeds) > 1:
            values = [p.difference.value if isinstance(p, stats.Paired) else p for p in found.per_seed]  # noqa: E501  # fmt: skip
            p = stats.seed_p(values)
            about = "the method on these documents"
            lines.append([*who, "all", *finite(found.interval), p, len(values), about, unit])
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
    made = page["tables"].get(tables.QUANTITIES["last"])
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

    def add(heading: str, figure: str, found: dict[str, Any]) -> None:
        if page["figures"][figure] or found:
            parts.append(f"## {heading}")
        if page["figures"][figure]:
            parts.append(f"![{figure}]({figure}.png)")
        for title, made in found.items():
            parts.extend([f"### {plain(title)}", table(grid(page, made))])

    def bullets(lines: Iterable[str]) -> None:
        text = "\n".join(f"- {plain(line)}" for line in lines)
        parts.extend([text] if text else [])

    for heading, lines in page["claims"]:
        parts.append(f"## {plain(heading)}")
        bullets(line for _, line in lines)
    if page["claims"]:
        parts.append(plain(f"{page['correction']} {page['caveat']}"))
    if page["by_length"]:
        parts.append(BY_LENGTH)
    bullets(page["by_length"])
    bullets(page["notes"])
    if page["paper"]:
        scale = page["paper_scale"]
        parts.append("## The paper's tables, and ours" if scale else "## In the paper's layout")
        parts.append(plain(page["paper_note"]))
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
    run_cli(lambda: print(f"report: {main(tyro.cli(Args, prog='python -m scripts.report'))}"))
