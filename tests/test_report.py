"""scripts.report on made-up runs whose answer is known."""

import csv
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats

from nanorove.errors import UserError
from nanorove.figures import lines_figure, mean_series, paired_series, smooth
from nanorove.results import (
    Key,
    compare_arms,
    differing_keys,
    effect,
    make_arms,
    read_metrics,
    read_run,
)
from nanorove.ruler_metrics import TASKS
from scripts.report import Args, main, make_page, plain
from scripts.report_claims import read_report
from scripts.report_figures import perplexity_panels
from scripts.report_tables import PAPER

LENGTHS = (256, 1024, 4096)
HOSTILE = '<script>alert("x")</script> & `code` | $x$ <img src=http://evil.example/a.png>'


def make_run(
    folder: Path,
    pos_emb: str = "rope",
    *,
    excess: dict[int, float] | None = None,
    excess_yarn: dict[int, float] | None = None,
    yarn: str = "4",
    seed: int = 1337,
    documents: int = 24,
    run_name: str | None = None,
    sample: str = "return 1",
    perplexity: bool = True,
    model: str = "",
    tokenizer: str = "bytes",
    derived_from: str | None = None,
) -> Path:
    """A run folder. `excess`: nats per token by which its NLL exceeds that of a fixed model.
    model: more lines of [model]."""
    excess = excess or {}
    (folder / "ckpt" / "step_00000100").mkdir(parents=True)
    (folder / "eval").mkdir()
    name = json.dumps(run_name or folder.name)
    (folder / "config.toml").write_text(
        f"run_name = {name}\nseed = {seed}\n[model]\npos_emb = '{pos_emb}'\nblock_size = 256\n"
        f"yarn_factor = 1.0\n{model}\n[data]\ndir = 'data/x'\n[train]\nmax_steps = 100\n"
    )
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(0, 101, 2):
        loss = 5.5 * math.exp(-step / 20) + 1.5 + rng.normal(0, 0.02) + excess.get(256, 0)
        record = {"step": step, "tokens": step * 1000, "train/loss": loss, "perf/step_ms": 80.0,
                  "perf/tokens_per_s": 12500.0, "mem/peak_gib": 0.5}  # fmt: skip
        lines.append(record if step else {"step": 0, "tokens": 0, "val/loss": 5.5})
        if step % 20 == 0 and step:
            by_position = {"0": loss + 0.3, "1": loss + 0.1, "2-255": loss + 0.05}
            lines.append({"step": step, "tokens": step * 1000, "val/loss": loss + 0.05,
                          "val/loss_by_position": by_position})  # fmt: skip
    lines = [] if derived_from else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    meta = {"git_revision": "abcdef0123456789", "git_dirty": False, "params": 834304,
            "versions": {"torch": "2.13.0"}, "threads": 2, "world_size": 1,
            "device": "cpu: x86_64"}  # fmt: skip
    if derived_from:
        meta["derived_from"] = {"run": derived_from, "pos_emb": derived_from}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "ckpt" / "last").write_text("step_00000100\n")
    (folder / "ckpt" / "step_00000100" / "meta.json").write_text(
        json.dumps(
            {
                "step": 100,
                "files": {"model.safetensors": {"sha256": "a" * 64}},
                "data": {"manifest_sha256": "f" * 64, "tokenizer": {"name": tokenizer}},
            }
        )
    )
    (folder / "eval" / "samples.json").write_text(
        json.dumps([{"prompt": "def f(", "text": sample}])
    )
    if not perplexity:
        return folder
    difficulty = np.random.default_rng(0).normal(1.4, 0.3, documents)  # the documents' own
    noise = np.random.default_rng([seed, *pos_emb.encode()]).normal(0, 0.01, documents)
    results = []
    for quantity in ("last", "disjoint"):
        for setting in ("none", yarn):
            more = excess if setting == "none" or excess_yarn is None else excess_yarn
            for length in LENGTHS:
                key = {"quantity": quantity, "yarn": setting, "length": length}
                if pos_emb == "learned" and length > 256:
                    reason = "learned positions end at 256 tokens"
                    results.append(key | {"nll": None, "ppl": None, "reason": reason})
                    continue
                sums = (difficulty + noise + more.get(length, 0)) * 128
                nll = sums.sum() / (128 * documents)
                results.append(key | {
                    "factor": 1.0, "nll": nll, "ppl": math.exp(nll), "tokens": 128 * documents,
                    "sums": sums.tolist(), "counts": [128] * documents,
                })  # fmt: skip
    record = {
        "model_sha256": "a" * 64, "step": 100, "dtype": "float32", "device": "cpu",
        "settings": {"lengths": list(LENGTHS), "yarn": ["none", yarn], "documents": documents},
        "protocol": {"bos": "Bos", "segment": "one segment", "last": "the last 128 tokens",
                     "disjoint": "windows", "weighting": "Token-weighted"},
        "documents": {"in_split": 99, "used": documents, "skipped_too_short": 9},
        "segments": [{"sha256": str(i)} for i in range(documents)],
        "results": results,
        "curve": [{
            "yarn": "none", "length": 4096, "factor": 1.0, "edges": [0, 64, 4096],
            "nll": [2.0, 1.5], "counts": [63, 4032],
            "sums": [[126.0, 6048.0]] * documents,
        }],
    }  # fmt: skip
    (folder / "eval" / "perplexity.json").write_text(json.dumps(record))
    return folder


def add_ruler(
    folder: Path,
    nll: dict[str, float],
    *,
    lengths: tuple[int, ...] = (1024, 2048),
    samples: int = 8,
) -> None:
    """eval/ruler.json with YaRN auto: at every length each task has the mean NLL that is given, the
    samples lie around it."""
    results, rows = [], []
    noise = np.linspace(-0.2, 0.2, samples)
    for length in lengths:
        tasks = {}
        for task, value in nll.items():
            tasks[task] = {"nll": value, "scored": samples, "prefix_only": value + 1, "exact": 0.0}
            rows += [
                {"length": length, "yarn": "auto", "task": task, "index": i,
                 "nll": 3 * (value + x), "tokens": 3}
                for i, x in enumerate(noise.tolist())
            ]  # fmt: skip
        results.append({"length": length, "yarn": "auto", "factor": 4.0, "tasks": tasks})
    files = [{"task": t, "length": n, "sha256": f"{t}{n}"} for t in nll for n in lengths]
    record = {
        "evaluation": "ruler", "model_sha256": "a" * 64, "step": 100, "dtype": "float32",
        "device": "cpu", "data": {"files": files}, "settings": {"limit": None}, "seed": 42,
        "counts": {"items": len(rows), "skipped": 0}, "results": results, "samples": rows,
    }  # fmt: skip
    (folder / "eval" / "ruler.json").write_text(json.dumps(record))


