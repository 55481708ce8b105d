"""An experiment file: what may stand in it, what is checked, and the configs of its arms.

docs/experiments.md has its keys. Everything that would fail only after hours of training is refused
here, in one line that names the file.
"""

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from data import ruler as ruler_data
from data.shards import MANIFEST, load_manifest
from model import GPTConfig
from nanorove import core_tasks
from nanorove.config import Config, config_differences, flatten, load_config
from nanorove.errors import UserError
from nanorove.evaluation import parse_yarn, yarn_factor
from scripts import eval_core
from scripts.eval_perplexity import parse_lengths, parse_quantities

T = TypeVar("T")

# what arms must share even if the file lets them differ: they would not be comparable
SHARED = (
    "train.total_batch_size", "train.max_steps", "train.val_tokens", "model.block_size",
    "model.yarn_factor",
)  # fmt: skip
# the least that the evaluations' numbers may be
LEAST = {"documents": 2, "limit": 1, "max_length": 2, "samples": 1, "max_new_tokens": 1}

Configs = dict[tuple[str, int], Config]  # by (arm, seed)


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


# -----------------------------------------------------------------------------
# reading and checking it


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
            if option in ("-h", "--help"):
                raise UserError(f"arms.{name}: {option} is no override")
        if arm.config is not None and not Path(arm.config).is_file():
            raise UserError(f"arms.{name}: config {arm.config}: no such file")
    for name in (*experiment.name.split("/"), *experiment.arms):
        if not re.fullmatch(r"[\w.=+][\w.=+-]*", name) or name in (".", ".."):
            raise UserError(f"{name!r} names a folder: letters, digits and ._=+- only, no - first")
    if experiment.title.startswith("-"):  # the command line would take it for an option
        raise UserError(f"title {experiment.title!r}: cannot begin with '-'")
    command = experiment.data.command
    if not command:
        raise UserError("data.command: at least the module, e.g. data.stdlib")
    out = [b for a, b in zip(command, command[1:], strict=False) if a == "--out"]
    if out and Path(out[-1]) != Path(experiment.data.dir):
        raise UserError(f"data.command writes to {out[-1]}, and data.dir is {experiment.data.dir}")
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
    if hint is str and isinstance(value, str) and "\0" in value:
        return False  # no command line can hold it
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
    try:
        config, _ = load_config(train_arguments(experiment, arm, seed))
    except SystemExit:  # tyro has said why
        raise UserError(f"arm {arm}, seed {seed}: train.py refuses it, see above") from None
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
        for section, factor in factors_of(experiment, model):
            try:
                dataclasses.replace(model, yarn_factor=factor)
            except ValueError as error:
                raise UserError(f"{section}: arm {arm}: {error}") from None
    used = tokenizer_of(experiment.data)
    if ruler and used not in (None, ruler.tokenizer):
        raise UserError(f"ruler.tokenizer {ruler.tokenizer}: the data are made with {used}")


def factors_of(experiment: Experiment, model: GPTConfig) -> Iterator[tuple[str, float]]:
    """(section, YaRN factor) of all that a model is to be evaluated with."""
    if experiment.core and experiment.core.yarn_factor is not None:
        yield "core", experiment.core.yarn_factor
    for name in ("perplexity", "packed", "ruler"):
        section = getattr(experiment, name)
        for setting in section.yarn if section else ():
            for length in section.lengths:
                factor = yarn_factor(setting, length, model)
                if not isinstance(factor, str):
                    yield name, factor


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
