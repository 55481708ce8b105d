"""nanorove/core_tasks.py and scripts/eval_core.py against published numbers, prompts written out by
hand and a plain loop over full forward passes."""

import dataclasses
import functools
import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from data.tokenizer import get_tokenizer
from model import GPT
from nanorove import core_tasks, evaluation
from nanorove.checkpoint import save_checkpoint
from nanorove.config import load_config
from nanorove.core_tasks import (
    TASKS,
    centered,
    check_row,
    crop,
    judge,
    name_of,
    order,
    render,
    shot_indices,
    spans,
)
from nanorove.errors import UserError
from nanorove.optim import make_optimizer
from nanorove.scoring import Scored, Span
from scripts import eval_core
from scripts.eval_core import Args, main
from tests import core_bundle, reference
from tests.conftest import REPO
from tests.core_bundle import LM, MC, SC

KIND = {MC: "MC", SC: "SC", LM: "LM"}

# -----------------------------------------------------------------------------
# the table


def test_the_table_is_that_of_the_public_bundle():
    found = [(t.label, t.uri, t.kind, t.shots, t.delimiter, t.v1, t.rows) for t in TASKS]
    assert found == [(e[0], e[1], KIND[e[2]], *e[3:]) for e in core_bundle.PUBLIC]
    # items of a full run: road-to-52, docs/RESULTS.md
    assert sum(t.rows for t in TASKS) == 91_037


def test_baselines_of_the_second_version():
    # mlfoundations/dclm PR 115, nanochat#349, #321: the two must not be mixed
    changed = {t.label: (t.v1, t.v2) for t in TASKS if t.v1 != t.v2}
    assert changed == {
        "commonsense_qa": (20, 40.3),  # the commonest of four answers, not one of five
        "agi_eval_lsat_ar": (20, 25),
        "bigbench_language_identification": (9.1, 25),
    }


def test_centering():
    assert centered(0.25, 25) == 0
    assert centered(1.0, 62) == pytest.approx(1)
    assert centered(0.2, 25) == pytest.approx(-0.05 / 0.75)  # not clipped
    # GPT-2 124M in nanochat's table: 3098 and 260 right ones
    assert centered(3098 / 10042, 25) == pytest.approx(0.0780, abs=5e-5)
    assert centered(260 / 1172, 25) == pytest.approx(-0.0375, abs=5e-5)


@pytest.mark.parametrize(("version", "core"), [("v1", -0.0007), ("v2", -0.0260)])
def test_guessing_is_worth_nothing(version, core):
    """With the baselines of v2 a guesser is below 0: for two tasks the commonest answer counts."""
    guess = {"MC": 0.25, "SC": 0.5, "LM": 0.0}
    two = ("copa", "piqa", "boolq")  # choices of the public files; the others have four
    accuracy = [0.5 if t.label in two else guess[t.kind] for t in TASKS]
    found = [centered(a, getattr(t, version)) for a, t in zip(accuracy, TASKS, strict=True)]
    assert np.mean(found) == pytest.approx(core, abs=5e-5)


def test_only_the_whole_is_called_core():
    assert name_of(22, whole=True, limit=None, length=1024) == "CORE"
    others = [
        name_of(18, whole=True, limit=None, length=1024),
        name_of(22, whole=True, limit=500, length=1024),
        name_of(22, whole=True, limit=None, length=4096),
        name_of(22, whole=True, limit=None, length=512),
        name_of(22, whole=False, limit=None, length=1024),
    ]
    assert others == [
        "CORE-18",
        "CORE, at most 500 items per task",
        "long-prompt CORE (4096 tokens)",
        "short-prompt CORE (512 tokens)",
        "CORE, on other data",
    ]


# -----------------------------------------------------------------------------
# golden draws


def test_golden_order():
    golden = "4 17 16 0 2 21 7 15 19 27 25 29 8 1 14 28 13 3 22 6 26 9 11 20 12 10 24 5 31 30 18 23"
    assert order(32) == [int(i) for i in golden.split()]


@pytest.mark.parametrize(
    ("n", "index", "k", "golden"),
    [
        (32, 0, 10, "31 25 15 4 1 3 19 2 22 26"),
        (32, 1, 10, "30 23 14 18 27 19 16 13 5 12"),
        (2376, 0, 10, "1806 479 31 372 144 344 404 1453 970 72"),
        (230, 0, 3, "200 113 30"),
    ],
)
def test_golden_examples(n, index, k, golden):
    assert shot_indices(n, index, k) == [int(i) for i in golden.split()]


