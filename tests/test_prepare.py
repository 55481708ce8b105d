import errno
import functools
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prepare as module
from data import shards
from data.prepare import PrepareOptions, Source, prepare, tokenised_units
from data.shards import load_manifest
from nanorove.errors import UserError

ROOT = Path(__file__).parent.parent


def read_unit(unit):
    """The unit is its own texts; two strings make trouble. Runs in the workers."""
    for text in unit:
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "refuse":
            raise UserError("unit 7: refused")
        yield text


def options(out, **keys) -> PrepareOptions:
    given = {"tokenizer": "bytes", "workers": 1, "shard_tokens": 100, "val_tokens": 20}
    return PrepareOptions(out=out, **(given | keys))


def texts_source(units, **keys) -> Source:
    return Source("x", {"kind": "test"}, units, read_unit, **keys)


def parse(path) -> list[int]:
    """Tokens of a shard, read by hand."""
    data = path.read_bytes()
    magic, version, count = struct.unpack("<3i", data[:12])
    assert (magic, version, len(data)) == (20240520, 1, 1024 + 2 * count)
    return list(struct.unpack(f"<{count}H", data[1024:]))


def expected(texts, val_tokens=20, limit_tokens=None, deduplicate=False):
    """What the folder must hold, by brute force: (val documents, train documents, counts)."""
    kept, seen, counts = [], set(), {"empty": 0, "duplicate": 0}
    for text in texts:
        normal = tuple((text or "").split())
        if not normal:
            counts["empty"] += 1
        elif deduplicate and normal in seen:
            counts["duplicate"] += 1
        else:
            document = [256, *text.encode("utf-8")]
            if limit_tokens and sum(map(len, kept)) + len(document) > limit_tokens:
                break
            kept.append(document)
            seen.add(normal)
    n = max(n for n in range(len(kept) + 1) if sum(map(len, kept[:n])) <= val_tokens)
    return kept[:n], kept[n:], counts


def check_folder(out, val, train, counts, shard_tokens, name="x") -> dict:
    """Compare the files of a folder with the documents that it must hold."""
    manifest = json.loads((out / "manifest.json").read_text())
    train_stream = sum(train, [])
    pieces = [train_stream[i : i + shard_tokens] for i in range(0, len(train_stream), shard_tokens)]
    files = {f"{name}_val_000000.bin": sum(val, [])}
    files |= {f"{name}_train_{i:06d}.bin": piece for i, piece in enumerate(pieces, 1)}
    assert sorted(os.listdir(out)) == sorted([*files, "manifest.json"])
    for file, tokens in files.items():
        assert parse(out / file) == tokens
    assert {s["file"]: s["tokens"] for s in manifest["shards"]} == {
        file: len(tokens) for file, tokens in files.items()
    }
    assert {s["file"]: s["documents"] for s in manifest["shards"]} == {
        file: tokens.count(256) for file, tokens in files.items()
    }
    assert manifest["documents"] == {"val": len(val), "train": len(train), **counts}
    assert manifest["text_bytes"] == {  # a byte is a token here, and each delimiter one more
        split: sum(len(document) - 1 for document in documents)
        for split, documents in (("val", val), ("train", train))
    }
    assert load_manifest(out) == manifest
    return manifest


