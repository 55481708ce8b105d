"""Checkpoints: safetensors and JSON, nothing that runs code when it is read.

    runs/<run_name>/ckpt/step_00000100/{model.safetensors, optimizer.safetensors, meta.json}
    runs/<run_name>/ckpt/{last, best}      one line each: the name of a step folder

A step folder is written under a temporary name and renamed when everything is on the disk, so
what has a final name is whole; a folder that was damaged later is named, and a resume goes on from
the one before it.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from model import GPT, AttnBackend
from nanorove.config import Config, config_from_dict, config_to_dict
from nanorove.errors import UserError
from nanorove.files import fsync_dir, sha256_file, strict, write_text_atomic

SCHEMA = 1


def save_checkpoint(
    run_dir: Path,
    step: int,
    config: Config,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    meta: dict[str, Any],
) -> Path:
    """Write step folder `step` and point `last` at it; gives back the folder.

    `model` is the plain module, so that no wrapper's prefix gets into the keys. `meta` is what a
    resumed run must know besides (see train.py); sizes and hashes of the files are added. Raises
    UserError if the disk refuses, for example full; the checkpoints before it stay as they were.
    """
    ckpt_dir = run_dir / "ckpt"
    final = ckpt_dir / f"step_{step:08d}"
    tmp = ckpt_dir / f"{final.name}.tmp"
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        tmp.mkdir(parents=True)
        state = {name: p.detach().contiguous() for name, p in model.state_dict().items()}
        moments = _optimizer_tensors(model, optimizer)
        safetensors.torch.save_file(state, tmp / "model.safetensors")
        safetensors.torch.save_file(moments, tmp / "optimizer.safetensors")
        files = {}
        for path in sorted(tmp.iterdir()):
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            with path.open("rb") as file:
                os.fsync(file.fileno())
        meta = {"schema": SCHEMA, "step": step, "config": config_to_dict(config), **meta}
        write_text_atomic(tmp / "meta.json", json.dumps(meta | {"files": files}, indent=2) + "\n")
        _remove(final)  # a resumed run comes by the same step again
        os.replace(tmp, final)
        fsync_dir(ckpt_dir)
        write_text_atomic(ckpt_dir / "last", final.name + "\n")
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(tmp, ignore_errors=True)  # its space may be what others need
        raise UserError(
            f"{final}: not saved ({error}); the checkpoints before it are as they were:"
            " make room and go on with --resume"
        ) from None
    return final


def add_to_meta(step_dir: Path, **values: Any) -> None:
    """Note in a step folder's meta.json what was found out after it was saved."""
    meta = json.loads((step_dir / "meta.json").read_text())
    write_text_atomic(step_dir / "meta.json", json.dumps(strict(meta | values), indent=2) + "\n")


def mark_best(run_dir: Path, step: int | None) -> None:
    """Point `best` at step folder `step`, or at nothing."""
    pointer = run_dir / "ckpt" / "best"
    if step is None:
        pointer.unlink(missing_ok=True)
    else:
        write_text_atomic(pointer, f"step_{step:08d}\n")


