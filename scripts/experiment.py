"""Run what is missing of an experiment: data, trainings, evaluations, report.

    python -m scripts.experiment experiments/demo.toml

Every step is the command that a user would type; it is printed, and it can be typed. What is there
already is checked and skipped, so a stopped experiment goes on where it was.
"""

import dataclasses
import difflib
import json
import os
import shlex
import subprocess
import sys
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tyro

from data.shards import MANIFEST, load_manifest
from nanorove.checkpoint import read_meta, resolve_step_dir
from nanorove.config import Config, config_differences, config_from_dict, load_config
from nanorove.errors import UserError, run_cli
from nanorove.files import sha256_file, write_text_atomic
from scripts.eval_perplexity import parse_lengths, parse_yarn

T = TypeVar("T")


@dataclass(frozen=True)
class Data:
    dir: str
    """Where the shards are; the arms' configs must name the same folder."""
    command: list[str]
    """Makes them, as `python -m <command>`."""


@dataclass(frozen=True)
class Arm:
    config: str
    overrides: list[str] = field(default_factory=list)
    """As on train.py's command line: ["--train.max_steps", "100"]."""


@dataclass(frozen=True)
class Perplexity:
    lengths: list[int]
    yarn: list[str]
    documents: int


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
    perplexity: Perplexity
    samples: Samples
    arms_differ_in: list[str] = field(default_factory=lambda: ["model.pos_emb"])
    """The config keys in which arms may differ; any other difference is refused."""

    @property
    def dir(self) -> Path:
        return Path("runs") / self.name


@dataclass(frozen=True)
class Args:
    """Run what is missing of an experiment and make its report."""

    experiment: tyro.conf.Positional[Path]
    """A file like experiments/demo.toml."""
    dry_run: bool = False
    """Print what would be run, and run nothing."""


def main(args: Args) -> None:
    """Raises UserError for a faulty file, arms that differ in too much, and a step that fails."""
    experiment = load_experiment(args.experiment)
    configs = {
        (arm, seed): arm_config(experiment, arm, seed)
        for seed in experiment.seeds
        for arm in experiment.arms
    }
    print(compare_arms(experiment, configs))
    steps = Steps(experiment.dir / "experiment.json", args.dry_run)

    # data
    manifest = Path(experiment.data.dir) / MANIFEST
    steps.run("data", ["-m", *experiment.data.command], done=is_prepared(experiment.data))
    data_sha256 = None
    if manifest.is_file():
        load_manifest(manifest.parent)
        data_sha256 = sha256_file(manifest)

    # trainings
    for (arm, seed), config in configs.items():
        train = Path(os.path.relpath(Path(__file__).resolve().parent.parent / "train.py"))
        arguments = [str(train), *train_arguments(experiment, arm, seed), "--resume"]
        steps.run(config.run_name, arguments, done=is_trained(config, data_sha256))
        # train.py ends well on a signal too, and a model of half the steps must not be compared
        if not args.dry_run and not is_trained(config, data_sha256):
            raise UserError(
                f"{config.run_dir} stopped before its last step; run the experiment again, it goes"
                " on from there"
            )

    # evaluations
    for config in configs.values():
        model_sha256 = None
        if is_trained(config, data_sha256):
            meta = read_meta(resolve_step_dir(config.run_dir))
            model_sha256 = meta["files"]["model.safetensors"]["sha256"]
        inputs = {"model": model_sha256, "data": data_sha256}
        what = experiment.perplexity
        steps.run_once(
            f"{config.run_name} perplexity",
            ["-m", "scripts.eval_perplexity", str(config.run_dir),
             "--lengths", ",".join(map(str, what.lengths)), "--yarn", ",".join(what.yarn),
             "--documents", str(what.documents)],
            config.run_dir / "eval" / "perplexity.json", inputs,
        )  # fmt: skip
        samples = config.run_dir / "eval" / "samples.json"
        steps.run_once(
            f"{config.run_name} samples",
            ["-m", "scripts.sample", str(config.run_dir), "--prompt", *experiment.samples.prompts,
             "--max-new-tokens", str(experiment.samples.max_new_tokens), "--json", str(samples)],
            samples, inputs,
        )  # fmt: skip

    # report
    names = ("config.toml", "metrics.jsonl", "eval/perplexity.json", "eval/samples.json")
    files = [config.run_dir / name for config in configs.values() for name in names]
    report = experiment.dir / "report.html"
    steps.run_once(
        "report",
        ["-m", "scripts.report", *(str(config.run_dir) for config in configs.values()),
         "--out", str(experiment.dir), "--title", experiment.title],
        report, {str(f): sha256_file(f) if f.is_file() else None for f in files},
    )  # fmt: skip
    if args.dry_run:
        print(f"{steps.count} steps to run")
    elif steps.count:
        print(f"done; the report is {report}")
    else:
        print(f"nothing to do; the report is {report}")


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
    if not experiment.arms or not experiment.seeds:
        raise UserError(f"{path}: at least one arm and one seed are needed")
    for prompt in experiment.samples.prompts:
        if prompt.startswith("-"):  # the command line would take it for an option
            raise UserError(f"{path}: a prompt cannot begin with '-': {prompt!r}")
    for name, arm in experiment.arms.items():
        for option in arm.overrides:
            if option.split("=")[0].replace("-", "_") in ("__seed", "__run_name", "__resume"):
                raise UserError(f"{path}: arms.{name}: {option} is the experiment's to set")
    what = experiment.perplexity
    try:  # now, and not after hours of training
        parse_lengths(",".join(map(str, what.lengths)))
        parse_yarn(",".join(what.yarn))
    except UserError as error:
        raise UserError(f"{path}: perplexity: {error}") from None
    if what.documents < 2:
        raise UserError(f"{path}: perplexity.documents {what.documents}: at least 2 are needed")
    return experiment


def read_table(kind: type[T], table: Any, path: str, prefix: str) -> T:
    """A TOML table -> the dataclass `kind`, nested ones and dicts of them included."""
    if not isinstance(table, dict):
        raise UserError(f"{path}: {prefix.rstrip('.')} must be a table, not {table!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0)[0]
            raise UserError(f"{path}: unknown key {prefix}{key}; did you mean {prefix}{near}?")
    values = {}
    for name, hint in typing.get_type_hints(kind).items():
        where = prefix + name
        if name not in table:
            if fields[name].default_factory is dataclasses.MISSING:
                raise UserError(f"{path}: {where} is missing")
        elif dataclasses.is_dataclass(hint):
            values[name] = read_table(hint, table[name], path, f"{where}.")
        elif typing.get_origin(hint) is dict and isinstance(table[name], dict):
            item = typing.get_args(hint)[1]
            values[name] = {
                k: read_table(item, v, path, f"{where}.{k}.") for k, v in table[name].items()
            }
        elif not fits(table[name], hint):
            raise UserError(f"{path}: {where} must be {hint_words(hint)}, not {table[name]!r}")
        else:
            values[name] = table[name]
    return kind(**values)


def fits(value: Any, hint: Any) -> bool:
    """Is a TOML value of the annotated type? (True is no int here.)"""
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(fits(x, typing.get_args(hint)[0]) for x in value)
    return type(value) is hint


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
    """The config that this training will have, exactly as train.py reads it."""
    config, _ = load_config(train_arguments(experiment, arm, seed))
    if Path(config.data.dir) != Path(experiment.data.dir):
        raise UserError(
            f"arm {arm}: its data.dir is {config.data.dir}, the experiment's is"
            f" {experiment.data.dir}; they must be the same"
        )
    return config


def compare_arms(experiment: Experiment, configs: dict[tuple[str, int], Config]) -> str:
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


def is_trained(config: Config, data_sha256: str | None) -> bool:
    """Is the run's last checkpoint its last step, evaluated?

    Raises UserError if the run was made with another config or other data: two experiments must
    not be mixed.
    """
    if not (config.run_dir / "ckpt" / "last").is_file():
        return False
    meta = read_meta(resolve_step_dir(config.run_dir))
    differences = config_differences(config_from_dict(meta["config"]), config)
    fix = "move the folder away or rename the experiment"
    for key, (before, now) in differences.items():
        raise UserError(f"{config.run_dir}: made with {key} {before}, now it is {now}; {fix}")
    if data_sha256 is not None and meta["data"]["manifest_sha256"] != data_sha256:
        raise UserError(
            f"{config.run_dir}: trained on other data than {config.data.dir} has now; {fix}"
        )
    return meta["step"] == config.train.max_steps and meta["val_loss"] is not None


# -----------------------------------------------------------------------------
# the steps


def run_to_its_end(command: list[str]) -> int:
    """Run a command and return its exit code.

    Ctrl-C reaches the command as well. It gets the time to save what it has (subprocess.run would
    kill it after a quarter of a second), then KeyboardInterrupt is raised here.
    """
    process = subprocess.Popen(command)
    interrupt = None
    while process.returncode is None:
        try:
            process.wait()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    return process.returncode


class Steps:
    """Runs commands and keeps receipts: which command made which output from which inputs."""

    def __init__(self, path: Path, dry_run: bool) -> None:
        self.path = path
        self.dry_run = dry_run
        self.count = 0  # of the steps that were not done
        self.receipts: dict[str, Any] = {}
        if path.is_file():
            try:
                self.receipts = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                raise UserError(f"{path}: not JSON; delete it, evaluations are redone") from None

    def run(self, name: str, arguments: list[str], *, done: bool) -> None:
        """Run `python <arguments>` unless it is done. Its output is the terminal's.

        Raises UserError if it fails.
        """
        shown = f"python {shlex.join(arguments)}"
        if done:
            print(f"[done] {name}")
            return
        print(f"[{'to run' if self.dry_run else 'run'}] {name}\n$ {shown}", flush=True)
        self.count += 1
        if self.dry_run:
            return
        code = run_to_its_end([sys.executable, *arguments])
        if code:
            raise UserError(
                f"step {name!r} failed with exit code {code} (its output is above): {shown};"
                " mend it and run the experiment again, which goes on from there"
            )

    def run_once(
        self, name: str, arguments: list[str], output: Path, inputs: dict[str, str | None]
    ) -> None:
        """Run it unless `output` is what this very command made of these very inputs (hashes)."""
        receipt = {"command": arguments, "inputs": inputs}
        if output.is_file():
            done = self.receipts.get(name) == receipt | {"output": sha256_file(output)}
        else:
            done = False
        self.run(name, arguments, done=done)
        if not done and not self.dry_run:
            self.receipts[name] = receipt | {"output": sha256_file(output)}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(self.path, json.dumps(self.receipts, indent=1) + "\n")


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Args, prog="python -m scripts.experiment")))
