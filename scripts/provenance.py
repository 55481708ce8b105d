"""Where an experiment's results come from: code, data, initial weights, batches, other runs.

Hashes that can be compared, and what is noted of them; and one folder: that of an arm which was
trained with one kind of positions and is evaluated with another.
"""

import ast
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from data.loader import TrainLoader
from data.shards import load_manifest
from model import GPT
from nanorove.checkpoint import load_init_weights, read_meta, resolve_step_dir
from nanorove.config import (
    Config,
    config_differences,
    config_from_dict,
    config_to_dict,
    config_to_toml,
)
from nanorove.errors import UserError
from nanorove.files import read_json, sha256_file, write_text_atomic
from nanorove.perf import grad_accum_steps
from scripts.eval_perplexity import checked_sha256

Runs = dict[str, Config]  # by <arm>-seed<seed>

ROOT = Path(__file__).resolve().parent.parent
# settings, logs and messages: what these do wrong shows elsewhere (configs and results are compared
# by their content), and a better log line must not cost a training
NEUTRAL = {
    f"nanorove/{name}.py" for name in ("config", "errors", "files", "runlog", "wandb_mirror")
}

# -----------------------------------------------------------------------------
# what was done


class Ledger:
    """runs/<name>/experiment.json: what made which result of what.

    receipts: for each evaluation and the report command, inputs, code and the hash of the output.
    trainings: for each run the code it was trained by. starts: its initial weights and batches.
    shards: size, time and sha256 of each when its content was last looked at.
    """

    PARTS = ("receipts", "trainings", "starts", "shards")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = read_json(path)
        except UserError:
            content = None
        known = content is None or isinstance(content, dict)
        parts = [content.get(key, {}) if known and content else {} for key in self.PARTS]
        if path.is_file() and (not content or not all(map(of_objects, parts))):
            raise UserError(
                f"{path}: damaged; move it away: evaluations are redone, and by which code the"
                " runs that are there were trained is then not known"
            )
        self.receipts, self.trainings, self.starts, self.shards = parts

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {key: getattr(self, key) for key in self.PARTS}
        write_text_atomic(self.path, json.dumps(content, indent=1) + "\n")

    def check_shards(self, folder: Path) -> None:
        """Raise UserError for a shard that is not what the manifest says: runs on two kinds of
        data must not be mixed. A file of the same size and time is not read again."""
        manifest, before = load_manifest(folder), dict(self.shards)
        for shard in manifest["shards"]:
            path = folder / shard["file"]
            facts = path.stat()
            seen = [facts.st_size, facts.st_mtime_ns, shard["sha256"]]
            if self.shards.get(str(path)) != seen:
                checked_sha256(path, manifest)
                self.shards[str(path)] = seen
        if self.shards != before:
            self.save()

    def check_training_code(self, runs: Runs, code: dict[str, str], whose: str) -> None:
        """Raise UserError for a run that was trained by other code than this."""
        for name, known in self.training_code(runs).items():
            if changed := differing(known, code):
                raise UserError(
                    f"{runs[name].run_dir}: trained by other code than {whose}"
                    f" ({', '.join(changed)}), and the two must not be mixed: go back to that code,"
                    " or move the folder away"
                )

    def training_code(self, runs: Runs) -> dict[str, dict[str, str]]:
        """{run: its code} of the runs that have a checkpoint and that the experiment started."""
        return {
            name: self.trainings[name]["code"]
            for name, config in runs.items()
            if (config.run_dir / "ckpt" / "last").is_file() and name in self.trainings
        }

    def check_code(self, runs: Runs, to_train: bool) -> None:
        """Runs by different code are refused; code that is not the present one is named."""
        now, known = code_of("train"), self.training_code(runs)
        unknown = [
            name
            for name, config in runs.items()
            if (config.run_dir / "ckpt" / "last").is_file() and name not in known
        ]
        if unknown:
            print(f"note: trained by code that is not known: {', '.join(unknown)}")
        if to_train:
            self.check_training_code(runs, now, "the code there is now")
        elif known:
            first = next(iter(known))
            self.check_training_code(runs, known[first], f"{first}")
            if changed := differing(known[first], now):
                print(f"note: the trainings are all by one code, and it is not the code there is"
                      f" now ({', '.join(changed)})")  # fmt: skip


