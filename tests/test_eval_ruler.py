"""scripts.eval_ruler and nanorove.ruler_metrics against strings and numbers by hand, a plain
forward pass, a model that knows all answers and one that knows nothing."""

import dataclasses
import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data import ruler
from data.tokenizer import ByteTokenizer, GPT2Tokenizer
from model import GPT
from nanorove import evaluation, ruler_metrics, scoring
from nanorove.errors import UserError
from nanorove.ruler_metrics import answers, derangement, match_all, match_part, post_process
from scripts import eval_ruler
from scripts.eval_ruler import Args, Task, main, make_plan
from tests.conftest import EOT, REPO, with_checksum
from tests.test_hellaswag import TOKENIZER, write_run

SHORT, LONG = 96, 128  # "lengths" of the data below, in bytes


# -----------------------------------------------------------------------------
# strings


@pytest.mark.parametrize(
    ("task", "outputs", "wanted"),
    [
        ("niah_single_1", ["7374122"], [" 7374122"]),
        ("niah_multikey_3", ["a-b"], [" a-b"]),
        ("niah_multivalue", ["1", "2", "3", "4"], [" 1, 2, 3, 4"]),
        ("niah_multiquery", ["4", "3"], [" 4, 3"]),
        ("vt", ["AB", "CD", "EF"], [" AB CD EF"]),
        ("cwe", ["be", "to"], [" 1. be 2. to"]),
        ("fwe", ["abc", "def", "ghi"], [" abc def ghi"]),
        ("qa_1", ["in 1066", "1066", "in 1066"], [" in 1066", " 1066"]),
        ("qa_2", ["yes"], [" yes"]),
    ],
)
def test_answers(task, outputs, wanted):
    assert answers(task, outputs) == wanted


def test_single_answers():
    assert ruler_metrics.single_answers("cwe", ["be", "to"]) == [" 1. be", " 1. to"]
    assert ruler_metrics.single_answers("niah_multiquery", ["4", "3"]) == [" 4", " 3"]


def test_string_match():
    """The example of NVIDIA/RULER#30, and the difference of the two (NVIDIA/RULER#15)."""
    text = (
        "1. arthur 2. kilt 3. fire 4. meter 5. appliance 6. behalf 7. forest 8. activity"
        " 9. authenticity 10. ferret"
    )
    words = ["appliance", "meter", "forest", "ferret", "kilt", "behalf", "fire", "activity",
             "arthur", "authenticity"]  # fmt: skip
    assert match_all(text, words) == 1.0
    assert match_all("1. Arthur 2. KILT", words) == 0.2
    assert match_all("", words) == 0.0 == match_part("", words)
    assert match_part("the Meter", words) == 1.0 == match_part(text, words)
    assert match_all("metering", ["meter"]) == 1.0  # a substring counts


@pytest.mark.parametrize("match", [match_all, match_part])
@pytest.mark.parametrize("references", ["7374122", []])
def test_string_match_wants_a_list(match, references):
    """NVIDIA/RULER#30: a string would be compared letter by letter."""
    with pytest.raises(ValueError, match="a list of references"):
        match("7374122", references)
    with pytest.raises(ValueError):
        match(["7374122"], ["7374122"])


def test_post_process():
    assert post_process("  \n a\tb\x00\x1fc \n") == "a\nb\n\nc"
    assert post_process("\x01 x \x02") == "x"
    assert post_process(" é\x7f ") == "é\x7f"


def test_derangement_has_no_fixed_point():
    for n in range(2, 60):
        found = derangement(n)
        assert sorted(found) == list(range(n)) and all(i != j for i, j in enumerate(found))
    assert derangement(1) is None


