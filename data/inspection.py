"""Looking into a data folder.

python -m data.shards verify data/stdlib_bytes    is everything as it was written?
python -m data.shards show data/stdlib_bytes      counts, lengths of documents, a document
python -m data.shards docs data/stdlib_bytes --min-tokens 8192    index of the documents
"""

import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tqdm import tqdm

from data.prepare import ASCII_SPACE, normalised_digest, summary
from data.shards import (
    HEADER_BYTES,
    MANIFEST,
    MANIFEST_FORMAT,
    TokenStream,
    check_shard,
    check_unedited,
    count_ids,
    load_manifest,
    read_json,
    read_shard,
    save_json,
    write_atomic,
)
from data.tokenizer import Tokenizer, get_tokenizer
from nanorove.errors import UserError, run_cli
from nanorove.files import sha256_file

LONG = (2048, 4096, 8192, 16384)
CHUNK_TOKENS = 4_000_000  # read at once where a whole split is gone through
AGAIN = "prepare or download it again"


def verify(data_dir: tyro.conf.Positional[Path]) -> None:
    """Check everything: the shards' headers, sizes, sha256 and ids, the manifest's checksum and
    sums, and that no validation text stands in training. All faults are told; exit code 2."""
    manifest = shown_manifest(data_dir)
    faults = list(manifest_faults(data_dir, manifest))
    tokenizer = known_tokenizer(manifest)
    found: dict[str, Counter] = {"documents": Counter(), "text_bytes": Counter()}
    for shard in tqdm(manifest["shards"], unit="shard", disable=None):
        faults += shard_faults(data_dir, shard, manifest["tokenizer"], tokenizer, found)
    if not faults:  # sums and texts of sound shards only
        for key in found:
            for split in ("val", "train"):
                if found[key][split] != (listed := manifest[key][split]):
                    faults.append(
                        f"{data_dir / MANIFEST}: {key} of {split} {listed:,}, but the shards have "
                        f"{found[key][split]:,}; {AGAIN}"
                    )
        copies = copies_of_validation(data_dir, manifest, tokenizer)
        if manifest["settings"]["split"] == "public":
            print(f"{copies:,} training documents have the text of one in validation (public cut)")
        elif copies:
            faults.append(
                f"{data_dir}: {copies:,} training documents have the text of one in validation; "
                f"{AGAIN}"
            )
    for fault in faults:
        print(fault)
    if faults:
        raise UserError(f"{data_dir} is not sound, faults: {len(faults)}, the first: {faults[0]}")
    print(f"{data_dir}: sound; {summary(manifest)}")


def shown_manifest(data_dir: Path) -> dict:
    """manifest.json, checked for being as it was written, and no shard looked at."""
    path = data_dir / MANIFEST
    if not path.is_file():
        load_manifest(data_dir)  # says how to make one
    try:
        manifest = read_json(path)
        if manifest["format"] != MANIFEST_FORMAT:
            raise ValueError(f"format {manifest['format']!r}")
        check_unedited(path, manifest)
        for shard in manifest["shards"]:
            shard["file"], shard["split"], shard["tokens"], shard["documents"], shard["sha256"]
        summary(manifest), manifest["settings"]["split"], manifest["text_bytes"]["val"]
        manifest["tokenizer"]["vocab_size"], manifest["tokenizer"]["eot"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: not a manifest of this version ({type(error).__name__}: {error}); {AGAIN}"
        ) from None
    return manifest


def known_tokenizer(manifest: dict) -> Tokenizer:
    """The tokenizer of a manifest. UserError if it is another than ours of that name."""
    tokenizer, entry = get_tokenizer(manifest["tokenizer"]["name"]), manifest["tokenizer"]
    for key in ("vocab_size", "eot", "sha256"):
        if entry[key] != getattr(tokenizer, key):
            raise UserError(
                f"{MANIFEST}: tokenizer {entry['name']} with {key} {entry[key]}, ours has "
                f"{getattr(tokenizer, key)}; {AGAIN}"
            )
    return tokenizer


def manifest_faults(data_dir: Path, manifest: dict) -> Iterator[str]:
    """What is wrong with the manifest's list of files."""
    path = data_dir / MANIFEST
    names = [shard["file"] for shard in manifest["shards"]]
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{path}: lists {name} {count} times; {AGAIN}"
    for split in ("val", "train"):
        if not any(shard["split"] == split for shard in manifest["shards"]):
            yield f"{path}: lists no {split} shard; {AGAIN}"
    for file in sorted(data_dir.glob("*.bin")):
        if file.name not in names:
            yield f"{file}: not in {MANIFEST}, so of another run; remove it"


