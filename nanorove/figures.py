"""The figures of a report: perplexity against length, loss, and the paired difference of each."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from nanorove.results import Pair, Row, Run, yarn_words

# Okabe and Ito's colours, which the colour-blind can tell apart: one per pos_emb, everywhere. An
# SVG gets CSS variables of the same names instead, so that its page can be dark.
COLORS = {
    "rope": "#0072b2",
    "rove": "#d55e00",
    "learned": "#009e73",
    "none": "#aa4499",
    "ink": "#1d2125",
    "muted": "#6c737a",
    "grid": "#e2e5e9",
}
MARKERS = {"rope": "o", "rove": "s", "learned": "^", "none": "D"}
LINES = ("-", "--", ":", "-.")  # for runs with the same pos_emb
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": COLORS["muted"],
    "axes.labelcolor": COLORS["ink"],
    "axes.titlecolor": COLORS["ink"],
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["muted"],
    "ytick.color": COLORS["muted"],
    "xtick.labelcolor": COLORS["ink"],
    "ytick.labelcolor": COLORS["ink"],
    "grid.color": COLORS["grid"],
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "text.parse_math": False,  # a label with a $ is no formula
    "svg.fonttype": "none",  # text stays text, in the page's font
    "svg.hashsalt": "nanorove",  # the same figure gives the same file
}


def looks(run: Run) -> dict[str, Any]:
    """Colour, marker and line of a run: the same in every figure."""
    return {
        "color": COLORS[run.pos_emb],
        "marker": MARKERS[run.pos_emb],
        "linestyle": LINES[run.twin % len(LINES)],
    }


def named(run: Run) -> str:
    """Its label, cut to what a figure can hold."""
    return run.label if len(run.label) <= 28 else run.label[:27] + "…"


# -----------------------------------------------------------------------------
# perplexity against length


def perplexity_figure(
    runs: Sequence[Run], rows: Sequence[Row], pairs: Sequence[Pair], yarns: Sequence[str]
) -> Figure:
    """A column per YaRN setting of `yarns`: perplexity above, the pairs' ratio below. The scales
    are those of all `rows`, so that columns and separate figures can be compared."""
    rows = [row for row in rows if row.quantity == "last"]
    values = [e["ppl"] for row in rows for e in row.entries if e and e["nll"] is not None]
    ratios = [p.difference.exp() for row in rows for p in row.paired if p]
    extent = [1.0, *(x for ratio in ratios for x in (ratio.low, ratio.high))]
    figure = Figure(figsize=(3.7 * len(yarns), 4.4), layout="constrained")
    heights = [3, 1.7] if pairs else [1]
    axes = figure.subplots(
        len(heights), len(yarns), sharex=True, sharey="row", squeeze=False, height_ratios=heights
    )
    for yarn, (top, *below) in zip(yarns, axes.T, strict=True):
        _draw_perplexity(top, runs, yarn)
        _log_axis(top, min(values) / 1.15, max(values) * 1.3)
        for ax in below:
            _draw_ratio(ax, [row for row in rows if row.yarn == yarn], pairs)
            _log_axis(ax, min(extent) * 0.96, max(extent) * 1.04)
        for ax in (top, *below):
            ax.axvline(runs[0].context, color=COLORS["muted"], linewidth=1, linestyle=":")
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(FixedLocator(sorted({row.length for row in rows})))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(round(x))))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.label_outer()
        (below[-1] if below else top).set_xlabel(f"context in {runs[0].unit}s")
    return figure


def _draw_perplexity(ax: Axes, runs: Sequence[Run], yarn: str) -> None:
    for run in runs:
        points = [
            (length, entry["ppl"])
            for (quantity, setting, length), entry in run.entries.items()
            if (quantity, setting) == ("last", yarn) and entry["nll"] is not None
        ]
        if points:
            ax.plot(*zip(*points, strict=True), label=named(run), **looks(run))
    ax.set_ylabel(f"perplexity per {runs[0].unit}")
    ax.set_title(yarn_words(yarn).capitalize().replace("yarn", "YaRN"), loc="left")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left")
    ax.annotate(
        "trained", (runs[0].context, 0), xycoords=("data", "axes fraction"), xytext=(3, 4),
        textcoords="offset points", color=COLORS["muted"], fontsize=8,
    )  # fmt: skip


def _draw_ratio(ax: Axes, rows: Sequence[Row], pairs: Sequence[Pair]) -> None:
    ax.axhline(1, color=COLORS["muted"], linewidth=1)
    for i, (_, second) in enumerate(pairs):
        points = [(row.length, row.paired[i].difference.exp()) for row in rows if row.paired[i]]
        if points:
            lengths, ratios = zip(*points, strict=True)
            error = [[r.value - r.low for r in ratios], [r.high - r.value for r in ratios]]
            values = [r.value for r in ratios]
            ax.errorbar(lengths, values, yerr=error, capsize=3, **looks(second))
    first, second = pairs[0]
    ratio = f"{named(second)} / {named(first)}"
    ax.set_ylabel(ratio if len(pairs) == 1 and len(ratio) < 24 else "ratio to baseline")


def _log_axis(ax: Axes, low: float, high: float) -> None:
    """Plain numbers on a logarithmic y axis, also where it spans less than a decade."""
    if high / low > 8:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [m * 10.0**d for d in decades for m in ((1, 2, 5) if high / low < 1000 else (1,))]
    else:
        ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
    ax.set(yscale="log", ylim=(low, high))
    ax.yaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _short(length: int) -> str:
    """4096 -> "4k"."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


