"""`python -m data.shards`: every kind of damage is found, named and told how to mend."""

import json
import struct

import numpy as np
import pytest

from data import inspection
from data.inspection import docs, show, verify
from data.prepare import prepare
from data.shards import load_manifest, save_manifest
from nanorove.errors import UserError
from tests.test_prepare import options, texts_source
from tests.test_sources import error_line, script

TEXTS = ["val one", "val two", *(f"train {i} é " * (1 + i % 9) for i in range(40)), "z" * 500]


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "data"
    prepare(texts_source([TEXTS]), options(out, val_tokens=20, shard_tokens=500))
    return out


def test_a_sound_folder(folder, capsys):
    verify(folder)
    line = capsys.readouterr().out.rstrip().split("\n")[-1]
    assert line.startswith(f"{folder}: sound; 43 documents = 2 val + 41 train")


def patched(at: int, content: bytes):
    def damage(folder):
        path = folder / "x_train_000002.bin"
        data = bytearray(path.read_bytes())
        data[at : at + len(content)] = content
        path.write_bytes(data)

    return damage


def cut(size: int):
    def damage(folder):
        path = folder / "x_train_000002.bin"
        path.write_bytes(path.read_bytes()[:size])

    return damage


def edit(**changes):
    def damage(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def of_another_run(folder):
    other = folder.parent / "other"
    texts = [text.upper() for text in TEXTS]
    prepare(texts_source([texts]), options(other, val_tokens=20, shard_tokens=500))
    (folder / "x_train_000002.bin").write_bytes((other / "x_train_000002.bin").read_bytes())


def left_over(folder):
    (folder / "x_train_000099.bin").write_bytes((folder / "x_train_000002.bin").read_bytes())


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (patched(0, struct.pack("<i", 20240801)), "x_train_000002", "magic 20240801 at byte 0"),
        (patched(4, struct.pack("<i", 7)), "x_train_000002", "version 7 at byte 4"),
        (patched(8, struct.pack("<i", 501)), "x_train_000002", "501 tokens at byte 8"),
        (patched(8, struct.pack("<i", 499)), "x_train_000002", "499 tokens at byte 8"),
        (cut(-1), "x_train_000002", "2,023 bytes"),
        (cut(0), "x_train_000002", "0 bytes"),
        (cut(1000), "x_train_000002", "1000 bytes, shorter than the 1024-byte header"),
        (patched(1024 + 2 * 77, b"\x01\x01"), "x_train_000002", "id 257 at byte 1178"),
        (patched(1500, b"\x7f"), "x_train_000002", "sha256 .* manifest.json says"),
        (lambda f: (f / "x_train_000002.bin").unlink(), "x_train_000002", "No such file"),
        (of_another_run, "x_train_000002", "sha256"),
        (left_over, "x_train_000099", "not in manifest.json, so of another run; remove it"),
    ],
)  # fmt: skip
def test_damage_is_named(folder, capsys, damage, file, what):
    damage(folder)
    with pytest.raises(
        UserError, match=rf"{folder} is not sound, faults: \d+, the first: .*{file}.*{what}"
    ):
        verify(folder)
    assert "sound" not in capsys.readouterr().out


TOKENIZER = {"name": "bytes", "vocab_size": 257, "eot": 256}


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "y"},
        {"checksum": None},
        {"documents": {"val": 2, "train": 40, "empty": 0, "duplicate": 0, "in_val": 0}},
        {"documents": "many"},
        {"tokenizer": TOKENIZER},
        {"tokenizer": TOKENIZER | {"name": ["bytes"], "sha256": ""}},
        {"tokenizer": {"vocab_size": 257, "eot": 256, "sha256": ""}},
        *(
            {"shards": [{"file": f, "split": "val", "tokens": 9, "documents": 1, "sha256": ""}]}
            for f in (3, "x_val\0_000000.bin")
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("look", [verify, show])
def test_an_edited_manifest_is_refused(folder, changes, look):
    edit(**changes)(folder)
    with pytest.raises(UserError, match="manifest.json: edited since it was written"):
        look(folder)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("documents", {"val": 2, "train": 40}, "documents of train 40, but the shards have 41"),
        ("text_bytes", {"val": 13}, "text_bytes of val 13, but the shards have 14"),
    ],
)
def test_sums_are_counted_again(folder, key, value, what):
    """Also where whoever edited the manifest made a new checksum."""
    manifest = load_manifest(folder)
    manifest[key] |= value
    save_manifest(folder, manifest)
    with pytest.raises(UserError, match=f"faults: 1, .*manifest.json: {what}"):
        verify(folder)


