import errno
import functools
import json
import os
import re
import shutil
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
from data.tokenizer import Tokenizer, get_tokenizer
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
    return Source("x", {"kind": "test"}, lambda files, i: units, read_unit, **keys)


def squeezed(text) -> str:
    """The text but for ASCII white space, by which texts count as the same."""
    return re.sub(r"[ \t\n\r\v\f]", "", text)


def parse(path) -> list[int]:
    """Tokens of a shard, read by hand."""
    data = path.read_bytes()
    magic, version, count = struct.unpack("<3i", data[:12])
    assert (magic, version, len(data)) == (20240520, 1, 1024 + 2 * count)
    return list(struct.unpack(f"<{count}H", data[1024:]))


def expected(texts, val_tokens=20, limit_tokens=None, deduplicate=False):
    """What the folder must hold, by brute force: (val documents, train documents, counts)."""
    val, train, seen, val_ended = [], [], set(), False
    counts = {"empty": 0, "duplicate": 0, "in_val": 0}
    for text in texts:
        if not (text or "").strip():
            counts["empty"] += 1
            continue
        document = [256, *text.encode("utf-8")]
        copy = squeezed(text) in seen
        if copy and deduplicate:
            counts["duplicate"] += 1
            continue
        val_ended = val_ended or len(sum(val, [])) + len(document) > val_tokens
        if copy and val_ended:
            counts["in_val"] += 1
            continue
        if limit_tokens and len(sum(val + train, [])) + len(document) > limit_tokens:
            break
        (train if val_ended else val).append(document)
        if deduplicate or not val_ended:
            seen.add(squeezed(text))
    return val, train, counts


def counts_of(**keys) -> dict:
    return {"empty": 0, "duplicate": 0, "in_val": 0} | keys


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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: None)  # thousands of tiny shards
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
    assert manifest["documents"] == {"val": 1, "train": 2, **counts_of(empty=4)}
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
    folders = [tmp_path / str(n) for n in (1, 2)]  # 3 are in test_the_start_method_...
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
    units = (((0, i), [str(taken.append(i))]) for i in range(1000))
    results = tokenised_units(units, texts_source(None), options(tmp_path, workers=2))
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


@pytest.mark.parametrize(
    "file", ["x_val_000000.bin", "x_train_000001.bin", "x_train_000007.bin", "other.bin"]
)
def test_shards_that_no_run_noted_are_refused_and_stay(tmp_path, file):
    # copied here by hand, or of a download that was interrupted
    (tmp_path / file).write_bytes(b"of another")
    with pytest.raises(UserError, match=f"{file} is there, of a run without progress.json"):
        prepare(texts_source([["val", "a" * 30]]), options(tmp_path, val_tokens=4))
    assert files_of(tmp_path) == {file: b"of another"}


def test_a_shard_put_into_an_unfinished_folder_is_refused_and_stays(tmp_path, unbroken):
    broken_at(tmp_path, 5)  # validation and the training shards 1 to 4
    before = files_of(tmp_path)
    foreign = tmp_path / "x_train_000006.bin"
    foreign.write_bytes(b"of another")
    with pytest.raises(UserError, match="x_train_000006.bin is there, which progress.json does"):
        prepare(texts_source(STREAM), options(tmp_path, **BROKEN))
    assert files_of(tmp_path) == before | {foreign.name: b"of another"}
    # but shard 5 may be one that the run wrote before it was killed
    foreign.rename(tmp_path / "x_train_000005.bin")
    prepare(texts_source(STREAM), options(tmp_path, **BROKEN))
    assert files_of(tmp_path) == unbroken[False]


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    texts = ["val", "a" * 30]
    for file in ("x_train_000001.bin.tmp", "manifest.json.tmp", "progress.json.tmp"):
        (tmp_path / file).write_bytes(b"left over")
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
    other = Source("x", {"kind": "other"}, lambda files, i: [], read_unit)
    with pytest.raises(UserError, match="source.kind 'test' there, 'other' asked"):
        prepare(other, options(tmp_path, val_tokens=4))
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_finished_folder_that_is_damaged_says_how_to_start_again(tmp_path):
    source, asked = texts_source([["val", "a" * 30]]), options(tmp_path, val_tokens=4)
    prepare(source, asked)
    (tmp_path / "x_train_000001.bin").unlink()
    with pytest.raises(UserError, match=r"x_train_000001.bin.*remove manifest.json and the .bin"):
        prepare(source, asked)
    for file in ("manifest.json", "x_val_000000.bin"):
        (tmp_path / file).unlink()
    prepare(source, asked)


