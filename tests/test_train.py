import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

import model as model_file
import train
from model import GPT
from nanorove import checkpoint
from nanorove.config import load_config
from nanorove.errors import UserError
from nanorove.perf import grad_accum_steps
from tests.conftest import REPO, needs_inductor, toy_tokens, write_data_dir


def run(path: str, *argv: str) -> dict[str, float]:
    config, resume = load_config([path, *argv])
    return train.main(config, resume)


def records(name: str = "tiny") -> list[dict]:
    text = Path(f"runs/{name}/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def curve(name: str, key: str) -> dict[int, float]:
    found = [(r["step"], r[key]) for r in records(name) if key in r]
    assert len(found) == len(dict(found)), f"{key} twice at one step"
    return dict(found)


def comparable(name: str) -> list[dict]:
    """The record without what may differ between two equal runs: times and memory."""
    return [
        {k: v for k, v in r.items() if not k.startswith(("perf/", "mem/"))}
        for r in records(name)
        if "event" not in r
    ]


def hashes(name: str, step: int = 6) -> dict[str, str]:
    folder = Path(f"runs/{name}/ckpt/step_{step:08d}")
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }


def weights(name: str, step: int = 6) -> dict[str, torch.Tensor]:
    path = f"runs/{name}/ckpt/step_{step:08d}/model.safetensors"
    return safetensors.torch.load_file(path)


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=lambda m, n=name: n + m)


class Stop(Exception):
    """The process dies here."""


@contextlib.contextmanager
def dies(where: str, at: int):
    """Within: train.py dies in its `at`-th optimizer step, evaluation or save (from 0)."""
    with pytest.MonkeyPatch.context() as patch:
        calls = []

        def wrap(owner: object, name: str, now: Callable[..., bool]) -> None:
            original = getattr(owner, name)

            def dying(*args, **kwargs):
                calls.append(name)
                if now(*args, **kwargs):
                    raise Stop
                return original(*args, **kwargs)

            patch.setattr(owner, name, dying)

        if where == "step":
            wrap(train.TrainLoader, "rows", lambda self, step, micro: step == at and micro == 1)
        else:
            owner, name = {
                "evaluation": (train, "evaluate_loss"),
                "save": (checkpoint, "save_checkpoint"),
            }[where]
            wrap(owner, name, lambda *a, **k: len(calls) == at + 1)
        with pytest.raises(Stop):
            yield


# -----------------------------------------------------------------------------
# what is computed


def reference_windows(data_dir: Path, block_size: int, seed: int, count: int) -> torch.Tensor:
    """The first `count` windows of training, (count, T + 1), from the specification of the order
    and from the bytes of the files."""
    files = sorted(data_dir.glob("*_train_*.bin"))
    shards = [np.frombuffer(path.read_bytes()[1024:], "<u2") for path in files]
    stream = np.concatenate(shards).astype(np.int64)
    shard_of = np.repeat(np.arange(len(shards)), [len(s) for s in shards])
    starts = np.arange(0, len(stream) - block_size, block_size)
    order, epoch = [], 0
    while len(order) < count:
        for shard in np.random.RandomState([seed, epoch]).permutation(len(shards)):
            here = starts[shard_of[starts] == shard]
            order += here[
                np.random.RandomState([seed, epoch, shard]).permutation(len(here))
            ].tolist()
        epoch += 1
    return torch.from_numpy(np.stack([stream[i : i + block_size + 1] for i in order[:count]]))