def test_a_shard_listed_twice_and_a_split_without_shards(folder):
    manifest = load_manifest(folder)
    save_manifest(folder, manifest | {"shards": manifest["shards"] + manifest["shards"][-1:]})
    with pytest.raises(UserError, match="manifest.json: lists x_train_.* 2 times"):
        verify(folder)
    save_manifest(folder, manifest | {"shards": manifest["shards"][1:]})
    with pytest.raises(UserError, match="lists no val shard"):
        verify(folder)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "3", '"format"', '{"shards": [{}]}', "[" * 100_000]
)
def test_no_manifest_of_ours(folder, content):
    (folder / "manifest.json").write_text(content)
    with pytest.raises(UserError, match="manifest.json: not a manifest"):
        verify(folder)


def test_a_validation_text_in_training_is_found(tmp_path, monkeypatch, capsys):
    """Whatever its white space, over the border of two shards, and in small chunks."""
    texts = ["one two three", "four", *["five six"] * 3, "one  two\nthree", "owt one three", "four"]
    source = texts_source([texts], public_split=True)  # which keeps the copies
    prepare(source, options(tmp_path, val_tokens=19, shard_tokens=19))
    manifest = load_manifest(tmp_path)
    manifest["settings"]["split"] = "documents"
    save_manifest(tmp_path, manifest)
    for chunk in (1, 20, 30, 10**6):
        monkeypatch.setattr(inspection, "CHUNK_TOKENS", chunk)
        with pytest.raises(UserError, match="faults: 1, .* 2 training documents have the text of"):
            verify(tmp_path)
    manifest["settings"]["split"] = "public"
    save_manifest(tmp_path, manifest)
    verify(tmp_path)
    assert "2 training documents have the text of one in validation" in capsys.readouterr().out


def test_show(folder, capsys, tmp_path):
    show(folder, png=tmp_path / "x.png")
    out = capsys.readouterr().out
    lengths = [len(text.encode()) + 1 for text in TEXTS[2:]]
    assert f"train: 1.000 bytes of text a token; documents of {np.mean(lengths):.0f} tokens" in out
    assert "0 of at least  2,048 tokens" in out
    between = sum(64 <= n < 128 for n in lengths)
    assert f"64 - 127 {between}" in " ".join(out.split())
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    for split, number, text in [("val", 1, TEXTS[1]), ("train", 0, TEXTS[2]), ("train", 40, "z")]:
        show(folder, document=number, split=split)
        lines = capsys.readouterr().out.split("\n", 1)
        assert f"{split} document {number}: " in lines[0] and lines[1].startswith(text)
    with pytest.raises(UserError, match="--document 2: val has the documents 0 to 1"):
        show(folder, document=2, split="val")


def test_show_where_no_document_starts_in_a_split(tmp_path, capsys):
    # the public cut of a single long document
    source = texts_source([["a" * 50]], public_split=True)
    prepare(source, options(tmp_path, val_tokens=20, shard_tokens=20))
    show(tmp_path)
    out = capsys.readouterr().out
    assert "train: no document starts in its 31 tokens" in out
    assert "documents of 20 tokens in the mean" in out
    assert (tmp_path / "document_lengths.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="--document 0: train has none"):
        show(tmp_path, document=0)
    verify(tmp_path)


def test_a_picture_is_a_png(folder, tmp_path):
    for name in ("x.pdf", "x"):
        with pytest.raises(UserError, match=f"--png .*{name}: .*end in .png"):
            show(folder, png=tmp_path / name)


def test_docs(tmp_path, capsys):
    texts = ["a" * 9, "b" * 30, "c" * 20, "d" * 5, "e" * 50, "f" * 60]
    prepare(texts_source([texts]), options(tmp_path, val_tokens=70, shard_tokens=40))
    selection = docs(tmp_path, min_tokens=21)
    assert selection["documents"] == [1, 2] and selection["lengths"] == [31, 21]
    assert selection["starts"] == [10, 41]
    assert json.loads((tmp_path / "long_val_21.json").read_text()) == selection
    assert np.load(tmp_path / "documents_val.npy").tolist() == [0, 10, 41, 62, 68]
    assert np.load(tmp_path / "documents_train.npy").tolist() == [0, 51, 112]
    verify(tmp_path)
    with pytest.raises(UserError, match="no validation document has 32 tokens, the longest has 31"):
        docs(tmp_path, min_tokens=32)


def test_the_command_line(folder):
    result = script("data.shards", "verify", folder)
    assert result.returncode == 0 and "sound" in result.stdout
    cut(-1)(folder)
    assert "x_train_000002.bin: 2,023 bytes" in error_line(script("data.shards", "verify", folder))
    assert "no manifest.json" in error_line(script("data.shards", "show", folder.parent))
