"""NLL of given tokens: one forward pass, then the head in chunks, logits only where scored.

All logits of a 16,384-token document over GPT-2's vocabulary would take 3.1 GiB in fp32, and the
softmax as much again. A chunk of 1,024 positions takes 0.2 GiB and gives the same numbers.
Sums over tokens are the caller's, in float64.
"""

import torch
import torch.nn.functional as F

from model import GPT

CHUNK = 1024  # positions whose logits exist at the same time


@torch.inference_mode()
def token_nll(
    model: GPT, idx: torch.Tensor, targets: torch.Tensor, *, chunk: int = CHUNK
) -> torch.Tensor:
    """NLL in nats of each target: (B, K) fp32.

    idx: (B, T) int64, what the model reads. targets: (B, K) int64 with K <= T, the tokens that
    follow the last K positions of idx; the head runs on those positions alone.
    """
    B, K = targets.shape
    if idx.size(0) != B or K > idx.size(1):
        raise ValueError(f"{B} rows of {K} targets for {tuple(idx.shape)} tokens")
    hidden = model.hidden(idx)[:, idx.size(1) - K :]  # (B, K, C)
    return hidden_nll(model, hidden.flatten(0, 1), targets.flatten(), chunk=chunk).view(B, K)


@torch.inference_mode()
def hidden_nll(
    model: GPT, hidden: torch.Tensor, targets: torch.Tensor, *, chunk: int = CHUNK
) -> torch.Tensor:
    """The same from the hidden states: hidden (N, C), targets (N,) -> (N,) fp32.

    Logits and log-sum-exp are fp32 over the real vocabulary, also when the body ran in bf16
    under autocast: half-precision logits shift the loss (modded-nanogpt#133).
    """
    nll = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = model.head(hidden[rows].float()).float()  # (chunk, V)
            nll[rows] = F.cross_entropy(logits, targets[rows], reduction="none")
    return nll
