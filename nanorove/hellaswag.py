"""HellaSwag as build-nanogpt and llm.c score it: which of four endings has the lowest loss?

Context and " " + ending are encoded apart and joined, nothing stands in front. `acc` picks the
ending by its summed NLL, `acc_norm` by the mean per ending token; they differ by a point (and by
fifteen from tools that normalise otherwise, lm-evaluation-harness#372), so both have a name.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model import GPT
from nanorove.distributed import DistInfo
from nanorove.errors import UserError
from nanorove.scoring import Scored, Span, batches, score

# size and hash: huggingface/datasets, datasets/hellaswag/urls_checksums/checksums.txt
URL = (
    "https://raw.githubusercontent.com/rowanz/hellaswag/"
    "a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl"
)
BYTES = 12_246_618
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
PATH = Path("data/hellaswag/hellaswag_val.jsonl")


@dataclass(frozen=True)
class Item:
    """One question: token ids of the context (n,) and of its four endings, and which is right."""

    context: np.ndarray
    endings: tuple[np.ndarray, ...]
    label: int

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return len(self.context) + max(map(len, self.endings))


def read_items(
    path: Path, encode: Callable[[str], np.ndarray], limit: int | None = None
) -> list[Item]:
    """The first `limit` items (None: all) of a JSONL file with "ctx", "endings" and "label".

    Raises UserError with file and line for a row that is not one of HellaSwag.
    """
    items = []
    try:
        content = path.read_bytes()
    except OSError as error:
        get = f"curl -Lo {path} --create-dirs {URL}"
        raise UserError(
            f"{path}: {error.strerror}; HellaSwag's questions come with: {get}"
        ) from None
    for number, line in enumerate(content.splitlines(), 1):
        if limit is not None and len(items) == limit:
            break
        try:
            row = json.loads(line.decode("utf-8"))
            items.append(_item(row, encode))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise UserError(
                f"{path}:{number}: not a row of HellaSwag ({what}); get the file again from {URL}"
            ) from None
    if not items:
        raise UserError(f"{path}: no rows; get the file again from {URL}")
    return items


def _item(row: dict[str, Any], encode: Callable[[str], np.ndarray]) -> Item:
    ctx, endings, label = row["ctx"], row["endings"], row["label"]
    if not isinstance(ctx, str) or not ctx:
        raise ValueError(f"ctx is {ctx!r}, a text is needed")
    if not isinstance(endings, list) or len(endings) != 4:
        raise ValueError("endings must be a list of 4")
    if not all(isinstance(ending, str) for ending in endings):
        raise ValueError("an ending is no text")
    if type(label) is not int or not 0 <= label <= 3:
        raise ValueError(f"label is {label!r}, 0 to 3 are possible")
    return Item(encode(ctx), tuple(encode(" " + ending) for ending in endings), label)


def spans(item: Item, context: int) -> list[Span]:
    """The four rows, each the context and one ending, whose tokens are to be scored.

    A row longer than `context` tokens keeps its end. The first token of what is left has nothing
    in front of it and is never scored.
    """
    rows = []
    for ending in item.endings:
        ids = np.concatenate([item.context, ending])[-context:]
        rows.append(Span(ids, max(1, len(ids) - len(ending)), len(ids)))
    return rows


def outcome(item: Item, scored: Sequence[Scored]) -> dict[str, Any]:
    """Summed NLL and tokens of the four endings, and what acc and acc_norm choose; the first of
    equals."""
    sums = [float(s.nll.sum()) for s in scored]
    tokens = [len(s.nll) for s in scored]
    means = [s / n for s, n in zip(sums, tokens, strict=True)]
    return {
        "label": item.label,
        "nll": sums,
        "tokens": tokens,
        "choice": sums.index(min(sums)),
        "choice_norm": means.index(min(means)),
    }


def evaluate_hellaswag(model: GPT, items: Sequence[Item], info: DistInfo) -> dict[str, float]:
    """{"hellaswag/acc", "hellaswag/acc_norm"} during training, the items shared by the ranks.

    `model` is the plain module: rows differ in length, and a compiled one would compile them all
    (build-nanogpt#79). Batches are the same for any number of ranks, so the numbers are too.
    """
    groups = [spans(item, model.config.context) for item in items]
    dtype = "bfloat16" if info.dtype == "bf16" else "float32"
    right = torch.zeros(2, dtype=torch.float64, device=info.device)
    for batch in batches(groups)[info.rank :: info.world_size]:
        for i, scored in zip(
            batch, score(model, [groups[i] for i in batch], dtype=dtype), strict=True
        ):
            found = outcome(items[i], scored)
            right[0] += found["choice"] == items[i].label
            right[1] += found["choice_norm"] == items[i].label
    acc, acc_norm = (info.sum_across_ranks(right) / len(items)).tolist()
    return {"hellaswag/acc": acc, "hellaswag/acc_norm": acc_norm}