def test_categories():
    assert len(ruler_metrics.TASKS) == 13 and len(ruler_metrics.CATEGORIES["niah"]) == 8
    rows = [{"nll": 6.0, "tokens": 3, "exact": True, "prefix_only": None, "shuffled": None},
            {"nll": 4.0, "tokens": 1, "exact": False, "prefix_only": None, "shuffled": None},
            {"nll": None, "tokens": None, "exact": None, "prefix_only": None}]  # fmt: skip
    one = ruler_metrics.summarise_task(rows)
    assert one["nll"] == 3.0 and one["token_nll"] == 2.5 and one["exact"] == 0.5  # (2 + 4) / 2
    assert (one["samples"], one["scored"], one["tokens"], one["sum_nll"]) == (3, 2, 4, 10.0)
    assert one["generation"] is None and one["prefix_only"] is None
    two = ruler_metrics.summarise_task([{"nll": 1.0, "tokens": 1, "exact": True}])
    found = ruler_metrics.combine({"qa_1": one, "vt": two}, ruler_metrics.CATEGORIES["qa"])
    assert (found["nll"], found["tasks"], found["of"], found["missing"]) == (3.0, 1, 2, ["qa_2"])
    found = ruler_metrics.combine({"qa_1": one, "vt": two}, ruler_metrics.TASKS)
    assert found["nll"] == 2.0 and found["tasks"] == 2 and len(found["missing"]) == 11
    assert ruler_metrics.combine({"vt": two}, ("cwe",))["nll"] is None


# -----------------------------------------------------------------------------
# data by hand

NEW_TOKENS = {"niah_single_1": 8, "niah_multivalue": 16, "vt": 12, "cwe": 30, "qa_1": 8}


def make_samples(task: str, length: int, n: int = 3) -> list[dict]:
    """Samples in data.ruler's format, in bytes; what they ask makes no sense."""
    rng = np.random.RandomState(length + len(task))

    def word(k: int = 3) -> str:
        return "".join(chr(97 + c) for c in rng.randint(0, 26, k))

    found = []
    for index in range(n):
        few = {"niah_single_1": 1, "niah_multivalue": 3, "vt": 2, "cwe": 3, "qa_1": 3}[task]
        outputs = [word(2 + (i + index) % 3) for i in range(few)]
        if task == "qa_1":
            outputs[1] = outputs[0]
        prefix = f" {word()} are: " if task == "vt" else f" {word()} is"
        question = f" what {word()}?"
        room = length - NEW_TOKENS[task] - len(question + prefix) - index
        context = " ".join(word() for _ in range(40))[:room]
        text = context + question
        found.append(
            {"index": index, "task": task, "input": text, "answer_prefix": prefix,
             "outputs": outputs, "length": len(text + prefix) + NEW_TOKENS[task],
             "prompt_tokens": len(text + prefix), "control": question + prefix,
             "depth": 0.25 if index else None}
        )  # fmt: skip
    return found


def write_data(folder: Path, samples: dict[tuple[int, str], list[dict]], **edits) -> Path:
    """A folder of data.ruler."""
    files = []
    for (length, task), rows in samples.items():
        path = folder / str(length) / f"{task}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(
            {"task": task, "length": length, "variant": length < 4096, "samples": len(rows),
             "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
             "tokens_to_generate": NEW_TOKENS[task],
             "metric": "part" if task == "qa_1" else "all"}
        )  # fmt: skip
    manifest = {
        "format": "nanorove-ruler", "version": 1, "seed": 42, "samples": 3,
        "tokenizer": {"name": "bytes", "sha256": TOKENIZER["sha256"]},
        "lengths": sorted({length for length, _ in samples}), "files": files,
        "skipped": {"qa_2": "no file was given"},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest | edits)))
    return folder


TASKS = ("niah_single_1", "niah_multivalue", "vt", "cwe", "qa_1")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    samples = {(n, task): make_samples(task, n) for n in (SHORT, LONG) for task in TASKS}
    return write_data(tmp_path / "ruler", samples)


@pytest.fixture
def run(tiny_toml):
    """write_run with block_size 96."""

    def write(*overrides: str, std: float = 0.3) -> tuple[Path, GPT]:
        path = tiny_toml(("block_size = 8", "block_size = 96"))
        return write_run(path, *overrides, std=std)

    return write


def sample_of(record: dict, length: int, yarn: str, task: str, index: int) -> dict:
    key = {"length": length, "yarn": yarn, "task": task, "index": index}
    (found,) = (s for s in record["samples"] if key.items() <= s.items())
    return found


