import ast
import copy
import errno
import hashlib
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from model import GPT
from nanorove import checkpoint
from nanorove.checkpoint import (
    add_to_meta,
    load_model,
    load_optimizer,
    load_weights,
    mark_best,
    prune_checkpoints,
    read_meta,
    resolve_step_dir,
    save_checkpoint,
)
from nanorove.config import load_config
from nanorove.errors import UserError
from nanorove.optim import make_optimizer
from tests.conftest import REPO

EXTRA = {
    "data": {"manifest_sha256": "0" * 64, "tokenizer": {"name": "bytes", "vocab_size": 257}},
    "val_loss": None, "best_val_loss": 1.5, "wandb_id": None, "versions": {}, "threads": 1,
}  # fmt: skip


class Run:
    """A model and its optimizer after a few steps, in runs/tiny."""

    def __init__(self, path: str, *argv: str) -> None:
        self.config, _ = load_config([path, *argv])
        self.dir = self.config.run_dir
        self.model = GPT(self.config.model, seed=3)
        self.optimizer = make_optimizer(self.model, self.config.train)
        self.rng = np.random.RandomState(0)
        self.train(2)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.from_numpy(self.rng.randint(0, 257, (2, 9)))
            self.model(x[:, :-1], x[:, 1:]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, step: int) -> Path:
        return save_checkpoint(self.dir, step, self.config, self.model, self.optimizer, EXTRA)


@pytest.fixture
def run(tiny_toml) -> Run:
    return Run(tiny_toml())


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The format read by hand: 8 bytes length, a JSON header, raw little-endian numbers."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    out = {}
    for name, tensor in header.items():
        assert tensor["dtype"] == "F32"
        begin, end = tensor["data_offsets"]
        body = data[8 + length + begin : 8 + length + end]
        out[name] = np.frombuffer(body, "<f4").reshape(tensor["shape"])
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def state_of(run: Run) -> list[torch.Tensor]:
    values = [v for s in run.optimizer.state.values() for _, v in sorted(s.items())]
    return [*run.model.state_dict().values(), *values]


