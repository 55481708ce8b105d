"""FineWeb-Edu, the 10-billion-token sample: the training data of the GPT-2 configs.

HuggingFaceFW/fineweb-edu, sample/10BT: 14 parquet files, 28.5 GB, 9,672,101 documents. They are
fetched as they are needed, the next one while this one is tokenised, into the cache of
huggingface_hub (HF_HOME), and stay there. The shards take 20 GB more. With --local the files are
read from a folder and nothing is fetched; with --pretokenized the public GPT-2 shards of the same
text are fetched instead, and nothing is tokenised. All can be interrupted and go on.

    python -m data.fineweb_edu
    python -m data.fineweb_edu --limit-tokens 50000000 --val-tokens 1000000 --out data/fineweb_small
    python -m data.fineweb_edu --pretokenized --shards 1-20 --out data/fineweb_public
"""

import functools
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import tyro

from data import pretokenized
from data.hub import check_room, daemon_map, hub_error, resolve
from data.prepare import BYTES_PER_TOKEN, PrepareOptions, Source, prepare
from data.text import Unit, check_name, parquet_units, read_parquet, text_bytes
from nanorove.errors import UserError, run_cli
from nanorove.files import sha256_file

REPO = "HuggingFaceFW/fineweb-edu"
REVISION = "fc9850dff5e2d0f8f776efe41b24a1c49556cfc5"  # v1.0.0
TEXT_PER_PARQUET_BYTE = 1.61  # 45.97 GB of text in 28.52 GB


@dataclass(frozen=True, kw_only=True)
class Options(PrepareOptions):
    out: Path = Path("data/fineweb_edu")
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    sample: str = "10BT"
    """Which sample of the data set: 10BT, 100BT or 350BT."""
    revision: str | None = None
    """Commit of the data set, v1.0.0 unless given (of the shards with --pretokenized: the newest);
    a branch or tag is looked up and recorded as its commit."""
    local: Path | None = None
    """Read the parquet files of this folder, sorted by name, instead of the hub's."""
    split: Literal["documents", "public"] = "documents"
    """public: the first shard is validation, cut through a document, as in the public shards."""
    remove_parquet: bool = False
    """Remove each parquet file from the cache of huggingface_hub after use."""
    pretokenized: bool = False
    """Fetch the public GPT-2 shards of kjj0/finewebedu10B-gpt2 instead of tokenising."""
    shards: str | None = None
    """Training shards to fetch with --pretokenized, as 1-20; all 99 unless given."""


def source(options: Options) -> Source:
    """The documents in order of file and row. Raises UserError when the hub cannot be reached."""
    shared = dict(
        name="finewebedu",  # as the public shards of the same text are called
        read=functools.partial(read_parquet, column="text"),
        public_split=options.split == "public",
        packages=("pyarrow", "huggingface_hub"),
    )
    if options.local:
        files = sorted(options.local.glob("*.parquet"))
        if not files:
            raise UserError(f"--local {options.local}: no .parquet file in this folder")
        for path in files:
            check_name(path)
        listed = [{"file": path.name, "bytes": path.stat().st_size} for path in files]
        return Source(
            description={"kind": "local parquet files", "files": listed},
            units=lambda listed, i: parquet_units(files[i]),
            text_bytes=lambda listed: sum(text_bytes(path, "text") for path in files),
            **shared,
        )
    revision = resolve(REPO, options.revision or REVISION)
    folder = f"sample/{options.sample}"
    hub = HubFiles(revision, options)
    return Source(
        description={"kind": "hub", "repo": REPO, "folder": folder, "revision": revision},
        list_files=functools.partial(list_files, folder, revision),
        units=hub.units,
        text_bytes=lambda files: int(TEXT_PER_PARQUET_BYTE * sum(f["bytes"] for f in files)),
        discard=hub.discard if options.remove_parquet else None,
        **shared,
    )


def list_files(folder: str, revision: str) -> list[dict]:
    """Name, size and etag (the sha256 of a big file) of the parquet files in a folder, sorted."""
    from huggingface_hub import HfApi

    try:
        tree = HfApi().list_repo_tree(REPO, folder, revision=revision, repo_type="dataset")
        files = [
            {"file": e.path, "bytes": e.size, "etag": e.lfs.sha256 if e.lfs else e.blob_id}
            for e in tree
            if e.path.endswith(".parquet")
        ]
    except Exception as error:  # the hub's clients raise many kinds
        raise hub_error(REPO, f"{folder} at {revision}", error) from error
    if not files:
        raise UserError(f"{REPO}: no parquet file in {folder} at revision {revision}")
    return sorted(files, key=lambda file: file["file"])


