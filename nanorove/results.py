"""What finished runs left behind, read and compared: the numbers that a report is made of.

`read_run` and `make_arms` read folders, `numbers` makes one long table of all that a run's result
files say, and `effect` compares two arms in one line of it, paired by seed.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanorove import stats
from nanorove.config import flatten
from nanorove.errors import UserError
from nanorove.files import read_json
from nanorove.ruler_metrics import CATEGORIES, MEASURES, TASKS

POS_EMB = {
    "rope": "RoPE",
    "rove": "RoVE",
    "rove_no_inverse": "RoVE without inverse",
    "learned": "Learned",
    "none": "No positions",
}
PAPER_CATEGORIES = ("cwe", "niah", "qa", "vt")  # of RULER, in the RoVE paper's table
EVALUATIONS = ("perplexity", "perplexity_packed", "ruler", "hellaswag")  # and eval/core*.json


@dataclass
class Run:
    """One run folder, read. `make_arms` sets arm and twin when all runs are known."""

    path: Path
    config: dict[str, Any]
    """config.toml as it stands: an old run need not fit today's dataclasses."""
    metrics: list[dict[str, Any]]
    meta: dict[str, Any]
    checkpoint: dict[str, Any]
    """meta.json of the last checkpoint."""
    evaluations: dict[str, dict[str, Any]]
    """The result files by name: perplexity, ruler, core, ..."""
    samples: list[dict[str, str]]

    @property
    def pos_emb(self) -> str:
        return self.config["model"]["pos_emb"]

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def name(self) -> str:
        return str(self.config.get("run_name", self.path.name))

    @property
    def context(self) -> int:
        """The length it was trained at, in tokens."""
        model = self.config["model"]
        return int(model["block_size"] * model.get("yarn_factor", 1))

    @property
    def tokenizer(self) -> str | None:
        return self.checkpoint.get("data", {}).get("tokenizer", {}).get("name")

    @property
    def unit(self) -> str:
        """What a token is."""
        return "byte" if self.tokenizer == "bytes" else "token"

    @property
    def derived_from(self) -> str | None:
        """The pos_emb that the weights were trained with, if this run is only an evaluation."""
        return self.meta.get("derived_from", {}).get("pos_emb")

    @property
    def settings(self) -> dict[str, Any]:
        """All but name and seed: runs with equal ones repeat each other."""
        flat = {k: v for k, v in flatten(self.config).items() if k not in ("run_name", "seed")}
        return flat | {"weights trained with": self.derived_from or self.pos_emb}

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
        """(steps, values) of a metric, both (n,); a step whose value was not finite is left out."""
        points = [(m["step"], m[key]) for m in self.metrics if m.get(key) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.array(steps, dtype=int), np.array(values, dtype=float)

    def last(self, key: str) -> Any:
        """The last value of a metric; None if there is none."""
        return self.last_line(key).get(key)

    def last_line(self, key: str) -> dict[str, Any]:
        """The last line of metrics.jsonl that has this metric; {} if none has."""
        return next((m for m in reversed(self.metrics) if m.get(key) is not None), {})

    @cached_property
    def numbers(self) -> "dict[Key, Number]":
        """Everything the run's files say, as one table."""
        found, origin = training_numbers(self), {}
        for name, record in self.evaluations.items():
            file = self.path / "eval" / f"{name}.json"
            try:
                numbers = READERS[record.get("evaluation", "perplexity")](name, record)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise UserError(
                    f"{file}: not what this version writes ({error!r}); evaluate again"
                ) from None
            for key in numbers:
                if key in origin:
                    raise UserError(
                        f"{origin[key]} and {file}: both have {key.quantity}; remove one of them"
                    )
            found |= numbers
            origin |= dict.fromkeys(numbers, file)
        return found


def read_run(path: Path) -> Run:
    """Read a run folder. Raises UserError if it is none or if a file in it cannot be read."""
    if not (path / "config.toml").is_file() or not (path / "metrics.jsonl").is_file():
        raise UserError(f"{path}: no config.toml and metrics.jsonl, so not a run folder")
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
        model = config["model"]
        if model["pos_emb"] not in POS_EMB:
            raise KeyError(model["pos_emb"])
        int(model["block_size"] * model.get("yarn_factor", 1))
    except (ValueError, KeyError, TypeError) as error:  # ValueError: not TOML, not UTF-8
        raise UserError(f"{path / 'config.toml'}: not a config of ours ({error!r})") from None
    pointer = path / "ckpt" / "last"
    if not pointer.is_file():
        raise UserError(
            f"{path}: no ckpt/last, so nothing says which step, data and weights its numbers are"
            " of; train until a checkpoint is saved, and keep the last one's meta.json"
        )
    step_dir = path / "ckpt" / pointer.read_text().strip()
    checkpoint = read_object(step_dir / "meta.json")
    try:
        weights = checkpoint["files"]["model.safetensors"]["sha256"]
        checkpoint["data"]["manifest_sha256"], checkpoint["step"] + 0
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{step_dir / 'meta.json'}: not of a checkpoint ({error!r}); resume the run"
        ) from None
    # a step folder's results lie there too, and are not the run's
    cores = sorted(p.stem for p in (path / "eval").glob("core*.json") if "_step_" not in p.stem)
    evaluations = {}
    for name in (*EVALUATIONS, *cores):
        file = path / "eval" / f"{name}.json"
        if not file.is_file():
            continue
        record = read_object(file)
        if record.get("model_sha256") != weights:
            script = f"eval_{record.get('evaluation', 'perplexity')}"
            raise UserError(
                f"{file}: of other weights than the run's last step ({step_dir.name}) has;"
                f" evaluate again: python -m scripts.{script} {path}"
            )
        used = record.get("config", config).get("model", {}).get("pos_emb")
        if used != config["model"]["pos_emb"]:
            raise UserError(f"{file}: of positions {used!r}, not the run's; evaluate again")
        evaluations[name] = record
    return Run(
        path=path,
        config=config,
        metrics=read_metrics(path / "metrics.jsonl"),
        meta=read_object(path / "meta.json"),
        checkpoint=checkpoint,
        evaluations=evaluations,
        samples=read_samples(path / "eval" / "samples.json"),
    )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file is not there. Raises UserError for anything else."""
    found = read_json(path)
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{path}: {str(found)[:40]!r} where an object should be; make it again")
    return found or {}


def read_samples(path: Path) -> list[dict[str, str]]:
    """What scripts.sample wrote: [{"prompt", "text"}], nothing if the file is not there."""
    found = read_json(path) or []
    try:
        return [{"prompt": s["prompt"] + "", "text": s["text"] + ""} for s in found]
    except (KeyError, TypeError):
        raise UserError(f"{path}: not samples; make them again (scripts.sample)") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, but for those that only say that the run was resumed."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    records = []
    # what follows the last newline is a line that is still being written
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            record = json.loads(line)
            record["step"] + 0
            if "event" not in record:
                check_metrics(record)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}:{number}: not a line of metrics; remove it") from None
        if "event" not in record:
            records.append(record)
    return records


def check_metrics(values: Mapping[str, Any]) -> None:
    """Raise TypeError unless all are numbers, null (one that was not finite) or groups of such."""
    for value in values.values():
        if isinstance(value, dict):
            check_metrics(value)
        elif value is not None:
            value + 0


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise UserError, naming both, for two runs of other data, of unequal numbers of steps, or of
    other training contexts: what is said of lengths is said of them by that one."""
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
        if first.context != run.context:
            raise UserError(
                f"{first.path} and {run.path}: trained at contexts of {first.context:,} and"
                f" {run.context:,} tokens; compare runs of one context"
            )


# -----------------------------------------------------------------------------
# arms


@dataclass
class Arm:
    """Runs that differ in the seed alone."""

    runs: list[Run]
    label: str = ""
    twin: int = 0
    """How many of the arms before this one have the same pos_emb."""

    @property
    def pos_emb(self) -> str:
        return self.runs[0].pos_emb

    @property
    def name(self) -> str:
        """The run's, without the seed that an experiment puts behind it."""
        return re.sub(r"-seed\d+$", "", self.runs[0].name)

    @property
    def seeds(self) -> list[int | None]:
        return [run.seed for run in self.runs]

    def having(self, key: "Key") -> list[Run]:
        """The runs that have a number."""
        return [r for r in self.runs if key in r.numbers and r.numbers[key].value is not None]

    def values(self, key: "Key") -> list[float]:
        """(seeds,) of a number, of those runs that have it."""
        return [run.numbers[key].value for run in self.having(key)]


@dataclass(frozen=True)
class Comparison:
    """The second arm against the first, which is the baseline."""

    first: Arm
    second: Arm
    pairs: list[tuple[Run, Run]]
    """Of equal seeds; if there are none, the first run of each, whose seeds then differ."""

    @property
    def same_seeds(self) -> bool:
        return all(a.seed == b.seed for a, b in self.pairs)


