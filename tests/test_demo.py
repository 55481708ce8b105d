"""The demo's data and configs, as the README says them, learn something. Minutes: slow."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
STEPS = 200  # of the 512: enough to leave counting behind


def run(cwd: Path, *args: str) -> None:
    subprocess.run([sys.executable, *args], cwd=cwd, check=True, timeout=3000)


def tokens(path: Path) -> np.ndarray:
    return np.fromfile(path, "<u2", offset=1024).astype(np.int64)  # 256 int32 of header


def bigram_loss(data: Path, val_tokens: int) -> float:
    """Nats per byte of the best model that sees one byte back: counts of the same shards."""
    counts = np.full((257, 257), 0.1)
    for path in sorted(data.glob("*_train_*.bin")):
        train = tokens(path)
        pairs = np.bincount(train[:-1] * 257 + train[1:], minlength=257 * 257)
        counts += pairs.reshape(257, 257)
    log_prob = np.log(counts / counts.sum(1, keepdims=True))
    val = tokens(data / "stdlib_val_000000.bin")[: val_tokens + 1]
    return float(-log_prob[val[:-1], val[1:]].mean())


@pytest.mark.slow
def test_demo_configs_learn_more_than_a_bigram_model(tmp_path: Path) -> None:
    data = tmp_path / "data"
    run(ROOT, "-m", "data.stdlib", "--out", str(data), "--workers", "2")
    bigram = bigram_loss(data, 131072)
    assert 2.0 < bigram < 3.0  # the reference itself is sane
    for arm in ("rope", "rove"):
        (tmp_path / arm).mkdir()
        # runs/ is made where the command is started
        run(
            tmp_path / arm,
            str(ROOT / "train.py"),
            str(ROOT / f"configs/demo_{arm}.toml"),
            *("--data.dir", str(data), "--train.max_steps", str(STEPS)),
        )
        metrics = tmp_path / arm / "runs" / f"demo_{arm}" / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        final = [r["val/loss"] for r in records if "val/loss" in r][-1]
        assert final < bigram - 0.1, (arm, final, bigram)
