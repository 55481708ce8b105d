"""scripts.bench: that it compares like with like, and counts what it says; never a time."""

import json

import pytest
import torch

from model import GPT, GPTConfig
from nanorove.errors import UserError
from scripts import bench
from tests import reference


def test_the_plain_step_is_the_same_function():
    """Equal weights, equal loss and gradient: it is only written in another way."""
    config = GPTConfig(128, 16, 2, 2, 32, "learned")
    ours, plain = reference.randomise(GPT(config)), bench.PlainGPT(config)
    names = {"tokens": "wte", "positions": "wpe", "blocks": "h", "norm": "ln_f", "norm1": "ln_1",
             "norm2": "ln_2", "qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc",
             "down": "mlp.c_proj"}  # fmt: skip
    with torch.no_grad():
        pairs = {}
        for name, p in plain.named_parameters():
            path = ".".join(names.get(part, part) for part in name.split("."))
            pairs[name] = ours.get_parameter(f"transformer.{path}")
            p.copy_(pairs[name])
    assert len(pairs) == len(list(ours.parameters()))
    ids = torch.randint(128, (3, 17), generator=torch.Generator().manual_seed(0))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    losses = [m(x, y) for m in (ours, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(p.grad, pairs[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_peak_bytes_by_hand():
    """Two tensors of 4 MiB at once, then one, then two again, and what was there before."""
    before = torch.ones(2**20)

    def run() -> None:
        a = torch.ones(2**20)
        b = a + before
        del a
        (b + 1).sum()

    assert bench.peak_bytes(run) == pytest.approx(8 * 2**20, rel=0.001)


@pytest.mark.slow
def test_every_section_runs(tmp_path, monkeypatch, capsys):
    """With toy sizes and without the compiler; what is said of a comparison follows from its
    times."""
    monkeypatch.setattr(torch, "compile", lambda f: f)
    monkeypatch.setattr(bench, "get_tokenizer", no_network)
    args = bench.Args(quick=True, out=tmp_path / "bench")
    precision = torch.get_float32_matmul_precision()
    bench.main(args)
    torch.set_float32_matmul_precision(precision)
    report = json.loads((args.out / "bench.json").read_text())
    titles = list(report["tables"])
    assert len(titles) == 5 + 2 + 1 + 2 + 1 + 1 + 1
    rows = {row["variant"]: row for row in report["tables"]["step, eager, fp32"]}
    times = report["times"]["step, eager, fp32"]
    assert set(rows) == set(times) == {"rope", "rove", "learned", "plain"}
    assert all(len(t) == 3 for t in times.values())
    ratios = sorted(a / b for a, b in zip(times["rove"], times["rope"], strict=True))
    assert rows["rove"]["time / rope"] == ratios[1] and rows["rope"]["time / rope"] == 1
    # one more number per token and channel and layer, of 2 x 64 tokens and 64 channels, is kept
    assert rows["rove"]["peak MiB"] > rows["rope"]["peak MiB"]
    notes = [row.get("note") for row in report["tables"]["tokenizers"]]
    assert notes == [None, "no network", "no network"]
    text = (args.out / "bench.md").read_text()
    assert "--quick: toy sizes, no result" in text and text.strip() in capsys.readouterr().out
    assert all(f"### {title}\n\n| " in text for title in titles)


def no_network(*args: object) -> None:
    raise UserError("no network")


def test_an_unknown_section():
    with pytest.raises(UserError, match="--only speed: choose from step, rotation"):
        bench.main(bench.Args(only="rotation,speed"))