def make_arms(runs: Sequence[Run]) -> list[Arm]:
    """Group runs into arms, in the order in which they come, and give each a short label.

    A run with the settings and the seed of another one repeats it, and makes an arm of its own.
    """
    arms: list[Arm] = []
    for run in runs:
        fitting = (
            a for a in arms if a.runs[0].settings == run.settings and run.seed not in a.seeds
        )
        arm = next(fitting, None)
        if arm is None:
            arm = Arm([], twin=sum(a.pos_emb == run.pos_emb for a in arms))
            arms.append(arm)
        arm.runs.append(run)
    for arm in arms:
        arm.label = _label(arm, arms)
    if len({arm.label for arm in arms}) < len(arms):
        for arm in arms:
            arm.label = arm.name
    if len({arm.label for arm in arms}) < len(arms):
        for arm in arms:
            arm.label = str(arm.runs[0].path)
    return arms


def _label(arm: Arm, arms: Sequence[Arm]) -> str:
    """ "RoVE"; of a later arm of the same kind, "RoVE, rope_base 500000"."""
    run = arm.runs[0]
    word = POS_EMB[run.pos_emb]
    if run.derived_from:
        return f"{POS_EMB[run.derived_from]} evaluated as {word}"
    earlier = next(a for a in arms if a.pos_emb == run.pos_emb and not a.runs[0].derived_from)
    other = earlier.runs[0].settings
    changed = [
        f"{key.split('.')[-1]} {f'{value:g}' if isinstance(value, float) else value}"
        for key, value in run.settings.items()
        if other.get(key) != value
    ]
    return ", ".join([word, *changed]) if len(changed) <= 2 else arm.name


def compare_arms(arms: Sequence[Arm]) -> list[Comparison]:
    """Every arm against the first."""
    first, *others = arms
    by_seed = {run.seed: run for run in first.runs}
    found = []
    for arm in others:
        pairs = [(by_seed[run.seed], run) for run in arm.runs if run.seed in by_seed]
        found.append(Comparison(first, arm, pairs or [(first.runs[0], arm.runs[0])]))
    return found


def averaged(arm: Arm, arms: Sequence[Arm], key: "Key") -> list[Run]:
    """Whose mean stands for an arm: the seeds that all arms have which have this number at all, so
    that means of two arms differ as their paired difference says; every run if there are none."""
    runs = arm.having(key)
    seeds = [{run.seed for run in a.having(key)} for a in arms if a.having(key)]
    return [run for run in runs if all(run.seed in found for found in seeds)] or runs


