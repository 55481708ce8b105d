import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from nanorove import runlog, wandb_mirror
from nanorove.config import Config, config_to_dict, load_config
from nanorove.distributed import DistInfo
from nanorove.errors import UserError
from nanorove.runlog import RunLog, git_state, peak_memory_gib, run_facts
from tests.conftest import REPO

FACTS = {"git_revision": None, "versions": {"torch": "x"}, "threads": 1}
AT_3 = {"step": 3, "val_loss": None, "wandb_id": None}  # of the checkpoint to go on from
CPU = DistInfo(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture
def config(tiny_toml) -> Config:
    return load_config([tiny_toml()])[0]


def lines(path: str = "runs/tiny/metrics.jsonl") -> list[dict]:
    text = Path(path).read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_files_of_a_run(config):
    log = RunLog(config, FACTS, None)
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
    log = RunLog(config, FACTS, None)
    for step in range(1, 6):
        log.write({"step": step, "train/loss": float(step)})
    log.close()
    log = RunLog(config, FACTS, AT_3)
    assert [r["step"] for r in lines()] == [1, 2, 3, 3]
    assert lines()[-1] == {"step": 3, "event": "resume"}
    log.write({"step": 4, "train/loss": 40.0})
    log.close()
    assert [(r["step"], r.get("train/loss")) for r in lines()] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (3, None), (4, 40.0),
    ]  # fmt: skip
    RunLog(config, FACTS, None).close()  # a run from the start has an empty record
    assert lines() == []


@pytest.mark.parametrize("rest", ['{"step": 4, "tra', '{"step": 2', "\x00\x00"])
def test_a_line_cut_by_a_kill_does_not_stop_the_resume(config, rest):
    RunLog(config, FACTS, None).close()
    good = '{"step": 1, "train/loss": 1.5}\n'
    Path("runs/tiny/metrics.jsonl").write_text(good + rest)
    RunLog(config, FACTS, AT_3).close()
    assert lines() == [json.loads(good), {"step": 3, "event": "resume"}]


@pytest.mark.parametrize(("val_loss", "kept"), [(None, False), (5.0, True)])
def test_an_evaluation_that_comes_again_is_forgotten(config, val_loss, kept):
    """Killed between the line of an evaluation and its note in the checkpoint: not twice."""
    log = RunLog(config, FACTS, None)
    for record in ({"step": 3, "train/loss": 1.0}, {"step": 3, "val/loss": 5.0}):
        log.write(record)
    log.close()
    RunLog(config, FACTS, AT_3 | {"val_loss": val_loss}).close()
    assert ({"step": 3, "val/loss": 5.0} in lines()) == kept
    assert lines()[0] == {"step": 3, "train/loss": 1.0} and lines()[-1]["event"] == "resume"


def test_the_record_is_strict_json(config):
    """NaN is no JSON; a browser or jq would refuse the file."""
    log = RunLog(config, FACTS, None)
    log.write({"step": 1, "train/loss": math.nan, "a": {"b": -math.inf, "c": 1.5}})
    log.close()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = Path("runs/tiny/metrics.jsonl").read_text()
    expected = {"step": 1, "train/loss": None, "a": {"b": None, "c": 1.5}}
    assert json.loads(text, parse_constant=refuse) == expected


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
from nanorove import wandb_mirror
from nanorove.config import load_config
from nanorove.runlog import RunLog
import json, sys
config, _ = load_config(["tiny.toml", "--log.wandb", sys.argv[1]])
resume = json.loads(sys.argv[2])
log = RunLog(config, {"git_revision": "abc", "versions": {"torch": "x"}}, resume)
for step in range(resume["step"] if resume else 0, int(sys.argv[3])):
    log.write({"step": step + 1, "train/loss": 5.25 - step, "perf/mfu_pct": None})
    if step == 3:
        log.write({"step": 4, "val/loss": 4.5, "val/loss_by_position": {"0": 5.0, "2-3": 4.0}})
log.close()
assert "wandb" not in sys.modules and log.wandb.returncode is not None
print("id", log.wandb_id)
"""


def run_with_wandb(
    mode: str, tmp_path: Path, resume: dict | None = None, steps: int = 5, **env: str
) -> subprocess.CompletedProcess:
    """In an empty home, without a key, and nobody at the keyboard."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "NETRC"))}
    clean |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(REPO)}
    clean |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    (tmp_path / "home").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", WANDB_PROGRAM, mode, json.dumps(resume), str(steps)],
        cwd=tmp_path, env=clean | env, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


def history(records: list) -> list[dict]:
    return [
        {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in r.history.item}
        | {"wandb step": r.history.step.num}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]