def test_files_keys_and_meta(run):
    step_dir = run.save(12)
    assert step_dir == Path("runs/tiny/ckpt/step_00000012")
    files = ["meta.json", "model.safetensors", "optimizer.safetensors"]
    assert sorted(os.listdir(step_dir)) == files
    assert (run.dir / "ckpt" / "last").read_text() == "step_00000012\n"
    assert sorted(os.listdir(run.dir / "ckpt")) == ["last", "step_00000012"]

    meta = json.loads((step_dir / "meta.json").read_text())
    assert (meta["schema"], meta["step"]) == (1, 12)
    assert meta["config"]["model"]["pos_emb"] == "rove"
    assert meta["config"]["train"]["learning_rate"] == 0.01
    assert {k: meta[k] for k in EXTRA} == EXTRA
    assert set(meta["files"]) == {"model.safetensors", "optimizer.safetensors"}
    for name, file in meta["files"].items():
        data = (step_dir / name).read_bytes()
        assert file == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    keys = {"transformer.wte.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}
    for i in range(2):
        for part in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            keys |= {f"transformer.h.{i}.{part}.weight", f"transformer.h.{i}.{part}.bias"}
    weights = read_safetensors(step_dir / "model.safetensors")
    assert set(weights) == keys  # no head twice, no table of positions, no wrapper's prefix
    for name, p in run.model.named_parameters():
        assert weights[name].tobytes() == p.detach().numpy().tobytes()
    moments = read_safetensors(step_dir / "optimizer.safetensors")
    assert set(moments) == {f"{k}.{m}" for k in keys for m in ("step", "exp_avg", "exp_avg_sq")}
    assert moments["transformer.ln_f.bias.step"] == 2.0


def test_a_restored_run_goes_on_bit_for_bit(run, tiny_toml):
    step_dir = run.save(2)
    other = Run(tiny_toml())
    other.model = GPT(other.config.model, seed=99)
    other.optimizer = make_optimizer(other.model, other.config.train)
    load_weights(other.model, step_dir)
    load_optimizer(other.model, other.optimizer, step_dir)
    pairs = list(zip(state_of(run), state_of(other), strict=True))
    assert all(same_bits(a, b) for a, b in pairs)
    assert not any(a.data_ptr() == b.data_ptr() for a, b in pairs)
    other.rng = copy.deepcopy(run.rng)
    run.train(3)
    other.train(3)
    assert all(same_bits(a, b) for a, b in zip(state_of(run), state_of(other), strict=True))


def test_hyperparameters_come_from_the_config(run, tiny_toml):
    step_dir = run.save(2)
    changed = ["--train.beta1", "0.5", "--train.weight_decay", "0.3", "--train.learning_rate", "2"]
    other = Run(tiny_toml(), *changed)
    load_optimizer(other.model, other.optimizer, step_dir)
    assert [g["weight_decay"] for g in other.optimizer.param_groups] == [0.3, 0.0]
    assert {g["betas"] for g in other.optimizer.param_groups} == {(0.5, 0.95)}
    assert {g["lr"] for g in other.optimizer.param_groups} == {2.0}


def full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["model", "optimizer", "half", "hash", "meta", "rename", "last"])
def test_a_save_that_dies_leaves_the_previous_checkpoint(run, monkeypatch, where):
    """Killed, or the disk is full, at any point of a save (lightning#688)."""
    first = run.save(1)
    before = {p: (first / p).read_bytes() for p in os.listdir(first)}
    run.train(1)
    save_file, replace, write = (
        checkpoint.safetensors.torch.save_file, os.replace, checkpoint.write_text_atomic
    )  # fmt: skip
    with monkeypatch.context() as patch:
        if where in ("model", "optimizer", "half"):

            def dying_save_file(tensors: dict, path: Path) -> None:
                assert path.parent.name != "step_00000002", "written under its final name"
                if where == "half":
                    save_file(tensors, path)
                    os.truncate(path, path.stat().st_size // 2)
                if where in path.name or where == "half":
                    full()
                save_file(tensors, path)

            patch.setattr(checkpoint.safetensors.torch, "save_file", dying_save_file)
        elif where == "hash":
            patch.setattr(checkpoint, "sha256_file", full)
        elif where == "rename":
            patch.setattr(
                os, "replace",
                lambda a, b: full() if Path(b).name == "step_00000002" else replace(a, b),
            )  # fmt: skip
        else:
            name = {"meta": "meta.json", "last": "last"}[where]
            patch.setattr(
                checkpoint, "write_text_atomic",
                lambda path, text: full() if path.name == name else write(path, text),
            )  # fmt: skip
        with pytest.raises(UserError, match=r"step_00000002: not saved .*No space left") as error:
            run.save(2)
        assert "\n" not in str(error.value) and "--resume" in str(error.value)

    assert resolve_step_dir(run.dir) == first
    assert {p: (first / p).read_bytes() for p in os.listdir(first)} == before
    load_model(run.dir)
    for path in (run.dir / "ckpt").glob("step_????????"):
        read_meta(path)  # what has a final name is complete
        load_model(path)
    assert ((run.dir / "ckpt" / "step_00000002").exists()) == (where == "last")
    assert not list((run.dir / "ckpt").glob("*_00000002.tmp"))  # its space is free again

    second = run.save(2)  # and the next try is not disturbed by the rubbish
    prune_checkpoints(run.dir, 2)
    assert sorted(os.listdir(run.dir / "ckpt")) == ["last", "step_00000001", "step_00000002"]
    assert resolve_step_dir(run.dir) == second
    model, _ = load_model(second)
    assert same_bits(model.transformer.wte.weight.detach(), run.model.transformer.wte.weight.data)


def test_files_are_synced_before_the_rename(run, monkeypatch):
    """Without fsync a power cut leaves an empty file under a final name."""
    events = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(fd: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def spy_replace(a: Path, b: Path) -> None:
        events.append(f"-> {Path(b).name}")
        replace(a, b)

    if not Path("/proc/self/fd").exists():
        pytest.skip("looks file names up in /proc")
    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    run.save(1)
    renamed = events.index("-> step_00000001")
    synced = {"model.safetensors", "optimizer.safetensors", "meta.json.tmp", "step_00000001.tmp"}
    assert synced <= set(events[:renamed])
    after = events[renamed:]
    assert after.index("ckpt") < after.index("last.tmp") < after.index("-> last")


def damage(step_dir: Path, kind: str) -> None:
    model, meta = step_dir / "model.safetensors", step_dir / "meta.json"
    values = json.loads(meta.read_text())
    if kind == "truncated model":
        os.truncate(model, model.stat().st_size - 1)
    elif kind == "truncated optimizer":
        os.truncate(step_dir / "optimizer.safetensors", 100)
    elif kind == "no optimizer":
        (step_dir / "optimizer.safetensors").unlink()
    elif kind == "half a meta":
        meta.write_text(meta.read_text()[:100])
    elif kind == "empty meta":
        meta.write_text("")
    elif kind == "binary meta":
        meta.write_bytes(b"\xff\xfe\x00\x80")
    elif kind == "a list":
        meta.write_text("[1, 2]")
    elif kind == "no schema":
        del values["schema"]
        meta.write_text(json.dumps(values))
    elif kind == "newer schema":
        meta.write_text(json.dumps(values | {"schema": 2}))
    elif kind == "files as a list":
        meta.write_text(json.dumps(values | {"files": ["model.safetensors"]}))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("truncated model", ["model.safetensors", "bytes", "earlier step"]),
        ("truncated optimizer", ["optimizer.safetensors", "100 bytes", "earlier step"]),
        ("no optimizer", ["optimizer.safetensors", "earlier step"]),
        ("half a meta", ["meta.json", "earlier step"]),
        ("empty meta", ["meta.json", "earlier step"]),
        ("binary meta", ["meta.json", "earlier step"]),
        ("a list", ["meta.json", "earlier step"]),
        ("no schema", ["meta.json", "schema", "earlier step"]),
        ("newer schema", ["meta.json", "schema 2", "reads 1"]),
        ("files as a list", ["meta.json", "earlier step"]),
    ],
)
def test_damage_is_named(run, kind, names):
    step_dir = run.save(1)
    damage(step_dir, kind)
    with pytest.raises(UserError) as error:
        load_model(run.dir)
    message = str(error.value)
    assert all(name in message for name in [str(step_dir), *names])
    assert "\n" not in message


