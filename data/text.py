"""Your own text: .txt, .jsonl and .parquet files, folders of them, or a data set of the hub.

One .txt file is one document; a line of .jsonl and a row of .parquet give one each, from the
field or column --column. Files are taken in the order given, those of a folder by their path. A
data set of the hub is written hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT (split train unless
named; CONFIG may be left empty); it is downloaded whole by `datasets`, without running its code.

    python -m data.text books/ notes.txt --out data/mine
    python -m data.text hf:roneneldan/TinyStories --out data/tinystories --val-tokens 1000000
"""

import functools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow
import pyarrow.parquet
import tyro

from data.prepare import PrepareOptions, Source, prepare
from nanorove.errors import UserError, run_cli
from nanorove.files import sha256_file

SUFFIXES = (".txt", ".jsonl", ".parquet")
UNIT_BYTES = 8 * 2**20  # of a .jsonl file
UNIT_ROWS = 1000  # of a data set of the hub
HUB = "hf:"


@dataclass(frozen=True, kw_only=True)
class Options(PrepareOptions):
    sources: tyro.conf.Positional[tuple[str, ...]]
    """Files, folders, or one hf:NAME[:CONFIG[:SPLIT]]."""
    column: str = "text"
    """Field of the .jsonl lines, column of the .parquet files or the data set."""
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    val_tokens: int = 1_000_000


class Unit(NamedTuple):
    """A part of a file: a whole .txt; the lines of a .jsonl that start at bytes start..stop-1; the
    row groups start..stop-1 of a .parquet."""

    path: str
    start: int = 0
    stop: int = 1


def source(options: Options) -> Source:
    """The documents of `options.sources`. Raises UserError for one that cannot be read."""
    names = options.sources
    if not names:
        raise UserError("name at least one file, folder or hf:NAME to read")
    if any(name.startswith(HUB) for name in names):
        if len(names) > 1:
            raise UserError(f"{' '.join(names)}: a data set of the hub stands alone")
        return hub_source(names[0], options.column)
    files = [file for name in names for file in find_files(Path(name))]
    return Source(
        name="text",
        description={
            "kind": "files",
            "column": options.column,
            # the sha256, since a text that was edited often keeps its size
            "files": [
                {"file": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
                for name, path in files
            ],
        },
        units=lambda listed, i: file_units(files[i][1]),
        read=functools.partial(read_file, column=options.column),
        text_bytes=lambda _: sum(text_bytes(path, options.column) for _, path in files),
        packages=("pyarrow",),
    )


def find_files(path: Path) -> list[tuple[str, Path]]:
    """(name for the manifest, path) of a file, or of all text files below a folder, sorted."""
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file()]
        files = sorted(p for p in found if p.suffix in SUFFIXES)
        if not files:
            raise UserError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
        for file in files:
            check_name(file)
        if skipped := len(found) - len(files):
            print(f"{path}: {skipped} of {len(found)} files are no {', '.join(SUFFIXES)}: skipped")
        return [(p.relative_to(path).as_posix(), p) for p in files]
    check_name(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; give files, folders or hf:NAME")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: unknown kind of file; give {', '.join(SUFFIXES)}")
    return [(path.name, path)]


