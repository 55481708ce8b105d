"""
Train a GPT-2 with learned, RoPE or RoVE positions.

On a laptop, a few minutes (after `python -m data.stdlib`):
    python train.py configs/demo_rove.toml
On one GPU, or on eight:
    python train.py configs/gpt2_124m_rove.toml
    torchrun --standalone --nproc_per_node=8 train.py configs/gpt2_124m_rove.toml
On two machines of eight:
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
        train.py configs/gpt2_124m_rove.toml
Any setting can be changed on the command line (--train.max_steps 100, see --help); --resume goes
on from the run's last checkpoint.

CUDA and NCCL: written for them, but not yet run on a GPU by the authors; CPU and gloo are tested.
"""

import contextlib
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from data.loader import TrainLoader, ValLoader
from data.shards import MANIFEST, load_manifest
from model import GPT
from nanorove import checkpoint
from nanorove.config import Config, config_differences, config_from_dict, load_config
from nanorove.distributed import DistInfo, init_distributed, shutdown_distributed
from nanorove.errors import UserError, run_cli
from nanorove.optim import lr_at, make_optimizer
from nanorove.runlog import RunLog, peak_memory_gib, run_facts


def grad_accum_steps(config: Config, world_size: int) -> int:
    """Micro-steps per optimizer step: total_batch_size tokens over micro batches and ranks.

    Raises UserError with the sizes that would work.
    """
    tokens = config.train.micro_batch_size * config.model.context * world_size
    total = config.train.total_batch_size
    if total % tokens:
        sizes = sorted({max(total // tokens, 1) * tokens, (total // tokens + 1) * tokens})
        fits = [b for b in range(1, config.train.micro_batch_size)
                if total % (b * config.model.context * world_size) == 0]  # fmt: skip
        raise UserError(
            f"train.total_batch_size ({total:,} tokens) is not a multiple of micro_batch_size"
            f" {config.train.micro_batch_size} x context {config.model.context} x {world_size}"
            f" processes = {tokens:,}; use --train.total_batch_size"
            f" {' or '.join(map(str, sizes))}"
            + (f", or --train.micro_batch_size {fits[-1]}" if fits else "")
        )
    return total // tokens


@torch.no_grad()
def evaluate_loss(model: nn.Module, val_data: ValLoader, info: DistInfo) -> float:
    """Mean loss over all validation tokens, in nats: sums over all ranks, then one division."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=info.device)  # sum of losses, tokens
    for x, y in val_data:
        x, y = x.to(info.device), y.to(info.device)
        with info.autocast():
            loss = model(x, y)
        total += torch.stack((loss.double() * y.numel(), loss.new_tensor(y.numel()).double()))
    loss_sum, tokens = info.sum_across_ranks(total).tolist()
    model.train()
    return loss_sum / tokens


def find_checkpoint(config: Config, resume: bool) -> Path | None:
    """The step folder to go on from, or None to start at step 0.

    Raises UserError rather than start over a run that has checkpoints.
    """
    if not (config.run_dir / "ckpt" / "last").exists():
        return None
    step_dir = checkpoint.resolve_step_dir(config.run_dir)
    if not resume:
        raise UserError(
            f"{config.run_dir} has checkpoints already, the last one {step_dir.name}:"
            " add --resume to go on, or choose another --run_name"
        )
    return step_dir


def check_same_run(config: Config, meta: dict[str, Any], data_sha256: str, info: DistInfo) -> None:
    """A resumed run must be the same experiment: refuse another one, print what else changed."""
    differences = config_differences(config_from_dict(meta["config"]), config)
    for key, (before, now) in differences.items():
        if key.startswith("model.") or key in ("seed", "train.total_batch_size"):
            raise UserError(
                f"{config.run_dir}: {key} was {before} and is now {now}; a run cannot change it"
                " at --resume, choose another --run_name"
            )
        info.print0(f"resume: {key} was {before} and is now {now}")
    if meta["data"]["manifest_sha256"] != data_sha256:
        raise UserError(
            f"{config.data.dir}: another data set than the run began with (its manifest changed);"
            " give that one with --data.dir, or choose another --run_name"
        )


def load_init_weights(model: GPT, config: Config) -> None:
    """Start from another run's weights: the same model, but for block_size and yarn_factor."""
    step_dir = checkpoint.resolve_step_dir(config.init_from)
    theirs = config_from_dict(checkpoint.read_meta(step_dir)["config"]).model
    for key in ("pos_emb", "rope_base", "vocab_size", "n_layer", "n_head", "n_embd"):
        if getattr(theirs, key) != getattr(config.model, key):
            raise UserError(
                f"init_from {step_dir}: its model.{key} is {getattr(theirs, key)}, this config's"
                f" is {getattr(config.model, key)}; they must be equal"
            )
    checkpoint.load_weights(model, step_dir)


def main(config: Config, resume: bool = False) -> dict[str, float]:
    """Train as `config` says; gives back {"step", "train/loss", "val/loss"} of the end."""
    info = init_distributed()
    train, context = config.train, config.model.context
    accum_steps = grad_accum_steps(config, info.world_size)
    if train.attn_backend == "flash" and info.device.type != "cuda":
        raise UserError("train.attn_backend flash runs on CUDA GPUs only; use sdpa or eager")

    # data
    manifest = load_manifest(config.data.dir)
    data_sha256 = hashlib.sha256((Path(config.data.dir) / MANIFEST).read_bytes()).hexdigest()
    tokenizer = manifest["tokenizer"]
    if tokenizer["vocab_size"] != config.model.vocab_size:
        raise UserError(
            f"{config.data.dir} was made with tokenizer {tokenizer['name']}, so model.vocab_size"
            f" must be {tokenizer['vocab_size']}, not {config.model.vocab_size}"
        )
    share = dict(rank=info.rank, world_size=info.world_size)
    train_data = TrainLoader(
        config.data.dir,
        block_size=context,
        micro_batch_size=train.micro_batch_size,
        sequences_per_step=train.total_batch_size // context,
        seed=config.seed,
        **share,
    )
    val_data = ValLoader(
        config.data.dir,
        block_size=context,
        micro_batch_size=train.micro_batch_size,
        val_tokens=train.val_tokens,
        **share,
    )

    # model: built on the CPU, so that the initial weights do not depend on the device
    try:
        raw_model = GPT(config.model, attn_backend=train.attn_backend, seed=config.seed)
    except ValueError as error:
        raise UserError(str(error)) from None
    step_dir = find_checkpoint(config, resume)
    meta: dict[str, Any] = {"step": 0, "val_loss": None, "best_val_loss": None, "wandb_id": None}
    if step_dir is not None:
        meta = checkpoint.read_meta(step_dir)
        check_same_run(config, meta, data_sha256, info)
        checkpoint.load_weights(raw_model, step_dir)
    elif config.init_from is not None:
        load_init_weights(raw_model, config)
    raw_model.to(info.device)
    optimizer = make_optimizer(raw_model, train)
    if step_dir is not None:
        checkpoint.load_optimizer(raw_model, optimizer, step_dir)
    compiled = torch.compile(raw_model) if train.compile else raw_model
    model = compiled
    if info.is_distributed:
        device_ids = [info.device.index] if info.device.type == "cuda" else None
        model = DDP(compiled, device_ids, gradient_as_bucket_view=True)

    start_step = meta["step"]
    if start_step > train.max_steps:
        raise UserError(
            f"{config.run_dir} is at step {start_step} already, beyond train.max_steps"
            f" ({train.max_steps}); raise it to go on"
        )
    val_loss, best_val_loss = meta["val_loss"], meta["best_val_loss"]
    log = None
    if info.rank == 0:
        facts = run_facts(info, raw_model.num_params())
        resume_step = start_step if step_dir is not None else None
        log = RunLog(config, facts, resume_step, meta["wandb_id"])
    info.print0(
        f"run {config.run_dir} | {info.device.type} x {info.world_size}, "
        f"{'bf16 autocast' if info.device.type == 'cuda' else 'fp32'}, attention"
        f" {train.attn_backend}, compile {train.compile}\n"
        f"model {config.model.pos_emb}, {raw_model.num_params():,} parameters | data"
        f" {config.data.dir}, {len(train_data.stream):,} training tokens\n"
        f"{train.total_batch_size:,} tokens per step = {accum_steps} micro-steps x"
        f" {info.world_size} processes x {train.micro_batch_size} x {context} |"
        f" {train.max_steps:,} steps = {train_data.epoch(train.max_steps):.2f} epochs"
        + (f" | goes on at step {start_step}" if step_dir is not None else "")
    )

    def save(step: int) -> Path:
        """All ranks wait for rank 0's save, so that none runs into a collective alone."""
        path = config.run_dir / "ckpt" / f"step_{step:08d}"
        if info.rank == 0:
            checkpoint.save_checkpoint(
                config.run_dir, step, config, raw_model, optimizer,
                {
                    "data": {"manifest_sha256": data_sha256, "tokenizer": tokenizer},
                    "val_loss": None, "best_val_loss": best_val_loss, "wandb_id": log.wandb_id,
                    "versions": facts["versions"], "threads": facts["threads"],
                },
            )  # fmt: skip
        info.barrier()
        return path

    train_loss, clock, clock_step = float("nan"), time.perf_counter(), start_step
    for step in range(start_step, train.max_steps + 1):  # `step` optimizer steps are done
        pause = time.perf_counter()
        last_step = step == train.max_steps
        saved = None
        if step > start_step and (step % train.checkpoint_interval == 0 or last_step):
            saved = save(step)  # before the evaluation: a recovery point must not wait for it
        elif step == start_step:
            saved = step_dir
        if (step % train.eval_interval == 0 or last_step) and not (
            step == start_step and val_loss is not None  # was evaluated before the stop
        ):
            val_loss = evaluate_loss(compiled, val_data, info)
            if log:
                log.write({"step": step, "tokens": step * train.total_batch_size,
                           "val/loss": val_loss})  # fmt: skip
            info.print0(f"step {step:6d} | val loss {val_loss:.4f}")
            if step > 0 and val_loss < (float("inf") if best_val_loss is None else best_val_loss):
                best_val_loss = val_loss
                saved = saved or save(step)
                if info.rank == 0:
                    checkpoint.mark_best(saved)
            if saved and info.rank == 0:
                checkpoint.add_to_meta(saved, val_loss=val_loss, best_val_loss=best_val_loss)
        if saved and info.rank == 0:
            checkpoint.prune_checkpoints(config.run_dir, train.keep_checkpoints)
        clock += time.perf_counter() - pause  # tokens/s is that of training alone
        if last_step:
            break

        # one optimizer step
        lr = lr_at(step, train)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=info.device)
        for micro_step in range(accum_steps):
            x, y = train_data.batch(step, micro_step)
            x, y = x.to(info.device, non_blocking=True), y.to(info.device, non_blocking=True)
            # gradients meet across ranks in the last micro-step alone; the flag must be set
            # before forward, where DDP reads it
            last_micro_step = micro_step == accum_steps - 1
            wait = info.is_distributed and not last_micro_step
            with model.no_sync() if wait else contextlib.nullcontext():
                with info.autocast():
                    loss = model(x, y)
                # every micro batch has as many tokens, so the mean of their means is the mean
                (loss / accum_steps).backward()
            loss_sum += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(raw_model.parameters(), train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        done = step + 1
        if done % train.log_interval == 0 or done == train.max_steps:
            mean_loss = info.sum_across_ranks(loss_sum) / (accum_steps * info.world_size)
            train_loss = mean_loss.item()  # waits for the GPU, so the time below is honest
            step_s = (time.perf_counter() - clock) / (done - clock_step)
            clock, clock_step = time.perf_counter(), done
            record = {
                "step": done,
                "tokens": done * train.total_batch_size,
                "epoch": train_data.epoch(done),
                "train/loss": train_loss,
                "train/grad_norm": grad_norm.item(),
                "train/lr": lr,
                "perf/tokens_per_s": train.total_batch_size / step_s,
                "perf/step_ms": 1000 * step_s,
                "mem/peak_gib": peak_memory_gib(info.device),
            }
            if log:
                log.write(record)
            eta = time.strftime("%H:%M:%S", time.gmtime(step_s * (train.max_steps - done)))
            info.print0(
                f"step {done:6d}/{train.max_steps} | loss {train_loss:.4f} | norm"
                f" {record['train/grad_norm']:.3f} | lr {lr:.2e} |"
                f" {record['perf/tokens_per_s']:,.0f} tok/s | {1000 * step_s:.0f} ms | eta {eta}"
            )
    if log:
        log.close()
    return {"step": train.max_steps, "train/loss": train_loss, "val/loss": val_loss}


def cli() -> None:
    config, resume = load_config(sys.argv[1:])
    try:
        main(config, resume)
    finally:
        shutdown_distributed()


if __name__ == "__main__":
    run_cli(cli)