def result_of(record: dict, length: int, yarn: str) -> dict:
    (found,) = (r for r in record["results"] if (r["length"], r["yarn"]) == (length, yarn))
    return found


def plain(model: GPT, prompt: str, answer: str) -> tuple[float, bool]:
    """(mean NLL per token, all tokens the likeliest) by one whole forward pass."""
    head, tail = list(prompt.encode()), list(answer.encode())
    ids = [EOT, *head, *tail]
    with torch.no_grad():
        log_probs = model(torch.tensor([ids]))[0].double().log_softmax(-1)
    places = range(1 + len(head), len(ids))
    nll = [-log_probs[t - 1, ids[t]].item() for t in places]
    return math.fsum(nll) / len(nll), all(log_probs[t - 1].argmax() == ids[t] for t in places)


def plain_text(model: GPT, prompt: str, new: int) -> str:
    """Greedy, the whole forward pass again for every byte."""
    ids = [EOT, *prompt.encode()]
    written = []
    for _ in range(new):
        with torch.no_grad():
            token = int(model(torch.tensor([ids + written]))[0, -1].argmax())
        if token == EOT:
            break
        written.append(token)
    return bytes(written).decode(errors="replace")


# -----------------------------------------------------------------------------
# the numbers


def by_hand(model: GPT, row: dict, other: dict) -> dict:
    """The mean NLL of each measure for one sample, and whether greedy decoding finds the answer."""

    def texts(row: dict) -> list[str]:
        outputs = row["outputs"]
        if row["task"] == "qa_1":
            return [f" {outputs[0]}", f" {outputs[2]}"]  # the second is the first again
        if row["task"] == "cwe":
            return [f" 1. {outputs[0]} 2. {outputs[1]} 3. {outputs[2]}"]
        return [" " + (", " if row["task"] == "niah_multivalue" else " ").join(outputs)]

    prompt = row["input"] + row["answer_prefix"]
    own = [plain(model, prompt, text) for text in texts(row)]
    found = {
        "nll": min(nll for nll, _ in own),
        "exact": any(exact for _, exact in own),
        "prefix_only": min(plain(model, row["control"], text)[0] for text in texts(row)),
        "shuffled": min(plain(model, prompt, text)[0] for text in texts(other)),
    }
    if row["task"] == "qa_1":
        found["first"] = own[0][0]
    if row["task"] in ("cwe", "niah_multivalue"):
        number = " 1." if row["task"] == "cwe" else ""
        alone = [plain(model, prompt, f"{number} {output}")[0] for output in row["outputs"]]
        found["order_free"] = sum(alone) / 3
    return found


@pytest.mark.parametrize(
    ("pos_emb", "length", "yarn"),
    [
        ("rove", SHORT, "auto"),
        ("rove", LONG, "auto"),
        ("rope", LONG, "2.5"),
        ("none", LONG, "none"),
    ],
)
def test_against_a_plain_forward_pass(run, data, pos_emb, length, yarn):
    folder, model = run("--model.pos_emb", pos_emb)
    record = main(Args(folder, data, lengths=str(length), yarn=yarn, generate=length == SHORT))
    assert len(record["samples"]) == 3 * len(TASKS)
    result = result_of(record, length, yarn)
    factor = {"none": 1.0, "auto": max(1, length / 96), "2.5": 2.5}[yarn]
    assert result["factor"] == factor
    config = dataclasses.replace(model.config, yarn_factor=factor)
    again = GPT(config, max_len=256, attn_backend="eager")
    again.load_state_dict(model.state_dict())
    means = {}
    for task in TASKS:
        rows = make_samples(task, length)
        for row, other in zip(rows, [rows[1], rows[2], rows[0]], strict=True):
            found = sample_of(record, length, yarn, task, row["index"])
            wanted = by_hand(again, row, other)
            means.setdefault(task, []).append(wanted["nll"])
            assert found["exact"] == wanted.pop("exact")
            assert found["nll"] / found["tokens"] == pytest.approx(wanted.pop("nll"), rel=1e-5)
            if task in ("cwe", "niah_multivalue"):
                assert found["order_free"] == pytest.approx(wanted.pop("order_free"), rel=1e-5)
            for key, nll in wanted.items():
                assert found[key]["nll"] / found[key]["tokens"] == pytest.approx(nll, rel=1e-5)
            prompt = row["input"] + row["answer_prefix"]
            assert (found["prompt_tokens"], found["depth"]) == (len(prompt), row["depth"])
            if length == SHORT:
                assert found["prediction"] == plain_text(again, prompt, NEW_TOKENS[task])
    for task in TASKS:
        assert result["tasks"][task]["nll"] == pytest.approx(np.mean(means[task]), rel=1e-5)
        assert result["tasks"][task]["variant"] is True
    niah, average = result["categories"]["niah"], result["average"]
    both = means["niah_single_1"] + means["niah_multivalue"]
    assert niah["nll"] == pytest.approx(np.mean(both), rel=1e-5)
    assert (niah["tasks"], niah["of"], len(niah["missing"])) == (2, 8, 6)
    assert niah["order_free"] is None  # one of the two has no such number
    assert result["categories"]["fwe"]["nll"] is None
    assert average["nll"] == pytest.approx(np.mean([np.mean(m) for m in means.values()]), rel=1e-5)
    assert (average["tasks"], average["of"]) == (5, 13)
    assert record["data"]["skipped"] == {"qa_2": "no file was given"}
    assert json.loads((folder / "eval" / "ruler.json").read_text()) == record


