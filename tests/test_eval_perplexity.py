"""scripts.eval_perplexity against windows and sums written out by hand, with the float64 model of
tests/reference.py."""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from nanorove.checkpoint import save_checkpoint
from nanorove.config import load_config
from nanorove.distributed import DistInfo
from nanorove.errors import UserError
from nanorove.optim import make_optimizer
from nanorove.validation import evaluate_loss
from scripts import eval_perplexity
from scripts.eval_perplexity import (
    Args,
    Window,
    bin_edges,
    cut,
    default_lengths,
    main,
    parse_lengths,
    parse_quantities,
    slide,
    to_span,
)
from tests import reference
from tests.conftest import EOT, REPO, with_checksum, write_data_dir

BYTES_SHA256 = hashlib.sha256(bytes(range(256)) + b"<|endoftext|>").hexdigest()
TOKENIZER = {"name": "bytes", "vocab_size": 257, "eot": EOT, "sha256": BYTES_SHA256}
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
GPT2_TOKENIZER = {"name": "gpt2", "vocab_size": 50257, "eot": 50256, "sha256": GPT2_SHA256}
SIZES = [40, 5, 33, 0, 31, 64, 32]  # tokens of the validation documents; 4 fill 32 tokens


def documents() -> list[list[int]]:
    rng = np.random.RandomState(5)
    return [rng.randint(0, 256, size).tolist() for size in SIZES]


