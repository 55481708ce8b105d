"""Token shards in the llm.c / modded-nanogpt format, and the manifest that makes them a data set.

A shard is 256 little-endian int32 (magic 20240520, version 1, token count, zeros), then the
tokens as little-endian uint16: 1024 + 2 * count bytes, no more and no less.

`python -m data.shards verify|show|docs DIR` looks into a folder of them (data/inspection.py).
"""

import errno
import hashlib
import json
import os
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanorove.errors import UserError
from nanorove.files import fsync_dir

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
MAX_TOKENS = 2**31 - 1  # the count is an int32
MAX_VOCAB_SIZE = 2**16  # the tokens are uint16

MANIFEST = "manifest.json"
MANIFEST_FORMAT = "nanorove-shards"
MANIFEST_VERSION = 1


def write_shard(
    path: str | Path, tokens: Sequence[int] | np.ndarray, vocab_size: int = MAX_VOCAB_SIZE
) -> str:
    """Write 1-D `tokens` to `path` atomically; returns the sha256 of the file.

    Raises UserError, before a byte is written, for an id outside 0..vocab_size-1 (16 bits would
    wrap without a word), for no tokens or too many, and when the disk is full.
    """
    check_vocab_size(vocab_size)
    tokens = np.asarray(tokens)
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise UserError(f"{path}: a shard holds 1 to {MAX_TOKENS:,} tokens, not {len(tokens):,}")
    check_ids(tokens, vocab_size, path)
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    return write_atomic(Path(path), [header, np.ascontiguousarray(tokens, dtype="<u2")])


def read_shard(path: str | Path) -> np.memmap:
    """The tokens of a shard: a read-only memory map, shape (count,), little-endian uint16.

    Raises UserError that names the file and what is wrong with it. Checks header and size; the
    sha256 is in the manifest.
    """
    count = check_shard(path)
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def check_shard(path: str | Path) -> int:
    """Check a shard's header against the size of its file; returns its number of tokens."""
    path = Path(path)
    fix = "prepare or download it again"
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {fix}") from None
    if len(head) < HEADER_BYTES:
        raise UserError(f"{path}: {size} bytes, shorter than the {HEADER_BYTES}-byte header; {fix}")
    magic, version, count = (int(v) for v in np.frombuffer(head, dtype="<i4")[:3])
    if magic != MAGIC:
        raise UserError(
            f"{path}: magic {magic} at byte 0 instead of {MAGIC}, not a token shard; {fix}"
        )
    if version != VERSION:
        raise UserError(
            f"{path}: version {version} at byte 4 instead of {VERSION} (uint16 tokens); {fix}"
        )
    if count < 1:
        raise UserError(
            f"{path}: the header says {count} tokens at byte 8, a shard holds at least 1; {fix}"
        )
    if size != HEADER_BYTES + 2 * count:
        raise UserError(
            f"{path}: {size:,} bytes, but its header says {count:,} tokens at byte 8, which take "
            f"{HEADER_BYTES + 2 * count:,} bytes; {fix}"
        )
    return count


def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError for a vocabulary that uint16 cannot hold."""
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(
            f"a vocabulary of {vocab_size:,} does not fit the uint16 tokens of a shard; "
            f"use one of at most {MAX_VOCAB_SIZE:,}"
        )


def check_ids(ids: np.ndarray, vocab_size: int, where: str | Path) -> None:
    """Raise UserError for an id outside 0..vocab_size-1; `where` goes into the message."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise UserError(
            f"{where}: token id {wrong} is outside the vocabulary (0..{vocab_size - 1}); "
            "this is the work of another tokenizer"
        )


def count_ids(tokens: np.ndarray) -> np.ndarray:
    """How often each id stands in uint16 `tokens`: (65536,) int64. Takes little memory."""
    counts = np.zeros(MAX_VOCAB_SIZE, dtype=np.int64)
    for i in range(0, len(tokens), 2**20):
        counts += np.bincount(tokens[i : i + 2**20], minlength=MAX_VOCAB_SIZE)
    return counts


