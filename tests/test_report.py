"""scripts.report on made-up runs whose answer is known."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from nanorove.errors import UserError
from nanorove.figures import paired_series, smooth
from nanorove.results import differing_keys, name_runs, pair_up, read_metrics, read_run
from scripts.report import Args, clause, main, make_rows

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
) -> Path:
    """A run folder. `excess`: nats per token by which its NLL exceeds that of a fixed model."""
    excess = excess or {}
    (folder / "ckpt" / "step_00000100").mkdir(parents=True)
    (folder / "eval").mkdir()
    name = json.dumps(run_name or folder.name)
    (folder / "config.toml").write_text(
        f"run_name = {name}\nseed = {seed}\n[model]\npos_emb = '{pos_emb}'\nblock_size = 256\n"
        "yarn_factor = 1.0\n[data]\ndir = 'data/x'\n[train]\nmax_steps = 100\n"
    )
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(0, 101, 2):
        loss = 5.5 * math.exp(-step / 20) + 1.5 + rng.normal(0, 0.02) + excess.get(256, 0)
        record = {"step": step, "tokens": step * 1000, "train/loss": loss, "perf/step_ms": 80.0,
                  "perf/tokens_per_s": 12500.0, "mem/peak_gib": 0.5}  # fmt: skip
        lines.append(record if step else {"step": 0, "tokens": 0, "val/loss": 5.5})
        if step % 20 == 0 and step:
            lines.append({"step": step, "tokens": step * 1000, "val/loss": loss + 0.05})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "meta.json").write_text(
        json.dumps({"git_revision": "abcdef0123456789", "git_dirty": False, "params": 834304,
                    "versions": {"torch": "2.13.0"}, "threads": 2, "world_size": 1,
                    "device": "cpu: x86_64"})
    )  # fmt: skip
    (folder / "ckpt" / "last").write_text("step_00000100\n")
    (folder / "ckpt" / "step_00000100" / "meta.json").write_text(
        json.dumps(
            {
                "step": 100,
                "files": {"model.safetensors": {"sha256": "a" * 64}},
                "data": {"manifest_sha256": "f" * 64, "tokenizer": {"name": "bytes"}},
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
    }  # fmt: skip
    (folder / "eval" / "perplexity.json").write_text(json.dumps(record))
    return folder


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
    assert page.tags.count("svg") == 4  # two YaRN settings, loss, difference
    assert all(link.startswith("#") for link in page.links)  # parts of a figure, in the same file
    assert set(page.links) <= {f"#{i}" for i in page.ids}
    assert len(page.ids) == len(set(page.ids))  # ids are the page's: figures must not share them
    assert not re.search(r"https?:|@import|url\((?!#)|<link|<script|file:", html)
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(page.ids)
    assert 'name="viewport"' in html and "prefers-color-scheme: dark" in html
    for name in ("perplexity.png", "loss.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_figures_follow_the_theme(tmp_path):
    html, _ = report(tmp_path / "out", make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove"))
    svgs = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    for svg in svgs:
        assert not re.search(r"#[0-9a-f]{6}\b", svg)  # no colour that a dark page would not change
    style = html[: html.index("</style>")]
    used = set(re.findall(r"var\((--\w+)\)", html))
    assert used <= set(re.findall(r"(--\w+):", style)) and {"--rope", "--rove"} <= used


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
    assert "n/a" in md and "nan" not in html.lower().replace("nanorove", "")


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
        (-0.5, r"RoVE beats RoPE beyond the training context: at 4,096 bytes \(16 times the"
               r" training context\) its perplexity is 39 % lower \[39, 40\] without YaRN"),
        (0.2, r"RoVE does worse than RoPE beyond .* its perplexity is 22 % higher \[2\d, 2\d\]"),
        (1.5, r"RoVE does worse than RoPE .* its perplexity is 4.4\d times as high"),
        (0.0, r"RoVE does not beat RoPE beyond .* no difference in perplexity can be told \["),
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
    cell = re.search(r">4,096 .*?<td([^>]*)>[\d.]+ \[", html, re.DOTALL)[1]
    better = "" if excess == 0 else f' class="better {"rove" if excess < 0 else "rope"}"'
    assert cell == better


@pytest.mark.parametrize(
    "without, with_yarn, lead",
    [
        (0.2, -0.2, "whether RoVE beats RoPE beyond the training context depends on YaRN"),
        (-0.2, 0.0, "whether RoVE beats RoPE beyond the training context depends on YaRN"),
        (-0.2, -0.1, "RoVE beats RoPE beyond the training context"),
        (0.2, 0.1, "RoVE does worse than RoPE beyond the training context"),
    ],
)
def test_the_answer_speaks_of_yarn_too(tmp_path, without, with_yarn, lead):
    rope = make_run(tmp_path / "rope", yarn="auto")
    rove = make_run(tmp_path / "rove", "rove", yarn="auto", excess={4096: without},
                    excess_yarn={4096: with_yarn})  # fmt: skip
    html, _ = report(tmp_path / "out", rope, rove)
    answer = re.search(r'<p class="answer">(.*?)</p>', html)[1]
    assert f"(one training seed), {lead}: at 4,096 bytes" in answer
    words = {0.2: "22 % higher", 0.1: "1[01] % higher", 0.0: "no difference",
             -0.1: r"(9|10)(\.\d)? % lower", -0.2: "18 % lower"}  # fmt: skip
    assert re.search(
        f"{words[without]}.* without YaRN, .*{words[with_yarn]}.* with YaRN fitted to each length;",
        answer,
    ), answer


def test_the_answer_counts_the_other_seeds(tmp_path):
    runs = []
    for seed, excess in ((1, -0.5), (2, -0.5), (3, 0.3)):
        runs.append(make_run(tmp_path / f"rope{seed}", seed=seed))
        runs.append(make_run(tmp_path / f"rove{seed}", "rove", seed=seed, excess={4096: excess}))
    html, _ = report(tmp_path / "out", *runs)
    answer = answer_of(html)
    assert "RoVE, seed 1 beats RoPE, seed 1" in answer
    assert answer.endswith("1 of the 2 other seeds agree beyond the training context.")
    assert answer.startswith("For these checkpoints (3 training seeds")


def answer_of(html: str) -> str:
    return re.search(r'<p class="answer">(.*?)</p>', html)[1]


def test_unequal_seeds_are_said_and_their_losses_not_paired(tmp_path):
    rope = make_run(tmp_path / "rope", seed=1)
    roves = [make_run(tmp_path / f"rove{seed}", "rove", seed=seed) for seed in (1, 2, 3)]
    html, _ = report(tmp_path / "out", rope, roves[1])
    assert "their seeds differ (1 and 2)" in answer_of(html)
    assert html.count("<svg") == 3 and "no difference is drawn" in html  # not the difference
    # three seeds of one arm and one of the other are one seed per arm
    html, _ = report(tmp_path / "out", rope, *roves)
    assert "(one training seed)" in answer_of(html) and "seeds differ" not in answer_of(html)
    assert "other seeds agree" not in answer_of(html)


@pytest.mark.parametrize(
    "block_size, where",
    [(256, "beyond the training"), (4096, "at the training"), (8192, "below the training")],
)
def test_the_answer_says_where_the_longest_length_is(tmp_path, block_size, where):
    runs = [make_run(tmp_path / "rope"), make_run(tmp_path / "rove", "rove", excess={4096: -0.5})]
    for run in runs:
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(text.replace("= 256", f"= {block_size}"))
    html, _ = report(tmp_path / "out", *runs)
    assert f"RoVE beats RoPE {where} context: at 4,096 bytes" in answer_of(html)


def test_few_documents_tell_nothing(tmp_path):
    rope = make_run(tmp_path / "rope", documents=5)
    rove = make_run(tmp_path / "rove", "rove", documents=5, excess={4096: -0.5})
    answer = answer_of(report(tmp_path / "out", rope, rove)[0])
    assert "5 documents are too few to tell whether RoVE beats RoPE beyond" in answer
    assert "does not beat" not in answer


def test_ratio_and_perplexity_in_the_table(tmp_path, capsys):
    rope = make_run(tmp_path / "rope")
    rove = make_run(tmp_path / "rove", "rove", excess={4096: math.log(0.5)})
    _, md = report(tmp_path / "out", rope, rove)
    a, b = (
        json.loads((p / "eval" / "perplexity.json").read_text())["results"][2]["ppl"]
        for p in (rope, rove)
    )
    line = next(x for x in capsys.readouterr().out.splitlines() if x.split()[:2] == ["none", "4,096"])  # noqa: E501  # fmt: skip
    assert line.split()[2:4] == [f"{a:.3f}", f"{b:.3f}"]
    assert float(line.split()[4]) == pytest.approx(b / a, abs=6e-4)
    assert f"| none | 4,096 | {a:.3f} | {b:.3f} | {b / a:.3f} " in md


def test_clause_needs_interval_and_test():
    from nanorove.stats import Interval, Paired

    difference = Interval(-0.1, -0.15, -0.05)
    assert "9.5 % lower" in clause(Paired(difference, 0.01, 30), "its", "")
    assert "no difference" in clause(Paired(difference, 0.2, 4), "its", "")
    assert "no difference" in clause(Paired(Interval(-0.1, -0.2, 0.01), 0.01, 30), "its", "")


# -----------------------------------------------------------------------------
# reading and pairing


def read(*paths: Path) -> list:
    runs = [read_run(path) for path in paths]
    name_runs(runs)
    return runs


def test_labels_and_pairs_by_seed(tmp_path):
    runs = read(
        *(make_run(tmp_path / f"{p}{s}", p, seed=s) for s in (1, 2) for p in ("rope", "rove"))
    )
    assert [r.label for r in runs][:2] == ["RoPE, seed 1", "RoVE, seed 1"]
    pairs = pair_up(runs)
    assert [(a.path.name, b.path.name) for a, b in pairs] == [
        ("rope1", "rove1"),
        ("rope2", "rove2"),
    ]
    assert differing_keys(runs) == {
        "seed": [1, 1, 2, 2], "model.pos_emb": ["rope", "rove", "rope", "rove"],
    }  # fmt: skip


def test_other_documents_are_refused(tmp_path):
    runs = read(make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove", documents=23))
    with pytest.raises(UserError, match="evaluate both with the same"):
        make_rows(runs, pair_up(runs))
    path = tmp_path / "b" / "eval" / "perplexity.json"
    record = json.loads((tmp_path / "a" / "eval" / "perplexity.json").read_text())
    record["segments"][3]["sha256"] = "other"
    path.write_text(json.dumps(record))
    runs = read(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UserError, match="same documents"):
        make_rows(runs, pair_up(runs))
    record["segments"][3]["sha256"] = "3"
    path.write_text(json.dumps(record | {"dtype": "bfloat16"}))
    runs = read(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UserError, match="one was evaluated in float32, the other in bfloat16"):
        make_rows(runs, pair_up(runs))


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_an_evaluation_of_another_step_is_refused(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")
    edit_json(b / "eval" / "perplexity.json", step=60)
    runs = read(a, b)
    with pytest.raises(UserError, match="one was evaluated at step 100, the other at 60"):
        make_rows(runs, pair_up(runs))
    edit_json(b / "eval" / "perplexity.json", step=100, model_sha256="b" * 64)
    with pytest.raises(UserError, match="perplexity.json: of other weights.*evaluate again"):
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
        "device": ["cpu: x86_64", "cuda"], "processes": [1, 4], "threads": [2, 8],
        "code revision": ["abcdef012345", "123456789012 and changes"],
    }  # fmt: skip


def test_difference_is_taken_where_step_and_tokens_agree(tmp_path):
    first, second = read(make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove"))
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


def test_metrics_of_a_run_that_was_resumed_or_is_running(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "train/loss": 2.0}\n{"step": 1, "event": "resume"}\n{"step": 2, "tra'
    )
    assert read_metrics(path) == [{"step": 1, "train/loss": 2.0}]
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(UserError, match="metrics.jsonl:2"):
        read_metrics(path)


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