@pytest.mark.slow
def test_wandb_offline(config, tmp_path):
    """The real files, read back: one run, its config, every value at its step; after a stop at 5
    and a resume at 3 the steps 4 and 5 come again, and wandb has each once (wandb#4482)."""
    done = run_with_wandb("offline", tmp_path)
    assert done.returncode == 0, done.stderr
    (name,) = re.findall(r"^id (\w+)$", done.stdout, re.M)
    done = run_with_wandb(
        "offline", tmp_path, {"step": 3, "val_loss": None, "wandb_id": name}, steps=7
    )
    assert done.returncode == 0, done.stderr
    paths = Path("runs/tiny/wandb").glob("offline-run-*/run-*.wandb")
    first, second = map(wandb_records, sorted(paths, key=lambda path: path.stat().st_mtime))
    for records in (first, second):
        (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
        assert (run.run_id, run.display_name, run.project) == (name, "tiny", "nanorove")
        assert (run.run_group, run.job_type) == ("tiny", "rove")
        assert list(run.tags) == ["rove", "seed 7", "data"]
        values = {u.key: json.loads(u.value_json) for u in run.config.update}
        assert values["model"]["pos_emb"] == "rove" and values["train"]["learning_rate"] == 0.01
        assert values["git_revision"] == "abc"
        (metric,) = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]
        assert (metric.glob_name, metric.step_metric) == ("*", "step")
    rows = [history(records) for records in (first, second)]
    assert [[(h["step"], "val/loss" in h) for h in part] for part in rows] == [
        [(1, False), (2, False), (3, False), (4, False), (4, True), (5, False)],
        [(6, False), (7, False)],
    ]
    assert [h["train/loss"] for h in sum(rows, []) if "train/loss" in h] == [
        5.25, 4.25, 3.25, 2.25, 1.25, 0.25, -0.75,
    ]  # fmt: skip
    (val,) = [h for h in rows[0] if "val/loss" in h]
    assert (val["val/loss"], val["val/loss_by_position.2-3"]) == (4.5, 4.0)
    steps = [h["wandb step"] for h in sum(rows, [])]  # wandb drops what does not grow
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_wandb_online_without_a_key_logs_offline(config, tmp_path):
    """It says so in one line, asks nobody, and the training goes on."""
    done = run_with_wandb("online", tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "no API key" in line]
    assert len(said) == 1 and "offline" in said[0] and "runs/tiny/wandb" in said[0]
    assert len(list(Path("runs/tiny/wandb").glob("offline-run-*/run-*.wandb"))) == 1
    assert len(lines()) == 6


