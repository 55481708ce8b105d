"""The configuration of a run: frozen dataclasses, one complete TOML file, small overrides.

    train.py configs/demo_rove.toml --train.max_steps 100 --run_name try

The file is turned into command-line tokens, so file and command line meet one and the same
validator: an unknown key, a wrong type or a missing value is refused with the nearest valid name.
"""

import contextlib
import dataclasses
import difflib
import io
import math
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tomli_w
import tyro

from model import GPTConfig
from nanorove.errors import UserError


@dataclass(frozen=True)
class DataConfig:
    dir: str
    """Folder of shards with a manifest.json, as the scripts in data/ make it."""


@dataclass(frozen=True)
class TrainConfig:
    total_batch_size: int
    """Tokens of one optimizer step, over all GPUs and micro-steps."""
    micro_batch_size: int
    """Sequences of one forward pass on one GPU: as many as the memory takes. Not a change of the
    experiment; the accumulation steps follow from it."""
    max_steps: int
    warmup_steps: int
    learning_rate: float
    """The peak, reached after warmup_steps."""
    min_lr: float
    """Where the schedule ends, at max_steps."""
    weight_decay: float
    """On matrices only; not on biases and norms."""
    beta1: float
    beta2: float
    grad_clip: float
    """Largest norm of the gradient over all parameters."""
    eval_interval: int
    """Steps between two validations; also before the first step and after the last one."""
    val_tokens: int
    """Validate on the first val_tokens of the validation split, always the same ones."""
    checkpoint_interval: int
    keep_checkpoints: int
    """How many of the newest checkpoints to keep; the best one is kept besides."""
    log_interval: int
    compile: tyro.conf.FlagConversionOff[bool]
    """True or False: torch.compile the model; the first step then takes a minute."""
    attn_backend: Literal["eager", "sdpa", "flash"]
    # a file must have these too; the values are those of checkpoints made before there were any
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: half a cosine, or a plateau and a line down in the last fifth (wsd)."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the matrix products: bf16 autocast or plain fp32. Weights and optimizer are fp32."""
    deterministic: tyro.conf.FlagConversionOff[bool] = False
    """True or False: the same bits each time on a GPU as well, slower. A CPU does so anyway."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Of the residual stream that the blocks add to; bf16 only with dtype bf16."""
    loss_chunk: int = 0
    """Tokens whose logits exist at the same time, in fp32; 0: those of a whole micro batch."""
    activation_checkpointing: tyro.conf.FlagConversionOff[bool] = False
    """True or False: keep the input of each block alone, compute the rest again in backward."""
    hellaswag_interval: int = 0
    """Steps between two evaluations of HellaSwag, a multiple of eval_interval; 0: none."""

    def __post_init__(self) -> None:
        for name in ("total_batch_size", "micro_batch_size", "max_steps", "eval_interval",
                     "val_tokens", "checkpoint_interval", "keep_checkpoints",
                     "log_interval"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        for name in ("loss_chunk", "hellaswag_interval"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0 (0 is off)")
        if self.hellaswag_interval % self.eval_interval:
            raise ValueError(
                f"hellaswag_interval ({self.hellaswag_interval}) must be a multiple of"
                f" eval_interval ({self.eval_interval})"
            )
        if self.residual == "bf16" and self.dtype != "bf16":
            raise ValueError(f"residual (bf16) needs dtype bf16, not {self.dtype}")
        for name in ("learning_rate", "min_lr", "weight_decay", "grad_clip"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} ({getattr(self, name)}) must be a finite number")
        if self.deterministic and self.attn_backend == "flash":
            raise ValueError("attn_backend (flash) is not deterministic (True); use sdpa")
        if not 0 <= self.warmup_steps <= self.max_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must be between 0"
                f" and max_steps ({self.max_steps})"
            )
        if not 0 <= self.min_lr <= self.learning_rate:
            raise ValueError(
                f"min_lr ({self.min_lr}) must be between 0 and learning_rate ({self.learning_rate})"
            )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"beta1 ({self.beta1}) and beta2 ({self.beta2}) must be in [0, 1)")
        if self.weight_decay < 0 or not self.grad_clip > 0:
            raise ValueError(
                f"weight_decay ({self.weight_decay}) must not be negative,"
                f" grad_clip ({self.grad_clip}) must be positive"
            )


@dataclass(frozen=True)
class LogConfig:
    wandb: Literal["online", "offline", "disabled"]
    project: str = "nanorove"