def test_weights_of_another_shape(run, tiny_toml):
    step_dir = run.save(1)
    for argv in (["--model.n_layer", "3"], ["--model.n_embd", "32"], ["--model.pos_emb=learned"]):
        other, _ = load_config([tiny_toml(), *argv])
        with pytest.raises(UserError, match=r"model\.safetensors") as error:
            load_weights(GPT(other.model), step_dir)
        assert "\n" not in str(error.value)


class Bomb:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("exploded"),))


def test_pickle_is_never_read(run):
    """A checkpoint from the internet must not run code."""
    step_dir = run.save(1)
    torch.save({"model": Bomb()}, step_dir / "model.pt")  # a stray file is no matter
    load_model(step_dir)
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = step_dir / name
        good = path.read_bytes()
        for bomb in (pickle.dumps(Bomb()), (step_dir / "model.pt").read_bytes()):
            path.write_bytes(bomb)
            meta = json.loads((step_dir / "meta.json").read_text())
            meta["files"][name] = {"bytes": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
            (step_dir / "meta.json").write_text(json.dumps(meta))
            with pytest.raises(UserError, match=name):
                load_weights(run.model, step_dir)
                load_optimizer(run.model, run.optimizer, step_dir)
            assert not Path("exploded").exists()
        path.write_bytes(good)


def test_no_code_of_ours_unpickles():
    for path in [*REPO.glob("*.py"), *REPO.glob("nanorove/*.py"), *REPO.glob("scripts/*.py")]:
        tree = ast.parse(path.read_text())
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not imported & {"pickle", "shelve", "joblib", "dill", "cloudpickle"}, path
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        assert "torch.load" not in calls, path


def test_prune_keeps_the_newest_and_the_best(run):
    for step in (1, 2, 3, 20, 100):
        run.save(step)
        if step == 2:
            mark_best(run.dir, 2)
    (run.dir / "ckpt" / "step_00000101.tmp").mkdir()  # left by a killed save
    prune_checkpoints(run.dir, 2)
    expected = ["best", "last", "step_00000002", "step_00000020", "step_00000100"]
    assert sorted(os.listdir(run.dir / "ckpt")) == expected
    prune_checkpoints(run.dir, 1)
    assert sorted(os.listdir(run.dir / "ckpt")) == [*expected[:3], expected[4]]
    assert (run.dir / "ckpt" / "best").read_text() == "step_00000002\n"
    assert resolve_step_dir(run.dir).name == "step_00000100"


def test_what_is_found_out_later_is_added(run):
    step_dir = run.save(1)
    before = json.loads((step_dir / "meta.json").read_text())
    add_to_meta(step_dir, val_loss=1.25, best_val_loss=1.25)
    after = read_meta(step_dir)
    assert after == before | {"val_loss": 1.25, "best_val_loss": 1.25}


def test_resolve_step_dir(run, tmp_path):
    for path in (run.dir, "nowhere", tmp_path, tmp_path / "tiny.toml"):
        with pytest.raises(UserError) as error:
            resolve_step_dir(path)
        assert str(path) in str(error.value)
    one, two = run.save(1), run.save(2)
    assert resolve_step_dir(run.dir) == resolve_step_dir(str(run.dir)) == two
    assert resolve_step_dir(one) == resolve_step_dir(f"{one}/") == one
    (run.dir / "ckpt" / "last").write_text("step_00000009\n")
    with pytest.raises(UserError, match="step_00000009"):
        resolve_step_dir(run.dir)
    (run.dir / "ckpt" / "last").write_text("")
    with pytest.raises(UserError, match="last"):
        resolve_step_dir(run.dir)


def test_load_model(run):
    step_dir = run.save(5)
    model, meta = load_model(run.dir, attn_backend="eager")
    assert meta == json.loads((step_dir / "meta.json").read_text())
    assert not model.training
    assert model.config == run.config.model and model.max_len == 8
    assert model.transformer.h[0].attn.attn_backend == "eager"
    x = torch.from_numpy(np.random.RandomState(1).randint(0, 257, (2, 8)))
    run.model.eval()
    torch.testing.assert_close(model(x), GPT.forward(run.model, x), rtol=1e-4, atol=1e-5)

    longer, _ = load_model(run.dir, max_len=32)
    assert (longer.max_len, longer.config.yarn_factor) == (32, 1.0)
    torch.testing.assert_close(longer(x), run.model(x))
    yarn, _ = load_model(run.dir, yarn_factor=4.0)
    assert (yarn.max_len, yarn.config.yarn_factor) == (32, 4.0)
    assert yarn.transformer.wte.weight.equal(run.model.transformer.wte.weight)
    assert not torch.allclose(yarn(x), run.model(x))
    with pytest.raises(UserError, match="yarn_factor"):
        load_model(run.dir, yarn_factor=0.5)


def test_the_checkpoints_own_yarn_factor_is_kept(tiny_toml):
    run = Run(tiny_toml(), "--model.yarn_factor", "2")
    run.save(1)
    assert load_model(run.dir)[0].config.yarn_factor == 2.0
    assert load_model(run.dir)[0].max_len == 16
    assert load_model(run.dir, yarn_factor=1.0)[0].config.yarn_factor == 1.0


def test_learned_positions_end_at_block_size(tiny_toml):
    run = Run(tiny_toml(), "--model.pos_emb", "learned")
    step_dir = run.save(1)
    assert load_model(run.dir, max_len=8)[0].max_len == 8
    for options in (dict(max_len=9), dict(yarn_factor=2.0)):
        with pytest.raises(UserError) as error:
            load_model(run.dir, **options)
        assert str(step_dir) in str(error.value)
