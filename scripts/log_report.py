"""Send an experiment's report to wandb: its tables, figures and page, as a run of their own.

    python -m scripts.log_report runs/demo --project nanorove --group demo --mode offline

It joins the group that the experiment's trainings are in. Every *.csv of the folder becomes a
table, every *.png an image; the page comes as it is.
"""

import csv
import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from nanorove.errors import UserError, run_cli
from nanorove.files import write_text_atomic
from nanorove.wandb_mirror import open_run

# columns whose content is a name even if it looks like a number
TEXTS = ("run", "arm", "baseline", "evaluation", "quantity", "yarn", "task", "sentence", "line")
LONGEST_S = 600  # then it ends, by SIGALRM: an experiment does not wait for a dead network


@dataclass(frozen=True)
class Args:
    """Send a report to wandb."""

    folder: tyro.conf.Positional[Path]
    """Where scripts.report wrote."""
    project: str
    group: str
    mode: Literal["online", "offline"]
    """Without a key or a network it logs offline and says so."""


def main(args: Args) -> None:
    """Raises UserError if there is no report in the folder."""
    import wandb  # in this process only

    page = args.folder / "report.html"
    if not page.is_file():
        raise UserError(f"{page} is not there; make the report first (scripts.experiment)")
    signal.alarm(LONGEST_S)
    options = {"project": args.project, "group": args.group, "job_type": "report",
               "name": f"{args.group}/report"}  # fmt: skip
    run = open_run(wandb, options, args.mode, args.folder)
    content: dict[str, Any] = {"report": wandb.Html(page.read_text(encoding="utf-8"))}
    for path in sorted(args.folder.glob("*.png")):
        content[f"figures/{path.stem}"] = wandb.Image(str(path))
    for path in sorted(args.folder.glob("*.csv")):
        columns, rows = read_csv(path)
        content[f"tables/{path.stem}"] = wandb.Table(columns, rows, allow_mixed_types=True)
    run.log(content)
    run.finish()
    record = {"id": run.id, "logged": sorted(content)}
    write_text_atomic(args.folder / "wandb" / "report.json", json.dumps(record, indent=1) + "\n")
    print(f"wandb: {len(content)} tables, figures and pages of {args.folder} in run {run.id}")


def read_csv(path: Path) -> tuple[list[str], list[list[Any]]]:
    """(names of the columns, rows) of a CSV file; what reads as a number is one, "" is None."""
    with path.open(encoding="utf-8", newline="") as file:
        columns, *rows = csv.reader(file)
    return columns, [[value(*cell) for cell in zip(columns, row, strict=True)] for row in rows]


def value(column: str, text: str) -> Any:
    if column in TEXTS:
        return text
    try:
        return float(text) if text else None
    except ValueError:
        return text


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Args, prog="python -m scripts.log_report")))
