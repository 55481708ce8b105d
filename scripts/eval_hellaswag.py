"""HellaSwag, accuracy by summed and by mean loss:

    python -m scripts.eval_hellaswag runs/gpt2_124m_rove
    torchrun --standalone --nproc_per_node=8 -m scripts.eval_hellaswag runs/gpt2_124m_rove

The validation file (12 MB) is downloaded once. docs/hellaswag.md has the definition, and the
numbers of OpenAI's models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from data.download import fetch
from data.tokenizer import recorded_tokenizer
from nanorove import hellaswag
from nanorove.distributed import init_distributed, run_distributed
from nanorove.errors import UserError
from nanorove.evaluation import finish, header, open_output, open_subject, score_all
from nanorove.files import sha256_file


@dataclass(frozen=True)
class Args:
    """HellaSwag (build-nanogpt's definition): acc and acc_norm of a model."""

    run: tyro.conf.Positional[Path]
    """A run folder (its last checkpoint), a step folder, or a folder with a HuggingFace GPT-2."""
    data: Path = hellaswag.PATH
    """hellaswag_val.jsonl; the default is downloaded if it is not there."""
    limit: int | None = None
    """The first N items of the file; default: all 10,042."""
    yarn_factor: float | None = None
    """Instead of the model's own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the transformer (bfloat16: autocast); head and loss are always float32."""
    out: Path | None = None
    """Result file; default: RUN/eval/hellaswag.json."""


def main(args: Args) -> dict[str, Any]:
    """Evaluate and write the result file; returns its content."""
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit}: at least 1")
    info = init_distributed()
    subject = open_subject(args.run)
    out, journal = open_output(subject, "hellaswag", args.out, info=info, limit=args.limit)
    tokenizer = recorded_tokenizer(subject.tokenizer, args.run)
    if args.data == hellaswag.PATH and not args.data.exists():
        about = {"bytes": hellaswag.BYTES, "sha256": hellaswag.SHA256}
        info.from_rank0(lambda: fetch(hellaswag.URL, hellaswag.PATH, **about))
    items = hellaswag.read_items(args.data, tokenizer.encode, args.limit)
    sha256 = sha256_file(args.data)
    if sha256 != hellaswag.SHA256:
        info.print0(f"note: {args.data} is not the public validation file (sha256 {sha256[:12]})")

    longest = max(item.longest for item in items)
    model = subject.load(yarn_factor=args.yarn_factor, device=info.device)
    context = model.config.context
    truncated = sum(item.longest > context for item in items)
    if truncated:
        info.print0(
            f"note: {truncated} of {len(items)} items are longer than the {context} tokens of this"
            f" model (up to {longest}); their rows keep the end"
        )
    settings = {"limit": args.limit, "yarn_factor": model.config.yarn_factor}
    record = header("hellaswag", subject, info, args.dtype)
    groups = [hellaswag.spans(item, context) for item in items]
    work = dict(info=info, journal=journal, key=record | settings, label="hellaswag")
    found = score_all(model, groups, dtype=args.dtype, **work)
    rows = [hellaswag.outcome(item, scored) for item, scored in zip(items, found, strict=True)]
    n = len(rows)
    record |= {
        "data": {"file": str(args.data), "sha256": sha256, "public": sha256 == hellaswag.SHA256},
        "settings": settings,
        "seed": None,  # nothing is drawn
        "protocol": {
            "bos": "none: the context alone, its first token is not scored",
            "endings": '" " + ending, encoded apart from the context',
            "acc": "the ending with the lowest summed NLL, the first of equals",
            "acc_norm": "the ending with the lowest mean NLL per ending token",
        },
        "counts": {"items": n, "truncated": truncated, "skipped": 0},
        "acc": sum(r["choice"] == r["label"] for r in rows) / n,
        "acc_norm": sum(r["choice_norm"] == r["label"] for r in rows) / n,
        "items": [{"index": i, **row} for i, row in enumerate(rows)],
    }
    info.print0(f"hellaswag, {n} items: acc {record['acc']:.4f}, acc_norm {record['acc_norm']:.4f}")
    finish(out, record, journal, info)
    return record


if __name__ == "__main__":
    run_distributed(lambda: main(tyro.cli(Args, prog="python -m scripts.eval_hellaswag")))
