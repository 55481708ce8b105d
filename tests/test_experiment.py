"""scripts.experiment: the file, the comparison of arms, and a tiny experiment from end to end."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from nanorove.errors import UserError
from scripts import experiment
from scripts.experiment import (
    Args,
    Data,
    Steps,
    is_prepared,
    load_experiment,
    main,
    run_to_its_end,
)
from tests.conftest import REPO, TINY_TOML

EXPERIMENT = """\
name = "tiny"
title = "Tiny"
seeds = [1]

[data]
dir = "shards"
command = ["data.text", "a.jsonl", "--out", "shards", "--tokenizer", "bytes", "--val-tokens", "400"]

[arms.rope]
config = "rope.toml"

[arms.rove]
config = "rove.toml"
overrides = ["--train.log_interval", "1"]

[perplexity]
lengths = [8, 16]
yarn = ["none", "auto"]
documents = 2

[samples]
prompts = ["ab", "c d"]
max_new_tokens = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an experiment, its two configs and a text for its data."""
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(EXPERIMENT)
    for arm in ("rope", "rove"):
        text = TINY_TOML.replace("DATA_DIR", "shards").replace('"rove"', f'"{arm}"')
        Path(f"{arm}.toml").write_text(text)
    return tmp_path


def edit(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert text.count(old) == 1
    Path(path).write_text(text.replace(old, new))


# -----------------------------------------------------------------------------
# the file


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("seeds = [1]", "seed = [1]", "x.toml: unknown key seed; did you mean seeds"),
        ("lengths = ", "length = ", "unknown key perplexity.length; did you mean perplexity.leng"),
        (
            "[arms.rope]\nconfig",
            "[arms.rope]\nconfigs",
            "arms.rope.configs; did you mean arms.rope",
        ),
        ("documents = 2\n", "", "perplexity.documents is missing"),
        ("documents = 2", 'documents = "2"', "perplexity.documents must be int, not '2'"),
        ("documents = 2", "documents = true", "perplexity.documents must be int, not True"),
        ("lengths = [8, 16]", "lengths = [8, 1.5]", "perplexity.lengths must be list"),
        ("seeds = [1]", "seeds = []", "at least one arm and one seed"),
        ('"c d"', '"-c"', "a prompt cannot begin with '-': '-c'"),
        ("seeds = [1]", "seeds = [", "x.toml: not TOML"),
        ("[samples]", "[[samples]]", "samples must be a table"),
        ("lengths = [8, 16]", "lengths = [2, 16]", "x.toml: perplexity: --lengths 2,16"),
        ("lengths = [8, 16]", "lengths = []", "x.toml: perplexity: --lengths"),
        ('"auto"', '"of"', "x.toml: perplexity: --yarn none,of"),
        ("documents = 2", "documents = 1", "perplexity.documents 1: at least 2"),
        ('["--train.log_interval"', '["--run-name=x"', "arms.rove: --run-name=x is the experiment"),
        ('["--train.log_interval"', '["--seed"', "arms.rove: --seed is the experiment's to set"),
    ],
)
def test_a_faulty_file_is_refused(folder, old, new, message):
    edit("x.toml", old, new)
    with pytest.raises(UserError) as caught:
        load_experiment(Path("x.toml"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_refused(folder):
    with pytest.raises(UserError, match="y.toml.*see experiments/"):
        load_experiment(Path("y.toml"))


def test_the_shipped_experiments_can_be_read(monkeypatch):
    monkeypatch.chdir(REPO)
    for path in (REPO / "experiments").glob("*.toml"):
        experiment = load_experiment(path)
        assert experiment.dir == Path("runs") / path.stem


def test_dry_run_of_the_demo(tmp_path, monkeypatch, capsys):
    """It says what `make demo` will do, in commands that can be typed, and does nothing."""
    for name in ("configs", "experiments"):
        shutil.copytree(REPO / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    main(Args(Path("experiments/demo.toml"), dry_run=True))
    out = capsys.readouterr().out
    assert "arms differ only in model.pos_emb" in out
    assert "$ python -m data.stdlib --tokenizer bytes --out data/stdlib_bytes" in out
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("$")]
    train = os.path.relpath(REPO / "train.py")  # in quotes where the path has a space
    for arm in ("rope", "rove"):
        run = f"runs/demo/{arm}-seed1337"
        options = ["--seed", "1337", "--run_name", run[5:], "--resume"]
        assert ["$", "python", train, f"configs/demo_{arm}.toml", *options] in commands
        assert f"$ python -m scripts.eval_perplexity {run} --lengths 256,512,1024,2048,4096" in out
    assert "--out runs/demo" in out and "8 steps to run" in out
    assert not Path("runs").exists()


# -----------------------------------------------------------------------------
# the arms


def test_arms_that_differ_in_more_are_refused(folder, capsys):
    edit("rove.toml", "n_layer = 2", "n_layer = 3")
    with pytest.raises(UserError, match=r"differ in model.n_layer \(2 and 3\)"):
        main(Args(Path("x.toml"), dry_run=True))
    names = 'arms_differ_in = ["model.pos_emb", "model.n_layer"]'
    edit("x.toml", "seeds = [1]", f"seeds = [1]\n{names}")
    main(Args(Path("x.toml"), dry_run=True))
    assert "arms differ only in model.n_layer, model.pos_emb" in capsys.readouterr().out


def test_arms_with_other_data_are_refused(folder):
    edit("x.toml", '["--train.log_interval", "1"]', '["--data.dir", "elsewhere"]')
    with pytest.raises(UserError, match="data.dir is elsewhere"):
        main(Args(Path("x.toml"), dry_run=True))


# -----------------------------------------------------------------------------
# from end to end


def run(capfd: pytest.CaptureFixture, dry_run: bool = False) -> str:
    """Run x.toml; what it and its steps printed."""
    capfd.readouterr()
    main(Args(Path("x.toml"), dry_run))
    return capfd.readouterr().out


def state() -> dict[str, tuple[int, bytes]]:
    return {
        str(p): (p.stat().st_mtime_ns, p.read_bytes())
        for top in ("runs", "shards")
        for p in sorted(Path(top).rglob("*"))
        if p.is_file()
    }


def test_a_failing_step_is_named(folder, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    edit("x.toml", '["data.text"', '["data.nothing"')
    with pytest.raises(UserError, match="step 'data' failed with exit code 1"):
        main(Args(Path("x.toml")))
    assert "No module named data.nothing" in capfd.readouterr().err  # its own words are shown


def test_ctrl_c_waits_until_the_command_has_saved(tmp_path):
    """Both get the signal; the command needs a second to save, and has it."""
    code = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(1)\n"
        f"    open({str(tmp_path / 'saved')!r}, 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, save)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(KeyboardInterrupt):
        run_to_its_end([sys.executable, "-c", code])
    assert (tmp_path / "saved").is_file()
    assert run_to_its_end([sys.executable, "-c", "import sys; sys.exit(3)"]) == 3


def test_a_training_that_stopped_is_not_evaluated(folder, monkeypatch):
    """train.py ends with 0 when it was told to stop, but there is nothing to compare yet."""
    ran = []
    monkeypatch.setattr(experiment, "run_to_its_end", lambda command: ran.append(command) or 0)
    monkeypatch.setattr(experiment, "is_trained", lambda config, data: False)
    with pytest.raises(UserError, match="rope-seed1 stopped before its last step; run the exp"):
        main(Args(Path("x.toml")))
    assert len(ran) == 2  # data and the first training
    assert not Steps(Path("runs/tiny/experiment.json"), False).receipts


def test_data_of_another_tokenizer_are_not_what_the_command_makes(tmp_path, monkeypatch):
    (tmp_path / "manifest.json").touch()
    manifest = {"tokenizer": {"name": "gpt2"}}
    monkeypatch.setattr(experiment, "load_manifest", lambda folder: manifest)
    for name, done in (("gpt2", True), ("bytes", False)):
        assert is_prepared(Data(str(tmp_path), ["data.text", "--tokenizer", name])) is done
    assert is_prepared(Data(str(tmp_path), ["data.text"]))


def test_from_end_to_end(folder, capfd, monkeypatch):
    """Runs what is missing, nothing the second time, and after a change what that affects."""
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    rng = np.random.RandomState(3)
    texts = (" ".join(rng.choice(["red", "green", "blue"], 12).tolist()) for _ in range(60))
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    # stopped by a failure behind the trainings, it goes on from there
    edit("x.toml", "documents = 2", "documents = 20")
    with pytest.raises(
        UserError, match="step 'tiny/rope-seed1 perplexity' failed with exit code 2"
    ):
        main(Args(Path("x.toml")))
    assert "20 of >= 16 tokens are needed" in capfd.readouterr().err
    edit("x.toml", "documents = 20", "documents = 2")
    out = run(capfd)
    for name in ("data", "tiny/rope-seed1", "tiny/rove-seed1"):
        assert f"[done] {name}\n" in out
    assert out.count("[run] ") == 5
    for arm in ("rope", "rove"):
        folder = Path(f"runs/tiny/{arm}-seed1")
        record = json.loads((folder / "eval" / "perplexity.json").read_text())
        assert record["settings"] == {"lengths": [8, 16], "yarn": ["none", "auto"], "documents": 2}
        assert record["config"]["model"]["pos_emb"] == arm and record["config"]["seed"] == 1
        samples = json.loads((folder / "eval" / "samples.json").read_text())
        assert [s["prompt"] for s in samples] == ["ab", "c d"]
    report = Path("runs/tiny/report.html").read_text()
    assert "<h1>Tiny</h1>" in report and "model.pos_emb" in report

    before = state()
    out = run(capfd)
    assert "nothing to do; the report is runs/tiny/report.html" in out and "[run]" not in out
    assert state() == before

    def to_run() -> list[str]:
        return re.findall(r"\[to run\] (.*)", run(capfd, dry_run=True))

    # a result that is not the one it made, and other settings of an evaluation
    samples = Path("runs/tiny/rope-seed1/eval/samples.json")
    samples.write_text("[]")
    assert to_run() == ["tiny/rope-seed1 samples", "report"]
    samples.write_bytes(before[str(samples)][1])
    edit("x.toml", "lengths = [8, 16]", "lengths = [8, 12]")
    assert to_run() == ["tiny/rope-seed1 perplexity", "tiny/rove-seed1 perplexity"]
    edit("x.toml", "lengths = [8, 12]", "lengths = [8, 16]")
    assert to_run() == []

    # a training that stopped before its end goes on; other weights are evaluated anew
    meta = Path("runs/tiny/rove-seed1/ckpt/step_00000006/meta.json")
    edit(str(meta), '"step": 6', '"step": 3')
    assert to_run() == ["tiny/rove-seed1", "tiny/rove-seed1 perplexity", "tiny/rove-seed1 samples"]
    meta.write_bytes(before[str(meta)][1])

    # so does one that was killed before its last evaluation
    values = json.loads(before[str(meta)][1])
    meta.write_text(json.dumps(values | {"val_loss": None}))
    assert "tiny/rove-seed1" in to_run()
    meta.write_bytes(before[str(meta)][1])

    # other settings of a training, or other data, are never mixed with what is there
    for arm in ("rope", "rove"):
        edit(f"{arm}.toml", "learning_rate = 1e-2", "learning_rate = 2e-2")
    with pytest.raises(
        UserError, match="rope-seed1: made with train.learning_rate 0.01, now it is"
    ):
        run(capfd)
    for arm in ("rope", "rove"):
        edit(f"{arm}.toml", "learning_rate = 2e-2", "learning_rate = 1e-2")
    shutil.rmtree("shards")
    Path("a.jsonl").write_text(Path("a.jsonl").read_text() + '{"text": "one more"}\n')
    with pytest.raises(UserError, match="rope-seed1: trained on other data than shards has now"):
        run(capfd)
