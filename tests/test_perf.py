"""The arithmetic of cost, against numbers worked out by hand and what torch really keeps."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import train
from model import GPT, CausalSelfAttention, GPTConfig, rotary_table
from nanorove import perf
from nanorove.config import Config, load_config, load_config_file
from nanorove.errors import UserError
from scripts.bench import peak_bytes
from tests.conftest import REPO
from tests.test_train import records, run


def shipped(name: str, **changes: object) -> Config:
    config = load_config_file(REPO / "configs" / f"{name}.toml")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def test_flops_of_gpt2_by_hand():
    """6 N + 12 L C T (PaLM, appendix B): N leaves out the table of positions."""
    learned = shipped("gpt2_124m_learned").model
    n = 124_475_904 - 1024 * 768
    assert perf.flops_per_token(learned) == 6 * n + 12 * 12 * 768 * 1024
    rove = shipped("gpt2_124m_rove").model
    assert perf.flops_per_token(rove) == 6 * 123_689_472 + 113_246_208 == 855_383_040
    # a longer context costs more attention
    yarn = shipped("gpt2_124m_rove_yarn4k").model
    assert perf.flops_per_token(yarn) == 6 * 123_689_472 + 4 * 113_246_208


def test_mfu():
    """8 H100 at 3.79 million tokens/s: 41 %, the modded-nanogpt record of 2024-10-29."""
    config = shipped("gpt2_124m_rope")
    mfu = perf.mfu_pct(config, 524288 / 0.13861, "cuda: NVIDIA H100 80GB HBM3", 8)
    assert mfu == pytest.approx(100 * 855_383_040 * 524288 / 0.13861 / (8 * 989e12))
    assert 40 < mfu < 42
    assert perf.mfu_pct(config, 1e6, "cpu: x86_64", 1) is None
    assert perf.mfu_pct(config, 1e6, "cuda: Tesla T4", 1) is None
    assert perf.mfu_pct(shipped("gpt2_124m_rope", dtype="fp32"), 1e6, "H100", 1) is None


@pytest.mark.parametrize(
    ("device", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("h100", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None), ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("x86_64", None),
    ],
)  # fmt: skip
def test_peak_of_the_very_device(device, flops):
    """The slower cards of the same name have another peak (NVIDIA's data sheets)."""
    assert perf.peak_flops(device, "bf16") == flops


def kept_bytes(config: Config, n_layer: int) -> int:
    """What autograd really keeps for backward, parameters apart."""
    model = GPT(
        dataclasses.replace(config.model, n_layer=n_layer),
        attn_backend=config.train.attn_backend,
        activation_checkpointing=config.train.activation_checkpointing,
        bf16_residual=config.train.residual == "bf16",
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
    x = torch.zeros(config.train.micro_batch_size, config.model.context, dtype=torch.long)
    with bf16 if config.train.dtype == "bf16" else contextlib.nullcontext():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x, x)
    assert loss.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("attn_backend", ["sdpa", "eager"])
@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove"])
@pytest.mark.parametrize(("dtype", "within"), [("fp32", 0.05), ("bf16", 0.2)])
def test_memory_of_a_block(pos_emb, attn_backend, dtype, within):
    """One more layer, counted (a CPU's autocast differs a little from a GPU's)."""
    config = shipped("demo_rove", micro_batch_size=2, attn_backend=attn_backend, dtype=dtype)
    model = dataclasses.replace(config.model, pos_emb=pos_emb, n_layer=1)
    config = dataclasses.replace(config, model=model)
    assert kept_bytes(config, 2) - kept_bytes(config, 1) == pytest.approx(
        perf.memory_parts(config)["activations"], rel=within
    )


@pytest.mark.parametrize("attn_backend", ["sdpa", "eager"])
@pytest.mark.parametrize("pos_emb", ["rope", "rove"])
def test_memory_of_a_block_with_checkpointing_and_a_bf16_stream(pos_emb, attn_backend):
    """Between the passes a block keeps its input and nothing else; in bf16 that is half."""
    for residual, width in (("fp32", 4), ("bf16", 2)):
        config = shipped("demo_rove", micro_batch_size=2, attn_backend=attn_backend, dtype="bf16",
                         residual=residual, activation_checkpointing=True)  # fmt: skip
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, pos_emb=pos_emb, n_layer=1)
        )
        deeper = dataclasses.replace(config, model=dataclasses.replace(config.model, n_layer=2))
        expected = 2 * 256 * 128 * width  # B T C
        assert kept_bytes(config, 2) - kept_bytes(config, 1) == expected
        parts = [perf.memory_parts(c)["activations"] for c in (config, deeper)]
        assert parts[1] - parts[0] == expected


