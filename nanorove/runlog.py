"""The record of a run: metrics.jsonl, the same to wandb, a line to the console.

metrics.jsonl is the one that counts: one JSON object a line, each with "step" (optimizer steps
done). Plots and reports read it; nobody parses console output.
"""

import importlib.metadata
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from nanorove.config import Config, config_to_dict, config_to_toml
from nanorove.distributed import DistInfo
from nanorove.files import write_text_atomic


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
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process ever held: of the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes, Linux KiB


class RunLog:
    """Rank 0's log. A resumed run (resume_step) forgets what was logged beyond its checkpoint."""

    def __init__(
        self,
        config: Config,
        facts: dict[str, Any],
        resume_step: int | None,
        wandb_id: str | None,
    ) -> None:
        self.path = config.run_dir / "metrics.jsonl"
        config.run_dir.mkdir(parents=True, exist_ok=True)
        write_text_atomic(config.run_dir / "config.toml", config_to_toml(config))
        write_text_atomic(config.run_dir / "meta.json", json.dumps(facts, indent=2) + "\n")
        kept = []
        if resume_step is not None and self.path.exists():
            text = self.path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # a kill or a full disk may have cut the last line
            kept = [r for r in map(json.loads, whole.splitlines()) if r["step"] <= resume_step]
            kept.append({"step": resume_step, "event": "resume"})
        write_text_atomic(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.wandb = _init_wandb(config, facts, wandb_id)
        self.wandb_id: str | None = self.wandb.id if self.wandb else None

    def write(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl; it must have "step"."""
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(record)

    def close(self) -> None:
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def _init_wandb(config: Config, facts: dict[str, Any], wandb_id: str | None) -> Any:
    """A wandb run, or None where it is disabled."""
    mode = config.log.wandb
    if mode == "disabled":
        print("wandb: disabled")
        return None
    import wandb  # not at the top: who does not use it need not have it

    if mode == "online" and not wandb.login(prompt=False, verify=False):
        print(f"wandb: no API key, so it logs offline into {config.run_dir}/wandb"
              " (`wandb login` before the run, or `wandb sync` after it)")  # fmt: skip
        mode = "offline"
    run = wandb.init(
        project=config.log.project,
        name=config.run_name,
        id=wandb_id,
        resume="allow" if wandb_id else None,
        mode=mode,
        dir=str(config.run_dir),
        group=config.data.dir,
        tags=[config.model.pos_emb],
        config={**config_to_dict(config), **facts},
    )
    run.define_metric("*", step_metric="step")  # its own axis: a resume may go back a few steps
    return run
