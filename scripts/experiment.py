"""Run what is missing of an experiment: data, trainings, evaluations, report.

    python -m scripts.experiment experiments/demo.toml [--dry-run]

Every step is the command that a user would type; it is printed, and it can be typed. What is there
already is checked and skipped, so an experiment that was stopped or killed goes on where it was.
docs/experiments.md says what is checked, and what makes results unusable.
"""

import dataclasses
import datetime
import difflib
import hashlib
import json
import os
import re
import shlex
import shutil
import tomllib
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import tyro

from data import ruler as ruler_data
from data.shards import MANIFEST, load_manifest
from model import GPTConfig
from nanorove import core_tasks, hellaswag, perf
from nanorove.config import Config, config_differences, flatten, load_config
from nanorove.errors import UserError, run_cli
from nanorove.files import read_json, sha256_file
from nanorove.guards import StopSignal
from nanorove.results import read_metrics
from scripts import eval_core, provenance
from scripts.eval_perplexity import parse_lengths, parse_quantities, parse_yarn
from scripts.jobs import Job, Slots, make_slots, only_one, run_jobs, visible_gpus

T = TypeVar("T")

# what arms must share even if the file lets them differ: they would not be comparable
SHARED = ("train.total_batch_size", "train.max_steps", "train.val_tokens")
# arms that differ in one of these cannot start from equal weights
OTHER_WEIGHTS = ("model.n_layer", "model.n_head", "model.n_embd", "init_from")
# the least that the evaluations' numbers may be
LEAST = {"documents": 2, "limit": 1, "max_length": 2, "samples": 1, "max_new_tokens": 1}


@dataclass(frozen=True)
class Data:
    dir: str
    """Where the shards are; the arms' configs must name the same folder."""
    command: list[str]
    """Makes them, as `python -m <command>`."""


@dataclass(frozen=True)
class Arm:
    """A training; or, with `from`, the weights of another arm evaluated with other positions."""

    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    """As on train.py's command line: ["--train.max_steps", "100"]."""
    from_: str | None = None
    pos_emb: str | None = None


@dataclass(frozen=True)
class Perplexity:
    lengths: list[int]
    yarn: list[str]
    documents: int | None = None
    """The first N that are long enough; without it all of them."""
    quantities: list[str] | None = None


@dataclass(frozen=True)
class Core:
    bundle: str | None = None
    tasks: list[str] | None = None
    limit: int | None = None
    max_length: int | None = None
    yarn_factor: float | None = None


@dataclass(frozen=True)
class Ruler:
    data: str
    """Folder of the prompts; made if they are not there."""
    tokenizer: str
    lengths: list[int]
    samples: int
    yarn: list[str]
    tasks: list[str] | None = None
    """Without it all that fit."""
    squad: str | None = None
    hotpot: str | None = None


@dataclass(frozen=True)
class Hellaswag:
    data: str | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Samples:
    prompts: list[str]
    max_new_tokens: int


@dataclass(frozen=True)
class Experiment:
    name: str
    """Its runs are runs/<name>/<arm>-seed<seed>, its report is runs/<name>/report.html."""
    title: str
    seeds: list[int]
    data: Data
    arms: dict[str, Arm]
    """The first one is the baseline."""
    arms_differ_in: list[str] = field(default_factory=lambda: ["model.pos_emb"])
    """The config keys in which arms may differ; any other difference is refused."""
    slots: int = 1
    """How many trainings or evaluations at a time; they share GPUs or CPU cores evenly."""
    # an evaluation without a section is not made
    perplexity: Perplexity | None = None
    packed: Perplexity | None = None
    """Perplexity on all validation documents one behind the other."""
    core: Core | None = None
    ruler: Ruler | None = None
    hellaswag: Hellaswag | None = None
    samples: Samples | None = None

    @property
    def dir(self) -> Path:
        return Path("runs") / self.name


@dataclass(frozen=True)
class Args:
    """Run what is missing of an experiment and make its report."""

    experiment: tyro.conf.Positional[Path]
    """A file like experiments/demo.toml."""
    dry_run: bool = False
    """Print commands, disk and hours, and do nothing. Needs neither data nor GPU."""
    slots: int | None = None
    """So many jobs at a time, instead of what the file says."""
    gpus: int | None = None
    """With --dry-run: plan for so many GPUs instead of those of this machine."""
    gpu: Literal["a100", "h100", "h200"] = "h100"
    """With --dry-run: of which kind (the 80 GB A100)."""


