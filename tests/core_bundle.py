"""A tiny bundle of CORE in the layout of the public one: all 22 tasks, a dozen rows each.

The table is written out from the public core.yaml and eval_meta_data.csv, so that ours is compared
with another one. The rows are made up, and have what is odd in the real ones.
"""

import json
import random
import zipfile
from pathlib import Path
from typing import Any

MC, SC, LM = "multiple_choice", "schema", "language_modeling"
ANSWER = "\nAnswer: "

# label, dataset_uri, icl_task_type, shots, delimiter, random baseline in percent (v1), public rows
PUBLIC = [
    ("hellaswag_zeroshot", "language_understanding/hellaswag.jsonl", MC, 0, " ", 25.0, 10042),
    ("jeopardy", "world_knowledge/jeopardy_all.jsonl", LM, 10, ANSWER, 0.0, 2117),
    ("bigbench_qa_wikidata", "world_knowledge/bigbench_qa_wikidata.jsonl", LM, 10, " ", 0.0, 20321),
    ("arc_easy", "world_knowledge/arc_easy.jsonl", MC, 10, ANSWER, 25.0, 2376),
    ("arc_challenge", "world_knowledge/arc_challenge.jsonl", MC, 10, ANSWER, 25.0, 1172),
    ("copa", "commonsense_reasoning/copa.jsonl", MC, 0, " ", 50.0, 100),
    ("commonsense_qa", "commonsense_reasoning/commonsense_qa.jsonl", MC, 10, " ", 20.0, 1221),
    ("piqa", "commonsense_reasoning/piqa.jsonl", MC, 10, ANSWER, 50.0, 1838),
    ("openbook_qa", "commonsense_reasoning/openbook_qa.jsonl", MC, 0, " ", 25.0, 500),
    ("lambada_openai", "language_understanding/lambada_openai.jsonl", LM, 0, " ", 0.0, 5153),
    ("hellaswag", "language_understanding/hellaswag.jsonl", MC, 10, " ", 25.0, 10042),
    ("winograd", "language_understanding/winograd_wsc.jsonl", SC, 0, " ", 50.0, 273),
    ("winogrande", "language_understanding/winogrande.jsonl", SC, 0, " ", 50.0, 1267),
    ("bigbench_dyck_languages", "symbolic_problem_solving/bigbench_dyck_languages.jsonl", LM, 10,
     " ", 0.0, 1000),
    ("agi_eval_lsat_ar", "symbolic_problem_solving/agi_eval_lsat_ar.jsonl", MC, 3, " ", 20.0, 230),
    ("bigbench_cs_algorithms", "symbolic_problem_solving/bigbench_cs_algorithms.jsonl", LM, 10,
     " ", 0.0, 1320),
    ("bigbench_operators", "symbolic_problem_solving/bigbench_operators.jsonl", LM, 10, " ", 0.0,
     210),
    ("bigbench_repeat_copy_logic", "symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl", LM,
     10, " ", 0.0, 32),
    ("squad", "reading_comprehension/squad.jsonl", LM, 10, " ", 0.0, 10570),
    ("coqa", "reading_comprehension/coqa.jsonl", LM, 0, " ", 0.0, 7983),
    ("boolq", "reading_comprehension/boolq.jsonl", MC, 10, ANSWER, 62.0, 3270),
    ("bigbench_language_identification",
     "language_understanding/bigbench_language_identification.jsonl", MC, 10, " ", 9.1, 10000),
]  # fmt: skip

WORDS = "the a red blue cat dog house river stone runs sleeps over under big small and or".split()


def rows_of(label: str, kind: str) -> list[dict[str, Any]]:
    """The rows of one file, the same at every call."""
    rng = random.Random(label.removesuffix("_zeroshot"))

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))

    rows: list[dict[str, Any]] = []
    for _ in range(4 if label == "bigbench_repeat_copy_logic" else 12):
        if kind == LM:
            rows.append({"context": text(3, 5).capitalize() + ":", "continuation": text(1, 3)})
        elif kind == SC:
            end, options = text(2, 4), [text(3, 6), text(3, 6)]
            rows.append({"context_options": options, "continuation": end, "gold": rng.randrange(2)})
        else:
            n = 2 if label in ("copa", "piqa", "boolq") else 4
            choices = [f"{word} {text(1, 2)}" for word in rng.sample(WORDS, n)]
            rows.append({"query": text(2, 4), "choices": choices, "gold": rng.randrange(n)})
    return oddities(label, rows)