def of_objects(part: Any) -> bool:
    """Is it a dict of dicts, or of lists (the shards')?"""
    return isinstance(part, dict) and all(isinstance(v, dict | list) for v in part.values())


def last_meta(config: Config) -> dict[str, Any] | None:
    """meta.json of a run's last checkpoint. None if there is none, or a damaged one, which train.py
    replaces: it goes on from the one before."""
    if not (config.run_dir / "ckpt" / "last").is_file():
        return None
    try:
        return read_meta(resolve_step_dir(config.run_dir))
    except UserError as error:
        print(f"note: {error}; the training does that by itself")
        return None


def identity(config: Config) -> dict[str, Any]:
    """What a result says of a run: the hash of its weights, and the model they are in."""
    meta = last_meta(config)
    if meta is None:
        return {"model": None}
    sha256 = meta["files"]["model.safetensors"]["sha256"]
    return {"model": sha256, "step": meta["step"], "settings": meta["config"]["model"]}


def is_trained(config: Config, data_sha256: str | None) -> bool:
    """Is the run's last checkpoint its last step, evaluated?

    Raises UserError if the run was made with another config or other data: two experiments must
    not be mixed.
    """
    meta = last_meta(config)
    if meta is None:
        return False
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
# code


def code_of(module: str) -> dict[str, str]:
    """{file: sha256} of a module of ours and of all of ours that it imports, directly or through
    others, but for NEUTRAL; with them the versions and the kind of device numbers depend on.

    Comments, docstrings and layout do not count.
    """
    found: dict[str, str] = {}
    todo = [module]
    while todo:
        path = ROOT / f"{todo.pop().replace('.', '/')}.py"
        file = path.relative_to(ROOT).as_posix()
        if file in found or not path.is_file():
            continue
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found[file] = hashlib.sha256(ast.dump(without_docstrings(tree)).encode()).hexdigest()
    code = {file: found[file] for file in sorted(found) if file not in NEUTRAL}
    python = ".".join(platform.python_version_tuple()[:2])
    device = "cuda" if torch.cuda.device_count() else "cpu"
    return code | {"python": python, "torch": torch.__version__, "device": device}


