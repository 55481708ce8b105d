"""Makes interrupted.png: a run that was stopped and killed again and again, and one that was not.

    python docs/figures/interrupted.py      (from the repository, after python -m data.stdlib)

Both are configs/demo_rove.toml with a smaller model; a few minutes on 2 cores. The runs are left in
runs/figure/.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
from nanorove.results import read_metrics  # noqa: E402

STEPS = 300
# (after that many logged steps, by); the checkpoints are 40 steps apart
STOPS = [(55, "SIGKILL"), (104, "SIGTERM"), (150, "SIGKILL"), (215, "SIGUSR1"), (236, "SIGKILL")]
SETTINGS = {
    "train.max_steps": STEPS, "train.checkpoint_interval": 40, "train.eval_interval": 40,
    "train.log_interval": 1, "train.total_batch_size": 2048, "model.n_layer": 2,
    "model.n_embd": 64, "model.block_size": 128, "train.val_tokens": 16384,
}  # fmt: skip


def start(name: str) -> subprocess.Popen:
    settings = [f"--{key}={value}" for key, value in SETTINGS.items()]
    command = [sys.executable, "train.py", "configs/demo_rove.toml", *settings,
               f"--run_name=figure/{name}", *sys.argv[1:], "--resume"]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.DEVNULL)


def losses(name: str) -> dict[int, float]:
    path = REPO / "runs" / "figure" / name / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    return {r["step"]: r["train/loss"] for r in records if "train/loss" in r}


def main() -> None:
    assert start("unbroken").wait() == 0
    stops, lost = [], []
    for after, name in STOPS:
        process = start("interrupted")
        while max(losses("interrupted"), default=0) < after and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(getattr(signal, name))
        process.wait()
        found = losses("interrupted")
        stops.append((max(found), name))
        lost.append(found)
    assert start("interrupted").wait() == 0
    unbroken, interrupted = losses("unbroken"), losses("interrupted")
    assert list(unbroken) == list(interrupted) == list(range(1, STEPS + 1))

    lines = (REPO / "runs/figure/interrupted/metrics.jsonl").read_text().splitlines()
    marks = [r["step"] for r in map(json.loads, lines) if "event" in r]  # where it went on

    fig, axes = plt.subplots(2, 1, figsize=(7, 4.6), height_ratios=[3, 1], sharex=True)
    axes[0].plot(unbroken.keys(), unbroken.values(), lw=4, color="#a9c7e8", label="unbroken")
    axes[0].plot(interrupted.keys(), interrupted.values(), lw=0.9, color="#b03a2e",
                 label="stopped and resumed")  # fmt: skip
    for (step, name), found, back in zip(stops, lost, marks, strict=True):
        axes[0].axvline(step, color="#888888", lw=0.8, ls=":")
        axes[0].text(step + 2, 5.0, name, rotation=90, fontsize=7, color="#555555", va="center")
        for axis in axes:  # made twice: between the checkpoint and the kill
            axis.axvspan(back, step, color="#f4d9a6", alpha=0.6, lw=0)
        assert all(found[s] == unbroken[s] for s in found)  # also what was forgotten was the same
    axes[0].set_ylabel("training loss (nats per token)")
    axes[0].legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.7))
    apart = np.array([interrupted[s] - unbroken[s] for s in unbroken])
    axes[1].plot(list(unbroken), apart, color="#b03a2e", lw=1)
    axes[1].set_ylim(-1e-7, 1e-7)
    axes[1].set_ylabel("difference")
    axes[1].set_xlabel("optimizer step (shaded: lost by a SIGKILL, and made again)")
    axes[1].text(5, 0.4e-7, f"largest: {abs(apart).max():g}", fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(REPO / "docs" / "figures" / "interrupted.png", dpi=110)
    print(stops, "largest difference", abs(apart).max())


if __name__ == "__main__":
    main()
