"""What every evaluation needs around its numbers: which model, what the result file says of it,
work spread over the processes of torchrun, and going on after a kill.

A script forms its units of work (a batch, a document) from all of its items, whatever the number
of processes; each unit is computed by one process, so the results are the same bits for any number.
"""

import base64
import dataclasses
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from model import GPT, GPTConfig
from nanorove.checkpoint import load_model, read_meta, resolve_step_dir
from nanorove.config import config_from_dict
from nanorove.distributed import DistInfo
from nanorove.errors import UserError
from nanorove.files import read_json, sha256_file, write_text_atomic
from nanorove.hf import RUN_JSON, from_hf_config, load_hf
from nanorove.runlog import git_state, versions
from nanorove.scoring import MAX_TOKENS, Scored, Span, batches, score

SCHEMA = 1

# a model of HuggingFace's does not say which tokenizer it has; data/tokenizer.py has this one
GPT2_TOKENIZER = {
    "name": "gpt2",
    "vocab_size": 50257,
    "eot": 50256,
    "sha256": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


# -----------------------------------------------------------------------------
# the model


@dataclass(frozen=True)
class Subject:
    """The model that is evaluated; `open_subject` makes it, `load` reads the weights."""

    path: Path
    """A step folder, or a folder in HuggingFace's format."""
    config: GPTConfig
    tokenizer: dict[str, Any]
    """name, sha256, vocab_size, eot."""
    identity: dict[str, Any]
    """For the result file: run, step, model_sha256, config, config_sha256."""
    eval_dir: Path | None
    """Where results go: RUN/eval; None if this is no run."""
    suffix: str
    """Of the result's name: a run's own file speaks of its last step alone."""

    def load(
        self,
        *,
        max_len: int | None = None,
        yarn_factor: float | None = None,
        device: torch.device | str = "cpu",
    ) -> GPT:
        """The model in eval mode, for up to max_len tokens (default: its own context).

        yarn_factor: instead of its own. Raises UserError for a damaged file and for settings that
        the model cannot take, e.g. learned positions beyond their table.
        """
        settings = dict(yarn_factor=yarn_factor, max_len=max_len)
        if (self.path / "meta.json").is_file():
            return load_model(self.path, **settings, device=device)[0]
        weights = load_hf(self.path).state_dict()
        config = self.config
        try:
            if yarn_factor is not None:
                config = dataclasses.replace(config, yarn_factor=yarn_factor)
            with torch.device("meta"):  # no second copy of the weights
                model = GPT(config, max_len=max_len)
        except ValueError as error:
            raise UserError(f"{self.path}: {error}") from None
        model.load_state_dict(weights, assign=True)
        return model.to(device).eval()

    def result_path(self, name: str) -> Path:
        """RUN/eval/NAME.json, and for a step folder RUN/eval/NAME_step_XXXXXXXX.json.

        Raises UserError for what is in no run.
        """
        if self.eval_dir is None:
            raise UserError(f"{self.path}: not in a run; say with --out where the result goes")
        return self.eval_dir / f"{name}{self.suffix}.json"


def open_subject(path: Path) -> Subject:
    """A run folder (its last step), a step folder, or a folder with config.json and safetensors:
    HuggingFace's GPT-2, or what scripts.export_hf wrote.

    Raises UserError, one line, for anything else, and for a vocabulary without a tokenizer.
    """
    if (path / "config.json").is_file():
        return _open_hf(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name a run, a step folder or a HuggingFace model")
    step_dir = resolve_step_dir(path)
    meta = read_meta(step_dir)
    config = config_from_dict(meta["config"]).model
    ckpt = step_dir.resolve().parent
    in_run = ckpt.name == "ckpt" and (ckpt / "last").is_file()
    is_run = step_dir != path
    return Subject(
        path=step_dir,
        config=config,
        tokenizer=_tokenizer(meta, config, step_dir),
        identity=_identity(meta, meta["files"]["model.safetensors"]["sha256"]),
        eval_dir=path / "eval" if is_run else ckpt.parent / "eval" if in_run else None,
        suffix="" if is_run else f"_{step_dir.resolve().name}",
    )


def _open_hf(folder: Path) -> Subject:
    values = read_json(folder / "config.json")
    if not isinstance(values, dict):
        raise UserError(f"{folder / 'config.json'}: not the config of a model; download it again")
    config = from_hf_config(values, str(folder / "config.json"))
    run = read_json(folder / RUN_JSON)
    if run is None:
        if config.vocab_size != GPT2_TOKENIZER["vocab_size"]:
            raise UserError(
                f"{folder}: a vocabulary of {config.vocab_size} and no {RUN_JSON}: only GPT-2's"
                f" ({GPT2_TOKENIZER['vocab_size']}) is known here"
            )
        run = {"step": None, "config": {"run_name": folder.name}}
        run["data"] = {"tokenizer": GPT2_TOKENIZER}
    try:  # an exported model may have another YaRN factor than its run
        run["config"] = {**run["config"], "model": dataclasses.asdict(config)}
        run["config"]["run_name"], run["step"]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{folder / RUN_JSON}: not what export_hf writes ({error!r}); export again"
        ) from None
    parts = [sha256_file(part) for part in sorted(folder.glob("*.safetensors"))]
    if not parts:
        raise UserError(f"{folder}: no .safetensors (pickled weights are not read: they run code)")
    whole = parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()
    tokenizer = _tokenizer(run, config, folder / RUN_JSON)
    return Subject(folder, config, tokenizer, _identity(run, whole), None, "")


def _tokenizer(meta: dict[str, Any], config: GPTConfig, where: Path) -> dict[str, Any]:
    try:
        found = {key: meta["data"]["tokenizer"][key] for key in GPT2_TOKENIZER}
    except (KeyError, TypeError) as error:
        raise UserError(f"{where}: says nothing of its tokenizer ({error!r}); damaged") from None
    if found["vocab_size"] != config.vocab_size:
        raise UserError(
            f"{where}: a model of {config.vocab_size} tokens, but its tokenizer {found['name']} has"
            f" {found['vocab_size']}; one of the two is not the one it was trained with"
        )
    return found


def _identity(meta: dict[str, Any], model_sha256: str) -> dict[str, Any]:
    return {
        "run": meta["config"]["run_name"],
        "step": meta["step"],
        "model_sha256": model_sha256,
        "config": meta["config"],
        "config_sha256": sha256_of_json(meta["config"]),
    }


def parse_yarn(text: str) -> list[str]:
    """ "none,auto,4.0" -> ["none", "auto", "4"], each once. Raises UserError."""
    settings = []
    for setting in (part.strip() for part in text.split(",")):
        if setting not in ("none", "auto"):
            try:
                factor = float(setting)
            except ValueError:
                factor = 0.0
            if not 1 <= factor < float("inf"):
                raise UserError(
                    f"--yarn {text}: {setting!r} is neither none, auto nor a number >= 1"
                )
            setting = str(factor).removesuffix(".0")  # one name for one factor
        settings.append(setting)
    return list(dict.fromkeys(settings))


def yarn_factor(setting: str, length: int, config: GPTConfig) -> float | str:
    """The factor to evaluate `length` with, or why there is no such number (a sentence).

    A model that was extended with YaRN was trained with its factor, so `none` keeps that one and
    `auto` never goes below it.
    """
    if config.pos_emb == "learned" and length > config.block_size:
        return f"learned positions end at {config.block_size} tokens"
    if setting == "none":
        return config.yarn_factor
    if not config.rotary:
        return f"YaRN rescales rotary positions; this model has pos_emb {config.pos_emb!r}"
    if setting == "auto":
        return max(config.yarn_factor, length / config.block_size)
    return float(setting)


# -----------------------------------------------------------------------------
# the result file

_locks: dict[Path, Any] = {}  # open files: a lock ends when its file is closed


def open_output(
    subject: Subject, name: str, out: Path | None, *, info: DistInfo, limit: int | None = None
) -> tuple[Path, Path]:
    """(result file, journal), before anything is computed; on disk there is the journal then.

    out: where the user wants it; None is subject.result_path(name), with `limit` in its name, so
    that a quick look does not replace a whole result. Raises UserError, on every rank, for a place
    that cannot be written and while another evaluation writes it.
    """
    if limit is not None:
        name = f"{name}_limit_{limit}"
    path = out or subject.result_path(name)
    journal = path.with_name(path.name + ".journal")

    def claim() -> None:
        if path.exists() and not path.is_file():
            raise UserError(f"--out {path}: there, and no file; name one that can be replaced")
        try:
            if journal in _locks:  # closing it later would give up the new lock as well
                _locks.pop(journal).close()
            journal.mkdir(parents=True, exist_ok=True)
            file = (journal / "lock").open("w")
        except OSError as error:
            raise UserError(f"{path}: cannot be written there: {error.strerror}") from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            raise UserError(f"{path}: another evaluation is writing it; wait for it") from None
        except OSError as error:  # some network file systems have no locks
            print(f"lock: {journal}: {error.strerror}; nothing stops a second evaluation of this")
        _locks[journal] = file

    info.from_rank0(claim)
    return path, journal


def header(evaluation: str, subject: Subject, info: DistInfo, dtype: str) -> dict[str, Any]:
    """The beginning of a result file: of what, by what, on what."""
    return {
        "schema": SCHEMA,
        "evaluation": evaluation,
        **subject.identity,
        **git_state(),
        "versions": versions(),
        "device": info.device.type,
        "dtype": dtype,
        "tokenizer": subject.tokenizer,
    }


def finish(out: Path, record: dict[str, Any], journal: Path, info: DistInfo) -> None:
    """Write the result (rank 0 alone), whole or not at all, then forget the journal.

    A NaN or an infinity becomes null: JSON has no word for them.
    """
    if info.rank != 0:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    record = json.loads(json.dumps(record), parse_constant=lambda name: None)
    write_text_atomic(out, json.dumps(record, indent=1) + "\n")
    for part in [*journal.glob("*.jsonl"), journal / "lock"]:
        part.unlink(missing_ok=True)
    if journal.is_dir() and not any(journal.iterdir()):
        journal.rmdir()
    if journal in _locks:
        _locks.pop(journal).close()
    print(f"wrote {out}")


def sha256_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# -----------------------------------------------------------------------------
# units of work


def resumable(
    costs: Sequence[float],
    work: Callable[[int], Any],
    *,
    info: DistInfo,
    journal: Path,
    key: dict[str, Any],
    label: str,
) -> list[Any]:
    """[work(0), work(1), ...] on every rank, as JSON gives it back (a tuple is a list).

    costs: of each unit, in tokens; the dearest are done first, one per rank at a time. Rank 0 notes
    what is done in the folder `journal`, one file per `label`. An evaluation that was killed goes
    on from there, with any number of ranks, if `key` is the same: it must hold everything that the
    results depend on. Otherwise it starts over and says so. A UserError of one rank is raised on
    all of them.
    """
    head = {"label": label, "units": len(costs), "key": key}
    head |= {"device": info.device.type, "torch": torch.__version__}
    head = json.loads(json.dumps(head))
    path = journal / (re.sub(r"[^\w.-]+", "_", label) + ".jsonl")
    done = info.from_rank0(lambda: _read_journal(path, head))
    todo = sorted(set(range(len(costs))) - done.keys(), key=lambda i: (-costs[i], i))
    bar = tqdm(
        desc=label,
        total=sum(costs),
        initial=sum(costs[i] for i in done),
        unit="token",
        unit_scale=True,
        disable=None if info.rank == 0 else True,
    )
    with bar, path.open("a") if info.rank == 0 else open(os.devnull, "w") as file:
        for first in range(0, len(todo), info.world_size):
            turn = todo[first : first + info.world_size]
            for i, text in zip(turn, _one_each(turn, work, info), strict=True):
                done[i] = json.loads(text)
                file.write(f'{{"unit": {i}, "value": {text}}}\n')
                bar.update(costs[i])
            file.flush()
    return [done[i] for i in range(len(costs))]


def _one_each(turn: list[int], work: Callable[[int], Any], info: DistInfo) -> list[str]:
    """Rank r does unit turn[r], or nothing if there are fewer: the JSON of all, on every rank."""
    mine: tuple[str | None, str | None] = (None, None)
    if info.rank < len(turn):
        try:
            mine = json.dumps(work(turn[info.rank])), None
        except UserError as error:
            mine = None, str(error)
    found = [mine] * info.world_size
    if info.is_distributed:
        dist.all_gather_object(found, mine)
    for _, error in found:
        if error is not None:
            raise UserError(error)
    return [text for text, _ in found[: len(turn)]]


def _read_journal(path: Path, head: dict[str, Any]) -> dict[int, Any]:
    """{unit: value} of what is done; afterwards the file is there and ends with a whole line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    values = []
    for line in lines:
        try:
            values.append(json.loads(line) if line.endswith(b"\n") else json.loads(b""))
        except ValueError:
            break  # a kill in the middle of a line, or a disk that lost power
    if values[:1] != [head]:
        if values:
            differ = sorted(k for k in head if values[0].get(k) != head[k])
            print(f"{path}: of an evaluation with another {', '.join(differ)}: starts over")
        write_text_atomic(
            path, json.dumps(head) + "\n"
        )  # a new file: whoever has it open, keeps it
        return {}
    if len(values) < len(lines):
        os.truncate(path, sum(map(len, lines[: len(values)])))
    if len(values) > 1:
        print(f"{path}: {len(values) - 1} of {head['units']} parts are done already")
    return {value["unit"]: value["value"] for value in values[1:]}


def score_all(
    model: GPT,
    groups: Sequence[Sequence[Span]],
    *,
    info: DistInfo,
    journal: Path,
    key: dict[str, Any],
    label: str,
    dtype: str = "float32",
    max_tokens: int = MAX_TOKENS,
) -> list[list[Scored]]:
    """scoring.score of all groups, on every rank: batches are the units of `resumable`.

    `key` need not speak of groups, dtype and max_tokens. The same bits for any number of ranks.
    """
    units = batches(groups, max_tokens)
    costs = [sum(span.end for g in unit for span in groups[g]) for unit in units]
    spans = hashlib.sha256()
    for group in groups:
        spans.update(f"{len(group)};".encode())
        for span in group:
            spans.update(f"{len(span.ids)} {span.start} {span.end};".encode())
            spans.update(np.asarray(span.ids, dtype="<i8").tobytes())
    key = {**key, "spans_sha256": spans.hexdigest(), "dtype": dtype, "max_tokens": max_tokens}

    def work(i: int) -> list[list[list[str]]]:
        scored = score(model, [groups[g] for g in units[i]], dtype=dtype)
        return [[[_pack(s.nll, "<f4"), _pack(s.greedy, "?")] for s in group] for group in scored]

    answers = resumable(costs, work, info=info, journal=journal, key=key, label=label)
    found: list[list[Scored]] = [[] for _ in groups]
    for unit, answer in zip(units, answers, strict=True):
        for g, scored in zip(unit, answer, strict=True):
            found[g] = [
                Scored(_unpack(nll, "<f4").astype(np.float64), _unpack(greedy, "?"))
                for nll, greedy in scored
            ]
    return found


def _pack(values: np.ndarray, dtype: str) -> str:
    """An array as text, bit for bit: an NLL is fp32 inside, and its digits would be four times as
    long."""
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def _unpack(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
