"""Checks and measures the CUDA path on one GPU; scripts/gpu_check.sh says how to call it.

Needs torch 2.11 or newer; neither network nor data, neither wandb nor datasets.
"""

import contextlib
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from model import GPT, GPTConfig
from nanorove import perf
from nanorove.batches import Prefetcher
from nanorove.config import Config, load_config_file
from nanorove.distributed import DistInfo, init_distributed
from nanorove.errors import UserError, run_cli
from nanorove.files import strict, write_text_atomic
from nanorove.optim import lr_at, make_optimizer

POS_EMB = ("learned", "rope", "rove")
# against eager fp32 at equal weights: relative difference of the loss, and of the gradient (the
# norm of the difference over the norm); bf16 has 8 bits, a sum of many roundings about 1 %
TOLERANCES = {"fp32": (1e-5, 1e-3), "bf16": (5e-3, 5e-2)}


@dataclass(frozen=True)
class Check:
    """Check and measure training on one GPU."""

    quick: bool = False
    """Correctness, a loss curve, tokens/s and memory of the 124M: under 5 minutes."""
    full: bool = False
    """Also the 354M, flash-attn where it is installed, and the parts of a step."""
    tiny: bool = False
    """Toy sizes, which run on a CPU too: to see that the check itself works."""
    out: str = "gpu_check"
    """Folder of report.json and report.md."""


def letters(config: Config) -> Callable[[int, int], np.ndarray]:
    """Made-up rows of counted letters, which a model learns in a few steps; seeded."""

    def rows(step: int, micro_step: int) -> np.ndarray:
        rng = torch.Generator().manual_seed(1000 * step + micro_step)
        B, T = config.train.micro_batch_size, config.model.context
        start = torch.randint(0, 16, (B, 1), generator=rng)
        return (97 + (start + torch.arange(T + 1)) % 16).to(torch.uint16).numpy()

    return rows


def model_of(config: Config, device: torch.device, backend: str = "sdpa") -> GPT:
    return GPT(config.model, attn_backend=backend, seed=0).to(device)


def correctness(config: Config, info: DistInfo) -> list[dict[str, Any]]:
    """Loss and gradient of every mode against eager attention in fp32, uncompiled."""
    tokens = torch.from_numpy(letters(config)(0, 0)).to(info.device).long()
    x, y = tokens[:, :-1], tokens[:, 1:]
    backends = ["eager", "sdpa"]
    if info.device.type == "cuda" and importlib.util.find_spec("flash_attn"):
        backends.append("flash")
    rows = []
    for pos_emb in POS_EMB:
        this = dataclasses.replace(config, model=dataclasses.replace(config.model, pos_emb=pos_emb))
        reference = None
        for dtype in ("fp32", "bf16"):
            torch.set_float32_matmul_precision("high" if dtype == "bf16" else "highest")
            for backend in backends if dtype == "bf16" else backends[:2]:
                for compiled in (False, True):
                    model = model_of(this, info.device, backend)
                    run = torch.compile(model) if compiled else model
                    with dataclasses.replace(info, dtype=dtype).autocast():
                        loss = run(x, y)
                    loss.backward()
                    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
                    reference = reference or (loss.item(), gradient)
                    apart = abs(loss.item() / reference[0] - 1)
                    grad_apart = ((gradient - reference[1]).norm() / reference[1].norm()).item()
                    limit, grad_limit = TOLERANCES[dtype]
                    rows.append(
                        {"pos_emb": pos_emb, "dtype": dtype, "attention": backend,
                         "compile": compiled, "loss differs": apart, "gradient differs": grad_apart,
                         "ok": apart < limit and grad_apart < grad_limit}
                    )  # fmt: skip
    return rows


