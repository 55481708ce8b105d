"""The loss on the fixed validation tokens, as a whole and by position."""

from collections.abc import Iterable

import torch

from model import GPT
from nanorove.distributed import DistInfo
from nanorove.scoring import token_nll


def evaluate_loss(
    model: GPT, val_data: Iterable[tuple[torch.Tensor, torch.Tensor]], info: DistInfo
) -> tuple[float, dict[str, float]]:
    """Mean loss over all validation tokens, in nats: sums over all ranks, then one division.

    Also by position, in bins that double: {"0": loss of the tokens that follow the first one,
    "1": ..., "2-3": ..., "4-7": ...}. `model` is the plain module: the last batch may be smaller,
    which would compile a second graph.
    """
    T = model.config.context
    sums = torch.zeros(2, T, dtype=torch.float64, device=info.device)  # losses, tokens
    for x, y in val_data:
        with info.autocast():
            losses = token_nll(model, x.to(info.device), y.to(info.device))  # (B, T)
        sums[0] += losses.double().sum(0)
        sums[1] += len(x)
    sums = info.sum_across_ranks(sums).cpu()
    by_position = {}
    for first in (0, *(2**i for i in range((T - 1).bit_length()))):
        end = min(max(2 * first, 1), T)
        loss_sum, tokens = sums[:, first:end].sum(1).tolist()
        by_position[f"{first}" if end == first + 1 else f"{first}-{end - 1}"] = loss_sum / tokens
    loss_sum, tokens = sums.sum(1).tolist()
    return loss_sum / tokens, by_position
