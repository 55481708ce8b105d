"""What data.fineweb_edu and data.pretokenized share of talking to the hub."""

import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from data.text import one_line
from nanorove.errors import UserError


def resolve(repo: str, revision: str) -> str:
    """The commit that `revision` means; the hub is asked only for a name."""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(repo, revision=revision).sha
    except Exception as error:
        raise hub_error(repo, f"revision {revision}", error) from error


def hub_error(repo: str, what: str, error: BaseException) -> UserError:
    """One line on what the hub refused, and the way round it."""
    error = error.__cause__ or error  # "not in the cache" hides what the server said
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return UserError(
        f"{endpoint} {repo}: {what}: {type(error).__name__}: {one_line(error)}; try again (what "
        "is here already stays), or read parquet files that you have with --local DIR"
    )


def daemon_map(function: Callable[[Any], Any], items: list, threads: int) -> list[Future]:
    """Futures of function(item), worked on in daemon threads: a process that has what it wants, or
    was interrupted, ends without waiting for them."""
    futures: list[Future] = [Future() for _ in items]
    todo = iter(zip(futures, items, strict=True))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                future, item = next(todo, (None, None))
            if future is None:
                return
            try:
                future.set_result(function(item))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(threads, len(items))):
        threading.Thread(target=work, daemon=True).start()
    return futures


def check_room(what: str, size: int) -> str:
    """Raise UserError if `size` bytes do not fit where huggingface_hub puts them; returns a line on
    what is needed and what is free."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    line = (
        f"{folder}: {size / 1e9:,.2f} GB to fetch for {what}, {free / 1e9:,.2f} GB are free there"
    )
    if size > free:
        raise UserError(
            f"{line}; make room, set HF_HOME to another place, or add --remove-parquet or "
            "--limit-tokens"
        )
    return line
