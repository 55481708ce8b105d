"""Documents to token shards: what data.stdlib, data.fineweb_edu and data.text have in common.

Worker processes read and tokenise units of a source; the parent takes their results strictly in
order and only cuts shards. So the shards depend on the source and the settings, never on the
number of workers, and memory on the units in flight and one shard, never on the corpus.

After every shard progress.json says what is done and where the next shard begins. A run that was
interrupted, at any moment and in any way, goes on from there and ends with the same bytes.
"""

import fcntl
import functools
import hashlib
import importlib.metadata
import itertools
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
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
    read_json,
    save_json,
    save_manifest,
    write_shard,
)
from data.tokenizer import Tokenizer, get_tokenizer, no_surrogates
from nanorove.errors import UserError
from nanorove.files import sha256_file

DELIMITER = "leading end-of-text"  # every document is [eot] + its tokens
PROGRESS = "progress.json"
# UTF-8 bytes a token, for estimates only: FineWeb-Edu's for GPT-2, the truth for bytes
BYTES_PER_TOKEN = {"gpt2": 4.62, "bytes": 1.0}
ASCII_SPACE = b" \t\n\r\v\f"

COUNTS = ("val", "train", "empty", "duplicate", "in_val")  # of documents
ASKED = ("name", "source", "tokenizer", "delimiter", "settings")  # keys that must agree

# (number of a file of the source, number of a unit in it)
Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options that all sources share."""

    out: Path
    """Folder for the shards and their manifest."""
    tokenizer: Literal["gpt2", "bytes"]
    """GPT-2's byte pairs, or plain bytes for models of CPU size."""
    encoder: Literal["gigatoken", "tiktoken"] = "gigatoken"
    """Library that makes GPT-2's tokens. The tokens are the same: gigatoken is many times as fast,
    and tiktoken checks a sample of every unit."""
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
    """Where documents come from: `read(unit)` for each unit of each file gives texts, in a fixed
    order.

    `units(files, i)` gives the units of file number i. They and `read` travel to worker processes,
    so both must pickle. `description` goes into the manifest and says what was read, without paths
    of this machine: the same description means the same documents. Its "files" are the files to
    read, as JSON objects; a source that must ask the network for them has `list_files` instead,
    and one that has none counts as one file.
    """

    name: str
    description: dict[str, Any]
    units: Callable[[list, int], Iterable[Any]]
    read: Callable[[Any], Iterable[str | None]]
    list_files: Callable[[], list[dict]] | None = None
    text_bytes: Callable[[list[dict]], int] | None = None  # about, for the estimate
    discard: Callable[[dict], None] | None = None  # called with a file that is used up
    deduplicate: bool = False
    public_split: bool = False  # cut after exactly val_tokens tokens, through a document
    packages: tuple[str, ...] = ()  # libraries whose versions the manifest records


class Tokenised(NamedTuple):
    """One unit after a worker had it. Arrays and lists have one entry a document, in order."""

    tokens: np.ndarray  # uint16, all documents end to end, each led by end-of-text
    lengths: list[int]  # tokens of each document, its end-of-text included; 0: nothing to keep
    text_bytes: list[int]  # UTF-8 bytes of each document
    digests: list[bytes]  # of the normalised text
    seconds: float  # that the worker took


