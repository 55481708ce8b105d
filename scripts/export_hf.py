"""
A checkpoint as a folder that transformers loads, without this repository:
    python -m scripts.export_hf runs/gpt2_124m_rove exported/rove --push NAME/rove
"""

import json
import os
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import tyro

from data.tokenizer import (
    EOT_TEXT,
    Tokenizer,
    byte_characters,
    get_tokenizer,
    mergeable_ranks,
    vocab_bpe,
)
from model import GPT, GPTConfig
from nanorove.checkpoint import load_model, resolve_step_dir
from nanorove.errors import UserError, run_cli
from nanorove.files import read_json, sha256_file
from nanorove.hf import RUN_JSON, code_files, to_hf_config, to_hf_state
from nanorove.results import POS_EMB, yarn_words


@dataclass(frozen=True)
class Args:
    """Write a folder for AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)."""

    run: Annotated[str, tyro.conf.Positional]
    """A run folder (its last checkpoint) or a step folder."""
    dir: Annotated[Path, tyro.conf.Positional]
    """Where to write; must not exist yet."""
    yarn_factor: float | None = None
    """Instead of the checkpoint's own: a model for yarn_factor times the trained context."""
    push: str | None = None
    """Also upload to this repository (USER/NAME) on the Hub, new ones private. Log in before:
    hf auth login."""


def main() -> None:
    args = tyro.cli(Args, prog="python -m scripts.export_hf")
    if args.push is not None:
        check_repo(args.push)
    if args.dir.exists():
        raise UserError(f"{args.dir}: is there already; delete it or name another folder")
    step_dir = resolve_step_dir(args.run)
    # nothing is computed, so the rotary table of a long context need not be made
    model, meta = load_model(step_dir, yarn_factor=args.yarn_factor, max_len=1)
    tokenizer = get_tokenizer(meta["data"]["tokenizer"]["name"])
    args.dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{args.dir.name}.", dir=args.dir.parent) as tmp:
        whole = Path(tmp) / args.dir.name
        whole.mkdir()
        write_folder(whole, model, meta, tokenizer, step_dir, args.push or args.dir.as_posix())
        os.replace(whole, args.dir)  # all of it, or nothing
    print(f"wrote {args.dir}: {', '.join(sorted(p.name for p in args.dir.iterdir()))}")
    if args.push is not None:
        push(args.dir, args.push)


