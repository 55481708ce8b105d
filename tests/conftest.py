"""Shared fixtures: a tiny data folder and a tiny config, made without the code under test."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
EOT = 256  # of the byte vocabulary
BYTES_SHA256 = "26cb7ef7431606290ad68bf7fd74400ad604dd9c4c9ef4d4a5e401dbe0a3714b"

# a different number of threads adds floats in a different order; processes that tests start
# inherit the one thread, so that their results can be compared with ours bit for bit
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# torch 2.13.0 does not quote its own path when it calls the linker
needs_inductor = pytest.mark.skipif(
    shutil.which("g++") is None or " " in torch.__file__,
    reason="torch.compile on a CPU needs g++, and a path of torch without spaces",
)

TINY_TOML = """\
run_name = "tiny"
seed = 7

[model]
vocab_size = 257
block_size = 8
n_layer = 2
n_head = 2
n_embd = 16
pos_emb = "rove"
rope_base = 10000.0
yarn_factor = 1.0

[data]
dir = "DATA_DIR"

[train]
total_batch_size = 64
micro_batch_size = 2
max_steps = 6
warmup_steps = 2
learning_rate = 1e-2
min_lr = 1e-3
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
eval_interval = 3
val_tokens = 200
checkpoint_interval = 3
keep_checkpoints = 2
log_interval = 1
compile = false
attn_backend = "sdpa"
schedule = "cosine"
dtype = "fp32"
deterministic = false
residual = "fp32"
loss_chunk = 0
activation_checkpointing = false
hellaswag_interval = 0

[log]
wandb = "disabled"
project = "nanorove"
"""


def write_data_dir(
    folder: Path, train: list[list[int]], val: list[list[int]], vocab_size: int = 257
) -> Path:
    """A data folder with these shards, byte by byte as the format says, and its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for split, parts in (("val", val), ("train", train)):
        for i, tokens in enumerate(parts):
            name = f"tiny_{split}_{i + (split == 'train'):06d}.bin"
            header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
            body = header + struct.pack(f"<{len(tokens)}H", *tokens)
            (folder / name).write_bytes(body)
            shards.append(
                {"file": name, "split": split, "tokens": len(tokens),
                 "documents": tokens.count(EOT), "sha256": hashlib.sha256(body).hexdigest()}
            )  # fmt: skip
    manifest = {
        "format": "nanorove-shards",
        "version": 1,
        "name": "tiny",
        "source": {"kind": "made by a test"},
        "tokenizer": {
            "name": "bytes",
            "vocab_size": vocab_size,
            "eot": EOT,
            "sha256": BYTES_SHA256,
        },
        "delimiter": "leading end-of-text",
        "settings": {"shard_tokens": 1000, "limit_tokens": None, "val_tokens": 300},
        "versions": {},
        "documents": {"val": 1, "train": 1, "empty": 0, "duplicate": 0},
        "text_bytes": {"val": 1, "train": 1},
        "shards": shards,
    }
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    return folder


def with_checksum(manifest: dict) -> dict:
    """A manifest with the checksum over all the rest, which an edited one has not."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return rest | {"checksum": digest}


def toy_tokens(n: int, seed: int) -> list[int]:
    """Documents of counted letters: a few steps of training are enough to get better at them."""
    rng = np.random.RandomState(seed)
    tokens: list[int] = []
    while len(tokens) < n:
        start, length = rng.randint(0, 16), rng.randint(5, 40)
        tokens += [EOT] + [97 + (start + i) % 16 for i in range(length)]
    return tokens[:n]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three training shards of uneven length, 305 validation tokens, byte vocabulary."""
    folder = tmp_path_factory.mktemp("shards") / "data"
    return write_data_dir(
        folder,
        train=[toy_tokens(1003, 1), toy_tokens(500, 2), toy_tokens(97, 3)],
        val=[toy_tokens(305, 4)],
    )


@pytest.fixture
def tiny_toml(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """In a working directory of its own: write a complete tiny config file, give back its path.

    `tiny_toml(("n_layer = 2", "n_layer = 3"), ...)` replaces lines first.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def write(*edits: tuple[str, str], name: str = "tiny.toml") -> str:
        text = TINY_TOML.replace("DATA_DIR", str(data_dir))
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        Path(name).write_text(text)
        return name

    return write
