"""scripts.jobs: real processes that run side by side, fail, are stopped, and never outlive us."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanorove.errors import UserError
from nanorove.guards import StopSignal
from scripts import jobs
from scripts.jobs import Job, Slots, make_slots, only_one, run_jobs
from tests.conftest import REPO

# a job that writes its name when it is told to stop, a second later
SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(1)
    open(sys.argv[1] + ".saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(sys.argv[1] + ".started", "w").close()
time.sleep(60)
"""
WAIT = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.05)\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run jobs in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    stop = StopSignal()

    def run(count: int, *them: Job) -> None:
        with only_one(Path("x")) as lock:
            run_jobs(them, Slots(count, []), Path("x/logs"), lock, stop)

    yield run
    stop.restore()


def job(name: str, code: str, *arguments: str, **options) -> Job:
    return Job(name, ["-c", code, *arguments], **options)


def test_two_at_a_time(run, capfd):
    """Each waits for what the other writes; one behind the other they would wait for ever."""
    one = "import os\nassert os.getsid(0) == os.getpid()\n"  # Ctrl-C comes through us alone
    one += "print('from one')\nopen('one', 'w').close()\n" + WAIT.format("two")
    two = "print('from two')\nopen('two', 'w').close()\n" + WAIT.format("one")
    finished = []
    run(2, job("the one", one, finish=lambda _: finished.append(1)), job("two", two))
    out = capfd.readouterr().out
    assert Path("x/logs/the-one.log").read_text() == "from one\n"
    assert "from one\n" not in out.splitlines(keepends=True)  # nor does the screen show both
    assert (
        re.search(r"\[run\] the one\n\$ (OMP_NUM_THREADS=\d+ )?python -c ", out)
        and "\n[end] two: " in out
        and finished == [1]
    )


def test_one_at_a_time(run, capfd):
    """In their order, on the terminal."""
    them = [job(str(i), f"import time; time.sleep({(3 - i) / 10}); print({i})") for i in range(3)]
    run(1, *them)
    assert [x for x in capfd.readouterr().out.splitlines() if x in ("0", "1", "2")] == [
        "0", "1", "2",
    ]  # fmt: skip
    assert not Path("x/logs").exists()


def test_a_failure_stops_new_ones_and_lets_the_others_save(run, capfd):
    fails = WAIT.format("a.started") + "print('so it is'); raise SystemExit(3)"
    signed = []
    with pytest.raises(UserError, match="step 'bad' failed with exit code 3 .*x/logs/bad.log"):
        run(
            2,
            job("a", SAVES, "a"),
            job("bad", fails, finish=lambda _: signed.append("bad")),
            job("next", "open('next', 'w').close()"),
        )
    assert Path("a.saved").is_file() and not Path("next").exists() and signed == []
    said = capfd.readouterr()
    assert "  so it is\n" in said.err and "waiting for a to save" in said.out


def test_what_is_said_before_and_after(run):
    """`prepare` may refuse a job, `finish` a result; what the one gives the other gets."""
    got = []
    run(1, job("a", "", prepare=lambda: 7, finish=got.append))
    assert got == [7]

    def no(*_):
        raise UserError("not so")

    with pytest.raises(UserError, match="^not so$"):
        run(1, job("a", "open('a', 'w').close()", prepare=no), job("b", "open('b', 'w')"))
    with pytest.raises(UserError, match="^not so$"):
        run(1, job("c", "open('c', 'w').close()", finish=no), job("d", "open('d', 'w')"))
    assert [Path(x).exists() for x in "abcd"] == [False, False, True, False]


def test_what_is_optional_may_fail(run, capfd):
    run(1, job("a", "raise SystemExit(1)", optional=True), job("b", "open('b', 'w').close()"))
    assert "note: step 'a' failed with exit code 1" in capfd.readouterr().out
    assert Path("b").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_and_they_save(run, number):
    """Repeated or not, each gets one: a second one would cut its saving short."""
    tells = "import os, signal, time\n" + WAIT.format("a.started") + WAIT.format("b.started")
    tells += f"for _ in range(3):\n    os.kill(os.getppid(), {int(number)}); time.sleep(0.3)\n"
    with pytest.raises(KeyboardInterrupt):
        run(3, job("a", SAVES, "a"), job("b", SAVES, "b"), job("t", tells), job("n", SAVES, "n"))
    assert Path("a.saved").is_file() and Path("b.saved").is_file()
    assert not Path("n.started").exists()