def write_folder(
    folder: Path,
    model: GPT,
    meta: dict[str, Any],
    tokenizer: Tokenizer,
    step_dir: Path,
    name: str,
) -> None:
    """Fill an empty folder; `name` is where the card's example finds it: on the Hub, or here."""
    config = model.config
    state = to_hf_state(model.state_dict(), config)
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {
        "bos_token_id": tokenizer.eot,
        "eos_token_id": tokenizer.eot,
        "pad_token_id": tokenizer.eot,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 50,
        "max_new_tokens": min(200, config.context // 2),
    }
    run = {k: v for k, v in meta.items() if k not in ("files", "wandb_id")}
    for file, values in {
        "config.json": to_hf_config(config, tokenizer.eot),
        "generation_config.json": generation,
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": EOT_TEXT,
            "eos_token": EOT_TEXT,
            "model_max_length": config.context,
            "clean_up_tokenization_spaces": False,
        },
        RUN_JSON: run,
    }.items():
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (folder / file).write_text(text, encoding="utf-8")
    if config.pos_emb != "learned":
        for path in code_files():
            shutil.copyfile(path, folder / path.name)
    card = model_card(config, model.num_params(), meta, step_dir, name)
    (folder / "README.md").write_text(card, encoding="utf-8")


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer in the format of HuggingFace's `tokenizers`: byte-level BPE, without merges for
    the bytes. A text begins with end-of-text, as every document did in training."""
    char_of = byte_characters()
    if tokenizer.name == "gpt2":
        file = vocab_bpe()
        ranks = mergeable_ranks(file)
        merges = [line.split(" ") for line in file.decode().split("\n")[1:-1]]
    else:
        ranks, merges = {bytes([b]): b for b in range(256)}, []
    vocab = {"".join(char_of[b] for b in token): rank for token, rank in ranks.items()}
    special = {"id": tokenizer.eot, "content": EOT_TEXT, "special": True, "single_word": False,
               "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}  # fmt: skip
    start = {"SpecialToken": {"id": EOT_TEXT, "type_id": 0}}
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, other],
            "special_tokens": {
                EOT_TEXT: {"id": EOT_TEXT, "ids": [tokenizer.eot], "tokens": [EOT_TEXT]}
            },
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab | {EOT_TEXT: tokenizer.eot},
            "merges": merges,
        },
    }


# -----------------------------------------------------------------------------
# the model card


def model_card(
    config: GPTConfig, params: int, meta: dict[str, Any], step_dir: Path, name: str
) -> str:
    """README.md of the folder, made of what the run left behind."""
    run, train = meta["config"], meta["config"]["train"]
    unit = "byte" if meta["data"]["tokenizer"]["name"] == "bytes" else "token"
    tokens = meta["step"] * train["total_batch_size"]
    origin = f"trained with nanoRoVE: step {meta['step']:,} of run `{run['run_name']}`"
    if "imported_from" in meta:
        origin = f"imported from `{meta['imported_from']}`, not trained with nanoRoVE"
    remote, code = ", trust_remote_code=True", (
        "\nThe class is not part of transformers: `trust_remote_code=True` runs `model.py` and"
        "\n`modeling_nanorove.py` of this folder. A longer context: `yarn_factor=4.0`, or"
        " `max_len=...` for\na longer table alone. Prompts of a batch must have one length: there"
        " are no attention masks, and\nleft padding is refused.\n"
    )  # fmt: skip
    if config.pos_emb == "learned":
        remote, code = "", ""
    context = f"{config.block_size} trained"
    if config.yarn_factor != 1:
        context += f", stretched to {config.context} by YaRN (factor {config.yarn_factor:g})"
    if run["model"]["yarn_factor"] != config.yarn_factor:
        context += ", which it was not trained with"
    recipe = {
        "layers, heads, width": f"{config.n_layer}, {config.n_head}, {config.n_embd}",
        "parameters": f"{params:,} (embedding tied and padded to {config.padded_vocab_size} rows)",
        "positions": config.pos_emb + (f", base {config.rope_base:g}" if config.rotary else ""),
        f"context in {unit}s": context,
    }
    if "imported_from" not in meta:
        recipe |= {
            f"trained on {unit}s": f"{tokens:,} = {meta['step']:,} steps of"
            f" {train['total_batch_size']:,}",
            "optimizer": f"AdamW, betas {train['beta1']:g} and {train['beta2']:g}, weight decay"
            f" {train['weight_decay']:g} on matrices, clipping at {train['grad_clip']:g}",
            "learning rate": f"{train['learning_rate']:g}, {train['warmup_steps']} warm-up steps,"
            f" {train.get('schedule', 'cosine')} to {train['min_lr']:g} at step"
            f" {train['max_steps']:,}",
            "seed": run["seed"],
            "started from": run.get("init_from", "random weights"),
            "versions": ", ".join(f"{k} {v}" for k, v in meta.get("versions", {}).items()),
        }
    quoted = json.dumps(name, ensure_ascii=False)
    table = "\n".join(f"| {key} | {value} |" for key, value in recipe.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [nanorove, gpt2, {config.pos_emb}]
---

# {name.rpartition("/")[2]}

A GPT-2 with positions of kind {POS_EMB[config.pos_emb]}, {origin}.
RoVE is described in [arXiv 2606.11275](https://arxiv.org/abs/2606.11275).

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({quoted}{remote})
tokenizer = AutoTokenizer.from_pretrained({quoted}{remote})
ids = tokenizer("A text that begins", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids)[0]))
```
{code}
## Data

{data_words(meta)}
Documents are led by `{EOT_TEXT}`; the tokenizer here puts it in front of a text by itself.

## Recipe

| | |
|---|---|
{table}

## Results

{results(meta, step_dir, unit)}
## Limits

It continues text; it follows no instructions, and nothing was done against false or harmful
output. What it knows is what the data above says. Beyond its context \
{"there are no positions" if config.pos_emb == "learned" else "it gets worse"}. Numbers of a
single seed differ by what another seed would change.
"""