def without_docstrings(tree: ast.AST) -> ast.AST:
    """The tree, changed: every string that stands alone as a statement is gone."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [
                statement
                for statement in body
                if not (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                )
            ]
    return tree


def sha256_of(path: Path | str) -> str | None:
    """Of a file, or of a folder: of the names and hashes of its files. None if there is none."""
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        found = [(file.relative_to(path).as_posix(), sha256_file(file)) for file in files]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()
    return sha256_file(path) if path.is_file() else None


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The keys whose values are not the same in both."""
    return [key for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


# -----------------------------------------------------------------------------
# what a training starts from


def shared_parameters(configs: Iterable[Config]) -> list[str]:
    """Names of the parameters that the models of all configs have, in order."""
    names = []
    with torch.device("meta"):
        for config in configs:
            names.append(dict(GPT(config.model).named_parameters()))
    return [name for name in names[0] if all(name in other for other in names)]


def initial_weights(config: Config, names: Iterable[str]) -> str:
    """sha256 of the parameters `names` before the first step, as the training will build them."""
    model = GPT(config.model, seed=config.seed)
    if config.init_from is not None:
        load_init_weights(model, config)
    state = model.state_dict()
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        digest.update(state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def batches(config: Config, processes: int) -> dict[str, str]:
    """{step: sha256 of its tokens} for the first, the middle and the last step, read through the
    loader as `processes` processes do: the rows in the order of the training's sequences."""
    train = config.train
    return _batches(
        config.data.dir, config.model.context, train.micro_batch_size, train.total_batch_size,
        train.max_steps, config.seed, processes, grad_accum_steps(config, processes),
    )  # fmt: skip


@lru_cache  # arms with the same settings read the same
def _batches(
    data_dir: str,
    context: int,
    micro_batch_size: int,
    total_batch_size: int,
    max_steps: int,
    seed: int,
    processes: int,
    accum_steps: int,
) -> dict[str, str]:
    sequences = total_batch_size // context
    loader = TrainLoader(
        data_dir, block_size=context, micro_batch_size=micro_batch_size, seed=seed,
        sequences_per_step=sequences, world_size=processes,
    )  # fmt: skip
    found = {}
    for step in sorted({0, max_steps // 2, max_steps - 1}):
        digest = hashlib.sha256()
        for micro_step in range(accum_steps):
            for rank in range(processes):
                loader.rank = rank  # one reader for all: each shard is read once
                x, y = loader.batch(step, micro_step)  # y is x one token later
                rows = torch.cat((x, y[:, -1:]), dim=1)
                digest.update(rows.numpy().astype("<u2").tobytes())
        found[str(step)] = digest.hexdigest()
    return found


# -----------------------------------------------------------------------------
# runs made of other runs


def origin(source: Config) -> dict[str, Any]:
    """What a run that is made of the run `source` notes under "derived_from"."""
    step_dir = resolve_step_dir(source.run_dir)
    meta = read_meta(step_dir)
    return {
        "run": source.run_name,
        "step": meta["step"],
        "model_sha256": meta["files"]["model.safetensors"]["sha256"],
        "pos_emb": source.model.pos_emb,
    }


def is_derived(config: Config, source: Config) -> bool:
    """Is config's run folder what `derive` makes of the source as it is now?

    Raises UserError if there is a run of its own in it.
    """
    if not (config.run_dir / "ckpt" / "last").is_file():
        return False
    meta = read_meta(resolve_step_dir(config.run_dir))
    if "derived_from" not in meta:
        raise UserError(
            f"{config.run_dir}: a trained run, but the experiment makes it of {source.run_dir};"
            " move the folder away or rename the arm"
        )
    return meta["derived_from"] == origin(source) and meta["config"] == config_to_dict(config)


def derive(config: Config, source: Config) -> None:
    """Make config's run folder of the weights that `source` has trained, under config's pos_emb.

    The weights are a hard link where the file system has them, else a copy. There are no metrics,
    no optimizer and no validation loss: nothing was trained. Both meta.json say "derived_from".
    """
    note = {"derived_from": origin(source)}
    old = resolve_step_dir(source.run_dir)
    tmp = config.run_dir.with_name(config.run_dir.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    new = tmp / "ckpt" / old.name
    new.mkdir(parents=True)
    try:
        os.link(old / "model.safetensors", new / "model.safetensors")
    except OSError:
        shutil.copyfile(old / "model.safetensors", new / "model.safetensors")
    meta = read_meta(old)
    files = {"model.safetensors": meta["files"]["model.safetensors"]}
    nothing = dict.fromkeys(("val_loss", "best_val_loss", "best_step", "wandb_id"))
    meta |= nothing | note | {"config": config_to_dict(config), "files": files}
    facts = json.loads((source.run_dir / "meta.json").read_text(encoding="utf-8"))
    for folder, record in ((new, meta), (tmp, facts | note)):
        write_text_atomic(folder / "meta.json", json.dumps(record, indent=2) + "\n")
    write_text_atomic(tmp / "ckpt" / "last", new.name + "\n")
    write_text_atomic(tmp / "config.toml", config_to_toml(config))
    write_text_atomic(tmp / "metrics.jsonl", "")
    if config.run_dir.exists():
        shutil.rmtree(config.run_dir)
    os.replace(tmp, config.run_dir)