def test_a_full_disk_leaves_finished_shards_and_nothing_partial(tmp_path, monkeypatch):
    # datasets#7502
    texts = ["val", "a" * 35]
    source, asked = texts_source([texts]), options(tmp_path, val_tokens=4, shard_tokens=10)
    tmp, fsync = tmp_path / "x_train_000002.bin.tmp", os.fsync

    def full_at_the_second(fd):
        if tmp.exists() and os.path.sameopenfile(fd, os.open(tmp, os.O_RDONLY)):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "fsync", full_at_the_second)
        with pytest.raises(UserError, match="disk full: .*x_train_000002.bin needs 1,044 bytes"):
            prepare(source, asked)
    left = ["progress.json", "x_train_000001.bin", "x_val_000000.bin"]
    assert sorted(os.listdir(tmp_path)) == left
    assert parse(tmp_path / "x_train_000001.bin") == [256, *b"aaaaaaaaa"]
    prepare(source, asked)
    check_folder(tmp_path, *expected(texts, val_tokens=4), shard_tokens=10)


# What is refused.


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_tokenizer_with_larger_ids_is_refused(tmp_path, monkeypatch, kind):
    # transformers#2825: 70000 in 16 bits is 4464
    class Wide(Tokenizer):
        name, vocab_size, eot, sha256 = "bytes", 50257, 50256, ""

        def encode(self, text):
            return kind([1, 70000])

    monkeypatch.setattr(module, "get_tokenizer", lambda *names: Wide())
    monkeypatch.setattr(module, "cached_tokenizer", functools.cache(lambda *names: Wide()))
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


