"""What a head is as a linear map, once its attention weights are known (arXiv 2606.11275).

With the attention A of a sequence held fixed, a head maps the stacked sequence linearly. Without
rotated values that map is a Kronecker product, A (x) W_V: mixing over tokens and over channels have
nothing to do with each other. With RoVE it is sum_d (A o S_d) (x) R_d W_V, S_d the d-th shift: a
convolution whose taps attention weighs. Everything here is float64 on the CPU.

T tokens, C = n_embd, hs the head size; an offset is j - i, where key j minus query i stands, so
that a token 3 back has offset -3 and distance 3.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from model import GPT, CausalSelfAttention, GPTConfig, attention, rotary_inv_freq, rotate


def rotations(config: GPTConfig, offsets: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """R_offset for each of n offsets: (n, hs, hs)."""
    angles = torch.as_tensor(offsets, dtype=torch.float64)[:, None] * rotary_inv_freq(config)
    return _rotation(angles.cos(), angles.sin())


def _rotation(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # as matrices, from the definition: what `rotate` does is compared with them
    cos, sin = torch.diag_embed(cos), torch.diag_embed(sin)
    return torch.cat((torch.cat((cos, -sin), -1), torch.cat((sin, cos), -1)), -2)


def value_weights(attn: CausalSelfAttention, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """W_V (hs, C) and W_O (C, hs) of a head."""
    C = attn.c_proj.in_features
    hs = C // attn.n_head
    own = slice(head * hs, (head + 1) * hs)
    w_v = attn.c_attn.weight[2 * C :][own]
    return w_v.detach().double().cpu(), attn.c_proj.weight[:, own].detach().double().cpu()


def value_bias(attn: CausalSelfAttention, head: int) -> torch.Tensor:
    """b_V (hs,) of a head."""
    return attn.c_attn.bias.detach().double().cpu().view(3, attn.n_head, -1)[2, head]


@torch.no_grad()
def attention_weights(
    attn: CausalSelfAttention,
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:
    """A of what CausalSelfAttention reads, x (B, T, C): (B, nh, T, T), rows sum to 1."""
    B, T, C = x.shape
    qk = attn.c_attn(x).view(B, T, 3, attn.n_head, -1)[:, :, :2].permute(2, 0, 3, 1, 4)
    q, k = rotate(qk, cos, sin) if attn.rotate_qk else qk
    each_its_own = torch.eye(T, dtype=q.dtype, device=q.device).expand(B, attn.n_head, T, T)
    return attention(q, k, each_its_own, scale=attn.scale, backend="eager")


@torch.no_grad()
def model_attention(
    model: GPT, idx: torch.Tensor, keep: Callable[[torch.Tensor], Any] = lambda A: A
) -> list[Any]:
    """`keep` of A of each layer on token ids idx (B, T): A is (B, nh, T, T) float64, on the CPU.

    All of it would be gigabytes in a model of GPT-2's size.
    """
    found: list[Any] = []

    def look(attn: CausalSelfAttention, args: tuple) -> None:
        found.append(keep(attention_weights(attn, *args[:3]).double().cpu()))

    hooks = [block.attn.register_forward_pre_hook(look) for block in model.transformer.h]
    try:
        model.hidden(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def reads_and_outputs(model: GPT, idx: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each layer's attention read, (B, T, C), and what its heads put out, before they are
    joined by W_O, (B, nh, T, hs): float64, on the CPU, of the model's own forward pass."""
    reads: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    nh, hs = model.config.n_head, model.config.head_dim
    hooks = []
    for block in model.transformer.h:
        attn = block.attn
        hooks.append(attn.register_forward_pre_hook(lambda _, args: reads.append(args[0])))
        hooks.append(attn.c_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0])))
    try:
        model.hidden(idx)
    finally:
        for hook in hooks:
            hook.remove()
    split = [y.double().cpu().unflatten(-1, (nh, hs)).transpose(1, 2) for y in outputs]
    return [(x.double().cpu(), y) for x, y in zip(reads, split, strict=True)]


