"""FineWeb-Edu, the 10-billion-token sample: the training data of the GPT-2 configs.

HuggingFaceFW/fineweb-edu, sample/10BT: 14 parquet files, 28.5 GB, 9,672,101 documents. They are
fetched one by one as they are needed, into the cache of huggingface_hub (HF_HOME), and stay there.
The shards take 20 GB more. With --local the files are read from a folder and nothing is fetched.

    python -m data.fineweb_edu
    python -m data.fineweb_edu --limit-tokens 50000000 --val-tokens 1000000 --out data/fineweb_small
"""

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from data.prepare import PrepareOptions, Source, prepare
from data.text import Unit, one_line, parquet_units, read_parquet
from nanorove.errors import UserError, run_cli

REPO = "HuggingFaceFW/fineweb-edu"
FOLDER = "sample/10BT"
REVISION = "fc9850dff5e2d0f8f776efe41b24a1c49556cfc5"  # v1.0.0


@dataclass(frozen=True, kw_only=True)
class Options(PrepareOptions):
    out: Path = Path("data/fineweb_edu")
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    revision: str = REVISION
    """Commit of the data set; a branch or tag is looked up and recorded as its commit."""
    local: Path | None = None
    """Read the parquet files of this folder, sorted by name, instead of the hub's."""


def source(options: Options) -> Source:
    """The documents in order of file and row. Raises UserError when the hub cannot be reached."""
    if options.local:
        files = sorted(options.local.glob("*.parquet"))
        if not files:
            raise UserError(f"--local {options.local}: no .parquet file in this folder")
        description = {
            "kind": "local parquet files",
            "files": [{"file": path.name, "bytes": path.stat().st_size} for path in files],
        }
        units = (unit for path in files for unit in parquet_units(path))
    else:
        revision = resolve(options.revision)
        description = {"kind": "hub", "repo": REPO, "folder": FOLDER, "revision": revision}
        units = hub_units(revision)
    return Source(
        name="finewebedu",  # as the public shards of the same text are called
        description=description,
        units=units,
        read=functools.partial(read_parquet, column="text"),
        packages=("pyarrow", "huggingface_hub"),
    )


def hub_units(revision: str) -> Iterator[Unit]:
    """The row groups of the sample's files; a file is fetched when its first unit is wanted."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        tree = HfApi().list_repo_tree(REPO, FOLDER, revision=revision, repo_type="dataset")
        files = sorted(entry.path for entry in tree if entry.path.endswith(".parquet"))
    except Exception as error:  # the hub's clients raise many kinds
        raise hub_error(f"{FOLDER} at {revision}", error) from error
    if not files:
        raise UserError(f"{REPO}: no parquet file in {FOLDER} at revision {revision}")
    for file in files:
        try:
            path = hf_hub_download(REPO, file, revision=revision, repo_type="dataset")
        except Exception as error:
            raise hub_error(f"{file} at {revision}", error) from error
        yield from parquet_units(Path(path))


def resolve(revision: str) -> str:
    """The commit that `revision` means; the hub is asked only for a name."""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(REPO, revision=revision).sha
    except Exception as error:
        raise hub_error(f"revision {revision}", error) from error


def hub_error(what: str, error: BaseException) -> UserError:
    """One line on what the hub refused, and the way round it."""
    error = error.__cause__ or error  # "not in the cache" hides what the server said
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return UserError(
        f"{endpoint} {REPO}: {what}: {type(error).__name__}: {one_line(error)}; try again (files "
        "that are here already stay), or read parquet files that you have with --local DIR"
    )


def main() -> None:
    """Entry point of `python -m data.fineweb_edu`."""
    options = tyro.cli(Options, description=__doc__)
    prepare(source(options), options)


if __name__ == "__main__":
    run_cli(main)