Configs = dict[tuple[str, int], Config]  # by (arm, seed)


def main(args: Args) -> None:
    """Raises UserError for a faulty file, arms that differ in too much, and a step that fails."""
    experiment = load_experiment(args.experiment)
    configs = {
        (arm, seed): arm_config(experiment, arm, seed)
        for seed in experiment.seeds
        for arm in experiment.arms
    }
    print(compare_arms(experiment, configs))
    check_models(experiment, configs)
    if args.gpus is not None and not args.dry_run:
        raise UserError("--gpus is for --dry-run; CUDA_VISIBLE_DEVICES says which ones are used")
    gpus = visible_gpus() if args.gpus is None else [str(i) for i in range(args.gpus)]
    slots = make_slots(experiment.slots if args.slots is None else args.slots, gpus)
    for config in configs.values():
        perf.grad_accum_steps(config, slots.processes)  # now, and not after the data
    print(slots)
    plan = Plan(experiment, configs, slots, provenance.Ledger(experiment.dir / "experiment.json"))
    if args.dry_run:
        plan.show(args.gpu)
        return
    with only_one(experiment.dir) as lock:
        stop = StopSignal()
        try:
            plan.run(lock, stop)
        finally:
            stop.restore()


# -----------------------------------------------------------------------------
# the file


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file. Raises UserError for what is unknown, missing or of a wrong type."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; see experiments/ for those there are") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    experiment = read_table(Experiment, values, str(path), "")
    try:
        check_experiment(experiment)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return experiment


def check_experiment(experiment: Experiment) -> None:
    """Raise UserError for what would fail only after hours of training."""
    if not experiment.arms or not experiment.seeds:
        raise UserError("at least one arm and one seed are needed")
    if len(set(experiment.seeds)) < len(experiment.seeds):
        raise UserError(f"seeds {experiment.seeds}: each once")
    for key in experiment.arms_differ_in:
        if key in SHARED:
            raise UserError(f"arms_differ_in: {key} must be the same in all arms")
    for name, arm in experiment.arms.items():
        if (arm.config is None) == (arm.from_ is None):
            raise UserError(f"arms.{name}: needs config, or from and pos_emb")
        if arm.from_ is not None:
            check_derived(experiment, name, arm)
        elif arm.pos_emb is not None:
            raise UserError(f"arms.{name}: pos_emb stands in its config; it goes with from")
        for option in arm.overrides:
            if option.split("=")[0].replace("-", "_") in ("__seed", "__run_name", "__resume"):
                raise UserError(f"arms.{name}: {option} is the experiment's to set")
    for name in (*experiment.name.split("/"), *experiment.arms):
        if not re.fullmatch(r"[\w.=+-]+", name) or name in (".", ".."):
            raise UserError(f"{name!r} names a folder: letters, digits and ._=+- only")
    for name in ("perplexity", "packed", "core", "ruler", "hellaswag", "samples"):
        if section := getattr(experiment, name):
            try:
                check_section(section)
            except UserError as error:
                raise UserError(f"{name}: {error}") from None


