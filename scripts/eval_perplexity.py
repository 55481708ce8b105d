"""Perplexity at and beyond the training context, on long held-out documents.

    python -m scripts.eval_perplexity runs/demo_rove --lengths 256,1024,4096 --yarn none,auto,4

docs/evaluation.md says what is measured and why. In short: each document gives one segment of the
longest length. `last` (the headline) scores the same last K tokens of it at every length, so only
the context changes; `disjoint` cuts it into windows and scores everything.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

from data.shards import MANIFEST, load_manifest, read_shard, shard_paths
from data.tokenizer import Tokenizer, get_tokenizer
from model import GPT, GPTConfig
from nanorove import stats
from nanorove.checkpoint import load_model, read_meta, resolve_step_dir
from nanorove.config import config_from_dict
from nanorove.errors import UserError, run_cli
from nanorove.files import sha256_file, write_text_atomic
from nanorove.runlog import git_state, versions
from nanorove.scoring import token_nll

SCHEMA = 1
K_MAX = 256  # tokens scored at the end of a segment: the stride of YaRN's evaluation
FORWARD_TOKENS = 16384  # short windows are batched up to this many tokens
QUANTITIES = ("last", "disjoint")


@dataclass(frozen=True)
class Args:
    """Perplexity against context length, the same held-out tokens at every length."""

    run: tyro.conf.Positional[Path]
    """A run folder (its last checkpoint) or a step folder."""
    lengths: str = "256,512,1024,2048,4096"
    """Window lengths in tokens, the leading end-of-text included."""
    yarn: str = "none,auto"
    """YaRN settings: none (as trained), auto (factor = length / block_size), or a number."""
    data: Path | None = None
    """Data folder whose validation split to use; default: the one the run was trained on."""
    documents: int | None = None
    """Use the first N documents that are long enough; default: all of them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the transformer (bfloat16: autocast); head and loss are always float32."""
    out: Path | None = None
    """Result file; default: RUN/eval/perplexity.json, and for a step folder
    RUN/eval/perplexity_step_XXXXXXXX.json."""


def main(args: Args) -> dict[str, Any]:
    """Evaluate and write the result file; returns its content."""
    lengths, settings = parse_lengths(args.lengths), parse_yarn(args.yarn)
    step_dir = resolve_step_dir(args.run)
    out = args.out or result_file(args.run, step_dir)
    meta = read_meta(step_dir)
    config = config_from_dict(meta["config"]).model
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    data_dir = args.data or Path(meta["config"]["data"]["dir"])
    manifest = load_manifest(data_dir)
    tokenizer = common_tokenizer(data_dir, step_dir, meta)
    paths = shard_paths(data_dir, manifest, "val")
    shards = {path: checked_sha256(path, manifest) for path in paths}
    documents = split_documents(np.concatenate([read_shard(p) for p in paths]), tokenizer.eot)
    chosen = choose(documents, lengths, args.documents, data_dir)
    segments = [documents[i][: lengths[-1]] for i in chosen]
    K = min(K_MAX, lengths[0] // 2)

    # none and auto are one factor up to block_size: what is equal is computed once
    factors = {(s, length): yarn_factor(s, length, config) for s in settings for length in lengths}
    jobs = sorted({(f, length) for (_, length), f in factors.items() if isinstance(f, float)})
    sums: dict[tuple[str, float, int], tuple[np.ndarray, np.ndarray]] = {}
    total = len(segments) * sum(length + lengths[-1] // length * length for _, length in jobs)
    with tqdm(total=total, unit="token", unit_scale=True, disable=None) as bar:
        for factor, length in jobs:
            model, _ = load_model(step_dir, yarn_factor=factor, max_len=length, device=device)
            for quantity in QUANTITIES:
                windows = [cut(quantity, s, length, K, tokenizer.eot) for s in segments]
                found = document_sums(model, windows, args.dtype, bar)
                if not np.isfinite(found[0]).all():
                    raise UserError(f"{step_dir}: the loss at {length} tokens is not finite")
                sums[quantity, factor, length] = found
            shown = [f"{q} {np.exp(stats.ratio(*sums[q, factor, length])):.3f}" for q in QUANTITIES]
            tqdm.write(f"{length:>6} tokens, YaRN factor {factor:<5g} ppl {', '.join(shown)}")

    results = []
    for quantity in QUANTITIES:
        for (setting, length), factor in factors.items():
            result = {"quantity": quantity, "yarn": setting, "length": length}
            if isinstance(factor, str):
                results.append(
                    result | {"factor": None, "nll": None, "ppl": None, "reason": factor}
                )
                continue
            s, n = sums[quantity, factor, length]
            nll = stats.ratio(s, n)
            result |= {"factor": factor, "nll": nll, "ppl": float(np.exp(nll))}
            result |= {"tokens": int(n.sum()), "sums": s.tolist(), "counts": n.tolist()}
            results.append(result)
    for reason in sorted({f for f in factors.values() if isinstance(f, str)}):
        print(f"n/a: {reason}")

    enough = long_enough(documents, lengths)
    record = {
        "schema": SCHEMA,
        "evaluation": "perplexity",
        "run": meta["config"]["run_name"],
        "step": meta["step"],
        "model_sha256": meta["files"]["model.safetensors"]["sha256"],
        "config": meta["config"],
        "config_sha256": sha256_of_json(meta["config"]),
        **git_state(),
        "versions": versions(),
        "device": str(device),
        "dtype": args.dtype,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        "data": {
            "dir": str(data_dir),
            "split": "val",
            "manifest_sha256": sha256_file(data_dir / MANIFEST),
            "trained_on_manifest_sha256": meta["data"]["manifest_sha256"],
            "shards": [{"file": path.name, "sha256": sha} for path, sha in shards.items()],
        },
        "settings": {"lengths": lengths, "yarn": settings, "documents": args.documents},
        "seed": None,  # nothing is drawn: the first documents in the order of the shard
        "protocol": {
            "bos": "End-of-text opens every window, counts in its length and is not scored",
            "segment": f"one segment, its first {lengths[-1]:,} text tokens",
            "last": f"the last {K} tokens of the segment are scored, the same at every length",
            "disjoint": "segment / length (rounded down) windows of length - 1 text tokens, all"
            " scored, with contexts of every length up to the window's",
            "weighting": "Perplexity is exp(sum of NLL / number of tokens), token-weighted",
        },
        "last_k": K,
        "documents": {
            "in_split": len(documents),
            "long_enough": enough,
            "used": len(chosen),
            "skipped_too_short": len(documents) - enough[lengths[-1]],
            "skipped_beyond_n": enough[lengths[-1]] - len(chosen),
            "truncated_to_segment": sum(len(documents[i]) > lengths[-1] for i in chosen),
        },
        "segments": [
            {"document": i, "document_tokens": len(documents[i]), "sha256": sha256_of_tokens(s)}
            for i, s in zip(chosen, segments, strict=True)
        ],
        "results": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(out, json.dumps(record, indent=1) + "\n")
    print(f"wrote {out}")
    return record


# -----------------------------------------------------------------------------
# what is asked for


def result_file(run: Path, step_dir: Path) -> Path:
    """Where the result goes if nothing is said. A run's perplexity.json speaks of its last step
    alone, so a step folder has a file of its own; raises UserError for one outside a run."""
    if step_dir != run:
        return run / "eval" / "perplexity.json"
    ckpt = step_dir.resolve().parent
    if ckpt.name != "ckpt" or not (ckpt / "last").is_file():
        raise UserError(f"{run}: a step folder outside a run; say with --out where the result goes")
    return ckpt.parent / "eval" / f"perplexity_{step_dir.resolve().name}.json"


def parse_lengths(text: str) -> list[int]:
    """ "256,512" -> [256, 512], ascending, each once. Raises UserError."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--lengths {text}: write whole numbers, e.g. 256,512,1024") from None
    if lengths[0] < 4:
        raise UserError(f"--lengths {text}: a window has at least 4 tokens, {lengths[0]} is less")
    return lengths


