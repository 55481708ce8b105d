"""Draw text from a model, one token at a time, with a KV cache."""

import math
from collections.abc import Iterator

import torch

from model import GPT, KVCache


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    eot: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield up to max_new_tokens token ids that follow `prompt` (T,) int64, T >= 1.

    temperature 0 takes the most likely token; top_k 0 is off, and larger than the vocabulary is
    all of it. Stops before `eot`. Raises ValueError for a negative setting, an empty prompt, and
    if prompt and new tokens are more than model.max_len.
    """
    if not 0 <= temperature < math.inf or top_k < 0 or max_new_tokens < 1:
        raise ValueError(
            f"temperature ({temperature}) and top_k ({top_k}) must be finite and not negative,"
            f" max_new_tokens ({max_new_tokens}) at least 1"
        )
    total = len(prompt) + max_new_tokens
    if len(prompt) < 1 or total > model.max_len:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones must be 1 to"
            f" max_len ({model.max_len}) together, and the prompt not empty"
        )
    weight = model.transformer.wte.weight
    cache = KVCache(model.config, 1, total, weight.device, weight.dtype)
    idx = prompt[None].to(weight.device)  # (1, T)
    for _ in range(max_new_tokens):
        hidden = model.hidden(idx, cache)[0, -1]  # only the last position meets the head
        logits = model.head(hidden).double()  # (V,): the padding is cut off, so it is never drawn
        if temperature == 0:
            token = logits.argmax()
        else:
            if top_k:
                kth = logits.topk(min(top_k, len(logits))).values[-1]
                logits[logits < kth] = -torch.inf
            # the largest first, so that a tiny temperature cannot overflow
            probs = ((logits - logits.max()) / temperature).softmax(-1)
            token = torch.multinomial(probs.cpu(), 1, generator=generator)[0]
        if int(token) == eot:
            return
        yield int(token)
        idx = token.to(weight.device).view(1, 1)
