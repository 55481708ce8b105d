"""nanorove.hellaswag and its script against a plain forward pass and numbers by hand."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.tokenizer import ByteTokenizer, GPT2Tokenizer
from model import GPT
from nanorove import evaluation, hellaswag
from nanorove.checkpoint import save_checkpoint
from nanorove.config import load_config
from nanorove.distributed import DistInfo
from nanorove.errors import UserError
from nanorove.hellaswag import Item, evaluate_hellaswag, outcome, read_items, spans
from nanorove.optim import make_optimizer
from nanorove.scoring import Scored
from scripts.eval_hellaswag import Args, main
from tests import reference
from tests.conftest import EOT, REPO

TOKENIZER = {"name": "bytes", "vocab_size": 257, "eot": EOT, "sha256": ByteTokenizer().sha256}
GOLDEN = {
    "ctx": "A man is sitting on a roof. he",
    "endings": [
        "is using wrap to wrap a pair of skis.",
        "is ripping level tiles off.",
        "is holding a rubik's cube.",
        "starts pulling up roofing on a roof.",
    ],
    "label": 3,
}


def write_run(path: str, *overrides: str, std: float = 0.3) -> tuple[Path, GPT]:
    """A run with random weights of the config at `path`: (run folder, model)."""
    config, _ = load_config([path, *overrides])
    model = reference.randomise(GPT(config.model), std, seed=2)
    extra = {"data": {"manifest_sha256": "m", "tokenizer": TOKENIZER}}
    save_checkpoint(config.run_dir, 6, config, model, make_optimizer(model, config.train), extra)
    return config.run_dir, model


@pytest.fixture
def run(tiny_toml) -> tuple[Path, GPT]:
    """Long enough for the rows below, but for one."""
    return write_run(tiny_toml(("block_size = 8", "block_size = 40")))


def rows() -> list[dict]:
    rng = np.random.RandomState(3)

    def text(n: int) -> str:
        return "".join(chr(97 + c) for c in rng.randint(0, 26, n))

    found = [
        {"ctx": text(rng.randint(1, 15)), "endings": [text(rng.randint(1, 15)) for _ in range(4)],
         "label": int(rng.randint(4)), "ind": i}
        for i in range(11)
    ]  # fmt: skip
    found[4]["ctx"] = "<|endoftext|>"  # a text like any other
    found[7]["ctx"] = text(60)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def plain(model: GPT, row: dict, context: int) -> tuple[list[float], list[int]]:
    """Summed NLL and number of tokens of each ending, by one whole forward pass per row."""
    sums, tokens = [], []
    for ending in row["endings"]:
        ending_ids = list((" " + ending).encode())
        ids = (list(row["ctx"].encode()) + ending_ids)[-context:]
        with torch.no_grad():
            log_probs = model(torch.tensor([ids]))[0].double().log_softmax(-1)
        first = len(ids) - len(ending_ids)
        sums.append(math.fsum(-log_probs[t - 1, ids[t]].item() for t in range(first, len(ids))))
        tokens.append(len(ending_ids))
    return sums, tokens


# -----------------------------------------------------------------------------
# one row


def test_golden_tokens(tmp_path):
    """build-nanogpt's example: context and endings are encoded apart, nothing leads them."""
    path = tmp_path / "golden.jsonl"
    path.write_text(json.dumps(GOLDEN) + "\n")
    (item,) = read_items(path, GPT2Tokenizer().encode)
    assert item.context.tolist() == [32, 582, 318, 5586, 319, 257, 9753, 13, 339]
    assert [len(e) for e in item.endings] == [11, 6, 8, 9]
    assert item.label == 3
    assert [(s.start, s.end) for s in spans(item, 1024)] == [(9, 20), (9, 15), (9, 17), (9, 18)]
    assert spans(item, 1024)[1].ids[:9].tolist() == item.context.tolist()


def test_sum_and_mean_choose_differently():
    """lm-evaluation-harness#372: two numbers, two names."""
    item = Item(np.arange(3), tuple(np.arange(n) for n in (3, 1, 8, 2)), 2)
    nll = [[1.0, 1.0, 1.0], [2.5], [0.5] * 8, [3.0, 3.0]]  # sums 3, 2.5, 4, 6; means 1, 2.5, .5, 3
    found = outcome(item, [Scored(np.array(n), np.zeros(len(n), bool)) for n in nll])
    assert found == {
        "label": 2, "nll": [3.0, 2.5, 4.0, 6.0], "tokens": [3, 1, 8, 2],
        "choice": 1, "choice_norm": 2,
    }  # fmt: skip


