"""scripts.eval_perplexity against windows and sums written out by hand, with the float64 model of
tests/reference.py."""

import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from nanorove.checkpoint import save_checkpoint
from nanorove.config import load_config
from nanorove.errors import UserError
from nanorove.optim import make_optimizer
from scripts import eval_perplexity
from scripts.eval_perplexity import Args, cut, main, parse_lengths, parse_yarn, yarn_factor
from tests import reference
from tests.conftest import EOT, with_checksum, write_data_dir

BYTES_SHA256 = hashlib.sha256(bytes(range(256)) + b"<|endoftext|>").hexdigest()
TOKENIZER = {"name": "bytes", "vocab_size": 257, "eot": EOT, "sha256": BYTES_SHA256}
SIZES = [40, 5, 33, 0, 31, 64, 32]  # tokens of the validation documents; 4 fill 32 tokens


def documents() -> list[list[int]]:
    rng = np.random.RandomState(5)
    return [rng.randint(0, 256, size).tolist() for size in SIZES]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    val = [t for document in documents() for t in [EOT, *document]]
    folder = write_data_dir(tmp_path / "shards", train=[val], val=[val])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer"] = TOKENIZER
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    return folder


@pytest.fixture
def save(tiny_toml, data):
    """Write a run of the tiny config with random weights; returns (run folder, model)."""

    def write(pos_emb: str = "rove", std: float = 0.3, yarn: float = 1.0) -> tuple[Path, GPT]:
        path = tiny_toml()
        overrides = ["--model.pos_emb", pos_emb, "--model.yarn_factor", str(yarn)]
        config, _ = load_config([path, "--data.dir", str(data), *overrides])
        model = reference.randomise(GPT(config.model), std, seed=2)
        extra = {"data": {"manifest_sha256": "m", "tokenizer": TOKENIZER}}
        save_checkpoint(
            config.run_dir, 6, config, model, make_optimizer(model, config.train), extra
        )
        return config.run_dir, model

    return write


def entry(record: dict, quantity: str, yarn: str, length: int) -> dict:
    (found,) = (
        r for r in record["results"]
        if (r["quantity"], r["yarn"], r["length"]) == (quantity, yarn, length)
    )  # fmt: skip
    return found


# -----------------------------------------------------------------------------
# windows


def test_golden_windows():
    segment = np.arange(16, dtype=np.uint16)
    idx, targets = cut("disjoint", segment, 8, 3, eot=99)
    assert idx.tolist() == [[99, 0, 1, 2, 3, 4, 5], [99, 7, 8, 9, 10, 11, 12]]
    assert targets.tolist() == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]]
    idx, targets = cut("last", segment, 8, 3, eot=99)
    assert idx.tolist() == [[99, 9, 10, 11, 12, 13, 14]]
    assert targets.tolist() == [[13, 14, 15]]


def test_end_of_text_leads_every_window_and_is_never_scored():
    segment = np.arange(1000, dtype=np.uint16) % 200
    for quantity in ("last", "disjoint"):
        idx, targets = cut(quantity, segment, 100, 20, eot=256)
        assert (idx[:, 0] == 256).all() and (idx[:, 1:] != 256).all() and (targets != 256).all()
        assert idx.shape[1] == 99  # the hundredth token of a window is a target alone


def test_last_scores_the_same_targets_at_every_length():
    # yarn#13: a curve must compare equal targets
    segment = np.random.RandomState(0).randint(0, 1000, 4096)
    found = [cut("last", segment, n, 64, eot=1000)[1].tolist() for n in (128, 256, 1000, 4096)]
    assert found == [[segment[-64:].tolist()]] * 4


def test_disjoint_scores_each_token_at_most_once():
    # lm-evaluation-harness#369: here windows do not overlap
    segment = np.arange(1000)
    for length in (4, 7, 100, 999, 1000):
        _, targets = cut("disjoint", segment, length, 2, eot=2000)
        n = 1000 // length * (length - 1)
        assert targets.ravel().tolist() == list(range(n))


# -----------------------------------------------------------------------------
# the numbers