def parse_yarn(text: str) -> list[str]:
    """ "none,auto,4.0" -> ["none", "auto", "4"], each once. Raises UserError."""
    settings = []
    for setting in (part.strip() for part in text.split(",")):
        if setting not in ("none", "auto"):
            try:
                factor = float(setting)
            except ValueError:
                factor = 0.0
            if not 1 <= factor < float("inf"):
                raise UserError(
                    f"--yarn {text}: {setting!r} is neither none, auto nor a number >= 1"
                )
            setting = str(factor).removesuffix(".0")  # one name for one factor
        settings.append(setting)
    return list(dict.fromkeys(settings))


def yarn_factor(setting: str, length: int, config: GPTConfig) -> float | str:
    """The factor to evaluate `length` with, or why there is no such number (a sentence).

    A model that was extended with YaRN was trained with its factor, so `none` keeps that one and
    `auto` never goes below it.
    """
    if config.pos_emb == "learned" and length > config.block_size:
        return f"learned positions end at {config.block_size} tokens"
    if setting == "none":
        return config.yarn_factor
    if not config.rotary:
        return f"YaRN rescales rotary positions; this model has pos_emb {config.pos_emb!r}"
    if setting == "auto":
        return max(config.yarn_factor, length / config.block_size)
    return float(setting)


# -----------------------------------------------------------------------------
# documents and windows


