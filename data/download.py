"""One file from the web: whole and the one that was meant, or not there at all."""

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from nanorove.errors import UserError
from nanorove.files import fsync_dir, sha256_file

BLOCK = 1 << 20
TIMEOUT = 60  # seconds without a byte


def fetch(url: str, path: Path, *, sha256: str, bytes: int | None = None) -> None:
    """Make `path` the file at `url` (https or http); one that is there already is only checked.

    sha256, bytes: what the file must have; without `bytes` the server says how many. Written under
    a temporary name, so that a broken transfer leaves nothing and two processes do not meet.
    Raises UserError for another status than 200, another size or hash, and too small a disk.
    """
    if path.is_file():
        if (found := sha256_file(path)) != sha256:
            raise UserError(
                f"{path}: sha256 {found}, wanted {sha256}; delete it, so that it is fetched again"
            )
        return
    if not url.startswith(("https://", "http://")):
        raise UserError(f"{url}: only https and http are fetched")
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = None
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            size = _size(url, response, bytes)
            free = shutil.disk_usage(path.parent).free
            if size > free:
                raise UserError(
                    f"{url}: {size:,} bytes, but {free:,} are free in {path.parent}; make room"
                )
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
                tmp = Path(file.name)
                digest, done = hashlib.sha256(), 0
                # a byte beyond the promised ones is asked for, so that it would be noticed
                while done <= size and (block := response.read(min(BLOCK, size + 1 - done))):
                    file.write(block)
                    digest.update(block)
                    done += len(block)
                file.flush()
                os.fsync(file.fileno())
        if done != size:
            raise UserError(f"{url}: {done:,} bytes came of {size:,}; try again")
        if digest.hexdigest() != sha256:
            raise UserError(
                f"{url}: sha256 {digest.hexdigest()}, wanted {sha256}: another file than this code"
                " was made for; nothing is kept"
            )
        tmp.chmod(0o644)  # a temporary file is for its owner alone
        os.replace(tmp, path)
        fsync_dir(path.parent)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error = f"HTTP status {error.code} {error.reason}"
        raise UserError(f"{url}: {getattr(error, 'reason', error)}; try again") from None
    finally:
        if tmp:
            tmp.unlink(missing_ok=True)


def _size(url: str, response: http.client.HTTPResponse, wanted: int | None) -> int:
    """How many bytes will come. Raises UserError for what is not the file itself."""
    if response.status != 200:
        raise UserError(f"{url}: HTTP status {response.status} instead of 200; try again")
    told = response.length
    if told is None and wanted is None:
        raise UserError(f"{url}: the server does not say how long the file is; fetch it by hand")
    if None not in (told, wanted) and told != wanted:
        raise UserError(f"{url}: {told:,} bytes, wanted {wanted:,}: another file; nothing is kept")
    return wanted if told is None else told