def data_words(meta: dict[str, Any]) -> str:
    """What the run was trained on, from its data folder if that is still the same."""
    if "imported_from" in meta:
        return "Not known here.\n"
    folder = Path(meta["config"]["data"]["dir"])
    tokenizer = meta["data"]["tokenizer"]["name"]
    path = folder / "manifest.json"
    if not path.is_file() or sha256_file(path) != meta["data"]["manifest_sha256"]:
        return f"`{folder.name}`, tokenizer `{tokenizer}`.\n"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    train = sum(shard["tokens"] for shard in manifest["shards"] if shard["split"] == "train")
    source = ", ".join(
        f"{k} {' '.join(map(str, v)) if isinstance(v, (dict, list)) else v}"
        for k, v in manifest["source"].items()
    )
    return (
        f"`{manifest['name']}` ({source}): {train:,} training tokens in"
        f" {manifest['documents']['train']:,} documents, tokenizer `{tokenizer}`.\n"
    )


def results(meta: dict[str, Any], step_dir: Path, unit: str) -> str:
    """Validation loss, and perplexity against context if scripts.eval_perplexity was run."""
    lines = []
    if meta["val_loss"] is not None:
        lines.append(f"Validation loss {meta['val_loss']:.4f} nats per {unit}, as trained.\n")
    found = read_json(step_dir.resolve().parent.parent / "eval" / "perplexity.json") or {}
    same = found.get("model_sha256") == meta["files"]["model.safetensors"]["sha256"]
    entries = [e for e in found.get("results", []) if e["quantity"] == "last" and e["nll"]] * same
    if entries:
        lengths = sorted({e["length"] for e in entries})
        lines += [
            f"Perplexity per {unit} of the same last {found['last_k']} {unit}s of held-out"
            " documents, by context:\n",
            f"| | {' | '.join(map(str, lengths))} |",
            f"|---{'|---' * len(lengths)}|",
        ]
        for yarn in dict.fromkeys(e["yarn"] for e in entries):
            ppl = {e["length"]: f"{e['ppl']:.2f}" for e in entries if e["yarn"] == yarn}
            row = " | ".join(ppl.get(length, "") for length in lengths)
            lines.append(f"| {yarn_words(yarn)} | {row} |")
    return "\n".join(lines or ["Not evaluated."]).rstrip("\n") + "\n"


# -----------------------------------------------------------------------------


def check_repo(repo: str) -> None:
    """Raise UserError unless `repo` is a name that the Hub can have."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push {repo}: {' '.join(str(error).split())}") from None
    if "/" not in repo:
        raise UserError(f"--push {repo}: whose? write USER/{repo}")


def push(folder: Path, repo: str) -> None:
    """Upload the folder to `repo` on the Hub. Raises UserError if the Hub does not take it."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=f"nanoRoVE: {folder.name}"
        )
    except Exception as error:  # the network, the Hub's answer: libraries have no common class
        line = " ".join(str(error).split())
        raise UserError(
            f"--push {repo}: {type(error).__name__}: {line} (logged in? hf auth login); {folder} is"
            f" written; to try again: hf upload --private {repo} {shlex.quote(str(folder))}"
        ) from None
    print(f"pushed to {commit.commit_url}")


if __name__ == "__main__":
    run_cli(main)
