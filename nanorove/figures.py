"""The figures of a report: numbers of all seeds, their mean, and what the second arm changes."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from nanorove.results import Arm, Comparison, Effect, Key, Run, averaged

# Okabe and Ito's colours, which the colour-blind can tell apart: one per pos_emb, everywhere. An
# SVG gets CSS variables of the same names instead, so that its page can be dark.
COLORS = {
    "rope": "#0072b2",
    "rove": "#d55e00",
    "rove_no_inverse": "#997700",
    "learned": "#009e73",
    "none": "#aa4499",
    "ink": "#1d2125",
    "muted": "#6c737a",
    "grid": "#e2e5e9",
}
MARKERS = {"rope": "o", "rove": "s", "rove_no_inverse": "v", "learned": "^", "none": "D"}
LINES = ("-", "--", ":", "-.")  # for arms with the same pos_emb
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
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "text.parse_math": False,  # a label with a $ is no formula
    "svg.fonttype": "none",  # text stays text, in the page's font
    "svg.hashsalt": "nanorove",  # the same figure gives the same file
}
SEED = {"linewidth": 0.7, "alpha": 0.45}  # one seed of several, behind their mean
POINTS = 300  # of a curve at most: more cannot be seen, and the page grows by each

Effects = Mapping[tuple[int, Key], Effect]
"""By the index of the comparison and the number."""


@dataclass(frozen=True)
class Panel:
    """One column of a figure: the numbers that stand at each x, or at each named line."""

    title: str
    keys: dict[Any, Key]


def looks(arm: Arm) -> dict[str, Any]:
    """Colour, marker and line of an arm: the same in every figure."""
    return {
        "color": COLORS[arm.pos_emb],
        "marker": MARKERS[arm.pos_emb],
        "linestyle": LINES[arm.twin % len(LINES)],
        "markerfacecolor": "none" if arm.twin else COLORS[arm.pos_emb],
    }


def named(arm: Arm) -> str:
    """Its label, cut to what a figure can hold."""
    return arm.label if len(arm.label) <= 28 else arm.label[:27] + "…"


def against(comparisons: Sequence[Comparison], sign: str) -> str:
    """ "RoVE / RoPE", or what fits if there are several or long ones."""
    label = f"{named(comparisons[0].second)} {sign} {named(comparisons[0].first)}"
    if len(comparisons) == 1 and len(label) < 24:
        return label
    return "ratio to baseline" if sign == "/" else "minus baseline"


# -----------------------------------------------------------------------------
# numbers against a length or a position


def lines_figure(
    panels: Sequence[Panel],
    arms: Sequence[Arm],
    comparisons: Sequence[Comparison],
    effects: Effects,
    *,
    ylabel: str,
    xlabel: str,
    ratio: bool,
    all_panels: Sequence[Panel],
) -> Figure:
    """A column per panel, whose keys stand at an x: the numbers above, below what is changed.

    ratio: the numbers are nats; show perplexities on a logarithmic axis, and their ratio. Scales
    are those of `all_panels`, so that separate figures can be compared.
    """
    to = np.exp if ratio else np.asarray
    keys = [key for panel in all_panels for key in panel.keys.values()]
    changes = [e for (_, key), e in effects.items() if key in set(keys)]
    heights = [3, 1.9] if changes else [1]
    figure = Figure(figsize=(3.7 * len(panels), 4.6 if changes else 3.3), layout="constrained")
    axes = figure.subplots(
        len(heights), len(panels), sharex=True if ratio else "col", sharey="row",
        squeeze=False, height_ratios=heights,
    )  # fmt: skip
    top = to(np.array([v for arm in arms for key in keys for v in arm.values(key)]))
    context = arms[0].runs[0].context
    for panel, (ax, *below) in zip(panels, axes.T, strict=True):
        for arm in arms:
            _draw_arm(ax, arm, arms, panel, to)
        ax.set_title(panel.title, loc="left")
        ax.set_ylabel(ylabel)
        if ax is axes[0, 0] and ax.get_legend_handles_labels()[0]:
            if len(arms) > 4:  # more would cover the curves
                handles, labels = ax.get_legend_handles_labels()
                figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
            else:
                ax.legend(loc="best")
        for lower in below:
            lower.axhline(1 if ratio else 0, color=COLORS["muted"], linewidth=1)
            for i, comparison in enumerate(comparisons):
                found = {x: effects[i, k] for x, k in panel.keys.items() if (i, k) in effects}
                if found:  # side by side, so that the intervals can be seen
                    last = len(comparisons) - 1
                    side = 1.06 ** ((i - last / 2) / max(1, last))
                    found = {x * side: e for x, e in found.items()}
                    _draw_change(lower, comparison, found, to)
            lower.set_ylabel(against(comparisons, "/" if ratio else "−"))
            _change_scale(lower, changes, ratio)
        (below[-1] if below else ax).set_xlabel(xlabel)
        for each in (ax, *below):
            each.set_xscale("log", base=2)
            xs = sorted(panel.keys)
            if ratio:
                each.xaxis.set_major_locator(FixedLocator(xs))
            else:
                each.xaxis.set_major_locator(FixedLocator([4**i for i in range(12)]))
            each.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(round(x))))
            each.xaxis.set_minor_locator(NullLocator())
            if xs[0] < context <= xs[-1]:
                each.axvline(context, color=COLORS["muted"], linewidth=1, linestyle=":")
            each.label_outer()
        if xs[0] < context < xs[-1]:
            ax.annotate(
                "trained", (context, 0), xycoords=("data", "axes fraction"), xytext=(3, 4),
                textcoords="offset points", color=COLORS["muted"], fontsize=8,
            )  # fmt: skip
        if ratio:
            _log_axis(ax, top.min() / 1.15, top.max() * 1.3)
    return figure


def _draw_arm(ax: Axes, arm: Arm, arms: Sequence[Arm], panel: Panel, to: Callable) -> None:
    """Every seed thin and their mean bold; what is averaged are nats."""
    look = looks(arm)
    if len(arm.runs) > 1:
        for run in arm.runs:
            points = _points(run, panel)
            if points:
                xs, values = zip(*points, strict=True)
                ax.plot(xs, to(values), look["linestyle"], color=look["color"], **SEED)
    means = [
        (x, np.mean([run.numbers[k].value for run in averaged(arm, arms, k)]))
        for x, k in panel.keys.items()
        if arm.having(k)
    ]
    if means:
        xs, values = zip(*means, strict=True)
        ax.plot(xs, to(values), label=named(arm), **look)


def _points(run: Run, panel: Panel) -> list[tuple[Any, float]]:
    found = [(x, run.numbers[k].value) for x, k in panel.keys.items() if k in run.numbers]
    return [(x, value) for x, value in found if value is not None]


def _draw_change(ax: Axes, comparison: Comparison, found: dict[Any, Effect], to: Callable) -> None:
    """The mean with its interval, and every seed thin."""
    look = looks(comparison.second)
    seeds = {seed for e in found.values() for seed in e.seeds}
    if len(seeds) > 1:
        for seed in seeds:
            line = [
                (x, getattr(p, "difference", None) or p)
                for x, e in found.items()
                for s, p in zip(e.seeds, e.per_seed, strict=True)
                if s == seed
            ]
            xs, values = zip(*line, strict=True)
            ax.plot(xs, to([getattr(v, "value", v) for v in values]), color=look["color"], **SEED)
    intervals = [e.interval for e in found.values()]
    value, low, high = (to([getattr(i, k) for i in intervals]) for k in ("value", "low", "high"))
    sure = np.isfinite(low) & np.isfinite(high)
    error = np.where(sure, [value - low, high - value], 0)
    ax.errorbar(list(found), value, yerr=error, capsize=3, **look)


def _change_scale(ax: Axes, changes: Sequence[Effect], ratio: bool) -> None:
    """The axis holds all values; intervals of few seeds may go beyond it."""
    values = np.array([e.interval.value for e in changes])
    ends = np.array([[e.interval.low, e.interval.high] for e in changes]).ravel()
    reach = 3 * np.abs(values).max() + 1e-3
    ends = np.concatenate([values, ends[np.isfinite(ends) & (np.abs(ends) <= reach)], [0]])
    low, high = ends.min(), ends.max()
    margin = 0.08 * (high - low) + 1e-4
    if ratio:
        _log_axis(ax, math.exp(low - margin), math.exp(high + margin))
    else:
        ax.set_ylim(low - margin, high + margin)


def _log_axis(ax: Axes, low: float, high: float) -> None:
    """Plain numbers on a logarithmic y axis, also where it spans less than a decade."""
    if high / low > 8:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        few = (1, 2, 3, 4, 6, 8) if high / low < 50 else (1, 2, 5) if high / low < 1000 else (1,)
        ticks = [m * 10.0**d for d in decades for m in few]
    else:
        ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
    ax.set(yscale="log", ylim=(low, high))
    ax.yaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _short(length: int) -> str:
    """4096 -> "4k"."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


