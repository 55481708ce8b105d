"""A run survives what happens to it: signals, kills, a full disk, the loss of a machine."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from nanorove import checkpoint
from nanorove.config import load_config
from nanorove.errors import UserError
from tests.conftest import REPO
from tests.test_train import (
    assert_close,
    comparable,
    curve,
    dies,
    hashes,
    records,
    run,
    torchrun,
    weights,
)

# a checkpoint after each step: most of the time is spent in saves
BUSY = ["--train.checkpoint_interval", "1", "--train.eval_interval", "4", "--train.max_steps", "40"]


# -----------------------------------------------------------------------------
# signals


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, what: Callable[[], object]) -> None:
    """Do something in the middle of the training's optimizer step `step` (from 0)."""
    batch = train.Prefetcher.get

    def get(self, now: int, micro_step: int) -> tuple:
        if (now, micro_step) == (step, 1):
            what()
        return batch(self, now, micro_step)

    monkeypatch.setattr(train.Prefetcher, "get", get)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_saves_and_stops(tiny_toml, monkeypatch, capfd, name):
    """Before any checkpoint or evaluation was due (nanoGPT#180), at the end of the step."""
    argv = ["--train.checkpoint_interval", "100", "--train.eval_interval", "100"]
    run(tiny_toml(), *argv, "--run_name", "unbroken")
    if name == "SIGHUP":  # ignored if these tests run under nohup
        monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    before = signal.getsignal(getattr(signal, name))
    with monkeypatch.context() as patch:
        after_step(patch, 1, lambda: [signal.raise_signal(getattr(signal, name)) for _ in "twice"])
        result = run("tiny.toml", *argv)
    assert result["step"] == 2
    assert signal.getsignal(getattr(signal, name)) == before
    assert Path("runs/tiny/PREEMPTED").read_text() == f"stopped at step 2 by {name}\n"
    assert Path("runs/tiny/ckpt/last").read_text() == "step_00000002\n"
    assert f"stopped at step 2 by {name}: saved, --resume goes on" in capfd.readouterr().out
    run("tiny.toml", *argv, "--resume")
    assert not Path("runs/tiny/PREEMPTED").exists()
    assert hashes("tiny") == hashes("unbroken") and comparable("tiny") == comparable("unbroken")


def test_a_signal_where_an_evaluation_is_due(tiny_toml, monkeypatch):
    """Stopping does not wait for it; the resumed run makes it."""
    run(tiny_toml(), "--run_name", "unbroken")
    for step in (2, 5):
        with monkeypatch.context() as patch:
            after_step(patch, step, lambda: signal.raise_signal(signal.SIGTERM))
            assert run("tiny.toml", "--resume")["step"] == step + 1
    assert list(curve("tiny", "val/loss")) == [0, 3]
    run("tiny.toml", "--resume")
    assert hashes("tiny") == hashes("unbroken") and comparable("tiny") == comparable("unbroken")