def stream() -> list[int]:
    return [t for document in documents() for t in [EOT, *document]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = write_data_dir(tmp_path / "shards", train=[stream()], val=[stream()])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer"] = TOKENIZER
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    return folder


@pytest.fixture
def save(tiny_toml, data):
    """Write a run of the tiny config with random weights; returns (run folder, model)."""

    def write(
        pos_emb: str = "rove", std: float = 0.3, yarn: float = 1.0, tokenizer: dict = TOKENIZER
    ) -> tuple[Path, GPT]:
        overrides = ["--model.pos_emb", pos_emb, "--model.yarn_factor", str(yarn)]
        overrides += ["--model.vocab_size", str(tokenizer["vocab_size"])]
        config, _ = load_config([tiny_toml(), "--data.dir", str(data), *overrides])
        model = reference.randomise(GPT(config.model), std, seed=2)
        extra = {"data": {"manifest_sha256": "m", "tokenizer": tokenizer}}
        save_checkpoint(
            config.run_dir, 6, config, model, make_optimizer(model, config.train), extra
        )
        return config.run_dir, model

    return write


def write_jsonl(path: Path, texts: Sequence[str | None]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def entry(record: dict, quantity: str, yarn: str, length: int) -> dict:
    (found,) = (
        r for r in record["results"]
        if (r["quantity"], r["yarn"], r["length"]) == (quantity, yarn, length)
    )  # fmt: skip
    return found


def curve_of(record: dict, yarn: str) -> dict:
    (found,) = (c for c in record["curve"] if c["yarn"] == yarn)
    return found


def nll64(model: GPT, ids: Sequence[int], factor: float = 1.0) -> list[float]:
    """NLL of ids[1:] in float64, one forward pass over all of it."""
    config = dataclasses.replace(model.config, yarn_factor=factor)
    logits = reference.logits(model.state_dict(), config, torch.tensor(ids[:-1]))
    log_probs = logits.log_softmax(-1)
    return [-log_probs[i, t].item() for i, t in enumerate(ids[1:])]


# -----------------------------------------------------------------------------
# windows


def test_golden_windows():
    assert cut("disjoint", 15, 8, 3, 2) == [(0, 7, 7), (7, 14, 7)]
    assert cut("last", 15, 8, 3, 2) == [(8, 15, 3)]
    assert cut("curve", 15, 16, 3, 2) == [(0, 15, 15)]
    # YaRN's evaluation: 2,000 tokens, windows of 1,024 with end-of-text, stride 256
    assert cut("sliding", 2000, 1024, 3, 256) == [
        (0, 1023, 1023), (256, 1279, 256), (512, 1535, 256), (768, 1791, 256), (1024, 2000, 209),
    ]  # fmt: skip


def test_what_the_model_reads():
    segment = np.array([99, *range(15)], np.uint16)
    span = to_span(segment, Window(7, 14, 3), eot=99)
    assert span.ids.tolist() == [99, 7, 8, 9, 10, 11, 12, 13]
    assert span.ids[span.start : span.end].tolist() == [11, 12, 13]
    # the packed stream's own token opens the window
    assert to_span(segment, Window(7, 14, 7), eot=None).ids.tolist() == list(range(6, 14))
    assert segment.tolist() == [99, *range(15)]


def test_last_scores_the_same_targets_at_every_length():
    # yarn#13: a curve must compare equal targets
    segment = np.random.RandomState(0).randint(0, 1000, 4096)
    for length in (128, 256, 1000, 4096):
        (window,) = cut("last", 4095, length, 64, 256)
        span = to_span(segment, window, eot=1000)
        assert len(span.ids) == length and span.ids[0] == 1000
        assert span.ids[span.start : span.end].tolist() == segment[-64:].tolist()


@pytest.mark.parametrize("length", [4, 7, 100, 999, 1000])
def test_each_token_is_scored_once(length):
    # lm-evaluation-harness#369, yarn#39: do windows overlap, and what is scored of them?
    found = [t for w in cut("disjoint", 999, length, 2, 0) for t in range(w.end - w.scored, w.end)]
    assert found == list(range(1000 // length * (length - 1)))
    for stride in (1, length // 2, length - 1, length, 5000):
        windows = cut("sliding", 999, length, 2, stride)
        assert [t for w in windows for t in range(w.end - w.scored, w.end)] == list(range(999))
        assert all(w.end - w.begin <= length - 1 for w in windows)
        # all but the first window's have the context that the name promises
        assert all(w.end - w.scored - w.begin >= length - 1 - stride for w in windows[1:])


def test_sliding_by_a_whole_window_is_disjoint():
    windows = list(slide(70, 7, 7))
    assert windows == cut("disjoint", 79, 8, 3, 256)  # 70 tokens of text, in ten windows
    assert cut("sliding", 70, 8, 3, 8) == cut("sliding", 70, 8, 3, 256) == windows


def test_bin_edges():
    assert bin_edges(16384) == [0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    assert (bin_edges(64), bin_edges(65), bin_edges(200)) == (
        [0, 64], [0, 64, 65], [0, 64, 128, 200],
    )  # fmt: skip
    assert bin_edges(4) == [0, 4]


# -----------------------------------------------------------------------------
# the numbers


@pytest.mark.parametrize("pos_emb", ["rope", "rove", "none"])
def test_against_a_plain_loop_in_float64(save, pos_emb):
    run, model = save(pos_emb)
    args = Args(run, lengths="8,20,32", yarn="none,auto,2.5", stride=5)
    args = dataclasses.replace(args, quantities="last,disjoint,sliding,curve")
    record = main(args)
    chosen = [d[:31] for d in documents() if len(d) >= 32]
    assert len(chosen) == 4
    K = 4  # min(256, 8 / 2)
    settings = ("none", "auto", "2.5") if pos_emb != "none" else ("none",)
    for yarn in settings:
        for length in (8, 20, 32):
            factor = {"none": 1.0, "auto": max(1.0, length / 8), "2.5": 2.5}[yarn]
            size = length - 1
            expected = {"last": [], "disjoint": [], "sliding": []}
            for text in chosen:
                nll = nll64(model, [EOT, *text[31 - size :]], factor)
                expected["last"].append(math.fsum(nll[-K:]))
                cuts = [text[i * size : (i + 1) * size] for i in range(32 // length)]
                nlls = [nll64(model, [EOT, *window], factor) for window in cuts]
                expected["disjoint"].append(math.fsum(x for nll in nlls for x in nll))
                total, begin, done = 0.0, 0, 0
                while done < 31:
                    end = min(begin + size, 31)
                    total += sum(nll64(model, [EOT, *text[begin:end]], factor)[done - end :])
                    begin, done = begin + 5, end
                expected["sliding"].append(total)
            counts = {"last": K, "disjoint": 32 // length * size, "sliding": 31}
            for quantity, sums in expected.items():
                found = entry(record, quantity, yarn, length)
                assert found["factor"] == factor
                assert found["counts"] == found["bytes"] == [counts[quantity]] * 4
                np.testing.assert_allclose(found["sums"], sums, rtol=2e-5)
                mean = sum(sums) / (4 * counts[quantity])
                assert found["nll"] == pytest.approx(mean, rel=2e-5)
                assert found["ppl"] == pytest.approx(math.exp(mean), rel=1e-4)
                assert found["bits_per_byte"] == pytest.approx(mean / math.log(2), rel=2e-5)
    # one bin below 64 tokens: the first window of the longest length
    found = curve_of(record, "none")
    sums = [sum(nll64(model, [EOT, *text])) for text in chosen]
    assert (found["edges"], found["counts"]) == ([0, 32], [31])
    np.testing.assert_allclose(found["sums"], np.array(sums)[:, None], rtol=2e-5)


def test_the_curve_in_float64(save, tmp_path):
    run, model = save("rove")
    rng = np.random.RandomState(1)
    texts = ["".join(chr(97 + c) for c in rng.randint(0, 26, 150)) for _ in range(2)]
    path = write_jsonl(tmp_path / "long.jsonl", texts)
    record = main(Args(run, lengths="150", yarn="none,4", data=path, quantities="curve"))
    assert record["results"] == []
    for yarn, factor in (("none", 1.0), ("4", 4.0)):
        found = curve_of(record, yarn)
        assert (found["edges"], found["counts"]) == ([0, 64, 128, 150], [63, 64, 22])
        nll = [nll64(model, [EOT, *text[:149].encode()], factor) for text in texts]
        bins = [[sum(x[:63]), sum(x[63:127]), sum(x[127:])] for x in nll]
        np.testing.assert_allclose(found["sums"], bins, rtol=2e-5)
        means = np.sum(bins, 0) / (2 * np.array([63, 64, 22]))
        np.testing.assert_allclose(found["nll"], means, rtol=2e-5)


def test_identities_between_the_quantities(save, tmp_path):
    """Attention is causal, so a window is the beginning of a longer one with the same start."""
    run, model = save("rove")
    rng = np.random.RandomState(1)
    texts = ["".join(chr(97 + c) for c in rng.randint(0, 26, 300)) for _ in range(3)]
    path = write_jsonl(tmp_path / "long.jsonl", texts)

    def of(lengths: str, quantities: str, stride: int = 256) -> dict:
        args = Args(run, lengths, "3", quantities, data=path, stride=stride, out=tmp_path / "x")
        return main(args)

    bins = np.array(curve_of(of("256", "curve"), "3")["sums"])  # (3, bins), edges 0 64 128 256
    for i, length in enumerate((64, 128, 256)):
        first = entry(of(f"{length}", "disjoint"), "disjoint", "3", length)["sums"]
        np.testing.assert_allclose(bins[:, : i + 1].sum(1), first, rtol=1e-6)
    last = entry(of("256", "last"), "last", "3", 256)  # K = 128
    np.testing.assert_allclose(bins[:, -1], last["sums"], rtol=1e-6)

    # sliding by a whole window is disjoint, and then the 3 tokens that no window holds
    both = of("64,256", "disjoint,sliding")
    a, d = (np.array(entry(both, q, "3", 64)["sums"]) for q in ("disjoint", "sliding"))
    rest = [sum(nll64(model, [EOT, *text[252:255].encode()], 3.0)) for text in texts]
    np.testing.assert_allclose(d - a, rest, rtol=1e-4)
    a, d = (entry(both, q, "3", 256)["sums"] for q in ("disjoint", "sliding"))
    assert a == d
    # more context is not less: a smaller stride scores the same tokens otherwise
    assert entry(of("64,256", "sliding", 8), "sliding", "3", 64)["counts"] == [255] * 3


def test_token_weighted_and_nothing_else(save):
    """transformers#34138: neither a mean of windows' means nor one of perplexities."""
    run, model = save("rope")
    record = main(Args(run, "20,32", "none", "sliding", stride=7))
    means = []
    for text in (d[:31] for d in documents() if len(d) >= 32):
        cuts = [(text[0:19], 19), (text[7:26], 7), (text[14:31], 5)]  # by hand
        means += [np.mean(nll64(model, [EOT, *window])[-k:]) for window, k in cuts]
    found = entry(record, "sliding", "none", 20)
    weighted = np.average(means, weights=[19, 7, 5] * 4)
    assert found["nll"] == pytest.approx(weighted, rel=2e-5)
    assert abs(np.mean(means) - weighted) > 1e-3 * weighted
    assert found["ppl"] == pytest.approx(math.exp(weighted), rel=1e-4)
    assert abs(np.mean(np.exp(means)) - found["ppl"]) > 0.05 * found["ppl"]


def test_yarn_is_seen_in_the_numbers(save):
    record = main(Args(save()[0], lengths="8,32", yarn="none,auto,4"))
    at = {yarn: entry(record, "last", yarn, 32)["nll"] for yarn in ("none", "auto", "4")}
    assert at["auto"] == at["4"] != at["none"]  # 32 / 8 is 4
    assert entry(record, "last", "auto", 8)["nll"] == entry(record, "last", "none", 8)["nll"]


def test_small_batches_give_the_same_sums(save, monkeypatch):
    run, _ = save()
    whole = main(Args(run, lengths="8,32", yarn="none"))
    monkeypatch.setattr(eval_perplexity, "FORWARD_TOKENS", 10)  # one window at a time
    single = main(Args(run, lengths="8,32", yarn="none"))
    for a, b in zip(whole["results"], single["results"], strict=True):
        np.testing.assert_allclose(a["sums"], b["sums"], rtol=1e-6)


def test_uniform_logits_score_ln_of_the_vocabulary(save):
    run, _ = save(std=0.0)
    record = main(Args(run, lengths="8,32", yarn="none,auto"))
    for result in record["results"]:
        assert result["nll"] == pytest.approx(math.log(257), abs=1e-6)
        assert result["ppl"] == pytest.approx(257, abs=1e-3)


def test_bfloat16_is_recorded_and_close(save):
    run, _ = save()
    exact = main(Args(run, lengths="8,32", yarn="none"))
    rough = main(Args(run, lengths="8,32", yarn="none", dtype="bfloat16"))
    assert (exact["dtype"], rough["dtype"]) == ("float32", "bfloat16")
    a, b = entry(exact, "last", "none", 32)["nll"], entry(rough, "last", "none", 32)["nll"]
    assert a != b and abs(a - b) < 0.05 * a


# -----------------------------------------------------------------------------
# text


def test_bytes_are_those_of_the_scored_tokens(save, tmp_path):
    """Half a character is a token of GPT-2: "\u65e5" is two bytes and one, "\u672c" as well."""
    run, _ = save(std=0.0, tokenizer=GPT2_TOKENIZER)
    path = write_jsonl(tmp_path / "kanji.jsonl", ["\u65e5\u672c" * 20] * 2)
    record = main(Args(run, "8,36", "none", data=path))
    disjoint, last = (entry(record, q, "none", 36) for q in ("disjoint", "last"))
    assert disjoint["counts"] == [35, 35] and disjoint["bytes"] == [18 * 2 + 17] * 2
    assert last["counts"] == [4, 4] and last["bytes"] == [1 + 2 + 1 + 2] * 2
    bits = math.log2(50257)  # uniform logits: a token costs this
    assert disjoint["bits_per_byte"] == pytest.approx(bits * 35 / 53, rel=1e-6)
    assert last["bits_per_byte"] == pytest.approx(bits * 4 / 6, rel=1e-6)


def test_texts_of_a_file(save, tmp_path):
    run, model = save("rope")
    marker = "<|endoftext|>"  # tiktoken#480: in a text it is text
    path = write_jsonl(tmp_path / "x.jsonl", [f"a{marker}b" * 3, "short", "", None, "c" * 40])
    record = main(Args(run, "8,32", "none", data=path))
    assert record["documents"] == {
        "in_split": 5, "long_enough": {8: 2, 32: 2}, "used": 2, "skipped_too_short": 3,
        "skipped_beyond_n": 0, "truncated_to_segment": 2,
    }  # fmt: skip
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert record["data"] == {
        "file": str(path), "sha256": sha256, "trained_on_manifest_sha256": "m",
    }  # fmt: skip
    ids = [EOT, *f"a{marker}b".encode() * 3][:32]
    assert ids.count(EOT) == 1
    found = entry(record, "disjoint", "none", 32)["sums"][0]
    assert found == pytest.approx(sum(nll64(model, ids)), rel=2e-5)


def test_a_file_that_is_no_text(save, tmp_path):
    run, _ = save()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": "typo"}\n')
    with pytest.raises(UserError, match="bad.jsonl line 2: no field 'text'"):
        main(Args(run, "8", "none", data=bad))
    with pytest.raises(UserError, match="nowhere"):
        main(Args(run, "8", "none", data=tmp_path / "nowhere"))
    with pytest.raises(UserError, match="empty.jsonl: 2 documents .* there are 0 of >= 8"):
        main(Args(run, "8", "none", data=write_jsonl(tmp_path / "empty.jsonl", [])))


def test_the_packed_stream(save):
    run, model = save("rope")
    record = main(Args(run, "8,20", "none", text="packed_stream"))
    assert not (run / "eval" / "perplexity.json").exists()
    assert (run / "eval" / "perplexity_packed.json").is_file()
    tokens = stream()
    assert len(tokens) == 212
    pieces = [tokens[i * 19 : i * 19 + 20] for i in range(11)]  # 11 * 19 = 209 of 211
    assert record["documents"] == {
        "in_split": 7, "segments_in_split": 11, "used": 11, "skipped_beyond_n": 0,
        "skipped_tail_tokens": 2,
    }  # fmt: skip
    assert [s["start"] for s in record["segments"]] == list(range(0, 209, 19))
    assert "unmasked" in record["protocol"]["bos"] and record["text"] == "packed_stream"
    found = {q: entry(record, q, "none", 20) for q in ("last", "disjoint")}
    nll = [nll64(model, piece) for piece in pieces]  # end-of-text among the targets
    np.testing.assert_allclose(found["disjoint"]["sums"], [sum(x) for x in nll], rtol=2e-5)
    np.testing.assert_allclose(found["last"]["sums"], [sum(x[-4:]) for x in nll], rtol=2e-5)
    assert found["disjoint"]["bytes"] == [19 - piece[1:].count(EOT) for piece in pieces]
    # a short window opens with the token before it
    cuts = [piece[i : i + 8] for piece in pieces for i in (0, 7)]
    sums = [sum(nll64(model, piece)) for piece in cuts]
    short = entry(record, "disjoint", "none", 8)
    np.testing.assert_allclose(short["sums"], np.reshape(sums, (11, 2)).sum(1), rtol=2e-5)


def test_the_packed_stream_is_the_validation_loss_of_training(save):
    """One token more than the context: as many are read."""
    run, model = save("rove")
    record = main(Args(run, "9", "none", "disjoint", text="packed_stream"))
    x = torch.tensor(stream()[: 26 * 8]).view(26, 8)
    y = torch.tensor(stream()[1 : 26 * 8 + 1]).view(26, 8)
    loss, _ = evaluate_loss(model.eval(), [(x, y)], DistInfo(0, 1, torch.device("cpu")))
    found = entry(record, "disjoint", "none", 9)
    assert found["tokens"] == 26 * 8 and found["nll"] == pytest.approx(loss, rel=1e-6)


# -----------------------------------------------------------------------------
# what there is no number for


def test_learned_positions_beyond_the_table_are_not_applicable(save):
    run, _ = save("learned")
    record = main(Args(run, lengths="4,8,16,32", yarn="none,auto"))
    for length in (4, 8):
        assert entry(record, "last", "none", length)["nll"] > 0
        assert "pos_emb 'learned'" in entry(record, "last", "auto", length)["reason"]
    why = "learned positions end at 8 tokens"
    for result in (*(entry(record, "last", "none", n) for n in (16, 32)), curve_of(record, "none")):
        assert result["nll"] is None and result["factor"] is None
        assert result["reason"] == why
    assert "NaN" not in (run / "eval" / "perplexity.json").read_text()


def test_there_is_no_curve_of_a_factor_that_depends_on_the_length(save):
    record = main(Args(save()[0], lengths="8,32", yarn="none,auto,4"))
    assert "another factor for each length" in curve_of(record, "auto")["reason"]
    assert curve_of(record, "auto")["nll"] is None
    assert curve_of(record, "none")["factor"] == 1.0 and curve_of(record, "4")["factor"] == 4.0
    assert curve_of(record, "none")["sums"] != curve_of(record, "4")["sums"]


def test_a_checkpoint_trained_with_yarn_keeps_its_factor(save):
    run, model = save(yarn=2.0)
    record = main(Args(run, lengths="8,16", yarn="none"))
    expected = sum(nll64(model, [EOT, *documents()[0][:15]], 2.0)[-4:])
    assert entry(record, "last", "none", 16)["sums"][0] == pytest.approx(expected, rel=2e-5)


# -----------------------------------------------------------------------------
# other models, other processes, and a second try


@pytest.fixture
def hf_gpt2(tmp_path):
    """A GPT-2 of HuggingFace's with random weights; (folder, model)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=2)
    model = reference.randomise(GPT2LMHeadModel(config).eval(), 0.2)
    model.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2", model


def test_a_gpt2_of_huggingface(hf_gpt2, tmp_path):
    folder, model = hf_gpt2
    text = "The quick brown fox jumps over the lazy dog. " * 8
    path, out = write_jsonl(tmp_path / "x.jsonl", [text, text[4:]]), tmp_path / "out.json"
    record = main(Args(folder, "16,32,64", "none", data=path, out=out))
    assert json.loads(out.read_text())["results"] == record["results"]
    # "The quick brown fox jumps over the lazy dog. The ..." by hand
    sentence = [2068, 7586, 21831, 18045, 625, 262, 16931, 3290, 13]
    ids = [50256, 464, *sentence, *([383, *sentence] * 6)][:64]
    for length in (16, 32):
        last = ids[64 - length + 1 :]
        with torch.no_grad():
            logits = model(torch.tensor([[50256, *last]])).logits[0, :-1].double()
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(last), reduction="none")
        found = entry(record, "last", "none", length)["sums"][0]
        assert found == pytest.approx(nll[-8:].sum().item(), rel=2e-5)
    assert entry(record, "last", "none", 64)["reason"] == "learned positions end at 32 tokens"
    with pytest.raises(UserError, match="gpt2: not in a run; say with --out"):
        main(Args(folder, "16", "none", data=path))
    with pytest.raises(UserError, match="does not say what it was trained on.*--data"):
        main(Args(folder, "16", "none", out=out))


def test_a_killed_evaluation_goes_on(save, monkeypatch):
    run, _ = save()
    monkeypatch.setattr(eval_perplexity, "FORWARD_TOKENS", 33)  # many parts
    args = Args(run, "8,32", "none,4", "last,disjoint,curve,sliding", stride=3)
    whole = main(dataclasses.replace(args, out=run / "whole.json"))
    score, calls = eval_perplexity.score, []

    def counted(stop: int):
        def scored(*args, **options):
            calls.append(1)
            if len(calls) > stop:
                raise KeyboardInterrupt
            return score(*args, **options)

        return scored

    monkeypatch.setattr(eval_perplexity, "score", counted(10**9))
    main(dataclasses.replace(args, out=run / "again.json"))
    parts = len(calls)
    assert parts > 20
    calls.clear()
    monkeypatch.setattr(eval_perplexity, "score", counted(parts - 5))  # within the second factor
    with pytest.raises(KeyboardInterrupt):
        main(args)
    assert not (run / "eval" / "perplexity.json").exists()
    calls.clear()
    monkeypatch.setattr(eval_perplexity, "score", counted(5))
    record = main(args)
    assert len(calls) == 5
    assert record["results"] == whole["results"] and record["curve"] == whole["curve"]
    assert [p.name for p in (run / "eval").iterdir()] == ["perplexity.json"]

    # with other settings nothing of it is of use
    calls.clear()
    monkeypatch.setattr(eval_perplexity, "score", counted(parts - 5))
    with pytest.raises(KeyboardInterrupt):
        main(args)
    calls.clear()
    monkeypatch.setattr(eval_perplexity, "score", counted(10**9))
    main(dataclasses.replace(args, dtype="bfloat16"))
    assert len(calls) == parts


MANY_PARTS = """
import tyro
from nanorove.distributed import run_distributed
from scripts import eval_perplexity
eval_perplexity.FORWARD_TOKENS = 33
run_distributed(lambda: eval_perplexity.main(tyro.cli(eval_perplexity.Args)))
"""


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bits(save):
    """nanoGPT#673; the parts are no multiple of 2 or 5, so some process has none at the end."""
    run, _ = save()
    Path("many_parts.py").write_text(MANY_PARTS)
    found = []
    for processes in (1, 2, 5):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc_per_node={processes}", "many_parts.py", str(run),
                   "--lengths", "8,16,32", "--yarn", "none,auto", "--documents", "3"]  # fmt: skip
        env = os.environ | {"PYTHONPATH": str(REPO)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        record = json.loads((run / "eval" / "perplexity.json").read_text())
        found.append({k: v for k, v in record.items() if not k.startswith("git_")})
    assert found[0] == found[1] == found[2]


# -----------------------------------------------------------------------------
# the record, and bad input


def test_the_record(save, data):
    run, _ = save()
    record = main(Args(run, lengths="32,8", yarn="none", documents=3))
    assert (
        json.loads((run / "eval" / "perplexity.json").read_text())["results"] == record["results"]
    )
    step_dir = run / "ckpt" / "step_00000006"
    weights = hashlib.sha256((step_dir / "model.safetensors").read_bytes()).hexdigest()
    manifest = hashlib.sha256((data / "manifest.json").read_bytes()).hexdigest()
    shard = hashlib.sha256((data / "tiny_val_000000.bin").read_bytes()).hexdigest()
    assert record["model_sha256"] == weights
    assert record["data"]["manifest_sha256"] == manifest
    assert record["data"]["shards"] == [{"file": "tiny_val_000000.bin", "sha256": shard}]
    assert record["config"]["model"]["pos_emb"] == "rove" and record["step"] == 6
    assert record["tokenizer"] == TOKENIZER
    assert record["last_k"] == 4
    assert record["documents"] == {
        "in_split": 7, "long_enough": {8: 5, 32: 4}, "used": 3, "skipped_too_short": 3,
        "skipped_beyond_n": 1, "truncated_to_segment": 3,
    }  # fmt: skip
    first = np.array([EOT, *documents()[0][:31]], "<u2").tobytes()
    assert record["segments"][0] == {
        "document": 0, "document_tokens": 40, "sha256": hashlib.sha256(first).hexdigest(),
    }  # fmt: skip
    assert [s["document"] for s in record["segments"]] == [0, 2, 5]


def test_step_folder_and_out(save, tmp_path):
    run, _ = save()
    out = tmp_path / "here" / "result.json"
    main(Args(run / "ckpt" / "step_00000006", lengths="8", yarn="none", out=out))
    assert out.is_file() and not (run / "eval").exists()
    main(Args(run, lengths="8", yarn="none"))
    of_the_run = (run / "eval" / "perplexity.json").read_text()
    main(Args(run / "ckpt" / "step_00000006", lengths="8,16", yarn="none"))
    assert (run / "eval" / "perplexity_step_00000006.json").is_file()
    assert (run / "eval" / "perplexity.json").read_text() == of_the_run
    alone = tmp_path / "alone"
    shutil.copytree(run / "ckpt" / "step_00000006", alone)
    with pytest.raises(UserError, match="alone: not in a run; say with --out"):
        main(Args(alone, lengths="8", yarn="none"))


def test_too_few_long_documents_are_counted(save):
    run, _ = save()
    with pytest.raises(
        UserError, match="5 of >= 8, 4 of >= 32, 1 of >= 50 tokens.*shorter --lengths"
    ):
        main(Args(run, lengths="8,32,50", yarn="none"))
    with pytest.raises(UserError, match="5 documents of >= 32 tokens are needed"):
        main(Args(run, lengths="8,32", yarn="none", documents=5))


def test_another_tokenizer_is_refused(save, data):
    run, _ = save()
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = "1" * 64
    (data / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    with pytest.raises(UserError, match="tokenizer bytes 111111"):
        main(Args(run, lengths="8", yarn="none"))


def test_a_changed_shard_is_refused(save, data):
    run, _ = save()
    shard = data / "tiny_val_000000.bin"
    body = bytearray(shard.read_bytes())
    body[-2] ^= 1
    shard.write_bytes(body)
    with pytest.raises(UserError, match="tiny_val_000000.bin: sha256"):
        main(Args(run, lengths="8", yarn="none"))


def test_weights_that_are_not_numbers_are_refused(save):
    run, _ = save(std=float("inf"))
    with pytest.raises(UserError, match="step_00000006, YaRN factor 1: .* not finite"):
        main(Args(run, lengths="8", yarn="none"))
    run, _ = save(std=40.0)
    with pytest.raises(UserError, match="8 tokens, .* nats per token: .* diverged"):
        main(Args(run, lengths="8", yarn="none"))


def test_a_stream_without_text_has_no_bytes(save, tmp_path):
    path = write_jsonl(tmp_path / "nothing.jsonl", [""] * 20)
    record = main(Args(save()[0], "8", "none", "last", "packed_stream", data=path))
    assert record["results"][0]["bits_per_byte"] is None and record["results"][0]["nll"] > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lengths": "256,x"}, "--lengths 256,x: write whole numbers"),
        ({"lengths": ""}, "--lengths : write whole numbers"),
        ({"lengths": "2,256"}, "--lengths 2,256: a window has at least 4 tokens"),
        ({"lengths": "-8"}, "--lengths -8: a window has at least 4"),
        ({"lengths": f"8,{10**30}"}, f"2 documents of >= {10**30} tokens are needed"),
        ({"lengths": f"{10**30}", "text": "packed_stream"}, "but 212 tokens make 0"),
        ({"text": "packed_stream", "documents": 99, "lengths": "8"}, "99 segments of 8 tokens"),
        ({"documents": 1}, "--documents 1: at least 2"),
        ({"documents": -3}, "--documents -3: at least 2"),
        ({"stride": 0}, "--stride 0: windows advance by at least 1"),
        ({"quantities": "last,first"}, "--quantities last,first: 'first' is none of last, disjo"),
        ({"quantities": ""}, "--quantities : '' is none of"),
        ({"yarn": "0.5"}, "--yarn 0.5: '0.5' is neither"),
    ],
)
def test_one_clear_line(save, options, match):
    with pytest.raises(UserError, match=match) as error:
        main(Args(save()[0], **options))
    assert "\n" not in str(error.value)


def test_command_line_lists():
    assert parse_lengths("1024,256,256") == [256, 1024]
    assert parse_quantities("sliding, last") == ["last", "sliding"]
    assert default_lengths(GPTConfig()) == [512, 1024, 2048, 4096, 8192, 16384]
