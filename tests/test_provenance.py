"""scripts.provenance: hashes of code, initial weights and batches; runs made of other runs."""

import dataclasses
import hashlib
import json
import struct
import tomllib
from pathlib import Path

import pytest
import safetensors.torch
import torch

from data.loader import TrainLoader
from model import GPT
from nanorove.checkpoint import load_model, read_meta, save_checkpoint
from nanorove.config import Config, load_config
from nanorove.errors import UserError
from nanorove.optim import make_optimizer
from nanorove.runlog import RunLog
from scripts import provenance
from scripts.provenance import (
    Ledger,
    batches,
    code_of,
    derive,
    differing,
    initial_weights,
    is_derived,
)
from tests.conftest import REPO, write_data_dir


@pytest.fixture
def config(tiny_toml) -> Config:
    return load_config([tiny_toml()])[0]


def changed(config: Config, **sections: dict) -> Config:
    """A copy of a config with other values in its sections."""
    new = {k: dataclasses.replace(getattr(config, k), **v) for k, v in sections.items()}
    return dataclasses.replace(config, **new)


# -----------------------------------------------------------------------------
# code


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """Three files: a imports b, b imports c inside a function."""
    (tmp_path / "nanorove").mkdir()
    (tmp_path / "a.py").write_text('"""Says a."""\nimport json\nfrom nanorove import b\n')
    (tmp_path / "nanorove" / "b.py").write_text(
        'def f(x):\n    """Doubles."""\n    from nanorove.runlog import g\n    return 2 * x\n'
    )
    (tmp_path / "nanorove" / "runlog.py").write_text("import nanorove.c\n")
    (tmp_path / "nanorove" / "c.py").write_text("C = 1\n")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    return tmp_path


def test_code_is_what_is_imported_directly_or_not(sources):
    files = [name for name in code_of("a") if name.endswith(".py")]
    assert files == ["a.py", "nanorove/b.py", "nanorove/c.py"]  # runlog.py is neutral
    assert [name for name in code_of("nanorove.c") if "/" in name] == ["nanorove/c.py"]
    assert code_of("a")["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("2 * x", "2 * x  # twice", False),
        ("Doubles.", "Gives twice as much.", False),
        ("    return", "\n    return", False),
        ("2 * x", "3 * x", True),
        ("2 * x", "'2 * x'", True),
    ],
)
def test_comments_and_docstrings_do_not_count(sources, old, new, counts):
    before = code_of("a")
    path = sources / "nanorove" / "b.py"
    path.write_text(path.read_text().replace(old, new))
    assert differing(before, code_of("a")) == ["nanorove/b.py"] * counts


def test_the_code_of_a_training_and_of_an_evaluation():
    """Of the real files: those that make the numbers are in it, those that print them are not."""
    training, evaluation = code_of("train"), code_of("scripts.eval_perplexity")
    assert {"model.py", "train.py", "data/loader.py", "nanorove/optim.py"} <= set(training)
    assert not {"scripts/eval_perplexity.py", "nanorove/runlog.py"} & set(training)
    assert {"model.py", "scripts/eval_perplexity.py", "nanorove/scoring.py"} <= set(evaluation)
    assert "train.py" not in evaluation and (REPO / "nanorove" / "runlog.py").is_file()


def test_the_hash_of_a_file_and_of_a_folder(tmp_path):
    """A folder's is of the names and the content of all in it, whatever the order on disk."""
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
    names = ["e", "b", "d", "f", "a", "c/a"]
    for name in names:
        path = tmp_path / "x" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"abc")
    assert provenance.sha256_of(tmp_path / "x" / "b") == abc
    assert provenance.sha256_of(tmp_path / "nothing") is None
    before = provenance.sha256_of(tmp_path / "x")
    text = json.dumps([[name, abc] for name in sorted(names)])
    assert before == hashlib.sha256(text.encode()).hexdigest()
    path.rename(path.with_name("z"))
    assert provenance.sha256_of(tmp_path / "x") != before


# -----------------------------------------------------------------------------
# what was done


def test_a_shard_is_read_once_and_again_when_it_changes(tmp_path, monkeypatch):
    folder, hashed = write_data_dir(tmp_path / "d", [[256, 1], [256, 2]], [[256, 3]]), []
    real = provenance.checked_sha256
    monkeypatch.setattr(
        provenance, "checked_sha256", lambda path, m: hashed.append(path.name) or real(path, m)
    )
    names = sorted(path.name for path in folder.glob("*.bin"))
    for expected in (names, []):
        hashed.clear()
        Ledger(tmp_path / "x" / "experiment.json").check_shards(folder)
        assert sorted(hashed) == expected
    path = folder / names[0]
    before = path.read_bytes()
    path.write_bytes(before[:-2] + b"a\0")  # the size stays
    for _ in range(2):
        with pytest.raises(UserError, match=f"{names[0]}: sha256 .* but manifest.json says"):
            Ledger(tmp_path / "x" / "experiment.json").check_shards(folder)
    path.write_bytes(before)
    Ledger(tmp_path / "x" / "experiment.json").check_shards(folder)


# -----------------------------------------------------------------------------
# initial weights and batches