def check_section(section: Perplexity | Core | Ruler | Hellaswag | Samples) -> None:
    """Raise UserError for a value that the script behind a section would refuse."""
    values = vars(section)
    lists = {k: ",".join(map(str, v)) for k, v in values.items() if isinstance(v, list)}
    for key, least in LEAST.items():
        if values.get(key) is not None and values[key] < least:
            raise UserError(f"{key} {values[key]}: at least {least}")
    given = ["data"] if isinstance(section, Hellaswag) else ["bundle", "squad", "hotpot"]
    for key in given:
        if values.get(key) is not None and not Path(values[key]).exists():
            raise UserError(f"{key} {values[key]}: not there")
    if isinstance(section, Perplexity | Ruler):
        parse_lengths(lists["lengths"])
        parse_yarn(lists["yarn"])
    if isinstance(section, Perplexity) and "quantities" in lists:
        parse_quantities(lists["quantities"])
    if isinstance(section, Ruler):
        ruler_data.parse_lengths(lists["lengths"])
        ruler_data.parse_tasks(lists.get("tasks", "all"), qa_depth=False)
    if isinstance(section, Core):
        if (section.max_length or 0) > eval_core.LONGEST:
            raise UserError(f"max_length {section.max_length}: at most {eval_core.LONGEST:,}")
        known = [task.label for task in core_tasks.TASKS]
        if section.tasks is not None and not set(section.tasks or [""]) <= set(known):
            raise UserError(f"tasks {lists['tasks']}: choose of {', '.join(known)}")
        if section.bundle is not None:
            bundle = eval_core.open_bundle(Path(section.bundle))
            eval_core.choose(bundle, eval_core.check_tables(bundle), lists.get("tasks"))
    if isinstance(section, Samples):
        if not section.prompts:
            raise UserError("prompts: at least one")
        for prompt in section.prompts:
            if prompt.startswith("-"):  # the command line would take it for an option
                raise UserError(f"a prompt cannot begin with '-': {prompt!r}")


def check_derived(experiment: Experiment, name: str, arm: Arm) -> None:
    """Raise UserError unless the arm that is only evaluated can be made of the one it names."""
    source = experiment.arms.get(arm.from_)
    if source is None or source.config is None:
        raise UserError(f"arms.{name}: from {arm.from_!r} is not an arm that is trained")
    if arm.overrides:
        raise UserError(f"arms.{name}: it is not trained, so it has no overrides")
    modes = typing.get_args(typing.get_type_hints(GPTConfig)["pos_emb"])
    if arm.pos_emb not in modes or arm.pos_emb == "learned":
        fitting = ", ".join(m for m in modes if m != "learned")
        raise UserError(f"arms.{name}: pos_emb {arm.pos_emb!r} must be one of {fitting}")
    if name == next(iter(experiment.arms)):
        raise UserError(f"arms.{name}: the first arm is the baseline and must be trained")


def read_table(kind: type[T], table: Any, path: str, prefix: str) -> T:
    """A TOML table -> the dataclass `kind`, nested ones and dicts of them included.

    A field whose name Python keeps for itself has a _ behind it, which the file has not.
    """
    if not isinstance(table, dict):
        raise UserError(f"{path}: {prefix.rstrip('.')} must be a table, not {table!r}")
    fields = {f.name.rstrip("_"): f for f in dataclasses.fields(kind)}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0)[0]
            raise UserError(f"{path}: unknown key {prefix}{key}; did you mean {prefix}{near}?")
    values = {}
    hints = typing.get_type_hints(kind)
    for name, spec in fields.items():
        where, hint = prefix + name, hints[spec.name]
        if typing.get_origin(hint) is types.UnionType:  # X | None: TOML has no null
            hint = typing.get_args(hint)[0]
        if name not in table:
            if spec.default is spec.default_factory is dataclasses.MISSING:
                raise UserError(f"{path}: {where} is missing")
        elif dataclasses.is_dataclass(hint):
            values[spec.name] = read_table(hint, table[name], path, f"{where}.")
        elif typing.get_origin(hint) is dict and isinstance(table[name], dict):
            item = typing.get_args(hint)[1]
            values[spec.name] = {
                k: read_table(item, v, path, f"{where}.{k}.") for k, v in table[name].items()
            }
        elif not fits(table[name], hint):
            raise UserError(f"{path}: {where} must be {hint_words(hint)}, not {table[name]!r}")
        else:
            values[spec.name] = table[name]
    return kind(**values)


def fits(value: Any, hint: Any) -> bool:
    """Is a TOML value of the annotated type? (True is no int here, and an int is a float.)"""
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(fits(x, typing.get_args(hint)[0]) for x in value)
    return type(value) is hint or (hint is float and type(value) is int)


def hint_words(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


# -----------------------------------------------------------------------------
# the arms


def train_arguments(experiment: Experiment, arm: str, seed: int) -> list[str]:
    """What train.py gets, but for --resume."""
    spec = experiment.arms[arm]
    run_name = f"{experiment.name}/{arm}-seed{seed}"
    return [spec.config, *spec.overrides, "--seed", str(seed), "--run_name", run_name]


def arm_config(experiment: Experiment, arm: str, seed: int) -> Config:
    """The config that this run will have, exactly as train.py reads it."""
    spec = experiment.arms[arm]
    if spec.from_ is not None:
        source = arm_config(experiment, spec.from_, seed)
        if source.model.pos_emb == "learned":
            raise UserError(f"arm {arm}: {spec.from_} has learned positions, which are weights")
        try:
            return dataclasses.replace(
                source,
                run_name=f"{experiment.name}/{arm}-seed{seed}",
                model=dataclasses.replace(source.model, pos_emb=spec.pos_emb),
            )
        except ValueError as error:
            raise UserError(f"arm {arm}: {error}") from None
    config, _ = load_config(train_arguments(experiment, arm, seed))
    if Path(config.data.dir) != Path(experiment.data.dir):
        raise UserError(
            f"arm {arm}: its data.dir is {config.data.dir}, the experiment's is"
            f" {experiment.data.dir}; they must be the same"
        )
    return config


def compare_arms(experiment: Experiment, configs: Configs) -> str:
    """Say in which keys the arms differ; raises UserError for one that the file does not name."""
    baseline, *others = experiment.arms
    seed = experiment.seeds[0]
    found: dict[str, None] = {}
    keys = flatten(dataclasses.asdict(configs[baseline, seed]))
    for key in experiment.arms_differ_in:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1, cutoff=0)[0]
            raise UserError(f"arms_differ_in: no key {key}; did you mean {near}?")
    for arm in others:
        differences = config_differences(configs[baseline, seed], configs[arm, seed])
        for key, (before, now) in differences.items():
            if key == "run_name":
                continue
            if key not in experiment.arms_differ_in:
                raise UserError(
                    f"arms {baseline} and {arm} differ in {key} ({before} and {now}), which"
                    " arms_differ_in does not name; make them equal or add it there"
                )
            found[key] = None
    if not others:
        return f"one arm: {baseline}"
    return f"arms differ only in {', '.join(found)}" if found else "arms do not differ"


def check_models(experiment: Experiment, configs: Configs) -> None:
    """Raise UserError for an evaluation that a model or its tokenizer cannot take."""
    core, ruler, samples = experiment.core, experiment.ruler, experiment.samples
    reach = {}
    if core:
        reach["core.max_length"] = core.max_length or core_tasks.MAX_LENGTH
    if samples:
        reach["samples.max_new_tokens"] = 1 + samples.max_new_tokens  # behind one at least
    for (arm, _), config in configs.items():
        model = config.model
        for key, length in reach.items():
            if model.pos_emb == "learned" and length > model.block_size:
                raise UserError(
                    f"{key}: {length} positions, but those of arm {arm} are learned and end at"
                    f" {model.block_size}"
                )
        try:
            if core and core.yarn_factor is not None:
                dataclasses.replace(model, yarn_factor=core.yarn_factor)
        except ValueError as error:
            raise UserError(f"core: arm {arm}: {error}") from None
    used = tokenizer_of(experiment.data)
    if ruler and used not in (None, ruler.tokenizer):
        raise UserError(f"ruler.tokenizer {ruler.tokenizer}: the data are made with {used}")


def tokenizer_of(data: Data) -> str | None:
    """Which one the command names, else that of the data; None if neither says."""
    asked = [b for a, b in zip(data.command, data.command[1:], strict=False) if a == "--tokenizer"]
    if asked:
        return asked[-1]
    there = (Path(data.dir) / MANIFEST).is_file()
    return load_manifest(Path(data.dir))["tokenizer"]["name"] if there else None


def is_prepared(data: Data) -> bool:
    """Are there shards, made with the tokenizer that the command asks for?"""
    folder = Path(data.dir)
    if not (folder / MANIFEST).is_file():
        return False
    return load_manifest(folder)["tokenizer"]["name"] == tokenizer_of(data)


