"""scripts.eval_harness on task files made here, against sums over plain forward passes in float64.

lm-evaluation-harness itself is the one of requirements-dev.txt; nothing is downloaded.
"""

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from data.tokenizer import get_tokenizer
from model import GPT
from nanorove.checkpoint import load_model
from nanorove.distributed import DistInfo
from nanorove.errors import UserError
from scripts import eval_harness
from scripts.eval_harness import Answers, Args, as_harness_model, main
from tests import reference
from tests.conftest import REPO
from tests.test_sampling import save_run

pytest.importorskip("lm_eval", reason="pip install -r requirements-dev.txt")

from lm_eval.tasks import TaskManager  # noqa: E402

EOT = 256

ITEMS = {
    "mc": [
        {"question": f"Is {n} odd? ", "choices": ["no", "yes", "perhaps not"], "gold": n % 2}
        for n in range(12)
    ],
    "roll": [{"text": "ab" * n + "c."} for n in (1, 9, 40, 3)] + [{"text": "Größe"}],
    "gen": [{"question": f"{n}:", "answer": "x"} for n in range(5)],
}
TASKS = {
    "mc": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
fewshot_split: test
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "roll": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "gen": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n", "zz"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> Path:
    import lm_eval.tasks

    # not its own thousands of files, which take seconds to read
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, items in ITEMS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
        (folder / f"{name}.yaml").write_text(
            f"task: toy_{name}\ndataset_path: json\ntest_split: test\ndataset_kwargs:\n"
            f"  cache_dir: {tmp_path / 'cache'}\n  data_files:\n"
            f"    test: {folder / name}.jsonl\n{TASKS[name]}"
        )
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return save_run(tmp_path / "run", "rove")


def make_answers(run: Path, tmp_path: Path, max_length: int, tokenizer: str = "bytes") -> Answers:
    model, _ = load_model(run, max_len=max_length)
    info = DistInfo(0, 1, torch.device("cpu"))
    return Answers(model, get_tokenizer(tokenizer), "float32", info, tmp_path / "journal", {})


class Request:
    """As much of the harness's Instance as a model sees."""

    task_name = "toy"

    def __init__(self, *args: object) -> None:
        self.args = args


def log_probs(model: GPT, ids: list[int]) -> torch.Tensor:
    """(T, V) float64 from the slow model."""
    return reference.logits(model.state_dict(), model.config, torch.tensor(ids)).log_softmax(-1)


def direct(model: GPT, before: list[int], after: list[int]) -> tuple[float, bool]:
    """Log-probability of `after` behind `before`, and is it greedy?"""
    ids = before + after
    rows = log_probs(model, ids[:-1])[len(before) - 1 :]
    total = math.fsum(row[token].item() for row, token in zip(rows, after, strict=True))
    return total, all(row.argmax() == token for row, token in zip(rows, after, strict=True))


def of(text: str) -> list[int]:
    return list(text.encode())


# -----------------------------------------------------------------------------
# one kind of question after the other


def test_loglikelihood_is_the_direct_sum(run, tmp_path):
    answers = make_answers(run, tmp_path, 64)
    lm = as_harness_model(answers)
    pairs = [("The cat", " sat"), ("The cat", " ran away"), ("", "Hello"), ("a", "b"), (" ", "x")]
    found = lm.loglikelihood([Request(*pair) for pair in pairs])
    expected = [
        ([EOT] if not c.strip() else of(c), of((c if not c.strip() else "") + t)) for c, t in pairs
    ]
    for (value, greedy), (before, after) in zip(found, expected, strict=True):
        total, most_likely = direct(answers.model, before, after)
        assert value == pytest.approx(total, abs=1e-4) and greedy == most_likely
    assert answers.truncated == {"loglikelihood": 0} and answers.requests == {"loglikelihood": 5}


def test_what_greedy_decoding_gives_is_greedy(tmp_path):
    answers = make_answers(save_run(tmp_path / "run", "rope", always=ord("u")), tmp_path, 64)
    found = as_harness_model(answers).loglikelihood(
        [Request("Q:", "uuu"), Request("Q:", "uux"), Request("Q:", "u")]
    )
    assert [greedy for _, greedy in found] == [True, False, True]


@pytest.mark.parametrize("context", ["Once upon", "Once upon ", "Once upon  \n"])
def test_spaces_at_the_end_of_a_context_are_the_continuations(tmp_path, context):
    """lm-evaluation-harness#63: with GPT-2's tokens "upon " + "a" is not "upon" + " a"."""
    answers = make_answers(
        save_run(tmp_path / "run", "rope", tokenizer_name="gpt2"), tmp_path, 64, "gpt2"
    )
    ((value, _),) = as_harness_model(answers).loglikelihood([Request(context, "a time")])
    encode = answers.encode
    before = encode("Once upon")
    after = encode(context + "a time")[len(before) :]
    assert answers.tokenizer.decode(after) == context[len("Once upon") :] + "a time"
    assert value == pytest.approx(direct(answers.model, before, after)[0], abs=1e-4)


def test_too_long_a_pair_keeps_its_end(run, tmp_path):
    """max_length + 1 tokens, of which the last is not read; all of the continuation is scored
    (mlx-lm#1902)."""
    answers = make_answers(run, tmp_path, 20)
    context, continuation = "abcdefghijklmnopqrstuvwxyz", " 0123456789"
    for text in (continuation, "0" * 20):
        ((value, _),) = as_harness_model(answers).loglikelihood([Request(context, text)])
        ids = of(context + text)[-21:]
        cut = 21 - len(text)
        assert value == pytest.approx(direct(answers.model, ids[:cut], ids[cut:])[0], abs=1e-4)
        assert answers.truncated == {"loglikelihood": 1}
    fits = Request(context[:10], continuation)
    as_harness_model(answers).loglikelihood([fits])
    assert answers.truncated == {"loglikelihood": 0}


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("a", ""), "the continuation '' of 'a' has 0 tokens; 1 to 20"),
        (("", ""), "neither context nor text"),
        (("a", "b" * 21), "has 21 tokens; 1 to 20 can be scored"),
    ],
)
def test_continuations_that_cannot_be_scored(run, tmp_path, pair, message):
    """lm-evaluation-harness#1053: a line that names the text instead of an assertion."""
    with pytest.raises(UserError, match=message):
        as_harness_model(make_answers(run, tmp_path, 20)).loglikelihood([Request(*pair)])