@pytest.mark.slow
def test_wandb_with_a_dead_endpoint(config, tmp_path):
    """A key, and nobody at the other end: the training ends as if there were no wandb."""
    done = run_with_wandb(
        "online", tmp_path, WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9"
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^wandb: not (done|reached)", done.stdout, re.M)
    assert [r["step"] for r in lines()] == [1, 2, 3, 4, 4, 5]


FAKE_WANDB = """
import json, os, time
class Error(Exception): pass
class Settings:
    def __init__(self, **settings): pass
def note(*what):
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps(what) + "\\n")
def login(prompt, verify): return True
class Run:
    def define_metric(self, name, step_metric): note("metric", name, step_metric)
    def log(self, values, step): note("log", step, values)
    def finish(self):
        if os.environ.get("TROUBLE") == "finish hangs":
            time.sleep(1000)
        note("finish")
def init(**options):
    trouble = os.environ.get("TROUBLE")
    if trouble == "init hangs":
        time.sleep(1000)
    if trouble == "no network" and options["mode"] == "online":
        raise Error("nobody is there")
    del options["settings"]
    note("init", options)
    return Run()
"""


@pytest.fixture
def fake_wandb(tmp_path, monkeypatch):
    """A stand-in for the wandb package that writes down its calls; gives back how to read them."""
    (tmp_path / "fake" / "wandb").mkdir(parents=True)
    (tmp_path / "fake" / "wandb" / "__init__.py").write_text(FAKE_WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("FAKE_WANDB", str(tmp_path / "calls"))

    def calls(kind: str) -> list[list]:
        path = tmp_path / "calls"
        rows = map(json.loads, path.read_text().splitlines()) if path.exists() else []
        return [row[1:] for row in rows if row[0] == kind]

    return calls


def test_wandb_gets_every_line_once_over_a_resume(tiny_toml, fake_wandb):
    """Stopped at 5, resumed at 3: one run, each step and each validation once, in order."""
    config, _ = load_config([tiny_toml(), "--log.wandb", "online"])
    log = RunLog(config, FACTS, None)
    for step in range(1, 6):
        log.write({"step": step, "train/loss": float(step)})
        if step == 3:
            log.write({"step": 3, "val/loss": math.nan})
    log.close()
    name = log.wandb_id
    log = RunLog(config, FACTS, AT_3 | {"wandb_id": name})
    log.write({"step": 3, "val/loss": math.nan})
    for step in range(4, 8):
        log.write({"step": step, "train/loss": float(step)})
    log.close()
    assert log.wandb_id == name and re.fullmatch(r"\w{8}", name)
    for options in fake_wandb("init"):
        assert (options[0]["id"], options[0]["resume"], options[0]["mode"]) == (
            name, "allow", "online",
        )  # fmt: skip
        assert options[0]["config"]["threads"] == 1
    rows = [row for _, row in fake_wandb("log")]
    assert rows == [
        *({"step": n, "train/loss": float(n)} for n in (1, 2, 3)),
        {"step": 3, "val/loss": None},
        *({"step": n, "train/loss": float(n)} for n in (4, 5, 6, 7)),
    ]
    steps = [step for step, _ in fake_wandb("log")]
    assert steps == sorted(set(steps))
    assert len(fake_wandb("finish")) == 2
    RunLog(config, FACTS, None).close()  # another run from the start is another run there
    assert fake_wandb("init")[-1][0]["id"] != name


@pytest.mark.parametrize("trouble", ["init hangs", "finish hangs", "no network"])
def test_wandb_in_trouble_does_not_touch_the_training(
    tiny_toml, fake_wandb, monkeypatch, capfd, trouble
):
    monkeypatch.setenv("TROUBLE", trouble)
    monkeypatch.setattr(wandb_mirror, "FINISH_S", 3)
    config, _ = load_config([tiny_toml(), "--log.wandb", "online"])
    log = RunLog(config, FACTS, None)
    log.write({"step": 1, "train/loss": 1.5})
    log.close()
    assert lines() == [{"step": 1, "train/loss": 1.5}]
    assert log.wandb.wait(10) is not None  # no process is left behind
    out = capfd.readouterr().out
    if trouble == "no network":
        assert "wandb: not reached (nobody is there), so it logs offline" in out
        assert [options["mode"] for (options,) in fake_wandb("init")] == ["offline"]
    else:
        assert "wandb: not done after 3 s" in out
    if trouble != "init hangs":
        assert fake_wandb("log") == [[2, {"step": 1, "train/loss": 1.5}]]


def test_wandb_ends_by_itself_when_the_training_is_killed(tiny_toml, fake_wandb):
    """And sends what was written until then."""
    tiny_toml()
    program = (
        "import os, signal\n"
        "from nanorove.config import load_config\n"
        "from nanorove.runlog import RunLog\n"
        "log = RunLog(load_config(['tiny.toml', '--log.wandb', 'online'])[0], {}, None)\n"
        "log.write({'step': 1, 'train/loss': 1.5})\n"
        "print(log.wandb.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(REPO), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    end = time.monotonic() + 30  # (the pipe above is open until it ends)
    while not fake_wandb("finish") and time.monotonic() < end:
        time.sleep(0.1)
    assert fake_wandb("log") == [[2, {"step": 1, "train/loss": 1.5}]]
    assert len(fake_wandb("finish")) == 1


@pytest.mark.parametrize(
    ("arm", "run_name", "group"),
    [
        ("rope", "gpt2_124m_rope", "gpt2_124m_*"),
        ("rove", "gpt2_124m_rove", "gpt2_124m_*"),
        ("rove", "gpt2_124m_rove_yarn4k", "gpt2_124m_*_yarn4k"),
        ("rope", "demo/rope-seed1", "demo"),
    ],
)
def test_the_arms_of_a_comparison_share_a_group(tiny_toml, arm, run_name, group):
    config, _ = load_config([tiny_toml(), "--run_name", run_name, "--model.pos_emb", arm])
    options = wandb_mirror.wandb_options(config_to_dict(config), FACTS)
    assert (options["group"], options["job_type"]) == (group, arm)
    assert options["tags"] == [arm, "seed 7", "data"]
    assert options["config"] == config_to_dict(config) | FACTS


def test_disabled_says_so_and_does_not_import_wandb(config, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    log = RunLog(config, FACTS, None)
    log.write({"step": 1, "train/loss": 1.0})
    log.close()
    assert capfd.readouterr().out == "wandb: disabled\n"


GOOD = [{"step": step, "train/loss": 1.0} for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("bad", [b'{"step": 4, \x00\x00}', b"\xff\xfe", b"7", b"{}", b""])
def test_a_damaged_line_of_the_record(config, capfd, bad):
    """Beyond the checkpoint it ends the record, with what follows; before it, the resume ends with
    file and line."""
    path = Path("runs/tiny/metrics.jsonl")
    RunLog(config, FACTS, None).close()
    good = [json.dumps(record).encode() for record in GOOD]
    path.write_bytes(b"\n".join([*good[:3], bad, good[3], b""]))
    RunLog(config, FACTS, AT_3).close()
    assert lines() == [*GOOD[:3], {"step": 3, "event": "resume"}]
    assert "metrics.jsonl: line 4 is unreadable" in capfd.readouterr().out
    path.write_bytes(b"\n".join([*good[:2], bad, good[2], b""]))
    before = path.read_bytes(), Path("runs/tiny/meta.json").read_bytes()
    with pytest.raises(UserError, match=r"runs/tiny/metrics\.jsonl, line 3: unreadable.* step 3"):
        RunLog(config, {}, AT_3)
    assert (path.read_bytes(), Path("runs/tiny/meta.json").read_bytes()) == before