def test_a_folder_that_is_read_only_is_refused_before_the_work(tmp_path, monkeypatch):
    def untouchable(files, i):
        raise AssertionError("read")

    # not by its mode, which is nothing to root
    monkeypatch.setattr(module.os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(UserError, match="--out .*: read-only; choose a folder"):
        prepare(Source("x", {"kind": "test"}, untouchable, read_unit), options(tmp_path))


@pytest.mark.parametrize("name", ["stdlib", "fineweb_edu", "text"])
def test_help_lists_the_shared_options(name):
    result = subprocess.run(
        [sys.executable, "-m", f"data.{name}", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for option in ("out", "tokenizer", "workers", "shard-tokens", "limit-tokens", "val-tokens"):
        assert f"--{option}" in result.stdout
    assert f"usage: python -m data.{name} " in result.stdout


# Interrupted runs (litData#137).

STREAM = [
    [f"unit {i} document {j} " * (1 + (i * 7 + j) % 5) for j in range(i % 5)] for i in range(60)
]
STREAM[3] = ["unit 1 document 0 " * 3, "", None, "again", "again"]
STREAM[20] = ["x" * 700, *STREAM[2]]
BROKEN = {"val_tokens": 300, "shard_tokens": 200, "limit_tokens": 5000}


def files_of(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> dict[bool, dict[str, bytes]]:
    folders = {flag: tmp_path_factory.mktemp("unbroken") for flag in (False, True)}
    for flag, out in folders.items():
        source = texts_source(STREAM, deduplicate=flag)
        prepare(source, options(out, **BROKEN))
        val, train, counts = expected(sum(STREAM, []), 300, 5000, flag)
        check_folder(out, val, train, counts, 200)
    return {flag: files_of(out) for flag, out in folders.items()}


@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_run_broken_after_every_shard_goes_on_to_the_same_bytes(tmp_path, unbroken, deduplicate):
    class Broken(BaseException):
        pass

    save = module.save_json
    runs, starts = 0, []

    def units(files, i):
        for unit in STREAM:
            starts.append(runs)
            yield unit

    def save_and_break(path, value):
        save(path, value)
        raise Broken

    source = Source("x", {"kind": "test"}, units, read_unit, deduplicate=deduplicate)
    while not (tmp_path / "manifest.json").exists():
        (tmp_path / "x_train_000099.bin.tmp").write_bytes(b"half")
        runs += 1
        assert runs < 100
        try:
            module.save_json = save_and_break
            prepare(source, options(tmp_path, **BROKEN))
        except Broken:
            listed = json.loads((tmp_path / "progress.json").read_text())["shards"]
            assert len(listed) == runs - 1  # the first one is broken before its first shard
        finally:
            module.save_json = save
    assert runs > 15
    assert files_of(tmp_path) == unbroken[deduplicate]


def broken_at(out, shards: int, source=None, **keys) -> None:
    """Run until `shards` shards are written."""
    save = module.save_json

    def save_and_break(path, value):
        save(path, value)
        if len(value["shards"]) == shards:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "save_json", save_and_break)
        prepare(source or texts_source(STREAM), options(out, **(BROKEN | keys)))


def test_only_what_is_not_in_shards_yet_is_read_again(tmp_path, unbroken):
    broken_at(tmp_path, 9)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.bin")}
    place = json.loads((tmp_path / "progress.json").read_text())["next"]["place"]
    read = []

    def recorded(unit):
        read.append(unit)
        return unit

    prepare(
        Source("x", {"kind": "test"}, lambda f, i: STREAM, recorded), options(tmp_path, **BROKEN)
    )
    assert read[0] == STREAM[place[1]] and place[1] > 15
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    assert files_of(tmp_path) == unbroken[False]


def test_an_unfinished_folder_of_other_settings_is_refused(tmp_path):
    broken_at(tmp_path, 5)
    before = files_of(tmp_path)
    for keys, shown in [
        ({"shard_tokens": 100}, "settings.shard_tokens 200 there, 100 asked"),
        ({"limit_tokens": None}, "settings.limit_tokens 5000 there, None asked"),
        ({"tokenizer": "gpt2"}, "tokenizer.name 'bytes' there, 'gpt2' asked"),
    ]:
        with pytest.raises(UserError, match=f"begun already, with other settings: .*{shown}"):
            prepare(texts_source(STREAM), options(tmp_path, **(BROKEN | keys)))
    with pytest.raises(UserError, match=r"versions.numpy .* there, 'other' asked"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.importlib.metadata, "version", lambda package: "other")
            prepare(texts_source(STREAM), options(tmp_path, **BROKEN))
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_shard_of_an_unfinished_folder_is_found(tmp_path, unbroken, damage):
    broken_at(tmp_path, 5)
    path = tmp_path / "x_train_000002.bin"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[1100] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises(UserError, match="x_train_000002.bin: missing or changed.*progress.json"):
        prepare(texts_source(STREAM), options(tmp_path, **BROKEN))
    for file in [tmp_path / "progress.json", *tmp_path.glob("*.bin")]:
        file.unlink()
    prepare(texts_source(STREAM), options(tmp_path, **BROKEN))
    assert files_of(tmp_path) == unbroken[False]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"source": {}, "shards": 3}'])
def test_a_progress_file_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    with pytest.raises(UserError, match=r"progress.json|begun already"):
        prepare(texts_source(STREAM), options(tmp_path, **BROKEN))


@pytest.mark.parametrize("rest", [[["text"]], []])
def test_a_source_that_became_shorter_is_refused(tmp_path, rest):
    broken_at(tmp_path, 9)
    place = json.loads((tmp_path / "progress.json").read_text())["next"]["place"]
    shorter = [*STREAM[: place[1]], ["a"], *rest]
    with pytest.raises(UserError, match="less text than when this folder was begun"):
        prepare(texts_source(shorter), options(tmp_path, **BROKEN))
    assert not (tmp_path / "manifest.json").exists()


def test_two_runs_in_one_folder(tmp_path):
    with module.locked_folder(tmp_path):
        with pytest.raises(UserError, match="another run is writing there"):
            prepare(texts_source(STREAM), options(tmp_path, **BROKEN))


def test_the_public_cut(tmp_path, capsys, monkeypatch):
    # build-nanogpt: the first shard is validation, whatever document stands there
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of tiny shards
    texts = ["first é", "second", "third", "first é"]  # 9 + 7 + 6 + 9 tokens
    for size in range(1, 31):
        out = tmp_path / str(size)
        source = texts_source([texts[:2], texts[2:]], public_split=True)
        manifest = prepare(source, options(out, val_tokens=size, shard_tokens=size))
        stream = sum(([256, *t.encode()] for t in texts), [])
        found = [parse(out / shard["file"]) for shard in manifest["shards"]]
        assert found == [stream[i : i + size] for i in range(0, len(stream), size)]
        splits = [shard["split"] for shard in manifest["shards"]]
        assert splits == ["val"] + ["train"] * (len(found) - 1)
        assert manifest["documents"] == {
            "val": found[0].count(256), "train": 4 - found[0].count(256), **counts_of()
        }  # fmt: skip
        val_bytes = size - found[0].count(256)
        assert manifest["text_bytes"] == {"val": val_bytes, "train": 27 - val_bytes}
        if found[1][0] == 256:
            assert manifest["straddling"] is None
        else:
            head = size - max(i for i, t in enumerate(found[0]) if t == 256)
            rest = stream[size:]
            tail = rest.index(256) if 256 in rest else len(rest)
            assert manifest["straddling"] == {"val_tokens": head, "train_tokens": tail}
            assert f"goes on in training, with {head} + {tail} tokens" in capsys.readouterr().out
    with pytest.raises(UserError, match="--val-tokens 30 must be --shard-tokens 20"):
        source = texts_source([texts], public_split=True)
        prepare(source, options(tmp_path / "no", val_tokens=30, shard_tokens=20))
    with pytest.raises(UserError, match="training would be empty"):
        prepare(source, options(tmp_path / "no", val_tokens=31, shard_tokens=31))


def test_copies_of_validation_are_kept_out_of_training(tmp_path, capsys):
    texts = ["one two", "three", "four", "one  two\n", "four", "\u00a0one two", "three"]
    manifest = prepare(texts_source([texts[:3], texts[3:]]), options(tmp_path, val_tokens=14))
    check_folder(tmp_path, *expected(texts, 14), 100)
    assert manifest["documents"] == {"val": 2, "train": 3, **counts_of(in_val=2)}
    assert "7 documents = 2 val + 3 train + 2 dropped" in capsys.readouterr().out


def test_what_it_takes_is_said_before(tmp_path, capsys, monkeypatch):
    # datasets#7502
    source = texts_source(STREAM, text_bytes=lambda files: 50_000)
    prepare(source, options(tmp_path / "a", **BROKEN))
    assert "about 5,000 tokens, 0.00 GB of shards to write" in capsys.readouterr().out
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, 99_999)
    )
    with pytest.raises(UserError, match=r"about 50,000 tokens, .*free there; make room"):
        prepare(source, options(tmp_path / "b", **(BROKEN | {"limit_tokens": None})))
    assert not os.listdir(tmp_path / "b")