def test_what_prompts_share_is_read_once(run, data, monkeypatch):
    """And the numbers are those of reading it for every answer."""
    folder, _ = run()
    args = Args(folder, data, tasks="cwe,qa_1", yarn="none")
    monkeypatch.setitem(scoring.MIN_SAVED, "cpu", 10**9)
    apart = main(args)
    monkeypatch.setitem(scoring.MIN_SAVED, "cpu", 1)
    together = main(args)
    for a, b in zip(apart["samples"], together["samples"], strict=True):
        assert a["nll"] == pytest.approx(b["nll"], rel=1e-5) and a["tokens"] == b["tokens"]
        assert a["shuffled"]["nll"] == pytest.approx(b["shuffled"]["nll"], rel=1e-5)


def test_uniform_logits(run, data):
    folder, model = run(std=0.0)
    record = main(Args(folder, data, yarn="none", generate=True))
    for sample in record["samples"]:
        assert sample["nll"] == pytest.approx(sample["tokens"] * math.log(257), rel=1e-6)
        assert sample["exact"] is False and sample["score"] == 0
        for key in ("prefix_only", "shuffled", "first"):
            if sample.get(key):
                assert sample[key]["nll"] / sample[key]["tokens"] == pytest.approx(math.log(257))
    average = result_of(record, SHORT, "none")["average"]
    assert average["nll"] == pytest.approx(math.log(257), rel=1e-6)
    assert average["exact"] == 0 and average["generation"] == 0
    # all bytes it writes are zero: NVIDIA/RULER#3, look into a zero before you believe it
    assert result_of(record, SHORT, "none")["tasks"]["vt"]["empty_predictions"] == 3


def test_half_precision_is_recorded(run, data):
    """modded-nanogpt#133: never to be mixed with the other."""
    folder, _ = run()
    args = Args(folder, data, yarn="none", tasks="vt", lengths="96")
    full, half = main(args), main(dataclasses.replace(args, dtype="bfloat16"))
    assert (full["dtype"], half["dtype"]) == ("float32", "bfloat16")
    for a, b in zip(full["samples"], half["samples"], strict=True):
        assert a["nll"] == pytest.approx(b["nll"], rel=0.1) and a["nll"] != b["nll"]


class Oracle(GPT):
    """Knows what follows each of `texts` (token ids), and its first half, its first third ..."""

    def learn(self, texts: list[list[int]]) -> "Oracle":
        self.next = {tuple(text[:i]): text[i] for text in texts for i in range(1, len(text))}
        return self

    def hidden(self, idx, kv_cache=None):
        rows = idx.tolist()
        if kv_cache is not None:
            before = getattr(kv_cache, "rows", [[] for _ in rows])
            kv_cache.rows = [a + b for a, b in zip(before, rows, strict=True)]
            kv_cache.pos += idx.size(1)
            rows = kv_cache.rows
        x = torch.zeros(*idx.shape, self.config.n_embd)
        first = len(rows[0]) - idx.size(1)
        for r, row in enumerate(rows):
            for t in range(idx.size(1)):
                x[r, t, 0] = self.next.get(tuple(row[: first + t + 1]), 0)
        return x

    def head(self, x):
        return 100.0 * F.one_hot(x[..., 0].long(), self.config.vocab_size)


