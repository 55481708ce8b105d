"""
A run made of a HuggingFace model: GPT-2 (folder or name on the Hub) or a folder of export_hf:
    python -m scripts.import_hf openai-community/gpt2 gpt2 --config configs/gpt2_124m_learned.toml
    python -m scripts.import_hf exported/gpt2_124m_rove rove_again
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from data.tokenizer import get_tokenizer
from nanorove.checkpoint import save_checkpoint
from nanorove.config import Config, config_from_dict, config_to_toml, load_config_file
from nanorove.errors import UserError, run_cli
from nanorove.files import read_json, write_text_atomic
from nanorove.hf import RUN_JSON, load_hf
from nanorove.runlog import git_state, versions


@dataclass(frozen=True)
class Args:
    """Make runs/RUN_NAME of a HuggingFace model: to sample, evaluate, or go on with (init_from)."""

    source: Annotated[str, tyro.conf.Positional]
    """A folder, or a repository on the Hub. Only safetensors weights are read."""
    run_name: Annotated[str, tyro.conf.Positional]
    config: Path | None = None
    """For a model that nanoRoVE did not export: a config file that says the rest (data, training).
    Its [model] section is replaced by the model's own."""


def main() -> None:
    args = tyro.cli(Args, prog="python -m scripts.import_hf")
    folder = Path(args.source)
    if not folder.is_dir():
        folder = download(args.source)
    model = load_hf(folder)
    run = read_run(folder / RUN_JSON)
    if (run is None) == (args.config is None):
        raise UserError(
            f"{args.source}: not exported by nanoRoVE; name a config file for the rest:"
            " --config configs/gpt2_124m_learned.toml" if run is None else
            f"--config {args.config}: {args.source} brings its own {RUN_JSON}; leave it out"
        )  # fmt: skip
    config = config_from_dict(run["config"]) if run else load_config_file(args.config)
    try:
        config = dataclasses.replace(config, run_name=args.run_name, model=model.config)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.run_dir.exists():
        raise UserError(f"{config.run_dir}: is there already; choose another name")

    meta = run or {
        "step": 0,
        "val_loss": None,
        "best_val_loss": None,
        "data": foreign_data(model),
        "imported_from": args.source,
    }
    meta = {k: v for k, v in meta.items() if k not in ("config", "schema")} | {"wandb_id": None}
    optimizer = torch.optim.AdamW(model.parameters())  # its moments do not travel
    step_dir = save_checkpoint(config.run_dir, meta.pop("step"), config, model, optimizer, meta)
    write_run_files(config, args.source, model.num_params())
    print(f"wrote {step_dir}: {model.config.pos_emb}, {model.num_params():,} parameters")


def read_run(path: Path) -> dict[str, Any] | None:
    """What export_hf noted of the run, None if there is no such file. Raises UserError for a file
    that it did not write."""
    run = read_json(path)
    if run is None:
        return None
    try:
        good = (
            isinstance(run["config"], dict)
            and type(run["step"]) is int
            and run["step"] >= 0
            and isinstance(run["data"]["tokenizer"]["name"], str)
            and isinstance(run["data"]["tokenizer"]["sha256"], str)
            and "manifest_sha256" in run["data"]
            and all(isinstance(run[k], float | int | None) for k in ("val_loss", "best_val_loss"))
        )
    except (KeyError, TypeError):
        good = False
    if not good:
        raise UserError(f"{path}: not what export_hf writes; export again, or delete it and name a"
                        " config file for the rest: --config")  # fmt: skip
    return run


def download(repo: str) -> Path:
    """config.json and safetensors of a repository on the Hub -> their folder in its cache."""
    from huggingface_hub import snapshot_download

    try:
        wanted = ["config.json", "*.safetensors", RUN_JSON]
        return Path(snapshot_download(repo, allow_patterns=wanted))
    except Exception as error:  # the network, the Hub's answer: libraries have no common class
        line = " ".join(str(error).split())
        raise UserError(f"{repo}: no such folder, and the Hub says: {line}") from None


def foreign_data(model: torch.nn.Module) -> dict[str, Any]:
    """The data section of the meta of a model that others trained. Raises UserError."""
    tokenizer = get_tokenizer("gpt2")
    if model.config.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"a vocabulary of {model.config.vocab_size}: only GPT-2's"
            f" ({tokenizer.vocab_size}) is known here"
        )
    about = {key: getattr(tokenizer, key) for key in ("name", "vocab_size", "eot", "sha256")}
    return {"manifest_sha256": None, "tokenizer": about}


def write_run_files(config: Config, source: str, params: int) -> None:
    """What train.py writes beside the checkpoints, as far as there is something to say."""
    facts = {
        **git_state(),
        "versions": versions(),
        "params": params,
        "imported_from": source,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_text_atomic(config.run_dir / "config.toml", config_to_toml(config))
    write_text_atomic(config.run_dir / "meta.json", json.dumps(facts, indent=2) + "\n")
    write_text_atomic(config.run_dir / "metrics.jsonl", "")  # nothing was trained here


if __name__ == "__main__":
    run_cli(main)
