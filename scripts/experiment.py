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

from data.shards import MANIFEST, load_manifest
from model import GPTConfig
from nanorove import perf
from nanorove.checkpoint import read_meta, resolve_step_dir
from nanorove.config import Config, config_differences, config_from_dict, load_config
from nanorove.errors import UserError, run_cli
from nanorove.files import read_json, sha256_file, write_text_atomic
from nanorove.guards import StopSignal
from nanorove.results import read_metrics
from scripts import provenance
from scripts.eval_perplexity import parse_lengths, parse_yarn
from scripts.jobs import Job, Slots, make_slots, only_one, run_jobs, visible_gpus

T = TypeVar("T")

# what arms must share even if the file lets them differ: they would not be comparable
SHARED = ("train.total_batch_size", "train.max_steps", "train.val_tokens")
# arms that differ in one of these cannot start from equal weights
OTHER_WEIGHTS = ("model.n_layer", "model.n_head", "model.n_embd", "init_from")


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
    if args.gpus is not None and not args.dry_run:
        raise UserError("--gpus is for --dry-run; CUDA_VISIBLE_DEVICES says which ones are used")
    gpus = visible_gpus() if args.gpus is None else [str(i) for i in range(args.gpus)]
    slots = make_slots(experiment.slots if args.slots is None else args.slots, gpus)
    for config in configs.values():
        perf.grad_accum_steps(config, slots.processes)  # now, and not after the data
    print(slots)
    plan = Plan(experiment, configs, slots, Ledger(experiment.dir / "experiment.json"))
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
    for section in ("perplexity", "packed", "ruler"):
        what = getattr(experiment, section)
        if what is None:
            continue
        try:
            parse_lengths(",".join(map(str, what.lengths)))
            parse_yarn(",".join(what.yarn))
        except UserError as error:
            raise UserError(f"{section}: {error}") from None
        if section != "ruler" and what.documents is not None and what.documents < 2:
            raise UserError(f"{section}.documents {what.documents}: at least 2 are needed")
    for prompt in experiment.samples.prompts if experiment.samples else ():
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


def is_prepared(data: Data) -> bool:
    """Are there shards, made with the tokenizer that the command asks for?"""
    folder, command = Path(data.dir), data.command
    if not (folder / MANIFEST).is_file():
        return False
    asked = [b for a, b in zip(command, command[1:], strict=False) if a == "--tokenizer"]
    return not asked or load_manifest(folder)["tokenizer"]["name"] == asked[-1]


def ruler_files(ruler: Ruler) -> dict[str, str] | None:
    """{"length task": sha256} of the prompts asked for; None if some are not there.

    What is there and was made with other settings is for data.ruler to refuse.
    """
    manifest = read_json(Path(ruler.data) / MANIFEST)
    if manifest is None or manifest.get("tokenizer", {}).get("name") != ruler.tokenizer:
        return None
    there = {(f["length"], f["task"]): f["sha256"] for f in manifest["files"]}
    tasks = ruler.tasks or {task for _, task in there}
    files = {
        f"{length} {task}": there[length, task]
        for length in ruler.lengths
        for task in sorted(tasks)
        if (length, task) in there
    }
    wanted = len(ruler.lengths) * len(tasks) if ruler.tasks else 0
    complete = {length for length, _ in there} >= set(ruler.lengths) and len(files) >= wanted
    return files if complete and manifest["samples"] == ruler.samples else None


def is_trained(config: Config, data_sha256: str | None) -> bool:
    """Is the run's last checkpoint its last step, evaluated?

    Raises UserError if the run was made with another config or other data: two experiments must
    not be mixed.
    """
    if not (config.run_dir / "ckpt" / "last").is_file():
        return False
    meta = read_meta(resolve_step_dir(config.run_dir))
    fix = "move the folder away or rename the experiment"
    if "derived_from" in meta:
        raise UserError(f"{config.run_dir}: made of another run, but this arm is trained; {fix}")
    differences = config_differences(config_from_dict(meta["config"]), config)
    for key, (before, now) in differences.items():
        raise UserError(f"{config.run_dir}: made with {key} {before}, now it is {now}; {fix}")
    if data_sha256 is not None and meta["data"]["manifest_sha256"] != data_sha256:
        raise UserError(
            f"{config.run_dir}: trained on other data than {config.data.dir} has now; {fix}"
        )
    return meta["step"] == config.train.max_steps and meta["val_loss"] is not None


# -----------------------------------------------------------------------------
# what was done