def test_neighbours_with_one_context_are_one_group(run, tmp_path, monkeypatch):
    answers = make_answers(run, tmp_path, 64)
    groups = []
    score_all = eval_harness.score_all
    monkeypatch.setattr(
        eval_harness, "score_all", lambda m, g, **kw: groups.extend(g) or score_all(m, g, **kw)
    )
    pairs = [("A?", " b"), ("A?", " c"), ("B?", " b"), ("A?", " d"), ("A? ", "e")]
    as_harness_model(answers).loglikelihood([Request(*pair) for pair in pairs])
    assert [len(group) for group in groups] == [2, 1, 2]  # "A? " is "A?" in front of " e"


def test_golden_rolling_windows(run, tmp_path, monkeypatch):
    """Tokens 0 to 9, four at a time: each scored once, end-of-text in front of the first alone
    (lm-evaluation-harness#369)."""
    answers = make_answers(run, tmp_path, 4)
    windows = []
    score_all = eval_harness.score_all
    monkeypatch.setattr(
        eval_harness, "score_all", lambda m, g, **kw: windows.extend(g) or score_all(m, g, **kw)
    )
    text = "0123456789"
    (value,) = as_harness_model(answers).loglikelihood_rolling([Request(text)])
    ids = [[EOT, *of("0123")], of("34567"), of("56789")]
    assert [span.ids.tolist() for (span,) in windows] == ids
    scored = [bytes(s.ids[s.start : s.end].tolist()).decode() for (s,) in windows]
    assert scored == ["0123", "4567", "89"]
    total = sum(
        direct(answers.model, i[: s.start], i[s.start : s.end])[0]
        for i, (s,) in zip(ids, windows, strict=True)
    )
    assert value == pytest.approx(total, abs=1e-4)


def test_rolled_texts_keep_their_order_and_may_be_empty(run, tmp_path):
    answers = make_answers(run, tmp_path, 8)
    texts = ["abc", "", "z" * 30, "abc"]
    found = as_harness_model(answers).loglikelihood_rolling([Request(text) for text in texts])
    assert found[1] == 0 and found[0] == found[3]
    assert found[0] == pytest.approx(direct(answers.model, [EOT], of("abc"))[0], abs=1e-4)
    assert found[2] < found[0] < 0


def greedy(model: GPT, ids: list[int], n: int) -> list[int]:
    new: list[int] = []
    for _ in range(n):
        new.append(int(log_probs(model, ids + new)[-1].argmax()))
    return new


@pytest.mark.parametrize("prompt", ["Go on: ", "x" * 100, ""])
def test_generation_is_greedy_behind_the_end_of_the_prompt(run, tmp_path, prompt):
    answers = make_answers(run, tmp_path, 32)
    options = {"until": [], "max_gen_toks": 10, "do_sample": False, "temperature": 1}
    (text,) = as_harness_model(answers).generate_until([Request(prompt, options)])
    new = greedy(answers.model, of(prompt)[-22:] or [EOT], 10)
    assert EOT not in new  # of these weights
    assert text == bytes(new).decode(errors="replace")
    assert answers.truncated == {"generate_until": int(len(prompt) > 22)}


