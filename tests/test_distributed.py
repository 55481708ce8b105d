"""Decisions on device and precision, batches on their way, and what torch.compile makes of it."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

import train
from model import GPT, GPTConfig
from nanorove import distributed, validation
from nanorove.batches import Prefetcher
from nanorove.distributed import DistInfo, init_distributed
from nanorove.errors import UserError
from tests.test_train import curve, hashes, run


class FakeCuda:
    """Just enough of a GPU for the decisions."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        bf16: bool,
        count: int = 1,
        capability: tuple[int, int] = (8, 0),
    ) -> None:
        for name, value in {
            "get_device_capability": lambda device=None: capability,
            "is_available": lambda: True, "device_count": lambda: count,
            "set_device": lambda device: None, "get_device_name": lambda *a: "Fake T4",
            "is_bf16_supported": lambda including_emulation=True: bf16,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture(autouse=True)
def torch_as_before(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("device", "dtype", "autocast", "matmul", "pinned"),
    [
        ("cpu", "fp32", None, "highest", False),
        ("cpu", "bf16", "cpu", "highest", False),
        ("cuda", "fp32", None, "highest", True),
        ("cuda", "bf16", "cuda", "high", True),
    ],
)
def test_device_and_dtype(monkeypatch, device, dtype, autocast, matmul, pinned):
    """Every cell of the table (nanoGPT#654)."""
    torch.set_float32_matmul_precision("highest")
    if device == "cuda":
        FakeCuda(monkeypatch, bf16=True)
    info = init_distributed(dtype)
    assert (info.device.type, info.dtype, info.pin_memory) == (device, dtype, pinned)
    assert torch.get_float32_matmul_precision() == matmul
    context = info.autocast()
    if autocast is None:
        assert isinstance(context, contextlib.nullcontext)
    else:
        assert isinstance(context, torch.autocast)
        assert (context.device, context.fast_dtype) == (autocast, torch.bfloat16)


def test_a_gpu_without_bf16_is_refused_with_the_fix(monkeypatch):
    FakeCuda(monkeypatch, bf16=False)
    with pytest.raises(UserError, match=r"Fake T4 has no bf16; use --train\.dtype fp32"):
        init_distributed("bf16")
    assert init_distributed("fp32").device.type == "cuda"


def test_more_processes_than_gpus(monkeypatch):
    FakeCuda(monkeypatch, bf16=True, count=2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="process 2 has no GPU: 2 are visible"):
        init_distributed("bf16")


@pytest.mark.parametrize(
    ("capability", "deterministic", "first"),
    [
        ((9, 0), False, SDPBackend.CUDNN_ATTENTION),  # H100, H200, GH200
        ((9, 0), True, None),  # its backward pass is not deterministic
        ((8, 0), False, None),  # A100
        ((10, 0), False, None),  # B200
    ],
)
def test_cudnn_attention_first_on_hopper_alone(monkeypatch, capability, deterministic, first):
    """transformers#48163: faster than flash on Hopper, slower on A100 and Blackwell."""
    before = current_order()
    FakeCuda(monkeypatch, bf16=True, capability=capability)
    info = init_distributed("bf16", deterministic)
    with info.attention_kernels():
        order = current_order()
        if first is None:
            assert order == before
        else:
            assert order[0] == first and order[1] == SDPBackend.FLASH_ATTENTION
        # whatever the first one cannot do is done by another one
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    assert current_order() == before


def current_order() -> list[SDPBackend]:
    return [SDPBackend(i) for i in torch._C._get_sdp_priority_order()]


def test_a_gpus_attention_kernels_change_nothing_on_a_cpu(tiny_toml, monkeypatch):
    """The order of the kernels is a GPU's business: the same bits under it, compiled as well."""
    hopper = dataclasses.replace(init_distributed(), cudnn_attention=True)
    model = GPT(GPTConfig(257, 16, 1, 2, 32, "rove"))
    x = torch.arange(32).view(2, 16)
    plain = model(x, x)
    with hopper.attention_kernels():
        assert torch.equal(model(x, x), plain)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x, x)
        torch.testing.assert_close(compiled, plain)
    run(tiny_toml(), "--run_name", "plain")
    monkeypatch.setattr(train, "init_distributed", lambda *args: hopper)
    orders = set()
    forward = GPT.forward

    def watched(self, *args, **kwargs):
        orders.add(current_order()[0])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", watched)
    run("tiny.toml", "--run_name", "hopper")
    assert orders == {SDPBackend.CUDNN_ATTENTION}  # the training does ask for it
    assert hashes("hopper") == hashes("plain")


def test_a_slow_rank_0_is_waited_for():
    """A long save must not end in a time-out of the others (spd#536)."""
    assert distributed.TIMEOUT.total_seconds() >= 1800


def test_bf16_on_a_cpu_trains(tiny_toml):
    run(tiny_toml(), "--run_name", "fp32")
    run("tiny.toml", "--train.dtype", "bf16")
    assert hashes("tiny") != hashes("fp32")
    assert curve("tiny", "val/loss") == pytest.approx(curve("fp32", "val/loss"), abs=0.05)


