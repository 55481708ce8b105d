"""
Train a GPT-2 with learned, RoPE or RoVE positions.

On a laptop, a few minutes (after `python -m data.stdlib`):
    python train.py configs/demo_rove.toml
On one GPU, or on eight:
    python train.py configs/gpt2_124m_rove.toml
    torchrun --standalone --nproc_per_node=8 train.py configs/gpt2_124m_rove.toml
On two machines of eight (the same on both; they share the folder runs/):
    torchrun --nnodes=2 --nproc_per_node=8 --max-restarts=3 --rdzv_backend=c10d \
        --rdzv_endpoint=HOST:29500 --rdzv_id=1 train.py configs/gpt2_124m_rove.toml --resume
Any setting can be changed on the command line (--train.max_steps 100, see --help); --resume goes
on from the run's last checkpoint. SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 save one and stop.

CUDA and NCCL: written for them, but not yet run on a GPU by the authors; CPU and gloo are tested.
"""

import contextlib
import datetime
import hashlib
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from data.loader import TrainLoader, ValLoader
from data.shards import MANIFEST, load_manifest
from data.tokenizer import recorded_tokenizer
from model import GPT
from nanorove import checkpoint, hellaswag
from nanorove.batches import Prefetcher
from nanorove.config import Config, config_differences, config_from_dict, load_config
from nanorove.distributed import init_distributed, run_distributed
from nanorove.errors import UserError
from nanorove.files import write_text_atomic
from nanorove.guards import BadSteps, StopSignal, check_weights, lock_run
from nanorove.optim import lr_at, make_optimizer
from nanorove.perf import grad_accum_steps, mfu_pct, out_of_room, start_block
from nanorove.runlog import PREEMPTED, RunLog, is_restart, peak_memory_gib, run_facts
from nanorove.validation import evaluate_loss


def find_checkpoint(config: Config, resume: bool) -> Path | None:
    """The step folder to go on from, or None to start at step 0.

    Raises UserError rather than start over a run that has checkpoints.
    """
    found = sorted((config.run_dir / "ckpt").glob("step_????????"))
    # workers that torchrun starts again after a failure go on by themselves
    if found and not resume and not is_restart(config.run_dir):
        raise UserError(
            f"{config.run_dir} has checkpoints already, the newest one {found[-1].name}:"
            " add --resume to go on, or choose another --run_name"
        )
    return checkpoint.find_resume_dir(config.run_dir, lambda line: print(f"resume: {line}"))


def check_same_run(
    config: Config, meta: dict[str, Any], data: dict[str, Any], rank: int
) -> set[str]:
    """A resumed run must be the same experiment: print what differs, refuse what must not.

    Gives back the names of the settings that differ.
    """
    rows = config_differences(config_from_dict(meta["config"]), config)
    if meta["data"]["manifest_sha256"] != data["manifest_sha256"]:
        rows["the data's manifest"] = meta["data"]["manifest_sha256"], data["manifest_sha256"]
    fixed = [key for key in rows if key.startswith(("model.", "the data"))
             or key in ("seed", "init_from", "train.total_batch_size")]  # fmt: skip
    if rows and rank == 0:
        print(f"resume: {'setting':26} {'checkpoint':>24} {'now':>24}")
        for key, (before, now) in rows.items():
            mark = "  must not change" if key in fixed else ""
            print(f"resume: {key:26} {str(before)[:24]:>24} {str(now)[:24]:>24}{mark}", flush=True)
    if fixed:
        before, now = rows[fixed[0]]
        where = f" (with --data.dir {config.data.dir})" if fixed[0].startswith("the data") else ""
        raise UserError(
            f"{config.run_dir}: {fixed[0]} was {before} and is now {now}{where}; a run cannot"
            " change that at --resume: set it back, or choose another --run_name"
        )
    before = f"{meta.get('threads')} threads, torch {meta.get('versions', {}).get('torch')}"
    now = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    if before != now and rank == 0:
        print(f"resume: was {before}, is {now}: the last bits may differ", flush=True)
    return set(rows)


def main(config: Config, resume: bool = False) -> dict[str, float]:
    """Train as `config` says; gives back {"step", "train/loss", "val/loss"} of the end.

    Stopped by a signal it saves a checkpoint and comes back early, with the step it got to.
    """
    with contextlib.ExitStack() as at_the_end:  # log, threads and signals, however it ends
        try:
            return run_training(config, resume, at_the_end)
        except (RuntimeError, OSError) as error:
            raise out_of_room(error, config) or error from None


