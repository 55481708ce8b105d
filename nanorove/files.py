"""Files that are either whole or not there, and JSON."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from nanorove.errors import UserError


def fsync_dir(path: Path) -> None:
    """Make a rename inside `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader sees the old file or the new one."""
    tmp = path.with_name(path.name + ".tmp")
    try:
        with tmp.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except OSError:  # a full disk, most likely
        tmp.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def strict(value: Any) -> Any:
    """A NaN or an infinity becomes None: JSON has no word for them, and readers stumble."""
    if isinstance(value, dict):
        return {key: strict(v) for key, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """The content of a JSON file, None if there is no such file; UserError if it is damaged."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); delete it and make it again") from None
