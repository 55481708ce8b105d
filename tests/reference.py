"""What model.py computes, once more: written from the equations, slowly, in float64.

A pair (x[i], x[i + hs/2]) is one complex number here and a rotation is a factor e^(i angle), so
that nothing is shared with the code under test but the weights.
"""

import json
import math
from pathlib import Path

import torch

FIXTURES = Path(__file__).parent / "fixtures"


def golden() -> dict:
    """The numbers of fixtures/yarn_golden.json."""
    return json.loads((FIXTURES / "yarn_golden.json").read_text())


def inv_freq(head_dim: int, base: float, length: int, factor: float) -> list[float]:
    """RoPE's angles per token (factor 1) or YaRN's, pair by pair, in Python floats.

    YaRN (arXiv 2309.00071) in the form of its authors' code: beta_fast 32, beta_slow 1, the ends of
    the ramp rounded outwards and clamped to 0 and head_dim - 1.
    """
    plain = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if factor == 1:
        return plain

    def pair_of(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), head_dim - 1)
    width = 0.001 if first == last else last - first
    keep = [1 - min(max((i - first) / width, 0), 1) for i in range(head_dim // 2)]
    return [t * g + t / factor * (1 - g) for t, g in zip(plain, keep, strict=True)]


def temperature(factor: float) -> float:
    """What YaRN multiplies the scores with: m^2, m = 0.1 ln s + 1."""
    return (0.1 * math.log(factor) + 1) ** 2


def offset_sum(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    theta: list[float],
    scale: float,
    values: bool,
) -> torch.Tensor:
    """One head, q, k, v (T, hs): row i is sum_j A_ij R_(j-i) v_j; without `values` sum_j A_ij v_j.

    Only offsets j - i occur in here, no positions. Differentiable.
    """
    half = q.size(1) // 2
    zq, zk, zv = (torch.complex(x[:, :half], x[:, half:]) for x in (q, k, v))
    angles = torch.tensor(theta, dtype=torch.float64)
    rows = []
    for i in range(q.size(0)):
        offsets = torch.arange(-i, 1, dtype=torch.float64)[:, None]  # j - i of the keys up to i
        turn = torch.polar(torch.ones_like(offsets * angles), offsets * angles)
        scores = (zq[i].conj() * turn * zk[: i + 1]).real.sum(1) * scale
        weights = torch.exp(scores - scores.max())
        weights = weights / weights.sum()
        carried = turn * zv[: i + 1] if values else zv[: i + 1]
        row = (weights[:, None] * carried).sum(0)
        rows.append(torch.cat((row.real, row.imag)))
    return torch.stack(rows)


def logits(state: dict[str, torch.Tensor], config, ids: torch.Tensor) -> torch.Tensor:
    """The whole model in float64, one sequence ids (T,) -> (T, V), from a GPT's state dict."""
    w = {name.removeprefix("transformer."): t.double() for name, t in state.items()}
    C, hs = config.n_embd, config.n_embd // config.n_head
    theta = [0.0] * (hs // 2)
    if config.pos_emb in ("rope", "rove", "rove_no_inverse"):
        theta = inv_freq(hs, config.rope_base, config.block_size, config.yarn_factor)
    scale = temperature(config.yarn_factor) / math.sqrt(hs)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["wte.weight"][ids]
    if config.pos_emb == "learned":
        x = x + w["wpe.weight"][: len(ids)]
    for l in range(config.n_layer):
        qkv = linear(norm(x, f"h.{l}.ln_1"), f"h.{l}.attn.c_attn")
        heads = []
        for h in range(0, C, hs):
            q, k, v = (qkv[:, part * C + h : part * C + h + hs] for part in range(3))
            y = offset_sum(q, k, v, theta, scale, config.pos_emb in ("rove", "rove_no_inverse"))
            if config.pos_emb == "rove_no_inverse":  # R_i is still in front of row i
                angles = torch.arange(len(ids), dtype=torch.float64)[:, None] * torch.tensor(theta)
                turn = torch.polar(torch.ones_like(angles), angles)
                z = torch.complex(y[:, : hs // 2], y[:, hs // 2 :]) * turn
                y = torch.cat((z.real, z.imag), 1)
            heads.append(y)
        x = x + linear(torch.cat(heads, 1), f"h.{l}.attn.c_proj")
        u = linear(norm(x, f"h.{l}.ln_2"), f"h.{l}.mlp.c_fc")
        u = u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))) / 2
        x = x + linear(u, f"h.{l}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"][: config.vocab_size].T


@torch.no_grad()
def randomise(module: torch.nn.Module, std: float = 0.3, seed: int = 0) -> torch.nn.Module:
    """Fill all parameters, biases and norms too: at GPT-2's initialisation many faults are tiny."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        p.normal_(1.0 if "ln_" in name and "weight" in name else 0.0, std, generator=generator)
    return module