def add_core(folder: Path, right: dict[str, tuple[int, int, float]], name: str = "CORE-2") -> None:
    """eval/core.json: {task: (right, items, baseline in percent)}; the first ones are right."""
    tasks = []
    for task, (count, n, baseline) in right.items():
        centered = (count / n - baseline / 100) / (1 - baseline / 100)
        tasks.append({
            "task": task, "items": n, "accuracy": count / n, "file_sha256": task,
            "baseline_percent": {"v1": baseline, "v2": baseline},
            "centered": {"v1": centered, "v2": centered},
            "per_item": {"line": list(range(1, n + 1)),
                         "correct": [i < count for i in range(n)]},
        })  # fmt: skip
    mean = sum(t["centered"]["v1"] for t in tasks) / len(tasks)
    record = {
        "evaluation": "core", "model_sha256": "a" * 64, "step": 100, "dtype": "float32",
        "device": "cpu", "tasks": tasks,
        "settings": {"tasks": None, "limit": None, "max_length": 1024, "yarn_factor": None},
        "results": {"name": name, "v1": mean, "v2": mean, "missing": ["copa"]},
        "counts": {"items": sum(t["items"] for t in tasks), "cropped": 0},
    }  # fmt: skip
    (folder / "eval" / "core.json").write_text(json.dumps(record))


def add_hellaswag(folder: Path, acc: int, acc_norm: int, n: int = 40) -> None:
    """eval/hellaswag.json: the first ones are right."""
    record = {
        "evaluation": "hellaswag", "model_sha256": "a" * 64, "step": 100, "dtype": "float32",
        "device": "cpu", "data": {"sha256": "h"}, "settings": {"limit": None, "yarn_factor": 1.0},
        "counts": {"items": n}, "acc": acc / n, "acc_norm": acc_norm / n,
        "items": [{"index": i, "label": 1, "choice": int(i < acc),
                   "choice_norm": int(i < acc_norm)} for i in range(n)],
    }  # fmt: skip
    (folder / "eval" / "hellaswag.json").write_text(json.dumps(record))


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def report(out: Path, *runs: Path, title: str = "RoVE or RoPE?") -> tuple[str, str]:
    main(Args(runs, out, title))
    html = (out / "report.html").read_text().replace("\u00a0", " ")
    return html, (out / "report.md").read_text()