# -----------------------------------------------------------------------------


def test_batches_come_in_order_from_a_thread_and_end():
    """The numbers of the loader, uint16 on the way; the one after is made meanwhile."""
    made = []

    def rows(step: int, micro_step: int) -> np.ndarray:
        assert threading.current_thread() is not threading.main_thread()
        made.append((step, micro_step))
        return np.array([[65535, 50256, step, micro_step], [0, 1, 32768, 5]], dtype=np.uint16)

    batches = Prefetcher(rows, DistInfo(0, 1, torch.device("cpu")), 3, 5, 2)
    for place in [(3, 0), (3, 1), (4, 0), (4, 1)]:
        x, y = batches.get(*place)
        expected = torch.tensor([[65535, 50256, *place], [0, 1, 32768, 5]])
        assert x.dtype == y.dtype == torch.int64
        assert x.equal(expected[:, :-1]) and y.equal(expected[:, 1:])
        assert x.is_contiguous() and y.is_contiguous()
    assert made == [(3, 0), (3, 1), (4, 0), (4, 1)] and batches.ahead is None
    batches.close()


def test_a_loader_that_fails_is_heard():
    def rows(step: int, micro_step: int) -> None:
        raise UserError("shard 7 is shorter than at the start")

    batches = Prefetcher(rows, DistInfo(0, 1, torch.device("cpu")), 0, 1, 1)
    with pytest.raises(UserError, match="shard 7"):
        batches.get(0, 0)
    batches.close()


# -----------------------------------------------------------------------------


class CountingBackend:
    """A backend for torch.compile that runs the graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> object:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove"])
def test_model_and_loss_are_one_graph(tiny_toml, monkeypatch, pos_emb):
    """Training with evaluations in between: one graph and no break (build-nanogpt#79)."""
    torch.compiler.reset()
    backend, compile = CountingBackend(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda m: compile(m, backend=backend, fullgraph=True))
    argv = ["--model.pos_emb", pos_emb, "--train.eval_interval", "2"]
    run(tiny_toml(), *argv, "--train.compile", "True")
    assert backend.graphs == 1
    assert len(curve("tiny", "val/loss")) == 4


def test_two_graphs_for_all_lengths():
    """An evaluation at several lengths: one graph, then one for every length."""
    torch.compiler.reset()
    backend = CountingBackend()
    model = GPT(GPTConfig(257, 64, 2, 2, 16, "rove"))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for length in (16, 32, 64, 48, 8):
            x = torch.arange(length)[None] % 257
            torch.testing.assert_close(compiled(x, x), model(x, x))
    assert backend.graphs <= 2


def test_no_sync_flag_is_set_before_forward(tiny_toml, monkeypatch):
    """DDP reads it there (build-nanogpt#30): gradients meet in the last micro-step alone."""
    events = []

    class FakeDDP(torch.nn.Module):
        def __init__(self, module, device_ids, gradient_as_bucket_view) -> None:
            super().__init__()
            self.module = module

        @contextlib.contextmanager
        def no_sync(self):
            events.append("no_sync")
            yield
            events.append("end")

        def forward(self, x, y):
            events.append("forward")
            return self.module(x, y)

    monkeypatch.setattr(train, "DDP", FakeDDP)
    monkeypatch.setattr(DistInfo, "is_distributed", property(lambda self: True))
    monkeypatch.setattr(DistInfo, "sum_across_ranks", lambda self, tensor: tensor)
    monkeypatch.setattr(DistInfo, "gather", lambda self, tensor: tensor[None])
    monkeypatch.setattr(DistInfo, "from_rank0", lambda self, what: what())
    run(tiny_toml(), "--train.max_steps", "2")
    micro = ["no_sync", "forward", "end"]
    assert events == 2 * (3 * micro + ["forward"])


@pytest.mark.parametrize(
    ("context", "names"),
    [
        (1, ["0"]),
        (2, ["0", "1"]),
        (6, ["0", "1", "2-3", "4-5"]),
        (9, ["0", "1", "2-3", "4-7", "8"]),
        (1024, ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255", "256-511",
                "512-1023"]),
    ],
)  # fmt: skip
def test_bins_of_positions(monkeypatch, context, names):
    """Every position in one bin: the bins weighted by their widths give the whole loss."""
    losses = torch.arange(3.0 * context).view(3, context)
    monkeypatch.setattr(validation, "token_nll", lambda model, x, y: losses[: len(x)])
    model = GPT(GPTConfig(257, context, 1, 1, 2, "none"))
    batches = [(torch.zeros(n, context), torch.zeros(n, context)) for n in (3, 1)]
    loss, bins = validation.evaluate_loss(model, batches, DistInfo(0, 1, torch.device("cpu")))
    assert list(bins) == names
    every = torch.cat((losses, losses[:1]))
    assert loss == pytest.approx(every.mean().item())
    for name, value in bins.items():
        first, _, last = name.partition("-")
        columns = every[:, int(first) : int(last or first) + 1]
        assert value == pytest.approx(columns.mean().item())