def test_examples_are_those_of_a_list_without_the_item():
    for n in (2, 5, 11, 12, 40, 300):
        for index in {0, 1, n // 2, n - 1}:
            others = [i for i in range(n) if i != index]
            for k in {0, 1, min(10, n - 1)}:
                wanted = random.Random(1234 + index).sample(others, k)
                assert shot_indices(n, index, k) == wanted


# -----------------------------------------------------------------------------
# prompts


def test_prompts_of_multiple_choice():
    shot = {"query": "Question: two?\n", "choices": ["x", "y z"], "gold": 1}
    row = {"query": "Question: one?\n", "choices": ["a", "b"], "gold": 0}
    assert render("MC", "\nAnswer: ", row, [shot]) == [
        "Question: two?\n\nAnswer: y z\n\nQuestion: one?\n\nAnswer: a",
        "Question: two?\n\nAnswer: y z\n\nQuestion: one?\n\nAnswer: b",
    ]
    # language_identification: a space of its own and the delimiter's
    row = {"query": "A. one\nB. two\nAnswer: ", "choices": ["A", "B"], "gold": 1}
    assert render("MC", " ", row, [row])[0] == (
        "A. one\nB. two\nAnswer:  B\n\nA. one\nB. two\nAnswer:  A"
    )


def test_prompts_of_schemas():
    shot = {"context_options": ["He ran because he", "x"], "continuation": "was late.", "gold": 0}
    row = {"context_options": ["It fell: the cup", "It fell: the hat"], "continuation": "broke."}
    assert render("SC", " ", row | {"gold": 1}, [shot, shot]) == [
        "He ran because he was late.\n\nHe ran because he was late.\n\nIt fell: the cup broke.",
        "He ran because he was late.\n\nHe ran because he was late.\n\nIt fell: the hat broke.",
    ]


def test_prompts_of_language_modeling():
    shot = {"context": " 1 + 1 = \n", "continuation": "2"}
    row = {"context": "\n2 + 2 =  ", "continuation": "4"}
    assert render("LM", " ", row, [shot]) == [
        "1 + 1 = 2\n\n2 + 2 =",  # no space that would be a token of its own
        "1 + 1 = 2\n\n2 + 2 = 4",
    ]
    assert render("LM", "\nAnswer: ", row, []) == ["2 + 2 =\nAnswer:", "2 + 2 =\nAnswer: 4"]


tokenizer_named = functools.cache(get_tokenizer)


def ids(text: str, name: str = "gpt2") -> np.ndarray:
    tokenizer = tokenizer_named(name)
    return np.concatenate(([tokenizer.eot], tokenizer.encode(text)))


def test_golden_spans_of_winograd():
    row = core_bundle.rows_of("winograd", SC)[0]
    found = spans("SC", [ids(text) for text in render("SC", " ", row, [])])
    assert [len(s.ids) for s in found] == [18, 16]
    tokenizer = tokenizer_named("gpt2")
    for span in found:
        scored = [tokenizer.decode([t]) for t in span.ids[span.start : span.end]]
        assert scored == [" feared", " violence", "."]


def test_golden_spans_of_arc():
    # the first row of arc_challenge; " Planetary" opens all answers and is not scored
    row = {
        "query": "Question: An astronomer observes that a planet rotates faster after a meteorite"
        " impact. Which is the most likely effect of this increase in rotation?",
        "choices": [
            "Planetary density will decrease.",
            "Planetary years will become longer.",
            "Planetary days will become shorter.",
            "Planetary gravity will become stronger.",
        ],
        "gold": 2,
    }
    found = spans("MC", [ids(text) for text in render("MC", "\nAnswer: ", row, [])])
    assert [len(s.ids) for s in found] == [38, 39, 39, 39]
    assert [s.start for s in found] == [34] * 4
    assert tokenizer_named("gpt2").decode(found[0].ids[33:]) == " Planetary density will decrease."
    assert found[0].ids[0] == 50256


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_the_marker_in_a_text_is_text(name):
    # tiktoken#480
    row = {"query": "Which?", "choices": ["<|endoftext|>", "none"], "gold": 0}
    for text in render("MC", " ", row, [row] * 3):
        eot = tokenizer_named(name).eot
        assert (ids(text, name) == eot).tolist() == [True] + [False] * (len(ids(text, name)) - 1)


def test_contexts_that_are_equal():
    row = {"context_options": ["he", "he"], "continuation": "ran", "gold": 1}
    found = spans("SC", [ids(text) for text in render("SC", " ", row, [])])
    assert [(s.start, s.end) for s in found] == [(1, 3), (1, 3)]


def test_a_continuation_that_swallows_the_prompt_is_an_error():
    a = np.array([9, 1, 2])
    for whole in ([9, 1, 3, 4], [9, 1], [9, 1, 2]):
        with pytest.raises(ValueError, match="no prefix"):
            spans("LM", [a, np.array(whole)])


def test_crop_keeps_the_end():
    text = np.arange(100)
    cut, lost = crop(Span(text, 90, 100), 20)
    assert (cut.ids.tolist(), cut.start, cut.end, lost) == (list(range(80, 100)), 10, 20, False)
    assert cut.ids[cut.start : cut.end].tolist() == list(range(90, 100))
    whole, lost = crop(Span(text, 90, 100), 100)
    assert (whole.ids.tolist(), whole.start, whole.end, lost) == (text.tolist(), 90, 100, False)
    # what is scored is longer than what is left: one token must stand in front of it
    cut, lost = crop(Span(text, 70, 100), 20)
    assert (cut.ids.tolist(), cut.start, cut.end, lost) == (list(range(80, 100)), 1, 20, True)
    assert crop(Span(text, 80, 100), 20)[1] and not crop(Span(text, 81, 100), 20)[1]


# -----------------------------------------------------------------------------
# decisions


def scored(*nll: float, greedy: bool = True) -> Scored:
    return Scored(np.array(nll), np.full(len(nll), greedy))


def test_the_lowest_mean_wins_and_the_first_of_equals():
    row = {"gold": 1}
    assert judge("MC", row, [scored(2.0), scored(1.0, 1.5, 1.0)]).prediction == 1  # mean, not sum
    assert judge("MC", row, [scored(1.0), scored(1.0)]).prediction == 0
    assert judge("SC", row, [scored(3.0, 1.0), scored(2.0, 2.0), scored(1.0, 3.0)]).prediction == 0
    right = judge("MC", row, [scored(2.0), scored(1.0, 2.0)])
    assert (right.correct, right.gold, right.nll, right.undecided) == (True, 1, [2.0, 1.5], False)


@pytest.mark.parametrize("empty", [0, 1])
def test_an_option_without_tokens_leaves_option_0(empty):
    """Four items of piqa: in nanochat the mean of nothing is NaN, and min() gives the first."""
    options = [scored(0.5), scored(0.5)]
    options[empty] = scored()
    found = judge("MC", {"gold": 1}, options)
    assert (found.prediction, found.correct, found.undecided) == (0, False, True)
    assert found.nll[empty] is None
    nan = [math.nan if i == empty else 0.5 for i in range(2)]
    assert nan.index(min(nan)) == 0


def test_every_token_of_a_continuation_must_be_the_likeliest():
    row = {"continuation": "x"}
    assert judge("LM", row, [scored(0.1, 0.2)]).correct
    one_wrong = Scored(np.array([0.1, 0.2]), np.array([True, False]))
    assert not judge("LM", row, [one_wrong]).correct


# -----------------------------------------------------------------------------
# runs and bundles


def tokenizer_of(name: str) -> dict:
    if name == "gpt2":
        sha = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
        return {"name": name, "vocab_size": 50257, "eot": 50256, "sha256": sha}
    sha = hashlib.sha256(bytes(range(256)) + b"<|endoftext|>").hexdigest()
    return {"name": name, "vocab_size": 257, "eot": 256, "sha256": sha}


@pytest.fixture
def save(tiny_toml):
    """Write a run of the tiny config with random weights; returns (run folder, model)."""

    def write(name: str = "bytes", pos_emb: str = "rove", std: float = 0.3) -> tuple[Path, GPT]:
        tokenizer = tokenizer_of(name)
        sizes = [("vocab_size = 257", f"vocab_size = {tokenizer['vocab_size']}")]
        sizes += [
            ("\nblock_size = 8", "\nblock_size = 64"),
            ("micro_batch_size = 2", "micro_batch_size = 1"),
        ]
        config, _ = load_config([tiny_toml(*sizes), "--model.pos_emb", pos_emb])
        model = reference.randomise(GPT(config.model), std, seed=2)
        extra = {"data": {"manifest_sha256": "m", "tokenizer": tokenizer}}
        save_checkpoint(
            config.run_dir, 6, config, model, make_optimizer(model, config.train), extra
        )
        return config.run_dir, model

    return write


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return core_bundle.write_folder(tmp_path_factory.mktemp("bundle"))


def plain(model: GPT, name: str, entry: tuple, length: int, limit: int | None = None) -> list:
    """[(correct, prediction, mean NLL of each option)]: one full forward pass per option."""
    label, _, kind, shots, delimiter, *_ = entry
    rows = core_bundle.rows_of(label, kind)
    random.Random(1337).shuffle(rows)
    rows = rows[:limit]
    found = []
    for idx, item in enumerate(rows):
        others = [i for i in range(len(rows)) if i != idx]
        drawn = random.Random(1234 + idx).sample(others, min(shots, len(others)))
        front = ""
        for e in (rows[i] for i in drawn):
            if kind == MC:
                front += f"{e['query']}{delimiter}{e['choices'][e['gold']]}\n\n"
            elif kind == SC:
                front += f"{e['context_options'][e['gold']]}{delimiter}{e['continuation']}\n\n"
            else:
                front += f"{e['context'].strip()}{delimiter}{e['continuation']}\n\n"
        if kind == MC:
            texts = [f"{front}{item['query']}{delimiter}{c}" for c in item["choices"]]
        elif kind == SC:
            ends = delimiter + item["continuation"]
            texts = [front + c + ends for c in item["context_options"]]
        else:
            before = front + item["context"].strip() + delimiter
            texts = [before.strip(), before + item["continuation"]]
        tokens = [ids(text, name).tolist() for text in texts]
        if kind == MC:
            start = 0
            while all(len(t) > start for t in tokens) and len({t[start] for t in tokens}) == 1:
                start += 1
            starts = [start] * len(tokens)
        elif kind == SC:
            same = 0
            while len({tuple(t[-1 - same :]) for t in tokens}) == 1:
                same += 1
            starts = [len(t) - same for t in tokens]
        else:
            starts, tokens = [len(tokens[0])], tokens[1:]
        means, exact = [], True
        for t, start in zip(tokens, starts, strict=True):
            start = max(1, start - max(0, len(t) - length))
            t = t[-length:]
            log_probs = model(torch.tensor([t]))[0].double().log_softmax(-1)
            losses = [-log_probs[i - 1, t[i]].item() for i in range(start, len(t))]
            exact = exact and all(log_probs[i - 1].argmax() == t[i] for i in range(start, len(t)))
            means.append(sum(losses) / len(losses) if losses else math.nan)
        if kind == LM:
            found.append((exact, None, means))
        else:
            best = means.index(min(means))
            found.append((best == item["gold"], best, means))
    return found


def compare(record: dict, model: GPT, name: str, entries: list, limit: int | None = None) -> None:
    length = record["settings"]["max_length"]
    long = GPT(model.config, max_len=length) if model.config.rotary else model
    long.load_state_dict(model.state_dict())
    assert [r["task"] for r in record["tasks"]] == [e[0] for e in entries]
    means = {"v1": [], "v2": []}
    second = {
        "commonsense_qa": 40.3,
        "agi_eval_lsat_ar": 25,
        "bigbench_language_identification": 25,
    }
    with torch.inference_mode():
        for entry, result in zip(entries, record["tasks"], strict=True):
            wanted = plain(long, name, entry, length, limit)
            items = result["per_item"]
            assert items["correct"] == [w[0] for w in wanted]
            assert items["prediction"] == [w[1] for w in wanted]
            for nll, (_, _, means_of) in zip(items["nll"], wanted, strict=True):
                nll = [math.nan if v is None else v for v in nll]
                assert nll == pytest.approx(means_of, abs=1e-4, nan_ok=True)
            accuracy = sum(w[0] for w in wanted) / len(wanted)
            assert result["accuracy"] == accuracy
            for version, percent in (("v1", entry[5]), ("v2", second.get(entry[0], entry[5]))):
                b = percent / 100
                assert result["centered"][version] == pytest.approx((accuracy - b) / (1 - b))
                means[version].append((accuracy - b) / (1 - b))
    for version in means:
        assert record["results"][version] == pytest.approx(np.mean(means[version]))


# -----------------------------------------------------------------------------
# the numbers


def test_against_plain_forward_passes(save, bundle):
    run, model = save()
    record = main(Args(run, bundle))
    compare(record, model, "bytes", core_bundle.PUBLIC)
    assert record == json.loads((run / "eval" / "core.json").read_text())
    results, counts = record["results"], record["counts"]
    assert results["name"] == "CORE, on other data"  # a dozen rows each are not the public files
    assert results["missing"] == [] and len(results["other_rows"]) == 22
    assert results["fewer_examples"] == {"bigbench_repeat_copy_logic": 3}
    assert counts["items"] == 21 * 12 + 4 == sum(r["items"] for r in record["tasks"])
    assert counts["undecided"] == 2 and counts["clamped"] == 0
    by_label = {r["task"]: r for r in record["tasks"]}
    undecided = [i for i, nll in enumerate(by_label["piqa"]["per_item"]["nll"]) if None in nll]
    assert sorted(by_label["piqa"]["per_item"]["line"][i] for i in undecided) == [4, 8]
    assert by_label["copa"]["per_item"]["line"] == [i + 1 for i in order(12)]
    assert not (run / "eval" / "core.json.journal").exists()


def test_with_the_tokens_of_gpt2(save, bundle):
    run, model = save("gpt2", "learned")
    labels = ("arc_easy", "piqa", "lambada_openai", "winograd", "squad")
    entries = [e for e in core_bundle.PUBLIC if e[0] in labels]
    # learned positions end at 64 tokens: the examples in front are lost, not the question
    record = main(Args(run, bundle, tasks=",".join(reversed(labels)), limit=4, max_length=64))
    compare(record, model, "gpt2", entries, limit=4)
    assert record["results"]["name"] == (
        "short-prompt CORE-5 (64 tokens), at most 4 items per task, on other data"
    )
    by_label = {r["task"]: r for r in record["tasks"]}
    assert by_label["squad"]["cropped"] == 4 and by_label["winograd"]["cropped"] == 0
    assert (run / "eval" / "core_5_tasks_length_64_limit_4.json").is_file()


def test_long_prompts_differ_where_the_crop_did(save, bundle):
    run, model = save()
    entries = [e for e in core_bundle.PUBLIC if e[0] in ("boolq", "copa")]
    full = main(Args(run, bundle, tasks="boolq,copa", max_length=2048))
    short = main(Args(run, bundle, tasks="boolq,copa", max_length=256))
    compare(full, model, "bytes", entries)
    compare(short, model, "bytes", entries)
    assert full["results"]["name"].startswith("long-prompt CORE-2 (2048 tokens)")
    assert [r["cropped"] for r in full["tasks"]] == [0, 0]
    assert [r["cropped"] for r in short["tasks"]] == [0, 12]
    nll = [[r["per_item"]["nll"] for r in x["tasks"]] for x in (full, short)]
    assert nll[0][0] == nll[1][0] and nll[0][1] != nll[1][1]


def test_an_answer_longer_than_the_prompt_is_counted(save, bundle):
    run, model = save()
    entries = [e for e in core_bundle.PUBLIC if e[0] in ("arc_easy", "coqa")]
    record = main(Args(run, bundle, tasks="arc_easy,coqa", max_length=8))
    compare(record, model, "bytes", entries)
    assert record["counts"]["clamped"] > 0


def test_yarn(save, bundle):
    run, model = save()
    entry = next(e for e in core_bundle.PUBLIC if e[0] == "arc_easy")
    record = main(Args(run, bundle, tasks="arc_easy", yarn_factor=4.0))
    longer = GPT(dataclasses.replace(model.config, yarn_factor=4.0))
    longer.load_state_dict(model.state_dict())
    compare(record, longer, "bytes", [entry])
    assert record["settings"]["yarn_factor"] == 4
    assert (run / "eval" / "core_1_tasks_yarn_4.json").is_file()


def test_a_model_that_knows_nothing(save, bundle):
    run, _ = save(std=0.0)
    record = main(Args(run, bundle))
    for result, (_, _, kind, *_) in zip(record["tasks"], core_bundle.PUBLIC, strict=True):
        items = result["per_item"]
        losses = [v for nll in items["nll"] for v in nll if v is not None]
        assert losses == pytest.approx([math.log(257)] * len(losses), rel=1e-6)
        if kind == LM:
            assert result["accuracy"] == 0
        else:
            assert items["prediction"] == [0] * result["items"]
            assert items["correct"] == [gold == 0 for gold in items["gold"]]


@pytest.mark.parametrize("limit", [1, 5, 12, 100])
def test_fewer_rows_than_examples(save, bundle, limit):
    """nanochat#550: a quick run draws 10 examples from fewer rows, and stops."""
    run, model = save()
    entries = [e for e in core_bundle.PUBLIC if e[0] in ("piqa", "agi_eval_lsat_ar")]
    record = main(Args(run, bundle, tasks="piqa,agi_eval_lsat_ar", limit=limit))
    compare(record, model, "bytes", entries, limit)
    assert record["counts"]["items"] == 2 * min(limit, 12)
    wanted = {1: {"piqa": 0, "agi_eval_lsat_ar": 0}, 5: {"piqa": 4}}.get(limit, {})
    assert record["results"]["fewer_examples"] == wanted
    assert f"at most {limit} items per task" in record["results"]["name"]


# -----------------------------------------------------------------------------
# ranks, and kills


@pytest.mark.slow
def test_two_processes_give_the_same_result(save, bundle):
    run, _ = save()
    labels = "piqa,winogrande,jeopardy"
    one = main(Args(run, bundle, tasks=labels, out=Path("one.json")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "-m", "scripts.eval_core", str(run.resolve()), "--bundle", str(bundle),
         "--tasks", labels, "--out", str(Path("two.json").resolve())],
        cwd=REPO, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    two = json.loads(Path("two.json").read_text())
    assert two["tasks"] == one["tasks"] and two["results"] == one["results"]


def test_a_killed_evaluation_goes_on(save, bundle, monkeypatch, capsys):
    run, _ = save()
    args = Args(run, bundle, tasks="piqa,boolq,coqa")
    whole = main(dataclasses.replace(args, out=Path("whole.json")))
    real, calls = evaluation.score, []

    def counted(model, groups, **settings):
        calls.append(len(groups))
        if len(calls) == stop:
            raise KeyboardInterrupt
        return real(model, groups, **settings)

    monkeypatch.setattr(evaluation, "score", counted)
    stop = 3
    with pytest.raises(KeyboardInterrupt):
        main(args)
    assert not list((run / "eval").glob("*.json"))
    first, stop = len(calls) - 1, None
    calls.clear()
    record = main(args)
    assert record["tasks"] == whole["tasks"] and record["results"] == whole["results"]
    rest = len(calls)
    calls.clear()
    main(args)  # nothing is left of the first one
    assert first == 2 and first + rest == len(calls)


@pytest.mark.parametrize("change", ["model", "yarn_factor", "max_length", "limit", "bundle"])
def test_what_was_done_with_other_settings_is_not_used(save, bundle, tmp_path, monkeypatch, change):
    run, _ = save()
    args = Args(run, bundle, tasks="copa,boolq", out=Path("same.json"))
    real, calls = evaluation.score, []

    def stopping(model, groups, **settings):
        calls.append(len(groups))
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(model, groups, **settings)

    monkeypatch.setattr(evaluation, "score", stopping)
    with pytest.raises(KeyboardInterrupt):
        main(args)
    monkeypatch.setattr(evaluation, "score", real)
    if change == "model":
        shutil.rmtree(run)
        save(std=0.5)
    elif change == "bundle":
        files = core_bundle.files()
        files[COPA] = files[COPA].replace(b"cat", b"cow")
        args = dataclasses.replace(args, bundle=core_bundle.write_folder(tmp_path / "b", files))
    else:
        other = {"yarn_factor": 2.0, "max_length": 64, "limit": 7}[change]
        args = dataclasses.replace(args, **{change: other})
    found = main(args)
    fresh = main(dataclasses.replace(args, out=Path("fresh.json")))
    assert found["tasks"] == fresh["tasks"] and found["results"] == fresh["results"]


# -----------------------------------------------------------------------------
# bundles


def test_a_zip_is_the_same_bundle(save, bundle, tmp_path):
    run, _ = save()
    path = core_bundle.write_zip(tmp_path / "b.zip")
    a = main(Args(run, bundle, tasks="copa,winograd"))
    b = main(Args(run, path, tasks="copa,winograd"))
    assert a["tasks"] == b["tasks"] and a["data"]["files"] == b["data"]["files"]
    assert b["data"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    for task in a["tasks"]:
        uri = next(e[1] for e in core_bundle.PUBLIC if e[0] == task["task"])
        data = core_bundle.files()[f"eval_data/{uri}"]
        assert task["file_sha256"] == a["data"]["files"][uri] == hashlib.sha256(data).hexdigest()


def test_a_partial_bundle_is_never_core(save, tmp_path, capsys):
    run, _ = save()
    files = core_bundle.files()
    gone = ["hellaswag_zeroshot", "hellaswag", "squad", "coqa"]
    for label, uri, *_ in core_bundle.PUBLIC:
        if label in gone:
            files.pop(f"eval_data/{uri}", None)
    bundle = core_bundle.write_folder(tmp_path / "part", files)
    record = main(Args(run, bundle, limit=2))
    assert record["results"]["name"] == "CORE-18, at most 2 items per task, on other data"
    assert record["results"]["missing"] == gone and len(record["tasks"]) == 18
    assert "no CORE without hellaswag_zeroshot, hellaswag, squad, coqa" in capsys.readouterr().out
    with pytest.raises(UserError, match="--tasks squad: .*squad.jsonl is missing"):
        main(Args(run, bundle, tasks="copa,squad"))


def test_a_core_yaml_of_some_tasks(save, tmp_path):
    run, _ = save()
    files = core_bundle.files()
    files["core.yaml"] = core_bundle.core_yaml(core_bundle.PUBLIC[5:7]).encode()
    record = main(Args(run, core_bundle.write_folder(tmp_path / "part", files)))
    assert [r["task"] for r in record["tasks"]] == ["copa", "commonsense_qa"]


def test_the_folder_of_llm_foundry(save, bundle, tmp_path):
    """local_data has the files and no table."""
    run, _ = save()
    shutil.copytree(bundle / "eval_bundle" / "eval_data", tmp_path / "local_data")
    record = main(Args(run, tmp_path / "local_data", tasks="copa"))
    assert record["data"]["core_yaml"] is False
    assert record["tasks"][0]["items"] == 12


def test_a_csv_of_the_second_version_is_known(save, tmp_path):
    files = core_bundle.files()
    text = files["eval_meta_data.csv"].decode()
    files["eval_meta_data.csv"] = text.replace(",1221,20,", ",1221,40.3,").encode()
    assert files["eval_meta_data.csv"] != text.encode()
    run, _ = save()
    record = main(
        Args(run, core_bundle.write_folder(tmp_path / "v2", files), tasks="commonsense_qa")
    )
    assert record["tasks"][0]["baseline_percent"] == {"v1": 20, "v2": 40.3}


def edited(name: str, old: str, new: str) -> dict[str, bytes]:
    files = core_bundle.files()
    text = files[name].decode()
    assert old in text
    files[name] = text.replace(old, new, 1).encode()
    return files


COPA = "eval_data/commonsense_reasoning/copa.jsonl"
JEOPARDY = "eval_data/world_knowledge/jeopardy_all.jsonl"
WINOGRAD = "eval_data/language_understanding/winograd_wsc.jsonl"
DAMAGED = [
    ("core.yaml", "num_fewshot: [10]", "num_fewshot: [5]", "jeopardy: num_fewshot is .5."),
    ("core.yaml", '"\\nAnswer: "', '"\\nAnswer:"', r"jeopardy: continuation_delimiter is '\\nAns"),
    ("core.yaml", MC, LM, "hellaswag_zeroshot: icl_task_type is 'language_modeling'"),
    ("core.yaml", "copa.jsonl", "../../x.jsonl", "copa: dataset_uri is '.*/../../x.jsonl'"),
    ("core.yaml", "label: copa", "label: mmlu", "'mmlu' is none of the 22"),
    ("core.yaml", "icl_tasks:", "tasks:", "core.yaml: damaged .KeyError"),
    ("core.yaml", "icl_tasks:", "icl_tasks: [", "core.yaml: damaged"),
    ("core.yaml", "  label: copa", "  - copa", "core.yaml: damaged"),
    ("eval_meta_data.csv", ",1221,20,", ",1221,25,", "csv, line 9: baseline 25 of commonsense_qa"),
    ("eval_meta_data.csv", ",1221,20,", ",1221,x,", "csv, line 9: damaged .*'x'"),
    ("eval_meta_data.csv", "Random baseline", "Baseline", "line 3: damaged .KeyError"),
    (COPA, '"gold": ', '"gold": 2', "copa.jsonl, line 1: 'gold' is 2., not an index into 2"),
    (COPA, '"gold": 1', '"gold": -1', "copa.jsonl, line [0-9]+: 'gold' is -1, not an index"),
    (COPA, '"gold": 1', '"gold": true', "copa.jsonl, line [0-9]+: 'gold' is True, not an index"),
    (COPA, '"gold": 1', '"gold": "1"', "copa.jsonl, line [0-9]+: 'gold' is '1', not an index"),
    (COPA, '"query"', '"question"', "copa.jsonl, line 1: 'query' is missing or no string"),
    (COPA, '"choices": [', '"choices": [1, ', "line 1: 'choices' is missing or no list of strings"),
    (COPA, '"choices": [', '"choices": "a", "x": [', "line 1: 'choices' is missing or no list"),
    (COPA, '"choices": [', '"choices": ["a"], "x": [', "line 1: 'choices' has 1 entries"),
    (COPA, "{", "[{", "copa.jsonl, line 1: not JSON in UTF-8"),
    (COPA, "\n", "\n\n", "copa.jsonl, line 2: not JSON in UTF-8"),
    (COPA, "\n", "\nnull\n", "copa.jsonl, line 2: NoneType instead of an object"),
    (COPA, "\n", "\n" + "[" * 100_000 + "\n", "copa.jsonl, line 2: not JSON"),
    (JEOPARDY, '"context"', '"query"', "line 1: 'context' is missing or no string"),
    (JEOPARDY, '"continuation": "', '"continuation": " ", "x": "', "'continuation' is empty"),
    (JEOPARDY, '"continuation": "', '"continuation": 3, "x": "', "'continuation' is missing or no"),
    (WINOGRAD, '"context_options"', '"contexts"', "line 1: 'context_options' is missing or no"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "message"), DAMAGED)
def test_damaged_bundles(save, tmp_path, name, old, new, message):
    run, _ = save()
    content = edited(name, old, new)
    for bundle in (
        core_bundle.write_folder(tmp_path / "folder", content),
        core_bundle.write_zip(tmp_path / "b.zip", content),
    ):
        with pytest.raises(UserError, match=message) as error:
            main(Args(run, bundle))
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000
        assert name in str(error.value)
    assert not list(run.glob("eval/*"))


def test_core_yaml_runs_no_code(save, tmp_path):
    run, _ = save()
    code = 'icl_tasks: !!python/object/apply:os.mkdir ["made"]\nx:'
    with pytest.raises(UserError, match="core.yaml: damaged"):
        main(Args(run, core_bundle.write_folder(tmp_path, edited("core.yaml", "icl_tasks:", code))))
    assert not Path("made").exists()


def test_other_bytes_in_a_bundle(save, tmp_path):
    run, _ = save()
    for name, message in ((COPA, "line 3: not JSON in UTF-8"), ("core.yaml", "not UTF-8")):
        files = core_bundle.files()
        lines = files[name].split(b"\n")
        lines[2] = lines[2].replace(b"e", b"\xe9", 1)
        files[name] = b"\n".join(lines)
        with pytest.raises(UserError, match=message):
            main(Args(run, core_bundle.write_folder(tmp_path / message[:6], files)))


def test_separators_of_unicode_end_no_line(save, tmp_path):
    run, _ = save()
    files = core_bundle.files()
    rows = core_bundle.rows_of("copa", MC)
    rows[0]["query"] = "one\u2028two\x85three\x0cfour"
    files[COPA] = core_bundle.jsonl(rows).encode()
    record = main(Args(run, core_bundle.write_folder(tmp_path / "b", files), tasks="copa"))
    assert record["tasks"][0]["items"] == 12


# -----------------------------------------------------------------------------
# archives


def test_nothing_of_a_zip_is_written(save, tmp_path, monkeypatch):
    """Names that lead out of the folder, and links, do no harm: a zip is read where it is."""
    run, _ = save()
    path = core_bundle.write_zip(tmp_path / "b.zip")
    with zipfile.ZipFile(path, "a") as archive:
        for name in ("../escaped", "eval_bundle/../../escaped", f"{tmp_path}/escaped"):
            archive.writestr(name, "x")
        link = zipfile.ZipInfo("eval_bundle/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    before = {p for p in tmp_path.rglob("*") if "eval" not in p.parts}
    main(Args(run, path, tasks="copa"))
    assert {p for p in tmp_path.rglob("*") if "eval" not in p.parts} == before
    assert not (tmp_path.parent / "escaped").exists()


def test_a_link_in_a_zip_is_not_followed(save, tmp_path):
    run, _ = save()
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(core_bundle.files()[COPA])
    files = core_bundle.files()
    del files[COPA]
    path = core_bundle.write_zip(tmp_path / "b.zip", files)
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo(f"eval_bundle/{COPA}")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, str(secret))
    with pytest.raises(UserError, match="copa.jsonl, line 1: not JSON"):
        main(Args(run, path, tasks="copa"))


def test_a_zip_bomb(save, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_core, "MAX_FILE", 2**20)
    run, _ = save()
    files = core_bundle.files()
    files[COPA] = bytes(2**20 + 1)
    path = core_bundle.write_zip(tmp_path / "bomb.zip", files)
    assert path.stat().st_size < 2**16
    with pytest.raises(UserError, match="copa.jsonl: more than 1,048,576 bytes"):
        main(Args(run, path, tasks="copa"))


def test_damaged_zips(save, tmp_path):
    run, _ = save()
    good = core_bundle.write_zip(tmp_path / "b.zip").read_bytes()
    bad = tmp_path / "bad.zip"
    for data in (b"", b"<html>404</html>", good[: len(good) // 2]):
        bad.write_bytes(data)
        with pytest.raises(UserError, match="bad.zip: not a zip, or a damaged one"):
            main(Args(run, bad))
    rng = random.Random(0)
    caught = 0
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.choice([1, 3, 30])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        bad.write_bytes(data)
        try:
            place = eval_core.open_bundle(bad)
            eval_core.check_tables(place)
            for task in eval_core.choose(place, None, None):
                eval_core.read_rows(place, task)
        except UserError as error:
            assert "bad.zip" in str(error) and "\n" not in str(error)
            caught += 1
    assert caught > 30


def test_an_encrypted_file(save, tmp_path):
    run, _ = save()
    path = core_bundle.write_zip(tmp_path / "b.zip")
    data = bytearray(path.read_bytes())
    for sign, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flags of every entry
        at = data.find(sign)
        while at >= 0:
            data[at + offset] |= 1
            at = data.find(sign, at + 4)
    path.write_bytes(data)
    with pytest.raises(UserError, match="core.yaml: cannot be read .*encrypted"):
        main(Args(run, path))


def test_what_is_no_bundle(save, tmp_path):
    run, _ = save()
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(UserError, match=f"{path}: no bundle of CORE"):
            main(Args(run, path))


# -----------------------------------------------------------------------------
# arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0}, "--limit 0: at least 1"),
        ({"limit": -3}, "--limit -3: at least 1"),
        ({"max_length": 1}, "--max-length 1: 2 to"),
        ({"max_length": 10**9}, "--max-length 1000000000: 2 to"),
        ({"tasks": "copa,cola"}, "--tasks copa,cola: 'cola' is none of hellaswag_zeroshot"),
        ({"tasks": ""}, "--tasks : '' is none of"),
        ({"yarn_factor": 0.5}, "yarn_factor .0.5. must be at least 1"),
    ],
)
def test_wrong_arguments(save, bundle, settings, message):
    run, _ = save()
    with pytest.raises(UserError, match=message):
        main(Args(run, bundle, **settings))


def test_learned_positions_end_where_they_end(save, bundle):
    # nanochat#514: a prompt longer than the table stops an evaluation late
    run, _ = save(pos_emb="learned")
    with pytest.raises(UserError, match="learned positions end at 64 tokens.*--max-length 64"):
        main(Args(run, bundle))
    record = main(Args(run, bundle, max_length=64, limit=2))
    assert record["counts"]["cropped"] > 0


def test_a_step_folder_has_a_result_of_its_own(save, bundle):
    run, _ = save()
    step = run / "ckpt" / "step_00000006"
    main(Args(step, bundle, tasks="copa"))
    assert (run / "eval" / "core_1_tasks_step_00000006.json").is_file()


def test_a_run_of_another_tokenizer_is_refused(save, bundle):
    run, _ = save()
    path = run / "ckpt" / "step_00000006" / "meta.json"
    sha = tokenizer_of("bytes")["sha256"]
    path.write_text(path.read_text().replace(sha, "0" * 64))
    with pytest.raises(UserError, match="tokenizer bytes 000000000000"):
        main(Args(run, bundle))


def test_the_command_line(save, bundle):
    run, _ = save()
    command = [sys.executable, "-m", "scripts.eval_core", str(run.resolve()), "--bundle"]
    done = subprocess.run(
        [*command, str(bundle / "nothing")], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_check_row_takes_what_the_public_files_have():
    for label, _, kind, *_ in core_bundle.PUBLIC:
        assert [check_row(KIND[kind], row) for row in core_bundle.rows_of(label, kind)] == [
            None
        ] * len(core_bundle.rows_of(label, kind))
    assert core_tasks.check_row("LM", []) == "list instead of an object"


def test_the_public_bundle_is_fetched_once(save, tmp_path, monkeypatch):
    """Offline, the line says what to put where (tiktoken#513)."""
    run, _ = save()
    asked = []

    def refuse(url, path, *, sha256, bytes=None):
        asked.append((url, path, sha256))
        raise UserError(f"{url}: no route")

    monkeypatch.setattr(eval_core, "fetch", refuse)
    with pytest.raises(UserError) as error:
        main(Args(run))
    url = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
    sha = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
    assert asked == [(url, Path("data/eval_bundle/eval_bundle.zip"), sha)]
    for part in (url, sha, "--bundle"):
        assert part in str(error.value)

    def give(url, path, *, sha256, bytes=None):
        path.parent.mkdir(parents=True, exist_ok=True)
        core_bundle.write_zip(path)

    monkeypatch.setattr(eval_core, "fetch", give)
    assert main(Args(run, tasks="copa"))["tasks"][0]["items"] == 12