def test_a_model_that_knows_the_answers(run, data, monkeypatch):
    folder, model = run()
    texts = []
    for length in (SHORT, LONG):
        for task in TASKS:
            for row in make_samples(task, length):
                text = row["input"] + row["answer_prefix"] + answers(task, row["outputs"])[0]
                texts.append([EOT, *text.encode(), EOT])
    oracle = Oracle(model.config, max_len=256).learn(texts)
    monkeypatch.setattr("nanorove.evaluation.Subject.load", lambda self, **settings: oracle)
    monkeypatch.setitem(scoring.MIN_SAVED, "cpu", 10**9)  # its cache holds no keys
    record = main(Args(folder, data, yarn="none", generate=True))
    for sample in record["samples"]:
        assert sample["nll"] == 0.0 and sample["exact"] is True
        assert sample["shuffled"]["nll"] > 50 and sample["shuffled"]["exact"] is False
        assert sample["prefix_only"]["nll"] > 50
        assert sample["score"] == 1.0
        row = make_samples(sample["task"], sample["length"])[sample["index"]]
        assert sample["prediction"] == answers(sample["task"], row["outputs"])[0]
    average = result_of(record, LONG, "none")["average"]
    assert average["nll"] == 0 and average["exact"] == 1 and average["generation"] == 100
    assert average["shuffled"] > 10


def test_one_of_two_answers(run, data, monkeypatch):
    """Half of what vt asks for, all that a question needs (NVIDIA/RULER#15); it stops there."""
    folder, model = run()
    texts = []
    for task in ("vt", "qa_1"):
        for row in make_samples(task, LONG):
            text = row["input"] + row["answer_prefix"] + f"  {row['outputs'][0].upper()}\t"
            texts.append([EOT, *text.encode(), EOT])
    oracle = Oracle(model.config, max_len=256).learn(texts)
    monkeypatch.setattr("nanorove.evaluation.Subject.load", lambda self, **settings: oracle)
    monkeypatch.setitem(scoring.MIN_SAVED, "cpu", 10**9)
    record = main(Args(folder, data, yarn="none", generate=True, lengths=str(LONG)))
    for sample in record["samples"]:
        if sample["task"] in ("vt", "qa_1"):
            word = make_samples(sample["task"], LONG)[sample["index"]]["outputs"][0]
            assert sample["prediction"] == f"  {word.upper()}\t"
    tasks = result_of(record, LONG, "none")["tasks"]
    assert (tasks["vt"]["generation"], tasks["qa_1"]["generation"]) == (50.0, 100.0)


def test_learned_positions_end(run, data):
    folder, _ = run("--model.pos_emb", "learned")
    record = main(Args(folder, data, yarn="none,auto", generate=True))
    assert result_of(record, LONG, "none")["reason"] == "learned positions end at 96 tokens"
    assert result_of(record, LONG, "none")["factor"] is None
    assert "YaRN" in result_of(record, SHORT, "auto")["reason"]
    found = result_of(record, SHORT, "none")
    assert found["tasks"]["vt"]["scored"] == 3 and found["tasks"]["vt"]["generation"] is not None
    assert {s["length"] for s in record["samples"]} == {SHORT}


def test_an_answer_beyond_learned_positions_is_named(run, tmp_path, capsys):
    folder, _ = run("--model.pos_emb", "learned")
    rows = make_samples("vt", SHORT)
    rows[0]["outputs"] = ["abcdefgh", "abcdefgh"]  # 18 bytes, with 12 to generate
    rows[1]["outputs"] = ["abcdef", "abcde"]  # end-of-text and 95 bytes are read, the 96th is not
    data = write_data(tmp_path / "ruler", {(SHORT, "vt"): rows})
    record = main(Args(folder, data, yarn="none"))
    assert record["counts"] == {"items": 3, "truncated": 0, "skipped": 1}
    found = result_of(record, SHORT, "none")["tasks"]["vt"]
    assert found["samples"] == 3 and found["scored"] == 2
    assert found["problems"]["reference"] == {"longer than 96 tokens": [0]}
    assert "vt: reference of 1 samples is n/a: longer than 96 tokens" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# tokens


