"""The learning rate as a function of the step, and AdamW with decay on matrices only."""

import math

import torch
import torch.nn as nn

from nanorove.config import TrainConfig

DECAY_SHARE = 0.2  # of the steps after the warm-up; wsd decays in them (arXiv 2405.18392)


def lr_at(step: int, train: TrainConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0: linear warm-up, then the schedule.

    cosine: half a cosine down to min_lr. wsd (warm-up, stable, decay): the peak, then a straight
    line down in the last fifth. The first rate is above 0, the peak comes at step warmup_steps (or
    one before), min_lr at the last step, max_steps - 1, and it stays there beyond. With less than
    two steps after the warm-up there is no room to decay: the rate ends at the peak.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    decay_steps = max(train.max_steps - 1 - train.warmup_steps, 1)
    progress = min((step - train.warmup_steps) / decay_steps, 1.0)
    if train.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        share = min((1 - progress) / DECAY_SHARE, 1.0)
    return train.min_lr + share * (train.learning_rate - train.min_lr)


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101); weight decay on the matrices, not on biases and norms.

    The fused kernel on every device: one numerics, and no slower than the loops on a CPU.
    """
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        dict(params=matrices, weight_decay=train.weight_decay),
        dict(params=others, weight_decay=0.0),
    ]
    betas = (train.beta1, train.beta2)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=1e-8, fused=True)