@pytest.mark.parametrize(
    ("pos_emb", "units"), [("learned", 5), ("none", 5), ("rope", 5), ("rove", 6)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_an_attention_block_keeps(pos_emb, units, dtype):
    """In U = B T C numbers: its input, q, k, v, their output, and with RoVE the output before it is
    turned back. Values that stay a view of the whole projection would make it 7 with RoPE."""
    B, T, C = 2, 128, 128
    config = GPTConfig(257, T, 1, 4, C, pos_emb)
    block = CausalSelfAttention(config, 0, "sdpa")
    cos, sin = (t.float() for t in rotary_table(config, T))
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(B, T, C, dtype=torch.bfloat16 if dtype == "bf16" else None, requires_grad=True)
    block.to(x.dtype)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x, cos, sin)
    assert y.requires_grad
    ours = {t.untyped_storage().data_ptr() for t in (*block.parameters(), cos, sin)}
    bytes_kept = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in ours)
    # besides: a log-sum-exp for each row and head, and a table with the other sign
    assert bytes_kept / (B * T * C * x.element_size()) == pytest.approx(units, abs=0.25)


def peak_of_a_step(T: int, **how: object) -> int:
    """Bytes at the peak of one forward and backward pass over 1 x T tokens, weights apart."""
    model = GPT(GPTConfig(2048, 64, 3, 2, 32, "rove", yarn_factor=T / 64), **how)
    ids = torch.zeros(1, T, dtype=torch.long)

    def step() -> None:
        model.zero_grad()
        model(ids, ids).backward()

    step()  # what is allocated once
    return peak_bytes(step)


def test_memory_is_linear_in_the_context():
    """Twice the tokens, twice the memory, and far below what a plain step takes."""
    lengths = (512, 1024, 2048)
    saving = [peak_of_a_step(T, loss_chunk=64, activation_checkpointing=True) for T in lengths]
    slopes = [(b - a) / (m - n) for a, b, n, m in zip(saving, saving[1:], lengths, lengths[1:])]  # noqa: B905
    assert slopes[1] == pytest.approx(slopes[0], rel=0.1), saving
    assert slopes[1] < 0.2 * peak_of_a_step(2048) / 2048
    # without the chunks the logits of every token would be there
    assert saving[-1] < 0.5 * 4 * 2048 * 2048


@pytest.mark.parametrize("chunk", [256, 1024])
def test_memory_of_the_chunked_loss(chunk):
    """The planner's part against what torch allocates."""
    C, V, T = 128, 8192, 4096
    model = GPT(GPTConfig(V, T, 1, 2, C, "none"), loss_chunk=chunk)
    hidden = torch.randn(1, T, C, requires_grad=True)
    model.hidden = lambda idx, kv_cache=None: hidden
    ids = torch.zeros(1, T, dtype=torch.long)
    loss = model(ids, ids)
    loss.backward()
    config = shipped("demo_rove", micro_batch_size=1, loss_chunk=chunk)
    config = dataclasses.replace(config, model=model.config)
    part = perf.memory_parts(config)["logits and their gradient"]
    assert peak_bytes(lambda: model(ids, ids).backward()) == pytest.approx(part, rel=0.2)


def test_memory_of_weights_and_optimizer():
    parts = perf.memory_parts(shipped("gpt2_124m_rove"))
    assert parts["weights (fp32)"] == parts["gradients (fp32)"] == 4 * 123_689_472
    assert parts["AdamW's two moments (fp32)"] == 8 * 123_689_472
    assert perf.memory_parts(shipped("gpt2_124m_rove", dtype="fp32"))[
        "weights in bf16 for autocast"
    ] == 0  # fmt: skip
    # 64 x 1024 logits over 50304 words: 13 GB compiled, about 40 GB not
    assert parts["logits and their gradient"] == pytest.approx(13.2e9, rel=0.01)
    eager = perf.memory_parts(shipped("gpt2_124m_rove", compile=False))
    assert eager["logits and their gradient"] == pytest.approx(40e9, rel=0.03)


def test_checkpoints_on_disk_are_what_the_plan_says(tiny_toml):
    run(tiny_toml(), "--train.keep_checkpoints", "1")
    config, _ = load_config(["tiny.toml", "--train.keep_checkpoints", "1"])
    folder = config.run_dir / "ckpt" / "step_00000006"
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert perf.disk_bytes(config) / 3 == pytest.approx(size, rel=0.15)