def shard_faults(
    data_dir: Path, shard: dict, entry: dict, tokenizer: Tokenizer, found: dict[str, Counter]
) -> Iterator[str]:
    """What is wrong with one shard; its documents and bytes of text are added to `found`."""
    path = data_dir / shard["file"]
    try:
        count = check_shard(path)
    except UserError as error:
        yield str(error)
        return
    if count != shard["tokens"]:
        yield f"{path}: {count:,} tokens, {MANIFEST} says {shard['tokens']:,}; {AGAIN}"
    tokens = read_shard(path)
    counts = count_ids(tokens)
    if counts[entry["vocab_size"] :].any():
        i = int(np.flatnonzero(tokens >= entry["vocab_size"])[0])
        yield (
            f"{path}: id {tokens[i]} at byte {HEADER_BYTES + 2 * i} is outside the vocabulary "
            f"(0..{entry['vocab_size'] - 1}); {AGAIN}"
        )
    if (sha256 := sha256_file(path)) != shard["sha256"]:
        yield f"{path}: sha256 {sha256}, {MANIFEST} says {shard['sha256']}; {AGAIN}"
    documents = int(counts[entry["eot"]])
    if documents != shard["documents"]:
        yield (
            f"{path}: {documents:,} documents start in it, {MANIFEST} says "
            f"{shard['documents']:,}; {AGAIN}"
        )
    sizes = np.array([len(token) for token in tokenizer.token_bytes()])
    found["documents"][shard["split"]] += documents
    found["text_bytes"][shard["split"]] += int(counts[: len(sizes)] @ sizes)


def copies_of_validation(data_dir: Path, manifest: dict, tokenizer: Tokenizer) -> int:
    """How many training documents have the normalised text of one in validation.

    Decoding everything would take hours. So each document first gets a number that depends only on
    the multiset of its characters, which can be added up over tokens; where it is that of a
    validation document, the texts decide.
    """
    vocab = tokenizer.token_bytes()
    rng = np.random.RandomState(0)
    weights = rng.randint(0, 2**63, 256, dtype=np.uint64)  # of each byte; sums wrap, and may
    weights[list(ASCII_SPACE)] = 0
    token_number = np.array(
        [weights[np.frombuffer(token, dtype=np.uint8)].sum(dtype=np.uint64) for token in vocab]
    )

    def digest(stream: TokenStream, start: int, end: int) -> bytes:
        ids = stream.read(start, end - start).tolist()
        return normalised_digest(b"".join([vocab[id] for id in ids]))

    val = TokenStream(data_dir, manifest, "val")
    val_bounds = val.documents(tokenizer.eot)
    # the empty array is for a split in which no document starts
    numbers = [np.empty(0, np.uint64), *document_numbers(val, val_bounds, token_number)]
    val_numbers = np.unique(np.concatenate(numbers))
    digests = {digest(val, a, b) for a, b in zip(val_bounds, val_bounds[1:], strict=False)}

    train = TokenStream(data_dir, manifest, "train")
    bounds = train.documents(tokenizer.eot)
    first = copies = 0
    with tqdm(total=len(bounds) - 1, unit="document", unit_scale=True, disable=None) as bar:
        for numbers in document_numbers(train, bounds, token_number):
            for i in first + np.flatnonzero(np.isin(numbers, val_numbers)):
                copies += digest(train, bounds[i], bounds[i + 1]) in digests
            first += len(numbers)
            bar.update(len(numbers))
    return copies


def document_numbers(
    stream: TokenStream, bounds: np.ndarray, token_number: np.ndarray
) -> Iterator[np.ndarray]:
    """The sums of token_number over each document, chunk by chunk: (documents,) uint64."""
    first = 0
    while first < len(bounds) - 1:
        last = int(np.searchsorted(bounds, bounds[first] + CHUNK_TOKENS, side="right")) - 1
        last = max(last, first + 1)
        tokens = stream.read(bounds[first], bounds[last] - bounds[first])
        yield np.add.reduceat(token_number[tokens], bounds[first:last] - bounds[first])
        first = last