def differing_keys(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """{"model.pos_emb": ["rope", "rove"]}: per arm the values of its runs, for the settings and
    circumstances in which arms differ, or runs of an arm; not the name, and not the seed if all
    arms have the same ones."""
    flats = [
        [run.settings | run.circumstances | {"seed": run.seed} for run in arm.runs] for arm in arms
    ]
    keys = dict.fromkeys(key for arm in flats for flat in arm for key in flat)
    table = {}
    for key in keys:
        cells = [list(dict.fromkeys(str(flat.get(key)) for flat in arm)) for arm in flats]
        same_seeds = key == "seed" and len({tuple(cell) for cell in cells}) == 1
        if len({value for cell in cells for value in cell}) > 1 and not same_seeds:
            table[key] = [", ".join(cell) for cell in cells]
    if not any(arm.runs[0].derived_from for arm in arms):
        table.pop("weights trained with", None)
    return table


# -----------------------------------------------------------------------------
# numbers


class Key(NamedTuple):
    """What a number is, the same for all runs."""

    evaluation: str
    """perplexity, perplexity_packed, ruler, core, hellaswag, training."""
    quantity: str
    yarn: str = ""
    length: int | None = None
    task: str = ""
    """Of RULER and CORE; of losses by position the bin."""


@dataclass(frozen=True)
class Number:
    """A value and what it was taken over."""

    value: float | None
    n: int | None = None
    """Tokens, samples or items."""
    reason: str = ""
    """Why there is no value."""
    sums: np.ndarray | None = None
    """Of documents: (D,) summed NLL, with `counts` (D,)."""
    counts: np.ndarray | None = None
    items: Mapping[str, np.ndarray] | None = None
    """Of a benchmark: per task (n,) values, with `weights` (None: one task)."""
    weights: Mapping[str, float] | None = None
    basis: dict[str, Any] = field(default_factory=dict)
    """What must be the same for two numbers to be compared; `names` of the documents or items."""


def training_numbers(run: Run) -> dict[Key, Number]:
    """What metrics.jsonl says at its end."""
    found = {}
    tokens = run.config.get("train", {}).get("val_tokens")
    line = run.last_line("val/loss")
    basis = {"step": line.get("step"), "tokens": tokens}
    if line:
        found[Key("training", "validation loss")] = Number(line["val/loss"], tokens, basis=basis)
    context = run.context
    for place, loss in (run.last("val/loss_by_position") or {}).items():
        first, _, end = place.partition("-")
        share = (int(end or first) - int(first) + 1) / context
        key = Key("training", "validation loss by position", "", None, place)
        found[key] = Number(loss, round(tokens * share) if tokens else None, basis=basis)
    for quantity, key, reduce in (
        ("tokens per second", "perf/tokens_per_s", np.median),
        ("milliseconds per step", "perf/step_ms", np.median),
        ("peak memory, GiB", "mem/peak_gib", np.max),
    ):
        values = run.series(key)[1]
        if len(values):
            found[Key("training", quantity)] = Number(float(reduce(values)), len(values))
    return found


def _basis(record: dict[str, Any], **more: Any) -> dict[str, Any]:
    """modded-nanogpt#133: another dtype is another model."""
    return {"dtype": record["dtype"], "step": record["step"], **more}


def perplexity_numbers(name: str, record: dict[str, Any]) -> dict[Key, Number]:
    """Nats per token by quantity, YaRN setting and length, and by position."""
    found = {}
    documents = [s["sha256"] for s in record["segments"]]
    basis = _basis(record, documents=documents, settings=dict(record["protocol"]))
    for r in record["results"]:
        key = Key(name, r["quantity"], r["yarn"], r["length"])
        if r["nll"] is None:
            found[key] = Number(None, reason=r["reason"])
            continue
        sums, counts = np.array(r["sums"], float), np.array(r["counts"])
        if not abs(r["nll"] - sums.sum() / counts.sum()) < 1e-6 * max(1, r["nll"]) < 1e-3:
            raise ValueError(f"nll {r['nll']} at {r['length']} is not sums / counts")
        found[key] = Number(r["nll"], r["tokens"], sums=sums, counts=counts, basis=basis)
        if r.get("bits_per_byte") is not None:
            key = key._replace(quantity=f"{r['quantity']} bits per byte")
            found[key] = Number(r["bits_per_byte"], r["tokens"])
    for r in record.get("curve", ()):
        if r["nll"] is None:
            continue
        sums, D = np.array(r["sums"]), len(r["sums"])
        edges = zip(r["edges"], r["edges"][1:], strict=False)
        for b, ((low, high), nll, n) in enumerate(zip(edges, r["nll"], r["counts"], strict=True)):
            key = Key(name, "curve", r["yarn"], r["length"], f"{max(low, 1)}-{high - 1}")
            counts = np.full(D, n)
            found[key] = Number(nll, D * n, sums=sums[:, b], counts=counts, basis=basis)
    return found


def ruler_numbers(name: str, record: dict[str, Any]) -> dict[Key, Number]:
    """Nats per answer token by task, by category, on average at each length and over all lengths,
    which is the mean of the lengths'; and RULER's other measures by task."""
    found: dict[Key, Number] = {}
    samples: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for s in record["samples"]:
        samples.setdefault((s["yarn"], s["length"], s["task"]), []).append(s)
    data = {(f["length"], f["task"]): f["sha256"] for f in record["data"]["files"]}
    lengths = {r["length"] for r in record["results"]}
    averages: dict[tuple[str, str], list[Number]] = {}
    everywhere: dict[
        str, set[str]
    ] = {}  # tasks that a setting has at all lengths: what is averaged
    for r in record["results"]:
        there = {task for task, row in r.get("tasks", {}).items() if row["nll"] is not None}
        if "tasks" in r:
            everywhere[r["yarn"]] = everywhere.get(r["yarn"], there) & there
    for r in record["results"]:
        yarn, length = r["yarn"], r["length"]
        if "tasks" not in r:
            found[Key(name, "average nll", yarn, length)] = Number(None, reason=r["reason"])
            continue
        tasks: dict[str, Number] = {}
        for task, row in r["tasks"].items():
            for measure in MEASURES:
                if row.get(measure) is not None:
                    key = Key(name, measure, yarn, length, task)
                    found[key] = Number(row[measure], row["scored"])
            if row["nll"] is None:
                continue
            scored = [s for s in samples[yarn, length, task] if s["nll"] is not None]
            what = f"{length} {task}"
            tasks[task] = Number(
                row["nll"],
                len(scored),
                items={what: np.array([s["nll"] / s["tokens"] for s in scored])},
                basis=_basis(
                    record,
                    data={what: data[length, task]},
                    settings={"limit": record["settings"]["limit"]},
                    items={what: [str(s["index"]) for s in scored]},
                ),
            )
            found[Key(name, "nll", yarn, length, task)] = tasks[task]
        tasks = {task: number for task, number in tasks.items() if task in everywhere[yarn]}
        groups = {c: [tasks[t] for t in members if t in tasks] for c, members in CATEGORIES.items()}
        categories = {c: mean_number(parts) for c, parts in groups.items() if parts}
        for category, number in categories.items():
            found[Key(name, "category nll", yarn, length, category)] = number
        if categories:
            number = mean_number([tasks[task] for task in TASKS if task in tasks])
            found[Key(name, "average nll", yarn, length)] = number
            averages.setdefault(("average nll", yarn), []).append(number)
        if all(len(groups[c]) == len(CATEGORIES[c]) for c in PAPER_CATEGORIES):
            number = mean_number([categories[c] for c in PAPER_CATEGORIES])
            averages.setdefault(("four categories nll", yarn), []).append(number)
    for (quantity, yarn), parts in averages.items():
        if len(parts) == len(lengths):
            found[Key(name, quantity, yarn, task="all lengths")] = mean_number(parts)
    return found


def mean_number(parts: Sequence[Number]) -> Number:
    """Of numbers over items: each part counts the same, however many tasks and items it has."""
    items = {task: values for part in parts for task, values in part.items.items()}
    weights = {
        task: weight / len(parts)
        for part in parts
        for task, weight in (part.weights or dict.fromkeys(part.items, 1.0)).items()
    }
    basis = dict(parts[0].basis)
    for what in ("data", "items"):
        basis[what] = {task: v for part in parts for task, v in part.basis[what].items()}
    value = float(np.mean([part.value for part in parts]))
    return Number(value, sum(part.n for part in parts), items=items, weights=weights, basis=basis)


def core_numbers(name: str, record: dict[str, Any]) -> dict[Key, Number]:
    """CORE (or what the result calls itself) with baselines v1 and v2, and its tasks."""
    found, result, tasks = {}, record["results"], record["tasks"]
    length = record["settings"]["max_length"]
    yarn = record["settings"]["yarn_factor"]
    yarn = "" if yarn is None else f"{yarn:g}"
    items = {t["task"]: np.array(t["per_item"]["correct"], dtype=float) for t in tasks}
    lines = {t["task"]: [str(line) for line in t["per_item"]["line"]] for t in tasks}
    files = {t["task"]: t["file_sha256"] for t in tasks}
    for version in ("v1", "v2"):
        baselines = {t["task"]: t["baseline_percent"][version] / 100 for t in tasks}
        quantity = result["name"] if version == "v1" else f"{result['name']} (baselines v2)"
        found[Key("core", quantity, yarn, length)] = Number(
            result[version],
            record["counts"]["items"],
            items=items,
            weights=stats.core_weights(baselines),
            basis=_basis(record, data=files, items=lines, settings=record["settings"]),
        )
    for t in tasks:
        task, n = t["task"], t["items"]
        basis = _basis(record, data=files[task], items={task: lines[task]})
        basis["settings"] = record["settings"] | {"tasks": None}
        weights = stats.core_weights({task: t["baseline_percent"]["v1"] / 100})
        for quantity, value, weight in (
            ("centered", t["centered"]["v1"], weights),
            ("accuracy", t["accuracy"], {task: 1.0}),
        ):
            key = Key("core", f"{result['name']} {quantity}", yarn, length, task)
            found[key] = Number(value, n, items={task: items[task]}, weights=weight, basis=basis)
    return found


def hellaswag_numbers(name: str, record: dict[str, Any]) -> dict[Key, Number]:
    """acc and acc_norm."""
    found = {}
    rows, settings = record["items"], record["settings"]
    basis = _basis(record, data=record["data"]["sha256"], settings=settings)
    basis["items"] = {name: [str(row["index"]) for row in rows]}
    for quantity, choice in (("acc", "choice"), ("acc_norm", "choice_norm")):
        right = np.array([row[choice] == row["label"] for row in rows], dtype=float)
        number = Number(record[quantity], len(rows), items={name: right}, basis=basis)
        found[Key(name, quantity)] = number
    return found


READERS = {
    "perplexity": perplexity_numbers,
    "ruler": ruler_numbers,
    "core": core_numbers,
    "hellaswag": hellaswag_numbers,
}


# -----------------------------------------------------------------------------
# two arms


@dataclass(frozen=True)
class Effect:
    """Second minus first: in nats, or in the points of a benchmark."""

    per_seed: tuple[stats.Paired | float, ...]
    seeds: tuple[int | None, ...]
    interval: stats.Interval
    """95 %: over seeds; of one seed over documents or items. Not corrected for being one of many:
    `stats.judge` does that for what is claimed."""
    told: bool
    """Does the interval exclude zero? Of one seed the sign-flip test must say so, too."""


def effect(comparison: Comparison, key: Key) -> Effect | None:
    """What the second arm changes in one number; None if no pair of runs has it.

    Raises UserError if two runs were evaluated on different documents or items, or differently.
    """
    found = []
    for first, second in comparison.pairs:
        paired = compare_runs(first, second, key)
        if paired is not None:
            found.append((second.seed, paired))
    if not found:
        return None
    seeds, per_seed = zip(*found, strict=True)
    values = [p.difference.value if isinstance(p, stats.Paired) else p for p in per_seed]
    if len(values) > 1:
        interval = stats.seed_interval(values)
        return Effect(per_seed, seeds, interval, interval.excludes_zero)
    if isinstance(per_seed[0], stats.Paired):
        return Effect(per_seed, seeds, per_seed[0].difference, per_seed[0].told)
    return Effect(per_seed, seeds, stats.Interval(values[0], -np.inf, np.inf), False)


def compare_runs(first: Run, second: Run, key: Key) -> stats.Paired | float | None:
    """Second minus first; None where one of the two has no value, or nothing can be paired."""
    a, b = first.numbers.get(key), second.numbers.get(key)
    if a is None or b is None or a.value is None or b.value is None:
        return None
    if key.evaluation == "training":  # seconds of two trainings are not paired
        if not key.quantity.startswith("validation") or first.seed != second.seed:
            return None
        if a.basis != b.basis:
            x, y = ("at step {step} over {tokens} tokens".format(**n.basis) for n in (a, b))
            raise UserError(
                f"{first.path} and {second.path}: the last validation loss of the one is {x}, of"
                f" the other {y}; train both alike"
            )
        return b.value - a.value
    try:
        for what in ("dtype", "step"):
            x, y = a.basis.get(what), b.basis.get(what)
            if x != y:
                at, of = ("at step", "at") if what == "step" else ("in", "in")
                raise ValueError(f"one was evaluated {at} {x}, the other {of} {y}")
        for what in ("data", "settings"):
            if a.basis.get(what) != b.basis.get(what):
                raise ValueError(f"{key.evaluation} with other {what}")
        if a.sums is not None:
            if not np.array_equal(a.counts, b.counts):
                raise ValueError("different numbers of tokens were scored")
            names = {"first_documents": a.basis["documents"]}
            names["second_documents"] = b.basis["documents"]
            return stats.paired_difference(a.sums, b.sums, a.counts, **names)
        if a.items is None:
            return None
        # of the same data a model may be unable to take a sample, which then has no partner; and
        # one item has no spread
        single = any(len(values) < 2 for values in a.items.values())
        if single or a.basis["items"] != b.basis["items"]:
            return None
        names = {"first_items": a.basis["items"], "second_items": b.basis["items"]}
        return stats.paired_items(a.items, b.items, weights=a.weights, **names)
    except ValueError as error:
        raise UserError(
            f"{first.path} and {second.path}: {error}; evaluate both with the same data, options"
            " and --dtype, at the same step"
        ) from None


def yarn_words(yarn: str) -> str:
    """A YaRN setting in words."""
    words = {"none": "without YaRN", "auto": "with YaRN fitted to each length"}
    return words.get(yarn, f"with YaRN at factor {yarn}")