def test_initial_weights_are_those_of_the_first_step(config):
    """Against the file that a training saves before its first step, read by safetensors."""
    model = GPT(config.model, seed=config.seed)
    names = [name for name, _ in model.named_parameters()]
    step_dir = save_checkpoint(
        config.run_dir, 0, config, model, make_optimizer(model, config.train), {}
    )
    tensors = safetensors.torch.load_file(step_dir / "model.safetensors")
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        values = tensors[name].flatten().tolist()
        digest.update(struct.pack(f"<{len(values)}f", *values))
    assert initial_weights(config, names) == digest.hexdigest()
    assert initial_weights(dataclasses.replace(config, seed=8), names) != digest.hexdigest()


def test_arms_share_all_but_learned_positions(config):
    modes = ("learned", "rope", "rove", "none")
    arms = [changed(config, model={"pos_emb": mode}) for mode in modes]
    names = provenance.shared_parameters(arms)
    assert len(names) == 27 and "transformer.wpe.weight" not in names
    assert len({initial_weights(arm, names) for arm in arms}) == 1


def rows_of_step(config: Config, step: int) -> bytes:
    """The tokens of a step, one window behind the other, by the rule in data/loader.py: with one
    process and all sequences in one batch."""
    n = config.train.total_batch_size // config.model.context
    loader = TrainLoader(
        config.data.dir, block_size=config.model.context, micro_batch_size=n,
        sequences_per_step=n, seed=config.seed,
    )  # fmt: skip
    x, y = loader.batch(step, 0)
    tokens = [[*a, b[-1]] for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    return b"".join(struct.pack(f"<{len(row)}H", *row) for row in tokens)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_batches_are_the_tokens_of_the_steps(config, processes):
    """First, middle and last step; however the sequences are shared out."""
    found = batches(config, processes)
    assert list(found) == ["0", "3", "5"]
    for step, sha256 in found.items():
        assert sha256 == hashlib.sha256(rows_of_step(config, int(step))).hexdigest()
    assert batches(changed(config, train={"micro_batch_size": 1}), processes) == found
    other = batches(dataclasses.replace(config, seed=8), processes)
    assert all(other[step] != found[step] for step in found)


# -----------------------------------------------------------------------------
# runs made of other runs


@pytest.fixture
def trained(config) -> Config:
    """A run of RoPE as train.py leaves it, with weights that are not the initial ones."""
    source = dataclasses.replace(
        config, run_name="x/rope", model=dataclasses.replace(config.model, pos_emb="rope")
    )
    save(source, GPT(source.model, seed=99))
    return source


def save(config: Config, model: GPT) -> None:
    RunLog(config, {"git_revision": "abc"}, None).close()
    about = {"val_loss": 2.5, "best_val_loss": 2.5, "best_step": 6, "data": {"tokenizer": {}},
             "wandb_id": None}  # fmt: skip
    save_checkpoint(config.run_dir, 6, config, model, make_optimizer(model, config.train), about)


def test_a_derived_run(trained):
    """The weights of the one with the positions of the other, and nothing that was not measured."""
    config = dataclasses.replace(
        trained, run_name="x/as_rove", model=dataclasses.replace(trained.model, pos_emb="rove")
    )
    assert not is_derived(config, trained)
    derive(config, trained)
    assert is_derived(config, trained)
    model, meta = load_model(config.run_dir)
    reference = GPT(config.model, seed=99)
    idx = torch.arange(16).reshape(2, 8)
    assert torch.equal(model(idx), reference(idx))
    assert not torch.equal(model(idx), GPT(trained.model, seed=99)(idx))
    source = read_meta(trained.run_dir / "ckpt" / "step_00000006")
    sha256 = source["files"]["model.safetensors"]["sha256"]
    origin = {"run": "x/rope", "step": 6, "model_sha256": sha256, "pos_emb": "rope"}
    assert meta["derived_from"] == origin and meta["val_loss"] is None and meta["step"] == 6
    assert meta["data"] == {"tokenizer": {}}
    facts = json.loads((config.run_dir / "meta.json").read_text())
    assert facts == {"git_revision": "abc", "derived_from": origin}
    written = tomllib.loads((config.run_dir / "config.toml").read_text())
    assert (written["run_name"], written["model"]["pos_emb"]) == ("x/as_rove", "rove")
    assert (config.run_dir / "metrics.jsonl").read_text() == ""
    paths = [c.run_dir / "ckpt" / "step_00000006" / "model.safetensors" for c in (config, trained)]
    assert paths[0].samefile(paths[1])  # no second copy
    assert not paths[0].with_name("optimizer.safetensors").exists()
    (config.run_dir / "eval").mkdir()
    save(trained, GPT(trained.model, seed=100))  # other weights: what was made of the old is stale
    assert not is_derived(config, trained)
    derive(config, trained)
    assert is_derived(config, trained) and not (config.run_dir / "eval").exists()


def test_without_hard_links_it_is_a_copy(trained, monkeypatch):
    def no(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(provenance.os, "link", no)
    config = dataclasses.replace(
        trained, run_name="x/none", model=dataclasses.replace(trained.model, pos_emb="none")
    )
    derive(config, trained)
    assert is_derived(config, trained)
    load_model(config.run_dir)


def test_a_trained_run_is_never_replaced(trained):
    with pytest.raises(UserError, match="x/rope: a trained run, but the experiment makes it of"):
        is_derived(trained, trained)