def ruler_files(ruler: Ruler) -> dict[str, str] | None:
    """{"length task": sha256} of the prompts asked for; None if some are not there.

    What is there and was made with other settings is for data.ruler to refuse.
    """
    manifest = read_json(Path(ruler.data) / MANIFEST)
    if manifest is None or manifest.get("tokenizer", {}).get("name") != ruler.tokenizer:
        return None
    there = {(f["length"], f["task"]): f["sha256"] for f in manifest["files"]}
    skipped = {} if ruler.tasks else dict(manifest["skipped"])  # by name each must be there
    for task, file in (("qa_1", ruler.squad), ("qa_2", ruler.hotpot)):
        if file and " needs --" in skipped.get(task, ""):  # it had no file then
            del skipped[task]
    for length in ruler.lengths:
        for task in ruler.tasks or ruler_data.TASKS:
            if (length, task) not in there and task not in skipped:
                return None
    if manifest["samples"] != ruler.samples:
        return None
    return {
        f"{length} {task}": sha256
        for (length, task), sha256 in sorted(there.items())
        if length in ruler.lengths and (not ruler.tasks or task in ruler.tasks)
    }


# -----------------------------------------------------------------------------
# what was done


@dataclass(frozen=True)
class Step:
    """A job and what is known about it already."""

    job: Job
    done: bool
    why: str = ""
    """Why it has to be made again, if there is a result."""


