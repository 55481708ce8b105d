"""Documents to token shards: what data.stdlib, data.fineweb_edu and data.text have in common.

Worker processes read and tokenise units of a source; the parent takes their results strictly in
order and only cuts shards. So the shards depend on the source and the settings, never on the
number of workers, and memory on the units in flight and one shard, never on the corpus.
"""

import functools
import hashlib
import importlib.metadata
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from data.shards import (
    MANIFEST,
    MANIFEST_FORMAT,
    MANIFEST_VERSION,
    MAX_TOKENS,
    check_ids,
    check_vocab_size,
    load_manifest,
    save_manifest,
    write_shard,
)
from data.tokenizer import Tokenizer, get_tokenizer, no_surrogates
from nanorove.errors import UserError

DELIMITER = "leading end-of-text"  # every document is [eot] + its tokens


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options that all sources share."""

    out: Path
    """Folder for the shards and their manifest."""
    tokenizer: Literal["gpt2", "bytes"]
    """GPT-2's byte pairs, or plain bytes for models of CPU size."""
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Processes that read and tokenise; the shards are the same for any number."""
    shard_tokens: int = 100_000_000
    """Tokens in a training shard; the last one holds the rest."""
    limit_tokens: int | None = None
    """Stop before the document that would pass this total, delimiters included."""
    val_tokens: int = 100_000_000
    """Validation is the longest prefix of whole documents that fits into this."""


@dataclass(frozen=True)
class Source:
    """Where documents come from: `read(unit)` for each of `units` gives texts, in a fixed order.

    Units and `read` travel to worker processes, so both must pickle. `units` may be an iterator
    that fetches as it goes. `description` goes into the manifest and says what was read, without
    paths of this machine: the same description means the same documents.
    """

    name: str
    description: dict[str, Any]
    units: Iterable[Any]
    read: Callable[[Any], Iterable[str | None]]
    deduplicate: bool = False
    packages: tuple[str, ...] = ()  # libraries whose versions the manifest records


class Tokenised(NamedTuple):
    """One unit after a worker had it. Arrays and lists have one entry a document, in order."""

    tokens: np.ndarray  # uint16, all documents end to end, each led by end-of-text
    lengths: list[int]  # tokens of each document, its end-of-text included; 0: nothing to keep
    text_bytes: list[int]  # UTF-8 bytes of each document
    digests: list[bytes]  # of the normalised text; empty unless the source deduplicates


def prepare(source: Source, options: PrepareOptions) -> dict:
    """Tokenise `source` into shards and a manifest in `options.out`; returns the manifest.

    Empty, whitespace-only and null documents are dropped and counted, and so are exact duplicates
    by normalised text if the source asks for it. A finished folder of the same source and settings
    is left as it is; an unfinished one starts again. Raises UserError for bad settings, a finished
    folder of other settings, an empty split, a full disk and a worker that died.
    """
    start = time.perf_counter()
    check_options(options)
    tokenizer = get_tokenizer(options.tokenizer)
    check_vocab_size(tokenizer.vocab_size)
    out, val_tokens = options.out, options.val_tokens
    manifest = new_manifest(source, options, tokenizer)
    if (out / MANIFEST).exists():
        return finished(out, manifest)
    clean(out, source.name)

    counts: Counter[str] = Counter()
    val = ShardWriter(out, source.name, "val", 0, val_tokens, tokenizer)
    train = ShardWriter(out, source.name, "train", 1, options.shard_tokens, tokenizer)
    units = tokenised_units(source, options)
    split, limit = val, options.limit_tokens
    with closing(units), tqdm(total=limit, unit="tok", unit_scale=True, disable=None) as bar:
        for document, text_bytes in kept_documents(units, counts):
            if limit is not None and val.tokens + train.tokens + len(document) > limit:
                break
            if split is val and val.tokens + len(document) > val_tokens:
                if not val.documents:
                    raise UserError(
                        f"{out}: the first document has {len(document):,} tokens, more than "
                        f"--val-tokens {val_tokens:,}, so validation would be empty; raise it"
                    )
                val.close()
                split = train
            split.add(document, text_bytes)
            bar.update(len(document))
            if train.documents % 1000 == 0:
                bar.set_postfix_str(f"{val.documents + train.documents:,} documents", False)
    if not train.documents:
        raise UserError(
            f"{out}: training would be empty, since all {val.documents:,} documents "
            f"({val.tokens:,} tokens) fit into validation (--val-tokens {val_tokens:,}); "
            "lower --val-tokens, raise --limit-tokens or give more text"
        )
    train.close()
    manifest["shards"] = val.shards + train.shards
    manifest["documents"] = {
        "val": val.documents,
        "train": train.documents,
        "empty": counts["empty"],
        "duplicate": counts["duplicate"],
    }
    manifest["text_bytes"] = {"val": val.text_bytes, "train": train.text_bytes}
    save_manifest(out, manifest)
    print(f"{out}: done, {summary(manifest)}, in {time.perf_counter() - start:.1f} s")
    return manifest


def kept_documents(
    units: Iterable[Tokenised], counts: Counter[str]
) -> Iterator[tuple[np.ndarray, int]]:
    """(tokens, bytes of text) of each document to keep, in order; counts those that are dropped."""
    seen: set[bytes] = set()
    for unit in units:
        ends = np.cumsum(unit.lengths, dtype=np.int64)
        for i, (length, end) in enumerate(zip(unit.lengths, ends.tolist(), strict=True)):
            if length == 0:
                counts["empty"] += 1
                continue
            if unit.digests:
                if unit.digests[i] in seen:
                    counts["duplicate"] += 1
                    continue
                seen.add(unit.digests[i])
            yield unit.tokens[end - length : end], unit.text_bytes[i]


class ShardWriter:
    """Cuts the token stream of one split into shards of exactly `size` tokens, the last shorter.

    A document may span several shards. A full buffer is written only when another token comes, so
    no shard is empty.
    """

    def __init__(
        self, out: Path, name: str, split: str, first: int, size: int, tokenizer: Tokenizer
    ) -> None:
        self.out, self.name, self.split, self.index = out, name, split, first
        self.tokenizer = tokenizer
        self.buffer = np.empty(size, dtype=np.uint16)  # takes memory only as it is filled
        self.used = self.starts = 0  # tokens in the buffer, documents that start in it
        self.tokens = self.documents = self.text_bytes = 0  # of the whole split
        self.shards: list[dict] = []

    def add(self, document: np.ndarray, text_bytes: int) -> None:
        """Append one document's tokens, its end-of-text first."""
        if self.used == len(self.buffer):
            self._write()
        self.starts += 1
        self.documents += 1
        self.tokens += len(document)
        self.text_bytes += text_bytes
        while len(document):
            if self.used == len(self.buffer):
                self._write()
            n = min(len(document), len(self.buffer) - self.used)
            self.buffer[self.used : self.used + n] = document[:n]
            self.used += n
            document = document[n:]

    def close(self) -> None:
        """Write what is left and give the buffer back."""
        if self.used:
            self._write()
        self.buffer = np.empty(0, dtype=np.uint16)

    def _write(self) -> None:
        file = f"{self.name}_{self.split}_{self.index:06d}.bin"
        tokens = self.buffer[: self.used]
        sha256 = write_shard(self.out / file, tokens, self.tokenizer.vocab_size)
        self.shards.append(
            {
                "file": file,
                "split": self.split,
                "tokens": self.used,
                "documents": self.starts,
                "sha256": sha256,
            }
        )
        line = f"{self.out / file}: {self.used:,} tokens, {self.starts:,} documents start in it"
        tqdm.write(line, file=sys.stderr)
        self.index += 1
        self.used = self.starts = 0


