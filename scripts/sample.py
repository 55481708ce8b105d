"""
Let a trained model go on with a prompt:
    python -m scripts.sample runs/demo_rove --prompt "def main("
    python -m scripts.sample runs/demo_rove --prompt-file - < README.md
"""

import dataclasses
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from data.tokenizer import Tokenizer, get_tokenizer
from model import GPT, GPTConfig
from nanorove.checkpoint import load_model, read_meta, resolve_step_dir
from nanorove.config import config_from_dict
from nanorove.errors import UserError, run_cli
from nanorove.files import write_text_atomic
from nanorove.sampling import TextStream, generate

BATCH = 16  # prompts of one length that are worked on together
LINE = "-" * 80


@dataclass(frozen=True)
class Args:
    """Print what a model writes after a prompt."""

    run: Annotated[str, tyro.conf.Positional]
    """A run folder (its last checkpoint) or a step folder."""
    prompt: tuple[str, ...] = ()
    """One or more; an empty one, the default, starts a new document."""
    prompt_file: str | None = None
    """Instead: a file whose text is the prompt; - reads standard input."""
    max_new_tokens: int = 200
    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int = 50
    """Draw from the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens whose probabilities reach p; 1 is off."""
    seed: int = 1337
    """Of every prompt, alone or among others; 0 to 2^64 - 1."""
    stop: tuple[str, ...] = ()
    """Strings to stop in front of."""
    stop_at_eot: tyro.conf.FlagConversionOff[bool] = True
    """True: stop at the end of the document."""
    yarn_factor: float | None = None
    """Instead of the checkpoint's own, to write beyond the length it was trained at."""
    json: Path | None = None
    """Also write [{"prompt", "text"}] to this file."""


def main() -> None:
    args = tyro.cli(Args, prog="python -m scripts.sample")
    if args.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens ({args.max_new_tokens}): at least 1")
    if not 0 <= args.seed < 2**64:
        raise UserError(f"--seed ({args.seed}): from 0 to 2^64 - 1")
    if "" in args.stop:
        raise UserError("--stop '': every text begins with it; name a string that is not empty")
    texts = read_prompts(args)
    step_dir = resolve_step_dir(args.run)
    meta = read_meta(step_dir)
    tokenizer = get_tokenizer(meta["data"]["tokenizer"]["name"])
    config = config_from_dict(meta["config"]).model
    if args.yarn_factor is not None:
        try:
            config = dataclasses.replace(config, yarn_factor=args.yarn_factor)
        except ValueError as error:
            raise UserError(f"--yarn-factor: {error}") from None
    # every document begins with end-of-text, in training too
    prompts = [[tokenizer.eot, *tokenizer.encode(text).tolist()] for text in texts]
    prompts = fit(prompts, args.max_new_tokens, config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_memory(config, prompts, args.max_new_tokens, memory_of(device))
    longest = max(map(len, prompts)) + args.max_new_tokens
    model, _ = load_model(step_dir, yarn_factor=args.yarn_factor, max_len=longest, device=device)

    written: dict[int, str] = {}
    printed = 0
    for rows in groups(prompts):
        new = write(model, tokenizer, prompts, rows, texts, args)
        written |= dict(zip(rows, new, strict=True))
        while len(texts) > 1 and printed in written:  # in the order they were asked for
            print(f"{texts[printed]}{written[printed]}\n{LINE}")
            printed += 1
    if args.json is not None:
        results = [{"prompt": text, "text": written[i]} for i, text in enumerate(texts)]
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(args.json, json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def read_prompts(args: Args) -> Sequence[str]:
    """The prompts of the command line or of the file. Raises UserError for both, or no UTF-8."""
    if args.prompt_file is None:
        return args.prompt or ("",)
    if args.prompt:
        raise UserError("--prompt and --prompt-file: give one of the two")
    try:
        if args.prompt_file == "-":
            return (sys.stdin.buffer.read().decode("utf-8"),)
        return (Path(args.prompt_file).read_bytes().decode("utf-8"),)
    except OSError as error:
        raise UserError(f"--prompt-file {args.prompt_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt-file {args.prompt_file}: not UTF-8 (byte {error.start}); convert it first"
        ) from None


def fit(prompts: list[list[int]], new: int, config: GPTConfig) -> list[list[int]]:
    """The prompts as the model can take them, with one notice if some are long for it.

    Rotary positions go on for ever, if not well. Learned ones end: the beginning of the prompt is
    left out. Raises UserError if they end before `new` tokens are written.
    """
    longest = max(map(len, prompts)) + new
    if longest <= config.context:
        return prompts
    if config.pos_emb != "learned":
        hint = ""
        if config.rotary:
            factor = math.ceil(longest / config.block_size)
            hint = f" (--yarn-factor {factor} is made for it)"
        notice(f"{longest} tokens are more than the {config.context} this model is for{hint}")
        return prompts
    keep = config.block_size - new
    if keep < 1:
        raise UserError(
            f"--max-new-tokens ({new}): learned positions end at {config.block_size} tokens;"
            f" ask for at most {config.block_size - 1}"
        )
    notice(
        f"learned positions end at {config.block_size} tokens,"
        f" so only the last {keep} of the prompt are used"
    )
    return [prompt[-keep:] for prompt in prompts]


def check_memory(config: GPTConfig, prompts: list[list[int]], new: int, memory: int) -> None:
    """Raise UserError if KV cache and rotary table need more than half of `memory` bytes."""
    lengths = [[len(prompts[i]) + new for i in rows] for rows in groups(prompts)]
    need = 2 * config.n_layer * config.n_embd * 4 * max(map(sum, lengths))  # keys, values: fp32
    if config.rotary:  # cos, sin and the angles, float64 while they are made, for half a head
        need += 12 * config.head_dim * max(map(max, lengths))
    if need > memory / 2:
        raise UserError(
            f"--max-new-tokens ({new}): {need / 1e9:,.1f} GB for KV cache and rotary table are more"
            f" than half of the {memory / 1e9:,.1f} GB there are; ask for fewer, or fewer prompts"
        )


def memory_of(device: str) -> int:
    """Bytes that the device has, used or not."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def notice(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)  # standard output has the texts, nothing else


def groups(prompts: list[list[int]]) -> list[list[int]]:
    """Indices of prompts that go through the model together: of one length, BATCH at most."""
    by_length = defaultdict(list)
    for i, prompt in enumerate(prompts):
        by_length[len(prompt)].append(i)
    return [
        same[start : start + BATCH]
        for same in by_length.values()
        for start in range(0, len(same), BATCH)
    ]


def write(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    rows: list[int],
    texts: Sequence[str],
    args: Args,
) -> list[str]:
    """What the model writes after the prompts `rows`; if there is but one, printed on the way."""
    live = len(texts) == 1

    def show(piece: str) -> None:
        if live:
            print(piece, end="", flush=True)

    streams = [TextStream(tokenizer.decode, args.stop) for _ in rows]
    try:
        steps = generate(
            model,
            torch.tensor([prompts[i] for i in rows]),
            args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            eot=tokenizer.eot if args.stop_at_eot else None,
            generators=[torch.Generator().manual_seed(args.seed) for _ in rows],
            ended=lambda row: streams[row].stopped,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    show(texts[rows[0]])
    for tokens in steps:
        for stream, token in zip(streams, tokens, strict=True):
            if token is not None:
                show(stream.push(token))
    for stream in streams:
        show(stream.finish())
    show(f"\n{LINE}\n")
    return [stream.text for stream in streams]


if __name__ == "__main__":
    run_cli(main)
