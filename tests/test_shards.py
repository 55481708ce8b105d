import errno
import hashlib
import json
import os
import struct

import numpy as np
import pytest

from data import shards
from data.shards import load_manifest, read_shard, save_manifest, shard_paths, write_shard
from nanorove.errors import UserError
from tests.conftest import with_checksum


def crafted(tokens, magic=20240520, version=1, count=None) -> bytes:
    """A shard written without numpy and without the code under test."""
    header = struct.pack(
        "<256i", magic, version, len(tokens) if count is None else count, *[0] * 253
    )
    return header + struct.pack(f"<{len(tokens)}H", *tokens)


def test_writes_the_bytes_of_the_format(tmp_path):
    path = tmp_path / "x_train_000001.bin"
    tokens = [50256, 0, 1, 255, 256, 50255]
    digest = write_shard(path, tokens, vocab_size=50257)
    assert path.read_bytes() == crafted(tokens)
    assert digest == hashlib.sha256(crafted(tokens)).hexdigest()
    assert os.listdir(tmp_path) == [path.name]  # no temporary file stays


@pytest.mark.parametrize("dtype", [np.uint16, ">u2", np.int64])
def test_writes_little_endian_from_any_integers(tmp_path, dtype):
    write_shard(tmp_path / "x.bin", np.array([1, 65535], dtype=dtype))
    assert (tmp_path / "x.bin").read_bytes() == crafted([1, 65535])


def test_reads_what_others_write(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(crafted([50256, 7, 65535]))
    tokens = read_shard(path)
    assert tokens.dtype == np.dtype("<u2") and tokens.tolist() == [50256, 7, 65535]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (crafted([1, 2, 3], magic=20240801), "magic 20240801"),  # a Llama-3 shard of llm.c
        (crafted([1, 2, 3], magic=20240522), "magic 20240522"),  # its HellaSwag file
        (b"<!DOCTYPE html>" + b" " * 2000, "magic"),  # nanochat#344: an error page kept as data
        (crafted([1, 2, 3], version=7), "version 7"),
        (crafted([1, 2, 3], count=4), r"1,030 bytes.*4 tokens.*1,032 bytes"),
        (crafted([1, 2, 3], count=2), r"1,030 bytes.*2 tokens.*1,028 bytes"),
        (crafted([1, 2, 3], count=-3), "-3 tokens"),
        (crafted([1, 2, 3])[:-1], "1,029 bytes"),  # cut by one byte
        (crafted([1, 2, 3]) + b"\0", "1,031 bytes"),
        (crafted([]), "0 tokens"),
        (crafted([1])[:1000], "1000 bytes, shorter than the 1024-byte header"),
        (b"", "0 bytes"),
    ],
)
def test_a_broken_shard_is_named_with_its_fault(tmp_path, data, what):
    path = tmp_path / "broken.bin"
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"broken.bin: .*{what}.*; prepare or download"):
        read_shard(path)


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(UserError, match="none.bin: No such file"):
        read_shard(tmp_path / "none.bin")


@pytest.mark.parametrize("wrong", [70000, 65536, 50257, -1])
@pytest.mark.parametrize("kind", [list, np.array])
def test_ids_outside_the_vocabulary_are_refused_before_writing(tmp_path, wrong, kind):
    # transformers#2825: stored in 16 bits they wrap without a word
    with pytest.raises(UserError, match=f"token id {wrong} "):
        write_shard(tmp_path / "x.bin", kind([1, wrong, 2]), vocab_size=50257)
    assert not os.listdir(tmp_path)


def test_the_largest_id_is_allowed(tmp_path):
    write_shard(tmp_path / "x.bin", [50256], vocab_size=50257)
    with pytest.raises(UserError, match="70,000 does not fit"):
        write_shard(tmp_path / "x.bin", [1], vocab_size=70_000)
    with pytest.raises(UserError, match="not 0"):
        write_shard(tmp_path / "x.bin", [])
    assert (tmp_path / "x.bin").read_bytes() == crafted([50256])


