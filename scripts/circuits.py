"""
What the heads of a trained model are as linear maps; two runs side by side:
    python -m scripts.circuits runs/demo_rope runs/demo_rove
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from data.loader import ValLoader
from data.shards import MANIFEST, load_manifest
from data.tokenizer import check_tokenizer, recorded_tokenizer
from model import GPT, CausalSelfAttention, rotary_table
from nanorove import circuits
from nanorove.checkpoint import load_model, resolve_step_dir
from nanorove.errors import UserError, run_cli
from nanorove.figures import COLORS, STYLE
from nanorove.files import write_text_atomic
from nanorove.results import POS_EMB
from nanorove.scoring import token_nll

SEQUENCES = 8  # of validation text that the attention is averaged over
PICTURE = 6  # tokens in the picture of a mixer
ROUNDING = 1e-4  # relative, of a head in float32


@dataclass(frozen=True)
class Args:
    """Matrix mixers, offset kernels and attention by distance: circuits.json and circuits.png."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """One run or step folder, or two to see side by side."""
    out: Path | None = None
    """Folder for the results; default: eval/ of the first run."""
    mixer_tokens: int = 16
    """Length of the sequence whose matrix mixers are built."""
    val_tokens: int = 32768
    """Tokens of the validation split for the loss with and without rotated values."""
    data: Path | None = None
    """Data folder; default: the one the run was trained on."""


def main() -> None:
    args = tyro.cli(Args, prog="python -m scripts.circuits")
    if len(args.runs) not in (1, 2):
        raise UserError(f"{len(args.runs)} runs: name one, or two to see side by side")
    # runs/NAME/ckpt/step_00000500 -> runs/NAME/eval
    out = args.out or resolve_step_dir(args.runs[0]).resolve().parent.parent / "eval"
    out.mkdir(parents=True, exist_ok=True)  # before the work, so that it cannot be in vain
    found, pictures = [], []
    for run in args.runs:
        result, picture = analyse(run, args)
        found.append(result)
        pictures.append(picture)
        print(summary(result))
    write_text_atomic(out / "circuits.json", json.dumps({"schema": 1, "runs": found}) + "\n")
    with matplotlib.rc_context(STYLE):
        draw(found, pictures).savefig(out / "circuits.png", dpi=150)
    print(f"wrote {out / 'circuits.json'} and {out / 'circuits.png'}")


@torch.inference_mode()
def analyse(run: Path, args: Args) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what circuits.json says of a run, the mixer to draw)."""
    step_dir = resolve_step_dir(run)
    model, meta = load_model(step_dir)
    config = model.config
    T = config.context
    if config.pos_emb == "rove_no_inverse":
        raise UserError(f"{run}: values that nothing turns back have no circuit per distance")
    if not PICTURE <= args.mixer_tokens <= T:
        raise UserError(f"--mixer-tokens ({args.mixer_tokens}): from {PICTURE} to {T}")
    data_dir = args.data or Path(meta["config"]["data"]["dir"])
    of_data = recorded_tokenizer(load_manifest(data_dir)["tokenizer"], data_dir / MANIFEST)
    check_tokenizer(of_data, meta["data"]["tokenizer"], step_dir)  # else its ids mean other tokens
    loader = ValLoader(
        data_dir, block_size=T, micro_batch_size=SEQUENCES, val_tokens=args.val_tokens
    )
    n = args.mixer_tokens
    sequences = next(iter(loader))[0]  # (SEQUENCES or fewer, T)
    mass = torch.stack(
        [
            torch.stack(circuits.model_attention(model, row[None], circuits.attention_by_distance))
            for row in sequences
        ]
    ).mean(0)  # (n_layer, nh, T)
    attention = circuits.model_attention(model, sequences[:1, :n])  # (1, nh, n, n) of each layer
    heads = circuits.reads_and_outputs(model, sequences[:1, :n])
    cos, sin = rotary_table(config, n) if config.pos_emb == "rove" else (None, None)
    distances = sorted({round(2 ** (k / 6)) for k in range(200)} & set(range(T)) | {0})
    one = torch.eye(config.head_dim, dtype=torch.float64)
    identity = circuits.offset_kernel(one, one, config, distances)  # what R alone does
    mixers, kernels, picture = [], [], {"spread": -1.0}
    for layer, (block, A) in enumerate(zip(model.transformer.h, attention, strict=True)):
        for head in range(config.n_head):
            place = {"layer": layer, "head": head}
            w_v, w_o = circuits.value_weights(block.attn, head)
            kernels.append(place | circuits.offset_kernel(w_v, w_o, config, distances))
            own = A[0, head]
            value_map = circuits.value_mixer(own, cos, sin, config.head_dim)
            mixer = circuits.matrix_mixer(value_map, w_v)
            check_mixer(mixer, value_map, block.attn, head, *heads[layer], f"{run}: {layer}.{head}")
            near = circuits.relative_distance(mixer, circuits.kronecker_form(own, w_v))
            far = None
            if config.rotary:
                toeplitz = circuits.toeplitz_form(own, w_v, config)
                far = circuits.relative_distance(mixer, toeplitz)
            mixers.append(place | {"to_kronecker": near, "to_toeplitz": far})
            # to see something, the head that looks at most tokens
            small = own[:PICTURE, :PICTURE]
            spread = float(-(small * small.clamp(min=1e-12).log()).sum())
            if spread > picture["spread"]:
                seen = value_map[:PICTURE, :, :PICTURE]  # (PICTURE, hs, PICTURE, hs)
                picture = place | {"spread": spread, "map": seen.flatten(2).flatten(0, 1)}
    result = {
        "run": meta["config"]["run_name"],
        "step": meta["step"],
        "model_sha256": meta["files"]["model.safetensors"]["sha256"],
        "pos_emb": config.pos_emb,
        "context": T,
        "loss": losses(model, loader),
        "mixer": {"tokens": n, "heads": mixers},
        "kernel": {"distances": distances, "identity": identity, "heads": kernels},
        "attention": {
            "sequences": len(sequences),
            "queries": "the later half of each sequence",
            "mass": mass.tolist(),  # layer, head, distance
        },
    }
    return result, picture