@pytest.mark.parametrize("pos_emb", ["rope", "rove", "none"])
def test_against_a_plain_loop_in_float64(save, pos_emb):
    run, model = save(pos_emb)
    record = main(Args(run, lengths="8,20,32", yarn="none,auto,2.5"))
    chosen = [d[:32] for d in documents() if len(d) >= 32]
    assert len(chosen) == 4
    K = 4  # min(256, 8 / 2)
    settings = ("none", "auto", "2.5") if pos_emb != "none" else ("none",)
    for yarn in settings:
        for length in (8, 20, 32):
            factor = {"none": 1.0, "auto": max(1.0, length / 8), "2.5": 2.5}[yarn]
            config = dataclasses.replace(model.config, yarn_factor=factor)
            last, disjoint = [], []
            for text in chosen:
                windows = [text[32 - (length - 1) :]]  # last
                windows += [
                    text[i * (length - 1) : (i + 1) * (length - 1)] for i in range(32 // length)
                ]
                sums = []
                for number, window in enumerate(windows):
                    ids = torch.tensor([EOT, *window[:-1]])
                    log_probs = reference.logits(model.state_dict(), config, ids).log_softmax(-1)
                    nll = [-log_probs[i, t].item() for i, t in enumerate(window)]
                    sums.append(math.fsum(nll[-K:] if number == 0 else nll))
                last.append(sums[0])
                disjoint.append(math.fsum(sums[1:]))
            a, b = entry(record, "last", yarn, length), entry(record, "disjoint", yarn, length)
            assert a["factor"] == b["factor"] == factor
            assert a["counts"] == [K] * 4
            assert b["counts"] == [32 // length * (length - 1)] * 4
            np.testing.assert_allclose(a["sums"], last, rtol=2e-5)
            np.testing.assert_allclose(b["sums"], disjoint, rtol=2e-5)
            assert a["nll"] == pytest.approx(sum(last) / (4 * K), rel=2e-5)
            assert a["ppl"] == pytest.approx(math.exp(sum(last) / (4 * K)), rel=1e-4)


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
# what there is no number for


def test_learned_positions_beyond_the_table_are_not_applicable(save):
    record = main(Args(save("learned")[0], lengths="4,8,16,32", yarn="none,auto"))
    for length in (4, 8):
        assert entry(record, "last", "none", length)["nll"] > 0
        assert "pos_emb 'learned'" in entry(record, "last", "auto", length)["reason"]
    for length in (16, 32):
        result = entry(record, "last", "none", length)
        assert result["nll"] is None and result["ppl"] is None
        assert result["reason"] == "learned positions end at 8 tokens"


def test_yarn_factor():
    rope = GPTConfig(block_size=1024)
    assert [yarn_factor(s, 4096, rope) for s in ("none", "auto", "8")] == [1.0, 4.0, 8.0]
    assert yarn_factor("auto", 512, rope) == 1.0
    extended = GPTConfig(block_size=1024, yarn_factor=4.0)  # trained with YaRN at 4096
    assert [yarn_factor("none", n, extended) for n in (512, 8192)] == [4.0, 4.0]
    assert [yarn_factor("auto", n, extended) for n in (512, 8192)] == [4.0, 8.0]
    without = GPTConfig(pos_emb="none")
    assert yarn_factor("none", 4096, without) == 1.0
    assert "none" in yarn_factor("2", 4096, without)


def test_a_checkpoint_trained_with_yarn_keeps_its_factor(save):
    run, model = save(yarn=2.0)
    record = main(Args(run, lengths="8,16", yarn="none"))
    text = documents()[0][:16]
    ids = torch.tensor([EOT, *text[1:-1][-14:]])
    log_probs = reference.logits(model.state_dict(), model.config, ids).log_softmax(-1)
    expected = -sum(log_probs[len(ids) - 4 + i, text[12 + i]].item() for i in range(4))
    assert entry(record, "last", "none", 16)["sums"][0] == pytest.approx(expected, rel=2e-5)


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
    assert record["tokenizer"] == {"name": "bytes", "sha256": BYTES_SHA256}
    assert record["last_k"] == 4
    assert record["documents"] == {
        "in_split": 7, "long_enough": {8: 5, 32: 4}, "used": 3, "skipped_too_short": 3,
        "skipped_beyond_n": 1, "truncated_to_segment": 3,
    }  # fmt: skip
    first = np.array(documents()[0][:32], "<u2").tobytes()
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
    with pytest.raises(UserError, match="alone: a step folder outside a run.*--out"):
        main(Args(alone, lengths="8", yarn="none"))


def test_too_few_long_documents_are_counted(save):
    run, _ = save()
    with pytest.raises(
        UserError, match="5 of >= 8, 4 of >= 32, 1 of >= 50 tokens.*shorter --lengths"
    ):
        main(Args(run, lengths="8,32,50", yarn="none"))
    with pytest.raises(UserError, match="5 of >= 32 tokens are needed"):
        main(Args(run, lengths="8,32", yarn="none", documents=5))
    with pytest.raises(UserError, match="at least 2"):
        main(Args(run, lengths="8,32", yarn="none", documents=1))


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
    with pytest.raises(UserError, match="not finite"):
        main(Args(run, lengths="8", yarn="none"))


def test_command_line_lists():
    assert parse_lengths("1024,256,256") == [256, 1024]
    assert parse_yarn("none, auto,4,none") == ["none", "auto", "4"]
    assert parse_yarn("4.0,4,2.50") == ["4", "2.5"]
    for text in ("256,x", "", "2,256", "0"):
        with pytest.raises(UserError, match="--lengths"):
            parse_lengths(text)
    for text in ("off", "none,0.5", "nan", ""):
        with pytest.raises(UserError, match="--yarn"):
            parse_yarn(text)