def prepare(source: Source, options: PrepareOptions) -> dict:
    """Tokenise `source` into shards and a manifest in `options.out`; returns the manifest.

    Empty, whitespace-only and null documents are dropped and counted; so are training documents
    whose normalised text stands in validation, and all exact duplicates by normalised text if the
    source asks for it. A finished folder of the same source and settings is left as it is, an
    unfinished one is verified and continued. Raises UserError for bad settings, a folder of other
    settings, with a damaged shard or with shards of others, an empty split, a full disk and a
    worker that died.
    """
    start = time.perf_counter()
    check_options(options, source)
    tokenizer = get_tokenizer(options.tokenizer)
    check_vocab_size(tokenizer.vocab_size)
    out = options.out
    manifest = new_manifest(source, options, tokenizer)
    if (out / MANIFEST).exists():
        return finished(out, manifest)
    with locked_folder(out):
        progress = read_progress(out, manifest)
        check_own(out, source.name, progress)
        if progress:
            manifest["source"] = progress["source"]
        elif source.list_files:
            manifest["source"]["files"] = source.list_files()
        files = manifest["source"].get("files", [None])
        writer = ShardWriter(out, manifest, source, tokenizer, progress)
        remove_temporary(out, source.name)
        expected = check_space(source, options, files, writer)
        write_units(source, options, files, writer, expected)
        if not writer.tokens["train"]:
            raise UserError(
                f"{out}: training would be empty, since all {writer.documents['val']:,} documents "
                f"({writer.tokens['val']:,} tokens) fit into validation (--val-tokens "
                f"{options.val_tokens:,}); lower --val-tokens, raise --limit-tokens or give more "
                "text"
            )
        writer.close()
        manifest |= {k: v for k, v in writer.state().items() if k not in ("split", "tokens")}
        manifest["shards"] = writer.shards
        manifest = save_manifest(out, manifest)
        (out / PROGRESS).unlink(missing_ok=True)
    print(f"{out}: done, {summary(manifest)}, in {time.perf_counter() - start:.1f} s")
    return manifest


def write_units(
    source: Source,
    options: PrepareOptions,
    files: list[dict | None],
    writer: "ShardWriter",
    expected: int | None,
) -> None:
    """Tokenise all units that are not in shards yet and hand them to `writer`, with a bar that
    counts tokens towards the `expected` ones."""
    units = tokenised_units(units_from(source, files, writer.place), source, options)
    done, text_bytes, start = writer.tokens.total(), 0, time.perf_counter()
    bar = tqdm(total=expected, initial=done, unit="tok", unit_scale=True, disable=None)
    with closing(units), bar:
        for n, (place, unit) in enumerate(units):
            if n == 0 and expected and len(unit.tokens):
                rate = len(unit.tokens) / unit.seconds * min(options.workers, os.cpu_count() or 1)
                print(
                    f"{writer.out}: about {(expected - done) / rate / 60:,.1f} minutes to go, at "
                    f"the {rate / 1e6:.2f} M tokens/s of the first unit with {options.workers} "
                    "workers (if reading and fetching keep up)"
                )
            if not writer.add_unit(place, unit):
                break
            text_bytes += sum(unit.text_bytes)
            documents = writer.documents["val"] + writer.documents["train"]
            rate = text_bytes / 1e6 / (time.perf_counter() - start)
            bar.set_postfix_str(f"{documents:,} documents, {rate:.1f} MB/s", False)
            bar.update(writer.tokens.total() - bar.n)


