"""The run stops rather than go on with ranks apart or with numbers that are none."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

import train
from model import GPT, GPTConfig
from nanorove import guards
from nanorove.distributed import DistInfo
from nanorove.errors import UserError
from tests.conftest import REPO
from tests.test_train import comparable, curve, hashes, records, run, weights

CPU = DistInfo(rank=0, world_size=1, device=torch.device("cpu"))


def poison(monkeypatch: pytest.MonkeyPatch, steps: Collection[int], value: float) -> None:
    """Put `value` into one gradient of these optimizer steps (from 0)."""
    clip, calls = train.nn.utils.clip_grad_norm_, []

    def clip_poisoned(parameters, max_norm: float) -> torch.Tensor:
        parameters = list(parameters)
        if len(calls) in steps:
            parameters[3].grad[0] = value
        calls.append(1)
        return clip(parameters, max_norm)

    monkeypatch.setattr(train.nn.utils, "clip_grad_norm_", clip_poisoned)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_bad_step_is_skipped_and_counted(tiny_toml, monkeypatch, capfd, value):
    """nanoGPT#167: one infinity must not end in weights of NaN."""
    flat = ["--train.min_lr", "1e-2", "--train.warmup_steps", "0"]
    with monkeypatch.context() as patch:
        poison(patch, range(2, 3), value)
        run(tiny_toml(), *flat, "--train.max_steps", "3")
    out = capfd.readouterr().out
    (line,) = [line for line in out.splitlines() if "skipped" in line]
    for part in ("step 3", "loss 5.", f"gradient norm {value}", "learning rate 0.01", "(1 in this"):
        assert part in line
    # exactly the weights and moments of two steps
    run("tiny.toml", *flat, "--train.max_steps", "2", "--run_name", "two")
    assert hashes("tiny", 3) == hashes("two", 2)
    assert curve("tiny", "train/skipped_steps") == {1: 0, 2: 0, 3: 1}
    assert curve("tiny", "train/grad_norm")[3] is None  # JSON knows no NaN
    assert "NaN" not in Path("runs/tiny/metrics.jsonl").read_text()
    meta = json.loads(Path("runs/tiny/ckpt/step_00000003/meta.json").read_text())
    assert meta["skipped_steps"] == 1


def test_too_many_bad_steps_stop_the_run(tiny_toml, monkeypatch):
    argv = ["--train.max_steps", "30", "--train.checkpoint_interval", "4"]
    poison(monkeypatch, range(7, 30), math.nan)
    with pytest.raises(UserError) as error:
        run(tiny_toml(), *argv)
    message = str(error.value)
    for part in ("step 17:", "gradient norm nan", "learning rate 0.00", "10 steps in a row"):
        assert part in message
    # what it saved in between are the good weights of step 7
    last = Path("runs/tiny/ckpt/last").read_text().strip()
    assert all(p.isfinite().all() for p in weights("tiny", int(last[5:])).values())


def test_bad_steps_that_end_in_time_do_not_stop_the_run(tiny_toml, monkeypatch):
    """9, a good one, 9 again: counted over a resume too."""
    argv = ["--train.max_steps", "25", "--train.checkpoint_interval", "5"]
    bad = [*range(3, 12), *range(13, 22)]
    with monkeypatch.context() as patch:
        poison(patch, bad, math.inf)
        run(tiny_toml(), *argv)
    assert curve("tiny", "train/skipped_steps")[25] == 18
    run("tiny.toml", "--train.max_steps", "26", "--resume")
    assert curve("tiny", "train/skipped_steps")[26] == 18


def test_a_weight_that_is_no_number_never_gets_into_a_checkpoint(tiny_toml, monkeypatch):
    """Neither as `last` nor as `best`; the message says what to do."""
    batch, make_optimizer, models = train.Prefetcher.get, train.make_optimizer, []

    def get(self, step: int, micro_step: int) -> tuple:
        if (step, micro_step) == (4, 3):
            models[0].transformer.h[1].mlp.c_fc.bias.data[5] = math.nan
        return batch(self, step, micro_step)

    def make(model: GPT, config: object) -> torch.optim.Optimizer:
        models.append(model)
        return make_optimizer(model, config)

    with monkeypatch.context() as patch:
        patch.setattr(train.Prefetcher, "get", get)
        patch.setattr(train, "make_optimizer", make)
        with pytest.raises(UserError) as error:
            run(tiny_toml())
    for part in ("step 6", "transformer.h.1.mlp.c_fc.bias", "not finite", "--resume"):
        assert part in str(error.value)
    assert Path("runs/tiny/ckpt/last").read_text() == "step_00000003\n"
    assert Path("runs/tiny/ckpt/best").read_text() == "step_00000003\n"
    run("tiny.toml", "--resume")
    run("tiny.toml", "--run_name", "unbroken")
    assert hashes("tiny") == hashes("unbroken") and comparable("tiny") == comparable("unbroken")


def test_every_bit_counts_in_the_sums():
    model = GPT(GPTConfig(257, 8, 1, 2, 16, "rove"))
    before = guards.weight_sums(model)
    assert before.dtype == torch.int64 and before.shape == (len(list(model.parameters())),)
    for index, p in enumerate(model.parameters()):
        bits = p.data.view(torch.int32).view(-1)
        for bit in (0, 12, 31):
            bits[-1] ^= 1 << bit if bit < 31 else -(2**31)
            changed = (guards.weight_sums(model) != before).nonzero().flatten().tolist()
            assert changed == [index]
            bits[-1] ^= 1 << bit if bit < 31 else -(2**31)
    assert guards.weight_sums(model).equal(before)


DESYNC = """
import os, sys, torch, train
from nanorove.config import load_config
from nanorove.distributed import run_distributed
from nanorove.optim import make_optimizer
def make(model, config):
    optimizer = make_optimizer(model, config)
    def after_step(*args):
        if os.environ["RANK"] == "1" and optimizer.state[model.transformer.ln_f.bias]["step"] == 4:
            with torch.no_grad():
                model.transformer.ln_f.bias.view(torch.int32)[0] ^= 1 << 12
    optimizer.register_step_post_hook(after_step)
    return optimizer
train.make_optimizer = make
run_distributed(lambda: train.main(*load_config(sys.argv[1:])))
"""


def test_ranks_that_train_apart_stop_the_run(tiny_toml):
    """One bit of one weight on one rank (build-nanogpt#30): found at the next evaluation, before
    anything is saved, named once, and every rank ends."""
    Path("desync.py").write_text(DESYNC)
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "desync.py", tiny_toml(), "--train.checkpoint_interval", "3"],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for part in ("step 6", "the ranks train apart", "transformer.", "of rank 1", "--resume"):
        assert part in line
    assert Path("runs/tiny/ckpt/last").read_text() == "step_00000003\n"
    assert max(r["step"] for r in records() if "val/loss" in r) == 3


def test_deterministic(tiny_toml):
    """On a CPU nothing changes; the setting reaches torch and is taken back."""
    run(tiny_toml(), "--run_name", "plain")
    seen = []
    evaluate = train.evaluate_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train, "evaluate_loss",
            lambda *a: (seen.append(torch.are_deterministic_algorithms_enabled()), evaluate(*a))[1],
        )  # fmt: skip
        run("tiny.toml", "--train.deterministic", "True")
        assert seen == [True] * 3
        run("tiny.toml", "--run_name", "again")
        assert seen[3:] == [False] * 3
    assert hashes("tiny") == hashes("plain")