def test_against_a_plain_loop(tiny_toml, data_dir):
    """Every number of the record and the weights, against training written out in a few lines:
    whole batches, no accumulation, AdamW and clipping by their formulas, in float64."""
    run(tiny_toml(), "--train.grad_clip", "0.3", "--train.checkpoint_interval", "100")

    config, _ = load_config(["tiny.toml"])
    model = GPT(config.model, seed=7).double()
    windows = reference_windows(data_dir, 8, seed=7, count=6 * 8)
    n_windows = (1003 + 500 + 97 - 1) // 8
    lrs = [
        0.005,
        0.01,
        0.01,
        *(0.001 + 0.0045 * (1 + math.cos(math.pi * t / 3)) for t in (1, 2, 3)),
    ]
    m = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    v = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for step in range(6):
        batch = windows[8 * step : 8 * step + 8]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 257), batch[:, 1:].reshape(-1))
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.pow(2).sum().item() for p in model.parameters()))
        assert norm > 0.3  # or this would not test the clipping
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = p.grad * 0.3 / norm
                m[name] = 0.9 * m[name] + 0.1 * g
                v[name] = 0.95 * v[name] + 0.05 * g * g
                p *= 1 - lrs[step] * (0.1 if p.ndim == 2 else 0.0)
                corrected = m[name] / (1 - 0.9 ** (step + 1))
                p -= lrs[step] * corrected / ((v[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
        (record,) = [r for r in records() if r["step"] == step + 1 and "train/loss" in r]
        assert record["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert record["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert record["train/lr"] == pytest.approx(lrs[step], rel=1e-12)
        assert record["tokens"] == 64 * (step + 1)
        assert record["epoch"] == pytest.approx(8 * (step + 1) / n_windows)
    ours = {name: p.float() for name, p in model.state_dict().items()}
    assert_close(weights("tiny"), ours, atol=2e-4)


def test_validation_loss_is_the_mean_over_the_fixed_tokens(tiny_toml, data_dir):
    """200 tokens = 25 windows in batches of 2: the last batch is smaller and must count less."""
    result = run(tiny_toml())
    (path,) = data_dir.glob("*_val_*.bin")
    stream = torch.from_numpy(np.frombuffer(path.read_bytes()[1024:], "<u2").astype(np.int64))
    model = GPT(load_config(["tiny.toml"])[0].model, seed=7)

    def loss() -> float:
        logits = model(stream[:200].view(25, 8)).double()
        return F.cross_entropy(logits.view(200, 257), stream[1:201]).item()

    val = curve("tiny", "val/loss")
    assert list(val) == [0, 3, 6]
    assert val[0] == pytest.approx(loss(), rel=1e-6)
    model.load_state_dict(weights("tiny"))
    assert val[6] == pytest.approx(loss(), rel=1e-6)
    # by position: the mean over the 25 windows, bins that double
    logits = model(stream[:200].view(25, 8)).double()
    losses = F.cross_entropy(logits.view(200, 257), stream[1:201], reduction="none").view(25, 8)
    at = losses.mean(0).tolist()
    bins = {"0": at[:1], "1": at[1:2], "2-3": at[2:4], "4-7": at[4:]}
    expected = {name: pytest.approx(sum(v) / len(v), rel=1e-6) for name, v in bins.items()}
    assert curve("tiny", "val/loss_by_position")[6] == expected
    last = curve("tiny", "train/loss")[6]
    assert result == {"step": 6, "train/loss": last, "val/loss": val[6]}


def test_it_learns(tiny_toml):
    result = run(tiny_toml(), "--train.max_steps", "80", "--train.eval_interval", "40")
    val = curve("tiny", "val/loss")
    assert val[0] == pytest.approx(math.log(257), abs=0.1)
    assert result["val/loss"] < val[40] < 1.5 < val[0]


def test_record_of_a_run(tiny_toml, capfd):
    run(tiny_toml(), "--train.log_interval", "4", "--train.eval_interval", "5")
    training = {"step", "tokens", "epoch", "train/loss", "train/grad_norm", "train/lr",
                "train/skipped_steps", "perf/tokens_per_s", "perf/step_ms", "perf/data_wait_ms",
                "perf/mfu_pct", "mem/peak_gib"}  # fmt: skip
    validation = {"step", "tokens", "val/loss", "val/loss_by_position"}
    assert [(r["step"], "val/loss" in r) for r in records()] == [
        (0, True), (4, False), (5, True), (6, False), (6, True),
    ]  # fmt: skip
    for r in records():
        assert set(r) == (validation if "val/loss" in r else training)
        assert r["tokens"] == 64 * r["step"]
        if "val/loss" not in r:
            assert r["perf/tokens_per_s"] * r["perf/step_ms"] == pytest.approx(64 * 1000)
    out = capfd.readouterr().out
    assert "rove" in out and "64 tokens per step = 4 micro-steps x 1 processes x 2 x 8" in out
    facts = json.loads(Path("runs/tiny/meta.json").read_text())
    assert facts["threads"] == 1 and facts["world_size"] == 1
    assert {"git_revision", "git_dirty", "versions", "device", "params", "arguments", "started"} < (
        set(facts)
    )


def spy_on_start(monkeypatch, batches: list | None = None) -> list[dict]:
    """Collects the weights that a training starts from (and the batches it takes)."""
    starts = []
    make_optimizer, rows = train.make_optimizer, train.TrainLoader.rows

    def spy(model: GPT, config: object) -> torch.optim.Optimizer:
        starts.append({k: p.clone() for k, p in model.state_dict().items()})
        return make_optimizer(model, config)

    def spy_rows(self, step: int, micro_step: int) -> np.ndarray:
        found = rows(self, step, micro_step)
        if batches is not None:
            batches.append((step, micro_step, found.tolist()))
        return found

    monkeypatch.setattr(train, "make_optimizer", spy)
    monkeypatch.setattr(train.TrainLoader, "rows", spy_rows)
    return starts


def test_two_arms_differ_in_the_mechanism_alone(tiny_toml, monkeypatch):
    """RoPE and RoVE start from the same weights and see the same tokens."""
    batches: dict[str, list] = {"rope": [], "rove": []}
    starts, losses = {}, {}
    for arm in ("rope", "rove"):
        with monkeypatch.context() as patch:
            found = spy_on_start(patch, batches[arm])
            run(tiny_toml(), "--model.pos_emb", arm, "--run_name", arm)
            (starts[arm],) = found
        losses[arm] = curve(arm, "val/loss")
    assert batches["rope"] == batches["rove"] and len(batches["rope"]) == 6 * 4
    assert starts["rope"].keys() == starts["rove"].keys()
    assert all(torch.equal(p, starts["rove"][k]) for k, p in starts["rope"].items())
    assert losses["rope"][0] != losses["rove"][0]  # the projections are not zero at the start
    assert losses["rope"][0] == pytest.approx(losses["rove"][0], abs=0.01)


def test_evaluation_does_not_change_training(tiny_toml):
    run(tiny_toml(), "--run_name", "often", "--train.eval_interval", "1")
    run(tiny_toml(), "--run_name", "never", "--train.eval_interval", "100")
    assert hashes("often") == hashes("never") and len(hashes("never")) == 2
    assert len(curve("often", "val/loss")) == 7 and len(curve("never", "val/loss")) == 2


def test_micro_batch_size_is_not_part_of_the_experiment(tiny_toml):
    """1 x 8, 2 x 4, 4 x 2 and 8 x 1 micro-steps (nanoGPT#168): same losses, norms, weights."""
    for size in (1, 2, 4, 8):
        run(tiny_toml(), "--run_name", f"m{size}", "--train.micro_batch_size", str(size))
    for size in (2, 4, 8):
        for key in ("train/loss", "train/grad_norm", "val/loss"):
            assert curve(f"m{size}", key) == pytest.approx(curve("m1", key), rel=1e-4)
        assert_close(weights(f"m{size}"), weights("m1"), atol=1e-4)


# -----------------------------------------------------------------------------
# stop and go on


@pytest.mark.parametrize(
    ("where", "at", "resumed_at"),
    [
        ("step", 3, 3),  # 3 steps + 3 steps
        ("step", 5, 3),  # two steps beyond the checkpoint: they are forgotten and made again
        ("step", 1, 0),  # before the first checkpoint
        ("evaluation", 1, 3),  # of step 3, which is saved by then (nanoGPT#180)
        ("evaluation", 2, 6),  # the last one
        ("save", 1, 3),
    ],
)
def test_stopped_and_resumed_equals_unbroken(tiny_toml, where, at, resumed_at):
    run(tiny_toml(), "--run_name", "unbroken")
    with dies(where, at):
        run("tiny.toml")
    result = run("tiny.toml", "--resume")
    assert hashes("tiny") == hashes("unbroken") and len(hashes("tiny")) == 2
    assert comparable("tiny") == comparable("unbroken")
    marks = [r for r in records() if "event" in r]
    assert marks == ([{"step": resumed_at, "event": "resume"}] if resumed_at else [])
    assert result["val/loss"] == curve("unbroken", "val/loss")[6]
    metas = [
        json.loads(Path(f"runs/{name}/ckpt/step_00000006/meta.json").read_text())
        for name in ("tiny", "unbroken")
    ]
    for key in ("step", "val_loss", "best_val_loss", "data", "files"):
        assert metas[0][key] == metas[1][key], key
    for pointer in ("best", "last"):
        names = [Path(f"runs/{n}/ckpt/{pointer}").read_text() for n in ("tiny", "unbroken")]
        assert names[0] == names[1]


def test_resume_in_the_second_epoch(tiny_toml, tmp_path):
    """The order of epoch 2 must not begin again at its start (litgpt#1712, nanoGPT#467)."""
    folder = write_data_dir(tmp_path / "few", [toy_tokens(180, 1)], [toy_tokens(250, 2)])
    argv = ["--data.dir", str(folder), "--train.checkpoint_interval", "4"]  # 22 windows, 8 a step
    run(tiny_toml(), *argv, "--run_name", "unbroken")
    with dies("step", 5):
        run("tiny.toml", *argv)
    run("tiny.toml", *argv, "--resume")
    assert hashes("tiny") == hashes("unbroken")
    assert records()[-2]["epoch"] == pytest.approx(48 / 22)


def test_twice_interrupted(tiny_toml):
    run(tiny_toml(), "--run_name", "unbroken", "--train.checkpoint_interval", "2")
    argv = ["--train.checkpoint_interval", "2"]
    with dies("step", 3):
        run("tiny.toml", *argv)
    with dies("step", 5):
        run("tiny.toml", *argv, "--resume")
    run("tiny.toml", *argv, "--resume")
    assert hashes("tiny") == hashes("unbroken")
    assert comparable("tiny") == comparable("unbroken")
    # 3 was evaluated and the best so far, so it was saved too
    assert [r["step"] for r in records() if "event" in r] == [3, 4]


def test_a_run_is_not_started_over_by_accident(tiny_toml):
    run(tiny_toml())
    before, metrics = hashes("tiny"), Path("runs/tiny/metrics.jsonl").read_bytes()
    with pytest.raises(UserError) as error:
        run("tiny.toml", "--seed", "8")
    for part in ("runs/tiny", "step_00000006", "--resume", "--run_name"):
        assert part in str(error.value)
    assert hashes("tiny") == before
    assert Path("runs/tiny/metrics.jsonl").read_bytes() == metrics


def test_resume_of_a_finished_run(tiny_toml):
    first = run(tiny_toml())
    before = hashes("tiny")
    again = run("tiny.toml", "--resume")
    assert again["val/loss"] == first["val/loss"] and hashes("tiny") == before
    assert len(curve("tiny", "val/loss")) == 3
    with pytest.raises(UserError, match=r"step 6 .*max_steps \(5\)"):
        run("tiny.toml", "--resume", "--train.max_steps", "5")


def test_resume_without_a_checkpoint_starts_at_0(tiny_toml):
    run(tiny_toml(), "--resume")
    assert [r["step"] for r in records() if "event" in r] == []
    assert len(curve("tiny", "train/loss")) == 6


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("model.pos_emb", "rove", "rope"),
        ("model.n_layer", "2", "3"),
        ("model.block_size", "8", "16"),
        ("model.yarn_factor", "1.0", "2.0"),
        ("model.rope_base", "10000.0", "5000.0"),
        ("seed", "7", "8"),
        ("train.total_batch_size", "64", "128"),
    ],
)
def test_another_experiment_is_not_resumed(tiny_toml, capfd, key, before, now):
    with dies("step", 4):
        run(tiny_toml())
    metrics = Path("runs/tiny/metrics.jsonl").read_bytes()
    with pytest.raises(UserError) as error:
        run("tiny.toml", "--resume", f"--{key}", now)
    for part in ("runs/tiny", key, f"was {before}", f"now {now}", "--run_name"):
        assert part in str(error.value)
    (row,) = [line for line in capfd.readouterr().out.splitlines() if "must not change" in line]
    assert row.split()[:4] == ["resume:", key, before, now]
    assert Path("runs/tiny/metrics.jsonl").read_bytes() == metrics  # nothing was touched
    config = Path("runs/tiny/config.toml").read_text()
    assert 'pos_emb = "rove"' in config and "seed = 7" in config


def test_another_data_set_is_not_resumed(tiny_toml, tmp_path, data_dir):
    with dies("step", 4):
        run(tiny_toml())
    other = write_data_dir(tmp_path / "other", [toy_tokens(1600, 9)], [toy_tokens(305, 4)])
    with pytest.raises(UserError) as error:
        run("tiny.toml", "--resume", "--data.dir", str(other))
    assert str(other) in str(error.value) and "--data.dir" in str(error.value)
    moved = tmp_path / "moved"  # the same data elsewhere are the same data
    shutil.copytree(data_dir, moved)
    run("tiny.toml", "--resume", "--data.dir", str(moved))


def test_what_may_change_at_a_resume_is_printed(tiny_toml, capfd):
    run(tiny_toml(), "--run_name", "unbroken")
    with dies("step", 4):
        run("tiny.toml")
    shutil.copytree("runs/tiny", "runs/longer")
    capfd.readouterr()
    # other sums of floats, and a longer way to the same rates (all of them are the peak)
    argv = ["--train.micro_batch_size", "4", "--train.max_steps", "7", "--train.min_lr", "2e-3"]
    run("tiny.toml", "--resume", *argv, "--run_name", "longer")
    out = capfd.readouterr().out
    table = [line.split()[1:] for line in out.splitlines() if line.startswith("resume: ")]
    assert table[:5] == [
        ["setting", "checkpoint", "now"], ["run_name", "tiny", "longer"],
        ["train.micro_batch_size", "2", "4"],
        ["train.max_steps", "6", "7"], ["train.min_lr", "0.001", "0.002"],
    ]  # fmt: skip
    assert curve("longer", "train/lr")[7] == 2e-3 and "goes on at step 3" in out
    run("tiny.toml", "--resume", "--train.micro_batch_size", "4")
    out = capfd.readouterr().out
    assert "goes on at step 3" in out
    assert_close(weights("tiny"), weights("unbroken"), atol=1e-4)
    assert curve("tiny", "train/loss") == pytest.approx(curve("unbroken", "train/loss"), rel=1e-4)


@pytest.mark.parametrize("damage", ["cut", "one bit", "gone", "meta", "last"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tiny_toml, capfd, damage):
    """train-llm-from-scratch#36: the run goes on, and ends as if nothing had been."""
    run(tiny_toml(), "--run_name", "unbroken", "--train.checkpoint_interval", "2")
    argv = ["--train.checkpoint_interval", "2", "--train.keep_checkpoints", "3"]
    with dies("step", 5):
        run("tiny.toml", *argv)
    folder = Path("runs/tiny/ckpt/step_00000004")
    path = folder / "optimizer.safetensors"
    if damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "one bit":
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    elif damage == "gone":
        path.unlink()
    elif damage == "meta":
        (folder / "meta.json").write_text("{")
    else:
        Path("runs/tiny/ckpt/last").write_text("step_000")
    capfd.readouterr()
    run("tiny.toml", *argv, "--resume")
    out = capfd.readouterr().out
    # 3 was evaluated and the best so far, so it was saved too
    assert "goes on at step 4" in out if damage == "last" else "goes on at step 3" in out
    named = {"meta": "meta.json", "last": "step_000'"}.get(damage, "optimizer.safetensors")
    (line,) = [line for line in out.splitlines() if named in line]
    assert line.startswith("resume: runs/tiny/ckpt/")
    assert hashes("tiny") == hashes("unbroken") and comparable("tiny") == comparable("unbroken")


def test_no_checkpoint_is_whole(tiny_toml):
    """Then the run is not silently started over."""
    run(tiny_toml())
    for path in Path("runs/tiny/ckpt").glob("step_*/model.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="runs/tiny: every checkpoint is damaged"):
        run("tiny.toml", "--resume")


def scripted_losses(monkeypatch, values: list[float]) -> None:
    losses = iter(values)
    monkeypatch.setattr(train, "evaluate_loss", lambda *args: (next(losses), {}))


def pointers() -> tuple[str, str, list[str]]:
    folder = Path("runs/tiny/ckpt")
    steps = sorted(path.name for path in folder.glob("step_*"))
    best = (folder / "best").read_text().strip() if (folder / "best").exists() else ""
    return best, (folder / "last").read_text().strip(), [str(int(name[5:])) for name in steps]


def test_best_and_last_are_two_things(tiny_toml, monkeypatch):
    """Loss falls, then rises: best stays, last moves on (nanoGPT#180, nanoGPT#60)."""
    argv = ["--train.eval_interval", "1", "--train.checkpoint_interval", "4"]
    scripted_losses(monkeypatch, [9.0, 5.0, 4.0, 3.0, 3.5, 4.5, 6.0])
    run(tiny_toml(), *argv, "--train.keep_checkpoints", "1")
    assert pointers() == ("step_00000003", "step_00000006", ["3", "6"])
    meta = json.loads(Path("runs/tiny/ckpt/step_00000003/meta.json").read_text())
    assert (meta["val_loss"], meta["best_val_loss"]) == (3.0, 3.0)
    meta = json.loads(Path("runs/tiny/ckpt/step_00000006/meta.json").read_text())
    assert (meta["val_loss"], meta["best_val_loss"]) == (6.0, 3.0)


def test_best_is_remembered_over_a_resume(tiny_toml, monkeypatch):
    scripted_losses(monkeypatch, [9.0, 3.0, 5.0, 4.0, 2.5])
    argv = ["--train.eval_interval", "2", "--train.checkpoint_interval", "2"]
    with dies("step", 5):
        run(tiny_toml(), *argv)
    assert pointers()[:2] == ("step_00000002", "step_00000004")
    run("tiny.toml", *argv, "--resume")
    assert pointers() == ("step_00000002", "step_00000006", ["2", "4", "6"])


@pytest.mark.parametrize(
    "now", [["--train.val_tokens", "100"], ["--train.dtype", "bf16"], ["--train.min_lr", "2e-3"]]
)
def test_best_begins_anew_where_the_loss_is_another(tiny_toml, monkeypatch, capfd, now):
    """Losses of different tokens or precision are not compared."""
    scripted_losses(monkeypatch, [9.0, 3.0, 5.0])
    with dies("step", 4):
        run(tiny_toml())
    run("tiny.toml", *now, "--resume")
    anew = now[0] != "--train.min_lr"
    assert pointers()[0] == ("step_00000006" if anew else "step_00000003")
    assert ("best begins anew" in capfd.readouterr().out) == anew


def test_other_threads_are_said_at_a_resume(tiny_toml, capfd):
    with dies("step", 4):
        run(tiny_toml())
    checkpoint.add_to_meta(Path("runs/tiny/ckpt/step_00000003"), threads=3)
    run("tiny.toml", "--resume")
    torch_now = f"torch {torch.__version__}"
    line = f"resume: was 3 threads, {torch_now}, is 1 threads, {torch_now}: the last bits may"
    assert line in capfd.readouterr().out
    run("tiny.toml", "--resume")
    assert "bits may differ" not in capfd.readouterr().out


def test_nan_is_never_the_best(tiny_toml, monkeypatch):
    scripted_losses(monkeypatch, [9.0, math.nan, 5.0, math.nan, 6.0, math.inf, 7.0])
    run(tiny_toml(), "--train.eval_interval", "1")
    assert pointers()[0] == "step_00000002"


def test_loss_before_training_is_not_a_checkpoint(tiny_toml, monkeypatch):
    scripted_losses(monkeypatch, [1.0, 5.0, 4.0])
    run(tiny_toml())
    assert pointers() == ("step_00000006", "step_00000006", ["3", "6"])


# -----------------------------------------------------------------------------
# start from another run


def test_init_from_extends_the_context(tiny_toml, monkeypatch):
    run(tiny_toml(), "--run_name", "short")
    starts = spy_on_start(monkeypatch, batches := [])
    result = run(
        "tiny.toml", "--init_from", "runs/short", "--model.yarn_factor", "4", "--run_name", "long"
    )
    (start,) = starts
    assert all(torch.equal(start[k], p) for k, p in weights("short").items())
    assert {len(row) for _, _, rows in batches for row in rows} == {32 + 1}
    assert len(batches) == 6  # 64 tokens are 2 windows of 32: one micro-step
    assert list(curve("long", "train/loss")) == [1, 2, 3, 4, 5, 6]  # from its own step 0
    assert curve("long", "train/lr")[1] == pytest.approx(0.005)
    assert math.isfinite(result["val/loss"])
    path = "runs/long/ckpt/step_00000006"
    moments = safetensors.torch.load_file(f"{path}/optimizer.safetensors")
    assert moments["transformer.wte.weight.step"] == 6.0  # a fresh optimizer
    assert checkpoint.load_model(path)[0].max_len == 32


@pytest.mark.parametrize(
    ("key", "theirs", "ours"),
    [("pos_emb", "rove", "rope"), ("n_layer", "2", "1"), ("rope_base", "10000.0", "500.0")],
)
def test_init_from_another_model_is_refused(tiny_toml, key, theirs, ours):
    run(tiny_toml(), "--run_name", "first")
    with pytest.raises(UserError) as error:
        run("tiny.toml", "--init_from", "runs/first", f"--model.{key}", ours)
    for part in ("init_from", "runs/first", f"model.{key}", theirs, ours):
        assert part in str(error.value)
    assert not Path("runs/tiny/ckpt").exists()


def test_init_from_is_checked_and_noted(tiny_toml, capfd):
    """One bit of the weights: refused. Where they came from stays in the meta over a resume."""
    run(tiny_toml(), "--run_name", "first")
    digest = hashes("first")["model.safetensors"]
    with dies("step", 4):
        run("tiny.toml", "--init_from", "runs/first")
    assert "init_from: starts from the weights of runs/first/ckpt/step_00000006\n" in (
        capfd.readouterr().out
    )
    run("tiny.toml", "--init_from", "runs/first", "--resume")
    for path in ("meta.json", "ckpt/step_00000003/meta.json", "ckpt/step_00000006/meta.json"):
        meta = json.loads(Path("runs/tiny", path).read_text())
        assert meta["init"] == {"step": 6, "model_sha256": digest}
    path = Path("runs/first/ckpt/step_00000006/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="model.safetensors: not the bytes that were saved"):
        run("tiny.toml", "--init_from", "runs/first", "--run_name", "second")


def test_init_from_does_not_change_at_a_resume(tiny_toml):
    run(tiny_toml(), "--run_name", "first")
    with dies("step", 4):
        run("tiny.toml")
    with pytest.raises(UserError, match="init_from was None and is now runs/first"):
        run("tiny.toml", "--init_from", "runs/first", "--resume")


def test_init_from_nothing_is_refused(tiny_toml):
    with pytest.raises(UserError, match="runs/nowhere"):
        run(tiny_toml(), "--init_from", "runs/nowhere")


def test_resume_beats_init_from(tiny_toml):
    """The run's own checkpoint, not the start again: also when the old run is gone by then."""
    run(tiny_toml(), "--run_name", "first", "--seed", "1")
    run("tiny.toml", "--run_name", "unbroken", "--init_from", "runs/first")
    with dies("step", 4):
        run("tiny.toml", "--init_from", "runs/first")
    shutil.rmtree("runs/first")
    run("tiny.toml", "--init_from", "runs/first", "--resume")
    assert hashes("tiny") == hashes("unbroken")


# -----------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    ("total", "micro", "world", "suggestions"),
    [
        (100, 2, 1, ["96 or 112", "= 16"]),
        (64, 3, 1, ["48 or 72", "--train.micro_batch_size 2"]),
        (64, 2, 3, ["48 or 96", "3 processes = 48"]),
        (48, 8, 2, ["128", "--train.micro_batch_size 3"]),
        (8, 2, 4, ["--train.total_batch_size 64"]),
    ],
)
def test_batch_sizes_that_do_not_divide(tiny_toml, total, micro, world, suggestions):
    """The error has the numbers and the nearest that work (nanoGPT#283, litgpt#1927)."""
    config, _ = load_config(
        [
            tiny_toml(),
            "--train.total_batch_size",
            str(total),
            "--train.micro_batch_size",
            str(micro),
        ]
    )
    with pytest.raises(UserError) as error:
        grad_accum_steps(config, world)
    message = str(error.value)
    for part in [f"{total:,} tokens", f"micro_batch_size {micro}", *suggestions]:
        assert part in message
    assert "64 or 64" not in message and "128 or 128" not in message


@pytest.mark.parametrize(("micro", "world", "steps"), [(8, 1, 1), (1, 1, 8), (2, 4, 1), (2, 1, 4)])
def test_accumulation_steps(tiny_toml, micro, world, steps):
    config, _ = load_config([tiny_toml(), "--train.micro_batch_size", str(micro)])
    assert grad_accum_steps(config, world) == steps


def test_vocabulary_of_other_data(tiny_toml, data_dir):
    with pytest.raises(UserError) as error:
        run(tiny_toml(), "--model.vocab_size", "50257")
    for part in (str(data_dir), "bytes", "257", "50257", "model.vocab_size"):
        assert part in str(error.value)
    assert not Path("runs").exists()


def test_data_without_manifest(tiny_toml, tmp_path):
    with pytest.raises(UserError, match=r"python -m data\.stdlib --out .*nodata"):
        run(tiny_toml(), "--data.dir", str(tmp_path / "nodata"))


def test_too_little_data_is_found_at_the_start(tiny_toml, tmp_path):
    few = write_data_dir(tmp_path / "few", [toy_tokens(8, 1)], [toy_tokens(305, 4)])
    with pytest.raises(UserError, match="8 training tokens"):
        run(tiny_toml(), "--data.dir", str(few))
    short = write_data_dir(tmp_path / "short", [toy_tokens(900, 1)], [toy_tokens(200, 4)])
    with pytest.raises(UserError, match=r"val_tokens \(200\)"):
        run(tiny_toml(), "--data.dir", str(short))
    assert not Path("runs").exists()


def test_flash_on_a_cpu_is_an_error(tiny_toml):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="flash"):
        run(tiny_toml(), "--train.attn_backend", "flash")


# -----------------------------------------------------------------------------
# compile, several processes, another process


def test_keys_are_the_same_under_compile(tiny_toml, monkeypatch):
    """No `_orig_mod.` in a file (LLMs-from-scratch#580), and either run resumes the other."""
    run(tiny_toml(), "--run_name", "plain")
    compiled = functools.partial(torch.compile, backend="eager")  # needs no C compiler
    monkeypatch.setattr(torch, "compile", compiled)
    run("tiny.toml", "--train.compile", "True", "--run_name", "compiled")
    assert weights("compiled").keys() == weights("plain").keys()
    assert_close(weights("compiled"), weights("plain"), atol=1e-4)
    a, b = curve("compiled", "val/loss"), curve("plain", "val/loss")
    assert a == pytest.approx(b, rel=1e-4)
    with dies("step", 4):
        run("tiny.toml", "--train.compile", "True")
    run("tiny.toml", "--resume")
    assert_close(weights("tiny"), weights("plain"), atol=1e-4)


@pytest.mark.slow
@needs_inductor
def test_inductor(tiny_toml):
    run(tiny_toml(), "--run_name", "plain")
    run("tiny.toml", "--train.compile", "True", "--run_name", "compiled")
    assert_close(weights("compiled"), weights("plain"), atol=1e-4)


def torchrun(processes: int, *argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={processes}", str(REPO / "train.py"), *argv]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_more_processes_give_the_same_training(tiny_toml, processes):
    """1 x 4 micro-steps and 2 x 2 (4 x 1): losses, norms and weights to fp32 rounding, so the
    ranks do not train apart (build-nanogpt#30) and the logged loss is not rank 0's own
    (modded-nanogpt#2)."""
    run(tiny_toml(), "--run_name", "one")
    done = torchrun(processes, "tiny.toml", "--run_name", "many")
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in records("many")] == [r["step"] for r in records("one")]
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert curve("many", key) == pytest.approx(curve("one", key), rel=1e-4)
    assert curve("many", "train/lr") == curve("one", "train/lr")
    assert_close(weights("many"), weights("one"), atol=1e-4)
    meta = json.loads(Path("runs/many/ckpt/step_00000006/meta.json").read_text())
    assert meta["val_loss"] == curve("many", "val/loss")[6]
    assert json.loads(Path("runs/many/meta.json").read_text())["world_size"] == processes
    # one voice: rank 0 prints and logs, once
    assert done.stdout.count("wandb: disabled") == 1
    assert done.stdout.count("step      3/6 |") == 1
    assert f"{4 // processes} micro-steps x {processes} processes" in done.stdout


@pytest.mark.slow
def test_another_number_of_processes_goes_on_at_the_same_token(tiny_toml):
    run(tiny_toml(), "--run_name", "unbroken")
    with dies("step", 4):
        run("tiny.toml")
    done = torchrun(2, "tiny.toml", "--resume")
    assert done.returncode == 0, done.stderr
    assert curve("tiny", "train/loss") == pytest.approx(curve("unbroken", "train/loss"), rel=1e-4)
    assert_close(weights("tiny"), weights("unbroken"), atol=1e-4)


@pytest.mark.slow
def test_two_processes_stopped_and_resumed_equal_two_unbroken(tiny_toml):
    assert torchrun(2, tiny_toml(), "--run_name", "unbroken").returncode == 0
    shutil.copytree("runs/unbroken", "runs/tiny")
    shutil.rmtree("runs/tiny/ckpt/step_00000006")
    Path("runs/tiny/ckpt/last").write_text("step_00000003\n")  # as it was at step 3
    Path("runs/tiny/ckpt/best").write_text("step_00000003\n")
    assert torchrun(2, "tiny.toml", "--resume").returncode == 0
    assert hashes("tiny") == hashes("unbroken")
    assert comparable("tiny") == comparable("unbroken")


def test_a_mistake_is_reported_once(tiny_toml):
    """Not once per rank, and not as two errors of which one hides the other."""
    done = torchrun(2, tiny_toml(), "--train.micro_batch_size", "3")
    assert done.returncode != 0
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "error: " in line]
    assert len(errors) == 1 and errors[0].startswith("error: train.total_batch_size (64 tokens)")
    assert "48 or 96" in errors[0] and "--train.micro_batch_size 2" in errors[0]
    assert "exitcode:2" in done.stderr.replace(" ", "")


def test_same_bits_in_another_process(tiny_toml):
    """50 seeded steps: nothing comes from the clock, the hash seed or torch's global generator."""
    argv = ["--train.max_steps", "50", "--train.eval_interval", "25"]
    argv += ["--train.checkpoint_interval", "50"]
    torch.rand(7)  # the global generator is somewhere else
    run(tiny_toml(), *argv, "--run_name", "here")
    done = subprocess.run(
        [sys.executable, str(REPO / "train.py"), "tiny.toml", *argv, "--run_name", "there"],
        env=os.environ | {"PYTHONHASHSEED": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert hashes("here", 50) == hashes("there", 50)
    assert comparable("here") == comparable("there")


# -----------------------------------------------------------------------------
# settings that save memory, and HellaSwag on the way


def test_saving_memory_trains_the_same(tiny_toml, monkeypatch):
    recomputed = []  # "the same" is also what a setting gives that nobody reads
    block = model_file.Block.forward

    def counted(self, *args, **kwargs):
        recomputed.append(torch.is_grad_enabled())
        return block(self, *args, **kwargs)

    monkeypatch.setattr(model_file.Block, "forward", counted)
    run(tiny_toml(), "--run_name", "plain")
    forwards = sum(recomputed)
    recomputed.clear()
    run("tiny.toml", "--run_name", "again", "--train.activation_checkpointing", "True")
    assert hashes("again") == hashes("plain") and sum(recomputed) == 2 * forwards
    run("tiny.toml", "--run_name", "chunks", "--train.loss_chunk", "5")
    assert hashes("chunks") != hashes("plain")  # other sums, so other last bits
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert curve("chunks", key) == pytest.approx(curve("plain", key), abs=1e-4)
    run("tiny.toml", "--run_name", "bf16", "--train.dtype", "bf16")
    run("tiny.toml", "--run_name", "stream", "--train.dtype", "bf16", "--train.residual", "bf16")
    assert hashes("stream") != hashes("bf16")
    assert curve("stream", "val/loss") == pytest.approx(curve("bf16", "val/loss"), abs=0.05)


def test_a_run_from_before_these_settings_goes_on(tiny_toml, capfd):
    """A checkpoint whose config has none of the keys: they are off, and resuming says nothing."""
    run(tiny_toml(), "--run_name", "whole")
    run("tiny.toml", "--train.max_steps", "6", "--train.checkpoint_interval", "3")
    step = Path("runs/tiny/ckpt/step_00000003")
    meta = json.loads((step / "meta.json").read_text())
    for key in ("residual", "loss_chunk", "activation_checkpointing", "hellaswag_interval"):
        del meta["config"]["train"][key]
    (step / "meta.json").write_text(json.dumps(meta))
    Path("runs/tiny/ckpt/last").write_text("step_00000003")
    capfd.readouterr()
    run("tiny.toml", "--resume")
    assert "must not change" not in capfd.readouterr().out
    assert hashes("tiny") == hashes("whole")


def write_hellaswag() -> None:
    """Four questions whose right ending counts on, at the place where train.py looks."""
    rows = []
    for i in range(4):
        text = "".join(chr(97 + (i + j) % 16) for j in range(6))
        endings = ["zz", "yyy", "x", "ww"]
        endings[i] = chr(97 + (i + 6) % 16)
        rows.append(json.dumps({"ctx": text, "endings": endings, "label": i}))
    train.hellaswag.PATH.parent.mkdir(parents=True)
    train.hellaswag.PATH.write_text("\n".join(rows) + "\n")


def test_hellaswag_on_the_way(tiny_toml):
    run(tiny_toml(), "--run_name", "without")
    write_hellaswag()
    run("tiny.toml", "--train.hellaswag_interval", "6", "--train.eval_interval", "3")
    assert hashes("tiny") == hashes("without")  # looking changes nothing
    for key in ("hellaswag/acc", "hellaswag/acc_norm"):
        found = curve("tiny", key)
        assert list(found) == [0, 6] and set(found.values()) <= {0, 0.25, 0.5, 0.75, 1}
    assert list(curve("tiny", "val/loss")) == [0, 3, 6]
    run("tiny.toml", "--run_name", "often", "--train.hellaswag_interval", "3")
    assert list(curve("often", "hellaswag/acc")) == [0, 3, 6]


def test_hellaswag_that_is_not_there_is_said_at_the_start(tiny_toml):
    path = tiny_toml()
    with pytest.raises(UserError, match=r"curl -Lo data/hellaswag/\S+\.jsonl --create-dirs https"):
        run(path, "--train.hellaswag_interval", "3")
    assert not Path("runs").exists()