def gpt2_task(**edits) -> Task:
    row = {"index": 7, "input": "Who?", "answer_prefix": " They are: ", "outputs": ["AB", "CD"],
           "control": " They are: "} | edits  # fmt: skip
    ids = GPT2Tokenizer().encode(row["input"] + row["answer_prefix"])
    row["prompt_tokens"] = len(ids)
    return Task("vt", 4096, "", "all", 30, False, [row])


def test_end_of_text_leads_and_the_answer_is_scored():
    plan = make_plan(gpt2_task(), 0, GPT2Tokenizer(), 100)
    (span,) = plan.spans["reference"]
    tokenizer = GPT2Tokenizer()
    assert span.ids[0] == 50256 and (span.ids[1:] != 50256).all()
    assert tokenizer.decode(span.ids[span.start : span.end]) == " AB CD"
    assert tokenizer.decode(span.ids[1:]) == "Who? They are:  AB CD"
    assert "shuffled" not in plan.spans and not plan.problems  # there is no other sample


class TwoSpaces(ByteTokenizer):
    """Has one token for two spaces, as many tokenizers do, but not GPT-2's."""

    def encode(self, text):
        return super().encode(text.replace("  ", "\0"))


def test_a_prompt_that_is_no_prefix_is_counted():
    """An answer behind "are: " would begin inside a token."""
    task = gpt2_task()
    task.samples[0]["prompt_tokens"] = len("Who? They are: ")
    plan = make_plan(task, 0, TwoSpaces(), 100)
    assert plan.spans == {}
    assert plan.problems == dict.fromkeys(("reference", "prefix_only"), "prompt is no prefix")
    assert make_plan(task, 0, ByteTokenizer(), 100).problems == {}


def test_the_violation_is_named_in_the_result(run, data, monkeypatch, capsys):
    class Odd(ByteTokenizer):
        def encode(self, text):
            ids = super().encode(text)
            return ids[1:] if text.endswith(victim) else ids  # with this answer, others come out

    victim = make_samples("niah_single_1", SHORT)[1]["outputs"][0]
    monkeypatch.setattr(eval_ruler, "recorded_tokenizer", lambda *_: Odd())
    folder, _ = run()
    record = main(Args(folder, data, lengths="96", tasks="niah_single_1", yarn="none"))
    found = result_of(record, SHORT, "none")["tasks"]["niah_single_1"]
    assert found["samples"] == 3 and found["scored"] == 2
    assert found["problems"]["reference"] == {"prompt is no prefix": [1]}
    assert found["problems"]["shuffled"] == {"prompt is no prefix": [0]}
    assert sample_of(record, SHORT, "none", "niah_single_1", 1)["nll"] is None
    assert "reference of 1 samples is n/a" in capsys.readouterr().out


def test_the_marker_in_a_text_is_text(run, tmp_path):
    """tiktoken#480"""
    rows = make_samples("niah_single_1", LONG)
    text = "<|endoftext|>" + rows[0]["input"][13:]
    rows[0] |= {"input": text, "outputs": ["<|endoftext|>"]}
    folder, _ = run()
    data = write_data(tmp_path / "ruler", {(LONG, "niah_single_1"): rows})
    found = main(Args(folder, data, yarn="none"))["samples"][0]
    assert found["tokens"] == 14  # the space and 13 bytes


# -----------------------------------------------------------------------------
# which samples, how often


def test_limit_and_controls(run, data, capsys):
    folder, _ = run()
    record = main(Args(folder, data, yarn="none", limit=1, lengths=str(LONG)))
    assert len(record["samples"]) == len(TASKS) and record["settings"]["limit"] == 1
    assert all(s["shuffled"] is None and s["index"] == 0 for s in record["samples"])
    assert result_of(record, LONG, "none")["average"]["shuffled"] is None
    assert "(5 of 13 tasks)" in capsys.readouterr().out