def show(
    data_dir: tyro.conf.Positional[Path],
    document: int | None = None,
    split: Literal["val", "train"] = "train",
    png: Path | None = None,
) -> None:
    """Counts and the lengths of documents, in the terminal and as a picture; or one document.

    Args:
        data_dir: The data folder.
        document: Print this document of the split instead, decoded; the first is 0.
        split: The split of that document.
        png: Where to put the picture; DIR/document_lengths.png unless given.
    """
    if png and png.suffix != ".png":
        raise UserError(f"--png {png}: the picture is a PNG; let the name end in .png")
    manifest = load_manifest(data_dir)
    tokenizer = known_tokenizer(manifest)
    if document is not None:
        stream = TokenStream(data_dir, manifest, split)
        bounds = stream.documents(tokenizer.eot)
        if not 0 <= document < len(bounds) - 1:
            there = f"the documents 0 to {len(bounds) - 2}" if len(bounds) > 1 else "none"
            raise UserError(f"--document {document}: {split} has {there}")
        start, end = int(bounds[document]), int(bounds[document + 1])
        print(
            f"{split} document {document}: tokens {start:,} to {end - 1:,}, {end - start:,} in all"
        )
        print(tokenizer.decode(stream.read(start + 1, end - start - 1)))
        return
    print(summary(manifest))
    lengths = {}
    for name in ("val", "train"):
        stream = TokenStream(data_dir, manifest, name)
        bounds = stream.documents(tokenizer.eot)
        if len(bounds) == 1:
            print(f"\n{name}: no document starts in its {len(stream):,} tokens")
            continue
        lengths[name] = np.diff(bounds)
        text_tokens = len(stream) - len(lengths[name])
        print(
            f"\n{name}: {manifest['text_bytes'][name] / max(1, text_tokens):.3f} bytes of text a "
            f"token; documents of {lengths[name].mean():,.0f} tokens in the mean, "
            f"{np.median(lengths[name]):,.0f} in the median, {lengths[name].max():,} at most"
        )
        for least in LONG:
            long = lengths[name][lengths[name] >= least]
            share = long.sum() / lengths[name].sum()
            print(f"  {len(long):>10,} of at least {least:>6,} tokens, {share:6.1%} of all tokens")
        for line in histogram(lengths[name]):
            print(line)
    if not lengths:
        return
    png = png or data_dir / "document_lengths.png"
    plot_lengths(lengths, data_dir, png)
    print(f"\npicture: {png}")


def histogram(lengths: np.ndarray) -> list[str]:
    """Lines with the number of documents between powers of two."""
    power = np.log2(lengths).astype(int)
    counts = np.bincount(power)
    first = int(power.min())
    return [
        f"  {2**i:>10,} - {2 ** (i + 1) - 1:<10,} {n:>10,} {'#' * round(40 * n / counts.max())}"
        for i, n in enumerate(counts)
        if i >= first
    ]


def plot_lengths(lengths: dict[str, np.ndarray], data_dir: Path, png: Path) -> None:
    """The histogram as a picture, the splits side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    top = np.log2(max(values.max() for values in lengths.values()))
    bins = 2 ** np.arange(0, np.ceil(top) + 0.5, 0.5)
    figure, axes = plt.subplots(
        1, len(lengths), figsize=(9, 3.5), layout="constrained", squeeze=False
    )
    for axis, (split, values) in zip(axes[0], lengths.items(), strict=True):
        axis.hist(values, bins=bins)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{data_dir.name}: {split}, {len(values):,} documents")
        axis.set_xlabel("tokens of a document")
        axis.set_ylabel("documents")
    figure.savefig(png, dpi=120)
    plt.close(figure)


def docs(data_dir: tyro.conf.Positional[Path], min_tokens: int = 8192) -> dict:
    """Write the index of the documents, and the long ones of validation for evaluation.

    DIR/documents_val.npy and documents_train.npy: int64, where each document of the split starts in
    its stream of tokens (at its end-of-text), then the end of the stream.
    DIR/long_val_N.json: numbers, starts and lengths of the validation documents of N tokens.

    Args:
        data_dir: The data folder.
        min_tokens: Tokens that a document needs to be selected, its end-of-text included.
    """
    manifest = load_manifest(data_dir)
    for split in ("val", "train"):
        bounds = TokenStream(data_dir, manifest, split).documents(manifest["tokenizer"]["eot"])
        if split == "val":
            val_bounds = bounds
        path = data_dir / f"documents_{split}.npy"
        buffer = io.BytesIO()
        np.save(buffer, bounds.astype("<i8"), allow_pickle=False)
        write_atomic(path, [buffer.getvalue()])
        print(f"{path}: {len(bounds) - 1:,} documents")
    lengths = np.diff(val_bounds)
    chosen = np.flatnonzero(lengths >= min_tokens)
    if not len(chosen):
        raise UserError(
            f"{data_dir}: no validation document has {min_tokens:,} tokens, the longest has "
            f"{lengths.max(initial=0):,}; lower --min-tokens"
        )
    selection = {
        "manifest_sha256": sha256_file(data_dir / MANIFEST),
        "min_tokens": min_tokens,
        "documents": chosen.tolist(),
        "starts": val_bounds[chosen].tolist(),
        "lengths": lengths[chosen].tolist(),
    }
    path = data_dir / f"long_val_{min_tokens}.json"
    save_json(path, selection)
    print(
        f"{path}: {len(chosen):,} of {len(lengths):,} validation documents, "
        f"{lengths[chosen].sum():,} tokens"
    )
    return selection


def main() -> None:
    """Entry point of `python -m data.shards`."""
    commands = {"verify": verify, "show": show, "docs": docs}
    tyro.extras.subcommand_cli_from_dict(
        commands, prog="python -m data.shards", description=__doc__
    )


if __name__ == "__main__":
    run_cli(main)