text = st.one_of(
    st.none(),
    st.sampled_from(["", " ", "\n\t", "\u00a0\u2003", "a b", "a  b\n", " a b", "<|endoftext|>"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.integers(1, 90).map(lambda n: "z" * n),
)


@given(
    units=st.lists(st.lists(text, max_size=5), max_size=8),
    shard_tokens=st.integers(1, 40),
    val_tokens=st.integers(1, 40),
    limit_tokens=st.none() | st.integers(1, 200),
    deduplicate=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_documents_and_settings(
    tmp_path_factory, units, shard_tokens, val_tokens, limit_tokens, deduplicate
):
    out = tmp_path_factory.mktemp("out")
    source = texts_source(units, deduplicate=deduplicate)
    asked = options(
        out, shard_tokens=shard_tokens, val_tokens=val_tokens, limit_tokens=limit_tokens
    )
    val, train, counts = expected(sum(units, []), val_tokens, limit_tokens, deduplicate)
    if not val or not train:
        with pytest.raises(UserError, match="would be empty"):
            prepare(source, asked)
        assert not os.listdir(out)
    else:
        prepare(source, asked)
        check_folder(out, val, train, counts, shard_tokens)


def test_a_document_longer_than_three_shards_and_one_at_a_border(tmp_path):
    # build-nanogpt's writer fails on both when shards are small
    texts = ["val", "a" * 9, "b" * 35, "c" * 4, "d" * 10]  # 10 + 36 + 5 + 11 = 62 tokens
    prepare(texts_source([texts]), options(tmp_path, val_tokens=4, shard_tokens=10))
    val, train, counts = expected(texts, val_tokens=4)
    manifest = check_folder(tmp_path, val, train, counts, shard_tokens=10)
    assert [s["tokens"] for s in manifest["shards"]] == [4, 10, 10, 10, 10, 10, 10, 2]
    assert [s["documents"] for s in manifest["shards"]] == [1, 1, 1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("length", "sizes"), [(29, [10, 10, 10]), (4, [5]), (10, [10, 1])], ids=str
)
def test_the_last_shard_is_partial_and_never_empty(tmp_path, capsys, length, sizes):
    # build-nanogpt#25: an exact multiple, less than one shard, one token more than one
    texts = ["val", "a" * length]
    prepare(texts_source([texts]), options(tmp_path, val_tokens=4, shard_tokens=10))
    manifest = check_folder(tmp_path, *expected(texts, val_tokens=4), shard_tokens=10)
    assert [s["tokens"] for s in manifest["shards"]] == [4, *sizes]
    line = capsys.readouterr().out
    assert f"{5 + length} tokens = 4 val + {length + 1} train" in line
    assert f"{1 + len(sizes)} shards = 1 val + {len(sizes)} train" in line


def test_empty_and_null_documents_are_dropped_and_counted(tmp_path):
    # litgpt#706: one delimiter a document, at its front, none for an empty one
    texts = ["first", "", None, " \n\t ", "second", "\u2003", "third"]
    prepare(texts_source([texts[:3], texts[3:]]), options(tmp_path, val_tokens=6))
    manifest = check_folder(tmp_path, *expected(texts, val_tokens=6), shard_tokens=100)
    assert manifest["documents"] == {"val": 1, "train": 2, "empty": 4, "duplicate": 0}
    stream = parse(tmp_path / "x_val_000000.bin") + parse(tmp_path / "x_train_000001.bin")
    assert stream == [256, *b"first", 256, *b"second", 256, *b"third"]


def test_validation_is_a_prefix(tmp_path):
    # the third document would still fit, but then validation were no prefix
    prepare(texts_source([["12345", "123456789", "1", "2"]]), options(tmp_path, val_tokens=10))
    assert parse(tmp_path / "x_val_000000.bin") == [256, *b"12345"]


@pytest.mark.parametrize(("limit", "documents"), [(13, 3), (14, 4), (15, 4)])
def test_the_limit_is_a_total_of_whole_documents(tmp_path, limit, documents):
    # 2 + 3 + 4 + 5 = 14 tokens; the one that would pass the limit ends the run
    texts = ["1", "22", "333", "4444", "55555", "6"]
    prepare(texts_source([texts]), options(tmp_path, val_tokens=2, limit_tokens=limit))
    manifest = check_folder(tmp_path, *expected(texts, 2, limit), shard_tokens=100)
    assert manifest["documents"]["val"] + manifest["documents"]["train"] == documents
    assert manifest["settings"]["limit_tokens"] == limit


def test_duplicates_by_normalised_text(tmp_path):
    texts = ["one two", "a", " one\n two ", "b", "One two", "a"]
    prepare(texts_source([[t] for t in texts], deduplicate=True), options(tmp_path, val_tokens=8))
    stream = parse(tmp_path / "x_val_000000.bin") + parse(tmp_path / "x_train_000001.bin")
    assert stream == [256, *b"one two", 256, *b"a", 256, *b"b", 256, *b"One two"]
    assert json.loads((tmp_path / "manifest.json").read_text())["documents"]["duplicate"] == 2


def test_gpt2_delimiters_are_ours_alone(tmp_path):
    texts = ["val", "A man is sitting on a roof. he", "<|endoftext|>"]
    prepare(texts_source([texts]), options(tmp_path, tokenizer="gpt2", val_tokens=2))
    assert parse(tmp_path / "x_val_000000.bin") == [50256, 2100]
    assert parse(tmp_path / "x_train_000001.bin") == [
        *(50256, 32, 582, 318, 5586, 319, 257, 9753, 13, 339),
        *(50256, 27, 91, 437, 1659, 5239, 91, 29),
    ]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["tokenizer"]["vocab_size"] == 50257
    assert manifest["text_bytes"]["train"] == 30 + 13
    assert "tiktoken" in manifest["versions"]


def test_shards_are_the_same_for_any_number_of_workers(tmp_path):
    # build-nanogpt#4: with spawn, too, which macOS uses
    units = [[f"document {i} {j} é\ud800 " * (i % 7) for j in range(i % 4)] for i in range(40)]
    folders = [tmp_path / str(n) for n in (1, 2, 3)]
    for n, out in enumerate(folders, 1):
        source = texts_source(iter(units), deduplicate=True)
        keys = {"val_tokens": 300, "limit_tokens": 900, "shard_tokens": 150}
        prepare(source, options(out, workers=n, tokenizer="gpt2", **keys))
    first = {file: (folders[0] / file).read_bytes() for file in os.listdir(folders[0])}
    assert len(first) > 5
    for out in folders[1:]:
        assert {file: (out / file).read_bytes() for file in os.listdir(out)} == first


def test_a_worker_that_dies_ends_the_run_in_one_line(tmp_path):
    units = [["some text"]] * 5 + [["die"]] + [["more"]] * 50
    with pytest.raises(UserError, match="a worker process died.*--workers 2"):
        prepare(texts_source(units), options(tmp_path, workers=2))
    assert "manifest.json" not in os.listdir(tmp_path)


def test_the_error_of_a_worker_is_the_error_of_the_run(tmp_path):
    with pytest.raises(UserError, match="^unit 7: refused$"):
        prepare(texts_source([["text"], ["refuse"]] * 20), options(tmp_path, workers=2))


def test_units_in_flight_are_bounded(tmp_path):
    # llm.c#455, and an unbounded imap: the corpus in memory
    taken = []
    units = ([str(taken.append(i))] for i in range(1000))
    results = tokenised_units(texts_source(units), options(tmp_path, workers=2))
    for n in range(1, 30):
        next(results)
        assert len(taken) <= n + 4
    results.close()


KILLED = """
import sys, time
from pathlib import Path
from tests.test_prepare import options, texts_source
from data.prepare import prepare
def slowly():
    while True:
        yield ["text"]
        time.sleep(0.01)
if __name__ == "__main__":
    prepare(texts_source(slowly()), options(Path(sys.argv[1]), workers=2))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds children in /proc")
def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "killed.py", tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while len(pids := children.read_text().split()) < 3 or not (tmp_path / "out").exists():
        assert parent.poll() is None
        time.sleep(0.05)  # two workers and the resource tracker of spawn
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


# What a folder may already hold.


def test_an_unfinished_folder_starts_again(tmp_path):
    texts = ["val", "a" * 30]
    for file in ("x_val_000000.bin", "x_train_000007.bin", "x_train_000001.bin.tmp"):
        (tmp_path / file).write_bytes(b"left over")
    (tmp_path / "manifest.json.tmp").write_bytes(b"left over")
    (tmp_path / "mine.tmp").write_bytes(b"not ours")
    prepare(texts_source([texts]), options(tmp_path, val_tokens=4))
    assert (tmp_path / "mine.tmp").read_bytes() == b"not ours"
    (tmp_path / "mine.tmp").unlink()
    check_folder(tmp_path, *expected(texts, val_tokens=4), shard_tokens=100)


def test_a_finished_folder_stays_as_it_is(tmp_path, capsys):
    asked = options(tmp_path, val_tokens=4)
    made = prepare(texts_source([["val", "a" * 30]]), asked)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.iterdir()}
    capsys.readouterr()

    def untouchable():
        raise AssertionError("read again")
        yield

    assert prepare(texts_source(untouchable()), asked) == made
    assert "complete already" in capsys.readouterr().out
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.iterdir()} == before


def test_other_settings_are_refused_with_the_difference(tmp_path):
    # the ids of two settings must never end in one folder
    source = texts_source([["val", "a" * 30]])
    prepare(source, options(tmp_path, val_tokens=4))
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    for keys, shown in [
        ({"val_tokens": 5}, "settings.val_tokens 4 there, 5 asked"),
        ({"val_tokens": 4, "shard_tokens": 7}, "settings.shard_tokens 100 there, 7 asked"),
        ({"val_tokens": 4, "limit_tokens": 9}, "settings.limit_tokens None there, 9 asked"),
        ({"val_tokens": 4, "tokenizer": "gpt2"}, "tokenizer.name 'bytes' there, 'gpt2' asked"),
    ]:
        with pytest.raises(UserError, match=f"other settings: .*{shown}"):
            prepare(source, options(tmp_path, **keys))
    other = Source("x", {"kind": "other"}, [], read_unit)
    with pytest.raises(UserError, match="source.kind 'test' there, 'other' asked"):
        prepare(other, options(tmp_path, val_tokens=4))
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_finished_folder_that_is_damaged_says_how_to_start_again(tmp_path):
    source, asked = texts_source([["val", "a" * 30]]), options(tmp_path, val_tokens=4)
    prepare(source, asked)
    (tmp_path / "x_train_000001.bin").unlink()
    with pytest.raises(UserError, match=r"x_train_000001.bin.*remove .*manifest.json first"):
        prepare(source, asked)
    (tmp_path / "manifest.json").unlink()
    prepare(source, asked)


def test_a_full_disk_leaves_finished_shards_and_nothing_partial(tmp_path, monkeypatch):
    # datasets#7502
    texts = ["val", "a" * 35]
    source, asked = texts_source([texts]), options(tmp_path, val_tokens=4, shard_tokens=10)
    calls, fsync = [], os.fsync

    def full_at_the_third(fd):
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "fsync", full_at_the_third)
        with pytest.raises(UserError, match="disk full: .*x_train_000002.bin needs 1,044 bytes"):
            prepare(source, asked)
    assert sorted(os.listdir(tmp_path)) == ["x_train_000001.bin", "x_val_000000.bin"]
    assert parse(tmp_path / "x_train_000001.bin") == [256, *b"aaaaaaaaa"]
    prepare(source, asked)
    check_folder(tmp_path, *expected(texts, val_tokens=4), shard_tokens=10)


# What is refused.


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_tokenizer_with_larger_ids_is_refused(tmp_path, monkeypatch, kind):
    # transformers#2825: 70000 in 16 bits is 4464
    class Wide:
        name, vocab_size, eot, sha256 = "bytes", 50257, 50256, ""

        def encode(self, text):
            return kind([1, 70000])

    monkeypatch.setattr(module, "get_tokenizer", lambda name: Wide())
    monkeypatch.setattr(
        module, "cached_tokenizer", functools.cache(lambda name: module.get_tokenizer(name))
    )
    with pytest.raises(UserError, match="token id 70000 is outside the vocabulary"):
        prepare(texts_source([["text"]]), options(tmp_path))
    Wide.vocab_size = 70001
    with pytest.raises(UserError, match="70,001 does not fit"):
        prepare(texts_source([["text"]]), options(tmp_path))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"shard_tokens": 0}, "--shard-tokens 0"),
        ({"shard_tokens": 2**31}, "--shard-tokens 2147483648"),
        ({"val_tokens": 0}, "--val-tokens 0"),
        ({"limit_tokens": -5}, "--limit-tokens -5"),
        ({"tokenizer": "words"}, "'words'"),
    ],
)
def test_senseless_options_are_refused(tmp_path, keys, what):
    with pytest.raises(UserError, match=what):
        prepare(texts_source([["text"]]), options(tmp_path / "out", **keys))
    assert not (tmp_path / "out").exists()


def test_an_empty_split_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(UserError, match=r"first document has 31 tokens.*--val-tokens 20"):
        prepare(texts_source([["a" * 30]]), options(tmp_path))
    with pytest.raises(UserError, match=r"all 2 documents \(9 tokens\).*--val-tokens 20"):
        prepare(texts_source([["abc", "defg"]]), options(tmp_path))
    with pytest.raises(UserError, match=r"all 0 documents"):
        prepare(texts_source([]), options(tmp_path))


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out .*file/out: Not a directory"):
        prepare(texts_source([["text"]]), options(tmp_path / "file" / "out"))


@pytest.mark.parametrize("name", ["stdlib", "fineweb_edu", "text"])
def test_help_lists_the_shared_options(name):
    result = subprocess.run(
        [sys.executable, "-m", f"data.{name}", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for option in ("out", "tokenizer", "workers", "shard-tokens", "limit-tokens", "val-tokens"):
        assert f"--{option}" in result.stdout
