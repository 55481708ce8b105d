"""What is evaluated, and work that is spread, killed and gone on with. The numbers themselves are
compared with scoring.score on everything at once, which tests/test_scoring.py checks."""

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from data.tokenizer import get_tokenizer
from model import GPT, GPTConfig
from nanorove.checkpoint import load_model
from nanorove.distributed import DistInfo
from nanorove.errors import UserError
from nanorove.evaluation import (
    GPT2_TOKENIZER,
    finish,
    header,
    open_output,
    open_subject,
    parse_yarn,
    resumable,
    yarn_factor,
)
from nanorove.hf import to_hf_config, to_hf_state
from scripts import export_hf, import_hf
from tests import reference
from tests.conftest import REPO
from tests.test_sampling import save_run

ALONE = DistInfo(0, 1, torch.device("cpu"))


# -----------------------------------------------------------------------------
# which model


def save_gpt2(folder: Path, vocab_size: int = 50257) -> GPT:
    """A folder as HuggingFace has it, with random weights."""
    config = GPTConfig(vocab_size, 16, 1, 2, 8, "learned")
    model = reference.randomise(GPT(config)).eval()
    folder.mkdir()
    safetensors.torch.save_file(
        to_hf_state(model.state_dict(), config), folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(to_hf_config(config, vocab_size - 1)))
    return model


def export(monkeypatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["export_hf", *map(str, args)])
    export_hf.main()


def test_a_run_and_its_step_folder(tmp_path):
    run = save_run(tmp_path / "run", "rove")
    step = run / "ckpt" / "step_00000001"
    digest = hashlib.sha256((step / "model.safetensors").read_bytes()).hexdigest()
    tokenizer = get_tokenizer("bytes")
    for path in (run, step):
        subject = open_subject(path)
        assert subject.path == step and subject.config == GPTConfig(257, 16, 1, 2, 8, "rove")
        assert subject.tokenizer == {
            "name": "bytes", "vocab_size": 257, "eot": 256, "sha256": tokenizer.sha256,
        }  # fmt: skip
        assert subject.identity["run"] == "tiny" and subject.identity["step"] == 1
        assert subject.identity["model_sha256"] == digest
        config = json.loads((step / "meta.json").read_text())["config"]
        canonical = json.dumps(config, sort_keys=True).encode()
        assert subject.identity["config"] == config
        assert subject.identity["config_sha256"] == hashlib.sha256(canonical).hexdigest()
    assert open_subject(run).result_path("core") == run / "eval" / "core.json"
    assert open_subject(step).result_path("core") == run / "eval" / "core_step_00000001.json"

    ids = torch.arange(40)[None]
    expected, _ = load_model(run, yarn_factor=2.5, max_len=40)
    model = open_subject(run).load(max_len=40, yarn_factor=2.5)
    assert not model.training and torch.equal(model(ids), expected(ids))
    with pytest.raises(UserError, match="yarn_factor"):
        open_subject(run).load(yarn_factor=0.5)


def test_a_step_folder_outside_a_run_needs_a_place_for_the_result(tmp_path):
    run = save_run(tmp_path / "run", "rove")
    (run / "ckpt" / "step_00000001").rename(tmp_path / "kept")
    with pytest.raises(UserError, match="--out"):
        open_subject(tmp_path / "kept").result_path("core")


def test_huggingfaces_gpt2_has_gpt2s_tokenizer(tmp_path):
    tokenizer = get_tokenizer("gpt2")
    assert GPT2_TOKENIZER == {key: getattr(tokenizer, key) for key in GPT2_TOKENIZER}
    model = save_gpt2(tmp_path / "gpt2")
    subject = open_subject(tmp_path / "gpt2")
    assert subject.tokenizer == GPT2_TOKENIZER and subject.config == model.config
    digest = hashlib.sha256((tmp_path / "gpt2" / "model.safetensors").read_bytes()).hexdigest()
    assert subject.identity["model_sha256"] == digest and subject.identity["run"] == "gpt2"
    ids = torch.arange(16)[None]
    loaded = subject.load(max_len=16)
    assert not loaded.training and torch.equal(loaded(ids), model(ids))
    assert loaded.transformer.wte.weight.device.type == "cpu"
    with pytest.raises(UserError, match="learned positions end at block_size"):
        subject.load(max_len=17)
    with pytest.raises(UserError, match="needs pos_emb rope or rove"):
        subject.load(yarn_factor=2.0)
    with pytest.raises(UserError, match="gpt2: not in a run; say with --out"):
        subject.result_path("core")


