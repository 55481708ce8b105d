"""What a training should cost: FLOPs, memory, disk. Arithmetic, with the source beside each line.

Estimates, not promises: the memory of a step is within about a fifth; scripts/gpu_check.sh
measures it.
"""

import errno
import os
import re

import torch

from model import GPT, GPTConfig
from nanorove.config import Config
from nanorove.distributed import DistInfo
from nanorove.errors import UserError

# dense bf16 matrix products of one GPU, FLOP/s, and its memory, GiB: the makers' data sheets
GPUS = {
    "a100": (312e12, 80),
    "h100": (989e12, 80),
    "h200": (989e12, 141),
}
# how their names end; an H100 PCIe or NVL, a GH200 or a slice (MIG) of a GPU has another peak
NAMES = {
    "a100": r"\ba100(-sxm4-[48]0gb|-pcie-[48]0gb| 80gb pcie)?$",
    "h100": r"\bh100( 80gb hbm3)?$",
    "h200": r"\bh200$",
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s that a device could reach in bf16; None for one not in the table, and for fp32."""
    known = [GPUS[key][0] for key in GPUS if re.search(NAMES[key], device_name.lower())]
    return known[0] if known and dtype == "bf16" else None


def num_params(config: GPTConfig) -> int:
    """Parameters as built, the table of learned positions among them."""
    with torch.device("meta"):
        return GPT(config).num_params()


def flops_per_token(config: GPTConfig) -> int:
    """Forward and backward: 6 N + 12 L C T, where N leaves out the table of positions and the
    attention counts the full square. nanoGPT's and PaLM's (arXiv 2204.02311, appendix B) way."""
    n = num_params(config)
    if config.pos_emb == "learned":
        n -= config.block_size * config.n_embd
    return 6 * n + 12 * config.n_layer * config.n_embd * config.context


def mfu_pct(config: Config, tokens_per_s: float, device_name: str, world_size: int) -> float | None:
    """Share of the devices' peak that the model's FLOPs take, in percent; None if not known."""
    peak = peak_flops(device_name, config.train.dtype)
    if peak is None:
        return None
    return 100 * flops_per_token(config.model) * tokens_per_s / (world_size * peak)


def memory_parts(config: Config) -> dict[str, int]:
    """Bytes on one device during a training step, by what takes them.

    Activations are what autograd keeps, in numbers per token, channel and block: the input and the
    sum in the middle (the residual stream), then in `dtype` two norms' outputs, MLP 8, attention 4,
    or 5 with RoVE. With activation checkpointing they are the input of each block, and one block
    that is being computed again. Counted on a CPU; a test does it again.
    """
    model, train = config.model, config.train
    n, half = num_params(model), 2 if train.dtype == "bf16" else 4
    tokens = train.micro_batch_size * model.context
    attention = 5 if model.pos_emb == "rove" else 4
    stream = model.n_embd * (2 if train.residual == "bf16" else 4)
    block = 2 * stream
    if train.attn_backend == "eager":  # the softmax, (B, nh, T, T), in fp32 and in bf16
        attention = 4
        block += model.n_head * model.context * (4 if half == 4 else 6)
    block += (attention + 2 + 8) * model.n_embd * half
    blocks = model.n_layer * block
    if train.activation_checkpointing:
        blocks = model.n_layer * stream + block
    # compiled: the logits once and the softmax's gradient in place; eager: logits, fp32 copy,
    # log-softmax, gradient
    logit_bytes = 4 if train.compile else half + 4 + 4 + (half if half == 2 else 0)
    logits = tokens * model.padded_vocab_size * logit_bytes
    if train.loss_chunk:  # torch's linear_cross_entropy: also the gradients of its inputs, twice
        logits = 4 * min(train.loss_chunk, tokens) * model.padded_vocab_size
        logits += 2 * 4 * (tokens + model.padded_vocab_size) * model.n_embd
    return {
        "weights (fp32)": 4 * n,
        "gradients (fp32)": 4 * n,
        "AdamW's two moments (fp32)": 8 * n,
        "weights in bf16 for autocast": 2 * n if train.dtype == "bf16" else 0,
        "activations": tokens * blocks,
        "logits and their gradient": logits,
    }


def disk_bytes(config: Config) -> int:
    """Of the run's checkpoints: the newest ones, the best one and one that is being written."""
    return (config.train.keep_checkpoints + 2) * 12 * num_params(config.model)


def micro_batch_sizes(config: Config, world_size: int) -> list[int]:
    """Every micro_batch_size that divides total_batch_size over so many processes."""
    sequences, rest = divmod(config.train.total_batch_size, config.model.context * world_size)
    return [] if rest else [b for b in range(1, sequences + 1) if sequences % b == 0]


def nearest(size: int, sizes: list[int]) -> list[int]:
    """Of ascending `sizes` the largest below `size` and the smallest above it."""
    return [b for b in sizes if b < size][-1:] + [b for b in sizes if b > size][:1]


def grad_accum_steps(config: Config, world_size: int) -> int:
    """Micro-steps per optimizer step: total_batch_size tokens over micro batches and ranks.

    Raises UserError with the sizes that would work.
    """
    train, context = config.train, config.model.context
    tokens = train.micro_batch_size * context * world_size
    total = train.total_batch_size
    if total % tokens:
        totals = sorted({max(total // tokens, 1) * tokens, (total // tokens + 1) * tokens})
        micro = nearest(train.micro_batch_size, micro_batch_sizes(config, world_size))
        raise UserError(
            f"train.total_batch_size ({total:,} tokens) is not a multiple of micro_batch_size"
            f" {train.micro_batch_size} x context {context} x {world_size} processes ="
            f" {tokens:,}; use --train.total_batch_size {' or '.join(map(str, totals))}"
            + (f", or --train.micro_batch_size {' or '.join(map(str, micro))}" if micro else "")
        )
    return total // tokens


def out_of_room(error: Exception, config: Config) -> UserError | None:
    """What to do about an error that says that memory or disk is full; None for any other error."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{config.run_dir}: {error.strerror}; make room and go on with --resume")
    gpu = isinstance(error, torch.OutOfMemoryError)
    if not gpu and "allocate memory" not in str(error) and "not enough memory" not in str(error):
        return None
    size = config.train.micro_batch_size
    smaller = [
        b for b in micro_batch_sizes(config, int(os.environ.get("WORLD_SIZE", 1))) if b < size
    ]
    fix = "use a smaller model"
    if smaller:
        fix = f"use --train.micro_batch_size {smaller[-1]}"
    elif not config.train.activation_checkpointing:
        fix = "use --train.activation_checkpointing True"
    return UserError(
        f"out of memory on the {'GPU' if gpu else 'CPU'} with train.micro_batch_size {size} (the"
        f" estimate was {gib(sum(memory_parts(config).values()))}): {fix}; the result is the same"
    )


def gib(n: float) -> str:
    """Bytes as text: 1.5 GiB."""
    return f"{n / 2**30:,.1f} GiB" if n >= 2**30 / 10 else f"{n / 2**20:,.1f} MiB"


def start_block(config: Config, info: DistInfo, n_params: int, train_tokens: int) -> str:
    """What is about to run, for the console."""
    train, context = config.train, config.model.context
    accum = grad_accum_steps(config, info.world_size)
    device = torch.cuda.get_device_name(info.device) if info.device.type == "cuda" else "cpu"
    return "\n".join(
        f"{name:11} {value}"
        for name, value in {
            "run": config.run_dir,
            "device": f"{device} x {info.world_size}, {train.dtype}, attention"
            f" {train.attn_backend}, compile {train.compile}, deterministic {train.deterministic}",
            "model": f"{config.model.pos_emb}, {n_params:,} parameters, context {context}",
            "data": f"{config.data.dir}, {train_tokens:,} training tokens",
            "batch": f"{train.total_batch_size:,} tokens per step = {accum} micro-steps x"
            f" {info.world_size} processes x {train.micro_batch_size} x {context}",
            "length": f"{train.max_steps:,} steps ="
            f" {train.max_steps * train.total_batch_size / train_tokens:.2f} epochs",
            "memory": f"about {gib(sum(memory_parts(config).values()))} on each device for the"
            f" step, {gib(disk_bytes(config))} of disk for checkpoints",
        }.items()
    )
