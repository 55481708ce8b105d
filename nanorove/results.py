"""What finished runs left behind, read and compared: the numbers that a report is made of."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nanorove import stats
from nanorove.config import flatten
from nanorove.errors import UserError

POS_EMB = {"rope": "RoPE", "rove": "RoVE", "learned": "Learned", "none": "No positions"}


@dataclass
class Run:
    """One run folder, read. `name_runs` gives the labels when all runs are known."""

    path: Path
    config: dict[str, Any]
    """config.toml as it stands: an old run need not fit today's dataclasses."""
    metrics: list[dict[str, Any]]
    meta: dict[str, Any]
    checkpoint: dict[str, Any]
    """meta.json of the last checkpoint."""
    perplexity: dict[str, Any] | None
    samples: list[dict[str, str]]
    label: str = ""
    twin: int = 0
    """How many of the runs before this one have the same pos_emb."""

    @property
    def pos_emb(self) -> str:
        return self.config["model"]["pos_emb"]

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def context(self) -> int:
        """The length it was trained at, in tokens."""
        model = self.config["model"]
        return int(model["block_size"] * model.get("yarn_factor", 1))

    @property
    def unit(self) -> str:
        """What a token is."""
        tokenizer = self.checkpoint.get("data", {}).get("tokenizer", {}).get("name")
        return "byte" if tokenizer == "bytes" else "token"

    @property
    def arm(self) -> dict[str, Any]:
        """The settings but for the seed: runs of one arm repeat each other."""
        return {k: v for k, v in flatten(self.config).items() if k not in ("run_name", "seed")}

    @property
    def revision(self) -> str:
        """Of the code that trained it."""
        dirty = " and changes" if self.meta.get("git_dirty") else ""
        return str(self.meta.get("git_revision") or "–")[:12] + dirty

    @property
    def circumstances(self) -> dict[str, Any]:
        """What no config says, and numbers depend on all the same."""
        return {
            "torch version": self.meta.get("versions", {}).get("torch"),
            "device": self.meta.get("device"),
            "processes": self.meta.get("world_size"),
            "threads": self.meta.get("threads"),
            "code revision": self.revision,
        }

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of a metric, both (n,)."""
        points = [(m["step"], m[key]) for m in self.metrics if key in m]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.array(steps, dtype=int), np.array(values, dtype=float)

    @cached_property
    def entries(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        """Perplexity results by (quantity, yarn, length)."""
        results = self.perplexity["results"] if self.perplexity else []
        return {(r["quantity"], r["yarn"], r["length"]): r for r in results}


Pair = tuple[Run, Run]  # (first, second): the second is compared with the first


def read_run(path: Path) -> Run:
    """Read a run folder. Raises UserError if it is none or if a file in it cannot be read."""
    if not (path / "config.toml").is_file() or not (path / "metrics.jsonl").is_file():
        raise UserError(f"{path}: no config.toml and metrics.jsonl, so not a run folder")
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
        if config["model"]["pos_emb"] not in POS_EMB:
            raise KeyError(config["model"]["pos_emb"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path / 'config.toml'}: not a config of ours ({error!r})") from None
    pointer = path / "ckpt" / "last"
    step_dir = path / "ckpt" / pointer.read_text().strip() if pointer.is_file() else path / "ckpt"
    checkpoint = read_json(step_dir / "meta.json") or {}
    perplexity = read_json(path / "eval" / "perplexity.json")
    weights = checkpoint.get("files", {}).get("model.safetensors", {}).get("sha256")
    if perplexity and weights and perplexity.get("model_sha256") != weights:
        raise UserError(
            f"{path / 'eval' / 'perplexity.json'}: of other weights than the run's last step"
            f" ({step_dir.name}) has; evaluate again: python -m scripts.eval_perplexity {path}"
        )
    return Run(
        path=path,
        config=config,
        metrics=read_metrics(path / "metrics.jsonl"),
        meta=read_json(path / "meta.json") or {},
        checkpoint=checkpoint,
        perplexity=perplexity,
        samples=read_json(path / "eval" / "samples.json") or [],
    )


def read_json(path: Path) -> Any:
    """The content of a JSON file, None if there is no such file; UserError if it is damaged."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); delete it and make it again") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, but for those that only say that the run was resumed."""
    text = path.read_text(encoding="utf-8")
    records = []
    # what follows the last newline is a line that is still being written
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            record = json.loads(line)
            record["step"] + 0
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}:{number}: not a line of metrics; remove it") from None
        if "event" not in record:
            records.append(record)
    return records


def differing_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """{"model.pos_emb": ["rope", "rove"]}: the settings and circumstances in which runs differ, but
    for the name."""
    flats = [flatten(run.config) | run.circumstances for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat if key != "run_name")
    rows = {key: [flat.get(key) for flat in flats] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise UserError, naming both, for two runs of other data or of unequal numbers of steps."""
    first = runs[0]
    for run in runs[1:]:
        data = [r.checkpoint.get("data", {}).get("manifest_sha256") for r in (first, run)]
        if data[0] != data[1]:
            a, b = (str(sha256)[:12] for sha256 in data)
            raise UserError(
                f"{first.path} and {run.path}: trained on other data (manifests {a} and {b});"
                " train both on the same"
            )
        steps = [r.checkpoint.get("step") for r in (first, run)]
        if steps[0] != steps[1]:
            raise UserError(
                f"{first.path} and {run.path}: the one has done {steps[0]} steps, the other"
                f" {steps[1]}; go on with the shorter one (--resume) first"
            )