# -----------------------------------------------------------------------------
# numbers by name


def dots_figure(panels: Sequence[Panel], arms: Sequence[Arm], *, xlabel: str) -> Figure:
    """A panel beside the other; a line per name with each arm's seeds (small) and mean (large)."""
    rows = max(len(panel.keys) for panel in panels)
    height = 0.9 + rows * max(0.24, 0.1 * len(arms))
    figure = Figure(figsize=(3.9 * len(panels), height), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, squeeze=False)[0]
    for panel, ax in zip(panels, axes, strict=True):
        for i, arm in enumerate(arms):
            look = looks(arm) | {"linestyle": "none"}
            shift = (i - (len(arms) - 1) / 2) * 0.6 / max(len(arms), 2)
            for y, key in enumerate(panel.keys.values()):
                values = arm.values(key)
                if not values:
                    continue
                if len(values) > 1:
                    ax.plot(values, [y + shift] * len(values), **look | {"markersize": 2, "alpha": 0.5})  # noqa: E501  # fmt: skip
                runs = averaged(arm, arms, key)
                ax.plot([np.mean([r.numbers[key].value for r in runs])], [y + shift], **look)
        ax.set_yticks(range(len(panel.keys)), list(panel.keys))
        ax.set(ylim=(len(panel.keys) - 0.5, -0.5), xlabel=xlabel)
        ax.set_title(panel.title, loc="left")
        ax.tick_params(axis="y", length=0)
    for arm in arms:
        axes[0].plot([], [], label=named(arm), **looks(arm) | {"linestyle": "none"})
    figure.legend(loc="outside upper right", ncols=min(len(arms), 3))
    return figure


