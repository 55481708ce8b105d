import dataclasses
import itertools
import math

import pytest
import torch

from model import GPT, GPTConfig
from nanorove.config import TrainConfig
from nanorove.optim import lr_at, make_optimizer

TRAIN = TrainConfig(
    total_batch_size=64, micro_batch_size=2, max_steps=6, warmup_steps=2, learning_rate=1.0,
    min_lr=0.1, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0, eval_interval=3,
    val_tokens=64, checkpoint_interval=3, keep_checkpoints=2, log_interval=1, compile=False,
    attn_backend="sdpa",
)  # fmt: skip


def rates(
    max_steps: int, warmup_steps: int, beyond: int = 0, schedule: str = "cosine"
) -> list[float]:
    train = dataclasses.replace(
        TRAIN, max_steps=max_steps, warmup_steps=warmup_steps, schedule=schedule
    )
    return [lr_at(step, train) for step in range(max_steps + beyond)]


@pytest.mark.parametrize(
    ("max_steps", "warmup_steps", "expected"),
    [
        # peak 1.0, minimum 0.1; halfway down the cosine is 0.55
        (7, 2, [0.5, 1.0, 1.0, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55,
                0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1]),
        (5, 0, [1.0, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55,
                0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1]),
        (3, 0, [1.0, 0.55, 0.1]),
        (4, 4, [0.25, 0.5, 0.75, 1.0]),  # warm-up alone: no division by zero (nanoGPT#443)
        (4, 1, [1.0, 1.0, 0.55, 0.1]),
        (4, 3, [1 / 3, 2 / 3, 1.0, 1.0]),  # one step after the warm-up is no room for a cosine
        (1, 0, [1.0]),
        (1, 1, [1.0]),
        (2, 0, [1.0, 0.1]),
    ],
)  # fmt: skip
def test_lr_table(max_steps, warmup_steps, expected):
    assert rates(max_steps, warmup_steps) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("max_steps", "warmup_steps"), [(50, 0), (50, 1), (50, 10), (50, 48)])
def test_lr_shape(max_steps, warmup_steps):
    """First rate above 0, up to the peak, down to the minimum at the last step, and there it
    stays beyond the end (nanoGPT#443, nanoGPT#691, torchtitan#1010)."""
    lr = rates(max_steps, warmup_steps, beyond=20)
    peak = max(warmup_steps - 1, 0)
    assert lr[0] > 0
    assert all(a < b for a, b in itertools.pairwise(lr[: peak + 1]))
    assert lr[peak] == lr[warmup_steps] == max(lr) == 1.0
    assert all(a > b for a, b in itertools.pairwise(lr[warmup_steps:max_steps]))
    assert lr[max_steps - 2] > 0.1
    assert lr[max_steps - 1 :] == pytest.approx(21 * [0.1], abs=1e-15)


@pytest.mark.parametrize(
    ("max_steps", "warmup_steps", "expected"),
    [
        # the last fifth of the 10 intervals is a line from 1.0 down to 0.1
        (11, 0, [*9 * [1.0], 0.55, 0.1]),
        (13, 2, [0.5, 1.0, *9 * [1.0], 0.55, 0.1]),
        (21, 0, [*17 * [1.0], 0.775, 0.55, 0.325, 0.1]),
        (5, 5, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (4, 3, [1 / 3, 2 / 3, 1.0, 1.0]),
        (1, 0, [1.0]),
        (1, 1, [1.0]),
        (2, 0, [1.0, 0.1]),
    ],
)
def test_warmup_stable_decay(max_steps, warmup_steps, expected):
    found = rates(max_steps, warmup_steps, schedule="wsd")
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_longer_run_shares_the_plateau():
    """What warm-up-stable-decay is for: before the decay the rates do not depend on max_steps, so
    a checkpoint of the plateau can go on to another end."""
    short, long = rates(101, 10, schedule="wsd"), rates(1001, 10, schedule="wsd")
    assert short[:82] == long[:82] and short[-1] < 1.0
    assert rates(101, 10, beyond=9, schedule="wsd")[100:] == pytest.approx(10 * [0.1])


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove"])
def test_decay_on_matrices_only_and_each_parameter_once(pos_emb):
    model = GPT(GPTConfig(257, 8, 2, 2, 16, pos_emb))
    optimizer = make_optimizer(model, TRAIN)
    names = {p: name for name, p in model.named_parameters()}
    groups = {
        group["weight_decay"]: [names[p] for p in group["params"]]
        for group in optimizer.param_groups
    }
    assert set(groups) == {0.1, 0.0}
    decayed = ["transformer.wte.weight"]
    decayed += ["transformer.wpe.weight"] if pos_emb == "learned" else []
    for i in range(2):
        for matrix in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            decayed.append(f"transformer.h.{i}.{matrix}.weight")
    assert sorted(groups[0.1]) == sorted(decayed)
    assert sorted(groups[0.1] + groups[0.0]) == sorted(names.values())
    assert all(name.endswith("bias") or "ln_" in name for name in groups[0.0])


def test_adamw_against_the_formula_in_float64():
    """Algorithm 2 of arXiv 1711.05101 with bias correction, written out in float64."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = make_optimizer(model, dataclasses.replace(TRAIN, min_lr=0.0))
    theta = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    m = {n: torch.zeros_like(p) for n, p in theta.items()}
    v = {n: torch.zeros_like(p) for n, p in theta.items()}
    for t in range(1, 6):
        lr = 0.02 / t  # the rate changes from step to step, as in training
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p) * 10.0 ** torch.randint(-9, 1, p.shape)  # eps matters
            g = p.grad.double()
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            decay = 0.1 if name == "weight" else 0.0
            update = (m[name] / (1 - 0.9**t)) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            theta[name] = theta[name] - lr * decay * theta[name] - lr * update
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), theta[name], rtol=1e-5, atol=1e-7)