def split_documents(tokens: np.ndarray, eot: int) -> list[np.ndarray]:
    """The documents of a token stream in which end-of-text leads each one, without it."""
    starts = np.flatnonzero(tokens == eot)
    ends = np.append(starts[1:], len(tokens))
    return [tokens[s + 1 : e] for s, e in zip(starts, ends, strict=True)]


def long_enough(documents: list[np.ndarray], lengths: list[int]) -> dict[int, int]:
    """{length: how many documents have at least that many tokens}."""
    sizes = np.array([len(d) for d in documents])
    return {length: int((sizes >= length).sum()) for length in lengths}


def choose(
    documents: list[np.ndarray], lengths: list[int], wanted: int | None, data_dir: Path
) -> list[int]:
    """Indices of the first `wanted` documents (None: all) that fill the longest length.

    Raises UserError if there are fewer, or fewer than the two that a spread needs.
    """
    if wanted is not None and wanted < 2:
        raise UserError(f"--documents {wanted}: at least 2, one document has no spread")
    found = [i for i, d in enumerate(documents) if len(d) >= lengths[-1]]
    if len(found) < (wanted or 2):
        counts = ", ".join(f"{n} of >= {t}" for t, n in long_enough(documents, lengths).items())
        raise UserError(
            f"{data_dir}: {wanted or 2} of >= {lengths[-1]} tokens are needed, but the validation"
            f" split has {counts} tokens: use shorter --lengths, fewer --documents or --data with"
            " longer documents"
        )
    return found[:wanted]


def cut(
    quantity: str, segment: np.ndarray, length: int, K: int, eot: int
) -> tuple[np.ndarray, np.ndarray]:
    """Windows of one segment: what the model reads (n, length - 1), and what is scored (n, k).

    A window is end-of-text and length - 1 text tokens; its last token is only a target. `last`
    is one window at the segment's end with k = K, `disjoint` are all that fit, k = length - 1.
    """
    segment = segment.astype(np.int64)
    if quantity == "last":
        text = segment[None, len(segment) - (length - 1) :]  # (1, length - 1)
        targets = text[:, -K:]
    else:
        n = len(segment) // length
        text = segment[: n * (length - 1)].reshape(n, length - 1)
        targets = text
    bos = np.full((len(text), 1), eot)
    return np.concatenate([bos, text[:, :-1]], axis=1), targets


def document_sums(
    model: GPT, windows: list[tuple[np.ndarray, np.ndarray]], dtype: str, bar: tqdm
) -> tuple[np.ndarray, np.ndarray]:
    """(summed NLL in float64, number of tokens scored) of each document, both (D,).

    windows: for each document idx (n, T) and targets (n, k), T and k the same for all.
    """
    device = next(model.parameters()).device
    idx = np.concatenate([i for i, _ in windows])
    targets = np.concatenate([t for _, t in windows])
    owner = np.repeat(np.arange(len(windows)), [len(i) for i, _ in windows])
    sums = np.zeros(len(windows))
    rows = max(1, FORWARD_TOKENS // idx.shape[1])
    for start in range(0, len(idx), rows):
        x, y = (torch.from_numpy(a[start : start + rows]).to(device) for a in (idx, targets))
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            nll = token_nll(model, x, y)
        np.add.at(sums, owner[start : start + rows], nll.double().sum(1).cpu().numpy())
        bar.update(x.numel() + len(x))  # with the last token of each window, a target only
    counts = np.array([t.size for _, t in windows])
    return sums, counts


# -----------------------------------------------------------------------------
# identities


def common_tokenizer(data_dir: Path, step_dir: Path, meta: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a data folder. Raises UserError if it is not that of the model as well."""
    recorded = load_manifest(data_dir)["tokenizer"]
    tokenizer = get_tokenizer(recorded["name"])
    check_tokenizer(tokenizer, recorded, f"{data_dir}/{MANIFEST}")
    check_tokenizer(tokenizer, meta["data"]["tokenizer"], f"{step_dir}")
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, recorded: dict[str, Any], where: str) -> None:
    """Raise UserError unless `recorded`, which was found in `where`, is this tokenizer."""
    if recorded["sha256"] != tokenizer.sha256:
        raise UserError(
            f"{where}: made with tokenizer {recorded['name']} {recorded['sha256'][:12]}, but the"
            f" text is in {tokenizer.name} {tokenizer.sha256[:12]}; give --data the model's own"
        )


def checked_sha256(path: Path, manifest: dict[str, Any]) -> str:
    """sha256 of a shard; raises UserError if it is not the one in the manifest."""
    found = sha256_file(path)
    wanted = next(s["sha256"] for s in manifest["shards"] if s["file"] == path.name)
    if found != wanted:
        raise UserError(
            f"{path}: sha256 {found[:12]}, but {MANIFEST} says {wanted[:12]}; prepare it again"
        )
    return found


def sha256_of_tokens(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()


def sha256_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Args, prog="python -m scripts.eval_perplexity")))
