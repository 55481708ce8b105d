"""
Let a trained model go on with a prompt:
    python -m scripts.sample runs/demo_rove --prompt "def main("
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from data.tokenizer import get_tokenizer
from nanorove.checkpoint import load_model, read_meta, resolve_step_dir
from nanorove.config import config_from_dict
from nanorove.errors import UserError, run_cli
from nanorove.files import write_text_atomic
from nanorove.sampling import generate


@dataclass(frozen=True)
class Args:
    """Print what a model writes after a prompt."""

    run: Annotated[str, tyro.conf.Positional]
    """A run folder (its last checkpoint) or a step folder."""
    prompt: tuple[str, ...] = ("",)
    """One or more; an empty one starts a new document."""
    max_new_tokens: int = 200
    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int = 50
    """Draw from the k most likely tokens; 0 is off."""
    seed: int = 1337
    stop_at_eot: tyro.conf.FlagConversionOff[bool] = True
    """True: stop at the end of the document."""
    json: Path | None = None
    """Also write [{"prompt", "text"}] to this file."""


def main() -> None:
    args = tyro.cli(Args)
    step_dir = resolve_step_dir(args.run)
    meta = read_meta(step_dir)
    gpt_config = config_from_dict(meta["config"]).model
    tokenizer = get_tokenizer(meta["data"]["tokenizer"]["name"])
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # every document begins with end-of-text, in training too
    prompts = [[tokenizer.eot, *tokenizer.encode(p).tolist()] for p in args.prompt]
    longest = max(map(len, prompts)) + args.max_new_tokens
    learned = gpt_config.pos_emb == "learned"
    if learned and longest > gpt_config.block_size:
        if args.max_new_tokens >= gpt_config.block_size:
            raise UserError(
                f"--max-new-tokens ({args.max_new_tokens}): {args.run} has learned positions and"
                f" ends at {gpt_config.block_size} tokens"
            )
        keep = gpt_config.block_size - args.max_new_tokens
        print(f"note: learned positions end at {gpt_config.block_size} tokens,"
              f" so only the last {keep} of the prompt are used")  # fmt: skip
        prompts = [p[-keep:] for p in prompts]
    max_len = gpt_config.context if learned else max(longest, gpt_config.context)
    model, _ = load_model(step_dir, max_len=max_len, device=device)

    results = []
    for text, prompt in zip(args.prompt, prompts, strict=True):
        try:
            new = list(
                generate(
                    model,
                    torch.tensor(prompt),
                    args.max_new_tokens,
                    temperature=args.temperature,
                    top_k=args.top_k,
                    eot=tokenizer.eot if args.stop_at_eot else None,
                    generator=torch.Generator().manual_seed(args.seed),
                )
            )
        except ValueError as error:
            raise UserError(str(error)) from None
        results.append({"prompt": text, "text": tokenizer.decode(new)})
        print(f"{text}{results[-1]['text']}\n" + "-" * 80)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(args.json, json.dumps(results, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_cli(main)