def load_manifest(data_dir: str | Path) -> dict:
    """The manifest of a data folder, every shard it lists checked (header and size only).

    Raises UserError for a folder without a manifest, a manifest of another format, and a shard
    that is missing, broken or not the one listed.
    """
    path = Path(data_dir) / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{data_dir}: no {MANIFEST}, so not a (finished) data folder; make one with "
            f"`python -m data.stdlib --out {data_dir}` (or data.fineweb_edu, data.text)"
        )
    try:
        manifest = read_json(path)
        found = manifest["format"], manifest["version"]
        if found == (MANIFEST_FORMAT, MANIFEST_VERSION):
            check_unedited(path, manifest)
            check_vocab_size(manifest["tokenizer"]["vocab_size"])
            for shard in manifest["shards"]:
                file = Path(data_dir) / shard["file"]
                if shard["split"] not in ("val", "train"):
                    raise UserError(f"{path}: split {shard['split']!r} is neither val nor train")
                if (count := check_shard(file)) != shard["tokens"]:
                    raise UserError(
                        f"{file}: {count:,} tokens, but {MANIFEST} says {shard['tokens']:,}; "
                        "shards of two data sets are mixed, prepare the folder again"
                    )
            return manifest
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: not a manifest of ours ({type(error).__name__}: {error}); remove it and "
            "prepare the folder again"
        ) from None
    raise UserError(
        f"{path}: format {found[0]!r} version {found[1]!r}, this code reads "
        f"{MANIFEST_FORMAT!r} version {MANIFEST_VERSION}; prepare the folder again"
    )


def save_manifest(data_dir: str | Path, manifest: dict) -> dict:
    """Write manifest.json atomically, with a checksum over the rest; returns what was written.
    Written last, it says that the folder is complete."""
    manifest = manifest | {"checksum": checksum(manifest)}
    save_json(Path(data_dir) / MANIFEST, manifest)
    return manifest


def checksum(manifest: dict) -> str:
    """Sha256 of a manifest's content, whatever its layout, but for the checksum itself."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def check_unedited(path: Path, manifest: dict) -> None:
    """Raise UserError if a manifest is not what save_manifest wrote."""
    if manifest.get("checksum") != checksum(manifest):
        raise UserError(
            f"{path}: edited since it was written (its checksum differs); put the original back or "
            "prepare the folder again"
        )


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError if it is none."""
    return json.loads(path.read_text(encoding="utf-8"))


def save_json(path: Path, value: dict) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomic(path, [text.encode()])


def shard_paths(data_dir: str | Path, manifest: dict, split: str) -> list[Path]:
    """Paths of the shards of `split` ("val" or "train"), in order of the token stream."""
    paths = [Path(data_dir) / s["file"] for s in manifest["shards"] if s["split"] == split]
    if not paths:
        raise UserError(f"{data_dir}: {MANIFEST} lists no {split} shard; prepare it again")
    return paths


class TokenStream:
    """The shards of one split as one array of tokens, memory-mapped."""

    def __init__(self, data_dir: str | Path, manifest: dict, split: str) -> None:
        self.paths = shard_paths(data_dir, manifest, split)
        self.shards = [read_shard(path) for path in self.paths]
        # shard i holds the tokens starts[i] ... starts[i + 1] - 1 of the stream
        self.starts = np.concatenate(([0], np.cumsum([len(s) for s in self.shards])))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start ... start + count - 1 of the stream: (count,) uint16."""
        out = np.empty(count, dtype=np.uint16)
        done, shard = 0, int(np.searchsorted(self.starts, start, side="right")) - 1
        while done < count:
            offset = start + done - self.starts[shard]
            piece = self.shards[shard][offset : offset + count - done]
            out[done : done + len(piece)] = piece
            done, shard = done + len(piece), shard + 1
        return out

    def documents(self, eot: int) -> np.ndarray:
        """Where documents start, and behind them the end of the stream: (documents + 1,) int64.

        The public cut has tokens before the first start of training: the end of a document of
        validation.
        """
        starts = [
            offset + np.flatnonzero(shard == eot)
            for offset, shard in zip(self.starts, self.shards, strict=False)
        ]
        return np.concatenate([*starts, self.starts[-1:]])


def write_atomic(path: Path, parts: list[bytes | np.ndarray]) -> str:
    """Write `parts` to a temporary file beside `path`, sync, rename; returns the sha256.

    A run that is killed or meets a full disk leaves nothing partial under the final name.
    """
    tmp = path.with_name(path.name + ".tmp")
    need = sum(memoryview(part).nbytes for part in parts)
    digest = hashlib.sha256()
    try:
        with tmp.open("wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
        fsync_dir(path.parent)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path.parent).free
            raise UserError(
                f"disk full: {path} needs {need:,} bytes, {free:,} are free in {path.parent}; "
                "make room, then run again to go on"
            ) from None
        raise
    return digest.hexdigest()


if __name__ == "__main__":
    # what looks into folders imports this file, so this file does not import it
    runpy.run_module("data.inspection", run_name="__main__")