def test_exit_code_of_a_stopped_process(tiny_toml):
    process = subprocess.Popen(
        [sys.executable, str(REPO / "train.py"), tiny_toml(), "--train.max_steps", "1000000"],
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: any("train/loss" in r for r in records()), process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0
    last = Path("runs/tiny/ckpt/last").read_text().strip()
    assert Path("runs/tiny/PREEMPTED").read_text() == (
        f"stopped at step {int(last[5:])} by SIGUSR1\n"
    )


def wait_for(what: Callable[[], bool], process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while True:
        assert process.poll() is None, "it ended"
        assert time.monotonic() < end, "it takes too long"
        try:
            if what():
                return
        except (OSError, ValueError):
            pass  # not there yet, or half a line
        time.sleep(0.05)


def start_torchrun(processes: int, options: list[str], *argv: str) -> subprocess.Popen:
    """torchrun in the background; what it prints goes into torchrun.log."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}",
               *options, str(REPO / "train.py"), *argv]  # fmt: skip
    with open("torchrun.log", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds workers in /proc")


def workers(agent: int) -> list[int]:
    """Processes that torchrun started, by rank."""
    found = {}
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(e[5:]): int(pid) for e in environ if e.startswith(b"RANK=")}
    return [pid for _, pid in sorted(found.items())]


SLOW_SAVE = """
import sys, time, train
from nanorove import checkpoint
from nanorove.config import load_config
from nanorove.distributed import run_distributed
save = checkpoint.save_checkpoint
def slow(*args):
    time.sleep(20)
    return save(*args)
checkpoint.save_checkpoint = slow
run_distributed(lambda: train.main(*load_config(sys.argv[1:])))
"""


@pytest.mark.slow
def test_a_slow_save_is_waited_for(tiny_toml):
    """Rank 0 writes for 20 s while rank 1 stands in the next collective (spd#536): it must neither
    give up nor go on alone, and both end well."""
    run(tiny_toml(), "--run_name", "unbroken")
    Path("slow_save.py").write_text(SLOW_SAVE)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "slow_save.py", "tiny.toml"],
        env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert curve("tiny", "train/loss") == pytest.approx(curve("unbroken", "train/loss"), rel=1e-5)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("to", ["torchrun", "one worker"])
def test_sigusr1_under_torchrun(tiny_toml, to):
    """What scripts/slurm/ builds on: torchrun passes the signal on if --signals-to-handle says so,
    its own exit code is an error then, and the marker tells a stop from a failure. A signal to one
    worker alone stops all of them at the same step, with exit code 0."""
    long = ["--train.max_steps", "1000000", "--train.warmup_steps", "2"]
    agent = start_torchrun(
        2,
        ["--standalone", "--max-restarts=3", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"],
        tiny_toml(), *long, "--resume",
    )  # fmt: skip
    wait_for(lambda: any("train/loss" in r for r in records()), agent)
    os.kill(agent.pid if to == "torchrun" else workers(agent.pid)[1], signal.SIGUSR1)
    assert (agent.wait(60) == 0) == (to == "one worker"), Path("torchrun.log").read_text()
    last = Path("runs/tiny/ckpt/last").read_text().strip()
    marker = Path("runs/tiny/PREEMPTED").read_text()
    name = "SIGUSR1" if to == "torchrun" else "a signal to another process"
    assert marker == f"stopped at step {int(last[5:])} by {name}\n"
    assert [r for r in records() if "event" in r] == []  # stopped, and not restarted
    checkpoint.load_model("runs/tiny")


@needs_proc
@pytest.mark.slow
def test_slurm_script(tiny_toml, monkeypatch, tmp_path):
    """SIGUSR1 before the time is up: a checkpoint, and the job is back in the queue; a run that is
    done, or fails, is not. (srun and scontrol are stand-ins, torchrun and train.py are not.)"""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (fake / "scontrol").write_text(
        '#!/bin/sh\ncase $1 in show) echo localhost;; *) echo "scontrol $*";; esac\n'
    )
    (fake / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for path in fake.iterdir():
        path.chmod(0o755)
    Path("train.py").symlink_to(REPO / "train.py")
    env = os.environ | {
        "PATH": f"{fake}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "PYTHONPATH": str(REPO),
    }  # fmt: skip

    def job(*argv: str) -> subprocess.Popen:
        command = ["bash", str(REPO / "scripts/slurm/train.sbatch"), tiny_toml(), *argv]
        with open("job.log", "w") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log)

    process = job("--run_name", "a/b", "--train.max_steps", "1000000")
    wait_for(lambda: any("train/loss" in r for r in records("a/b")), process)
    (agent,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(agent), signal.SIGUSR1)
    assert process.wait(60) == 0, Path("job.log").read_text()
    assert (
        Path("job.log")
        .read_text()
        .endswith("by SIGUSR1: back into the queue\nscontrol requeue 17\n")
    )
    step = json.loads(next(Path("runs/a/b/ckpt").glob("*/meta.json")).read_text())["step"]
    process = job("--run_name", "a/b", "--train.max_steps", str(step + 2))  # the queue's turn
    assert process.wait(60) == 0, Path("job.log").read_text()
    assert "requeue" not in Path("job.log").read_text()
    assert not Path("runs/a/b/PREEMPTED").exists()
    Path("runs/a/b/PREEMPTED").touch()  # a failure after a stop must not go round for ever
    assert job("--run_name", "a/b", "--train.max_steps", "0").wait(60) != 0
    assert "requeue" not in Path("job.log").read_text()


# -----------------------------------------------------------------------------
# kills


def forked(kill_after: float | None, *argv: str) -> int:
    """train.py in a process of its own without the seconds that importing torch takes; killed after
    so many seconds. Gives back its exit code."""
    program = (
        "import os, sys\n"
        "import torch, train\n"
        "from nanorove.config import load_config\n"
        "torch.set_num_threads(1)\n"
        "for line in sys.stdin:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        code = 1\n"
        "        try:\n"
        "            train.main(*load_config(line.split()))\n"
        "            code = 0\n"
        "        finally:\n"
        "            sys.stdout.flush()\n"
        "            os._exit(code)\n"
        "    print('pid', pid, file=sys.stderr, flush=True)\n"
        "    print('status', os.waitpid(pid, 0)[1], file=sys.stderr, flush=True)\n"
    )
    global SERVER
    if SERVER is None or SERVER[0] != os.getcwd():
        env = os.environ | {"PYTHONPATH": str(REPO)}
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip
        SERVER = os.getcwd(), process
    process = SERVER[1]
    process.stdin.write(" ".join(argv) + "\n")
    process.stdin.flush()

    def answer(word: str) -> int:
        lines = []
        while not (lines and lines[-1].startswith(f"{word} ")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        return int(lines[-1].split()[1])

    pid = answer("pid")
    if kill_after is not None:
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):  # it was done already
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(answer("status"))


SERVER: tuple[str, subprocess.Popen] | None = None


@pytest.fixture(autouse=True)
def end_server():
    global SERVER
    yield
    if SERVER is not None:
        SERVER[1].stdin.close()
        SERVER[1].wait()
        SERVER = None


def killed_at_random(path: str, kills: int, seed: int) -> int:
    """Train `tiny` with SIGKILLs at random moments until it is done; gives back how many landed."""
    rng = random.Random(seed)
    start = time.monotonic()
    assert forked(None, path, *BUSY, "--run_name", "unbroken") == 0
    seconds = time.monotonic() - start
    landed = tries = 0
    while landed < kills and tries < 3 * kills:
        tries += 1
        # each try begins where the one before it was killed; when it gets through, it starts over
        code = forked(rng.uniform(0, seconds * 0.6), path, *BUSY, "--resume")
        assert code in (0, -signal.SIGKILL)
        landed += code != 0
        for step_dir in Path("runs/tiny/ckpt").glob("step_????????"):
            checkpoint.check_files(step_dir, checkpoint.read_meta(step_dir))
        if code == 0:
            assert_unbroken()
            shutil.rmtree("runs/tiny")
    assert forked(None, path, *BUSY, "--resume") == 0
    assert_unbroken()
    return landed


def assert_unbroken() -> None:
    assert hashes("tiny", 40) == hashes("unbroken", 40) and len(hashes("tiny", 40)) == 2
    assert comparable("tiny") == comparable("unbroken")  # nothing lost and nothing twice
    assert not list(Path("runs/tiny/ckpt").glob("*.tmp")) + list(
        Path("runs/tiny/ckpt").glob("*.old")
    )
    for pointer in ("last", "best"):
        texts = [Path(f"runs/{name}/ckpt/{pointer}").read_text() for name in ("tiny", "unbroken")]
        assert texts[0] == texts[1]


def test_killed_3_times(tiny_toml):
    assert killed_at_random(tiny_toml(), kills=3, seed=1) == 3


@pytest.mark.slow
def test_killed_20_times(tiny_toml):
    assert killed_at_random(tiny_toml(), kills=20, seed=2) == 20


@pytest.mark.parametrize("where", ["the log", "its meta", "best", "the pruning"])
def test_killed_around_an_evaluation(tiny_toml, monkeypatch, where):
    """Between the record, the checkpoint's meta and the pointers: each step once in the end."""
    run(tiny_toml(), "--run_name", "unbroken")

    class Killed(BaseException):
        pass

    def die(*args: object, **kwargs: object) -> None:
        raise Killed

    name = {"its meta": "add_to_meta", "best": "mark_best", "the pruning": "prune_checkpoints"}
    with monkeypatch.context() as patch:
        if where == "the log":
            write = train.RunLog.write
            patch.setattr(
                train.RunLog, "write",
                lambda self, r: (write(self, r), "val/loss" in r and r["step"] == 3 and die()),
            )  # fmt: skip
        else:
            original = getattr(checkpoint, name[where])
            calls = []

            def at_step_3(*args: object, **kwargs: object) -> None:
                calls.append(1)
                die() if len(calls) == 1 else original(*args, **kwargs)

            patch.setattr(checkpoint, name[where], at_step_3)
        with pytest.raises(Killed):
            run("tiny.toml")
    run("tiny.toml", "--resume")
    assert hashes("tiny") == hashes("unbroken") and comparable("tiny") == comparable("unbroken")
    metas = [json.loads(Path(f"runs/{n}/ckpt/step_00000006/meta.json").read_text())
             for n in ("tiny", "unbroken")]  # fmt: skip
    for key in ("val_loss", "best_val_loss", "best_step"):
        assert metas[0][key] == metas[1][key]


def test_best_does_not_point_into_a_future_that_never_was(tiny_toml):
    """Step 6 was the best, its folder is damaged: best is that of step 3 again."""
    run(tiny_toml())
    assert Path("runs/tiny/ckpt/best").read_text() == "step_00000006\n"
    Path("runs/tiny/ckpt/step_00000006/model.safetensors").write_bytes(b"")
    with dies("step", 4):
        run("tiny.toml", "--resume")
    assert Path("runs/tiny/ckpt/best").read_text() == "step_00000003\n"


@needs_proc
@pytest.mark.slow
def test_torchrun_restarts_killed_workers(tiny_toml):
    """SIGKILL of one worker or of all, at random moments: with --max-restarts the run goes on by
    itself, without --resume, and ends bit-equal to the unbroken one."""
    done = torchrun(2, tiny_toml(), *BUSY, "--run_name", "unbroken")
    assert done.returncode == 0, done.stderr
    rng = random.Random(3)
    agent = start_torchrun(2, ["--standalone", "--max-restarts=20"], "tiny.toml", *BUSY)
    for kill in range(5):
        # each life makes some progress
        wait_for(lambda least=6 * (kill + 1): max(r["step"] for r in records()) >= least, agent)
        time.sleep(rng.uniform(0, 0.2))
        pids = workers(agent.pid)
        for pid in pids if kill % 2 else [rng.choice(pids)]:
            os.kill(pid, signal.SIGKILL)
    assert agent.wait(200) == 0, Path("torchrun.log").read_text()
    assert len([r for r in records() if "event" in r]) >= 3
    assert_unbroken()


# -----------------------------------------------------------------------------
# a full disk


@pytest.mark.slow
def test_full_disk(tiny_toml, tmp_path):
    """A real one, of 1 MiB: the run stops with one line, the checkpoints before are whole, and with
    room again it goes on to the same end."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        argv = [tiny_toml(), *BUSY, "--train.keep_checkpoints", "100"]
        with pytest.raises(UserError, match=r"not saved .*(No space left|os error 28)") as error:
            run(*argv)
        assert "\n" not in str(error.value)
        whole = sorted(Path("runs/tiny/ckpt").glob("step_????????"))
        assert len(whole) >= 2
        assert not list(Path("runs/tiny/ckpt").glob("*.tmp"))  # half a checkpoint holds no space
        for step_dir in whole:
            checkpoint.check_files(step_dir, checkpoint.read_meta(step_dir))
        assert Path("runs/tiny/ckpt/last").read_text() == f"{whole[-1].name}\n"
        shutil.rmtree(whole[0])
        run(*argv[:-1], "3", "--resume")
        shutil.copytree("runs/tiny", tmp_path / "kept")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    shutil.copytree(tmp_path / "kept", folder / "tiny")
    run("tiny.toml", *BUSY, "--train.keep_checkpoints", "3", "--run_name", "unbroken")
    assert_unbroken()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_full_disk_under_the_record(tiny_toml, monkeypatch):
    """One line for it too, and the checkpoint before is there to go on from."""
    run(tiny_toml(), "--run_name", "unbroken")
    with monkeypatch.context() as patch:
        start = train.RunLog.__init__

        def start_full(self, *args: object) -> None:
            start(self, *args)
            write = self.write

            def full_at_5(record: dict) -> None:
                if record["step"] == 5:
                    self.file = open("/dev/full", "w")
                write(record)

            self.write = full_at_5

        patch.setattr(train.RunLog, "__init__", start_full)
        with pytest.raises(UserError, match="runs/tiny: No space left on device; make room"):
            run("tiny.toml")
    run("tiny.toml", "--resume")
    assert hashes("tiny") == hashes("unbroken") and comparable("tiny") == comparable("unbroken")


# -----------------------------------------------------------------------------
# two machines


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: (names, address of the first)."""
    tag = f"{os.getpid() % 10000}"
    hosts = [f"rove{tag}a", f"rove{tag}b"]
    try:
        ip("netns", "add", hosts[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"`ip netns` cannot be used here: {error}")
    try:
        ip("netns", "add", hosts[1])
        ip("link", "add", f"v{tag}a", "netns", hosts[0], "type", "veth",
           "peer", "name", f"v{tag}b", "netns", hosts[1])  # fmt: skip
        for host, end, address in zip(hosts, "ab", ("10.99.0.1", "10.99.0.2"), strict=True):
            ip("-n", host, "address", "add", f"{address}/24", "dev", f"v{tag}{end}")
            ip("-n", host, "link", "set", f"v{tag}{end}", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield hosts, f"v{tag}"
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


@pytest.mark.slow
def test_two_hosts(tiny_toml, two_hosts):
    """They train as one; the second dies, comes back, and the run ends as one process would."""
    hosts, cable = two_hosts
    run(tiny_toml(), *BUSY, "--run_name", "unbroken")

    def start(number: int) -> subprocess.Popen:
        """The command of docs/training.md."""
        command = [
            "ip", "netns", "exec", hosts[number], sys.executable, "-m", "torch.distributed.run",
            "--nnodes=2", "--nproc_per_node=1", "--max-restarts=5", "--rdzv_backend=c10d",
            "--rdzv_endpoint=10.99.0.1:29500", "--rdzv_id=1",
            # there is no DNS here, so they must be told who is who
            f"--rdzv_conf=is_host={1 - number}", f"--local_addr=10.99.0.{number + 1}",
            str(REPO / "train.py"), "tiny.toml", *BUSY, "--resume",
        ]  # fmt: skip
        env = {"GLOO_SOCKET_IFNAME": f"{cable}{'ab'[number]}"}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or who comes back waits for ever
        with open(f"host{number}.log", "a") as log:
            return subprocess.Popen(
                command, env=os.environ | env, stdout=log, stderr=log, start_new_session=True
            )

    first, second = start(0), start(1)
    try:
        wait_for(lambda: any(r["step"] > 8 for r in records()), first)
        pids = subprocess.run(
            ["ip", "netns", "pids", hosts[1]], check=True, capture_output=True, text=True
        ).stdout.split()
        assert len(pids) >= 2  # torchrun and a worker
        for pid in pids:  # the machine is gone, all at once
            os.kill(int(pid), signal.SIGKILL)
        second.wait(30)
        second = start(1)
        assert first.wait(300) == 0, Path("host0.log").read_text()
        assert second.wait(60) == 0, Path("host1.log").read_text()
    finally:
        for process in (first, second):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert len([r for r in records() if "event" in r]) >= 1
    assert curve("tiny", "train/loss") == pytest.approx(curve("unbroken", "train/loss"), rel=1e-3)
    assert_close(weights("tiny", 40), weights("unbroken", 40), atol=2e-3)


def test_workers_started_again_go_on_by_themselves(tiny_toml, monkeypatch):
    """torchrun says so in the environment; a first start without --resume is refused as ever, and
    so is a second one by a torchrun whose first start was refused."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    run(tiny_toml(), "--run_name", "unbroken")
    with dies("step", 4):
        run("tiny.toml")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(UserError, match="--resume"):
        train.main(*load_config(["tiny.toml"]))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "another")
        with pytest.raises(UserError, match="--resume"):
            train.main(*load_config(["tiny.toml"]))
    with monkeypatch.context() as patch:  # --rdzv_id=1 is the same each time, the process is not
        patch.setattr(os, "getppid", lambda: 7)
        with pytest.raises(UserError, match="--resume"):
            train.main(*load_config(["tiny.toml"]))
    run("tiny.toml")
    assert hashes("tiny") == hashes("unbroken")


def test_one_may_go_back_on_purpose(tiny_toml, capfd):
    """By the name of an earlier folder in ckpt/last; the newer ones are not taken for better, and
    not for later ones of the run that goes on."""
    argv = ["--train.checkpoint_interval", "2", "--train.keep_checkpoints", "5"]
    run(tiny_toml(), *argv)
    before = hashes("tiny")
    Path("runs/tiny/ckpt/last").write_text("step_00000002\n")
    with dies("step", 2):
        run("tiny.toml", *argv, "--resume")
    assert [p.name for p in Path("runs/tiny/ckpt").glob("step_*")] == ["step_00000002"]
    removed = "step_00000003, step_00000004, step_00000006"
    assert f"resume: removed what lay beyond: {removed}\n" in capfd.readouterr().out
    run("tiny.toml", *argv, "--resume")
    assert [r["step"] for r in records() if "event" in r] == [2, 2]
    assert hashes("tiny") == before


def test_a_run_has_one_training_at_a_time(tiny_toml, monkeypatch):
    """A second one is refused and touches nothing; a process that the first one started does not
    keep the lock when the first one is dead."""
    program = (
        "import contextlib, os, pathlib, subprocess, sys\n"
        "from nanorove.guards import lock_run\n"
        "stack = contextlib.ExitStack()\n"
        "lock_run(pathlib.Path('runs/tiny'), stack)\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPO)}, text=True,
    )  # fmt: skip
    child = int(process.stdout.readline())
    try:
        with pytest.raises(UserError, match="runs/tiny is being trained by another process"):
            run(tiny_toml())
        assert [path.name for path in Path("runs/tiny").iterdir()] == ["lock"]
        process.kill()
        process.wait()
        os.kill(child, 0)  # still there
        run("tiny.toml")
        run("tiny.toml", "--resume")  # the end of a training gives the lock back
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_a_signal_during_the_start_is_not_lost(tiny_toml, monkeypatch):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        load_manifest = train.load_manifest

        def signalled(path: str) -> dict:
            signal.raise_signal(signal.SIGUSR1)
            return load_manifest(path)

        monkeypatch.setattr(train, "load_manifest", signalled)
        assert run(tiny_toml())["step"] == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert Path("runs/tiny/PREEMPTED").read_text() == "stopped at step 1 by SIGUSR1\n"