def tokenised_units(source: Source, options: PrepareOptions) -> Iterator[Tokenised]:
    """Tokenise the units of `source`, in order; at most two a worker are under way or waiting."""
    encode = functools.partial(tokenise_unit, source.read, options.tokenizer, source.deduplicate)
    if options.workers == 1:
        yield from map(encode, source.units)
        return
    # spawn on every system: what works on Linux then works on macOS (build-nanogpt#4)
    pool = ProcessPoolExecutor(
        options.workers, multiprocessing.get_context("spawn"), initializer=start_worker
    )
    pending: deque = deque()
    try:
        for unit in source.units:
            pending.append(pool.submit(encode, unit))
            if len(pending) == 2 * options.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"a worker process died (killed, or out of memory) while tokenising {source.name}; "
            f"run again, with fewer than --workers {options.workers} if memory is short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def tokenise_unit(
    read: Callable[[Any], Iterable[str | None]], tokenizer_name: str, deduplicate: bool, unit: Any
) -> Tokenised:
    """Read and tokenise one unit; runs in a worker."""
    tokenizer = cached_tokenizer(tokenizer_name)
    eot = np.array([tokenizer.eot], dtype=np.uint16)
    parts, result = [], Tokenised(np.empty(0, dtype=np.uint16), [], [], [])
    for text in read(unit):
        kept = text is not None and text != "" and not text.isspace()
        text = no_surrogates(text) if kept else ""
        if kept:
            ids = np.asarray(tokenizer.encode(text))
            check_ids(
                ids, tokenizer.vocab_size, f"tokenizer {tokenizer.name}"
            )  # before uint16 could wrap them
            parts += [eot, ids.astype(np.uint16)]
        result.lengths.append(1 + len(ids) if kept else 0)
        result.text_bytes.append(len(text.encode()))
        if deduplicate:
            result.digests.append(normalised_digest(text))
    return result._replace(tokens=np.concatenate(parts)) if parts else result