class Spells:
    """Writes these tokens one after the other."""

    def __init__(self, answers: Answers, tokens: list[int], prompt: int) -> None:
        head = torch.nn.functional.one_hot(torch.tensor(tokens), 257).float() * 50
        answers.model.head = lambda hidden: hidden
        pos = [0]

        def hidden(idx, cache):
            cache.pos += idx.size(1)
            pos[0] = cache.pos - prompt
            return head[pos[0]][None, None].expand(1, idx.size(1), -1)

        answers.model.hidden = hidden


@pytest.mark.parametrize(
    ("until", "text"),
    [
        ("lo", "Hel"),
        (["xyz", "l", "He"], ""),  # the earliest in the text, whatever the order
        (["o w", "wor"], "Hell"),
        (None, "Hello wörld"),
        ([], "Hello wörld"),
        (["", "ö"], "Hello w"),  # two tokens; and an empty string is no end
    ],
)
def test_the_text_is_cut_at_the_first_stop(run, tmp_path, until, text):
    """On text, not on tokens: a stop string may begin and end inside of them."""
    answers = make_answers(run, tmp_path, 64)
    Spells(answers, [*of("Hello wörld"), EOT, *of("more")], prompt=2)
    options = {"until": until, "max_gen_toks": 15}
    assert as_harness_model(answers).generate_until([Request("Q:", options)]) == [text]


def test_end_of_text_in_letters_is_an_end_too(run, tmp_path):
    answers = make_answers(run, tmp_path, 64)
    Spells(answers, of("ab<|endoftext|>cd"), prompt=2)
    assert as_harness_model(answers).generate_until([Request("Q:", {"max_gen_toks": 17})]) == ["ab"]