class HubFiles:
    """The parquet files of the hub, each fetched when its units are wanted, the next one ahead."""

    def __init__(self, revision: str, options: Options) -> None:
        self.revision = revision
        limit = float("inf") if options.limit_tokens is None else options.limit_tokens
        # bytes of parquet that the limit will take, about
        self.wanted = limit * BYTES_PER_TOKEN[options.tokenizer] / TEXT_PER_PARQUET_BYTE
        self.removing = options.remove_parquet
        self.fetching: dict[str, Future] = {}
        self.told = False

    def units(self, files: list[dict], i: int) -> Iterable[Unit]:
        """The row groups of file number i. The next file is fetched while they are used."""
        if not self.told:
            self.told = True
            self.tell_room(files, i)
        self.fetch(files[i])
        try:
            path = self.fetching.pop(files[i]["file"]).result()
        except UserError:
            raise
        except Exception as error:
            what = f"{files[i]['file']} at {self.revision}"
            raise hub_error(REPO, what, error) from error
        if self.is_wanted(files, i + 1):
            self.fetch(files[i + 1])
        yield from parquet_units(Path(path))

    def is_wanted(self, files: list[dict], i: int) -> bool:
        """Whether file number i will be needed, as far as can be told."""
        return i < len(files) and sum(file["bytes"] for file in files[:i]) < self.wanted

    def tell_room(self, files: list[dict], start: int) -> None:
        """Say what is to fetch and what is free. UserError if it does not fit."""
        sizes = [
            files[i]["bytes"]
            for i in range(start, len(files))
            if self.is_wanted(files, i) and not self.cached(files[i])
        ]
        at_once = sizes[:2] if self.removing else sizes  # one in use, one fetched ahead
        line = check_room(f"{len(sizes)} parquet files", sum(at_once))
        if sizes:
            print(line + (" (two of them at a time)" if self.removing else ""))

    def fetch(self, file: dict) -> None:
        """Begin to fetch a file, unless that is under way."""
        if file["file"] in self.fetching:
            return
        self.fetching[file["file"]] = daemon_map(self.download, [file], threads=1)[0]

    def download(self, file: dict) -> str:
        """The path of a file; the cache is looked into first. A wrong file does not stay in it."""
        from huggingface_hub import hf_hub_download

        if not self.cached(file):
            check_room(file["file"], file["bytes"])
        path = hf_hub_download(REPO, file["file"], revision=self.revision, repo_type="dataset")
        size, etag = Path(path).stat().st_size, file["etag"]
        if size != file["bytes"] or (len(etag) == 64 and sha256_file(Path(path)) != etag):
            self.discard(file)
            raise UserError(
                f"{file['file']}: {size:,} bytes came, not the {file['bytes']:,} bytes that the hub"
                f" lists (sha256 or id {etag}); removed, run again"
            )
        return path

    def cached(self, file: dict) -> str | None:
        """Where the file lies in the cache of huggingface_hub, if it does."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(
            REPO, file["file"], revision=self.revision, repo_type="dataset"
        )
        return path if isinstance(path, str) else None

    def discard(self, file: dict) -> None:
        """Remove a file from the cache."""
        if path := self.cached(file):
            Path(path).resolve().unlink()
            Path(path).unlink(missing_ok=True)  # the link to it


def check_combination(options: Options) -> None:
    """Raise UserError for an option that the way of reading asked for would not look at."""
    default = Options()
    given = {
        f.name for f in fields(Options) if getattr(options, f.name) != getattr(default, f.name)
    }
    if options.pretokenized:
        way, idle = "--pretokenized", given - {"out", "pretokenized", "shards", "revision"}
    elif options.local:
        way, idle = "--local", given & {"sample", "revision", "remove_parquet"}
    else:
        way, idle = "", set()
    if idle:
        names = ", ".join("--" + name.replace("_", "-") for name in sorted(idle))
        raise UserError(f"{names}: without effect together with {way}; leave out one or the other")
    if options.shards and not options.pretokenized:
        raise UserError("--shards names shards to fetch, so it goes with --pretokenized alone")


def main() -> None:
    """Entry point of `python -m data.fineweb_edu`."""
    options = tyro.cli(Options, prog="python -m data.fineweb_edu", description=__doc__)
    check_combination(options)
    if options.pretokenized:
        pretokenized.fetch(options.out, options.shards, options.revision or "main")
    else:
        prepare(source(options), options)


if __name__ == "__main__":
    run_cli(main)