class ShardWriter:
    """Cuts documents, in order, into the shards of validation and then of training.

    Shards have exactly `val_tokens` or `shard_tokens` tokens, the last of a split fewer; a document
    may span several. A full buffer is written only when another token comes, so no shard is empty.
    After each shard progress.json holds all that is needed to go on with the next: the counts as
    they were before the unit that the shard ends in, and how many tokens of that unit are written.
    """

    def __init__(
        self,
        out: Path,
        manifest: dict,
        source: Source,
        tokenizer: Tokenizer,
        progress: dict | None = None,
    ) -> None:
        self.out, self.manifest, self.source, self.tokenizer = out, manifest, source, tokenizer
        settings = manifest["settings"]
        self.size = {"val": settings["val_tokens"], "train": settings["shard_tokens"]}
        self.limit = settings["limit_tokens"]
        # takes memory only as it is filled
        self.buffer = np.empty(max(self.size.values()), dtype=np.uint16)
        self.buffer_split, self.used, self.starts = "val", 0, 0  # starts: documents that start here
        state, next_shard = {}, {"place": (0, 0), "skip_tokens": 0, "seen": ""}
        if progress:
            next_shard = progress["next"]
            state = next_shard["state"]
        self.shards: list[dict] = list(progress["shards"]) if progress else []
        self.place: Place = tuple(next_shard["place"])
        self.skip: int = next_shard["skip_tokens"]  # tokens that come again and are written already
        digests = bytes.fromhex(next_shard["seen"])
        self.seen = {digests[i : i + 16]: None for i in range(0, len(digests), 16)}  # keeps order
        self.split: str = state.get("split", "val")
        self.documents = Counter(state.get("documents", dict.fromkeys(COUNTS, 0)))
        self.tokens = Counter(state.get("tokens", {"val": 0, "train": 0}))
        self.text_bytes = Counter(state.get("text_bytes", {"val": 0, "train": 0}))
        self.straddling: dict | None = state.get("straddling")

    def state(self) -> dict:
        """The counts so far, as JSON."""
        counts = {
            "split": self.split,
            "documents": dict(self.documents),
            "tokens": dict(self.tokens),
            "text_bytes": dict(self.text_bytes),
        }
        return counts | ({"straddling": self.straddling} if self.source.public_split else {})

    def add_unit(self, place: Place, unit: Tokenised) -> bool:
        """Append the documents of one unit; False if the limit is reached."""
        if place != self.place:
            self._check_nothing_missing()
        self.place, self.unit_tokens = place, 0
        self.before, self.seen_before = self.state(), len(self.seen)
        ends = np.cumsum(unit.lengths, dtype=np.int64).tolist()
        for length, end, *rest in zip(
            unit.lengths, ends, unit.text_bytes, unit.digests, strict=True
        ):
            if not self._add(unit.tokens[end - length : end], *rest):
                return False
        return True

    def _add(self, document: np.ndarray, text_bytes: int, digest: bytes) -> bool:
        source, size = self.source, len(document)
        if size == 0:
            self.documents["empty"] += 1
            return True
        if source.deduplicate and digest in self.seen:
            self.documents["duplicate"] += 1
            return True
        room = self.size["val"] - self.tokens["val"]
        if self.split == "val" and (room == 0 if source.public_split else size > room):
            if not self.documents["val"]:
                raise UserError(
                    f"{self.out}: the first document has {size:,} tokens, more than --val-tokens "
                    f"{self.size['val']:,}, so validation would be empty; raise it"
                )
            self.split = "train"
        if self.split == "train" and digest in self.seen:
            self.documents["in_val"] += 1
            return True
        if self.limit is not None and self.tokens.total() + size > self.limit:
            return False
        if source.deduplicate or (self.split == "val" and not source.public_split):
            self.seen[digest] = None
        self.documents[self.split] += 1
        if self.split == "val" and size > room:  # the public cut, through this document
            vocab = self.tokenizer.token_bytes()
            head_bytes = sum(len(vocab[id]) for id in document[:room].tolist())
            self.straddling = {"val_tokens": room, "train_tokens": size - room}
            self._append(document[:room], head_bytes, starts=True)
            self.split = "train"
            self._append(document[room:], text_bytes - head_bytes, starts=False)
        else:
            self._append(document, text_bytes, starts=True)
        return True

    def _append(self, tokens: np.ndarray, text_bytes: int, starts: bool) -> None:
        self.tokens[self.split] += len(tokens)
        self.text_bytes[self.split] += text_bytes
        written = min(self.skip, len(tokens))
        self.skip -= written
        self.unit_tokens += written
        tokens, starts = tokens[written:], starts and not written
        while len(tokens):
            if self.buffer_split != self.split or self.used == self.size[self.split]:
                self._write()
                self.buffer_split = self.split
            self.starts += starts
            starts = False
            n = min(len(tokens), self.size[self.split] - self.used)
            self.buffer[self.used : self.used + n] = tokens[:n]
            self.used += n
            self.unit_tokens += n
            tokens = tokens[n:]

    def close(self) -> None:
        """Write what is left."""
        self._check_nothing_missing()
        self._write()
        self._discard(len(self.manifest["source"].get("files", [])))

    def _check_nothing_missing(self) -> None:
        if self.skip:
            raise UserError(
                f"{self.out}: the source has less text than when this folder was begun; "
                f"{start_again(PROGRESS)}"
            )

    def _write(self) -> None:
        if not self.used:
            return
        split = self.buffer_split
        index = sum(shard["split"] == split for shard in self.shards) + (split == "train")
        file = f"{self.source.name}_{split}_{index:06d}.bin"
        # before the first shard, so that a folder always says whose its shards are
        if not self.shards and not (self.out / PROGRESS).exists():
            start = {"place": (0, 0), "skip_tokens": 0, "seen": "", "state": {}}
            save_json(self.out / PROGRESS, self.manifest | {"shards": [], "next": start})
        tokens = self.buffer[: self.used]
        sha256 = write_shard(self.out / file, tokens, self.tokenizer.vocab_size)
        self.shards.append(
            {
                "file": file,
                "split": split,
                "tokens": self.used,
                "documents": self.starts,
                "sha256": sha256,
            }
        )
        line = f"{self.out / file}: {self.used:,} tokens, {self.starts:,} documents start in it"
        self.used = self.starts = 0
        progress = self.manifest | {
            "shards": self.shards,
            "next": {
                "place": self.place,
                "skip_tokens": self.unit_tokens,
                "seen": b"".join(itertools.islice(self.seen, self.seen_before)).hex(),
                "state": self.before,
            },
        }
        save_json(self.out / PROGRESS, progress)
        self._discard(self.place[0])
        tqdm.write(line, file=sys.stderr)

    def _discard(self, count: int) -> None:
        if self.source.discard:
            for file in self.manifest["source"]["files"][:count]:
                self.source.discard(file)