@dataclass(frozen=True)
class Config:
    """nanoRoVE: train a GPT-2 with learned, RoPE or RoVE positions."""

    run_name: str
    """The run lives in runs/<run_name>."""
    seed: int
    """Of the initial weights and of the order of the data."""
    model: GPTConfig
    data: DataConfig
    train: TrainConfig
    log: LogConfig
    init_from: str | None = None
    """A run or step folder whose weights to start from (context extension, fine-tuning)."""

    def __post_init__(self) -> None:
        parts = self.run_name.split("/")
        if any(not re.fullmatch(r"[\w.=+-]+", p) or p in (".", "..") for p in parts):
            raise ValueError(
                f"run_name ({self.run_name!r}) names a folder: letters, digits and ._=+-/ only"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed ({self.seed}) must be between 0 and 2^32 - 1")

    @property
    def run_dir(self) -> Path:
        return Path("runs") / self.run_name


@dataclass(frozen=True)
class TrainCommand(Config):
    """Train a GPT-2 with learned, RoPE or RoVE positions: train.py FILE.toml [--key value ...]"""

    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = field(kw_only=True, default=False)
    """Continue from the run's last checkpoint; start at step 0 if there is none."""


def load_config(argv: list[str]) -> tuple[Config, bool]:
    """`FILE.toml [--section.key value ...] [--resume]` -> (Config, resume).

    Prints one line and exits with code 2 on an unknown key, a wrong type or a missing value, in
    the file or on the command line. Raises UserError if the file cannot be read as TOML.
    """
    if argv and not argv[0].startswith("-"):
        path, argv = argv[0], argv[1:]
        file = load_config_file(path)
        default = TrainCommand(**{f.name: getattr(file, f.name) for f in dataclasses.fields(file)})
    elif "--help" in argv or "-h" in argv:
        default = None
    else:
        raise UserError("which config? for example: train.py configs/demo_rove.toml (or --help)")
    command = _parse(TrainCommand, argv, default, "train.py FILE.toml")
    config = Config(**{f.name: getattr(command, f.name) for f in dataclasses.fields(Config)})
    return config, command.resume


def load_config_file(path: str | Path) -> Config:
    """One complete TOML file -> Config; errors as in `load_config`."""
    return _from_dict(_read_toml(path), str(path), complete=True)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, as in the TOML file; keys that are None are left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if v is not None}
        return value

    return plain(dataclasses.asdict(config))


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `config_to_dict`, with the validation of `load_config`."""
    return _from_dict(values, "config")


def config_to_toml(config: Config) -> str:
    return tomli_w.dumps(config_to_dict(config))


def config_differences(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """{"section.key": (value in a, value in b)} of the keys that differ."""
    flat_a, flat_b = flatten(dataclasses.asdict(a)), flatten(dataclasses.asdict(b))
    return {k: (flat_a[k], flat_b[k]) for k in flat_a if flat_a[k] != flat_b[k]}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"n_layer": 4}} -> {"model.n_layer": 4}."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; see configs/ for the files there are") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from None


def _from_dict(values: dict[str, Any], name: str, complete: bool = False) -> Config:
    flat, hints = flatten(values), _keys(Config)
    for key, value in flat.items():
        if key not in hints:
            nearest = difflib.get_close_matches(key, hints, n=1, cutoff=0)[0]
            raise UserError(f"{name}: unknown key {key!r}; the nearest valid name is {nearest!r}")
        # as command-line tokens they would look alike: 12 and "12", "a" and ["a"]
        number = hints[key] in (bool, int, float)
        if isinstance(value, str) == number:
            kind = hints[key].__name__ if number else "a string"
            raise UserError(f"{name}: {key} = {value!r} has the wrong type, it takes {kind}")
    missing = [key for key in hints if key not in flat and key != "init_from"]
    if complete and missing:  # a forgotten pos_emb must not become the default
        raise UserError(f"{name}: missing {', '.join(missing)}; a config file has every key")
    # repr and not str: 0.1 and 1e-08 come back as the same float
    tokens = (f"--{k}={v if isinstance(v, str) else repr(v)}" for k, v in flat.items())
    return _parse(Config, list(tokens), None, name)


def _keys(kind: type, prefix: str = "") -> dict[str, Any]:
    """{"section.key": type} of every key there is."""
    keys = {}
    for name, hint in get_type_hints(kind).items():
        nested = dataclasses.is_dataclass(hint)
        keys |= _keys(hint, f"{prefix}{name}.") if nested else {prefix + name: hint}
    return keys


def _parse(kind: type, args: list[str], default: Any, prog: str) -> Any:
    options = dict(default=default) if default is not None else {}
    if int(os.environ.get("RANK", 0)) == 0:
        return tyro.cli(kind, prog=prog, args=args, **options)
    # one mistake, one message: rank 0 prints it (console_outputs=False leaves tyro's value errors)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(kind, prog=prog, args=args, **options)
