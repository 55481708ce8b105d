"""Learned mode is GPT-2: HuggingFace's model on the same weights gives the same numbers."""

import json
import math

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig
from nanorove.hf import from_hf_state
from tests import reference


def from_hf(state: dict[str, torch.Tensor], config: GPTConfig) -> GPT:
    """A GPT with the weights of a HuggingFace GPT-2."""
    model = GPT(config).to(state["transformer.wte.weight"].dtype)
    model.load_state_dict(from_hf_state(state, config, "here"), strict=True)
    return model


def stored() -> tuple[GPT, dict]:
    fixture = json.loads((reference.FIXTURES / "gpt2_tiny.json").read_text())
    c = fixture["config"]
    config = GPTConfig(
        c["vocab_size"], c["n_positions"], c["n_layer"], c["n_head"], c["n_embd"], "learned"
    )
    state = safetensors.torch.load_file(reference.FIXTURES / "gpt2_tiny.safetensors")
    return from_hf(state, config), fixture


def test_stored_gpt2():
    model, fixture = stored()
    ids, expected = torch.tensor(fixture["input_ids"]), torch.tensor(fixture["logits"])
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)
    loss = model(ids[:, :-1], ids[:, 1:])
    assert loss.item() == pytest.approx(7.080183, abs=1e-5)
    assert loss.item() == pytest.approx(fixture["loss"], abs=2e-6)


def test_stored_gpt2_agrees_with_the_float64_forward():
    model, fixture = stored()
    ids, expected = torch.tensor(fixture["input_ids"]), torch.tensor(fixture["logits"])
    for row, logits in zip(ids, expected, strict=True):
        ours = reference.logits(model.state_dict(), model.config, row)
        torch.testing.assert_close(ours.float(), logits, rtol=0, atol=1e-5)


def test_the_erf_form_of_gelu_would_be_seen(monkeypatch):
    model, fixture = stored()
    plain = F.gelu
    monkeypatch.setattr("torch.nn.functional.gelu", lambda x, approximate="none": plain(x))
    difference = model(torch.tensor(fixture["input_ids"])) - torch.tensor(fixture["logits"])
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize(
    "shape",
    [
        dict(vocab_size=130, n_positions=40, n_embd=24, n_layer=3, n_head=4),
        dict(vocab_size=64, n_positions=7, n_embd=40, n_layer=1, n_head=1),
    ],
    ids=str,
)
def test_random_gpt2_of_another_shape(shape):
    from transformers import GPT2Config, GPT2LMHeadModel  # here: it takes seconds

    hf = GPT2LMHeadModel(GPT2Config(**shape)).eval().double()  # eval: no dropout
    reference.randomise(hf, 0.2)
    config = GPTConfig(
        shape["vocab_size"],
        shape["n_positions"],
        shape["n_layer"],
        shape["n_head"],
        shape["n_embd"],
        "learned",
    )
    model = from_hf(hf.state_dict(), config)
    ids = torch.randint(
        shape["vocab_size"], (3, shape["n_positions"]), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        theirs = hf(ids, labels=ids)
        torch.testing.assert_close(model(ids), theirs.logits, rtol=0, atol=1e-9)
        loss = model(ids[:, :-1], ids[:, 1:])
    # transformers takes the loss in fp32
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    assert loss.item() > math.log(shape["vocab_size"]) + 0.1  # the weights do something