def check_mixer(
    mixer: torch.Tensor,
    value_map: torch.Tensor,
    attn: CausalSelfAttention,
    head: int,
    x: torch.Tensor,
    y: torch.Tensor,
    where: str,
) -> None:
    """Raise UserError unless the mixer gives what the model's own forward pass gave.

    x (1, n, C) is what the layer read and y (1, nh, n, hs) what its heads put out.
    """
    bias = circuits.value_bias(attn, head).expand(mixer.size(0), -1)
    ours = torch.einsum("iajc,jc->ia", mixer, x[0]) + torch.einsum("iajb,jb->ia", value_map, bias)
    off = circuits.relative_distance(y[0, head], ours)
    if not off <= ROUNDING:
        raise UserError(f"{where}: the mixer is not the head, off by {off:.1g}: model.py and"
                        " nanorove/circuits.py have come apart")  # fmt: skip


def losses(model: GPT, loader: ValLoader) -> dict[str, float | None]:
    """Validation loss in nats per token, as trained and with the rotation of the values switched:
    off for RoVE, on for RoPE. It has to get worse, or the rotation means nothing to the model."""
    other = {"rope": "rove", "rove": "rope"}.get(model.config.pos_emb)
    found: dict[str, float | None] = {"as_trained": mean_loss(model, loader), "switched": None}
    if other:
        switched = GPT(dataclasses.replace(model.config, pos_emb=other), max_len=model.max_len)
        switched.load_state_dict(model.state_dict())
        found["switched"] = mean_loss(switched, loader)
    return found


def mean_loss(model: GPT, loader: ValLoader) -> float:
    nll = [token_nll(model, x, y).double().flatten() for x, y in loader]
    return float(torch.cat(nll).mean())


def summary(result: dict[str, Any]) -> str:
    """A run in three lines."""
    heads = result["mixer"]["heads"]
    near, far = (
        [h[key] for h in heads if h[key] is not None] for key in ("to_kronecker", "to_toeplitz")
    )
    lines = [
        f"{result['run']}: {POS_EMB[result['pos_emb']]}, step {result['step']:,}",
        f"  distance of the mixers to A (x) W_V: {min(near):.2g} to {max(near):.2g}"
        + (f"; to sum_d (A o S_d) (x) R_d W_V: {min(far):.2g} to {max(far):.2g}" if far else ""),
    ]
    as_trained, switched = result["loss"]["as_trained"], result["loss"]["switched"]
    if switched is not None:
        how = "off" if result["pos_emb"] == "rove" else "on"
        lines.append(
            f"  loss {as_trained:.4f}, with the rotation of the values switched {how}"
            f" {switched:.4f} ({switched - as_trained:+.4f})"
        )
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# the figure: a column for each run


