"""
GPT-2 with a switch for how it knows about positions: learned, RoPE, RoVE or none; YaRN on top.

RoPE rotates queries and keys by their positions, so attention *scores* see only offsets j - i.
RoVE (arXiv 2606.11275) rotates the values with the keys and turns the attention output back at
the query, so what is *carried* depends on the offset too:

    y_i = R_i^-1 sum_j A_ij R_j v_j = sum_j A_ij R_(j-i) v_j

It has no parameters, and the attention kernel in the middle does not change. The two rotations that
make it are in CausalSelfAttention.forward; everything else here is GPT-2.

Shapes in the comments: B batch, T query tokens, S key tokens (S >= T; S > T with a KV cache),
C = n_embd, nh = n_head, hs = C / nh the head size, V the vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

try:
    from flash_attn import flash_attn_func  # optional: requirements-flash.txt
except ImportError:
    flash_attn_func = None

AttnBackend = Literal["eager", "sdpa", "flash"]
PosEmb = Literal["learned", "rope", "rove", "rove_no_inverse", "none"]  # no_inverse: an ablation


@dataclass(frozen=True)
class GPTConfig:
    """What is computed. How it is computed (attention backend, checkpointing) is GPT's argument."""

    vocab_size: int = 50257
    """The real vocabulary; the embedding is padded to a multiple of 64 inside."""
    block_size: int = 1024
    """The context the frequencies belong to: the length trained at before any YaRN extension."""
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    pos_emb: PosEmb = "rope"
    rope_base: float = 10000.0
    yarn_factor: float = 1.0
    """YaRN's s = wanted context / block_size; 1 is off."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2**31:  # and a bool is no int
                raise ValueError(f"{name} ({value!r}) must be at least 1, an int below 2^31")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})")
        if self.pos_emb not in get_args(PosEmb):
            raise ValueError(f"pos_emb ({self.pos_emb!r}) must be one of {get_args(PosEmb)}")
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"n_embd / n_head ({self.head_dim}) must be even to be rotated")
        if not (self.yarn_factor >= 1 and self.block_size * self.yarn_factor < 2**31):
            raise ValueError(f"yarn_factor ({self.yarn_factor}) must be at least 1 (1 is off), and"
                             f" a context of {self.block_size} times that below 2^31")  # fmt: skip
        if self.yarn_factor != 1 and not self.rotary:
            raise ValueError(f"yarn_factor ({self.yarn_factor}) needs pos_emb rope or rove")
        if not (math.isfinite(self.rope_base) and self.rope_base > 1):
            raise ValueError(f"rope_base ({self.rope_base}) must be greater than 1")

    @property
    def rotary(self) -> bool:
        """Are queries and keys rotated?"""
        return self.pos_emb not in ("learned", "none")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64, since GPUs multiply such matrices faster."""
        return 64 * math.ceil(self.vocab_size / 64)

    @property
    def context(self) -> int:
        """The longest context this model is meant for, in tokens: block_size stretched by YaRN."""
        return round(self.block_size * self.yarn_factor)  # a factor L / block_size gives L back


# -----------------------------------------------------------------------------
# rotary positions and YaRN