@functools.cache
def cached_tokenizer(name: str) -> Tokenizer:
    """get_tokenizer, once a process: building GPT-2's takes a tenth of a second."""
    return get_tokenizer(name)


def normalised_digest(text: str) -> bytes:
    """16 bytes that identify a text up to white space: every run of it counts as one space."""
    return hashlib.sha256(" ".join(text.split()).encode()).digest()[:16]


def start_worker() -> None:
    """Leave Ctrl-C to the parent, and never outlive it, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def new_manifest(source: Source, options: PrepareOptions, tokenizer: Tokenizer) -> dict:
    """The part of the manifest that is known before the work: what was asked for."""
    packages = ["numpy", *(["tiktoken"] if tokenizer.name == "gpt2" else []), *source.packages]
    return {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "name": source.name,
        "source": source.description,
        "tokenizer": {
            "name": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "eot": tokenizer.eot,
            "sha256": tokenizer.sha256,
        },
        "delimiter": DELIMITER,
        "settings": {
            "shard_tokens": options.shard_tokens,
            "limit_tokens": options.limit_tokens,
            "val_tokens": options.val_tokens,
        },
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
    }


def finished(out: Path, wanted: dict) -> dict:
    """The manifest of a finished folder, if it is what is `wanted`; otherwise UserError."""
    try:
        manifest = load_manifest(out)
    except UserError as error:
        raise UserError(f"{error} (to do that here, remove {out / MANIFEST} first)") from None
    keys = ("name", "source", "tokenizer", "delimiter", "settings")
    old, new = ({k: v for k in keys for k, v in flat(k, m.get(k))} for m in (manifest, wanted))
    different = [k for k in sorted(old | new) if old.get(k) != new.get(k)]
    if different:
        shown = "; ".join(f"{k} {old.get(k)!r} there, {new.get(k)!r} asked" for k in different[:5])
        more = f" (and {len(different) - 5} more)" if len(different) > 5 else ""
        raise UserError(
            f"{out} is finished, with other settings: {shown}{more}; choose another --out or "
            "remove that folder"
        )
    print(f"{out}: complete already, nothing to do: {summary(manifest)}")
    return manifest


def flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, as (dotted key, value)."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from flat(f"{key}.{k}", v)
    else:
        yield key, value


def clean(out: Path, name: str) -> None:
    """Make the folder, or remove what an unfinished run of the same name left in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for pattern in (f"{name}_val_*.bin", f"{name}_train_*.bin"):
            for file in [*out.glob(pattern), *out.glob(pattern + ".tmp")]:
                file.unlink()
        (out / (MANIFEST + ".tmp")).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; choose a folder to write to") from None


def check_options(options: PrepareOptions) -> None:
    """Raise UserError for a number that makes no sense."""
    for key, most in (
        ("workers", 1024),
        ("shard_tokens", MAX_TOKENS),
        ("limit_tokens", 2**63 - 1),
        ("val_tokens", MAX_TOKENS),
    ):
        value = getattr(options, key)
        if value is not None and not 1 <= value <= most:
            raise UserError(f"--{key.replace('_', '-')} {value} is not within 1..{most}")


def summary(manifest: dict) -> str:
    """One line that adds up: documents, tokens and shards of each split."""
    documents, tokens, shards = manifest["documents"], Counter(), Counter()
    for shard in manifest["shards"]:
        tokens[shard["split"]] += shard["tokens"]
        shards[shard["split"]] += 1
    return (
        f"{documents['val'] + documents['train']:,} documents = {documents['val']:,} val + "
        f"{documents['train']:,} train ({documents['empty']:,} empty and "
        f"{documents['duplicate']:,} duplicate dropped); {tokens.total():,} tokens = "
        f"{tokens['val']:,} val + {tokens['train']:,} train; {shards.total():,} shards = "
        f"{shards['val']:,} val + {shards['train']:,} train"
    )