def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch):
    # datasets#7502
    path = tmp_path / "x.bin"
    write_shard(path, [1, 2, 3])

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.os, "fsync", full)
    with pytest.raises(UserError, match=r"disk full: .*x.bin needs 1,032 bytes, .* are free in"):
        write_shard(path, [4, 5, 6, 7])
    assert os.listdir(tmp_path) == ["x.bin"] and path.read_bytes() == crafted([1, 2, 3])


@pytest.fixture
def folder(tmp_path):
    """A small data set, made by hand."""
    listed = []
    for file, split, tokens in [
        ("x_val_000000.bin", "val", [256, 1]),
        ("x_train_000001.bin", "train", [256, 2, 3]),
        ("x_train_000002.bin", "train", [4]),
    ]:
        (tmp_path / file).write_bytes(crafted(tokens))
        listed.append({"file": file, "split": split, "tokens": len(tokens)})
    manifest = {
        "format": "nanorove-shards",
        "version": 1,
        "tokenizer": {"vocab_size": 257},
        "shards": listed,
    }
    (tmp_path / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    return tmp_path


def change(folder, **keys) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(with_checksum(json.loads(path.read_text()) | keys)))


def test_manifest_and_paths(folder):
    manifest = load_manifest(folder)
    assert shard_paths(folder, manifest, "val") == [folder / "x_val_000000.bin"]
    assert shard_paths(str(folder), manifest, "train") == [
        folder / "x_train_000001.bin",
        folder / "x_train_000002.bin",
    ]
    saved = save_manifest(folder, manifest)
    assert load_manifest(folder) == saved and {**saved, "checksum": 0} == {
        **manifest,
        "checksum": 0,
    }
    with pytest.raises(UserError, match="no test shard"):
        shard_paths(folder, manifest, "test")


def test_no_manifest_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(UserError) as error:
        load_manifest(tmp_path)
    assert f"{tmp_path}: no manifest.json" in str(error.value)
    assert f"python -m data.stdlib --out {tmp_path}" in str(error.value)
    with pytest.raises(UserError, match="no manifest.json"):
        load_manifest(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"format": "other"}, "format 'other' version 1"),
        ({"version": 2}, "format 'nanorove-shards' version 2"),
        ({"shards": [{"file": "x_val_000000.bin"}]}, "not a manifest of ours"),
        ({"shards": 3}, "not a manifest of ours"),
        ({"tokenizer": {"vocab_size": 128_256}}, "128,256 does not fit"),
    ],
)
def test_another_manifest_is_refused(folder, keys, what):
    change(folder, **keys)
    with pytest.raises(UserError, match=what):
        load_manifest(folder)


@pytest.mark.parametrize("edit", ["value", "remove the checksum", "both", "checksum"])
def test_an_edited_manifest_is_refused(folder, edit):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    if edit in ("value", "both"):
        manifest["tokenizer"]["vocab_size"] = 300
    if edit in ("remove the checksum", "both"):
        del manifest["checksum"]
    if edit == "checksum":
        manifest["checksum"] = None
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="manifest.json: edited since it was written"):
        load_manifest(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format": "nanorove"}'])
def test_a_broken_manifest_is_refused(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json: not a manifest of ours.*remove it"):
        load_manifest(folder)


def test_every_listed_shard_is_checked(folder):
    path = folder / "x_train_000002.bin"
    path.write_bytes(crafted([4])[:-1])
    with pytest.raises(UserError, match="x_train_000002.bin: 1,025 bytes"):
        load_manifest(folder)
    path.write_bytes(crafted([4, 5]))  # a good shard, of another data set
    with pytest.raises(UserError, match="x_train_000002.bin: 2 tokens, but manifest.json says 1"):
        load_manifest(folder)
    path.unlink()
    with pytest.raises(UserError, match="x_train_000002.bin: No such file"):
        load_manifest(folder)