class Ledger:
    """runs/<name>/experiment.json: what made which result of what.

    receipts: for each evaluation and the report command, inputs, code and the hash of the output.
    trainings: for each run the code it was trained by. starts: its initial weights and batches.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = read_json(path)
        except UserError:
            raise UserError(f"{path}: not JSON; delete it, evaluations are redone") from None
        content = content if isinstance(content, dict) else {}
        self.receipts, self.trainings, self.starts = (
            content.get(key, {}) for key in ("receipts", "trainings", "starts")
        )

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {k: getattr(self, k) for k in ("receipts", "trainings", "starts")}
        write_text_atomic(self.path, json.dumps(content, indent=1) + "\n")


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
        self, experiment: Experiment, configs: Configs, slots: Slots, ledger: Ledger
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
            steps.append(Step(job, is_trained(config, data_sha256)))
        return steps

    def evaluations(self) -> list[Step]:
        steps = []
        for name, config in self.runs.items():
            for evaluation, arguments, inputs in self.evaluations_of(config):
                output = config.run_dir / "eval" / f"{evaluation}.json"
                torchrun = evaluation != "samples"
                inputs = inputs | self.identity(config)
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
            yield "core", arguments, {"bundle": provenance.sha256_of(e.core.bundle or "")}
        if e.ruler:
            options = {key: getattr(e.ruler, key) for key in ("data", "lengths", "tasks", "yarn")}
            arguments = ["-m", "scripts.eval_ruler", run, *command_line(options)]
            yield "ruler", arguments, {"ruler": ruler_files(e.ruler)}
        if e.hellaswag:
            arguments = ["-m", "scripts.eval_hellaswag", run, *command_line(vars(e.hellaswag))]
            yield "hellaswag", arguments, {"items": provenance.sha256_of(e.hellaswag.data or "")}
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

    def identity(self, config: Config) -> dict[str, Any]:
        """What a result says of a run: the hash of its weights, and the model they are in."""
        if not (config.run_dir / "ckpt" / "last").is_file():
            return {"model": None}
        meta = read_meta(resolve_step_dir(config.run_dir))
        sha256 = meta["files"]["model.safetensors"]["sha256"]
        return {"model": sha256, "step": meta["step"], "settings": meta["config"]["model"]}

    def check_trained(self, config: Config) -> None:
        """train.py ends well on a signal too, and half a training must not be compared."""
        if not is_trained(config, self.data_sha256):
            raise UserError(
                f"{config.run_dir} stopped before its last step; run the experiment again, it goes"
                " on from there"
            )

    def sign_training(self, name: str) -> None:
        """Before a training starts or goes on: all runs must be by the code there is now."""
        code = provenance.code_of("train")
        self.check_training_code(code, "the code there is now")
        self.ledger.trainings[name] = {"code": code}
        self.ledger.save()

    def check_training_code(self, code: dict[str, str], whose: str) -> None:
        """Raise UserError for a run that was trained by other code than this."""
        for name, known in self.training_code().items():
            if changed := provenance.differing(known, code):
                raise UserError(
                    f"{self.runs[name].run_dir}: trained by other code than {whose}"
                    f" ({', '.join(changed)}), and the two must not be mixed: go back to that code,"
                    " or move the folder away"
                )

    def training_code(self) -> dict[str, dict[str, str]]:
        """{run: its code} of the runs that have a checkpoint and that this experiment started."""
        return {
            name: self.ledger.trainings[name]["code"]
            for name, config in self.trained.items()
            if (config.run_dir / "ckpt" / "last").is_file() and name in self.ledger.trainings
        }

    def check_code(self, to_train: bool) -> None:
        """Runs by different code are refused; code that is not the present one is named."""
        now, known = provenance.code_of("train"), self.training_code()
        unknown = [
            name
            for name, config in self.trained.items()
            if (config.run_dir / "ckpt" / "last").is_file() and name not in known
        ]
        if unknown:
            print(f"note: trained by code that is not known: {', '.join(unknown)}")
        if to_train:
            self.check_training_code(now, "the code there is now")
        elif known:
            first = next(iter(known))
            self.check_training_code(known[first], f"{first}")
            if changed := provenance.differing(known[first], now):
                print(f"note: the trainings are all by one code, and it is not the code there is"
                      f" now ({', '.join(changed)})")  # fmt: skip

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
        load_manifest(Path(self.experiment.data.dir))
        trainings = self.trainings()
        self.check_code(to_train=not all(step.done for step in trainings))
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
            print(f"[to run] {step.job.name}\n$ python {shown}")
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