SLOW_SOURCE = """
import sys, time
from pathlib import Path
from data.prepare import Source, prepare
from nanorove.errors import run_cli
from tests.test_prepare import STREAM, BROKEN, options, read_unit
def read_slowly(unit):
    time.sleep(0.15)
    return read_unit(unit)
def main():
    source = Source("x", {"kind": "test"}, lambda files, i: STREAM, read_slowly)
    prepare(source, options(Path(sys.argv[1]), workers=int(sys.argv[2]), **BROKEN))
if __name__ == "__main__":
    run_cli(main)
"""


# a spawned worker imports the script before anything of ours runs in it
SLOW_START = """
if __name__ == "__mp_main__":
    Path(sys.argv[1] + ".starting").touch()
    time.sleep(0.5)
"""


def children(pid: int) -> list[int]:
    """The worker processes of a run; the resource tracker is none."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found}
    return [pid for pid, line in lines.items() if b"spawn_main" in line]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds children in /proc")
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path, unbroken, kills):
    """SIGKILL of the parent, or of one of its workers, and the same bytes in the end."""
    (tmp_path / "run.py").write_text(SLOW_SOURCE)
    out, rng = tmp_path / "out", np.random.RandomState(kills)
    env = os.environ | {"PYTHONPATH": str(ROOT)}

    def run(workers: int) -> subprocess.Popen:
        command = [sys.executable, tmp_path / "run.py", out, str(workers)]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    for kill in range(kills):
        process = run(2)
        while not list(tmp_path.glob("out/*.bin")) or len(children(process.pid)) < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        if kill % 2:
            os.kill(children(process.pid)[rng.randint(2)], signal.SIGKILL)
            _, stderr = process.communicate(timeout=60)  # it ends by itself
            assert process.returncode == 2 and "a worker process died" in stderr
        else:
            process.kill()
            process.communicate(timeout=60)
        for path in out.glob("*.bin"):
            parse(path)  # whole, if it has its name
        assert not (out / "manifest.json").exists()
    process = run(3)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert files_of(out) == unbroken[False]


@pytest.mark.parametrize("moment", ["workers start", "shards"])
def test_ctrl_c_is_at_most_one_line(tmp_path, unbroken, moment):
    """The terminal sends SIGINT to the parent and to all workers, whatever they are doing."""
    (tmp_path / "run.py").write_text(SLOW_SOURCE + SLOW_START)
    out = tmp_path / "out"
    command = [sys.executable, tmp_path / "run.py", out, "2"]
    given = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "stderr": subprocess.PIPE, "text": True}
    # a shell lets what it starts with & ignore SIGINT, and these tests may have been
    given["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, start_new_session=True, **given)
    awaited = "out.starting" if moment == "workers start" else "out/*.bin"
    while not list(tmp_path.glob(awaited)):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    lines = [line for line in stderr.split("\n") if line.strip() and ".bin: " not in line]
    assert process.returncode == 130 and lines == ["interrupted"], stderr
    assert subprocess.run(command, timeout=120, **given).returncode == 0
    assert files_of(out) == unbroken[False]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_start_method_changes_nothing(tmp_path, unbroken, monkeypatch, method):
    # build-nanogpt#4
    context = module.multiprocessing.get_context(method)
    monkeypatch.setattr(module.multiprocessing, "get_context", lambda _: context)
    prepare(texts_source(STREAM), options(tmp_path, workers=3, **BROKEN))
    assert files_of(tmp_path) == unbroken[False]


def test_shards_of_the_fast_and_of_the_reference_tokenizer(tmp_path):
    """Byte for byte, and as plain tiktoken calls give them."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("[dmnst]*/*.py"))]
    texts += ["<|endoftext|>", "\ud83d\ude00 \ud800", "caf\u00e9 \u4e2d\u6587", "x" * 5000]
    keys = {"tokenizer": "gpt2", "val_tokens": 9000, "shard_tokens": 20_000}
    for encoder in ("gigatoken", "tiktoken"):
        out = tmp_path / encoder
        manifest = prepare(texts_source([texts]), options(out, encoder=encoder, **keys))
        assert ("gigatoken" in manifest["versions"]) == (encoder == "gigatoken")
    fast, reference = (
        {n: b for n, b in files_of(tmp_path / encoder).items() if n.endswith(".bin")}
        for encoder in ("gigatoken", "tiktoken")
    )
    assert fast == reference
    encoding = get_tokenizer("gpt2")._encoding
    stream = []
    for text in texts:
        if text.strip():
            stream += [50256, *encoding.encode_ordinary(text)]
    assert sum((parse(tmp_path / "gigatoken" / name) for name in in_order(fast)), []) == stream


def in_order(names) -> list[str]:
    return sorted(names, key=lambda name: name.replace("val", "a"))


MEMORY = """
import resource, sys
from pathlib import Path
from data.prepare import Source, prepare
from tests.test_prepare import options
def read_megabytes(unit):
    return [f"{unit} {i} " * 2500 for i in range(40)]
if __name__ == "__main__":
    source = Source("x", {"kind": "test"}, lambda files, i: range(int(sys.argv[2])), read_megabytes)
    asked = options(Path(sys.argv[1]), workers=2, shard_tokens=2_000_000, val_tokens=1_000_000)
    prepare(source, asked)
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        print(resource.getrusage(who).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    # llm.c#455
    (tmp_path / "memory.py").write_text(MEMORY)
    peaks = []
    for units in (40, 160):
        command = [sys.executable, tmp_path / "memory.py", tmp_path / str(units), str(units)]
        result = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert sum(f.stat().st_size for f in (tmp_path / str(units)).iterdir()) > units * 10**6
        peaks.append([int(n) for n in result.stdout.split("\n")[-3:-1]])
    for small, large in zip(*peaks, strict=True):
        assert large < 1.15 * small