def draw(found: Sequence[dict[str, Any]], pictures: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(5.2 * len(found), 14), layout="constrained")
    axes = figure.subplots(5, len(found), squeeze=False, height_ratios=[2.6, 1, 1, 1, 1.4])
    for result, picture, column in zip(found, pictures, axes.T, strict=True):
        _draw_mixer(column[0], result, picture)
        for key, ax in zip(("norm", "cosine", "phase"), column[1:4], strict=True):
            _draw_kernel(ax, result, key)
        _draw_attention(column[4], result)
    return figure


def _shade(layer: int, layers: int) -> Any:
    """Early layers dark, late ones light."""
    return matplotlib.colormaps["viridis"](0.9 * layer / max(layers - 1, 1))


def _draw_mixer(ax: Axes, result: dict[str, Any], picture: dict[str, Any]) -> None:
    values = picture["map"].numpy()
    hs = len(values) // PICTURE
    limit = float(np.abs(values).max()) / 2  # what is larger looks like it: the rest can be seen
    ax.imshow(
        values, cmap="RdBu_r", norm=TwoSlopeNorm(0, -limit, limit), interpolation="nearest"
    )  # a pixel is an entry
    ticks = [hs * (i + 0.5) - 0.5 for i in range(PICTURE)]
    ax.set_xticks(ticks, [f"{j}" for j in range(PICTURE)])
    ax.set_yticks(ticks, [f"{i}" for i in range(PICTURE)])
    for i in range(1, PICTURE):
        ax.axhline(hs * i - 0.5, color=COLORS["muted"], linewidth=0.5)
        ax.axvline(hs * i - 0.5, color=COLORS["muted"], linewidth=0.5)
    ax.grid(False)
    ax.set(xlabel=f"values of token j ({hs} channels each)", ylabel="output at token i")
    name = f"{result['run']}: {POS_EMB[result['pos_emb']]}"
    ax.set_title(f"{name}\nMixer of head {picture['layer']}.{picture['head']}", loc="left")


def _draw_kernel(ax: Axes, result: dict[str, Any], key: str) -> None:
    heads, distances = result["kernel"]["heads"], result["kernel"]["distances"]
    layers = 1 + max(h["layer"] for h in heads)
    for h in heads:
        label = f"layer {h['layer']}" if h["head"] == 0 and key == "norm" else None
        color = _shade(h["layer"], layers)
        ax.plot(distances, h[key], color=color, linewidth=0.9, alpha=0.75, label=label)
    muted = dict(color=COLORS["muted"], linestyle="--", linewidth=1)
    label = "R_-d alone" if key == "norm" else None
    ax.plot(distances, result["kernel"]["identity"][key], label=label, **muted)
    _distance_axis(ax, max(distances))
    limits = {"norm": (0, 2), "cosine": (-1.05, 1.05), "phase": (-3.3, 3.3)}
    ax.set(ylim=limits[key])
    words = {"norm": "Norm |K_d| / |K_0|", "cosine": "Cosine of K_d and K_0",
             "phase": "Phase of K_d, radians"}  # fmt: skip
    ax.set_title(f"{words[key]}, K_d = W_O R_-d W_V" if key == "norm" else words[key], loc="left")
    if key == "norm" and layers <= 6:
        ax.legend(ncols=2, loc="upper left", fontsize=7)


def _draw_attention(ax: Axes, result: dict[str, Any]) -> None:
    """Mean over the distances from one of the kernel's to the next: far ones are many and small."""
    starts = [d for d in result["kernel"]["distances"] if d < result["context"] // 2]
    for layer, heads in enumerate(result["attention"]["mass"]):
        color = _shade(layer, len(result["attention"]["mass"]))
        means = [
            [np.mean(mass[a:b]) for a, b in zip(starts, starts[1:], strict=False)] for mass in heads
        ]
        for mean in means:
            ax.plot(starts[:-1], mean, color=color, linewidth=0.5, alpha=0.5)
        ax.plot(starts[:-1], np.mean(means, axis=0), color=color)
    _distance_axis(ax, starts[-1])
    decades = [10.0**k for k in range(-5, 1)]
    ax.set(yscale="log", ylim=(3e-6, 1.2), xlabel="distance d in tokens")
    ax.set_yticks(decades, [f"{y:g}" for y in decades])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_title("Attention to distance d (bold: mean of a layer)", loc="left")


def _distance_axis(ax: Axes, most: int) -> None:
    """Logarithmic, and 0 is on it."""
    ax.set_xscale("symlog", base=2, linthresh=1)
    ticks = [0, *(2**k for k in range(0, 20, 2) if 2**k <= most)]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


if __name__ == "__main__":
    run_cli(main)