# -----------------------------------------------------------------------------
# loss

SETTLED = 0.06  # of the steps: before, the loss falls from ln V and would flatten everything else


def loss_figures(
    arms: Sequence[Arm], comparisons: Sequence[Comparison], together: bool
) -> list[Figure]:
    """Loss and paired difference: one figure each, or one above the other in a single figure.

    Runs of unequal seeds had other batches, so there is no difference of theirs to draw, and a run
    that is only an evaluation has no losses.
    """
    arms = [arm for arm in arms if any(run.metrics for run in arm.runs)]
    comparisons = [c for c in comparisons if c.same_seeds and c.second in arms and c.first in arms]
    if not arms:
        return []
    count = 2 if comparisons else 1
    if together:
        figures = [Figure(figsize=(7, 3 * count), layout="constrained")]
        axes = figures[0].subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    else:
        figures = [Figure(figsize=(4.6, 3.3), layout="constrained") for _ in range(count)]
        axes = [figure.subplots() for figure in figures]
    _draw_loss(axes[0], arms)
    if comparisons:
        _draw_difference(axes[1], comparisons)
    for ax in axes if not together else axes[-1:]:
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figures


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over a twenty-fifth of the curve; shorter at its ends."""
    half = len(values) // 50
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def mean_series(
    series: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """(steps, mean) of several (steps, values), at the steps that all of them have."""
    steps = sorted(set.intersection(*({*steps.tolist()} for steps, _ in series)))
    if not steps:  # resumed at other steps, so logged at others
        steps, _ = series[0]
        return mean_series(series[:1])
    values = [values[np.searchsorted(of, steps)] for of, values in series]
    return np.array(steps, dtype=int), np.mean(values, 0)


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    every = -(-len(x) // POINTS)
    return x[::every], y[::every]


def _draw_curve(
    ax: Axes, series: Sequence[tuple[np.ndarray, np.ndarray]], look: dict[str, Any], label: str
) -> np.ndarray | None:
    """One seed: its points faint and smoothed bold. Several: each smoothed thin, their mean bold.
    Returns the bold line from where it has settled on."""
    series = [(steps, values) for steps, values in series if len(steps)]
    if not series:
        return None
    color = look["color"]
    if len(series) == 1:
        ax.plot(*_thin(*series[0]), color=color, linewidth=0.6, alpha=0.3)
    else:
        for steps, values in series:
            ax.plot(*_thin(steps, smooth(values)), color=color, **SEED)
    steps, mean = mean_series(series)
    line = smooth(mean)
    ax.plot(*_thin(steps, line), look["linestyle"], color=color, label=label)
    return line[np.searchsorted(steps, steps[-1] * SETTLED) :]


def _draw_loss(ax: Axes, arms: Sequence[Arm]) -> None:
    """Training loss (lines) and validation loss (markers: the mean over seeds)."""
    tops, bottoms = [], []
    for arm in arms:
        look = looks(arm)
        line = _draw_curve(ax, [run.series("train/loss") for run in arm.runs], look, named(arm))
        if line is not None:
            tops.append(line[0])
            bottoms.append(line.min())
        validation = [s for s in (run.series("val/loss") for run in arm.runs) if len(s[0])]
        if validation:
            steps, values = mean_series(validation)
            label = f"{named(arm)}, validation" if len(arms) < 4 else None
            ax.plot(*_thin(steps, values), **look | {"linestyle": "none"}, label=label)
            bottoms.append(values.min())
    if tops:
        low, high = min(bottoms), max(tops)
        ax.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
    ax.set_ylabel(f"nats per {arms[0].runs[0].unit}")
    ax.set_title("Loss", loc="left")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper right")


def _draw_difference(ax: Axes, comparisons: Sequence[Comparison]) -> None:
    """Second minus first at the same step, where both had seen the same tokens."""
    ax.axhline(0, color=COLORS["muted"], linewidth=1)
    extent = [1e-3]
    for comparison in comparisons:
        look = looks(comparison.second)
        pairs = comparison.pairs
        label = named(comparison.second)
        series = [paired_series(*pair, "train/loss") for pair in pairs]
        line = _draw_curve(ax, series, look, label)
        if line is not None:
            extent += list(np.abs(line) * 1.6)
        series = [s for s in (paired_series(*pair, "val/loss") for pair in pairs) if len(s[0])]
        if series:
            steps, mean = mean_series(series)
            settled = steps >= max(steps) * SETTLED
            if len(series) > 1:
                for of, values in series:
                    ax.plot(*_thin(of, values), look["marker"], color=look["color"], markersize=2, alpha=0.5)  # noqa: E501  # fmt: skip
            ax.plot(*_thin(steps, mean), **look | {"linestyle": "none"})
            extent += list(np.abs(mean[settled]) * 1.4)
    ax.set(ylim=(-max(extent), max(extent)), ylabel=f"nats per {comparisons[0].first.runs[0].unit}")
    first, second = comparisons[0].first, comparisons[0].second
    one = len(comparisons) == 1
    what = f"{named(second)} minus {named(first)}" if one else f"Minus {named(first)}"
    ax.set_title(f"{what}, after the same tokens", loc="left")
    if not one:
        ax.legend(loc="upper right", fontsize=7)


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