def oddities(label: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the real files have, and what they might."""
    if label == "piqa":
        for row in rows:
            row["query"] = f"Question: {row['query']}\n"
        # one choice goes on where the other ends: nothing of the first is left to score
        rows[3]["choices"] = ["put it in the oven", "put it in the oven for an hour"]
        rows[3]["gold"] = 1
        rows[7]["choices"] = ["wait for an hour", "wait"]
        rows[7]["gold"] = 0
    if label in ("bigbench_language_identification", "commonsense_qa", "agi_eval_lsat_ar"):
        # letters; the queries of the first end in a space, so the letter stands behind two
        space = " " if label == "bigbench_language_identification" else ""
        for row in rows:
            listed = "\n".join(f"{x}. {c}" for x, c in zip("ABCD", row["choices"], strict=True))
            row |= {"query": f"{row['query']}\n{listed}\nAnswer:{space}", "choices": list("ABCD")}
    if label == "jeopardy":  # has_categories
        for i, row in enumerate(rows):
            row["category"] = ["world_history", "science"][i % 2]
    if label == "lambada_openai":
        rows[0]["context"] = "\n  " + rows[0]["context"] + "  "
        rows[1] = {"context": "“Nein”, sagte Zoë — 你好", "continuation": "Fräulein 🙂"}
        rows[2] = {"context": "a literal <|endoftext|> is text", "continuation": "<|endoftext|>"}
        rows[3]["context"] = ""
    if label == "arc_easy":
        rows[0]["choices"][1] = "<|endoftext|>"
    if label == "winograd":
        rows[0] = {
            "context_options": [
                "The city councilmen refused the demonstrators a permit because the city"
                " councilmen",
                "The city councilmen refused the demonstrators a permit because the demonstrators",
            ],
            "continuation": "feared violence.",
            "gold": 0,
        }
    if label == "boolq":
        for row in rows:
            row |= {
                "query": f"Passage: {row['query'] * 4}\nQuestion: is it?",
                "choices": ["no", "yes"],
            }
    if label == "squad":
        for row in rows:
            row["context"] = f"Context: {row['context'] * 6}\nAnswer:\n"
    return rows


def core_yaml(entries: list[tuple] = PUBLIC) -> str:
    lines = ["icl_tasks:"]
    for label, uri, kind, shots, delimiter, *_ in entries:
        lines += ["-", f"  label: {label}", f"  dataset_uri: {uri}", f"  num_fewshot: [{shots}]"]
        lines += [f"  icl_task_type: {kind}"]
        if delimiter != " ":
            lines += [f"  continuation_delimiter: {json.dumps(delimiter)}"]
        if label == "jeopardy":
            lines += ["  has_categories: true"]
    return "\n".join(lines) + "\n"


def meta_csv(entries: list[tuple] = PUBLIC) -> str:
    head = "Eval Task,Task Category,Task Type,#shots,#datapoints,Random baseline,Centered Metric?"
    lines = [head, "mmlu_zeroshot,world knowledge,multiple choice,0,14042,25,"]
    for label, _, kind, shots, _, baseline, rows in entries:
        lines.append(f'{label},"some, category",{kind},{shots},{rows},{baseline:g},')
    return "\n".join(lines) + "\n"


def jsonl(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def files() -> dict[str, bytes]:
    """{path in the bundle: content}."""
    found = {"core.yaml": core_yaml().encode(), "eval_meta_data.csv": meta_csv().encode()}
    for label, uri, kind, *_ in PUBLIC:
        found[f"eval_data/{uri}"] = jsonl(rows_of(label, kind)).encode()
    return found


def write_folder(folder: Path, content: dict[str, bytes] | None = None) -> Path:
    """As a folder that holds eval_bundle/, as unzip leaves it."""
    for name, data in (content or files()).items():
        path = folder / "eval_bundle" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_zip(path: Path, content: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (content or files()).items():
            archive.writestr(f"eval_bundle/{name}", data)
    return path