class Page(HTMLParser):
    """Parses strictly enough to see an unbalanced page; collects texts and addresses."""

    VOID = {"meta", "br", "img", "link", "hr", "input"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            if key in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.links.append(value)
            assert not key.startswith("on")
            if key == "id":
                self.ids.append(value)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# -----------------------------------------------------------------------------
# the page


def test_the_page_stands_alone(tmp_path):
    rope = make_run(tmp_path / "rope")
    rove = make_run(tmp_path / "rove", "rove", excess={4096: -0.5})
    html, _ = report(tmp_path / "out", rope, rove)
    page = Page(html)
    # two YaRN settings, loss, difference, by position in training and in long documents
    assert page.tags.count("svg") == 6
    assert all(link.startswith("#") for link in page.links)  # parts of a figure, in the same file
    assert set(page.links) <= {f"#{i}" for i in page.ids}
    assert len(page.ids) == len(set(page.ids))  # ids are the page's: figures must not share them
    assert not re.search(r"https?:|@import|url\((?!#)|<link|<script|file:", html)
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(page.ids)
    assert 'name="viewport"' in html and "prefers-color-scheme: dark" in html
    for name in ("perplexity.png", "loss.png", "position.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_figures_follow_the_theme(tmp_path):
    html, _ = report(tmp_path / "out", make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove"))
    svgs = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    for svg in svgs:
        assert not re.search(r"#[0-9a-f]{6}\b", svg)  # no colour that a dark page would not change
    style = html[: html.index("</style>")]
    used = set(re.findall(r"var\((--\w+)\)", html))
    assert used <= set(re.findall(r"(--\w+):", style)) and {"--rope", "--rove"} <= used


@pytest.mark.parametrize("others, most", [(1, 1.0), (2, 1.03), (7, 1.03)])
def test_changes_stand_at_their_lengths(tmp_path, others, most):
    """Those of several arms side by side, and still at their length."""
    runs = [make_run(tmp_path / "rope")]
    runs += [make_run(tmp_path / f"a{i}", model=f"rope_base = {500 + i}") for i in range(others)]
    found = read_report(runs)
    figure = lines_figure(
        perplexity_panels(found)[:1], found.arms, found.comparisons, found.effects, ylabel="",
        xlabel="", ratio=True, all_panels=perplexity_panels(found),
    )  # fmt: skip
    lines = [line.get_xdata() for line in figure.axes[1].lines if len(line.get_xdata()) == 3]
    assert len(lines) >= others
    shifts = np.array(lines) / LENGTHS
    assert shifts.max() == pytest.approx(most, abs=1e-3)
    assert 1 / shifts.min() == pytest.approx(most, abs=1e-3)


def test_hostile_text_is_text(tmp_path):
    a = make_run(tmp_path / "a", run_name=HOSTILE + "1", sample=HOSTILE)
    b = make_run(tmp_path / "b", run_name=HOSTILE + "2", sample="</pre>```\n# no heading")
    html, md = report(tmp_path / "out", a, b, title=HOSTILE)
    page = Page(html)
    assert not {"script", "img"} & set(page.tags)
    assert page.links == [link for link in page.links if link.startswith("#")]
    assert HOSTILE in "".join(page.texts) and "</pre>```\n# no heading" in "".join(page.texts)
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", md, flags=re.DOTALL | re.MULTILINE)
    assert "<script>" not in outside and "<img" not in outside and "no heading" not in outside
    # in every Markdown table each line has as many cells as its head
    for block in re.findall(r"(?:^\|.*\n?)+", outside, re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().splitlines()}
        assert len(cells) == 1


def test_learned_positions_are_not_applicable(tmp_path):
    html, md = report(
        tmp_path / "out", make_run(tmp_path / "a"), make_run(tmp_path / "b", "learned")
    )
    assert 'title="learned positions end at 256 tokens"' in html
    assert "n/a" in md and not re.search(r"\b(nan|inf)\b", (html + md).lower())


def test_a_run_without_evaluation(tmp_path):
    a = make_run(tmp_path / "a", perplexity=False)
    b = make_run(tmp_path / "b", "rove", perplexity=False)
    html, md = report(tmp_path / "out", a, b)
    assert "last validation loss is" in html and "has not been evaluated" in html
    assert f"python -m scripts.eval_perplexity {a}" in html and "eval_perplexity" in md
    Page(html)


def test_one_run(tmp_path):
    html, _ = report(tmp_path / "out", make_run(tmp_path / "a"))
    assert "nothing to compare" in html
    Page(html)


# -----------------------------------------------------------------------------
# the sentences, whichever way the numbers point


@pytest.mark.parametrize(
    "excess, sentence",
    [
        (-0.5, r"RoVE beats RoPE at 4,096 bytes \(16 times the training context\): its perplexity"
               r" is 39\.\d % lower \[39\.\d, 39\.\d\] without"),
        (0.2, r"RoVE does worse than RoPE at 4,096 .* its perplexity is 22\.\d % higher \[2\d\.\d"),
        (1.5, r"RoVE does worse than RoPE .* its perplexity is 4.4\d times as high"),
        (0.0, r"it cannot be told whether RoVE beats RoPE at 4,096 .* no difference in perplexity"
              r" can be told \["),
    ],
)  # fmt: skip
def test_the_answer_follows_the_numbers(tmp_path, excess, sentence):
    rope = make_run(tmp_path / "rope")
    rove = make_run(tmp_path / "rove", "rove", excess={4096: excess})
    html, md = report(tmp_path / "out", rope, rove)
    answer = re.search(r'<p class="answer">(.*?)</p>', html)[1]
    assert re.search(sentence, answer), answer
    assert answer.startswith("For these checkpoints (one training seed), ")
    assert "at 256 bytes (the training context) no difference in perplexity can be told" in answer
    assert "significant" not in html + md
    # in the table the better one's colour, and none where nothing can be told
    line = re.search(r"<td>4,096</td><td>16×</td>.*?</tr>", html, re.DOTALL)[0]
    cell = re.search(r"<td([^>]*)>[^<]* <small>\[", line)[1]
    better = "" if excess == 0 else f' class="better {"rove" if excess < 0 else "rope"}"'
    assert cell == better


@pytest.mark.parametrize(
    "without, with_yarn, lead",
    [
        (0.2, -0.2, "whether RoVE beats RoPE {at} depends on YaRN"),
        # told and not told are not different from each other
        (-0.2, 0.0, "RoVE beats RoPE {at} without YaRN"),
        (0.0, -0.2, "RoVE beats RoPE {at} with YaRN fitted to each length"),
        (-0.2, -0.1, "RoVE beats RoPE {at}"),
        (0.2, 0.1, "RoVE does worse than RoPE {at}"),
    ],
)
def test_the_answer_speaks_of_yarn_too(tmp_path, without, with_yarn, lead):
    rope = make_run(tmp_path / "rope", yarn="auto")
    rove = make_run(tmp_path / "rove", "rove", yarn="auto", excess={4096: without},
                    excess_yarn={4096: with_yarn})  # fmt: skip
    answer = page_of(rope, rove)["answer"]
    lead = lead.format(at="at 4,096 bytes (16 times the training context)")
    assert f"(one training seed), {lead}: " in answer
    words = {0.2: r"2[12]\.\d % higher", 0.1: r"1[01]\.\d % higher", 0.0: "no difference",
             -0.1: r"(9|10)\.\d % lower", -0.2: r"18\.\d % lower"}  # fmt: skip
    parts = [f"{words[without]}.* without YaRN", f"{words[with_yarn]}.* with YaRN fitted to each length"]  # noqa: E501  # fmt: skip
    if without == 0:  # what is told comes first
        parts.reverse()
    if 0 in (without, with_yarn):  # the lead names its setting, and once is enough
        assert answer.count("without YaRN") == answer.count("with YaRN fitted") == 1
        parts[0] = parts[0].split(".* with")[0] + r" \[[\d., ]+\]"
    assert re.search(f"{parts[0]}, and .*{parts[1]};", answer), answer


def answer_of(html: str) -> str:
    return re.search(r'<p class="answer">(.*?)</p>', html)[1]


def page_of(*runs: Path) -> dict:
    """What the page shows, without figures: these take most of the time."""
    return make_page(read_report(runs), "title")


def test_unequal_seeds_are_said_and_their_losses_not_paired(tmp_path):
    rope = make_run(tmp_path / "rope", seed=1)
    roves = [make_run(tmp_path / f"rove{seed}", "rove", seed=seed) for seed in (1, 2, 3)]
    html, _ = report(tmp_path / "out", rope, roves[1])
    assert "their seeds differ (1 and 2)" in answer_of(html)
    assert html.count("<svg") == 5 and "no difference is drawn" in html  # not the difference
    assert [r["difference"] for r in read_csv(tmp_path / "out" / "comparisons.csv")
            if r["evaluation"] == "training"] == []  # fmt: skip
    # three seeds of one arm and one of the other are one seed per arm
    page = page_of(rope, *roves)
    assert "(one training seed)" in page["answer"] and "seeds differ" not in page["answer"]
    assert "in no difference: rove2, rove3." in page["notes"][0]


@pytest.mark.parametrize(
    "block_size, where",
    [(256, "16 times the training context"), (4096, "the training context"),
     (8192, "0.5 times the training context")],
)  # fmt: skip
def test_the_answer_says_where_the_longest_length_is(tmp_path, block_size, where):
    runs = [make_run(tmp_path / "rope"), make_run(tmp_path / "rove", "rove", excess={4096: -0.5})]
    for run in runs:
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(text.replace("= 256", f"= {block_size}"))
    assert f"RoVE beats RoPE at 4,096 bytes ({where}): its" in page_of(*runs)["answer"]


def test_few_documents_tell_nothing(tmp_path):
    rope = make_run(tmp_path / "rope", documents=5)
    rove = make_run(tmp_path / "rove", "rove", documents=5, excess={4096: -0.5})
    answer = page_of(rope, rove)["answer"]
    assert "5 documents are too few to tell whether RoVE beats RoPE at 4,096" in answer
    assert "does not beat" not in answer


def test_perplexity_and_change_in_the_table(tmp_path, capsys):
    rope = make_run(tmp_path / "rope")
    rove = make_run(tmp_path / "rove", "rove", excess={4096: math.log(0.5)})
    _, md = report(tmp_path / "out", rope, rove)
    a, b = (
        json.loads((p / "eval" / "perplexity.json").read_text())["results"][2]["ppl"]
        for p in (rope, rove)
    )
    line = next(x for x in capsys.readouterr().out.splitlines() if x.split()[:2] == ["none", "4,096"])  # noqa: E501  # fmt: skip
    assert line.split()[3:5] == [f"{a:.3f}", f"{b:.3f}"]
    assert line.split()[5:7] == [f"−{100 * (1 - b / a):.1f}", "%"]
    assert f"| none | 4,096 | 16× | {a:.3f} | {b:.3f} | −{100 * (1 - b / a):.1f} % \\[−5" in md


# -----------------------------------------------------------------------------
# seeds, evaluations, arms


EXCESS = {4096: [-0.50, -0.55, -0.45, -0.52, -0.48, -0.51], 256: [0.01, -0.02, 0.015, -0.01, 0.0, 0.02]}  # noqa: E501  # fmt: skip
RULER_GAIN = [1.0, 1.2, 0.9, 1.1, 1.05, 0.95]


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Path:
    """Six seeds of two arms with all evaluations; RoVE is better at 4,096 and in RULER."""
    folder = tmp_path_factory.mktemp("six")
    for i in range(6):
        rope = make_run(folder / f"rope{i}", seed=i, yarn="auto")
        excess = {length: values[i] for length, values in EXCESS.items()}
        rove = make_run(folder / f"rove{i}", "rove", seed=i, yarn="auto", excess=excess)
        add_ruler(rope, {"niah_single_1": 5 + 0.1 * i, "niah_multikey_2": 6, "vt": 4, "fwe": 3})
        gain = RULER_GAIN[i]
        add_ruler(rove, {"niah_single_1": 5 + 0.1 * i - gain, "niah_multikey_2": 6 - gain,
                         "vt": 4 - gain, "fwe": 3 - gain})  # fmt: skip
        add_core(rope, {"piqa": (12, 20, 50), "jeopardy": (3 + i % 2, 30, 0)})
        add_core(rove, {"piqa": (12 + i % 3, 20, 50), "jeopardy": (3, 30, 0)})
        add_hellaswag(rope, 10, 12 + i)
        add_hellaswag(rove, 10, 13 + 2 * i)
    runs = [folder / f"{arm}{i}" for i in range(6) for arm in ("rope", "rove")]
    report(folder / "out", *runs)
    return folder


def nll_of(run: Path) -> float:
    """Of the same last tokens at 4,096, without YaRN."""
    return json.loads((run / "eval" / "perplexity.json").read_text())["results"][2]["nll"]


def t_interval(values) -> tuple[float, float, float]:
    """By hand: the 97.5th percentile of Student's t with 5 degrees of freedom is 2.5706."""
    assert len(values) == 6
    half = 2.570582 * np.std(values, ddof=1) / math.sqrt(6)
    return np.mean(values), np.mean(values) - half, np.mean(values) + half


def test_comparisons_are_what_scipy_says(six):
    """Ratios of perplexities, NLL of categories and averages, CORE and HellaSwag over six seeds."""
    rows = {
        tuple(r[k] for k in ("evaluation", "quantity", "yarn", "length", "task")): r
        for r in read_csv(six / "out" / "comparisons.csv")
        if r["seed"] == "all"
    }
    nll = np.array([[nll_of(six / f"{arm}{i}") for arm in ("rope", "rove")] for i in range(6)])
    piqa = [((12 + i % 3) / 20 - 0.5) / 0.5 - (12 / 20 - 0.5) / 0.5 for i in range(6)]
    jeopardy = [(3 - (3 + i % 2)) / 30 for i in range(6)]
    expected = {
        ("perplexity", "last", "none", "4096", ""): nll[:, 1] - nll[:, 0],
        ("ruler", "nll", "auto", "1024", "vt"): [-g for g in RULER_GAIN],
        ("ruler", "category nll", "auto", "2048", "niah"): [-g for g in RULER_GAIN],
        ("ruler", "average nll", "auto", "", "all lengths"): [-g for g in RULER_GAIN],
        ("core", "CORE-2", "", "1024", ""): [(a + b) / 2 for a, b in zip(piqa, jeopardy, strict=True)],  # noqa: E501
        ("core", "CORE-2 centered", "", "1024", "piqa"): piqa,
        ("hellaswag", "acc_norm", "", "", ""): [(1 + i) / 40 for i in range(6)],
    }  # fmt: skip
    for key, differences in expected.items():
        row = rows[key]
        found = [float(row[k]) for k in ("difference", "low", "high")]
        assert found == pytest.approx(t_interval(differences), rel=1e-5, abs=1e-9), key
        p = scipy_stats.ttest_1samp(differences, 0).pvalue
        assert float(row["p"]) == pytest.approx(p, rel=1e-6) and row["n"] == "6"
    # equal accuracies have no spread: no interval, and nothing told
    row = rows["hellaswag", "acc", "", "", ""]
    assert (float(row["difference"]), row["low"], row["p"]) == (0.0, "", "1.0")


def test_every_number_is_in_the_csv(six):
    rows = read_csv(six / "out" / "numbers.csv")
    assert len({r["run"] for r in rows}) == 12 and {r["arm"] for r in rows} == {"RoPE", "RoVE"}

    def value(run: str, *key: str) -> float:
        names = ("evaluation", "quantity", "yarn", "length", "task")
        (row,) = (r for r in rows if r["run"] == run and tuple(r[k] for k in names) == key)
        return float(row["value"])

    record = json.loads((six / "rove3" / "eval" / "perplexity.json").read_text())
    for r in record["results"]:
        key = r["yarn"], str(r["length"]), ""
        assert value("rove3", "perplexity", f"{r['quantity']} ppl", *key) == r["ppl"]
        assert value("rove3", "perplexity", f"{r['quantity']} nll", *key) == r["nll"]
    assert value("rove3", "perplexity", "curve nll", "none", "4096", "64-4095") == 1.5
    assert value("rope2", "ruler", "nll", "auto", "1024", "niah_single_1") == 5.2
    assert value("rope2", "ruler", "prefix_only", "auto", "1024", "vt") == 5
    assert value("rope2", "ruler", "category nll", "auto", "1024", "niah") == pytest.approx(5.6)
    assert value("rope2", "ruler", "average nll", "auto", "1024", "") == pytest.approx(4.55)
    assert value("rope1", "core", "CORE-2 accuracy", "", "1024", "jeopardy") == 4 / 30
    assert value("rope1", "hellaswag", "acc_norm", "", "", "") == 13 / 40
    last = [json.loads(x) for x in (six / "rove5" / "metrics.jsonl").read_text().splitlines()][-1]
    assert value("rove5", "training", "validation loss", "", "", "") == last["val/loss"]
    curve = read_csv(six / "out" / "loss.csv")
    assert len(curve) == 12 * 56 and curve[1]["train_loss"] != ""


def test_page_and_claims_of_six_seeds(six):
    html = (six / "out" / "report.html").read_text().replace("\u00a0", " ")
    md = (six / "out" / "report.md").read_text()
    page = Page(html)
    # perplexity 2, loss 2, position 2, RULER 2 lengths, CORE
    assert page.tags.count("svg") == 9
    for name in ("ruler", "core"):
        assert (six / "out" / f"{name}.png").is_file() and f"({name}.png)" in md
    nll = np.mean([nll_of(six / f"rove{i}") for i in range(6)])
    rows = read_csv(six / "out" / "comparisons.csv")
    row = next(r for r in rows if r["seed"] == "all" and (r["quantity"], r["yarn"], r["length"]) == ("last", "none", "4096"))  # noqa: E501  # fmt: skip
    change = [100 * math.expm1(float(row[k])) for k in ("difference", "low", "high")]
    text = "−{:.0f} % [−{:.0f} %, −{:.0f} %]".format(*np.abs(change))
    assert "| none | 4,096 | 16× | 4" not in md
    assert f"{math.exp(nll):.3f} | {text}".replace("[", "\\[").replace("]", "\\]") in md
    assert text.replace("[", "<small>[") in html
    sentences = [s for s in re.findall(r"<li[^>]*>(.*?)</li>", html)]
    far = next(s for s in sentences if "4,096 bytes (16 times" in s and "without YaRN" in s)
    assert re.fullmatch(
        r"RoVE lowers perplexity at 4,096 bytes \(16 times the training context\) without YaRN by"
        r" 39\.?\d* % \[3\d\.?\d*, 4\d\.?\d*\], 6 seeds, p = .*\.", far
    )  # fmt: skip
    assert any(s.startswith("No difference in perplexity can be told at 256 bytes") for s in sentences)  # noqa: E501  # fmt: skip
    ruler = (
        r"RoVE lowers RULER NLL per answer token at 1,024 and 2,048 bytes with YaRN fitted to"
        r" each length by 1\.03 nats \[0\.92, 1\.15\], 6"
    )
    assert any(re.match(ruler, s) for s in sentences)
    assert any(s.startswith("No difference in CORE-2 can be told") for s in sentences)
    assert "6 claims were declared beforehand and are corrected together" in html
    claims = read_csv(six / "out" / "claims.csv")
    assert len(claims) == 6 and sum(c["told"] == "True" for c in claims) == 3
    answer = answer_of(html)
    assert answer.startswith("RoVE beats RoPE at 4,096 bytes (16 times the training context): its")
    assert answer.endswith("(6 seeds of each).") and "these checkpoints" not in answer
    # one average of four tasks; which of RULER's are missing
    assert "NIAH (2 of 8 tasks)" in html and "NIAH (2 of 8 tasks)" in md
    assert "over the 4 of RULER&#39;s 13 tasks" in html and "Without a task: CWE, QA." in html
    assert "CORE-2: 50 items" in html and "without copa" in html
    # the paper's layout, without the paper's numbers
    assert "In the layout of the paper" in html and ">paper<" not in html


def test_a_null_experiment_tells_nothing(tmp_path):
    """Equal arms but for noise: no claim, no colour, whatever the seeds' mean is."""
    runs = []
    for i, sign in enumerate((1, -1, 1, -1, 1, -1)):
        runs.append(make_run(tmp_path / f"a{i}", seed=i))
        noise = {length: 0.02 * sign for length in LENGTHS}
        runs.append(make_run(tmp_path / f"b{i}", "rove", seed=i, excess=noise))
        add_ruler(runs[-2], {"vt": 4.0})
        add_ruler(runs[-1], {"vt": 4.0 + 0.1 * sign})
    html, _ = report(tmp_path / "out", *runs)
    assert all(c["told"] == "False" for c in read_csv(tmp_path / "out" / "claims.csv"))
    assert answer_of(html).startswith("It cannot be told whether RoVE beats RoPE at 4,096")
    assert 'class="better' not in html.split("Loss by position")[0]
    assert "RoVE lowers" not in html and "RoVE raises" not in html


def test_worse_is_said_as_well(tmp_path):
    runs = []
    for i, loss in enumerate((0.30, 0.32, 0.29, 0.31)):
        runs.append(make_run(tmp_path / f"a{i}", seed=i))
        runs.append(make_run(tmp_path / f"b{i}", "rove", seed=i, excess={4096: loss, 256: 0.0}))
        add_core(runs[-2], {"piqa": (12, 20, 50), "copa": (10, 20, 50)}, "CORE")
        add_core(runs[-1], {"piqa": (2 + i % 2, 20, 50), "copa": (10, 20, 50)}, "CORE")
    html, md = report(tmp_path / "out", *runs)
    assert "RoVE raises perplexity at 4,096 bytes" in html and "RoVE lowers CORE by 0.4" in html
    assert answer_of(html).startswith("RoVE does worse than RoPE at 4,096 bytes")
    assert "widened so that all 4 hold at once" in md  # Bonferroni: fewer than six seeds
    # lower is better for a loss, higher for an accuracy: the baseline's colour in both
    assert 'class="better rope"' in html and 'class="better rove"' not in html


def test_three_arms_each_against_the_first(tmp_path):
    runs = []
    for seed in (1, 2):
        runs.append(make_run(tmp_path / f"rope-seed{seed}", seed=seed))
        runs.append(make_run(tmp_path / f"slow-seed{seed}", seed=seed, model="rope_base = 5e5",
                             excess={4096: -0.2 - 0.001 * seed}))  # fmt: skip
        runs.append(make_run(tmp_path / f"late-seed{seed}", "rove", seed=seed, derived_from="rope",
                             excess={4096: 0.7 + 0.001 * seed}))  # fmt: skip
    html, md = report(tmp_path / "out", *runs)
    Page(html)
    labels = ["RoPE", "RoPE, rope_base 500000", "RoPE evaluated as RoVE"]
    for label in labels[1:]:
        assert f"<h3>{label} against RoPE</h3>" in html and f"## {plain(label)} against RoPE" in md
    rows = read_csv(tmp_path / "out" / "comparisons.csv")
    assert {(r["arm"], r["baseline"]) for r in rows} == {(label, "RoPE") for label in labels[1:]}
    far = {r["arm"]: float(r["difference"]) for r in rows if r["seed"] == "all"
           and (r["quantity"], r["yarn"], r["length"]) == ("last", "none", "4096")}  # fmt: skip
    assert far[labels[1]] == pytest.approx(-0.2015, abs=0.01)
    assert far[labels[2]] == pytest.approx(0.7015, abs=0.01)
    # what was not trained is in no loss and has no cost; it is in the evaluations
    trained = {r["arm"] for r in read_csv(tmp_path / "out" / "loss.csv")}
    assert trained == set(labels[:2])
    losses = re.search(r"<h2>Loss</h2>.*?<h2>", html, re.DOTALL)[0]
    assert labels[1] in losses and labels[2] not in losses


def test_unfinished_evaluations_are_absent(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")
    html, md = report(tmp_path / "out", a, b)
    for heading in ("RULER", "CORE", "HellaSwag"):
        assert f"<h2>{heading}</h2>" not in html and f"## {heading}\n" not in md
    # of one arm alone: its numbers stand there, and there is no comparison
    add_ruler(b, {"vt": 2.0})
    html, _ = report(tmp_path / "out", a, b)
    assert "<h2>RULER</h2>" in html and "2.000" in html
    rows = read_csv(tmp_path / "out" / "comparisons.csv")
    assert not [r for r in rows if r["evaluation"] == "ruler"]


PAPER_MODEL = "n_layer = 24\nn_head = 16\nn_embd = 1024\n"


def paper_run(folder: Path, pos_emb: str, model: str = PAPER_MODEL, **options) -> Path:
    run = make_run(folder, pos_emb, model=model, **{"tokenizer": "gpt2", **options})
    text = (run / "config.toml").read_text().replace("block_size = 256", "block_size = 1024")
    (run / "config.toml").write_text(text)
    return run


def test_the_papers_numbers_stand_beside_its_models(tmp_path):
    runs = [paper_run(tmp_path / p, p, yarn="auto") for p in ("rope", "rove")]
    for run, niah in zip(runs, (6.0, 3.0), strict=True):
        nll = {t: niah if t.startswith("niah") else {"vt": 2.0, "cwe": 4.0}.get(t, 5.0) for t in TASKS}  # noqa: E501  # fmt: skip
        add_ruler(run, nll, lengths=(4096, 8192))
        add_core(run, {"piqa": (12, 20, 50), "copa": (11, 20, 50)}, "CORE")
    html, md = report(tmp_path / "out", *runs)
    Page(html)
    assert "The paper’s tables, and ours" in html and "arXiv 2606.11275 at 354M" in html
    assert "assumed" in html
    part = md.split("## The paper's tables")[1].split("## What differs")[0]
    cells = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    lines = {line[0]: line for line in cells}
    head = re.findall(r"\| ([^|]*), paper ", md)
    assert head == ["CORE", "PPL@512", "PPL@1024", "PPL@2048", "PPL@4096", "PPL@8192", "PPL@16384",
                    "CWE @4096", "NIAH @4096", "QA @4096", "VT @4096",
                    "average of the four @4096, 8192"]  # fmt: skip
    # RULER's line of RoVE with YaRN: paper, ours, paper, ours, ...; 3.5 = (4 + 3 + 5 + 2) / 4
    ours = ["4.00 (−0.39", "3.00 (−0.63", "5.00 (−0.61", "2.00 (−0.11", "3.50 (−0.83"]
    assert lines["RoVE + YaRN (auto)"][1::2] == ["4.39", "3.63", "5.61", "2.11", "4.33"]
    assert lines["RoVE + YaRN (auto)"][2::2] == [f"{cell} to paper)" for cell in ours]
    # what the paper's numbers themselves say: 311.38 / 840.10 - 1, and 15.52 / 15.64 - 1
    assert "−63 %" in md and "−0.77 %" in md and "+0.0192" in md
    # a length that was not evaluated keeps its place in the paper's layout
    assert PAPER["354M", "rope", False][16384] == 1630.72 and "1,630.72 | –" in md


def test_the_papers_numbers_are_copied_right():
    """Sums of the table lines of arXiv 2606.11275, added up apart from the code."""
    short, long, ruler = ("CORE", 512, 1024), (2048, 4096, 8192, 16384), ("cwe", "niah", "qa", "vt", "average")  # noqa: E501  # fmt: skip
    lines = [
        ("124M", "rope", False, short, 47.7375), ("124M", "rove", False, short, 47.4916),
        ("354M", "rope", False, short, 33.4864), ("354M", "rove", False, short, 33.2256),
        ("354M", "rope", False, long, 4176.82), ("354M", "rove", False, long, 1487.05),
        ("354M", "rope", True, long, 490.25), ("354M", "rove", True, long, 194.95),
        ("354M", "rope", True, ruler, 29.47), ("354M", "rove", True, ruler, 20.07),
    ]  # fmt: skip
    for *which, names, total in lines:
        assert sum(PAPER[tuple(which)][name] for name in names) == pytest.approx(total, abs=1e-6)
    assert sum(map(len, PAPER.values())) == 38  # and no other ones


@pytest.mark.parametrize(
    "options",
    [{"tokenizer": "bytes"}, {"model": "n_layer = 23\nn_head = 16\nn_embd = 1024\n"},
     {"model": PAPER_MODEL + "rope_base = 5e5"}],
)  # fmt: skip
def test_no_paper_beside_other_models(tmp_path, options):
    runs = [paper_run(tmp_path / p, p, **options) for p in ("rope", "rove")]
    html, md = report(tmp_path / "out", *runs)
    assert "In the layout of the paper" in html and ">paper<" not in html and ", paper" not in md
    assert "840.10" not in html + md


def test_learned_positions_as_the_baseline(tmp_path):
    """They have no numbers beyond the context, and the others have all of theirs."""
    runs = [paper_run(tmp_path / p, p) for p in ("learned", "rope", "rove")]
    html, md = report(tmp_path / "out", *runs)
    assert "The paper’s tables, and ours" in html and "arXiv 2606.11275 at 354M" in html
    assert "840.10" in md and "no numbers at this scale" not in html + md
    assert "has not been evaluated" not in answer_of(html)


def test_the_windows_that_stand_for_the_papers_are_named(tmp_path):
    runs = [paper_run(tmp_path / p, p) for p in ("rope", "rove")]
    assert "(disjoint windows, assumed)" in page_of(*runs)["paper"][0]["title"]
    for run in runs:
        path = run / "eval" / "perplexity.json"
        rows = json.loads(path.read_text())["results"]
        edit_json(path, results=[r for r in rows if r["quantity"] == "last"])
    page = page_of(*runs)
    assert "(same last tokens, assumed)" in page["paper"][0]["title"]
    assert any("here: same last tokens of" in line for line in page["open"])


# -----------------------------------------------------------------------------
# what is not there for all


def three_seeds(folder: Path, excess=(-0.2, -0.25, -0.22), **options) -> list[Path]:
    runs = []
    for i, nats in enumerate(excess):
        runs.append(make_run(folder / f"rope{i}", seed=i, yarn="auto", **options))
        runs.append(make_run(folder / f"rove{i}", "rove", seed=i, yarn="auto", **options,
                             excess={4096: nats}))  # fmt: skip
    return runs


def test_means_are_over_the_seeds_that_both_have(tmp_path):
    """RoVE's worst seed has no partner: it must not be in a mean beside the paired difference."""
    runs = three_seeds(tmp_path, (-0.2, -0.25, 3.0))
    (runs[4] / "eval" / "perplexity.json").unlink()
    page = page_of(*runs)
    values = {title: [float(v) for v in values] for title, values in page["cards"]}
    rope, rove = values["Perplexity at 4,096 (16×), YaRN none"]
    assert rove / rope == pytest.approx(math.exp(-0.225), rel=0.01)
    assert any(re.search("without perplexity, so in no difference .*: rope2", n) for n in page["notes"])  # noqa: E501  # fmt: skip
    report(tmp_path / "out", *runs)
    means = {(r["arm"], r["quantity"], r["yarn"], r["length"]): r
             for r in read_csv(tmp_path / "out" / "means.csv")}  # fmt: skip
    row = means["RoVE", "last", "none", "4096"]
    expected = np.mean([nll_of(runs[1]), nll_of(runs[3])])
    assert float(row["mean"]) == pytest.approx(expected, rel=1e-12) and row["seeds"] == "2"
    assert float(row["perplexity"]) == pytest.approx(math.exp(expected))


def test_seeds_of_one_evaluation_are_not_said_of_another(tmp_path):
    runs = three_seeds(tmp_path)
    for run in runs[2:]:  # YaRN was evaluated for the first seed alone
        path = run / "eval" / "perplexity.json"
        rows = json.loads(path.read_text())["results"]
        edit_json(path, results=[r for r in rows if r["yarn"] == "none"])
    answer = page_of(*runs)["answer"]
    assert answer.endswith("(3 seeds of each).") and "without YaRN" in answer
    assert "with YaRN" not in answer


def test_every_length_is_spoken_of(tmp_path):
    """Better at the longest length and worse before it: not hidden behind the headline."""
    runs = []
    for i, more in enumerate((0.0, 0.002, 0.004)):
        runs.append(make_run(tmp_path / f"rope{i}", seed=i))
        excess = {256: 0.1 * (i - 1), 1024: 0.3 + more, 4096: -0.2 + more}
        runs.append(make_run(tmp_path / f"rove{i}", "rove", seed=i, excess=excess))
    html, md = report(tmp_path / "out", *runs)
    words = "RoVE against RoPE, without YaRN: lower at 4,096; higher at 1,024; neither at 256."
    assert words in html and words in md and "not corrected for being one of many" in md
    assert "“No difference can be told” is not “there is none”" in md


def test_the_headline_keeps_the_reserve_of_its_claim(tmp_path):
    """Seeds agree, documents do not: others may say otherwise, also on top."""
    runs = three_seeds(tmp_path, (-0.08, -0.081, -0.079))
    for run in runs[1::2]:
        path = run / "eval" / "perplexity.json"
        record = json.loads(path.read_text())
        for r in record["results"]:
            if r["length"] == 4096:
                r["sums"] = [x + 128 * (-1) ** i for i, x in enumerate(r["sums"])]
        path.write_text(json.dumps(record))
    page = page_of(*runs)
    said = next(line for told, line in page["claims"][0][1] if "4,096" in line)
    reserve = re.search(r", on these documents; others may say otherwise \[[^]]*\]", said)[0]
    assert reserve in page["answer"]
    report(tmp_path / "out", *runs)
    row = next(r for r in read_csv(tmp_path / "out" / "claims.csv") if r["length"] == "4096")
    low, high = (float(row[f"with_other_documents_{end}"]) for end in ("low", "high"))
    assert low < 0 < high and low < float(row["low"]) < float(row["high"]) < 0


def test_ruler_averages_are_over_tasks_that_are_there_at_all_lengths(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")]
    for run in runs:
        add_ruler(run, {"vt": 4.0, "cwe": 6.0})
        path = run / "eval" / "ruler.json"
        record = json.loads(path.read_text())
        del record["results"][1]["tasks"]["cwe"]  # does not fit at the second length
        path.write_text(json.dumps(record))
    numbers = read_run(runs[0]).numbers
    assert [numbers[Key("ruler", "average nll", "auto", n)].value for n in (1024, 2048)] == [4, 4]
    assert numbers[Key("ruler", "nll", "auto", 1024, "cwe")].value == 6
    page = page_of(*runs)
    assert "over the 1 of RULER's 13 tasks" in page["ruler_notes"][0]


def test_a_report_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    runs = three_seeds(tmp_path)
    for run in runs:
        add_ruler(run, {"vt": 4.0, "cwe": 6.0})
    out = tmp_path / "out"
    report(out, *runs)
    (out / "mine.png").write_bytes(b"mine")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "ruler.png" in before
    monkeypatch.setattr("scripts.report.to_markdown", lambda page: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(Args(tuple(runs[:2]), out))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    monkeypatch.undo()
    for run in runs:
        (run / "eval" / "ruler.json").unlink()
    report(out, *runs)  # a figure that this one has not does not stay; what is not ours does
    assert not (out / "ruler.png").exists() and (out / "mine.png").read_bytes() == b"mine"
    with pytest.raises(UserError, match="mine.png: a file; name a folder"):
        main(Args(tuple(runs), out / "mine.png"))


# -----------------------------------------------------------------------------
# reading and pairing


def read(*paths: Path) -> list:
    return make_arms([read_run(path) for path in paths])


def compare(*paths: Path, key: Key | None = None):
    return effect(compare_arms(read(*paths))[0], key or Key("perplexity", "last", "none", 256))


def test_arms_labels_and_pairs_by_seed(tmp_path):
    arms = read(
        *(make_run(tmp_path / f"{p}{s}", p, seed=s) for s in (1, 2) for p in ("rope", "rove"))
    )
    assert [(arm.label, arm.seeds) for arm in arms] == [("RoPE", [1, 2]), ("RoVE", [1, 2])]
    (comparison,) = compare_arms(arms)
    assert [(a.path.name, b.path.name) for a, b in comparison.pairs] == [
        ("rope1", "rove1"),
        ("rope2", "rove2"),
    ]
    assert differing_keys(arms) == {"model.pos_emb": ["rope", "rove"]}  # equal seeds are no news
    # a run that repeats another one is an arm of its own
    arms = read(tmp_path / "rope1", make_run(tmp_path / "again", seed=1))
    assert [arm.label for arm in arms] == ["rope1", "again"]


def test_other_documents_are_refused(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove", documents=23)
    with pytest.raises(UserError, match="/a and .*/b: .*; evaluate both with the same"):
        compare(a, b)
    path = b / "eval" / "perplexity.json"
    record = json.loads((a / "eval" / "perplexity.json").read_text())
    record["segments"][3]["sha256"] = "other"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="same documents"):
        compare(a, b)
    record["segments"][3]["sha256"] = "3"
    path.write_text(json.dumps(record | {"dtype": "bfloat16"}))
    with pytest.raises(UserError, match="one was evaluated in float32, the other in bfloat16"):
        compare(a, b)


def test_other_items_are_refused(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")
    key = Key("ruler", "nll", "auto", 1024, "vt")
    for run in (a, b):
        add_ruler(run, {"vt": 4.0})
        add_core(run, {"piqa": (12, 20, 50)})
    assert compare(a, b, key=key).interval.value == 0
    record = json.loads((b / "eval" / "ruler.json").read_text())
    record["data"]["files"][0]["sha256"] = "other"
    edit_json(b / "eval" / "ruler.json", data=record["data"])
    with pytest.raises(UserError, match="/a and .*/b: ruler with other data; evaluate both"):
        compare(a, b, key=key)
    add_ruler(b, {"vt": 4.0})
    edit_json(b / "eval" / "ruler.json", settings={"limit": 5})
    with pytest.raises(UserError, match="ruler with other settings"):
        compare(a, b, key=key)
    edit_json(b / "eval" / "core.json", dtype="bfloat16")
    with pytest.raises(UserError, match="in float32, the other in bfloat16"):
        compare(a, b, key=Key("core", "CORE-2", "", 1024))
    edit_json(b / "eval" / "core.json", model_sha256="b" * 64)
    with pytest.raises(UserError, match=r"core.json: of other weights.*scripts.eval_core"):
        read_run(b)


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_an_evaluation_of_another_step_is_refused(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")
    edit_json(b / "eval" / "perplexity.json", step=60)
    with pytest.raises(UserError, match="one was evaluated at step 100, the other at 60"):
        compare(a, b)
    edit_json(b / "eval" / "perplexity.json", step=100, model_sha256="b" * 64)
    with pytest.raises(UserError, match="perplexity.json: of other weights.*evaluate again"):
        read_run(b)
    edit_json(b / "eval" / "perplexity.json", model_sha256="a" * 64,
              config={"model": {"pos_emb": "rope"}})  # fmt: skip
    with pytest.raises(UserError, match="of positions 'rope', not the run's"):
        read_run(b)


def test_runs_of_other_data_or_steps_are_refused(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")
    meta = b / "ckpt" / "step_00000100" / "meta.json"
    edit_json(meta, step=60)
    with pytest.raises(UserError, match="/a and .*/b: the one has done 100 steps, the other 60"):
        main(Args((a, b), tmp_path / "out"))
    edit_json(meta, step=100, data={"manifest_sha256": "e" * 64, "tokenizer": {"name": "bytes"}})
    with pytest.raises(UserError, match="/a and .*/b: trained on other data .manifests ffff"):
        main(Args((a, b), tmp_path / "out"))


def test_other_circumstances_are_listed(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")
    edit_json(b / "meta.json", git_revision="1234567890123", git_dirty=True, threads=8,
              world_size=4, device="cuda", versions={"torch": "2.12.0"})  # fmt: skip
    assert differing_keys(read(a, b)) == {
        "model.pos_emb": ["rope", "rove"], "torch version": ["2.13.0", "2.12.0"],
        "device": ["cpu: x86_64", "cuda"], "processes": ["1", "4"], "threads": ["2", "8"],
        "code revision": ["abcdef012345", "123456789012 and changes"],
    }  # fmt: skip


def test_difference_is_taken_where_step_and_tokens_agree(tmp_path):
    first, second = (
        arm.runs[0] for arm in read(make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove"))
    )
    first.metrics = [{"step": s, "tokens": 10 * s, "train/loss": float(s)} for s in (1, 2, 3, 4)]
    second.metrics = [{"step": s, "tokens": 10 * s, "train/loss": s + 0.5} for s in (2, 3, 5)]
    second.metrics[1]["tokens"] = 31
    steps, difference = paired_series(first, second, "train/loss")
    assert steps.tolist() == [2] and difference.tolist() == [0.5]


def test_smooth_is_a_centred_mean():
    values = np.arange(200.0) ** 2
    found = smooth(values)
    assert len(found) == 200
    assert found[100] == pytest.approx(np.mean([x**2 for x in range(96, 105)]))  # 200 // 50 = 4
    assert found[0] == pytest.approx(np.mean([x**2 for x in range(5)]))


def test_mean_of_seeds_is_taken_where_all_have_a_step():
    steps, mean = mean_series([
        (np.array([1, 2, 4]), np.array([1.0, 2.0, 4.0])),
        (np.array([2, 3, 4]), np.array([4.0, 9.0, 6.0])),
    ])  # fmt: skip
    assert steps.tolist() == [2, 4] and mean.tolist() == [3.0, 5.0]


def test_metrics_of_a_run_that_was_resumed_or_is_running(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "train/loss": 2.0}\n{"step": 1, "event": "resume"}\n{"step": 2, "tra'
    )
    assert read_metrics(path) == [{"step": 1, "train/loss": 2.0}]
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(UserError, match="metrics.jsonl:2"):
        read_metrics(path)


def change_results(**values):
    def change(path: Path) -> None:
        record = json.loads(path.read_text())
        record["results"][0] |= values
        path.write_text(json.dumps(record))

    return change


@pytest.mark.parametrize(
    "name, change",
    [
        ("eval/perplexity.json", lambda p: p.write_text("[]")),
        ("eval/perplexity.json", lambda p: p.write_text("3")),
        ("eval/perplexity.json", lambda p: p.write_text("{}")),
        ("eval/perplexity.json", lambda p: edit_json(p, protocol=None)),
        ("eval/perplexity.json", lambda p: edit_json(p, config={})),
        ("eval/perplexity.json", change_results(nll=1.0)),  # not what its sums say
        ("eval/perplexity.json", change_results(nll=float("nan"))),
        ("eval/perplexity.json", change_results(nll="1.4")),
        ("eval/perplexity.json", change_results(sums=[[1.0], [2.0, 3.0]])),
        ("eval/samples.json", lambda p: p.write_text('{"a": 1}')),
        ("meta.json", lambda p: p.write_text("[1]")),
        ("ckpt/step_00000100/meta.json", lambda p: p.write_text('{"step": 100}')),
        ("config.toml", lambda p: p.write_bytes(b"a = '\xff'")),
        ("config.toml", lambda p: p.write_text("[model]\npos_emb = 'rope'\n")),
        ("config.toml", lambda p: p.write_text("[model]\npos_emb = 'rope'\nblock_size = 'a'\n")),
        ("metrics.jsonl", lambda p: p.write_bytes(b"\xff\n")),
        ("metrics.jsonl", lambda p: p.write_text('{"step": 1, "val/loss": "low"}\n')),
    ],
)
def test_a_file_of_another_make_is_named(tmp_path, name, change):
    run = make_run(tmp_path / "a")
    change(run / name)
    with pytest.raises(UserError, match=re.escape(str(run / name))) as error:
        _ = read_run(run).numbers
    assert "\n" not in str(error.value)


def test_a_step_without_a_finite_loss_is_left_out(tmp_path):
    """train.py writes null for it."""
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")]
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "tokens": 101000, "train/loss": null}\n')
    html, _ = report(tmp_path / "out", *runs)
    Page(html)


def test_runs_without_a_checkpoint_are_refused(tmp_path):
    run = make_run(tmp_path / "a")
    (run / "ckpt" / "last").unlink()
    with pytest.raises(UserError, match="a: no ckpt/last, so nothing says which step, data"):
        read_run(run)


def test_two_files_with_one_number_are_refused(tmp_path):
    run = make_run(tmp_path / "a")
    add_core(run, {"piqa": (12, 20, 50)})
    (run / "eval" / "core_mine.json").write_text((run / "eval" / "core.json").read_text())
    with pytest.raises(UserError, match="core.json and .*core_mine.json: both have CORE-2"):
        _ = read_run(run).numbers


def test_other_protocols_contexts_and_losses_are_refused(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")
    record = json.loads((b / "eval" / "perplexity.json").read_text())
    edit_json(b / "eval" / "perplexity.json", protocol=record["protocol"] | {"bos": "none"})
    with pytest.raises(UserError, match="/a and .*/b: perplexity with other settings"):
        compare(a, b)
    lines = (b / "metrics.jsonl").read_text().splitlines(keepends=True)
    (b / "metrics.jsonl").write_text("".join(lines[:-2]))
    with pytest.raises(UserError, match="the one is at step 100 over .*, of the other at step 80"):
        compare(a, b, key=Key("training", "validation loss"))
    text = (b / "config.toml").read_text()
    (b / "config.toml").write_text(text.replace("block_size = 256", "block_size = 512"))
    with pytest.raises(UserError, match="contexts of 256 and 512 tokens"):
        page_of(a, b)


def test_items_that_cannot_be_paired_are_noted(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")]
    for run in runs:
        add_ruler(run, {"vt": 4.0})
    record = json.loads((runs[1] / "eval" / "ruler.json").read_text())
    record["samples"][0]["nll"] = None
    edit_json(runs[1] / "eval" / "ruler.json", samples=record["samples"])
    notes = page_of(*runs)["notes"]
    assert any("ruler has numbers that cannot be paired" in note for note in notes)


@pytest.mark.parametrize("name", ["config.toml", "eval/perplexity.json", "ckpt/step_00000100/meta.json"])  # noqa: E501  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, name):
    run = make_run(tmp_path / "a")
    (run / name).write_text("{")
    with pytest.raises(UserError, match=re.escape(name)):
        read_run(run)


def test_what_is_no_run_is_refused(tmp_path):
    run = make_run(tmp_path / "a")
    with pytest.raises(UserError, match="not a run folder"):
        main(Args((tmp_path,), tmp_path / "out"))
    with pytest.raises(UserError, match="twice"):
        main(Args((run, run), tmp_path / "out"))
    with pytest.raises(UserError, match="no runs"):
        main(Args((), tmp_path / "out"))