def rotary_inv_freq(config: GPTConfig) -> Tensor:
    """Angle per position of each pair: (hs/2,) float64, radians per token.

    Plain RoPE: theta_i = base^(-2i/hs). YaRN (arXiv 2309.00071, "NTK by parts", in the form of the
    authors' code and of HuggingFace: a ramp linear in the pair's index, floor/ceil, betas 32 and 1)
    keeps the pairs that turn often within block_size, divides the slow ones by yarn_factor and
    blends in between. YaRN's temperature is not in here but in `softmax_scale`.
    """
    d, base = config.head_dim, config.rope_base
    length, factor = config.block_size, config.yarn_factor
    theta = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device="cpu") / d)
    if factor == 1:
        return theta

    def pair_that_turns(times: float) -> float:  # index of the pair with `times` turns in length
        return d * math.log(length / (2 * math.pi * times)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(32)), 0)
    high = min(math.ceil(pair_that_turns(1)), d - 1)
    if low == high:
        high += 0.001  # as the authors do: no division by zero
    i = torch.arange(d // 2, dtype=torch.float64, device="cpu")
    ramp = ((i - low) / (high - low)).clamp(0, 1)  # 0: keep theta, 1: interpolate
    return theta * (1 - ramp) + theta / factor * ramp


def rotary_table(config: GPTConfig, max_len: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position * theta, each (max_len, hs/2) float64.

    Always on the CPU and in float64: half-precision angles are wrong by whole turns at 1024 tokens,
    and pow differs between devices. The pairs have unit norm, whatever YaRN does: RoVE sends the
    values through this table, and a gain here would be a gain on the content.
    """
    positions = torch.arange(max_len, dtype=torch.float64, device="cpu")
    angles = positions[:, None] * rotary_inv_freq(config)
    return angles.cos(), angles.sin()


def softmax_scale(config: GPTConfig) -> float:
    """1/sqrt(hs), times YaRN's temperature m^2 with m = 0.1 ln(s) + 1.

    Other code multiplies cos and sin by m. The scores are the same, but RoVE shares the table with
    the values, whose length must not change: so the temperature lives here and nowhere else.
    """
    m = 0.1 * math.log(config.yarn_factor) + 1
    return m * m / math.sqrt(config.head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + hs/2]) by +theta; -sin rotates back. Keeps x's dtype.

    x: (..., hs); cos, sin: (..., hs/2), broadcast. The product takes the wider of the two dtypes,
    so bf16 activations are rotated in fp32.
    """
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


# -----------------------------------------------------------------------------
# attention


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, backend: AttnBackend) -> Tensor:
    """Causal softmax attention: q (B, nh, T, hs), k and v (B, nh, S, hs) -> (B, nh, T, hs).

    The T queries are the last of the S tokens: query t sees the keys up to S - T + t.
    `eager` is the specification, the other two must agree with it. `flash` is the flash-attn
    package, for CUDA and half precision only; `sdpa` lets torch choose, flash kernels included.
    """
    T, S = q.size(-2), k.size(-2)
    if backend == "flash":  # GPT.__init__ made sure that it is there
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # it wants (B, T, nh, hs)
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)
    if backend == "sdpa":
        if T == S:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        # is_causal would align the mask at the first key, not at the last; one query needs no mask
        mask = None if T == 1 else causal_mask(T, S, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q @ k.transpose(-2, -1) * scale  # (B, nh, T, S)
    scores = scores.masked_fill(~causal_mask(T, S, q.device), -math.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.type_as(v) @ v


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """(T, S) bool, True where query t may look at key s: s <= S - T + t."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


class KVCache:
    """Keys and values of the tokens seen so far, for generation.

    With rotary positions they are stored rotated: by their own positions, which never change. (They
    would go stale if the table changed in between, so a cache belongs to one model.)
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        max_len: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (config.n_layer, batch_size, config.n_head, max_len, config.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)  # (n_layer, B, nh, max_len, hs)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.pos = 0  # tokens in the cache; GPT.hidden moves it on when all layers are done

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, nh, T, hs) behind the `pos` tokens of this layer; give back all of them.

        Raises ValueError if they do not fit.
        """
        end = self.pos + k.size(-2)
        if end > self.k.size(-2):
            raise ValueError(f"{end} tokens do not fit in a KV cache of {self.k.size(-2)}")
        self.k[layer, :, :, self.pos : end] = k
        self.v[layer, :, :, self.pos : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, attn_backend: AttnBackend) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.layer = config.n_head, layer
        self.rotate_qk, self.rotate_y = config.rotary, config.pos_emb == "rove"
        self.rotate_v = config.pos_emb in ("rove", "rove_no_inverse")
        self.scale, self.attn_backend = softmax_scale(config), attn_backend

    def forward(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, kv_cache: KVCache | None = None
    ) -> Tensor:
        """x: (B, T, C) -> (B, T, C); cos, sin: (T, hs/2) at the positions of these T tokens."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
        if self.rotate_qk:
            cos, sin = cos[:, None], sin[:, None]  # (T, 1, hs/2), the same for all heads
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            # R_j v_j, at the key's position j; or a copy: a view would keep the old q and k alive
            v = rotate(v, cos, sin) if self.rotate_v else v.contiguous()
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, nh, T, hs)
        if kv_cache is not None:
            k, v = kv_cache.append(self.layer, k, v)  # (B, nh, S, hs), rotated already
        y = attention(q, k, v, scale=self.scale, backend=self.attn_backend).transpose(1, 2)
        if self.rotate_y:
            y = rotate(y, cos, -sin)  # R_i^-1, at the query's position i: only j - i is left
        return self.c_proj(y.reshape(B, T, C))