def accumulate(
    model: torch.nn.Module, batches: Prefetcher, info: DistInfo, step: int, micro_steps: int
) -> torch.Tensor:
    """The micro-steps of train.py; gives back the loss on the device."""
    loss_sum = torch.zeros((), device=info.device)
    for micro_step in range(micro_steps):
        x, y = batches.get(step, micro_step)
        with info.autocast():
            loss = model(x, y)
        (loss / micro_steps).backward()
        loss_sum += loss.detach()
    return loss_sum / micro_steps


@contextlib.contextmanager
def no_sync_allowed(info: DistInfo):
    """Anything in here that waits for the GPU is an error."""
    if info.device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loss_curve(config: Config, info: DistInfo, compiled: bool, steps: int) -> list[float]:
    """Losses of `steps` optimizer steps with accumulation in which nothing waits for the GPU."""
    raw_model = model_of(config, info.device)
    model = torch.compile(raw_model) if compiled else raw_model
    optimizer = make_optimizer(raw_model, config.train)
    batches = Prefetcher(letters(config), info, 0, steps, 2)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, config.train)
        # the first two steps compile and fill caches, which may wait
        with no_sync_allowed(info) if step > 1 else contextlib.nullcontext():
            loss = accumulate(model, batches, info, step, 2)
        torch.nn.utils.clip_grad_norm_(raw_model.parameters(), config.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    batches.close()
    return losses


def wait(info: DistInfo) -> float:
    """The time when the device is done with everything so far."""
    if info.device.type == "cuda":
        torch.cuda.synchronize(info.device)
    return time.perf_counter()


def speed(
    config: Config, info: DistInfo, device_name: str, compiled: bool, backend: str, parts: bool
) -> dict[str, Any]:
    """Median of 10 steps of one micro batch, with AdamW and clipping; parts: also of its parts."""
    if info.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(info.device)
    row = {"pos_emb": config.model.pos_emb, "parameters": perf.num_params(config.model),
           "micro_batch_size": config.train.micro_batch_size, "context": config.model.context,
           "attention": backend, "compile": compiled}  # fmt: skip
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=compiled))
    try:
        raw_model = model_of(config, info.device, backend)
        model = torch.compile(raw_model) if compiled else raw_model
        optimizer = make_optimizer(raw_model, config.train)
        batches = Prefetcher(letters(config), info, 0, 13, 1)
        times: dict[str, list[float]] = {"step": [], "forward": [], "backward": [], "update": []}
        for step in range(13):
            start = wait(info)
            x, y = batches.get(step, 0)
            with info.autocast():
                loss = model(x, y)
            forward = wait(info) if parts else 0.0
            loss.backward()
            backward = wait(info) if parts else 0.0
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), config.train.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            end = wait(info)
            if step >= 3:  # compiled and warm
                times["step"].append(end - start)
                times["forward"].append(forward - start)
                times["backward"].append(backward - forward)
                times["update"].append(end - backward)
        batches.close()
    except torch.OutOfMemoryError:
        return row | {"out of memory": True}
    median = {name: statistics.median(values) for name, values in times.items()}
    tokens_per_s = config.train.micro_batch_size * config.model.context / median["step"]
    row |= {
        "step_ms": 1000 * median["step"],
        "tokens_per_s": tokens_per_s,
        "mfu_pct": perf.mfu_pct(config, tokens_per_s, device_name, 1),
        "peak_gib": torch.cuda.max_memory_allocated(info.device) / 2**30
        if info.device.type == "cuda" else None,
        "estimate_gib": sum(perf.memory_parts(config).values()) / 2**30,
    }  # fmt: skip
    if parts:
        row |= {f"{name}_ms": 1000 * median[name] for name in ("forward", "backward", "update")}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown of equal rows."""

    def show(value: Any) -> str:
        return (
            f"{value:.4g}" if isinstance(value, float) else "n/a" if value is None else f"{value}"
        )

    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [keys, ["---"] * len(keys), *([show(row.get(k)) for k in keys] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    args = tyro.cli(Check)
    if args.quick == args.full:
        raise UserError("give either --quick or --full")
    if not torch.cuda.is_available() and not args.tiny:
        raise UserError("no CUDA GPU is visible; --tiny runs the same code with toy sizes")
    info = init_distributed("bf16")
    with info.attention_kernels():  # those of a training
        check(args, info)


def check(args: Check, info: DistInfo) -> None:
    """All checks; writes the report. Raises UserError if one of them fails."""
    name = torch.cuda.get_device_name() if info.device.type == "cuda" else "cpu"
    configs = Path(__file__).resolve().parent.parent / "configs"
    large = load_config_file(configs / "gpt2_124m_rove.toml")
    # a small model in which every part is there, and quickly right or wrong
    few = dict(micro_batch_size=4, max_steps=50, warmup_steps=5, learning_rate=3e-3, min_lr=3e-4)
    small = dataclasses.replace(
        large,
        model=GPTConfig(50257, 256, 4, 4, 256, "rove"),
        train=dataclasses.replace(large.train, **few),
    )
    models = {"124M": large.model}
    if args.full:
        models["354M"] = load_config_file(configs / "gpt2_354m_rove.toml").model
    if args.tiny:
        small = dataclasses.replace(small, model=GPTConfig(257, 32, 2, 2, 32, "rove"))
        large = dataclasses.replace(
            large, train=dataclasses.replace(large.train, micro_batch_size=2)
        )
        models = {f"{key} (tiny)": GPTConfig(257, 64, 2, 2, 32, "rove") for key in models}

    start = time.perf_counter()
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "tiny": args.tiny}
    report["correctness"] = correctness(small, info)
    torch.set_float32_matmul_precision("high")
    torch.compiler.reset()
    curves = {compiled: loss_curve(small, info, compiled, 50) for compiled in (False, True)}
    report["loss curve"] = [
        {"compile": compiled, "first loss": losses[0], "last loss": losses[-1],
         "largest difference": max(abs(a - b) for a, b in zip(*curves.values(), strict=True)),
         "ok": losses[-1] < 0.5 * losses[0] and abs(losses[-1] - curves[False][-1]) < 0.05}
        for compiled, losses in curves.items()
    ]  # fmt: skip
    report["losses"] = {"eager": curves[False], "compiled": curves[True]}
    backends = ["sdpa"]
    if args.full and info.device.type == "cuda" and importlib.util.find_spec("flash_attn"):
        backends.append("flash")
    for size, gpt in models.items():
        report[f"speed {size}"] = rows = []
        for pos_emb in POS_EMB:
            for backend in backends:
                for compiled in (False, True):
                    torch.compiler.reset()
                    this = dataclasses.replace(
                        large, model=dataclasses.replace(gpt, pos_emb=pos_emb)
                    )
                    rows.append(speed(this, info, name, compiled, backend, args.full))
                    print(rows[-1], flush=True)
    report["seconds"] = time.perf_counter() - start
    banned = sorted({"wandb", "datasets"} & set(sys.modules))
    report["imports"] = [{"neither wandb nor datasets": not banned, "ok": not banned}]

    checks = [row["ok"] for rows in report.values() if isinstance(rows, list)
              for row in rows if "ok" in row]  # fmt: skip
    report["ok"] = all(checks)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomic(out / "report.json", json.dumps(strict(report), indent=2) + "\n")
    what = f"{name}, torch {torch.__version__}{' (tiny sizes)' if args.tiny else ''}"
    passed = f"{sum(checks)} of {len(checks)} checks passed in {report['seconds']:.0f} s."
    tables = {key: rows for key, rows in report.items() if isinstance(rows, list)}
    text = [f"# {what}", passed, *(f"## {key}\n\n{table(rows)}" for key, rows in tables.items())]
    write_text_atomic(out / "report.md", "\n\n".join(text) + "\n")
    print("\n\n".join(text))
    if not report["ok"]:
        raise UserError(f"{len(checks) - sum(checks)} checks failed, see {out}/report.md")


if __name__ == "__main__":
    run_cli(main)
