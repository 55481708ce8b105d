"""Run commands, so many at a time, and take them down together.

Every job is what a user would type. Ctrl-C or SIGTERM is passed on to all of them, once, and they
get the time to save. If this process dies, even by SIGKILL, its jobs get SIGTERM too (Linux), and
until the last of them has ended nobody else gets their lock.
"""

import contextlib
import ctypes
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from nanorove.errors import UserError
from nanorove.guards import StopSignal

POLL_S = 0.1
TAIL = 20  # lines of a failed job's log for the screen
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Job:
    """`python <arguments>`; with several GPUs under torchrun, if it is made for that."""

    name: str
    arguments: list[str]
    torchrun: bool = False
    prepare: Callable[[], Any] = lambda: None
    """Called just before it starts; a UserError keeps it from that."""
    finish: Callable[[Any], None] = lambda prepared: None
    """Called after exit code 0 with what `prepare` gave; raises UserError if all is not well."""
    optional: bool = False
    """Its failure is said, and nothing more."""


@dataclass(frozen=True)
class Slots:
    """How many jobs run at a time; GPUs or CPU cores are shared evenly among them."""

    count: int
    gpus: list[str]
    """As CUDA_VISIBLE_DEVICES names them; empty on a CPU."""

    @property
    def processes(self) -> int:
        """Of one job under torchrun."""
        return max(1, len(self.gpus) // self.count)

    @property
    def threads(self) -> int:
        """Of a job on a CPU."""
        return int(self.environment(0).get("OMP_NUM_THREADS", torch.get_num_threads()))

    def command(self, job: Job) -> list[str]:
        """The job's command line behind `python`."""
        if not (job.torchrun and self.gpus):
            return job.arguments
        # the workers may take more than torchrun's 30 s to save when they are told to stop
        options = [f"--nproc_per_node={self.processes}", "--shutdown-timeout=300"]
        return ["-m", "torch.distributed.run", "--standalone", *options, *job.arguments]

    def environment(self, slot: int) -> dict[str, str]:
        """What a job in this slot finds in its environment besides ours."""
        if self.gpus:
            mine = self.gpus[slot * self.processes : (slot + 1) * self.processes]
            return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
        if self.count == 1 or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, cpu_cores() // self.count))}

    def shown(self, job: Job, slot: int = 0) -> str:
        """What to type for this job."""
        environment = self.environment(slot) if self.count > 1 else {}  # alone it has everything
        settings = [f"{name}={value}" for name, value in environment.items()]
        return " ".join([*settings, "python", shlex.join(self.command(job))])

    def __str__(self) -> str:
        share = f"{self.processes} of {len(self.gpus)} GPUs" if self.gpus else "CPU"
        if not self.gpus and "OMP_NUM_THREADS" in (env := {**os.environ, **self.environment(0)}):
            share += f", {env['OMP_NUM_THREADS']} threads"
        return f"{self.count} job{'s' * (self.count > 1)} at a time, each on {share}"


def make_slots(count: int, gpus: list[str]) -> Slots:
    """Raises UserError for GPUs that cannot be shared evenly."""
    if count < 1:
        raise UserError(f"slots {count}: at least 1")
    if gpus and len(gpus) % count:
        fitting = ", ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise UserError(f"slots {count}: {len(gpus)} GPUs cannot be shared evenly; use {fitting}")
    return Slots(count, gpus)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


def cpu_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[int]:
    """Keep other experiments out of `folder`; gives the lock that the jobs must inherit.

    There are two: one is this process's alone, and whoever finds it taken is refused (UserError);
    the jobs inherit the other one, and whoever finds that taken waits for what a killed experiment
    left behind, which is saving.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as mine, (folder / "jobs.lock").open("a") as jobs:
        if not take(mine):
            raise UserError(
                f"{folder}: this experiment is running already; wait for it, or stop it first"
            )
        if not take(jobs):
            print(f"{folder}: waiting for jobs that a killed experiment left behind", flush=True)
            fcntl.flock(jobs, fcntl.LOCK_EX)
        yield jobs.fileno()


def take(file: IO[str]) -> bool:
    """Lock an open file; False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks
        print(f"lock: {file.name}: {error.strerror}; nothing stops a second experiment there")
    return True


def start(command: list[str], environment: dict[str, str], lock: int, log: Path | None):
    """Start `python <command>` so that it ends with us. log: a file instead of the terminal."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    parent = os.getpid()

    def end_with_parent() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

    with contextlib.ExitStack() as stack:
        out = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            out = stack.enter_context(log.open("ab"))
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | environment,
            pass_fds=[lock],
            preexec_fn=end_with_parent,
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )


def run_jobs(jobs: Sequence[Job], slots: Slots, logs: Path, lock: int, stop: StopSignal) -> None:
    """Run all jobs. One slot: on the terminal. More: into logs/<name>.log.

    Raises UserError if one fails and KeyboardInterrupt if `stop` got a signal, in both cases after
    those that ran have saved and ended.
    """
    waiting = list(jobs)
    running: dict[int, tuple[Job, subprocess.Popen, Any, float]] = {}
    failure: str | None = None
    stopping = False

    def log_of(job: Job) -> Path | None:
        return logs / f"{job.name.replace(' ', '-')}.log" if slots.count > 1 else None

    def begin(job: Job, slot: int) -> None:
        prepared = job.prepare()
        log, command = log_of(job), slots.command(job)
        where = f"\n  its output: {log}" if log else ""
        print(f"[run] {job.name}\n$ {slots.shown(job, slot)}{where}", flush=True)
        process = start(command, slots.environment(slot), lock, log)
        running[slot] = job, process, prepared, time.monotonic()

    def end(job: Job, code: int, prepared: Any, seconds: float) -> str | None:
        """What went wrong, if something did."""
        log = log_of(job)
        if code:
            tail = log.read_text(errors="replace").splitlines()[-TAIL:] if log and code else []
            print("".join(f"  {line}\n" for line in tail), end="", file=sys.stderr, flush=True)
            where = f"the end of {log} is above" if log else "its output is above"
            return (
                f"step {job.name!r} failed with exit code {code} ({where}):"
                f" python {shlex.join(slots.command(job))}; mend it and run the experiment again,"
                " which goes on from there"
            )
        try:
            job.finish(prepared)
        except UserError as error:
            return str(error)
        if log:
            print(f"[end] {job.name}: {seconds:,.0f} s", flush=True)
        return None

    try:
        while waiting or running:
            if (stop.name or failure) and not stopping:
                stopping = True
                waiting.clear()
                if running:
                    names = ", ".join(job.name for job, *_ in running.values())
                    with contextlib.suppress(OSError):  # whoever read it may be gone
                        print(f"stopping; waiting for {names} to save", flush=True)
                for _, process, *_ in running.values():
                    process.terminate()
            for slot in range(slots.count):
                if slot not in running and waiting and failure is None and stop.name is None:
                    try:
                        begin(waiting.pop(0), slot)
                    except UserError as error:
                        failure = str(error)
            for slot, (job, process, prepared, since) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[slot]
                found = end(job, process.returncode, prepared, time.monotonic() - since)
                if found and job.optional:
                    print(f"note: {found}", flush=True)
                elif found and not stopping:  # a job that was told to stop has not failed
                    failure = failure or found
            if running:
                time.sleep(POLL_S)
    finally:  # an error of ours: nothing goes on unseen
        for _, process, *_ in running.values():
            process.terminate()
        for _, process, *_ in running.values():
            process.wait()
    if failure:
        raise UserError(failure)
    if stop.name:
        raise KeyboardInterrupt
