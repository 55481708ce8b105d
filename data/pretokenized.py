"""The public GPT-2 shards of FineWeb-Edu-10B: fetched, checked and described as if made by us."""

import contextlib
import re
import shutil
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.hub import daemon_map, hub_error, resolve
from data.prepare import (
    DELIMITER,
    PROGRESS,
    check_same,
    locked_folder,
    remove_temporary,
    summary,
    tokenizer_entry,
)
from data.shards import (
    MANIFEST,
    MANIFEST_FORMAT,
    MANIFEST_VERSION,
    check_ids,
    count_ids,
    load_manifest,
    read_shard,
    save_manifest,
)
from data.tokenizer import Tokenizer, get_tokenizer
from nanorove.errors import UserError
from nanorove.files import sha256_file

REPO = "kjj0/finewebedu10B-gpt2"
NAME = "finewebedu"
TRAIN_SHARDS = 99
SHARD_TOKENS = 100_000_000
THREADS = 8


def fetch(out: Path, shards: str | None, revision: str) -> dict:
    """Fetch validation and the training shards `shards` ("1-20"; None: all) into `out`.

    Files that are here already are not fetched again, and a finished folder can grow: 1-20 to 1-40.
    Each file is checked: size and sha256 against what the hub says, header, ids. Raises UserError
    for what the hub refuses, for a wrong file and for shards in `out` that were not asked for.
    """
    first, last = parse_range(shards)
    tokenizer = get_tokenizer("gpt2")
    wanted = {
        "name": NAME,
        "source": {
            "kind": "public shards",
            "repo": REPO,
            "revision": revision,
            "shards": f"{first}-{last}",
        },
        "tokenizer": tokenizer_entry(tokenizer),
        "delimiter": DELIMITER,
        "settings": {
            "shard_tokens": SHARD_TOKENS,
            "limit_tokens": None,
            "val_tokens": SHARD_TOKENS,
            "split": "public",
        },
    }
    if (out / MANIFEST).exists():
        manifest = load_manifest(out)
        if revision == "main":  # what is here is some commit of it: no need to ask
            wanted["source"]["revision"] = manifest["source"].get("revision")
        there = manifest["source"].get("shards")
        grows = there is not None and within(parse_range(there), (first, last))
        same = wanted["source"] | ({"shards": there} if grows else {})
        check_same(out, "finished", manifest, wanted | {"source": same}, tuple(wanted))
        if not grows:
            print(f"{out}: complete already, nothing to do: {summary(manifest)}")
            return manifest
        revision = manifest["source"]["revision"]
    with locked_folder(out):
        if (out / PROGRESS).exists():
            raise UserError(f"{out} is being prepared from text; choose another --out")
        wanted["source"]["revision"] = resolve(REPO, revision)
        names = [f"{NAME}_val_000000.bin"]
        names += [f"{NAME}_train_{i:06d}.bin" for i in range(first, last + 1)]
        for file in sorted(out.glob("*.bin")):
            if file.name not in names:
                raise UserError(
                    f"{out}: {file.name} is there, but is not among --shards {first}-{last}; "
                    "ask for it too, choose another --out or remove it"
                )
        remove_temporary(out, NAME)
        files = download(out, names, wanted["source"]["revision"])
        wanted["source"]["files"] = files
        manifest = wanted | describe(out, files, tokenizer)
        manifest |= {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "versions": {}}
        manifest = save_manifest(out, manifest)
        # what huggingface_hub kept to go on with
        shutil.rmtree(out / ".cache" / "huggingface", ignore_errors=True)
        with contextlib.suppress(OSError):
            (out / ".cache").rmdir()
    print(f"{out}: done, {summary(manifest)}")
    return manifest


def parse_range(shards: str | None) -> tuple[int, int]:
    """First and last shard of "1-20" or "7"."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", shards or f"1-{TRAIN_SHARDS}")
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= TRAIN_SHARDS:
        raise UserError(f"--shards {shards}: write 1-20 or 7, within 1-{TRAIN_SHARDS}")
    return first, last


def within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    """Whether a range of shards is a part of another, and not all of it."""
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def download(out: Path, names: list[str], revision: str) -> list[dict]:
    """Fetch files of the repository, several at once; returns name, size and etag of each."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    def ask(name: str) -> dict:
        url = hf_hub_url(REPO, name, revision=revision, repo_type="dataset")
        found = get_hf_file_metadata(url)
        return {"file": name, "bytes": found.size, "etag": found.etag}

    def get(file: dict) -> None:
        path = out / file["file"]
        if path.exists():  # of an earlier run, or put here by hand
            if path.stat().st_size == file["bytes"] and sha256_file(path) == file["etag"]:
                return
            raise UserError(
                f"{path}: not the file that the hub has (sha256); choose another --out or remove it"
            )
        hf_hub_download(REPO, file["file"], revision=revision, repo_type="dataset", local_dir=out)

    try:
        files = [future.result() for future in daemon_map(ask, names, THREADS)]
        missing = [f for f in files if not (out / f["file"]).exists()]
        need, free = sum(f["bytes"] for f in missing), shutil.disk_usage(out).free
        print(f"{out}: {need / 1e9:,.2f} GB to fetch, {free / 1e9:,.2f} GB are free there")
        if need > free:
            raise UserError(f"{out}: too little room; choose another --out, or fewer --shards")
        for future in tqdm(daemon_map(get, files, THREADS), unit="shard", disable=None):
            future.result()
    except UserError:
        raise
    except Exception as error:  # the hub's clients raise many kinds
        raise hub_error(REPO, f"revision {revision}", error) from error
    return files


def describe(out: Path, files: list[dict], tokenizer: Tokenizer) -> dict:
    """The part of the manifest that is counted in the shards, each checked on the way."""
    token_bytes = np.array([len(token) for token in tokenizer.token_bytes()])
    documents = {"val": 0, "train": 0, "empty": 0, "duplicate": 0, "in_val": 0}
    text_bytes, shards, straddling = {"val": 0, "train": 0}, [], None
    for file in files:
        path = out / file["file"]
        split = "val" if "_val_" in file["file"] else "train"
        sha256 = sha256_file(path)
        if len(file["etag"]) == 64 and sha256 != file["etag"]:  # of a big file it is the sha256
            path.unlink()
            raise UserError(f"{path}: not the file that the hub has (sha256); removed, run again")
        tokens = read_shard(path)
        counts = count_ids(tokens)
        check_ids(np.flatnonzero(counts), tokenizer.vocab_size, path)
        starts = int(counts[tokenizer.eot])
        documents[split] += starts
        text_bytes[split] += int(counts[: tokenizer.vocab_size] @ token_bytes)
        if file["file"] == f"{NAME}_val_000000.bin":
            val = tokens
        elif file["file"] == f"{NAME}_train_000001.bin" and tokens[0] != tokenizer.eot:
            head = len(val) - int(np.flatnonzero(val == tokenizer.eot)[-1])
            tail = np.flatnonzero(tokens == tokenizer.eot)
            straddling = {
                "val_tokens": head,
                "train_tokens": int(tail[0]) if len(tail) else len(tokens),
            }
        shards.append(
            {
                "file": file["file"],
                "split": split,
                "tokens": len(tokens),
                "documents": starts,
                "sha256": sha256,
            }
        )
    return {
        "documents": documents,
        "text_bytes": text_bytes,
        "straddling": straddling,
        "shards": shards,
    }