def test_an_exported_folder_remembers_its_run(tmp_path, monkeypatch):
    run = save_run(tmp_path / "run", "rove")
    export(monkeypatch, run, tmp_path / "plain")
    export(monkeypatch, run, tmp_path / "yarn", "--yarn-factor", "4")
    ids = torch.arange(64)[None]
    for name, factor in (("plain", 1.0), ("yarn", 4.0)):
        subject = open_subject(tmp_path / name)
        assert subject.tokenizer == open_subject(run).tokenizer
        assert subject.identity["run"] == "tiny" and subject.identity["step"] == 1
        assert subject.identity["config"]["model"]["yarn_factor"] == factor
        assert subject.config.yarn_factor == factor
        expected, _ = load_model(run, yarn_factor=factor, max_len=64)
        assert torch.equal(subject.load(max_len=64)(ids), expected(ids))
    again = open_subject(tmp_path / "yarn").load(max_len=64, yarn_factor=1.0)
    assert torch.equal(again(ids), load_model(run, max_len=64)[0](ids))
    # and what import_hf makes of it is the same model
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["import_hf", "plain", "again"])
    import_hf.main()
    assert open_subject(Path("runs/again")).tokenizer == open_subject(run).tokenizer


def test_folders_that_cannot_be_evaluated(tmp_path):
    """One line each, with the path in it."""
    save_gpt2(tmp_path / "odd", vocab_size=300)
    run = save_run(tmp_path / "run", "rove")
    wrong = save_run(tmp_path / "wrong", "rove")
    meta_json = wrong / "ckpt" / "step_00000001" / "meta.json"
    meta = json.loads(meta_json.read_text())
    meta["data"]["tokenizer"] = GPT2_TOKENIZER
    meta_json.write_text(json.dumps(meta))
    silent = save_run(tmp_path / "silent", "rove") / "ckpt" / "step_00000001" / "meta.json"
    silent.write_text(json.dumps({**json.loads(silent.read_text()), "data": None}))
    save_gpt2(tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").rename(tmp_path / "bare" / "pytorch_model.bin")
    save_gpt2(tmp_path / "list")
    (tmp_path / "list" / "config.json").write_text("[1]")
    save_gpt2(tmp_path / "noted")
    (tmp_path / "noted" / "nanorove_run.json").write_text('{"step": 3}')
    (run / "empty").mkdir()
    for path, message in {
        tmp_path / "none": "no such folder",
        run / "empty": "neither a run with a checkpoint nor a step folder",
        tmp_path / "odd": "a vocabulary of 300 and no nanorove_run.json: only GPT-2's",
        wrong: "a model of 257 tokens, but its tokenizer gpt2 has 50257",
        silent.parent: "says nothing of its tokenizer",
        tmp_path / "bare": r"no \.safetensors",
        tmp_path / "list": "not the config of a model",
        tmp_path / "noted": "not what export_hf writes",
    }.items():
        with pytest.raises(UserError, match=message) as error:
            open_subject(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_the_header_says_of_what_by_what_and_on_what(tmp_path):
    run = save_run(tmp_path / "run", "rope")
    found = header("core", open_subject(run), ALONE, "bfloat16")
    assert set(found) >= {
        "schema", "evaluation", "run", "step", "model_sha256", "config", "config_sha256",
        "git_revision", "git_dirty", "versions", "device", "dtype", "tokenizer",
    }  # fmt: skip
    assert (found["evaluation"], found["dtype"], found["device"]) == ("core", "bfloat16", "cpu")
    json.dumps(found)


def test_finish_writes_whole_files_and_forgets_only_the_journal(tmp_path):
    resumable([1.0], lambda i: 1, info=ALONE, journal=tmp_path / "j", key={}, label="x")
    out = tmp_path / "eval" / "core.json"
    finish(out, {"a": 1, "b": math.inf}, tmp_path / "j", DistInfo(1, 2, torch.device("cpu")))
    assert not out.exists() and (tmp_path / "j").exists()  # rank 0 alone writes
    finish(out, {"a": 1, "b": [math.inf]}, tmp_path / "j", ALONE)
    assert json.loads(out.read_text()) == {"a": 1, "b": [None]}
    assert not (tmp_path / "j").exists() and [p.name for p in out.parent.iterdir()] == ["core.json"]
    finish(out, {"a": 2}, tmp_path / "j", ALONE)  # no journal: nothing was spread
    assert json.loads(out.read_text()) == {"a": 2}


def test_yarn_factor():
    rope = GPTConfig(block_size=1024)
    assert [yarn_factor(s, 4096, rope) for s in ("none", "auto", "8")] == [1.0, 4.0, 8.0]
    assert yarn_factor("auto", 512, rope) == 1.0
    extended = GPTConfig(block_size=1024, yarn_factor=4.0)  # trained with YaRN at 4096
    assert [yarn_factor("none", n, extended) for n in (512, 8192)] == [4.0, 4.0]
    assert [yarn_factor("auto", n, extended) for n in (512, 8192)] == [4.0, 8.0]
    without = GPTConfig(pos_emb="none")
    assert yarn_factor("none", 4096, without) == 1.0
    assert "none" in yarn_factor("2", 4096, without)


def test_yarn_settings_of_the_command_line():
    assert parse_yarn("none, auto,4,none") == ["none", "auto", "4"]
    assert parse_yarn("4.0,4,2.50") == ["4", "2.5"]
    for text in ("off", "none,0.5", "nan", ""):
        with pytest.raises(UserError, match="--yarn"):
            parse_yarn(text)


# -----------------------------------------------------------------------------
# units of work


class Work:
    """Squares, and what was asked for. `fails_at` is the unit where the process is shot."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list[int] = []
        self.fails_at = fails_at

    def __call__(self, i: int) -> dict:
        if i == self.fails_at:
            raise KeyboardInterrupt
        self.asked.append(i)
        return {"square": i * i, "third": i / 3, "pair": (i, i)}


COSTS = [1.0, 5.0, 2.0, 5.0, 3.0]  # the dearest first, then in order: 1 3 4 2 0


def go(work: Work, tmp_path: Path, **other) -> list:
    settings = dict(info=ALONE, journal=tmp_path / "journal", key={"limit": 3}, label="squares")
    return resumable(COSTS, work, **settings | other)


def test_every_unit_once_and_as_json(tmp_path):
    work = Work()
    found = go(work, tmp_path)
    assert work.asked == [1, 3, 4, 2, 0]
    assert found == [{"square": i * i, "third": i / 3, "pair": [i, i]} for i in range(5)]
    assert resumable([], work, info=ALONE, journal=tmp_path / "j", key={}, label="none") == []


def test_what_was_interrupted_goes_on(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        go(Work(fails_at=4), tmp_path)
    work = Work()
    assert go(work, tmp_path) == go(Work(), tmp_path / "unbroken")
    assert work.asked == [4, 2, 0]
    assert "2 of 5 parts are done already" in capsys.readouterr().out
    work = Work()
    go(work, tmp_path)  # killed between the last unit and the result file
    assert work.asked == []


@pytest.mark.parametrize("tail", ['{"unit": 2, "val', '{"unit": 2, "value": 1}', "\0" * 40, "]\n"])
def test_a_line_that_was_not_finished_is_done_again(tmp_path, tail):
    """Also one that looks whole but has no end of line: its number may have lost digits."""
    with pytest.raises(KeyboardInterrupt):
        go(Work(fails_at=2), tmp_path)
    (journal,) = (tmp_path / "journal").iterdir()
    with journal.open("a") as file:
        file.write(tail)
    with pytest.raises(KeyboardInterrupt):
        go(Work(fails_at=0), tmp_path)
    work = Work()
    assert go(work, tmp_path) == go(Work(), tmp_path / "unbroken")
    assert work.asked == [0]
    assert all(json.loads(line) for line in journal.read_text().splitlines())


@pytest.mark.parametrize(
    "other",
    [
        dict(key={"limit": 4}),
        dict(key={"limit": 3, "seed": 1}),
        dict(info=DistInfo(0, 1, torch.device("meta"))),
    ],
    ids=str,
)
def test_another_evaluation_does_not_mix_in(tmp_path, capsys, other):
    go(Work(), tmp_path)
    work = Work()
    go(work, tmp_path, **other)
    assert sorted(work.asked) == [0, 1, 2, 3, 4]
    out = capsys.readouterr().out
    assert "starts over" in out and ("another key" in out or "another device" in out)


def test_parts_of_one_evaluation_keep_apart(tmp_path):
    go(Work(), tmp_path, label="hellaswag / 10-shot")
    work = Work()
    go(work, tmp_path, label="copa")
    assert sorted(work.asked) == [0, 1, 2, 3, 4]
    for label in ("copa", "hellaswag / 10-shot"):
        work = Work()
        go(work, tmp_path, label=label)
        assert work.asked == []
    assert sorted(p.name for p in (tmp_path / "journal").iterdir()) == [
        "copa.jsonl", "hellaswag_10-shot.jsonl",
    ]  # fmt: skip


# -----------------------------------------------------------------------------
# several processes

WORKER = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
import torch
from model import GPT, GPTConfig
from nanorove import evaluation
from nanorove.distributed import init_distributed, run_distributed
from nanorove.errors import UserError
from nanorove.evaluation import finish, resumable, score_all
from nanorove.scoring import Span
from tests import reference

def groups():
    rng = np.random.RandomState(0)
    found = []
    for _ in range(41):
        prompt = rng.randint(0, 61, rng.randint(1, 90))
        rows = [np.r_[prompt, rng.randint(0, 61, rng.randint(1, 20))] for _ in range(4)]
        found.append([Span(row, len(prompt), len(row)) for row in rows])
    return found

def main():
    info = init_distributed()
    model = reference.randomise(GPT(GPTConfig(61, 128, 2, 2, 32, "rove"))).eval()
    kill_rank, kill_after = (int(n) for n in os.environ.get("SHOT", "-1,0").split(","))
    calls, score = [], evaluation.score
    def counted(*args, **kwargs):
        if info.rank == kill_rank and len(calls) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(1)
        return score(*args, **kwargs)
    evaluation.score = counted
    settings = dict(info=info, journal=Path("journal"), key={"of": "this test"})
    found = score_all(model, groups(), label="main", max_tokens=500, **settings)
    few = score_all(model, groups()[:1], label="few", max_tokens=500, **settings)  # idle ranks
    def faulty(i):
        if i == 1:
            raise UserError("unit 1 is bad")
        return i
    try:
        resumable([1.0] * 5, faulty, label="faulty", **settings)
        raise AssertionError
    except UserError as error:
        heard = str(error)
    record = {"heard": heard, "nll": [[s.nll.tolist() for s in g] for g in found + few],
              "greedy": [[s.greedy.tolist() for s in g] for g in found + few]}
    digest = evaluation.sha256_of_json(record)
    print(f"rank {info.rank}: {len(calls)} batches, {digest}", flush=True)
    Path(f"rank_{info.rank}").write_text(digest)
    finish(Path(sys.argv[1]), record, Path("journal"), info)

run_distributed(main)
"""


def launch(
    folder: Path, ranks: int, out: str, shot: str | None = None
) -> subprocess.CompletedProcess:
    (folder / "worker.py").write_text(WORKER)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(REPO)} | ({"SHOT": shot} if shot else {})
    how = (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    )
    return subprocess.run([sys.executable, *how, "worker.py", out], cwd=folder, env=env,
                          capture_output=True, text=True, timeout=300)  # fmt: skip


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bits(tmp_path):
    """With one that has nothing to do at the end (modded-nanogpt#179, nanoGPT#673), and with a
    mistake that one meets and all hear of."""
    for ranks in (1, 3):
        done = launch(tmp_path, ranks, f"{ranks}.json")
        assert done.returncode == 0, done.stderr
        digests = {(tmp_path / f"rank_{rank}").read_text() for rank in range(ranks)}
        assert len(digests) == 1  # every rank has all the results
    alone = (tmp_path / "1.json").read_bytes()
    assert (tmp_path / "3.json").read_bytes() == alone
    record = json.loads(alone)
    assert record["heard"] == "unit 1 is bad" and len(record["nll"]) == 42
    assert not (tmp_path / "journal").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "shot", "after"), [(1, "0,7", 3), (3, "2,3", 2), (2, "0,4", 1)])