# -----------------------------------------------------------------------------
# the transformer


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # the tanh form is GPT-2's


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, attn_backend: AttnBackend) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, layer, attn_backend)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, kv_cache: KVCache | None = None
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), cos, sin, kv_cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """The model. Parameters carry HuggingFace's names; the output head is wte itself.

    config: what is computed. max_len: tokens the rotary table covers (default: config.context);
    a longer evaluation is a GPT of the same config with a larger max_len and the same weights.
    attn_backend: see `attention`. seed: of the initial weights, which are the same for every
    pos_emb, so that two arms of a comparison start from one point. For a training short of memory:
    loss_chunk computes the loss for so many tokens at a time (0: all at once), in fp32;
    activation_checkpointing keeps each block's input alone and computes the rest again in
    backward; bf16_residual adds the blocks' outputs up in bf16 (under autocast).

    Raises ValueError for a backend that is unknown or not installed, and for learned positions
    beyond their table.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        max_len: int | None = None,
        attn_backend: AttnBackend = "sdpa",
        seed: int = 0,
        loss_chunk: int = 0,
        activation_checkpointing: bool = False,
        bf16_residual: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_len = config.context if max_len is None else max_len
        self.loss_chunk, self.bf16_residual = loss_chunk, bf16_residual
        self.recompute = activation_checkpointing
        if attn_backend not in get_args(AttnBackend):
            raise ValueError(f"attn_backend ({attn_backend!r}) must be eager, sdpa or flash")
        if attn_backend == "flash" and flash_attn_func is None:
            raise ValueError("attn_backend 'flash' needs the package flash-attn (pip install -r"
                             " requirements-flash.txt); 'sdpa' has flash built in")  # fmt: skip
        if config.pos_emb == "learned" and self.max_len > config.block_size:
            raise ValueError(f"learned positions end at block_size ({config.block_size});"
                             f" max_len ({self.max_len}) cannot be longer")  # fmt: skip
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.padded_vocab_size, config.n_embd),
                h=nn.ModuleList([Block(config, i, attn_backend) for i in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        if config.pos_emb == "learned":  # last, so that its random numbers come last
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        self.init_weights(seed)
        self._build_rotary_table(self.transformer.wte.weight.device)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """GPT-2's initialisation: N(0, 0.02), the projections into the residual stream scaled by
        1/sqrt(2 n_layer), biases zero, norms one. Independent of torch's global generator."""
        if self.transformer.wte.weight.is_meta:
            return  # there is no memory to fill yet
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith("c_proj.weight")
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
                p.normal_(0.0, std, generator=generator)
            else:
                p.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)

    def _build_rotary_table(self, device: torch.device) -> None:
        cos = sin = None
        if self.config.rotary:
            table = rotary_table(self.config, self.max_len)
            cos, sin = (t.to(device, torch.float32) for t in table)
        # no buffers: every position mode and YaRN factor has one state dict, DDP broadcasts nothing
        self.cos, self.sin = cos, sin  # (max_len, hs/2)

    def _apply(self, fn, recurse: bool = True) -> "GPT":
        # .bfloat16() would round the angles and .to_empty() would leave garbage in the table:
        # after whatever was done to the weights, build it anew beside them, in fp32
        super()._apply(fn, recurse)
        self._build_rotary_table(self.transformer.wte.weight.device)
        return self

    def hidden(self, idx: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        """Token ids (B, T) -> what the head sees (B, T, C), after ln_f.

        With a cache the tokens stand behind those in it. Raises ValueError beyond max_len.
        """
        start = 0 if kv_cache is None else kv_cache.pos
        end = start + idx.size(1)
        if end > self.max_len:
            raise ValueError(f"{end} tokens are more than max_len ({self.max_len}): build the GPT"
                             " with a larger max_len")  # fmt: skip
        x = self.transformer.wte(idx)  # (B, T, C)
        cos = sin = None
        if self.config.rotary:
            cos, sin = self.cos[start:end], self.sin[start:end]  # (T, hs/2)
        elif self.config.pos_emb == "learned":
            x = x + self.transformer.wpe(torch.arange(start, end, device=idx.device))
        x = x.bfloat16() if self.bf16_residual else x
        for block in self.transformer.h:
            run = partial(checkpoint, block, use_reentrant=False) if self.recompute else block
            x = run(x, cos, sin, kv_cache)
        if kv_cache is not None:
            kv_cache.pos = end
        return self.transformer.ln_f(x)

    def head(self, x: Tensor) -> Tensor:
        """(..., C) -> logits (..., V) over the real vocabulary: the padding is cut off here, so
        loss, sampling and ln V never see it."""
        return F.linear(x, self.transformer.wte.weight)[..., : self.config.vocab_size]

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, kv_cache: KVCache | None = None
    ) -> Tensor:
        """idx (B, T) int64 -> logits (B, T, V); with targets (B, T) the mean loss in nats, fp32."""
        hidden = self.hidden(idx, kv_cache)
        if targets is not None and self.loss_chunk:
            hidden = hidden.flatten(0, 1).float()  # with bf16 the loss itself would be bf16
            weight = self.transformer.wte.weight[: self.config.vocab_size].float()
            options = nn.LinearCrossEntropyOptions(True, self.loss_chunk)
            return F.linear_cross_entropy(hidden, weight, targets.flatten(), options=options)
        logits = self.head(hidden)
        if targets is None:
            return logits
        # the log-sum-exp in fp32 even when the logits come in bf16
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def num_params(self) -> int:
        """Number of parameters; the tied embedding counts once, its padding included."""
        return sum(p.numel() for p in self.parameters())