def prune_checkpoints(run_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` step folders and the ones that `last` and `best` name."""
    ckpt_dir = run_dir / "ckpt"
    keep_names = {path.name for path in _step_dirs(run_dir)[:keep]}
    for pointer in ("last", "best"):
        if (ckpt_dir / pointer).exists():
            keep_names.add((ckpt_dir / pointer).read_text().strip())
    for path in ckpt_dir.glob("step_*"):
        if path.name not in keep_names:
            _remove(path)


def forget_after(run_dir: Path, step: int) -> list[str]:
    """Point `last` at step folder `step` and delete the ones after it; gives back their names."""
    write_text_atomic(run_dir / "ckpt" / "last", f"step_{step:08d}\n")
    after = [path for path in _step_dirs(run_dir) if path.name > f"step_{step:08d}"]
    for path in after:
        _remove(path)
    return [path.name for path in reversed(after)]


def _remove(path: Path) -> None:
    """Delete a step folder; a kill in the middle leaves no half of it under a final name."""
    if path.exists() and path.suffix != ".old":
        shutil.rmtree(old := path.with_name(path.name + ".old"), ignore_errors=True)
        path = path.rename(old)
    shutil.rmtree(path, ignore_errors=True)


def _step_dirs(run_dir: Path) -> list[Path]:
    """All step folders of a run, the newest first."""
    return sorted((run_dir / "ckpt").glob("step_????????"), reverse=True)


def find_resume_dir(run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The step folder to go on from, checked to the last bit; None if the run has none at all.

    That is the one `last` names; if it is damaged, `say` gets a line that names it, and the one
    before it is taken. Raises UserError if no folder is whole.
    """
    found = _step_dirs(run_dir)
    pointer = run_dir / "ckpt" / "last"
    last = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    if last and last not in [path.name for path in found]:
        say(f"{pointer} names {last!r}, which is not there")
    elif last:
        found = [path for path in found if path.name <= last]  # one may go back on purpose
    for path in found:
        try:
            check_files(path, read_meta(path))
            return path
        except UserError as error:
            say(f"{error}")
    if found:
        raise UserError(f"{run_dir}: every checkpoint is damaged; choose another --run_name")
    return None


def resolve_step_dir(path: str | Path) -> Path:
    """A step folder, or the last one of a run folder. Raises UserError if there is none."""
    path = Path(path)
    if (path / "meta.json").is_file() and (path / "model.safetensors").is_file():
        return path
    pointer = path / "ckpt" / "last"
    if not pointer.is_file():
        raise UserError(f"{path}: neither a run with a checkpoint nor a step folder (ckpt/step_*)")
    step_dir = path / "ckpt" / pointer.read_text().strip()
    if not (step_dir / "meta.json").is_file():
        raise UserError(f"{pointer} names {step_dir.name}, which is not there; give a step folder")
    return step_dir


def read_meta(step_dir: Path) -> dict[str, Any]:
    """meta.json of a step folder, its schema checked, its files compared with their sizes."""
    path = step_dir / "meta.json"
    try:
        meta = json.loads(path.read_text())
        if meta["schema"] != SCHEMA:
            raise UserError(f"{path}: schema {meta['schema']}, this code reads {SCHEMA}")
        for name, file in meta["files"].items():
            size = (step_dir / name).stat().st_size
            if size != file["bytes"]:
                raise UserError(
                    f"{step_dir / name}: {size} bytes, meta.json says {file['bytes']}: damaged;"
                    " use an earlier step"
                )
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: damaged checkpoint ({what}); use an earlier step") from None
    return meta


def check_files(step_dir: Path, meta: dict[str, Any], names: Iterable[str] | None = None) -> None:
    """Compare files of a step folder (all, or `names`) with the hashes in its meta.

    Raises UserError for one that differs. Reads them whole: about a second for a 124M model.
    """
    for name in names or meta["files"]:
        if sha256_file(step_dir / name) != meta["files"].get(name, {}).get("sha256"):
            raise UserError(
                f"{step_dir / name}: not the bytes that were saved (sha256): damaged;"
                " use an earlier step"
            )


def load_model(
    path: str | Path,
    *,
    yarn_factor: float | None = None,
    max_len: int | None = None,
    attn_backend: AttnBackend = "sdpa",
    device: torch.device | str = "cpu",
) -> tuple[GPT, dict[str, Any]]:
    """A run or step folder -> (the model in eval mode, the step's meta).

    yarn_factor: instead of the checkpoint's own; max_len: tokens the rotary table covers. Raises
    UserError for a folder that is none and for settings that the model cannot take.
    """
    step_dir = resolve_step_dir(path)
    meta = read_meta(step_dir)
    check_files(step_dir, meta, ["model.safetensors"])
    gpt_config = config_from_dict(meta["config"]).model
    try:
        if yarn_factor is not None:
            gpt_config = dataclasses.replace(gpt_config, yarn_factor=yarn_factor)
        model = GPT(gpt_config, max_len=max_len, attn_backend=attn_backend)
    except ValueError as error:
        raise UserError(f"{step_dir}: {error}") from None
    load_weights(model, step_dir)
    return model.to(device).eval(), meta


def load_weights(model: GPT, step_dir: Path) -> None:
    """Copy the weights of a step folder into `model`; every name and shape must match."""
    path = step_dir / "model.safetensors"
    try:
        model.load_state_dict(safetensors.torch.load_file(path), strict=True)
    except (RuntimeError, OSError, safetensors.SafetensorError) as error:
        lines = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be loaded into this model: {lines}") from None


def load_init_weights(model: GPT, config: Config) -> tuple[Path, dict[str, Any]]:
    """Start from another run's weights: the same model, but for block_size and yarn_factor.

    Gives back the step folder and {"step", "model_sha256"} of these weights. Raises UserError for
    another model and for a damaged file.
    """
    step_dir = resolve_step_dir(config.init_from)
    meta = read_meta(step_dir)
    theirs = config_from_dict(meta["config"]).model
    for key in ("pos_emb", "rope_base", "vocab_size", "n_layer", "n_head", "n_embd"):
        if getattr(theirs, key) != getattr(config.model, key):
            raise UserError(
                f"init_from {step_dir}: its model.{key} is {getattr(theirs, key)}, this config's"
                f" is {getattr(config.model, key)}; they must be equal"
            )
    check_files(step_dir, meta, ["model.safetensors"])
    load_weights(model, step_dir)
    sha256 = meta["files"]["model.safetensors"]["sha256"]
    return step_dir, {"step": meta["step"], "model_sha256": sha256}


def load_optimizer(model: GPT, optimizer: torch.optim.Optimizer, step_dir: Path) -> None:
    """Restore AdamW's moments; learning rate, betas and decay stay as the config has them."""
    path = step_dir / "optimizer.safetensors"
    names = {p: name for name, p in model.named_parameters()}
    state, index = {}, 0
    try:
        tensors = safetensors.torch.load_file(path)
        for group in optimizer.param_groups:
            for p in group["params"]:
                state[index] = {
                    k: tensors[f"{names[p]}.{k}"] for k in ("step", "exp_avg", "exp_avg_sq")
                }
                index += 1
    except (KeyError, OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: damaged ({error!r}); use an earlier step") from None
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _optimizer_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state under the names of the parameters: "<name>.exp_avg" and so on."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}.{key}": value.contiguous()
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }
