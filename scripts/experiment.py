"""Run what is missing of an experiment: data, trainings, evaluations, report.

    python -m scripts.experiment experiments/demo.toml [--dry-run]

Every step is the command that a user would type; it is printed, and it can be typed. What is there
already is checked and skipped, so an experiment that was stopped or killed goes on where it was.
docs/experiments.md says what is checked, and what makes results unusable.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from data import ruler as ruler_data
from data.shards import MANIFEST
from nanorove import hellaswag, perf
from nanorove.config import Config, config_differences
from nanorove.errors import UserError, run_cli
from nanorove.files import read_json, sha256_file
from nanorove.guards import StopSignal
from nanorove.results import read_metrics
from scripts import eval_core, provenance
from scripts.experiment_file import (
    Configs,
    Experiment,
    Ruler,
    arm_config,
    check_models,
    compare_arms,
    is_prepared,
    load_experiment,
    train_arguments,
)
from scripts.jobs import Job, Slots, make_slots, only_one, run_jobs, visible_gpus

# arms that differ in one of these cannot start from equal weights
OTHER_WEIGHTS = ("model.n_layer", "model.n_head", "model.n_embd", "init_from")


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


def main(args: Args) -> None:
    """Raises UserError for a faulty file, arms that differ in too much, and a step that fails."""
    experiment = load_experiment(args.experiment)
    try:
        configs = {
            (arm, seed): arm_config(experiment, arm, seed)
            for seed in experiment.seeds
            for arm in experiment.arms
        }
        print(compare_arms(experiment, configs))
        check_models(experiment, configs)
    except UserError as error:
        raise UserError(f"{args.experiment}: {error}") from None
    if args.gpus is not None and not args.dry_run:
        raise UserError("--gpus is for --dry-run; CUDA_VISIBLE_DEVICES says which ones are used")
    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus {args.gpus}: at least 1; without it the plan is for this machine")
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
# what was done


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
        self.checked_data: str | None = None  # data_sha256 when the shards were looked at

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
        for path in sorted((provenance.ROOT / "scripts").glob("report_template.html")):
            inputs[f"scripts/{path.name}"] = sha256_file(path)
        arguments = ["-m", "scripts.report", *map(str, dirs), "--out", str(folder),
                     "--title", self.experiment.title]  # fmt: skip
        also = ("report.md", "*.csv", "*.png")
        return [self.once("report", arguments, folder / "report.html", inputs, also=also)]

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
        also: Sequence[str] = (),
    ) -> Step:
        """A step that is done if `output` is what this very command made of these very inputs,
        by the code as it is now. also: patterns of more files that it makes beside it."""

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
            made = [output, *(path for pattern in also for path in output.parent.glob(pattern))]
            hashes = {path.name: sha256_file(path) for path in made}
            self.ledger.receipts[name] = receipt | {"output": hashes}
            self.ledger.save()

        job = Job(name, arguments, torchrun, prepare=begin, finish=sign)
        known = self.ledger.receipts.get(name, {})
        if not isinstance(known.get("output"), dict) or not output.is_file():
            return Step(job, done=False)
        there = {file: provenance.sha256_of(output.parent / file) for file in known["output"]}
        now = receipt() | {"output": there}
        changed = provenance.differing(known, now)
        if "code" in changed:
            changed += provenance.differing(known.get("code", {}), now["code"])
        return Step(job, done=not changed, why=f"changed since: {', '.join(changed)}")

    # what is checked

    def check_trained(self, config: Config) -> None:
        """train.py ends well on a signal too, and half a training must not be compared."""
        if not provenance.is_trained(config, self.data_sha256):
            meta = provenance.last_meta(config)
            if meta and meta["step"] == config.train.max_steps:
                raise UserError(
                    f"{config.run_dir}: at its last step, and its validation loss is not finite: it"
                    " diverged; move the folder away and lower train.learning_rate"
                )
            raise UserError(
                f"{config.run_dir} stopped before its last step; run the experiment again, it goes"
                " on from there"
            )

    def sign_training(self, name: str) -> None:
        """Before a training starts or goes on: all runs must be by the code there is now, and of
        the data that were there. What was begun by code that is not known stays so."""
        code = provenance.code_of("train")
        self.ledger.check_training_code(self.trained, code, "the code there is now")
        self.check_data()
        begun = (self.trained[name].run_dir / "ckpt" / "last").is_file()
        if not begun or name in self.ledger.trainings:
            self.ledger.trainings[name] = {"code": code}
            self.ledger.save()

    def check_data(self) -> None:
        """Raise UserError if these are not the data that batches and weights were compared with."""
        self.ledger.check_shards(Path(self.experiment.data.dir))
        self.checked_data = self.checked_data or self.data_sha256
        if self.data_sha256 != self.checked_data:
            raise UserError(
                f"{self.experiment.data.dir}: other data than when the experiment was started, and"
                " the two must not be mixed; put them back, or rename the experiment"
            )

    def note_threads(self) -> None:
        """Name the runs that were trained with other threads than the slots give now."""
        now, others = self.slots.threads, []
        for name, config in self.trained.items():
            facts = read_json(config.run_dir / "meta.json") or {}
            others += [name] * (facts.get("threads", now) != now)
        if others and not self.slots.gpus:  # a GPU's sums do not depend on them
            print(f"note: not trained with the {now} threads that each has now, so the last bits"
                  f" may differ: {', '.join(others)}")  # fmt: skip

    def note_strangers(self) -> None:
        """Name results that no section of the file asks for: nobody keeps them up to date."""
        ours = {name for name, *_ in self.evaluations_of(next(iter(self.runs.values())))}
        for config in self.runs.values():
            for path in sorted((config.run_dir / "eval").glob("*.json")):
                if path.stem not in ours:
                    print(f"note: {path} is of no section of the file, so nothing keeps it up to"
                          " date, and it is in the report; move it away if it is old")  # fmt: skip

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
        self.check_data()
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
        self.check_data()
        changed = [step for step in self.evaluations() if not step.done]
        if changed:
            raise UserError(
                f"{', '.join(s.job.name for s in changed)}: {changed[0].why} while evaluations ran;"
                " run the experiment again"
            )
        self.note_strangers()
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
            why = f": {step.why}" if step.why else ""
            print(f"[to run] {step.job.name}{why}\n$ {self.slots.shown(step.job)}")
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
        hint = " (--gpus 8 --gpu h100 says it for GPUs)" if missing[0].train.dtype == "bf16" else ""
        return f"{label}: not known on a CPU before one has finished{hint}"
    seconds = sum(tokens) / float(np.median(speeds)) / min(slots.count, len(missing))
    return (
        f"{label}: {datetime.timedelta(seconds=round(seconds))} at {np.median(speeds):,.0f}"
        f" tokens/s each, as those that are done; evaluations come on top"
    )


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Args, prog="python -m scripts.experiment")))