def test_none_and_auto_are_computed_once(run, data, monkeypatch):
    loads = []
    load = evaluation.Subject.load

    def counted(self, **settings):
        loads.append(settings["yarn_factor"])
        return load(self, **settings)

    monkeypatch.setattr(evaluation.Subject, "load", counted)
    folder, _ = run()
    record = main(Args(folder, data, yarn="none,auto", tasks="vt"))
    assert loads == [1.0, 1.0, LONG / 96]  # SHORT once, LONG twice
    a, b = result_of(record, SHORT, "none"), result_of(record, SHORT, "auto")
    assert a["tasks"] == b["tasks"]
    assert len(record["samples"]) == 4 * 3


def test_a_killed_evaluation_goes_on(run, data, monkeypatch):
    folder, _ = run()
    args = Args(folder, data, yarn="none,auto", generate=True, tasks="niah_multivalue,vt")
    whole = main(args)
    (folder / "eval" / "ruler.json").unlink()
    calls = []

    def counted(name, stop):
        real = getattr(evaluation if name == "score" else eval_ruler, name)

        def call(*parts, **settings):
            calls.append(name)
            if calls.count(name) == stop:
                raise KeyboardInterrupt
            return real(*parts, **settings)

        return call

    generate, score = eval_ruler.generate, evaluation.score
    monkeypatch.setattr(eval_ruler, "generate", counted("generate", 14))
    monkeypatch.setattr(evaluation, "score", counted("score", 0))
    with pytest.raises(KeyboardInterrupt):
        main(args)
    assert not (folder / "eval" / "ruler.json").exists()
    before, first = calls.count("score"), calls.count("generate") - 1
    calls.clear()
    monkeypatch.setattr(eval_ruler, "generate", generate)
    monkeypatch.setattr(evaluation, "score", score)
    monkeypatch.setattr(eval_ruler, "generate", counted("generate", 0))
    monkeypatch.setattr(evaluation, "score", counted("score", 0))
    again = main(args)
    jobs = 3 * 2  # none and auto at SHORT are one
    assert calls.count("generate") == 3 * jobs - first and calls.count("score") == jobs - before
    assert again["samples"] == whole["samples"] and again["results"] == whole["results"]
    assert list((folder / "eval").iterdir()) == [folder / "eval" / "ruler.json"]


@pytest.mark.slow
def test_two_processes_give_the_same(run, data):
    folder, _ = run()
    main(Args(folder, data, generate=True, out=Path("one.json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "-m", "scripts.eval_ruler", str(folder.resolve()), "--data", str(data),
               "--generate", "--out", str(Path("two.json").resolve())]  # fmt: skip
    subprocess.run(command, check=True, cwd=REPO)
    one, two = (json.loads(Path(f"{n}.json").read_text()) for n in ("one", "two"))
    assert one["samples"] == two["samples"] and one["results"] == two["results"]


@pytest.mark.slow
def test_the_data_that_data_ruler_makes(run, tmp_path, monkeypatch):
    """From the generator to the result, a model that knows the answers and the real tasks that
    need no package."""
    folder, model = run()
    options = ruler.Options(tmp_path / "made", "bytes", "2048", samples=3, tasks="vt,fwe")
    ruler.make(options)
    texts = []
    for task, join in (("vt", " "), ("fwe", " ")):
        for line in (tmp_path / "made" / "2048" / f"{task}.jsonl").read_text().splitlines():
            row = json.loads(line)
            answer = " " + join.join(row["outputs"])
            texts.append([EOT, *(row["input"] + row["answer_prefix"] + answer).encode(), EOT])
    oracle = Oracle(model.config, max_len=4096).learn(texts)
    monkeypatch.setattr("nanorove.evaluation.Subject.load", lambda self, **settings: oracle)
    monkeypatch.setitem(scoring.MIN_SAVED, "cpu", 10**9)
    record = main(Args(folder, tmp_path / "made", yarn="none", generate=True))
    average = result_of(record, 2048, "none")["average"]
    assert (average["nll"], average["exact"], average["generation"]) == (0, 1, 100)
    assert average["tasks"] == 2 and len(record["samples"]) == 6
    assert average["shuffled"] > 10 and average["prefix_only"] > 10


# -----------------------------------------------------------------------------
# data that is not right


def edit_sample(folder: Path, task: str, change) -> None:
    """Change the second sample of a file, and give it a manifest that goes with it."""
    samples = {(n, t): make_samples(t, n) for n in (SHORT, LONG) for t in TASKS}
    change(samples[SHORT, task][1])
    write_data(folder, samples)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row.pop("outputs"), "no 'outputs'"),
        (lambda row: row.update(outputs="7374122"), "outputs is '7374122'"),  # NVIDIA/RULER#30
        (lambda row: row.update(outputs=[]), "texts are needed"),
        (lambda row: row.update(outputs=[7]), "texts are needed"),
        (lambda row: row.pop("control"), "no 'control'"),
        (lambda row: row.update(input=None), "input is None"),
        (lambda row: row.update(prompt_tokens=90), "take 102 tokens"),
        (lambda row: row.update(depth="deep"), "depth is 'deep'"),
        (lambda row: row.update(index=0), "it is sample 0 of vt"),  # two results of one name
        (lambda row: row.update(task="cwe"), "it is sample 1 of cwe"),
    ],
)
def test_bad_samples_are_named(run, data, change, words):
    edit_sample(data, "vt", change)
    folder, _ = run()
    with pytest.raises(UserError, match=words) as error:
        main(Args(folder, data))
    assert f"{data}/96/vt.jsonl:2: " in str(error.value) and "\n" not in str(error.value)