class Plan:
    """The steps of an experiment, as far as what is there tells."""

    def __init__(
        self, experiment: Experiment, configs: Configs, slots: Slots, ledger: provenance.Ledger
    ) -> None:
        self.experiment, self.slots, self.ledger = experiment, slots, ledger
        self.runs = {f"{arm}-seed{seed}": c for (arm, seed), c in configs.items()}
        self.sources: dict[str, Config] = {}  # of the runs that are made of others
        self.by_seed: dict[int, list[str]] = {seed: [] for seed in experiment.seeds}
        for arm, seed in configs:
            source = experiment.arms[arm].from_
            if source is None:
                self.by_seed[seed].append(f"{arm}-seed{seed}")
            else:
                self.sources[f"{arm}-seed{seed}"] = configs[source, seed]
        self.trained = {n: c for n, c in self.runs.items() if n not in self.sources}

    @property
    def data_sha256(self) -> str | None:
        """Of the manifest; None if there are no data yet."""
        return provenance.sha256_of(Path(self.experiment.data.dir) / MANIFEST)

    # the steps

    def data(self) -> list[Step]:
        data, ruler = self.experiment.data, self.experiment.ruler
        steps = [Step(Job("data", ["-m", *data.command]), is_prepared(data))]
        if ruler:
            options = {"tokenizer": ruler.tokenizer, "lengths": ruler.lengths,
                       "samples": ruler.samples, "tasks": ruler.tasks, "squad": ruler.squad,
                       "hotpot": ruler.hotpot, "out": ruler.data}  # fmt: skip
            arguments = ["-m", "data.ruler", *command_line(options)]
            steps.append(Step(Job("RULER data", arguments), ruler_files(ruler) is not None))
        return steps

    def trainings(self) -> list[Step]:
        data_sha256, steps = self.data_sha256, []
        for name, config in self.trained.items():
            train = os.path.relpath(provenance.ROOT / "train.py")
            arm, _, seed = name.rpartition("-seed")
            arguments = [train, *train_arguments(self.experiment, arm, int(seed)), "--resume"]
            job = Job(
                f"{name} training", arguments, torchrun=True,
                prepare=lambda name=name: self.sign_training(name),
                finish=lambda _, config=config: self.check_trained(config),
            )  # fmt: skip
            steps.append(Step(job, provenance.is_trained(config, data_sha256)))
        return steps

    def evaluations(self) -> list[Step]:
        steps = []
        for name, config in self.runs.items():
            for evaluation, arguments, inputs in self.evaluations_of(config):
                output = config.run_dir / "eval" / f"{evaluation}.json"
                torchrun = evaluation != "samples"
                inputs = inputs | provenance.identity(config)
                steps.append(self.once(f"{name} {evaluation}", arguments, output, inputs, torchrun))
        return steps

    def evaluations_of(self, config: Config) -> Iterable[tuple[str, list[str], dict[str, Any]]]:
        """(name of the result, arguments, inputs besides the run) of a run's evaluations."""
        e, run = self.experiment, str(config.run_dir)
        data = {"data": self.data_sha256}
        for name, what in (("perplexity", e.perplexity), ("perplexity_packed", e.packed)):
            if what:
                text = {"text": None if what is e.perplexity else "packed_stream"}
                options = command_line(text | dataclasses.asdict(what))
                yield name, ["-m", "scripts.eval_perplexity", run, *options], data
        if e.core:
            out = {"out": config.run_dir / "eval" / "core.json"}  # whatever the settings
            arguments = ["-m", "scripts.eval_core", run, *command_line(vars(e.core) | out)]
            # what is not there yet is downloaded, and is then what its hash says
            sha256 = provenance.sha256_of(e.core.bundle or eval_core.BUNDLE_PATH)
            yield "core", arguments, {"bundle": sha256 or eval_core.BUNDLE_SHA256}
        if e.ruler:
            options = {key: getattr(e.ruler, key) for key in ("data", "lengths", "tasks", "yarn")}
            arguments = ["-m", "scripts.eval_ruler", run, *command_line(options)]
            yield "ruler", arguments, {"ruler": ruler_files(e.ruler)}
        if e.hellaswag:
            options = vars(e.hellaswag) | {"out": config.run_dir / "eval" / "hellaswag.json"}
            arguments = ["-m", "scripts.eval_hellaswag", run, *command_line(options)]
            sha256 = provenance.sha256_of(e.hellaswag.data or hellaswag.PATH)
            yield "hellaswag", arguments, {"items": sha256 or hellaswag.SHA256}
        if e.samples:
            arguments = ["-m", "scripts.sample", run, "--prompt", *e.samples.prompts,
                         "--max-new-tokens", str(e.samples.max_new_tokens),
                         "--json", str(config.run_dir / "eval" / "samples.json")]  # fmt: skip
            yield "samples", arguments, {}

    def report(self) -> list[Step]:
        folder = self.experiment.dir
        dirs = [config.run_dir for config in self.runs.values()]
        files = [d / name for d in dirs for name in ("config.toml", "meta.json", "metrics.jsonl")]
        files += [path for d in dirs for path in sorted((d / "eval").glob("*.json"))]
        inputs = {str(path): provenance.sha256_of(path) for path in files}
        for path in sorted((provenance.ROOT / "scripts").glob("*.html")):
            inputs[f"scripts/{path.name}"] = sha256_file(path)
        arguments = ["-m", "scripts.report", *map(str, dirs), "--out", str(folder),
                     "--title", self.experiment.title]  # fmt: skip
        return [self.once("report", arguments, folder / "report.html", inputs)]

    def wandb(self) -> list[Step]:
        config, folder = next(iter(self.trained.values())), self.experiment.dir
        if config.log.wandb == "disabled":
            return []
        options = {"project": config.log.project, "group": self.experiment.name,
                   "mode": config.log.wandb}  # fmt: skip
        arguments = ["-m", "scripts.log_report", str(folder), *command_line(options)]
        inputs = {"report": provenance.sha256_of(folder / "report.html")}
        step = self.once("wandb", arguments, folder / "wandb" / "report.json", inputs)
        return [dataclasses.replace(step, job=dataclasses.replace(step.job, optional=True))]

    def once(
        self,
        name: str,
        arguments: list[str],
        output: Path,
        inputs: dict[str, Any],
        torchrun: bool = False,
    ) -> Step:
        """A step that is done if `output` is what this very command made of these very inputs,
        by the code as it is now."""

        def receipt() -> dict[str, Any]:
            # of the command without torchrun: the number of processes does not change a result
            code = provenance.code_of(arguments[1])
            return {"command": arguments, "inputs": inputs, "code": code}

        def begin() -> dict[str, Any]:
            now, known = receipt(), self.ledger.receipts.get(name, {})
            if provenance.differing(now, known) not in ([], ["output"]):
                for path in output.parent.glob(f"{output.stem}.*"):
                    if path.is_dir():  # what it had done when it was killed, in another way
                        shutil.rmtree(path)
            self.ledger.receipts[name] = now
            self.ledger.save()
            return now

        def sign(receipt: dict[str, Any]) -> None:
            if not output.is_file():
                raise UserError(f"step {name!r} ended well, but {output} is not there")
            self.ledger.receipts[name] = receipt | {"output": sha256_file(output)}
            self.ledger.save()

        job = Job(name, arguments, torchrun, prepare=begin, finish=sign)
        known = self.ledger.receipts.get(name, {})
        if "output" not in known or not output.is_file():
            return Step(job, done=False)
        now = receipt() | {"output": sha256_file(output)}
        changed = provenance.differing(known, now)
        if "code" in changed:
            changed += provenance.differing(known["code"], now["code"])
        return Step(job, done=not changed, why=f"changed since: {', '.join(changed)}")

    # what is checked

    def check_trained(self, config: Config) -> None:
        """train.py ends well on a signal too, and half a training must not be compared."""
        if not provenance.is_trained(config, self.data_sha256):
            raise UserError(
                f"{config.run_dir} stopped before its last step; run the experiment again, it goes"
                " on from there"
            )

    def sign_training(self, name: str) -> None:
        """Before a training starts or goes on: all runs must be by the code there is now, and of
        the data that were there."""
        code = provenance.code_of("train")
        self.ledger.check_training_code(self.trained, code, "the code there is now")
        self.ledger.check_shards(Path(self.experiment.data.dir))
        self.ledger.trainings[name] = {"code": code}
        self.ledger.save()

    def note_threads(self) -> None:
        """Name the runs that were trained with other threads than the slots give now."""
        now, others = self.slots.threads, []
        for name, config in self.trained.items():
            facts = read_json(config.run_dir / "meta.json") or {}
            others += [name] * (facts.get("threads", now) != now)
        if others and not self.slots.gpus:  # a GPU's sums do not depend on them
            print(f"note: not trained with the {now} threads that each has now, so the last bits"
                  f" may differ: {', '.join(others)}")  # fmt: skip

    def check_starts(self) -> None:
        """Runs of one seed must start from equal weights and see equal tokens; note both.

        Raises UserError if they do not.
        """
        configs = list(self.trained.values())
        code, data_sha256 = provenance.code_of("train"), self.data_sha256
        differences = {k for c in configs for k in config_differences(configs[0], c)}
        names = provenance.shared_parameters(configs)
        equal_weights = not differences & set(OTHER_WEIGHTS)
        for seed, runs in self.by_seed.items():
            for name in runs:
                config = self.trained[name]
                of = [config_settings(config), names, data_sha256, self.slots.processes, code]
                key = hashlib.sha256(json.dumps(of).encode()).hexdigest()
                if self.ledger.starts.get(name, {}).get("key") != key:
                    print(f"{name}: initial weights and batches", flush=True)
                    self.ledger.starts[name] = {
                        "key": key,
                        "shared_parameters": len(names),
                        "weights": provenance.initial_weights(config, names),
                        "processes": self.slots.processes,
                        "batches": provenance.batches(config, self.slots.processes),
                    }
                    self.ledger.save()
                start, first = self.ledger.starts[name], self.ledger.starts[runs[0]]
                for what in ("weights",) * equal_weights + ("batches",):
                    if start[what] != first[what]:
                        raise UserError(
                            f"seed {seed}: {runs[0]} and {name} start with different {what}, so"
                            " they cannot be compared; see starts in"
                            f" {self.ledger.path}"
                        )
        if len(configs) == len(self.by_seed):
            return  # one arm
        weights = f"initial weights ({len(names)} shared parameters) and " * equal_weights
        print(f"{weights}batches are equal in all arms of a seed ({self.ledger.path})")

    # all of it

    def run(self, lock: int, stop: StopSignal) -> None:
        """Do what is missing. Raises UserError for a step that fails, KeyboardInterrupt on a
        signal."""
        count = 0

        def do(steps: Sequence[Step], slots: Slots = self.slots) -> None:
            nonlocal count
            for step in steps:
                if step.done:
                    print(f"[done] {step.job.name}")
                elif step.why:
                    print(f"[again] {step.job.name}: {step.why}")
            jobs = [step.job for step in steps if not step.done]
            count += len(jobs)
            run_jobs(jobs, slots, self.experiment.dir / "logs", lock, stop)

        alone = make_slots(1, self.slots.gpus)
        do(self.data(), alone)
        self.ledger.check_shards(Path(self.experiment.data.dir))
        trainings = self.trainings()
        self.ledger.check_code(self.trained, to_train=not all(s.done for s in trainings))
        self.note_threads()
        self.check_starts()
        do(trainings)
        for name, source in self.sources.items():
            if not provenance.is_derived(self.runs[name], source):
                print(f"[make] {name}: the weights of {source.run_name}")
                provenance.derive(self.runs[name], source)
        do(self.evaluations())
        do(self.report(), alone)
        report = self.experiment.dir / "report.html"
        print(f"{'done' if count else 'nothing to do'}; the report is {report}")
        do(self.wandb(), alone)

    def show(self, gpu: str) -> None:
        """Print every command that is to run, the disk and the hours."""
        trainings = self.trainings()
        steps = [*self.data(), *trainings, *self.evaluations(), *self.report(), *self.wandb()]
        for step in steps:
            if step.done:
                print(f"[done] {step.job.name}")
                continue
            shown = shlex.join(self.slots.command(step.job))
            why = f": {step.why}" if step.why else ""
            print(f"[to run] {step.job.name}{why}\n$ python {shown}")
        for name, source in self.sources.items():
            print(f"{name} is not trained: it has the weights of {source.run_name}")
        missing = [c for c, s in zip(self.trained.values(), trainings, strict=True) if not s.done]
        print(f"{sum(not step.done for step in steps)} steps to run")
        print(disk(self.experiment, list(self.trained.values())))
        print(hours(missing, list(self.trained.values()), self.slots, gpu))