def test_kill_9_and_another_number_of_processes(tmp_path, before, shot, after):
    assert launch(tmp_path, 1, "unbroken.json").returncode == 0
    assert launch(tmp_path, before, "out.json", shot).returncode != 0
    assert not (tmp_path / "out.json").exists()
    lines = (tmp_path / "journal" / "main.jsonl").read_text().splitlines()
    kept = int(shot[2:]) * before
    assert len(lines) == 1 + kept
    done = launch(tmp_path, after, "out.json")
    assert done.returncode == 0, done.stderr
    assert f"{kept} of " in done.stdout
    assert (tmp_path / "out.json").read_bytes() == (tmp_path / "unbroken.json").read_bytes()


def test_the_place_of_a_result_is_claimed_before_anything_is_computed(tmp_path):
    subject = open_subject(save_run(tmp_path / "run", "rove"))
    out, journal = open_output(subject, "core", None, info=ALONE)
    assert out == tmp_path / "run" / "eval" / "core.json" and journal.is_dir()
    looked, _ = open_output(subject, "core", None, info=ALONE, limit=5)
    assert looked == out.with_name("core_limit_5.json")  # a quick look replaces nothing
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", Path("/dev/null")):
        with pytest.raises(UserError, match=f"--out {place}: there, and no file"):
            open_output(subject, "core", place, info=ALONE)
    assert Path("/dev/null").is_char_device()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/core.json: cannot be written there: Not a directory"):
        open_output(subject, "core", tmp_path / "file" / "core.json", info=ALONE)

    program = (
        "import sys, torch; from pathlib import Path; from nanorove import evaluation as e\n"
        "from nanorove.distributed import DistInfo\nfrom nanorove.errors import run_cli\n"
        "info = DistInfo(0, 1, torch.device('cpu'))\n"
        "run_cli(lambda: e.open_output(None, 'core', Path(sys.argv[1]), info=info))\n"
    )
    other = [sys.executable, "-c", program, str(out)]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(other, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: {out}: another evaluation is writing it; wait for it\n"
    finish(out, {"a": 1}, journal, ALONE)
    assert not journal.exists()
    assert subprocess.run(other, env=env).returncode == 0  # it is free again
