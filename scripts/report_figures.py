"""The figures of the comparison: as PNG files, and as SVG for the page."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from nanorove import figures
from nanorove.figures import Panel
from nanorove.results import Key, yarn_words
from scripts.report_claims import Report, sentence_case
from scripts.report_tables import category_label

FIGURES = ("perplexity", "position", "ruler", "core", "loss")


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
               "xlabel": f"{'context' if ratio else 'position'} in {report.unit}s"}  # fmt: skip
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