def test_the_first_of_equals():
    item = Item(np.arange(3), tuple(np.arange(2) for _ in range(4)), 0)
    found = outcome(item, [Scored(np.ones(2), np.zeros(2, bool))] * 4)
    assert (found["choice"], found["choice_norm"]) == (0, 0)


def test_a_row_beyond_the_context_keeps_its_end():
    item = Item(np.arange(10), (np.arange(100, 104), *[np.arange(200, 212)] * 3), 0)
    short, long = spans(item, 8)[:2]
    assert short.ids.tolist() == [6, 7, 8, 9, 100, 101, 102, 103] and short.start == 4
    assert long.ids.tolist() == list(range(204, 212)) and long.start == 1


# -----------------------------------------------------------------------------
# the script and the evaluation in training


def test_against_a_plain_forward_pass(run, file):
    folder, model = run
    record = main(Args(folder, file))
    items = record["items"]
    assert [i["index"] for i in items] == list(range(11)) and record["counts"]["items"] == 11
    right = norm = 0
    for row, item in zip(rows(), items, strict=True):
        sums, tokens = plain(model, row, 40)
        assert item["nll"] == pytest.approx(sums, rel=1e-5) and item["tokens"] == tokens
        means = [s / n for s, n in zip(sums, tokens, strict=True)]
        right += sums.index(min(sums)) == row["label"]
        norm += means.index(min(means)) == row["label"]
    assert record["acc"] == right / 11 and record["acc_norm"] == norm / 11
    assert record["counts"]["truncated"] == 1
    assert json.loads((folder / "eval" / "hellaswag.json").read_text()) == record
    assert list((folder / "eval").iterdir()) == [folder / "eval" / "hellaswag.json"]

    found = evaluate_hellaswag(model, read_items(file, ByteTokenizer().encode), DistInfo(0, 1, CPU))
    assert found == {"hellaswag/acc": right / 11, "hellaswag/acc_norm": norm / 11}


CPU = torch.device("cpu")


def test_limit_takes_the_first(run, file):
    whole, part = main(Args(run[0], file)), main(Args(run[0], file, limit=5))
    assert part["counts"]["items"] == 5 and part["settings"]["limit"] == 5
    for a, b in zip(part["items"], whole["items"], strict=False):  # another batch: the last bits
        assert a["nll"] == pytest.approx(b["nll"], rel=1e-6) and a["label"] == b["label"]


def test_uniform_logits(tiny_toml, file):
    """Every token costs ln V, so acc takes the shortest ending and acc_norm the first."""
    folder, model = write_run(tiny_toml(), std=0.0)
    assert not model.transformer.wte.weight.any()
    for item in main(Args(folder, file))["items"]:
        assert item["nll"] == pytest.approx([n * math.log(257) for n in item["tokens"]], rel=1e-6)
        assert item["choice"] == item["tokens"].index(min(item["tokens"]))


@dataclass(frozen=True)
class Alone(DistInfo):
    """One rank of several, of which only its own part is seen."""

    def sum_across_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("ranks", [2, 3, 20])
def test_ranks_share_the_items(run, file, monkeypatch, ranks):
    """nanoGPT#673: the parts add up, also with ranks that have none."""
    monkeypatch.setattr(
        hellaswag, "batches", lambda groups: evaluation.batches(groups, max_tokens=200)
    )
    items = read_items(file, ByteTokenizer().encode)
    chosen = [plain(run[1], row, 40)[0] for row in rows()]
    right = [c.index(min(c)) for c in chosen]
    items = [replace(item, label=right[i] if i % 3 else 0) for i, item in enumerate(items)]
    whole = evaluate_hellaswag(run[1], items, DistInfo(0, 1, CPU))
    assert whole["hellaswag/acc"] >= 7 / 11
    seen = []
    score = hellaswag.score
    monkeypatch.setattr(
        hellaswag, "score", lambda model, groups, **k: seen.extend(groups) or score(model, groups)
    )
    parts = [evaluate_hellaswag(run[1], items, Alone(r, ranks, CPU)) for r in range(ranks)]
    for key, value in whole.items():
        assert math.fsum(part[key] for part in parts) == pytest.approx(value, abs=1e-12)
    assert len(seen) == 11  # each item once


