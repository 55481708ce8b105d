"""Perplexity at and beyond the training context, on held-out text.

    python -m scripts.eval_perplexity runs/demo_rove --lengths 256,1024,4096 --yarn none,auto,4
    torchrun --nproc_per_node=8 -m scripts.eval_perplexity gpt2/ --data pg19.jsonl --out ppl.json

docs/evaluation.md says what is measured and why. In short: each document gives one segment of the
longest length. `last` (the headline) scores the same last K tokens of it at every length, so only
the context changes; `disjoint` cuts it into windows and scores everything; `curve` is the loss by
position; `sliding` scores everything too, and lets windows overlap. A killed evaluation goes on
where it was.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro

from data.shards import MANIFEST, load_manifest, read_shard, shard_paths
from data.text import file_units, find_files, read_file
from data.tokenizer import Tokenizer, check_tokenizer, recorded_tokenizer
from model import GPTConfig
from nanorove import stats
from nanorove.distributed import DistInfo, init_distributed, run_distributed
from nanorove.errors import UserError
from nanorove.evaluation import (
    Subject,
    finish,
    header,
    open_output,
    open_subject,
    parse_yarn,
    resumable,
    yarn_factor,
)
from nanorove.files import read_json, sha256_file
from nanorove.hf import RUN_JSON
from nanorove.scoring import Span, batches, score

K_MAX = 256  # tokens scored at the end of a segment: the stride of YaRN's evaluation
FORWARD_TOKENS = 16384  # short windows are batched up to this many tokens
FIRST_BIN = 64  # the curve's first bin ends here, each further one at twice the end before it
QUANTITIES = ("last", "disjoint", "curve", "sliding")


@dataclass(frozen=True)
class Args:
    """Perplexity against context length, the same held-out tokens at every length."""

    run: tyro.conf.Positional[Path]
    """A run folder (its last checkpoint), a step folder, or a folder with a HuggingFace GPT-2."""
    lengths: str | None = None
    """Window lengths in tokens, the leading end-of-text included; default: from half to 16 times
    the training context, which is 512,1024,2048,4096,8192,16384 for one of 1024."""
    yarn: str = "none,auto"
    """YaRN settings: none (as trained), auto (factor = length / block_size), or a number."""
    quantities: str = "last,disjoint,curve"
    """Of last, disjoint, curve and sliding; sliding reads each token length / stride times."""
    text: Literal["long_docs", "packed_stream"] = "long_docs"
    """Documents that fill the longest length, or all documents one behind the other."""
    data: Path | None = None
    """Data folder whose validation split to use, or a .jsonl or .parquet file with a text in the
    field `text`; default: the folder that the run was trained on."""
    documents: int | None = None
    """Use the first N documents that are long enough, or the first N segments of the packed
    stream; default: all of them."""
    stride: int = 256
    """By how many tokens sliding windows advance."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the transformer (bfloat16: autocast); head and loss are always float32."""
    out: Path | None = None
    """Result file; default: RUN/eval/perplexity.json, and for a step folder
    RUN/eval/perplexity_step_XXXXXXXX.json (perplexity_packed... for the packed stream)."""