def test_sampling_is_repeatable_and_differs_between_items(run, tmp_path):
    answers = make_answers(run, tmp_path, 64)
    options = {"do_sample": True, "temperature": 2.0, "top_k": 50, "top_p": 0.9, "max_tokens": 12}
    twice = [Request("Q:", options), Request("Q:", options)]
    first = as_harness_model(answers).generate_until(twice)
    (tmp_path / "journal" / "generate_until.jsonl").unlink()
    assert as_harness_model(answers).generate_until(twice) == first
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_gen_toks": 32}, "32 new tokens, but prompt and answer have 32 together"),
        ({"max_gen_toks": 0}, "0 new tokens"),
        ({}, "256 new tokens"),
        ({"max_gen_toks": 5, "num_beams": 4}, "num_beams.*not known here"),
    ],
)
def test_generation_that_cannot_be_had(run, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        as_harness_model(make_answers(run, tmp_path, 32)).generate_until([Request("Q:", options)])


# -----------------------------------------------------------------------------
# the whole script


def evaluate(run: Path, tasks: Path, names: str = "toy_mc,toy_roll,toy_gen", **settings) -> dict:
    return main(Args(run, names, include_path=tasks, max_length=64, **settings))


def test_three_tasks_against_sums_by_hand(run, tasks, tmp_path):
    record = evaluate(run, tasks)
    model, _ = load_model(run, max_len=64)

    right, right_norm = [], []
    items = record["items"]["toy_mc"]
    for item, sample in zip(ITEMS["mc"], items, strict=True):
        question = item["question"].rstrip()
        sums = [direct(model, of(question), of(" " + c)) for c in item["choices"]]
        for got, (total, most_likely) in zip(sample["filtered_resps"], sums, strict=True):
            assert got[0] == pytest.approx(total, abs=1e-4) and got[1] == most_likely
        values = [total for total, _ in sums]
        right.append(int(np.argmax(values)) == item["gold"])
        per_byte = [v / len(c) for v, c in zip(values, item["choices"], strict=True)]
        right_norm.append(int(np.argmax(per_byte)) == item["gold"])
        assert sample["acc"] == right[-1]
    found = record["results"]["toy_mc"]
    assert found["acc,none"] == np.mean(right) and found["acc_norm,none"] == np.mean(right_norm)
    assert found["acc_stderr,none"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(12))

    texts = [item["text"] for item in ITEMS["roll"]]
    total = 0.0
    for text in texts:
        ids = of(text)
        total += direct(model, [EOT], ids[:64])[0]
        if len(ids) > 64:  # 82 bytes: 18 more, behind the 47 before them
            total += direct(model, ids[82 - 65 : 64], ids[64:])[0]
    size = sum(len(text.encode()) for text in texts)
    found = record["results"]["toy_roll"]
    assert found["byte_perplexity,none"] == pytest.approx(math.exp(-total / size), rel=1e-5)
    assert found["bits_per_byte,none"] == pytest.approx(-total / size / math.log(2), rel=1e-5)

    for item, sample in zip(ITEMS["gen"], record["items"]["toy_gen"], strict=True):
        new = bytes(greedy(model, of(item["question"]), 6)).decode(errors="replace")
        assert sample["filtered_resps"] == [new.split("\n")[0].split("zz")[0]]

    assert json.loads((run / "eval" / "harness_toy_mc_toy_roll_toy_gen.json").read_text()) == record
    assert not list((run / "eval").glob("*.journal"))
    assert record["evaluation"] == "harness" and record["dtype"] == "float32"
    assert record["settings"]["max_length"] == 64 and record["settings"]["harness"] == "0.4.13"
    assert record["counts"]["items"] == {"toy_mc": 12, "toy_roll": 5, "toy_gen": 5}
    assert record["counts"]["requests"] == {
        "loglikelihood": 36, "loglikelihood_rolling": 5, "generate_until": 5,
    }  # fmt: skip
    assert all(len(data["sha256"]) == 64 for data in record["data"].values())


def test_limit_and_examples_in_the_prompt(run, tasks):
    plain = evaluate(run, tasks, "toy_mc", limit=4)
    shots = evaluate(run, tasks, "toy_mc", limit=4, num_fewshot=2)
    for record in (plain, shots):
        assert record["counts"]["items"] == {"toy_mc": 4} and record["counts"]["of"] == {
            "toy_mc": 12
        }
        assert record["settings"]["limit"] == 4 and len(record["items"]["toy_mc"]) == 4
    assert plain["num_fewshot"] == {"toy_mc": 0} and shots["num_fewshot"] == {"toy_mc": 2}
    assert plain["data"] != shots["data"]  # other prompts
    again = evaluate(run, tasks, "toy_mc", limit=4, num_fewshot=2)
    assert again["items"] == shots["items"]


def test_yarn_gives_other_numbers_and_a_longer_context(run, tasks):
    plain = main(Args(run, "toy_roll", include_path=tasks))
    yarn = main(Args(run, "toy_roll", include_path=tasks, yarn_factor=4.0))
    assert plain["settings"]["max_length"] == 16 and yarn["settings"]["max_length"] == 64
    assert yarn["settings"]["yarn_factor"] == 4.0
    assert plain["results"] != yarn["results"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tasks="toy_mc,nothing"), "--tasks nothing: neither the harness nor --include-path"),
        (dict(tasks="toy_mc", include_path=Path("nowhere")), "--include-path nowhere: no such"),
        (dict(tasks="toy_mc", limit=0), "--limit 0: at least 1"),
        (dict(tasks="toy_mc", num_fewshot=-1), "--num-fewshot -1: at least 0"),
        (dict(tasks="toy_mc", max_length=0), "--max-length 0: at least 1"),
        (dict(tasks="toy_lost"), "--tasks toy_lost: cannot be loaded: .*lost.jsonl"),
    ],
    ids=str,
)
def test_what_cannot_be_evaluated(run, tasks, settings, message):
    lost = (tasks / "mc.yaml").read_text().replace("toy_mc", "toy_lost").replace("/mc.", "/lost.")
    (tasks / "lost.yaml").write_text(lost)
    with pytest.raises(UserError, match=message) as error:
        main(Args(run, **(dict(include_path=tasks) | settings)))
    assert "\n" not in str(error.value)


def test_learned_positions_end(tasks, tmp_path):
    with pytest.raises(UserError, match="learned positions end at block_size"):
        evaluate(save_run(tmp_path / "learned", "learned"), tasks)


def test_without_the_harness_there_is_one_line(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install lm-eval==0\.4\.13"):
        main(Args(run, "toy_mc"))


def test_another_version_of_the_harness_is_refused(run, monkeypatch):
    monkeypatch.setattr("lm_eval.__version__", "0.5.0")
    with pytest.raises(UserError, match=r"0\.5\.0, but .* pip install lm-eval==0\.4\.13"):
        main(Args(run, "toy_mc"))


@pytest.mark.slow
def test_two_processes_give_the_same_file(run, tasks, tmp_path):
    for how, out in (
        ([], "1.json"),
        (["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"], "2.json"),
    ):
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        done = subprocess.run(
            [sys.executable, *how, *(["-m"]), "scripts.eval_harness", run, "--tasks",
             "toy_mc,toy_roll,toy_gen", "--include-path", tasks, "--max-length", "64",
             "--out", tmp_path / out],
            cwd=REPO, env=env, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