PROGRAM = """
import sys
from pathlib import Path
from nanorove.errors import run_cli
from nanorove.guards import StopSignal
from scripts.jobs import Job, Slots, only_one, run_jobs
def main():
    with only_one(Path("x")) as lock:
        job = Job("a", ["-c", sys.argv[1], "a"])
        run_jobs([job], Slots(1, []), Path("x/logs"), lock, StopSignal())
run_cli(main)
"""


def test_the_command_that_is_shown_can_be_typed(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(jobs, "cpu_cores", lambda: 6)
    it = Job("a", ["train.py", "a b"], torchrun=True)
    assert Slots(1, []).shown(it) == "python train.py 'a b'"
    assert Slots(2, []).shown(it) == "OMP_NUM_THREADS=3 python train.py 'a b'"
    shown = Slots(2, list("4567")).shown(it, 1)
    assert shown.startswith("CUDA_VISIBLE_DEVICES=6,7 python -m torch.distributed.run --standalone")


def test_a_reader_that_went_away_does_not_keep_jobs_from_saving(tmp_path, monkeypatch):
    """As in `experiment | tee log`, where Ctrl-C ends tee first; a closed terminal is the same."""
    monkeypatch.chdir(tmp_path)
    env = os.environ | {"PYTHONPATH": str(REPO)}
    first = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, SAVES], env=env, stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # we may be under nohup
    )  # fmt: skip
    while not Path("a.started").exists():
        time.sleep(0.05)
    first.stdout.close()
    first.send_signal(signal.SIGHUP)
    assert first.wait(60) == 130 and Path("a.saved").is_file()


def test_jobs_do_not_outlive_a_killed_experiment(tmp_path, monkeypatch, capfd):
    """Another one is refused while it runs. Killed, its job is told to stop and saves, and the next
    one waits for that."""
    monkeypatch.chdir(tmp_path)
    env = os.environ | {"PYTHONPATH": str(REPO)}
    first = subprocess.Popen([sys.executable, "-c", PROGRAM, SAVES], env=env)
    end = time.monotonic() + 120
    while not Path("a.started").exists() and time.monotonic() < end:
        time.sleep(0.05)
    with pytest.raises(UserError, match="^x: this experiment is running already"):
        with only_one(Path("x")):
            pass
    first.kill()
    first.wait()
    if sys.platform == "linux":
        with only_one(Path("x")):
            assert Path("a.saved").is_file()
        assert "waiting for jobs that a killed experiment left" in capfd.readouterr().out


def test_without_locks_it_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    """As on some network file systems."""

    def no(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(jobs.fcntl, "flock", no)
    with only_one(tmp_path):
        pass
    out = capsys.readouterr().out
    assert f"lock: {tmp_path}/lock: No locks available; nothing stops a second" in out


# -----------------------------------------------------------------------------
# GPUs and cores


def test_gpus_are_shared_evenly(monkeypatch):
    slots = make_slots(2, ["0", "1", "4", "5"])
    assert slots.processes == 2
    shares = [slots.environment(i) for i in range(2)]
    assert shares == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "4,5"}]
    them = Job("a", ["train.py", "c.toml"], torchrun=True), Job("r", ["-m", "scripts.report"])
    assert slots.command(them[0]) == [
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "--shutdown-timeout=300", "train.py", "c.toml",
    ]  # fmt: skip
    assert slots.command(them[1]) == them[1].arguments
    for count in (3, 8):
        with pytest.raises(UserError, match=f"slots {count}: 4 GPUs .* evenly; use 1, 2, 4$"):
            make_slots(count, ["0", "1", "2", "3"])
    with pytest.raises(UserError, match="slots 0: at least 1"):
        make_slots(0, [])


def test_the_gpus_that_may_be_used(monkeypatch):
    monkeypatch.setattr(jobs.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert jobs.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8932f937")
    assert jobs.visible_gpus() == ["3", "GPU-8932f937"]
    monkeypatch.setattr(jobs.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert jobs.visible_gpus() == []


def test_cores_are_shared_evenly(monkeypatch):
    monkeypatch.setattr(jobs, "cpu_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # whoever says it has it, per job
    assert make_slots(2, []).environment(1) == {}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert make_slots(2, []).environment(1) == {"OMP_NUM_THREADS": "4"}
    assert make_slots(16, []).environment(9) == {"OMP_NUM_THREADS": "1"}
    assert make_slots(1, []).environment(0) == {}  # torch's own choice
    monkeypatch.setattr(jobs.torch, "get_num_threads", lambda: 7)
    assert [make_slots(count, []).threads for count in (1, 2)] == [7, 4]
    assert make_slots(2, []).command(Job("a", ["train.py"], torchrun=True)) == ["train.py"]