def main(args: Args) -> dict[str, Any]:
    """Evaluate and write the result file; returns its content."""
    settings, quantities = parse_yarn(args.yarn), parse_quantities(args.quantities)
    if args.documents is not None and args.documents < 2:
        raise UserError(f"--documents {args.documents}: at least 2, one document has no spread")
    if args.stride < 1:
        raise UserError(f"--stride {args.stride}: windows advance by at least 1 token")
    lengths = parse_lengths(args.lengths) if args.lengths is not None else None
    info = init_distributed()
    subject = open_subject(args.run)
    lengths = lengths or default_lengths(subject.config)
    packed = args.text == "packed_stream"
    name = "perplexity_packed" if packed else "perplexity"
    out, journal = open_output(subject, name, args.out, info=info)

    tokenizer = recorded_tokenizer(subject.tokenizer, subject.path)
    tokens, where, data = read_tokens(args.data, subject, tokenizer)
    choose = pack if packed else long_documents
    segments, text = choose(tokens, tokenizer.eot, lengths, args.documents, where)
    L, K = lengths[-1], min(K_MAX, lengths[0] // 2)

    # none and auto are one factor up to block_size: what is equal is computed once
    factors = {(s, n): yarn_factor(s, n, subject.config) for s in settings for n in lengths}
    plans: dict[float, Plan] = {}
    for (setting, length), factor in factors.items():
        for quantity in quantities:
            no_curve = length < L or setting == "auto"
            if isinstance(factor, str) or (quantity == "curve" and no_curve):
                continue
            windows = plans.setdefault(factor, {}).setdefault(length, {})
            for begin, end, scored in cut(quantity, L - 1, length, K, args.stride):
                windows.setdefault((begin, end), {})[quantity] = scored

    record = {
        **header("perplexity", subject, info, args.dtype),
        "data": data,
        "text": args.text,
        "settings": {
            "lengths": lengths,
            "yarn": settings,
            "quantities": quantities,
            "stride": args.stride,
            "documents": args.documents,
        },
        "seed": None,  # nothing is drawn: the first documents in the order of the text
        "protocol": protocol(packed, L, K, args.stride),
        "last_k": K,
        **text,
    }
    eot = None if packed else tokenizer.eot
    sums: Sums = {}
    for factor, plan in sorted(plans.items()):
        sums |= window_sums(
            subject, factor, plan, segments, eot, args.dtype, info, journal, key=record
        )
    bytes_of = np.array([len(b) for b in tokenizer.token_bytes()])[segments[:, 1:]]  # (D, L - 1)
    record["results"] = [
        entry(quantity, setting, length, factor, plans, sums, bytes_of)
        for quantity in quantities
        if quantity != "curve"
        for (setting, length), factor in factors.items()
    ]
    if "curve" in quantities:
        record["curve"] = [curve(s, factors[s, L], L, sums) for s in settings]
    finish(out, record, journal, info)
    for r in record["results"]:
        found = f"ppl {r['ppl']:.3f}" if r["factor"] else f"n/a: {r['reason']}"
        info.print0(f"{r['quantity']:<8} {r['length']:>6} tokens, YaRN {r['yarn']:<4} {found}")
    return record


# -----------------------------------------------------------------------------
# what is asked for


def default_lengths(config: GPTConfig) -> list[int]:
    """From half to 16 times the training context: 512 ... 16384 for one of 1024."""
    return sorted({max(4, config.context * 2**i // 2) for i in range(6)})


def parse_lengths(text: str) -> list[int]:
    """ "256,512" -> [256, 512], ascending, each once. Raises UserError."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--lengths {text}: write whole numbers, e.g. 256,512,1024") from None
    if lengths[0] < 4:
        raise UserError(f"--lengths {text}: a window has at least 4 tokens, {lengths[0]} is less")
    return lengths


def parse_quantities(text: str) -> list[str]:
    """ "disjoint,last" -> ["last", "disjoint"], in the order of QUANTITIES. Raises UserError."""
    asked = {part.strip() for part in text.split(",")}
    if unknown := sorted(asked - set(QUANTITIES)):
        raise UserError(f"--quantities {text}: {unknown[0]!r} is none of {', '.join(QUANTITIES)}")
    return [quantity for quantity in QUANTITIES if quantity in asked]


# -----------------------------------------------------------------------------
# text


def read_tokens(
    path: Path | None, subject: Subject, tokenizer: Tokenizer
) -> tuple[np.ndarray, Path, dict[str, Any]]:
    """One stream (N,) uint16 in which end-of-text leads each document, where it is from, and what
    the record says of it.

    path: a data folder or a file of texts; None is what the run was trained on. Raises UserError
    for what cannot be read, for a shard that was changed, and for another tokenizer's folder.
    """
    meta = read_json(subject.path / "meta.json") or read_json(subject.path / RUN_JSON) or {}
    trained_on = {"trained_on_manifest_sha256": meta.get("data", {}).get("manifest_sha256")}
    if path is None:
        own = meta.get("config", {}).get("data", {}).get("dir")
        if own is None:
            raise UserError(
                f"{subject.path}: does not say what it was trained on; name a data folder or a"
                " .jsonl file with --data"
            )
        path = Path(own)
    if path.is_file():
        ((_, file),) = find_files(path)
        texts = [text for unit in file_units(file) for text in read_file(unit, "text")]
        # a literal <|endoftext|> within a text is ordinary tokens: the id comes from here alone
        parts = [part for t in texts for part in ([tokenizer.eot], tokenizer.encode(t or ""))]
        tokens = np.concatenate([[], *parts]).astype(np.uint16)
        return tokens, path, {"file": str(path), "sha256": sha256_file(path), **trained_on}
    manifest = load_manifest(path)
    check_tokenizer(tokenizer, manifest["tokenizer"], f"{path}/{MANIFEST}")
    paths = shard_paths(path, manifest, "val")
    shards = [{"file": p.name, "sha256": checked_sha256(p, manifest)} for p in paths]
    data = {
        "dir": str(path),
        "split": "val",
        "manifest_sha256": sha256_file(path / MANIFEST),
        **trained_on,
        "shards": shards,
    }
    return np.concatenate([read_shard(p) for p in paths]), path, data


def split_documents(tokens: np.ndarray, eot: int) -> list[np.ndarray]:
    """The documents of a token stream in which end-of-text leads each one, without it."""
    starts = np.flatnonzero(tokens == eot)
    ends = np.append(starts, len(tokens))[1:]
    return [tokens[s + 1 : e] for s, e in zip(starts, ends, strict=True)]


def long_documents(
    tokens: np.ndarray, eot: int, lengths: Sequence[int], wanted: int | None, where: Path
) -> tuple[np.ndarray, dict[str, Any]]:
    """Segments (D, L) uint16, L the longest length: end-of-text and the first L - 1 tokens of the
    first `wanted` documents (None: all) that have L tokens; and what the record says of them.

    Raises UserError if there are fewer, or fewer than the two that a spread needs.
    """
    documents, L = split_documents(tokens, eot), lengths[-1]
    sizes = np.array([len(d) for d in documents], dtype=np.int64)
    enough = {length: int((sizes >= length).sum()) for length in lengths}
    if enough[L] < (wanted or 2):
        counts = ", ".join(f"{n} of >= {length}" for length, n in enough.items())
        raise UserError(
            f"{where}: {wanted or 2} documents of >= {L} tokens are needed, but there are {counts}"
            " tokens: use shorter --lengths, fewer --documents or --data with longer documents"
        )
    chosen = np.flatnonzero(sizes >= L)[:wanted].tolist()
    segments = np.stack([np.append(eot, documents[i][: L - 1]) for i in chosen]).astype(np.uint16)
    counts = {
        "in_split": len(documents),
        "long_enough": enough,
        "used": len(chosen),
        "skipped_too_short": len(documents) - enough[L],
        "skipped_beyond_n": enough[L] - len(chosen),
        "truncated_to_segment": len(chosen),  # the segment is shorter than L tokens of text
    }
    of_segments = [
        {"document": i, "document_tokens": len(documents[i]), "sha256": sha256_of_tokens(s)}
        for i, s in zip(chosen, segments, strict=True)
    ]
    return segments, {"documents": counts, "segments": of_segments}


def pack(
    tokens: np.ndarray, eot: int, lengths: Sequence[int], wanted: int | None, where: Path
) -> tuple[np.ndarray, dict[str, Any]]:
    """The same from the stream as it stands: segments (D, L), the last token of each the first of
    the next, so that every token after the very first one is scored. Raises UserError likewise."""
    L = lengths[-1]
    found = max(0, len(tokens) - 1) // (L - 1)
    if found < (wanted or 2):
        raise UserError(
            f"{where}: {wanted or 2} segments of {L} tokens are needed, but {len(tokens):,} tokens"
            f" make {found}: use shorter --lengths, fewer --documents or --data with more text"
        )
    starts = [i * (L - 1) for i in range(wanted or found)]
    segments = np.stack([tokens[start : start + L] for start in starts])
    counts = {
        "in_split": int((tokens == eot).sum()),
        "segments_in_split": found,
        "used": len(starts),
        "skipped_beyond_n": found - len(starts),
        "skipped_tail_tokens": len(tokens) - 1 - found * (L - 1),
    }
    of_segments = [
        {"start": start, "sha256": sha256_of_tokens(s)}
        for start, s in zip(starts, segments, strict=True)
    ]
    return segments, {"documents": counts, "segments": of_segments}


# -----------------------------------------------------------------------------
# windows


class Window(NamedTuple):
    """The model reads an opening token and text[begin:end]; its last `scored` tokens are scored."""

    begin: int
    end: int
    scored: int


# length -> (begin, end) of a window -> quantity -> how many of its last tokens that one scores
Plan = dict[int, dict[tuple[int, int], dict[str, int]]]
# (quantity, factor, length) -> summed NLL of each segment: (D,), for the curve (D, bins)
Sums = dict[tuple[str, float, int], np.ndarray]


def cut(quantity: str, n: int, length: int, K: int, stride: int) -> list[Window]:
    """Windows of `length` tokens, the opening one included, in a segment of n tokens of text."""
    size = length - 1
    if quantity == "last":
        return [Window(n - size, n, K)]
    if quantity == "sliding":
        return list(slide(n, size, min(stride, size)))
    # the curve's length is the segment's, so it has one window
    return [Window(i * size, (i + 1) * size, size) for i in range((n + 1) // length)]


def slide(n: int, size: int, stride: int) -> Iterator[Window]:
    """Windows of `size` tokens of text (the last may be shorter) that score what is new."""
    begin = done = 0
    while done < n:
        end = min(begin + size, n)
        yield Window(begin, end, end - done)
        begin, done = begin + stride, end


def bin_edges(L: int) -> list[int]:
    """0, 64, 128, 256, ..., L: the curve's bins, in tokens read before the scored one."""
    edges = [0, FIRST_BIN]
    while edges[-1] < L:
        edges.append(2 * edges[-1])
    return [*edges[:-1], L]


def to_span(segment: np.ndarray, window: Window, eot: int | None) -> Span:
    """What the model reads and is asked; eot (None: the token that stands there) opens it."""
    ids = segment[window.begin : window.end + 1].copy()  # text[i] is segment[i + 1]
    if eot is not None:
        ids[0] = eot
    return Span(ids, len(ids) - window.scored, len(ids))


def window_sums(
    subject: Subject,
    factor: float,
    plan: Plan,
    segments: np.ndarray,
    eot: int | None,
    dtype: str,
    info: DistInfo,
    journal: Path,
    key: dict[str, Any],
) -> Sums:
    """Score the windows of the plan in all segments (D, L), at one YaRN factor.

    What several quantities want of a window comes from one forward pass; at the longest length
    that is all of them. Raises UserError for a loss that is not finite.
    """
    D, L = segments.shape
    # text[0] has one token before it
    first_of_bin = [max(edge, 1) - 1 for edge in bin_edges(L)[:-1]]
    rows = [(n, place, i) for n, windows in plan.items() for place in windows for i in range(D)]
    groups = [
        [to_span(segments[i], Window(*place, max(plan[n][place].values())), eot)]
        for n, place, i in rows
    ]
    units = batches(groups, FORWARD_TOKENS)
    model = subject.load(max_len=max(plan), yarn_factor=factor, device=info.device)

    def work(unit: int) -> list[dict[str, Any]]:
        try:
            found = score(model, [groups[r] for r in units[unit]], dtype=dtype)
        except UserError as error:
            raise UserError(f"{subject.path}, YaRN factor {factor:g}: {error}") from None
        values = []
        for r, (scored,) in zip(units[unit], found, strict=True):
            length, place, _ = rows[r]
            value: dict[str, Any] = {}
            for quantity, k in plan[length][place].items():
                nll = scored.nll[-k:]
                bins = np.add.reduceat(nll, first_of_bin) if quantity == "curve" else nll.sum()
                value[quantity] = bins.tolist()
            values.append(value)
        return values

    costs = [sum(groups[r][0].end for r in unit) for unit in units]
    label = f"YaRN factor {factor:g}"
    values = resumable(costs, work, info=info, journal=journal, key=key, label=label)
    sums: Sums = {}
    for unit, answers in zip(units, values, strict=True):
        for r, answer in zip(unit, answers, strict=True):
            length, _, i = rows[r]
            for quantity, value in answer.items():
                zeros = np.zeros((D, *np.shape(value)))
                sums.setdefault((quantity, factor, length), zeros)[i] += value
    return sums


# -----------------------------------------------------------------------------
# the result


def entry(
    quantity: str,
    setting: str,
    length: int,
    factor: float | str,
    plans: dict[float, Plan],
    sums: Sums,
    bytes_of: np.ndarray,
) -> dict[str, Any]:
    """One line of the results; bytes_of (D, L - 1) is the size of each token of the text."""
    result = {"quantity": quantity, "yarn": setting, "length": length}
    if isinstance(factor, str):
        return result | {"factor": None, "nll": None, "ppl": None, "reason": factor}
    s = sums[quantity, factor, length]
    windows = [(end, q[quantity]) for (_, end), q in plans[factor][length].items() if quantity in q]
    n = np.full(len(s), sum(k for _, k in windows))
    size = sum(bytes_of[:, end - k : end].sum(1) for end, k in windows)  # (D,)
    nll = stats.ratio(s, n)
    if nll > 700:  # exp of it is no number any more
        raise UserError(
            f"{length} tokens, YaRN factor {factor:g}: a loss of {nll:.0f} nats per token: the"
            " model's training has diverged"
        )
    return result | {
        "factor": factor,
        "nll": nll,
        "ppl": float(np.exp(nll)),
        # a stream of nothing but end-of-text has no bytes
        "bits_per_byte": float(s.sum() / (np.log(2) * size.sum())) if size.any() else None,
        "tokens": int(n.sum()),
        "sums": s.tolist(),
        "counts": n.tolist(),
        "bytes": size.tolist(),
    }


def curve(setting: str, factor: float | str, L: int, sums: Sums) -> dict[str, Any]:
    """The loss by the number of tokens that were read before, for a factor that is the same at all
    of them."""
    result = {"yarn": setting, "length": L}
    if setting == "auto" and not isinstance(factor, str):
        factor = (
            "auto has another factor for each length, so no window is the beginning of a"
            " longer one; give the factor as a number"
        )
    if isinstance(factor, str):
        return result | {"factor": None, "nll": None, "reason": factor}
    s, edges = sums["curve", factor, L], bin_edges(L)
    n = np.diff(np.maximum(edges, 1))  # tokens of a segment in each bin
    return result | {
        "factor": factor,
        "edges": edges,
        "nll": (s.sum(0) / (len(s) * n)).tolist(),
        "counts": n.tolist(),
        "sums": s.tolist(),
    }


def protocol(packed: bool, L: int, K: int, stride: int) -> dict[str, str]:
    """The rules in words."""
    if packed:
        rules = {
            "bos": "A token of the stream opens every window, counts in its length and is not"
            " scored: no end-of-text is added, those between documents are scored, and attention"
            " sees across them (unmasked), all as in training",
            "segment": f"consecutive pieces of {L:,} tokens of the packed stream",
        }
    else:
        rules = {
            "bos": "End-of-text opens every window, counts in its length and is not scored",
            "segment": f"one segment, end-of-text and its first {L - 1:,} tokens",
        }
    return rules | {
        "last": f"the last {K} tokens of the segment are scored, the same at every length",
        "disjoint": "segment / length (rounded down) windows of length - 1 text tokens, all"
        " scored, with contexts of every length up to the window's",
        "curve": "the whole segment is one window, its loss by the number of tokens read before",
        "sliding": f"windows advance by {stride} tokens (length - 1 if that is less); the first is"
        " scored whole, the others where they are new, so every token of the segment once",
        "weighting": "Perplexity is exp(sum of NLL / number of tokens), token-weighted",
        "bits_per_byte": "sum of NLL / (ln 2 x UTF-8 bytes of the tokens that were scored)",
    }


# -----------------------------------------------------------------------------
# identities


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


if __name__ == "__main__":
    run_distributed(lambda: main(tyro.cli(Args, prog="python -m scripts.eval_perplexity")))