def name_runs(runs: Sequence[Run]) -> None:
    """Give each run the shortest label that no other of them has."""
    labels = [
        lambda run: POS_EMB[run.pos_emb],
        lambda run: f"{POS_EMB[run.pos_emb]}, seed {run.seed}",
        lambda run: str(run.config.get("run_name", run.path.name)),
        lambda run: str(run.path),
    ]
    label = next((f for f in labels if len({f(r) for r in runs}) == len(runs)), labels[-1])
    for i, run in enumerate(runs):
        run.label = label(run)
        run.twin = sum(other.pos_emb == run.pos_emb for other in runs[:i])


def pair_up(runs: Sequence[Run]) -> list[Pair]:
    """(first, second) for every comparison: each run with the baseline's run of the same seed.

    The baseline is the first run and those that differ from it in the seed alone. Where none has
    the seed it is the first run, and only what does not depend on the seed can be paired.
    """
    baseline = [run for run in runs if run.arm == runs[0].arm]
    others = [run for run in runs if run.arm != runs[0].arm] or baseline[1:]
    same_seed = {run.seed: run for run in reversed(baseline) if run not in others}
    return [(same_seed.get(run.seed, runs[0]), run) for run in others]


# -----------------------------------------------------------------------------
# the comparison


@dataclass(frozen=True)
class Row:
    """One line of the table: a YaRN setting and a length, with all runs and all pairs."""

    quantity: str
    yarn: str
    length: int
    entries: list[dict[str, Any] | None]
    """Per run its result; None where that was not evaluated."""
    paired: list[stats.Paired | None]
    """Per pair second minus first, in nats; None where one of the two has no number."""


def make_rows(runs: Sequence[Run], pairs: Sequence[Pair]) -> list[Row]:
    """The table, in the order in which the evaluation was asked for.

    Raises UserError if runs were evaluated on different documents or tokens.
    """
    keys = dict.fromkeys(key for run in runs for key in run.entries)
    return [
        Row(*key, [r.entries.get(key) for r in runs], [_compare(a, b, key) for a, b in pairs])
        for key in keys
    ]


def _compare(first: Run, second: Run, key: tuple[str, str, int]) -> stats.Paired | None:
    a, b = first.entries.get(key), second.entries.get(key)
    if not a or not b or a["nll"] is None or b["nll"] is None:
        return None
    try:
        dtypes = first.perplexity["dtype"], second.perplexity["dtype"]
        if dtypes[0] != dtypes[1]:  # modded-nanogpt#133
            raise ValueError(f"one was evaluated in {dtypes[0]}, the other in {dtypes[1]}")
        steps = first.perplexity["step"], second.perplexity["step"]
        if steps[0] != steps[1]:
            raise ValueError(f"one was evaluated at step {steps[0]}, the other at {steps[1]}")
        if a["counts"] != b["counts"]:
            raise ValueError("different numbers of tokens were scored")
        return stats.paired_difference(
            a["sums"],
            b["sums"],
            a["counts"],
            first_documents=[s["sha256"] for s in first.perplexity["segments"]],
            second_documents=[s["sha256"] for s in second.perplexity["segments"]],
        )
    except ValueError as error:
        raise UserError(
            f"{first.path} and {second.path}: {error}; evaluate both with the same --lengths,"
            " --documents, --data and --dtype, at the same step"
        ) from None


def yarn_words(yarn: str) -> str:
    """A YaRN setting in words."""
    words = {"none": "without YaRN", "auto": "with YaRN fitted to each length"}
    return words.get(yarn, f"with YaRN at factor {yarn}")