def test_a_prompt_of_another_tokenizer_is_noticed(run, data):
    edit_sample(data, "vt", lambda row: row.update(prompt_tokens=20))
    with pytest.raises(UserError, match="vt at 96 tokens, index 1: .* the file says 20"):
        main(Args(run()[0], data))


def test_files_that_are_not_those_of_the_manifest(run, data):
    folder, _ = run()
    path = data / "96" / "vt.jsonl"
    text = path.read_text()
    path.write_text(text.replace("what", "that", 1))
    with pytest.raises(UserError, match=r"vt.jsonl: sha256 .* make the data again"):
        main(Args(folder, data))
    path.unlink()
    with pytest.raises(UserError, match="vt.jsonl: No such file"):
        main(Args(folder, data))


def test_manifests_that_are_none(run, data, tmp_path):
    folder, _ = run()
    path = data / "manifest.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"seed": 1}))
    with pytest.raises(UserError, match="edited"):
        main(Args(folder, data))
    path.write_text(json.dumps(with_checksum(good | {"version": 2})))
    with pytest.raises(UserError, match="version 2"):
        main(Args(folder, data))
    path.write_text(
        json.dumps(with_checksum(good | {"tokenizer": {"name": "gpt2", "sha256": "0"}}))
    )
    with pytest.raises(UserError, match="made with tokenizer gpt2"):
        main(Args(folder, data))
    with pytest.raises(UserError, match="no manifest.json"):
        main(Args(folder, tmp_path))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"lengths": "96,4096"}, "--lengths: .* has no 4096, but 96, 128"),
        ({"tasks": "vt,qa_2"}, r"--tasks: .* has no qa_2 \(no file was given\), but cwe, "),
        ({"tasks": "niah"}, "has no niah, but"),
        ({"limit": 0}, "--limit 0"),
        ({"yarn": "0.5"}, "--yarn"),
    ],
)
def test_what_is_not_there(run, data, wanted, words):
    with pytest.raises(UserError, match=words):
        main(Args(run()[0], data, **wanted))


def test_a_length_without_any_of_the_tasks(run, tmp_path):
    rows = {(SHORT, "vt"): make_samples("vt", SHORT), (LONG, "cwe"): make_samples("cwe", LONG)}
    data = write_data(tmp_path / "ruler", rows)
    with pytest.raises(UserError, match="--tasks cwe: .* has none of these at 96 tokens"):
        main(Args(run()[0], data, lengths="96,128", tasks="cwe"))