def config_settings(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config) | {"run_name": None}


def command_line(options: dict[str, Any]) -> list[str]:
    """{"max_length": 512, "yarn": ["none", "4"]} -> --max-length 512 --yarn none,4; None is left
    out."""
    arguments = []
    for name, value in options.items():
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            arguments += [f"--{name.replace('_', '-')}", text]
    return arguments


# -----------------------------------------------------------------------------
# disk and hours


def disk(experiment: Experiment, configs: Sequence[Config]) -> str:
    """What checkpoints and shards take."""
    checkpoints = sum(perf.disk_bytes(config) for config in configs)
    folder = Path(experiment.data.dir)
    if (folder / MANIFEST).is_file():
        shards = f"{perf.gib(sum(f.stat().st_size for f in folder.iterdir()))} of data (there)"
    else:
        tokens = max(c.train.max_steps * c.train.total_batch_size for c in configs)
        shards = f"at least {perf.gib(2 * tokens)} of data, if no token is read twice"
    return f"disk: at most {perf.gib(checkpoints)} of checkpoints, {shards}"


def hours(missing: Sequence[Config], configs: Sequence[Config], slots: Slots, gpu: str) -> str:
    """What the trainings that are missing take: on GPUs for three shares of their peak, on a CPU
    from a run of this experiment that has finished."""
    label = f"hours of {len(missing)} trainings"
    if not missing:
        return "hours: all trainings are done"
    tokens = [config.train.max_steps * config.train.total_batch_size for config in missing]
    if slots.gpus:
        peak = perf.peak_flops(gpu, missing[0].train.dtype)
        if peak is None:
            return f"{label}: not known, the table has bf16, not {missing[0].train.dtype}"
        flops = sum(n * perf.flops_per_token(c.model) for n, c in zip(tokens, missing, strict=True))
        found = [f"{flops / (s * peak * len(slots.gpus)) / 3600:,.1f} h at {s:.0%} MFU"
                 for s in (0.3, 0.4, 0.5)]  # fmt: skip
        return f"{label} on {len(slots.gpus)} x {gpu}: {', '.join(found)}; evaluations come on top"
    speeds = []
    for config in configs:
        path = config.run_dir / "metrics.jsonl"
        if config not in missing and path.is_file():
            speeds += [
                m["perf/tokens_per_s"] for m in read_metrics(path) if "perf/tokens_per_s" in m
            ]
    if not speeds:
        return (
            f"{label}: not known on a CPU before one has finished"
            " (--gpus 8 --gpu h100 says it for GPUs)"
        )
    seconds = sum(tokens) / float(np.median(speeds)) / min(slots.count, len(missing))
    return (
        f"{label}: {datetime.timedelta(seconds=round(seconds))} at {np.median(speeds):,.0f}"
        f" tokens/s each, as those that are done; evaluations come on top"
    )


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Args, prog="python -m scripts.experiment")))