def units_from(
    source: Source, files: list[dict | None], start: Place
) -> Iterator[tuple[Place, Any]]:
    """The units of `files` from `start` on, with their places. Files before it are not touched."""
    for i in range(start[0], len(files)):
        for j, unit in enumerate(source.units(files, i)):
            if (i, j) >= start:
                yield (i, j), unit


def tokenised_units(
    units: Iterable[tuple[Place, Any]], source: Source, options: PrepareOptions
) -> Iterator[tuple[Place, Tokenised]]:
    """Tokenise `units`, in order; at most two a worker are under way or waiting."""
    encode = functools.partial(tokenise_unit, source.read, options.tokenizer, options.encoder)
    if options.workers == 1:
        for place, unit in units:
            yield place, encode(unit)
        return
    # spawn on every system: what works on Linux then works on macOS (build-nanogpt#4)
    pool = ProcessPoolExecutor(
        options.workers, multiprocessing.get_context("spawn"), initializer=start_worker
    )
    resource_tracker.ensure_running()  # it would unblock SIGINT while a worker starts
    pending: deque = deque()
    try:
        for place, unit in units:
            with sigint_blocked():
                future = pool.submit(encode, unit)  # may start a worker
            pending.append((place, future))
            if len(pending) == 2 * options.workers:
                place, result = pending.popleft()
                yield place, result.result()
        while pending:
            place, result = pending.popleft()
            yield place, result.result()
    except BrokenProcessPool:
        raise UserError(
            f"a worker process died (killed, or out of memory) while tokenising {source.name}; "
            f"run again to go on, with fewer than --workers {options.workers} if memory is short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def tokenise_unit(
    read: Callable[[Any], Iterable[str | None]], tokenizer_name: str, encoder: str, unit: Any
) -> Tokenised:
    """Read and tokenise one unit; runs in a worker."""
    tokenizer = cached_tokenizer(tokenizer_name, encoder)
    start = time.perf_counter()
    # null, empty and white-space texts become "", which no tokenizer is asked about
    texts = [no_surrogates(t) if t and not t.isspace() else "" for t in read(unit)]
    encoded = iter(tokenizer.encode_many([text for text in texts if text]))
    eot = np.array([tokenizer.eot], dtype=np.uint16)
    parts, lengths, text_bytes, digests = [eot[:0]], [], [], []
    for text in texts:
        data = text.encode()
        if text:
            parts += [eot, np.asarray(next(encoded))]
        lengths.append(1 + len(parts[-1]) if text else 0)
        text_bytes.append(len(data))
        digests.append(normalised_digest(data))
    tokens = np.concatenate(parts)
    # before uint16 could wrap them
    check_ids(tokens, tokenizer.vocab_size, f"tokenizer {tokenizer.name}")
    seconds = time.perf_counter() - start
    return Tokenised(tokens.astype(np.uint16), lengths, text_bytes, digests, seconds)


