"""Draw text from a model, one token at a time, with a KV cache; turn tokens into text to print."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from model import GPT, KVCache
from nanorove.errors import UserError


def generate(
    model: GPT,
    prompts: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eot: int | None = None,
    generators: Sequence[torch.Generator] | None = None,
    ended: Callable[[int], bool] = lambda row: False,
) -> Iterator[list[int | None]]:
    """Go on with `prompts` (B, T) int64, T >= 1: yield the next token id of each of the B rows.

    A row ends before `eot`, and when `ended(row)` says so, asked after each of its tokens; it then
    gives None while others go on. All prompts have one length: nothing is padded, so nothing has
    to be masked. temperature 0 takes the most likely token; top_k keeps the k most likely ones (0
    is off, and more than there are is all); top_p keeps the fewest whose probabilities reach p (1
    is off). One generator a row, so that a row does not depend on its neighbours.

    Raises ValueError at once for an impossible setting, an empty prompt, and if prompt and new
    tokens are more than model.max_len; UserError, on the way, for logits that are not finite.
    """
    if not 0 <= temperature < math.inf or top_k < 0 or max_new_tokens < 1:
        raise ValueError(
            f"temperature ({temperature}) and top_k ({top_k}) must be finite and not negative,"
            f" max_new_tokens ({max_new_tokens}) at least 1"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p ({top_p}) must be above 0 and at most 1 (1 is off)")
    T = prompts.size(1)
    if T < 1 or T + max_new_tokens > model.max_len:
        raise ValueError(
            f"a prompt of {T} tokens and {max_new_tokens} new ones must be 1 to"
            f" max_len ({model.max_len}) together, and the prompt not empty"
        )
    settings = (temperature, top_k, top_p, eot, generators, ended)
    return _steps(model, prompts, max_new_tokens, *settings)


@torch.inference_mode()
def _steps(
    model: GPT,
    prompts: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    eot: int | None,
    generators: Sequence[torch.Generator] | None,
    ended: Callable[[int], bool],
) -> Iterator[list[int | None]]:
    B, T = prompts.shape
    weight = model.transformer.wte.weight
    cache = KVCache(model.config, B, T + max_new_tokens, weight.device, weight.dtype)
    idx = prompts.to(weight.device)
    going = [True] * B
    for _ in range(max_new_tokens):
        hidden = model.hidden(idx, cache)[:, -1]  # only the last position meets the head
        logits = model.head(hidden).double()  # (B, V): the padding is cut off, so it is never drawn
        if not logits.isfinite().all():
            raise UserError("the model's logits are not finite: its training has diverged")
        if temperature == 0:
            tokens = logits.argmax(-1).tolist()
        else:
            probs, order = sorted_probs(logits, temperature, top_k, top_p)
            places = [
                int(torch.multinomial(probs[row], 1, generator=generators and generators[row]))
                for row in range(B)
            ]
            tokens = [int(order[row, place]) for row, place in enumerate(places)]
        for row in range(B):
            going[row] = going[row] and tokens[row] != eot
        if not any(going):
            return
        yield [token if on else None for token, on in zip(tokens, going, strict=True)]
        for row in range(B):
            going[row] = going[row] and not ended(row)
        if not any(going):
            return
        idx = torch.tensor(tokens, device=weight.device)[:, None]  # what ended is fed too, unheard


def sorted_probs(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (B, V) -> (weights to draw with, ids), both (B, V) on the CPU, the likeliest first.

    What top_k and top_p (of what top_k left) rule out has weight 0; the likeliest never is.
    """
    # the largest is taken off first, so that a tiny temperature cannot overflow
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    probs, order = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    if top_k:
        probs[:, top_k:] = 0
    if top_p < 1:
        probs /= probs.sum(-1, keepdim=True)
        likelier = probs.cumsum(-1) - probs  # the mass in front of each
        probs[likelier >= top_p] = 0
    return probs.cpu(), order.cpu()


class TextStream:
    """The text of tokens as they arrive, in pieces that can be printed.

    A character of several bytes may be spread over tokens: `push` holds it back until it is whole.
    It also holds back what may be the beginning of one of the `stop` strings; when one is complete
    the text ends in front of it and `stopped` is True. `decode` maps a list of token ids to text,
    bytes that are not UTF-8 to U+FFFD. All pieces together are the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self.decode, self.stop = decode, stop
        self.stopped = False
        self.text = ""  # what was given out
        self._ids: list[int] = []  # tokens since text and tokens last ended together
        self._taken = 0  # characters of their text that are in text or _held
        self._held = ""

    def push(self, token: int) -> str:
        """One more token -> the text that is certain now, perhaps none."""
        if self.stopped:
            return ""
        self._ids.append(token)
        seen = self.decode(self._ids)
        # U+FFFD at the end is bytes that are no text, or the beginning of a character
        whole = len(seen) - seen.endswith("\ufffd")
        self._held += seen[self._taken : whole]
        self._taken = whole
        if whole == len(seen):
            self._ids, self._taken = [], 0
        return self._give(last=False)

    def finish(self) -> str:
        """No more tokens -> the rest of the text."""
        if self.stopped:
            return ""
        self._held += self.decode(self._ids)[self._taken :]
        self._ids, self._taken = [], 0
        return self._give(last=True)

    def _give(self, last: bool) -> str:
        found = [at for at in (self._held.find(s) for s in self.stop) if at >= 0]
        self.stopped = bool(found)
        # one that is complete ends the text, even inside what may become another one
        cut = min(found) if found else len(self._held) - (0 if last else self._maybe_stop())
        piece, self._held = self._held[:cut], self._held[cut:]
        self.text += piece
        return piece

    def _maybe_stop(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = max(map(len, self.stop), default=1) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self.stop):
                return n
        return 0