def check_name(path: Path) -> None:
    """Raise UserError for a name that is not UTF-8: neither JSON nor a message could hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{os.fsencode(path)!r}: the name is not UTF-8; rename it") from None


def file_units(path: Path) -> Iterator[Unit]:
    """The units of one file, in order."""
    if path.suffix == ".parquet":
        yield from parquet_units(path)
    elif path.suffix == ".jsonl":
        size = path.stat().st_size
        for start in range(0, size, UNIT_BYTES):
            yield Unit(str(path), start, min(start + UNIT_BYTES, size))
    else:
        yield Unit(str(path))


def text_bytes(path: Path, column: str) -> int:
    """Bytes of text in a file, about: all of a .txt or .jsonl, one column of a .parquet."""
    if path.suffix != ".parquet":
        return path.stat().st_size
    with open_parquet(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    columns = [group.column(j) for group in groups for j in range(group.num_columns)]
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == column)


def read_file(unit: Unit, column: str) -> Iterable[str | None]:
    """The texts of a unit of a file."""
    readers = {".parquet": read_parquet, ".jsonl": read_jsonl, ".txt": read_txt}
    try:
        return readers[Path(unit.path).suffix](unit, column)
    except OSError as error:
        raise UserError(f"{unit.path}: {error.strerror or error}") from None


def read_txt(unit: Unit, column: str) -> list[str]:
    """A .txt file is one document, taken as it is but for a byte order mark."""
    data = Path(unit.path).read_bytes()
    try:
        return [data.decode("utf-8-sig")]
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{unit.path} line {line}: {error.reason}; save it as UTF-8") from None


def read_jsonl(unit: Unit, column: str) -> list[str | None]:
    """Field `column` of the lines that start within the unit; blank lines count for nothing."""
    texts = []
    with open(unit.path, "rb") as file:
        if unit.start:  # a line that started before belongs to the unit before
            file.seek(unit.start - 1)
            file.readline()
        while (at := file.tell()) < unit.stop:
            line = file.readline()
            try:
                record = json.loads(line.decode("utf-8-sig")) if line.strip() else {column: ""}
                text = record[column]
                if not isinstance(text, str | None):
                    raise TypeError(f"field {column!r} is no text but {type(text).__name__}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                why = f"no field {column!r}" if isinstance(error, KeyError) else str(error)
                with open(unit.path, "rb") as before:  # only now is the number of the line needed
                    number = sum(1 for _ in iter_lines(before, at)) + 1
                raise UserError(
                    f"{unit.path} line {number}: {why}; every line must be a JSON object with "
                    "the text in the field that --column names"
                ) from None
            if line.strip():
                texts.append(text)
    return texts


def iter_lines(file: Any, stop: int) -> Iterator[bytes]:
    """The lines of an open file that start before byte `stop`."""
    while file.tell() < stop:
        yield file.readline()


def parquet_units(path: Path) -> Iterator[Unit]:
    """One unit a row group: they are of any size, so the file says how many there are."""
    with open_parquet(path) as file:
        groups = file.num_row_groups
    for i in range(groups):
        yield Unit(str(path), i, i + 1)


def read_parquet(unit: Unit, column: str) -> list[str | None]:
    """Column `column` of the row groups of a unit; no other column is read."""
    with open_parquet(Path(unit.path)) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise UserError(f"{unit.path}: no column {column!r}; --column is one of {names}")
        if names.count(column) > 1:
            raise UserError(
                f"{unit.path}: {names.count(column)} columns {column!r}; rename all but one"
            )
        try:
            table = file.read_row_groups(
                list(range(unit.start, unit.stop)), columns=[column], use_threads=False
            )
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{unit.path}: {one_line(error)}; download it again") from None
    kind = table.schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"{unit.path}: column {column!r} is no text but {kind}")
    try:
        return table.column(column).to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{unit.path} row group {unit.start}: column {column!r} is not UTF-8 ({error.reason}); "
            "write the file again"
        ) from None


def open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    """Open by path, never as a Python file object, with which pyarrow may abort at exit."""
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: {one_line(error)}; not (all of) a parquet file") from None


def hub_source(spec: str, column: str) -> Source:
    """A data set of the hub, by way of `datasets`: downloaded, kept as Arrow files in HF_HOME.

    Not streamed: a streaming iterator that is left unfinished can hang the process at its exit
    (datasets#7467).
    """
    import datasets  # heavy, and only wanted here

    parts = spec.removeprefix(HUB).split(":")
    if not parts[0] or len(parts) > 3:
        raise UserError(f"{spec}: write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    name, config, split = parts + ["", "", "train"][len(parts) :]
    try:
        data = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # many kinds: network, no such name, gated, config, split, format
        raise UserError(f"{spec}: {type(error).__name__}: {one_line(error)}") from error
    if column not in data.column_names:
        raise UserError(f"{spec}: no column {column!r}; --column is one of {data.column_names}")
    if data.features[column].dtype not in ("string", "large_string"):
        raise UserError(f"{spec}: column {column!r} is no text but {data.features[column]}")
    return Source(
        name="text",
        description={
            "kind": "hub data set",
            "name": name,
            "config": data.config_name,
            "split": split,
            "column": column,
            "rows": len(data),
            # datasets keeps its Arrow files in a folder named after the commit they come from
            "revision": Path(data.cache_files[0]["filename"]).parent.name,
        },
        units=lambda files, i: (
            range(i, min(i + UNIT_ROWS, len(data))) for i in range(0, len(data), UNIT_ROWS)
        ),
        read=functools.partial(read_rows, data.select_columns([column])),
        packages=("datasets", "pyarrow"),
    )


def read_rows(data: Any, rows: range) -> list[str | None]:
    """The only column of some rows of a data set, which travels here as the paths of its files."""
    return data[rows.start : rows.stop][data.column_names[0]]


def one_line(error: BaseException) -> str:
    """The message of a library's error, in one line and of a length to read."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + "..."


def main() -> None:
    """Entry point of `python -m data.text`."""
    options = tyro.cli(Options, prog="python -m data.text", description=__doc__)
    prepare(source(options), options)


if __name__ == "__main__":
    run_cli(main)