def run_training(
    config: Config, resume: bool, at_the_end: contextlib.ExitStack
) -> dict[str, float]:
    """The whole training, from top to bottom."""
    train, context = config.train, config.model.context
    stop = StopSignal()  # first: a signal during the start is not lost
    at_the_end.callback(stop.restore)
    info = init_distributed(train.dtype, train.deterministic)
    accum_steps = grad_accum_steps(config, info.world_size)
    if train.attn_backend == "flash" and info.device.type != "cuda":
        raise UserError("train.attn_backend flash runs on CUDA GPUs only; use sdpa or eager")
    at_the_end.enter_context(info.attention_kernels())

    # data
    tokenizer = load_manifest(config.data.dir)["tokenizer"]
    manifest_sha256 = hashlib.sha256((Path(config.data.dir) / MANIFEST).read_bytes()).hexdigest()
    data = {"manifest_sha256": manifest_sha256, "tokenizer": tokenizer}
    if tokenizer["vocab_size"] != config.model.vocab_size:
        raise UserError(
            f"{config.data.dir} was made with tokenizer {tokenizer['name']}, so model.vocab_size"
            f" must be {tokenizer['vocab_size']}, not {config.model.vocab_size}"
        )
    questions = []
    if train.hellaswag_interval:
        encode = recorded_tokenizer(tokenizer, config.data.dir).encode
        questions = hellaswag.read_items(hellaswag.PATH, encode)
    share = dict(rank=info.rank, world_size=info.world_size)
    share |= dict(block_size=context, micro_batch_size=train.micro_batch_size)
    sequences = train.total_batch_size // context
    train_data = TrainLoader(
        config.data.dir, sequences_per_step=sequences, seed=config.seed, **share
    )
    val_data = ValLoader(config.data.dir, val_tokens=train.val_tokens, **share)

    # model: built on the CPU, so that the initial weights do not depend on the device
    try:
        raw_model = GPT(
            config.model,
            attn_backend=train.attn_backend,
            seed=config.seed,
            loss_chunk=train.loss_chunk,
            activation_checkpointing=train.activation_checkpointing,
            bf16_residual=train.residual == "bf16",
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    info.from_rank0(lambda: lock_run(config.run_dir, at_the_end))
    step_dir = info.from_rank0(lambda: find_checkpoint(config, resume))
    meta: dict[str, Any] = {"step": 0, "val_loss": None, "best_val_loss": None, "best_step": None}
    if step_dir is not None:
        meta |= checkpoint.read_meta(step_dir)
        changed = check_same_run(config, meta, data, info.rank)
        if meta["best_step"] and changed & {"train.val_tokens", "train.dtype", "train.residual"}:
            meta |= {"best_val_loss": None, "best_step": None}
            info.print0("resume: val/loss is measured in another way now, so best begins anew")
        checkpoint.load_weights(raw_model, step_dir)
    elif config.init_from is not None:
        init_dir, meta["init"] = checkpoint.load_init_weights(raw_model, config)
        info.print0(f"init_from: starts from the weights of {init_dir}")
    raw_model.to(info.device)
    optimizer = make_optimizer(raw_model, train)
    if step_dir is not None:
        checkpoint.load_optimizer(raw_model, optimizer, step_dir)
    model = torch.compile(raw_model) if train.compile else raw_model  # the loss is part of it
    if info.is_distributed:
        device_ids = [info.device.index] if info.device.type == "cuda" else None
        model = DDP(model, device_ids, gradient_as_bucket_view=True)

    # log
    start_step, val_loss = meta["step"], meta["val_loss"]
    best_val_loss, best_step = meta["best_val_loss"], meta["best_step"]
    if start_step > train.max_steps:
        raise UserError(
            f"{config.run_dir} is at step {start_step} already, beyond train.max_steps"
            f" ({train.max_steps}); raise it to go on"
        )
    info.print0(start_block(config, info, raw_model.num_params(), len(train_data.stream)))
    log = None
    facts = run_facts(info, raw_model.num_params()) | {"init": meta.get("init")}

    def start_log() -> None:
        nonlocal log
        log = RunLog(config, facts, meta if step_dir else None)
        at_the_end.callback(log.close)
        if step_dir is not None:  # what lies beyond it never was
            print(f"resume: goes on at step {start_step}", flush=True)
            if best_step is not None or best_val_loss is None:
                checkpoint.mark_best(config.run_dir, best_step)
            if names := checkpoint.forget_after(config.run_dir, start_step):
                print(f"resume: removed what lay beyond: {', '.join(names)}", flush=True)

    info.from_rank0(start_log)  # an error of rank 0 ends all

    def save(step: int) -> Path:
        """Rank 0 writes and the others wait for it, so that none is alone in a collective."""

        def write() -> Path:
            log.sync()
            about = {
                "data": data, "val_loss": None, "best_val_loss": best_val_loss,
                "best_step": best_step, "skipped_steps": bad_steps.total,
                "wandb_id": log.wandb_id, "versions": facts["versions"],
                "threads": facts["threads"], "init": facts["init"],
            }  # fmt: skip
            return checkpoint.save_checkpoint(
                config.run_dir, step, config, raw_model, optimizer, about
            )

        return info.from_rank0(write)

    batches = Prefetcher(train_data.rows, info, start_step, train.max_steps, accum_steps)
    at_the_end.callback(batches.close)
    bad_steps, stopping = BadSteps(meta.get("skipped_steps", 0)), False
    train_loss, clock, clock_step = float("nan"), time.perf_counter(), start_step
    for step in range(start_step, train.max_steps + 1):  # `step` optimizer steps are done
        pause = time.perf_counter()
        first_step, last_step = step == start_step, step == train.max_steps
        checkpoint_now = last_step or stopping or step % train.checkpoint_interval == 0
        evaluate_now = (last_step or step % train.eval_interval == 0) and not stopping
        if first_step:
            checkpoint_now = False
            evaluate_now &= val_loss is None  # or it was evaluated before the stop
        if checkpoint_now or evaluate_now:
            check_weights(raw_model, info, step)
        saved = step_dir if first_step else None
        if checkpoint_now:
            saved = save(step)  # before the evaluation: a recovery point must not wait for it
        if evaluate_now:
            val_loss, by_position = evaluate_loss(raw_model, val_data, info)
            accuracy = {}
            if questions and (last_step or step % train.hellaswag_interval == 0):
                accuracy = hellaswag.evaluate_hellaswag(raw_model, questions, info)
            if log:
                log.write({"step": step, "tokens": step * train.total_batch_size,
                           "val/loss": val_loss, "val/loss_by_position": by_position}
                          | accuracy)  # fmt: skip
            shown = "".join(f" | {name} {value:.4f}" for name, value in accuracy.items())
            info.print0(f"step {step:6d} | val loss {val_loss:.4f}{shown}")
            if step > 0 and val_loss < (float("inf") if best_val_loss is None else best_val_loss):
                best_val_loss, best_step = val_loss, step
                saved = saved or save(step)
            if saved and info.rank == 0:
                if best_step == step:
                    checkpoint.mark_best(config.run_dir, step)
                checkpoint.add_to_meta(
                    saved, val_loss=val_loss, best_val_loss=best_val_loss, best_step=best_step
                )
        if saved and info.rank == 0:
            checkpoint.prune_checkpoints(config.run_dir, train.keep_checkpoints)
        if stopping:
            text = f"stopped at step {step} by {stop.name or 'a signal to another process'}"
            if info.rank == 0:
                write_text_atomic(config.run_dir / PREEMPTED, text + "\n")
            info.print0(f"{text}: saved, --resume goes on")
            return {"step": step, "train/loss": train_loss, "val/loss": val_loss}
        clock += time.perf_counter() - pause  # tokens/s is that of training alone
        if last_step:
            break

        # one optimizer step
        lr = lr_at(step, train)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=info.device)
        for micro_step in range(accum_steps):
            x, y = batches.get(step, micro_step)
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
        # the one wait for the GPU of a step: what all ranks must know and agree on
        stats = torch.stack((loss_sum, grad_norm, torch.full_like(loss_sum, stop.name is not None)))
        counts = torch.tensor((accum_steps * info.world_size, info.world_size, 1))
        train_loss, norm, stopping = (info.sum_across_ranks(stats).cpu() / counts).tolist()
        if math.isfinite(train_loss) and math.isfinite(norm):
            optimizer.step()
            bad_steps.good()
        else:
            info.print0(bad_steps.bad(step + 1, train_loss, norm, lr))
        optimizer.zero_grad(set_to_none=True)

        done = step + 1
        if done % train.log_interval == 0 or done == train.max_steps:
            step_s = (time.perf_counter() - clock) / (done - clock_step)
            tokens_per_s = train.total_batch_size / step_s
            mfu = mfu_pct(config, tokens_per_s, facts["device"], info.world_size)
            if log:
                log.write({
                    "step": done, "tokens": done * train.total_batch_size,
                    "epoch": train_data.epoch(done), "train/loss": train_loss,
                    "train/grad_norm": norm, "train/lr": lr,
                    "train/skipped_steps": bad_steps.total,
                    "perf/tokens_per_s": tokens_per_s, "perf/step_ms": 1000 * step_s,
                    "perf/data_wait_ms": 1000 * batches.wait_s / (done - clock_step),
                    "perf/mfu_pct": mfu, "mem/peak_gib": peak_memory_gib(info.device),
                })  # fmt: skip
            info.print0(
                f"step {done:6d}/{train.max_steps} | loss {train_loss:.4f} | norm {norm:.3f}"
                f" | lr {lr:.2e} | {tokens_per_s:,.0f} tok/s | {1000 * step_s:.0f} ms | mfu"
                f" {'n/a' if mfu is None else f'{mfu:.1f} %'} |"
                f" eta {datetime.timedelta(seconds=round(step_s * (train.max_steps - done)))}"
            )
            clock, clock_step, batches.wait_s = time.perf_counter(), done, 0.0
    return {"step": train.max_steps, "train/loss": train_loss, "val/loss": val_loss}


if __name__ == "__main__":
    run_distributed(lambda: main(*load_config(sys.argv[1:])))
