"""What a training will need, before it runs: memory, micro batches, FLOPs, hours, disk.

    python -m scripts.plan configs/gpt2_124m_rove.toml --gpus 8 --gpu h100

Arithmetic from the config alone; no GPU and no data are needed. The hours are for three shares of
the GPU's peak (MFU): 40 % is what good code reaches with a 124M model on an H100.
"""

import dataclasses
import datetime
from dataclasses import dataclass
from typing import Literal

import tyro

from nanorove import perf
from nanorove.config import Config, load_config_file
from nanorove.errors import UserError, run_cli
from nanorove.perf import gib

Row = tuple[str, str]


@dataclass(frozen=True)
class Plan:
    """What a training will need: memory, micro batches, FLOPs, hours, disk."""

    config: tyro.conf.Positional[str]
    """A config file, for example configs/gpt2_124m_rove.toml."""
    gpus: int = 8
    """How many GPUs train together."""
    gpu: Literal["a100", "h100", "h200"] = "h100"
    """Of which kind (the 80 GB A100)."""


def memory_rows(config: Config, gpu: str) -> list[Row]:
    """Memory of one GPU during a step, by part."""
    parts = perf.memory_parts(config)
    capacity = perf.GPUS[gpu][1]
    total = f"{gib(sum(parts.values()))} of {capacity} GiB"
    return [*((name, gib(size)) for name, size in parts.items()), ("total, about", total)]


def micro_batch_rows(config: Config, gpus: int, gpu: str) -> list[Row]:
    """Every valid micro_batch_size, how often it runs per step and whether it fits."""
    rows = []
    for size in perf.micro_batch_sizes(config, gpus):
        train = dataclasses.replace(config.train, micro_batch_size=size)
        this = dataclasses.replace(config, train=train)
        need = sum(perf.memory_parts(this).values())
        # a tenth is for the CUDA context, NCCL and what lies between the blocks
        fits = "fits" if need < 0.9 * perf.GPUS[gpu][1] * 2**30 else "too large"
        steps = perf.grad_accum_steps(this, gpus)
        mark = " <- config" if size == config.train.micro_batch_size else ""
        rows.append((f"{size}", f"{steps:4d} micro-steps {gib(need):>11}  {fits}{mark}"))
    return rows


def cost_rows(config: Config, gpus: int, gpu: str) -> list[Row]:
    """Steps, tokens, FLOPs, hours and disk of the whole training."""
    per_token = perf.flops_per_token(config.model)
    tokens = config.train.max_steps * config.train.total_batch_size
    rows = [
        ("parameters", f"{perf.num_params(config.model):,}"),
        ("steps", f"{config.train.max_steps:,} of {config.train.total_batch_size:,} tokens"),
        ("tokens", f"{tokens:,}"),
        ("FLOPs", f"{per_token:,} per token, {per_token * tokens:.3g} in all"),
    ]
    peak = perf.peak_flops(gpu, config.train.dtype)
    if peak is None:
        rows.append(("hours", f"not known: the table has bf16, not {config.train.dtype}"))
    for share in (0.3, 0.4, 0.5) if peak else ():
        tokens_per_s = share * peak * gpus / per_token
        hours = datetime.timedelta(seconds=round(tokens / tokens_per_s))
        rows.append((f"at {share:.0%} MFU", f"{hours} h, {tokens_per_s:,.0f} tokens/s"))
    rows.append(("disk", f"{gib(perf.disk_bytes(config))} for checkpoints"
                 f" (and {gib(2 * tokens)} for data read once)"))  # fmt: skip
    return rows


def main() -> None:
    args = tyro.cli(Plan)
    if args.gpus < 1:
        raise UserError(f"--gpus {args.gpus}: at least 1")
    config = load_config_file(args.config)
    sections = {
        f"memory of one {args.gpu}, micro_batch_size {config.train.micro_batch_size}": memory_rows(
            config, args.gpu
        ),
        f"train.micro_batch_size on {args.gpus} GPUs": micro_batch_rows(
            config, args.gpus, args.gpu
        ),
        f"the whole training on {args.gpus} x {args.gpu}": cost_rows(config, args.gpus, args.gpu),
    }
    for title, rows in sections.items():
        print(f"\n{title}")
        if not rows:  # says which sizes would work
            perf.grad_accum_steps(config, args.gpus)
        for name, value in rows:
            print(f"  {name:30} {value}")


if __name__ == "__main__":
    run_cli(main)