def test_training_does_not_notice(run, file):
    """Neither weights, gradients, mode nor the random stream change."""
    _, model = run
    model.train()
    x = torch.arange(20).view(2, 10)
    model(x, x).backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    random = torch.get_rng_state()
    evaluate_hellaswag(model, read_items(file, ByteTokenizer().encode), DistInfo(0, 1, CPU))
    assert model.training and torch.equal(torch.get_rng_state(), random)
    for p, (weight, grad) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, weight) and torch.equal(p.grad, grad) and p.requires_grad
    model(x, x).backward()  # and it goes on


def test_a_killed_evaluation_goes_on(run, file, monkeypatch):
    folder, _ = run
    whole = main(Args(folder, file))
    (folder / "eval" / "hellaswag.json").unlink()
    calls = []

    def killed(model, groups, **kwargs):
        calls.append(len(groups))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(model, groups, **kwargs)

    score, batches = evaluation.score, evaluation.batches
    monkeypatch.setattr(evaluation, "score", killed)
    monkeypatch.setattr(evaluation, "batches", lambda groups, _: batches(groups, 300))
    with pytest.raises(KeyboardInterrupt):
        main(Args(folder, file))
    assert not (folder / "eval" / "hellaswag.json").exists()
    done = sum(calls[:2])
    calls[:] = [0] * 3
    again = main(Args(folder, file))
    assert sum(calls) == 11 - done
    for a, b in zip(again["items"], whole["items"], strict=True):
        assert a["nll"] == pytest.approx(b["nll"], rel=1e-6)
    assert list((folder / "eval").iterdir()) == [folder / "eval" / "hellaswag.json"]


@pytest.mark.slow
def test_two_processes_give_the_same(run, file):
    main(Args(run[0], file, out=Path("one.json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "-m", "scripts.eval_hellaswag", str(run[0].resolve()), "--data", str(file),
               "--out", str(Path("two.json").resolve())]  # fmt: skip
    subprocess.run(command, check=True, cwd=REPO)
    one, two = (json.loads(Path(f"{n}.json").read_text()) for n in ("one", "two"))
    assert one["items"] == two["items"] and one["acc"] == two["acc"]


# -----------------------------------------------------------------------------
# files


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row.pop("ctx"), "no 'ctx'"),
        (lambda row: row.pop("endings"), "no 'endings'"),
        (lambda row: row.pop("label"), "no 'label'"),
        (lambda row: row.update(label=4), "label is 4"),
        (lambda row: row.update(label="2"), "label is '2'"),
        (lambda row: row.update(label=True), "label is True"),
        (lambda row: row.update(endings=["a", "b", "c"]), "4"),
        (lambda row: row.update(endings=["a", "b", "c", 4]), "no text"),
        (lambda row: row.update(ctx=""), "ctx is ''"),
    ],
)
def test_bad_rows_are_named(tmp_path, change, words):
    found = rows()
    change(found[2])
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    with pytest.raises(UserError, match=words) as error:
        read_items(path, ByteTokenizer().encode)
    assert f"{path}:3: " in str(error.value) and "\n" not in str(error.value)
    assert len(read_items(path, ByteTokenizer().encode, limit=2)) == 2


@pytest.mark.parametrize("line", [b"[1, 2]", b"{", b'"text"', b'{"ctx": "\xff"}', b"", b"[" * 9999])
def test_lines_that_are_no_rows(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(GOLDEN).encode() + b"\n" + line + b"\n")
    with pytest.raises(UserError, match="bad.jsonl:2: not a row of HellaSwag"):
        read_items(path, ByteTokenizer().encode)


def test_no_rows_and_no_file(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="empty.jsonl: no rows"):
        read_items(tmp_path / "empty.jsonl", ByteTokenizer().encode)
    with pytest.raises(UserError, match="missing.jsonl: No such file"):
        read_items(tmp_path / "missing.jsonl", ByteTokenizer().encode)


def test_the_default_file_is_fetched_and_checked(run, file, monkeypatch):
    """12,246,618 bytes, and the hash that HuggingFace's datasets library checks it with."""
    asked = []

    def fetch(url, path, *, bytes, sha256):
        asked.append((url.rsplit("/", 1)[1], bytes, sha256[:12]))
        path.parent.mkdir(parents=True)
        shutil.copy(file, path)

    monkeypatch.setattr("scripts.eval_hellaswag.fetch", fetch)
    record = main(Args(run[0]))
    assert asked == [("hellaswag_val.jsonl", 12_246_618, "0aa3b8884399")]
    assert record["data"]["public"] is False and record["counts"]["items"] == 11
    main(Args(run[0]))
    assert len(asked) == 1


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_is_at_least_one(run, file, limit):
    with pytest.raises(UserError, match="--limit"):
        main(Args(run[0], file, limit=limit))