# -----------------------------------------------------------------------------
# loss

SETTLED = 0.06  # of the steps: before, the loss falls from ln V and would flatten everything else


def loss_figures(runs: Sequence[Run], pairs: Sequence[Pair], together: bool) -> list[Figure]:
    """Loss and paired difference: one figure each, or one above the other in a single figure.

    Runs of unequal seeds had other batches, so there is no difference of theirs to draw.
    """
    pairs = [(first, second) for first, second in pairs if first.seed == second.seed]
    count = 2 if pairs else 1
    if together:
        figures = [Figure(figsize=(7, 3 * count), layout="constrained")]
        axes = figures[0].subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    else:
        figures = [Figure(figsize=(4.6, 3.3), layout="constrained") for _ in range(count)]
        axes = [figure.subplots() for figure in figures]
    _draw_loss(axes[0], runs)
    if pairs:
        _draw_difference(axes[1], pairs)
    axes[-1].set_xlabel("step")
    if not together:
        axes[0].set_xlabel("step")
    return figures


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over a twenty-fifth of the curve; shorter at its ends."""
    half = len(values) // 50
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _draw_loss(ax: Axes, runs: Sequence[Run]) -> None:
    """Training loss (single steps faint, smoothed bold) and validation loss (markers)."""
    tops, bottoms = [], []
    for run in runs:
        steps, loss = run.series("train/loss")
        val_steps, val = run.series("val/loss")
        look = looks(run)
        if len(loss):
            line = smooth(loss)
            ax.plot(steps, loss, color=look["color"], linewidth=0.6, alpha=0.3)
            ax.plot(steps, line, look["linestyle"], color=look["color"], label=named(run))
            tops.append(line[np.searchsorted(steps, steps[-1] * SETTLED)])
            bottoms.append(line.min())
        if len(val):
            label = f"{named(run)}, validation" if len(runs) < 4 else None
            ax.plot(val_steps, val, **look | {"linestyle": "none"}, label=label)
            bottoms.append(val.min())
    if tops:
        low, high = min(bottoms), max(tops)
        ax.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
    ax.set_ylabel(f"nats per {runs[0].unit}")
    ax.set_title("Loss", loc="left")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper right")


def _draw_difference(ax: Axes, pairs: Sequence[Pair]) -> None:
    """Second minus first at the same step, where both had seen the same tokens."""
    ax.axhline(0, color=COLORS["muted"], linewidth=1)
    extent = [1e-3]
    for first, second in pairs:
        look = looks(second)
        for key in ("train/loss", "val/loss"):
            steps, difference = paired_series(first, second, key)
            settled = steps >= max(steps, default=0) * SETTLED
            if key == "val/loss":
                ax.plot(steps, difference, **look | {"linestyle": "none"})
                extent += list(np.abs(difference[settled]) * 1.2)
            elif len(steps):
                line = smooth(difference)
                ax.plot(steps, difference, color=look["color"], linewidth=0.6, alpha=0.3)
                ax.plot(steps, line, look["linestyle"], color=look["color"])
                extent += list(np.abs(line[settled]) * 1.6)
    ax.set(ylim=(-max(extent), max(extent)), ylabel=f"nats per {pairs[0][0].unit}")
    first, second = pairs[0]
    what = f"{named(second)} minus {named(first)}" if len(pairs) == 1 else "Minus the baseline"
    ax.set_title(f"{what}, after the same tokens", loc="left")


def paired_series(first: Run, second: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, second minus first) of a metric where both have the same step and tokens."""
    a, b = (
        {(m["step"], m["tokens"]): m[key] for m in run.metrics if key in m}
        for run in (first, second)
    )
    common = sorted(a.keys() & b.keys())
    steps = np.array([step for step, _ in common], dtype=int)
    return steps, np.array([b[place] - a[place] for place in common], dtype=float)


# -----------------------------------------------------------------------------


def to_svg(figure: Figure, name: str, alt: str) -> Markup:
    """An SVG to put into a page. Its colours are CSS variables (--rope, --ink, ...), its size is
    what the page gives it, and its ids begin with `name`, as ids are the whole page's."""
    buffer = io.StringIO()
    nobody = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nobody)
    head, body = re.fullmatch(r".*?<svg([^>]*)>(.*)", buffer.getvalue(), re.DOTALL).groups()
    view_box = re.search(r'viewBox="[^"]*"', head)[0]
    body = re.sub(r'\bid="|url\(#|href="#', lambda found: f"{found[0]}{name}-", body)
    for key, color in COLORS.items():
        body = body.replace(color, f"var(--{key})")
    return Markup(f'<svg role="img" aria-label="{escape(alt)}" {view_box}>{body}')