@functools.cache
def cached_tokenizer(name: str, encoder: str) -> Tokenizer:
    """get_tokenizer, once a process: building GPT-2's takes a tenth of a second."""
    return get_tokenizer(name, encoder)


def normalised_digest(text: bytes) -> bytes:
    """16 bytes that identify a text up to (ASCII) white space, which counts for nothing at all."""
    return hashlib.sha256(text.translate(None, ASCII_SPACE)).digest()[:16]


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Processes that are started here do not hear Ctrl-C, not even before start_worker() runs. We
    do, in the main thread: Python takes the signal in any other thread, or afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker() -> None:
    """Leave Ctrl-C to the parent, and never outlive it, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def new_manifest(source: Source, options: PrepareOptions, tokenizer: Tokenizer) -> dict:
    """The part of the manifest that is known before the work: what was asked for."""
    encoders = {"tiktoken", options.encoder} if tokenizer.name == "gpt2" else set()
    packages = ["numpy", *sorted(encoders), *source.packages]
    return {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "name": source.name,
        "source": dict(source.description),
        "tokenizer": tokenizer_entry(tokenizer),
        "delimiter": DELIMITER,
        "settings": {
            "shard_tokens": options.shard_tokens,
            "limit_tokens": options.limit_tokens,
            "val_tokens": options.val_tokens,
            "split": "public" if source.public_split else "documents",
        },
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
    }


def tokenizer_entry(tokenizer: Tokenizer) -> dict:
    """What the manifest says of the tokenizer."""
    return {
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "sha256": tokenizer.sha256,
    }


def finished(out: Path, wanted: dict) -> dict:
    """The manifest of a finished folder, if it is what is `wanted`; otherwise UserError."""
    try:
        manifest = load_manifest(out)
    except UserError as error:
        raise UserError(f"{error} (to do that here, {start_again(MANIFEST)})") from None
    check_same(out, "finished", manifest, wanted, ASKED)
    (out / PROGRESS).unlink(missing_ok=True)  # of a run that was killed at its very end
    print(f"{out}: complete already, nothing to do: {summary(manifest)}")
    return manifest


def read_progress(out: Path, wanted: dict) -> dict | None:
    """What an interrupted run of the same settings and libraries left behind, its shards verified;
    None if there is nothing. UserError for other settings and for a shard that has changed."""
    path = out / PROGRESS
    if not path.exists():
        return None
    fix = start_again(PROGRESS)
    try:
        progress = read_json(path)
        check_same(out, "begun already", progress, wanted, (*ASKED, "versions"))
        for shard in progress["shards"]:
            file = out / shard["file"]
            if not file.exists() or sha256_file(file) != shard["sha256"]:
                raise UserError(f"{file}: missing or changed since it was made; {fix}")
        place = tuple(progress["next"]["place"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}; {fix}") from None
    print(
        f"{out}: going on with what is there, {len(progress['shards'])} shards verified; next is "
        f"unit {place[1]} of file {place[0]}, but for its first "
        f"{progress['next']['skip_tokens']:,} tokens"
    )
    return progress


def start_again(file: str) -> str:
    """How to begin a folder anew, of which `file` says what is in it."""
    return f"remove {file} and the .bin files beside it to start again"


def check_same(out: Path, what: str, old: dict, new: dict, keys: tuple[str, ...]) -> None:
    """Raise UserError with the differences of two manifests in `keys`."""
    if "files" not in new["source"]:  # those were listed by the hub, for the same commit
        old = old | {"source": {k: v for k, v in old["source"].items() if k != "files"}}
    old, new = ({k: v for k in keys for k, v in flat(k, m.get(k))} for m in (old, new))
    different = [k for k in sorted(old | new) if old.get(k) != new.get(k)]
    if different:
        shown = "; ".join(f"{k} {old.get(k)!r} there, {new.get(k)!r} asked" for k in different[:5])
        more = f" (and {len(different) - 5} more)" if len(different) > 5 else ""
        raise UserError(
            f"{out} is {what}, with other settings: {shown}{more}; choose another --out or "
            "remove that folder"
        )


def flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, as (dotted key, value)."""
    if isinstance(value, dict | list) and value:
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(f"{key}.{k}", v)
    else:
        yield key, value


