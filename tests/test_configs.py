"""The shipped config files: what they claim, and that a rope and a rove file are one experiment."""

import dataclasses
import tomllib

import pytest
import torch

from model import GPT
from nanorove.config import Config, config_differences, load_config_file
from nanorove.perf import grad_accum_steps
from tests.conftest import REPO

NAMES = [
    "demo_rope", "demo_rove",
    "gpt2_124m_learned", "gpt2_124m_rope", "gpt2_124m_rove",
    "gpt2_124m_rope_yarn4k", "gpt2_124m_rove_yarn4k",
    "gpt2_124m_rope_yarn16k", "gpt2_124m_rove_yarn16k",
    "gpt2_354m_rope", "gpt2_354m_rove",
]  # fmt: skip
PAIRS = [(name, name.replace("rope", "rove")) for name in NAMES if "rope" in name]
LARGE = [name for name in NAMES if name.startswith("gpt2_")]
EPOCH = [name for name in LARGE if "yarn" not in name]
YARN = [name for name in LARGE if "yarn" in name]


def load(name: str) -> Config:
    return load_config_file(REPO / "configs" / f"{name}.toml")


def test_the_files_are_the_ones_the_readme_promises():
    assert sorted(NAMES) == sorted(path.stem for path in (REPO / "configs").glob("*"))


@pytest.mark.parametrize("name", NAMES)
def test_complete_and_named_after_the_run(name):
    """No inheritance and no hidden default: what is trained stands in the file."""
    values = tomllib.loads((REPO / "configs" / f"{name}.toml").read_text())
    config = load(name)
    assert config.run_name == name
    for section in ("model", "data", "train", "log"):
        keys = {f.name for f in dataclasses.fields(getattr(config, section))}
        assert set(values[section]) == keys
    top = {"run_name", "seed", "model", "data", "train", "log"}
    assert set(values) - {"init_from"} == top
    assert ("init_from" in values) == (name in YARN)


@pytest.mark.parametrize(("rope", "rove"), PAIRS)
def test_a_pair_differs_in_the_method_alone(rope, rove):
    allowed = {"run_name": (rope, rove), "model.pos_emb": ("rope", "rove")}
    if rope in YARN:  # each goes on from its own arm
        allowed["init_from"] = ("runs/gpt2_124m_rope", "runs/gpt2_124m_rove")
    assert config_differences(load(rope), load(rove)) == allowed

    a, b = ((REPO / "configs" / f"{name}.toml").read_text().splitlines() for name in (rope, rove))
    assert len(a) == len(b)
    differing = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    assert len(differing) == len(allowed)
    assert all(y == x.replace("rope", "rove") for x, y in differing)


@pytest.mark.parametrize("name", LARGE)
def test_recipe_of_the_gpt2_reproduction(name):
    """AdamW 0.9/0.95, decay 0.1, clip 1, half a million tokens a step: the public recipe."""
    config = load(name)
    train = config.train
    assert train.total_batch_size == 524288
    assert (train.beta1, train.beta2, train.weight_decay, train.grad_clip) == (0.9, 0.95, 0.1, 1.0)
    assert (config.model.vocab_size, config.model.block_size) == (50257, 1024)
    assert config.model.rope_base == 10000.0
    assert config.model.head_dim == 64
    assert config.log.wandb == "online"
    assert (train.schedule, train.dtype, train.deterministic) == ("cosine", "bf16", False)
    assert train.min_lr == pytest.approx(0.1 * train.learning_rate)


@pytest.mark.parametrize("name", EPOCH)
def test_one_epoch_of_fineweb_edu(name):
    config, train = load(name), load(name).train
    public_train_tokens = 9_853_989_344  # of the public 10B split, without its validation shard
    assert train.max_steps == public_train_tokens // 524288 == 18794
    assert train.warmup_steps == 715
    assert train.learning_rate == (6e-4 if "124m" in name else 3e-4)
    assert config.model.yarn_factor == 1.0 and config.init_from is None


@pytest.mark.parametrize(
    ("name", "shape", "params"),
    [
        ("gpt2_124m_learned", (12, 12, 768), 124_475_904),
        ("gpt2_124m_rope", (12, 12, 768), 123_689_472),
        ("gpt2_124m_rove", (12, 12, 768), 123_689_472),
        ("gpt2_124m_rove_yarn4k", (12, 12, 768), 123_689_472),
        ("gpt2_354m_rope", (24, 16, 1024), 353_822_720),
        ("gpt2_354m_rove", (24, 16, 1024), 353_822_720),
    ],
)
def test_parameters(name, shape, params):
    model = load(name).model
    assert (model.n_layer, model.n_head, model.n_embd) == shape
    with torch.device("meta"):
        assert GPT(model).num_params() == params


def test_parameters_of_the_learned_354m():
    with torch.device("meta"):
        model = GPT(dataclasses.replace(load("gpt2_354m_rope").model, pos_emb="learned"))
    assert model.num_params() == 354_871_296


@pytest.mark.parametrize("name", YARN)
def test_context_extension(name):
    config, start = load(name), load(name.split("_yarn")[0])
    factor = 4 if "4k" in name else 16
    assert (config.model.block_size, config.model.yarn_factor) == (1024, factor)
    assert config.model.context == 1024 * factor  # the length of the windows it trains on
    assert config.init_from == f"runs/{start.run_name}"
    assert dataclasses.replace(config.model, yarn_factor=1.0) == start.model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_batch_arithmetic(name, processes):
    config = load(name)
    if "demo" in name and processes == 8:
        pytest.skip("the demo's step of 32 sequences is for a few CPU processes")
    steps = grad_accum_steps(config, processes)
    tokens = steps * processes * config.train.micro_batch_size * config.model.context
    assert tokens == config.train.total_batch_size


@pytest.mark.parametrize("name", ["demo_rope", "demo_rove"])
def test_demo_is_for_a_laptop(name):
    config = load(name)
    assert (config.model.vocab_size, config.model.block_size) == (257, 256)
    assert config.log.wandb == "disabled"
    assert not config.train.compile  # needs no C compiler
    assert config.train.dtype == "fp32"
    assert GPT(config.model).num_params() < 2_000_000


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_are_evaluated(name):
    """A checkpoint between two evaluations could never become the best one."""
    train = load(name).train
    assert train.checkpoint_interval % train.eval_interval == 0
    assert (train.hellaswag_interval > 0) == ("gpt2" in name)  # bytes know no HellaSwag
    assert train.val_tokens % load(name).model.context == 0  # the number means what it says


@pytest.mark.parametrize("name", LARGE)
def test_only_a_long_context_needs_to_save_memory(name):
    """Every option is used by a config; what changes the numerics does so in both arms."""
    train = load(name).train
    saving = (train.residual, train.loss_chunk, train.activation_checkpointing)
    assert saving == (("bf16", 2048, True) if "16k" in name else ("fp32", 0, False))
