import json
import os
import re
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from nanorove import runlog
from nanorove.config import Config, load_config
from nanorove.distributed import DistInfo
from nanorove.runlog import RunLog, git_state, peak_memory_gib, run_facts
from tests.conftest import REPO

FACTS = {"git_revision": None, "versions": {"torch": "x"}, "threads": 1}
CPU = DistInfo(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture
def config(tiny_toml) -> Config:
    return load_config([tiny_toml()])[0]


def lines(path: str = "runs/tiny/metrics.jsonl") -> list[dict]:
    text = Path(path).read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_files_of_a_run(config):
    log = RunLog(config, FACTS, None, None)
    assert tomllib.loads(Path("runs/tiny/config.toml").read_text())["model"]["pos_emb"] == "rove"
    assert load_config(["runs/tiny/config.toml"])[0] == config  # it can be run again
    assert json.loads(Path("runs/tiny/meta.json").read_text()) == FACTS
    assert lines() == [] and log.wandb_id is None
    log.write({"step": 0, "val/loss": 5.5})
    assert lines() == [{"step": 0, "val/loss": 5.5}]  # at once, not when the run ends
    log.write({"step": 1, "train/loss": 5.25})
    log.close()
    assert lines() == [{"step": 0, "val/loss": 5.5}, {"step": 1, "train/loss": 5.25}]


def test_a_resume_forgets_what_lies_beyond_the_checkpoint(config):
    """Stopped at 5 with a checkpoint at 3: no value twice, none of a run that never was."""
    log = RunLog(config, FACTS, None, None)
    for step in range(1, 6):
        log.write({"step": step, "train/loss": float(step)})
    log.close()
    log = RunLog(config, FACTS, 3, None)
    assert [r["step"] for r in lines()] == [1, 2, 3, 3]
    assert lines()[-1] == {"step": 3, "event": "resume"}
    log.write({"step": 4, "train/loss": 40.0})
    log.close()
    assert [(r["step"], r.get("train/loss")) for r in lines()] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (3, None), (4, 40.0),
    ]  # fmt: skip
    RunLog(config, FACTS, None, None).close()  # a run from the start has an empty record
    assert lines() == []


@pytest.mark.parametrize("rest", ['{"step": 4, "tra', '{"step": 2', "\x00\x00"])
def test_a_line_cut_by_a_kill_does_not_stop_the_resume(config, rest):
    RunLog(config, FACTS, None, None).close()
    good = '{"step": 1, "train/loss": 1.5}\n'
    Path("runs/tiny/metrics.jsonl").write_text(good + rest)
    RunLog(config, FACTS, 3, None).close()
    assert lines() == [json.loads(good), {"step": 3, "event": "resume"}]


def test_run_facts():
    facts = run_facts(CPU, 123)
    assert (facts["params"], facts["world_size"]) == (123, 1)
    assert facts["threads"] == torch.get_num_threads()
    assert facts["versions"]["torch"] == torch.__version__  # the build too: +cpu or +cu...
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["device"].startswith("cpu: ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", facts["started"])
    json.dumps(facts)


def git(folder: Path, *args: str) -> str:
    name = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(["git", *name, *args], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_git_state(tmp_path, monkeypatch):
    """Of the code that runs, wherever it is started from."""
    code = tmp_path / "code" / "nanorove"
    code.mkdir(parents=True)
    monkeypatch.setattr(runlog, "__file__", str(code / "runlog.py"))
    monkeypatch.chdir("/")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    nothing = {"git_revision": None, "git_dirty": None}
    assert git_state() == nothing  # an unpacked archive is no repository
    git(code, "init", "-q", "..")
    assert git_state() == {"git_revision": None, "git_dirty": False}  # no commit yet
    (code / "x.py").write_text("1")
    git(code, "add", "x.py")
    git(code, "commit", "-q", "-m", "x")
    head = git(code, "rev-parse", "HEAD")
    assert git_state() == {"git_revision": head, "git_dirty": False}
    assert git_state()["git_dirty"] is False  # not "", which a reader of JSON would stumble over
    (code / "x.py").write_text("2")
    assert git_state() == {"git_revision": head, "git_dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))  # no git on this machine
    assert git_state() == nothing


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="compares with Linux's /proc")
def test_peak_memory_is_in_gib():
    status = Path("/proc/self/status").read_text()
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # "high water mark"
    assert peak_memory_gib(CPU.device) == pytest.approx(kib / 2**20, rel=0.05)


def wandb_records(path: Path) -> list:
    """wandb's own messages out of a .wandb file: 7 bytes, then LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, body, records = 7, b"", []
    while at < len(data):
        left = 32768 - at % 32768  # of this block; too few bytes for a header are padding
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # after the checksum
        body += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            records.append(wandb_internal_pb2.Record.FromString(body))
            body = b""
    return records


WANDB_PROGRAM = """
from nanorove.config import load_config
from nanorove.runlog import RunLog
import sys
config, _ = load_config(["tiny.toml", "--log.wandb", sys.argv[1]])
log = RunLog(config, {"git_revision": "abc", "versions": {"torch": "x"}}, None, None)
log.write({"step": 0, "val/loss": 5.5})
log.write({"step": 10, "train/loss": 5.25})
log.close()
print("id", log.wandb_id)
"""


def run_with_wandb(mode: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """In an empty home, without a key, and nobody at the keyboard."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "NETRC"))}
    env |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(REPO)}
    env |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    (tmp_path / "home").mkdir()
    return subprocess.run(
        [sys.executable, "-c", WANDB_PROGRAM, mode], cwd=tmp_path, env=env, capture_output=True,
        text=True, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
def test_wandb_offline(config, tmp_path):
    """The real file, read back: one run, its config, every value at its step."""
    done = run_with_wandb("offline", tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = Path("runs/tiny/wandb").glob("offline-run-*/run-*.wandb")
    records = wandb_records(path)
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert f"id {run.run_id}" in done.stdout
    assert (run.display_name, run.project, list(run.tags)) == ("tiny", "nanorove", ["rove"])
    values = {u.key: json.loads(u.value_json) for u in run.config.update}
    assert values["model"]["pos_emb"] == "rove" and values["train"]["learning_rate"] == 0.01
    assert values["git_revision"] == "abc"
    history = [
        {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [(h["step"], h.get("val/loss"), h.get("train/loss")) for h in history] == [
        (0, 5.5, None), (10, None, 5.25),
    ]  # fmt: skip
    (metric,) = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]
    assert (metric.glob_name, metric.step_metric) == ("*", "step")


@pytest.mark.slow
def test_wandb_online_without_a_key_logs_offline(config, tmp_path):
    """It says so in one line, asks nobody, and the training goes on."""
    done = run_with_wandb("online", tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "no API key" in line]
    assert len(said) == 1 and "offline" in said[0] and "runs/tiny/wandb" in said[0]
    assert len(list(Path("runs/tiny/wandb").glob("offline-run-*/run-*.wandb"))) == 1
    assert len(lines()) == 2


def test_disabled_says_so_and_does_not_import_wandb(config, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    log = RunLog(config, FACTS, None, None)
    log.write({"step": 1, "train/loss": 1.0})
    log.close()
    assert capfd.readouterr().out == "wandb: disabled\n"
