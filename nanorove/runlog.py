"""The record of a run: metrics.jsonl.

One JSON object a line, each with "step" (optimizer steps done). Plots, reports and wandb (see
wandb_mirror.py) read it; nobody parses console output.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from nanorove import wandb_mirror
from nanorove.config import Config, config_to_toml
from nanorove.distributed import DistInfo
from nanorove.errors import UserError
from nanorove.files import strict, write_text_atomic

PREEMPTED = "PREEMPTED"  # in the run folder: stopped by a signal, --resume goes on


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    packages = ("numpy", "tiktoken", "safetensors")
    found = {name: importlib.metadata.version(name) for name in packages}
    # torch's own word has the build in it (+cpu, +cu130), which its package's version may lack
    return {"python": platform.python_version(), "torch": torch.__version__, **found}


def git_state() -> dict[str, Any]:
    """{"git_revision": hash or None, "git_dirty": bool or None} of the code that runs."""
    root = Path(__file__).parent.parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True)
        except FileNotFoundError:
            return None  # no git on this machine
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        "git_revision": git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
    }


def launch_id() -> str | None:
    """Of the torchrun that started this process: its run id, which may be the same each time, and
    its process id. None without torchrun."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return run_id and f"{run_id} {os.getppid()}"


def is_restart(run_dir: Path) -> bool:
    """Was this process started again by the torchrun that the run's meta.json is of?"""
    path = run_dir / "meta.json"
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0 or not path.is_file():
        return False
    launch = json.loads(path.read_text(encoding="utf-8")).get("launch")
    return launch is not None and launch == launch_id()


def run_facts(info: DistInfo, n_params: int) -> dict[str, Any]:
    """What was run, on what: for the run's meta.json."""
    device = torch.cuda.get_device_name() if info.device.type == "cuda" else platform.machine()
    return {
        **git_state(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "world_size": info.world_size,
        "device": f"{info.device.type}: {device}",
        "params": n_params,
        "arguments": sys.argv,
        "launch": launch_id(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process ever held: of the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes, Linux KiB


def read_records(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl up to the first unreadable one, which must lie beyond `step`.

    Raises UserError, with file and line, where it does not.
    """
    content = path.read_bytes() if path.exists() else b""
    records: list[dict[str, Any]] = []
    # a kill or a full disk may have cut the last line
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            record["step"] + 0
        except (ValueError, KeyError, TypeError):
            if not records or records[-1]["step"] < step:
                raise UserError(
                    f"{path}, line {number}: unreadable, and the checkpoint is at step {step}:"
                    " mend or delete the line, then --resume"
                ) from None
            print(f"resume: {path}: line {number} is unreadable; it and what follows is dropped")
            break
        records.append(record)
    return records


class RunLog:
    """Rank 0's log. A resumed run forgets what was logged beyond its checkpoint.

    resume: meta of the checkpoint that the run goes on from, None for a run from its start.
    """

    def __init__(
        self, config: Config, facts: dict[str, Any], resume: dict[str, Any] | None
    ) -> None:
        run_dir = config.run_dir
        self.path = run_dir / "metrics.jsonl"
        run_dir.mkdir(parents=True, exist_ok=True)
        old = [] if resume is None else read_records(self.path, resume["step"])
        write_text_atomic(run_dir / "config.toml", config_to_toml(config))
        write_text_atomic(run_dir / "meta.json", json.dumps(facts, indent=2) + "\n")
        (run_dir / PREEMPTED).unlink(missing_ok=True)
        kept = []
        if resume is not None:
            # a checkpoint without val_loss was made before the evaluation of its step, which
            # comes again
            again = resume["step"] + (resume["val_loss"] is not None)
            for record in old:
                if record["step"] < again or (
                    record["step"] == resume["step"] and "val/loss" not in record
                ):
                    kept.append(record)
            kept.append({"step": resume["step"], "event": "resume"})
        write_text_atomic(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.wandb_id: str | None = (resume or {}).get("wandb_id")
        self.wandb = None
        if config.log.wandb == "disabled":
            print("wandb: disabled")
        else:
            self.wandb_id = self.wandb_id or secrets.token_hex(4)
            self.wandb = wandb_mirror.start(run_dir, self.wandb_id)

    def write(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl; it must have "step". A value that is no number is null."""
        self.file.write(json.dumps(strict(record), allow_nan=False) + "\n")
        self.file.flush()

    def sync(self) -> None:
        """What was written survives a power cut: before a checkpoint that builds on it."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when it was written to
            self.file.close()
        if self.wandb:
            wandb_mirror.finish(self.wandb)