def test_micro_batch_sizes():
    config = shipped("gpt2_124m_rove")
    assert perf.micro_batch_sizes(config, 8) == [1, 2, 4, 8, 16, 32, 64]
    assert perf.micro_batch_sizes(config, 6) == []
    assert perf.nearest(6, [1, 2, 4, 8]) == [4, 8]
    assert perf.nearest(8, [1, 2, 4, 8]) == [4] and perf.nearest(1, [2, 4]) == [2]


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."), "GPU"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "CPU"),
    ],
)
def test_out_of_memory_names_the_key_and_what_works(tiny_toml, monkeypatch, error, where):
    """One line, the same for every model and machine; other errors stay what they are."""
    config, _ = load_config([tiny_toml(), "--train.micro_batch_size", "8"])

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(train.GPT, "forward", fail)
    monkeypatch.setattr(train.GPT, "hidden", fail)
    with pytest.raises(UserError) as caught:
        train.main(config)
    message = str(caught.value)
    assert f"out of memory on the {where} with train.micro_batch_size 8" in message
    assert "--train.micro_batch_size 4" in message and "\n" not in message
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        train.main(dataclasses.replace(config, run_name="other"))


def test_start_block(tiny_toml, capfd):
    run(tiny_toml())
    out = capfd.readouterr().out
    start = out[: out.index("wandb: disabled")]
    for part in ("runs/tiny", "cpu x 1, fp32, attention sdpa, compile False", "rove, 11,712",
                 "1,600 training tokens", "6 steps = 0.24 epochs", "memory    "):  # fmt: skip
        assert part in start, part
    lines = [line for line in out.splitlines() if re.match(r"step +\d+/6 ", line)]
    assert len(lines) == 6 and all(re.search(r"mfu n/a \| eta \d:\d\d:\d\d$", x) for x in lines)
    assert all(r["perf/data_wait_ms"] >= 0 for r in records() if "train/loss" in r)
    assert all(r["perf/mfu_pct"] is None for r in records() if "train/loss" in r)


def plan(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "scripts.plan", *argv], cwd=REPO, capture_output=True, text=True
    )


def test_plan():
    """10 billion tokens on 8 H100 at 40 %: 44 minutes and 8.4e18 FLOPs."""
    done = plan("configs/gpt2_124m_rove.toml", "--gpus", "8", "--gpu", "h100")
    assert done.returncode == 0, done.stderr
    out = done.stdout
    for part in ("123,689,472", "18,794 of 524,288", "9,853,468,672", "855,383,040 per token",
                 "8.43e+18", "weights (fp32)", "GiB for checkpoints"):  # fmt: skip
        assert part in out, part
    seconds = 9_853_468_672 * 855_383_040 / (0.4 * 8 * 989e12)
    assert re.search(r"at 40% MFU +0:(\d+):", out)[1] == f"{int(seconds // 60)}"
    sizes = re.findall(r"^ +(\d+) +(\d+) micro-steps .*(fits|too large)", out, re.M)
    assert [int(a) * int(b) for a, b, _ in sizes] == [64] * 7
    assert len(re.findall("<- config", out)) == 1


def test_plan_with_sizes_that_do_not_divide():
    done = plan("configs/gpt2_124m_rove.toml", "--gpus", "6")
    assert done.returncode == 2
    assert "use --train.total_batch_size 393216 or 786432" in done.stderr


def test_gpu_check_with_toy_sizes(tmp_path, monkeypatch):
    """The script that a GPU will run, on this CPU and without the compiler; the sums of a broken
    model are found."""
    from scripts import gpu_check

    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--quick", "--tiny", "--out", str(tmp_path)])
    before = torch.get_float32_matmul_precision()
    try:
        gpu_check.main()
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["ok"] and report["tiny"] and report["torch"] == torch.__version__
        assert len(report["correctness"]) == 3 * 2 * 2 * 2
        assert len(report["losses"]["compiled"]) == 50
        speeds = report["speed 124M (tiny)"]
        assert {(r["pos_emb"], r["compile"]) for r in speeds} == {
            (arm, compiled) for arm in ("learned", "rope", "rove") for compiled in (False, True)
        }
        assert all(r["tokens_per_s"] > 0 and r["mfu_pct"] is None for r in speeds)
        text = (tmp_path / "report.md").read_text()
        assert "27 of 27 checks passed" in text and "| rove | fp32 | sdpa |" in text

        sdpa = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            torch.nn.functional, "scaled_dot_product_attention",
            lambda *args, **kwargs: 1.1 * sdpa(*args, **kwargs),
        )  # fmt: skip
        with pytest.raises(UserError, match=r"[1-9]\d* checks failed"):
            gpu_check.main()
    finally:
        torch.set_float32_matmul_precision(before)


def test_gpu_check_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        ["bash", str(REPO / "scripts" / "gpu_check.sh"), "--quick"],
        env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "no CUDA GPU is visible" in done.stderr