def value_mixer(
    A: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, hs: int
) -> torch.Tensor:
    """How a head with attention A (T, T) maps values to outputs: (T, hs, T, hs).

    Built without a formula: each basis vector goes the way that values go in the forward pass.
    cos, sin: (T, hs/2), or None for a head that does not rotate its values.
    """
    T = A.size(0)
    v = torch.eye(T * hs, dtype=torch.float64).view(T * hs, T, hs)
    if cos is not None:
        v = rotate(v, cos, sin)
    y = A @ v
    if cos is not None:
        y = rotate(y, cos, -sin)
    return y.permute(1, 2, 0).view(T, hs, T, hs)


def matrix_mixer(value_map: torch.Tensor, w_v: torch.Tensor) -> torch.Tensor:
    """The whole head, from what it reads to its output: (T, hs, T, C), without the value bias."""
    return torch.einsum("iajb,bc->iajc", value_map, w_v)


def kronecker_form(A: torch.Tensor, w_v: torch.Tensor) -> torch.Tensor:
    """A (x) W_V: (T, hs, T, C)."""
    return torch.einsum("ij,ac->iajc", A, w_v)


def toeplitz_form(A: torch.Tensor, w_v: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    """sum_d (A o S_d) (x) R_d W_V over the offsets d = 0, -1, ...: (T, hs, T, C)."""
    T = A.size(0)
    total = torch.zeros(T, w_v.size(0), T, w_v.size(1), dtype=torch.float64)
    for d, R in zip(range(0, -T, -1), rotations(config, range(0, -T, -1)), strict=True):
        shift = torch.diag(torch.ones(T + d, dtype=torch.float64), d)  # S_d: 1 where j - i = d
        total += torch.einsum("ij,ac->iajc", A * shift, R @ w_v)
    return total


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |a|, Frobenius."""
    return float((a - b).norm() / a.norm())


def offset_kernel(
    w_v: torch.Tensor, w_o: torch.Tensor, config: GPTConfig, distances: Sequence[int]
) -> dict[str, list[float]]:
    """How the OV circuit K_d = W_O R_(-d) W_V of a head changes with the distance d.

    norm: |K_d| / |K_0|. cosine: of K_d and K_0 as vectors; 1 is the same map, 0 another one.
    phase: how far it has turned since d = 0, in radians, -pi to pi: the angle of <K_d, K_0> +
    i <K_d, K_90>, K_90 being K_0 with every pair turned by a right angle. Where all of the head's
    pairs turn at theta that is d * theta. Without rotated values K_d is W_O W_V: 1, 1 and 0.
    """
    one = torch.eye(w_v.size(0), dtype=torch.float64)
    R = one.expand(len(distances), -1, -1)
    if config.pos_emb == "rove":
        R = rotations(config, [-d for d in distances])
    half = torch.zeros(w_v.size(0) // 2, dtype=torch.float64)
    quarter = _rotation(half, half - 1)  # the way that R_(-d) turns
    # <W_O R W_V, W_O Q W_V> = <R, G_O Q G_V>: nothing larger than hs x hs
    G_O, G_V = w_o.T @ w_o, w_v @ w_v.T

    def inner(R: torch.Tensor, Q: torch.Tensor) -> torch.Tensor:
        return (R * (G_O @ Q @ G_V)).sum((-2, -1))

    same = inner(R, one)
    norm = inner(R, R).clamp(min=0).sqrt()
    norm_0 = inner(one, one).sqrt()
    turned = torch.complex(same, inner(R, quarter))
    start = torch.complex(inner(one, one), inner(one, quarter))
    return {
        "norm": (norm / norm_0).tolist(),
        "cosine": (same / (norm * norm_0)).tolist(),
        "phase": (turned / start).angle().tolist(),
    }


def attention_by_distance(A: torch.Tensor) -> torch.Tensor:
    """A (B, nh, T, T) -> (nh, T): mean attention of the later half's queries at each distance.

    Those queries can look back T/2 tokens at least, so that the near distances are not the only
    ones there are. Each row sums to 1.
    """
    T = A.size(-1)
    rows = A[:, :, T // 2 :].mean(0)  # (nh, T - T//2, T)
    mass = torch.zeros(A.size(1), T, dtype=A.dtype)
    for query, row in zip(range(T // 2, T), rows.unbind(1), strict=True):
        mass[:, : query + 1] += row[:, : query + 1].flip(-1)
    return mass / rows.size(1)