@contextmanager
def locked_folder(out: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it; the lock ends with the process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        fd = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; choose a folder to write to") from None
    if not os.access(out, os.W_OK | os.X_OK):  # and not only when the first shard is full
        os.close(fd)
        raise UserError(f"--out {out}: read-only; choose a folder to write to")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"{out}: another run is writing there; choose another --out") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(fd)


def check_own(out: Path, name: str, progress: dict | None) -> None:
    """Raise UserError for a shard in the folder that no run noted: nothing of others is touched."""
    listed = progress["shards"] if progress else []
    own = {shard["file"] for shard in listed}
    if progress:  # a run that was killed may have written the next one and not noted it
        train = sum(shard["split"] == "train" for shard in listed)
        own |= {f"{name}_val_000000.bin", f"{name}_train_{train + 1:06d}.bin"}
    for file in sorted(out.glob("*.bin")):
        if file.name not in own:
            left = f"which {PROGRESS} does not list" if progress else f"of a run without {PROGRESS}"
            raise UserError(
                f"{out}: {file.name} is there, {left}; choose another --out or remove the shards"
            )


def remove_temporary(out: Path, name: str) -> None:
    """Remove the temporary files that a run which was killed left in the folder."""
    for pattern in (f"{name}_*.bin.tmp", f"{MANIFEST}.tmp", f"{PROGRESS}.tmp"):
        for file in out.glob(pattern):
            file.unlink()


def check_space(
    source: Source, options: PrepareOptions, files: list[dict], writer: ShardWriter
) -> int | None:
    """Say what the shards will take and what is free; returns the tokens to expect, if it can be
    guessed. Raises UserError if the room is too small."""
    known = [] if options.limit_tokens is None else [options.limit_tokens]
    if source.text_bytes:
        known.append(int(source.text_bytes(files) / BYTES_PER_TOKEN[options.tokenizer]))
    if not known:
        return None
    tokens = min(known)
    need = 2 * max(0, tokens - sum(shard["tokens"] for shard in writer.shards))
    free = shutil.disk_usage(options.out).free
    line = f"{options.out}: about {tokens:,} tokens, {need / 1e9:,.2f} GB of shards to write; "
    line += f"{free / 1e9:,.2f} GB are free there"
    if need > free:
        raise UserError(f"{line}; make room, choose another --out or set --limit-tokens")
    print(line)
    return tokens


def check_options(options: PrepareOptions, source: Source) -> None:
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
    if source.public_split and options.val_tokens != options.shard_tokens:
        raise UserError(
            f"--split public makes the first shard validation, so --val-tokens {options.val_tokens}"
            f" must be --shard-tokens {options.shard_tokens}"
        )


def summary(manifest: dict) -> str:
    """One line that adds up: documents, tokens and shards of each split."""
    documents, tokens, shards = Counter(manifest["documents"]), Counter(), Counter()
    for shard in manifest["shards"]:
        tokens[shard["split"]] += shard["tokens"]
        shards[shard["split"]] += 1
    dropped = {
        "empty": documents["empty"],
        "duplicate": documents["duplicate"],
        "as in validation": documents["in_val"],
    }
    line = (
        f"{documents.total():,} documents = {documents['val']:,} val + {documents['train']:,} train"
        f" + {sum(dropped.values()):,} dropped ("
        + ", ".join(f"{n:,} {why}" for why, n in dropped.items())
        + f"); {tokens.total():,} tokens = {tokens['val']:,} val + {tokens['train']:,} train; "
        f"{shards.total():,} shards = {shards['val']:,} val + {shards['train']:,} train"
    )
    if manifest.get("straddling"):
        line += (
            "; the last validation document goes on in training, with {val_tokens:,} + "
            "{train_tokens:,} tokens".format(**manifest["straddling"])
        )
    return line
