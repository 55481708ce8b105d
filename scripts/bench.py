"""How fast is it: position modes against each other, and our step against a plain one.

    python -m scripts.bench                            # everything, an hour on a quiet machine
    python -m scripts.bench --only step,rotation --quick

Every comparison is interleaved: in each round each variant runs once, in a random order, and what
counts is the ratio to the baseline within a round; its median and its quartiles are shown. On a CPU
the time is that of the process on all cores (CPU seconds), which other processes disturb little; on
a GPU it is wall time, waited for. docs/benchmarks.md has results.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from data.loader import TrainLoader
from data.shards import save_manifest, write_shard
from data.tokenizer import ByteTokenizer, get_tokenizer
from model import GPT, GPTConfig, rotary_table, rotate
from nanorove import perf
from nanorove.config import Config, load_config_file
from nanorove.distributed import DistInfo, init_distributed
from nanorove.errors import UserError, run_cli
from nanorove.files import strict, write_text_atomic
from nanorove.optim import make_optimizer
from nanorove.runlog import git_state, versions
from nanorove.sampling import generate
from scripts.gpu_check import table, wait

Variants = dict[str, Callable[[], Any]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Args:
    """Measure speed and memory, interleaved; ratios first."""

    only: str = ""
    """Sections, with commas between: step, rotation, head, loader, tokenizers, sampling, breakdown;
    default: all."""
    rounds: int = 41
    """Interleaved rounds of a comparison."""
    quick: bool = False
    """Toy sizes and three rounds: to see that it runs."""
    out: Path = Path("bench")
    """Folder of bench.json (with every single time) and bench.md."""


@dataclass(frozen=True)
class Bench:
    """What every section needs: device, sizes, rounds."""

    info: DistInfo
    config: Config
    rounds: int
    device: str

    def seconds(self, run: Callable[[], Any]) -> float:
        """One run: CPU seconds of this process on a CPU, wall seconds on a GPU."""
        clock = time.process_time if self.info.device.type == "cpu" else time.perf_counter
        wait(self.info)
        start = clock()
        run()
        wait(self.info)
        return clock() - start

    def compare(self, variants: Variants, baseline: str) -> tuple[list[Row], dict[str, list]]:
        """Interleaved rounds: rows with the ratio to `baseline`, and every single time."""
        for run in variants.values():  # compiles, allocates
            run(), run()
        times: dict[str, list[float]] = {name: [] for name in variants}
        order, rng = list(variants), random.Random(0)
        for _ in range(self.rounds):
            rng.shuffle(order)
            for name in order:
                times[name].append(self.seconds(variants[name]))
        rows = []
        for name, run in variants.items():
            ratios = [a / b for a, b in zip(times[name], times[baseline], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            spread = f"{low:.3f} to {high:.3f}"
            rows.append(
                {"variant": name, f"time / {baseline}": statistics.median(ratios),
                 "quartiles": spread, "ms": 1000 * statistics.median(times[name]),
                 "peak MiB": self.peak(run) / 2**20}
            )  # fmt: skip
        return rows, times

    def peak(self, run: Callable[[], Any]) -> int:
        """Most bytes that `run` allocates on top of what is there before."""
        if self.info.device.type == "cpu":
            return peak_bytes(run)
        torch.cuda.reset_peak_memory_stats(self.info.device)
        before = torch.cuda.memory_allocated(self.info.device)
        run()
        return torch.cuda.max_memory_allocated(self.info.device) - before


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that torch's CPU allocator holds during `run`, above those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return int(max(held, default=0))


# -----------------------------------------------------------------------------
# what is compared with: the most ordinary GPT-2 step


class PlainBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        C = config.n_embd
        self.heads = config.n_head
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """Learned positions, tied head, loss over all logits at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(idx) + self.positions(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


# -----------------------------------------------------------------------------
# sections: each gives tables, (title, rows, every single time or None)

Tables = Iterator[tuple[str, list[Row], Any]]


def batch_of(bench: Bench) -> torch.Tensor:
    """(B, T + 1) random token ids on the device."""
    config = bench.config
    shape = (config.train.micro_batch_size, config.model.block_size + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.model.vocab_size, shape, generator=generator)
    return ids.to(bench.info.device)


def training_step(
    bench: Bench, pos_emb: str, dtype: str, compiled: bool, **how: object
) -> Callable[[], None]:
    """One optimizer step of one micro batch, as in train.py; pos_emb "plain": of PlainGPT."""
    info = dataclasses.replace(bench.info, dtype=dtype)
    ids = batch_of(bench)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if pos_emb == "plain":
        model = PlainGPT(bench.config.model).to(info.device)
        fused = bench.info.device.type == "cuda"  # as nanoGPT does
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused)
    else:
        config = dataclasses.replace(bench.config.model, pos_emb=pos_emb)
        model = GPT(config, **how).to(info.device)
        optimizer = make_optimizer(model, bench.config.train)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        with info.autocast():
            loss = run(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bench_step(bench: Bench) -> Tables:
    """Position modes, and the plain step: eager and compiled, fp32 and bf16."""
    model = bench.config.model
    tokens = bench.config.train.micro_batch_size * model.block_size
    for compiled in (False, True):
        for dtype in ("fp32", "bf16"):
            torch.compiler.reset()
            names = ("rope", "rove", "learned", "plain")
            steps = {name: training_step(bench, name, dtype, compiled) for name in names}
            rows, times = bench.compare(steps, "rope")
            to_plain = [a / b for a, b in zip(times["learned"], times["plain"], strict=True)]
            for row in rows:
                row["tokens/s"] = 1000 * tokens / row["ms"]
                gpt = dataclasses.replace(model, pos_emb=row["variant"].replace("plain", "learned"))
                train = dataclasses.replace(bench.config.train, dtype=dtype)
                config = dataclasses.replace(bench.config, model=gpt, train=train)
                row["MFU %"] = perf.mfu_pct(config, row["tokens/s"], bench.device, 1)
                if row["variant"] == "learned":
                    row["time / plain"] = statistics.median(to_plain)
            yield f"step, {'compiled' if compiled else 'eager'}, {dtype}", rows, times
    torch.compiler.reset()
    saving = {
        "rove": {}, "bf16 residual": dict(bf16_residual=True),
        "loss_chunk 1024": dict(loss_chunk=1024),
        "activation checkpointing": dict(activation_checkpointing=True),
    }  # fmt: skip
    steps = {
        name: training_step(bench, "rove", "bf16", False, **how) for name, how in saving.items()
    }
    yield "step of RoVE that saves memory, eager, bf16", *bench.compare(steps, "rove")


def bench_rotation(bench: Bench) -> Tables:
    """What RoPE and RoVE add around attention, forward and backward, without the rest."""
    model, device = bench.config.model, bench.info.device
    cos, sin = (t.float().to(device)[:, None] for t in rotary_table(model, model.block_size))
    shape = (bench.config.train.micro_batch_size, model.block_size, model.n_head, model.head_dim)

    def rope(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor) -> tuple:
        return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous(), y

    def rove(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor) -> tuple:
        return *(rotate(t, cos, sin) for t in (q, k, v)), rotate(y, cos, -sin)

    for dtype in (torch.float32, torch.bfloat16):
        qkv = torch.randn(*shape[:2], 3, *shape[2:], dtype=dtype, device=device)
        y = torch.randn(shape, dtype=dtype, device=device).requires_grad_()
        qkv.requires_grad_()
        torch.compiler.reset()

        def run(f: Callable[..., tuple], qkv: torch.Tensor = qkv, y: torch.Tensor = y) -> None:
            outs = f(*qkv.unbind(2), y)
            torch.autograd.grad(outs, (qkv, y), [t.detach() for t in outs])

        forms = {"rope": rope, "rove": rove}
        variants = {f"{name}, eager": functools.partial(run, f) for name, f in forms.items()}
        variants |= {
            f"{name}, compiled": functools.partial(run, torch.compile(f))
            for name, f in forms.items()
        }
        name = f"rotations of a layer, {str(dtype).removeprefix('torch.')}"
        yield name, *bench.compare(variants, "rope, eager")


def bench_head(bench: Bench) -> Tables:
    """Head and loss over GPT-2's vocabulary, forward and backward."""
    C, V = bench.config.model.n_embd, 4096 if bench.config.model.n_layer == 2 else 50257
    device = bench.info.device
    N, chunk = (512, 128) if V == 4096 else (2048, 256)
    if device.type == "cuda":
        N, chunk = 65536, 8192
    hidden = torch.randn(N, C, device=device, requires_grad=True)
    weight = (0.02 * torch.randn(64 * -(-V // 64), C, device=device)).requires_grad_()
    targets = torch.randint(V, (N,), device=device)

    def plain(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight)[:, :V], targets, reduction="sum")

    def chunks(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        return sum(checkpoint(plain, h, t, use_reentrant=False) for h, t in parts)

    def torchs_own(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        options = nn.LinearCrossEntropyOptions(True, chunk)
        return F.linear_cross_entropy(hidden, weight[:V], targets, reduction="sum", options=options)

    torch.compiler.reset()
    forms = {"plain": plain, "plain, compiled": torch.compile(plain),
             f"linear_cross_entropy, chunks of {chunk}": torchs_own,
             f"checkpointed chunks of {chunk}": chunks}  # fmt: skip

    def run(f: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(f(hidden, targets), (hidden, weight))

    variants = {name: functools.partial(run, f) for name, f in forms.items()}
    yield f"head and loss, {N} x {C} x {V}, fp32", *bench.compare(variants, "plain")


def shards_of(folder: Path, count: int, tokens: int) -> Path:
    """A data folder with `count` training shards of random tokens."""
    folder.mkdir()
    rng, shards = np.random.RandomState(0), []
    for i in range(count + 1):
        name, split = f"bench_{i:06d}.bin", "train" if i else "val"
        ids = rng.randint(0, 50257, tokens).astype(np.uint16)
        sha256 = write_shard(folder / name, ids)
        shards.append({"file": name, "split": split, "tokens": tokens, "sha256": sha256})
    about = {"name": "gpt2", "vocab_size": 50257, "eot": 50256, "sha256": ""}
    save_manifest(folder, {"format": "nanorove-shards", "version": 1, "tokenizer": about,
                           "shards": shards})  # fmt: skip
    return folder


def bench_loader(bench: Bench) -> Tables:
    """Shuffled windows, and the start with few and many shards. CPU seconds, on every device."""
    B, T, steps = 64, 1024, 3 if bench.config.model.n_layer == 2 else 30
    with tempfile.TemporaryDirectory() as tmp:
        data = shards_of(Path(tmp) / "large", 2, 2_000_000)
        share = dict(block_size=T, micro_batch_size=B, sequences_per_step=B, seed=0)
        loader = TrainLoader(data, **share)
        memmap = np.memmap(data / "bench_000001.bin", dtype="<u2", mode="r", offset=1024)

        def ordinary(step: int) -> None:  # random offsets, an array for each row
            starts = np.random.RandomState(step).randint(0, len(memmap) - T - 1, B)
            rows = [memmap[s : s + T + 1].astype(np.int64) for s in starts]
            torch.stack([torch.from_numpy(r[:-1]) for r in rows])
            torch.stack([torch.from_numpy(r[1:]) for r in rows])

        forms = {
            "TrainLoader.rows (uint16, what training takes)": lambda step: loader.rows(step, 0),
            "TrainLoader.batch (int64)": lambda step: loader.batch(step, 0),
            "random rows of a memmap, one by one": ordinary,
        }
        steps = min(steps, loader.n_windows // B)  # within one epoch
        times: dict[str, list[float]] = {name: [] for name in forms}
        loader.rows(0, 0)
        for _ in range(bench.rounds):
            for name, form in forms.items():
                start = time.process_time()
                for step in range(steps):
                    form(step)
                times[name].append(time.process_time() - start)
        rows = [
            {"variant": name, "Mtok per CPU-second": B * T * steps / statistics.median(t) / 1e6,
             "slowest": B * T * steps / max(t) / 1e6}
            for name, t in times.items()
        ]  # fmt: skip
        few = {n: shards_of(Path(tmp) / f"{n}", n, 2000) for n in (1, 10, 100)}
        starts: dict[str, list[float]] = {f"{n} shards": [] for n in few}
        for _ in range(bench.rounds):
            for n, folder in few.items():
                start = time.process_time()
                TrainLoader(folder, **share | dict(block_size=64))
                starts[f"{n} shards"].append(time.process_time() - start)
        start_rows = [
            {"variant": name, "ms": 1000 * statistics.median(t)} for name, t in starts.items()
        ]
    yield "loader, 64 x 1024", rows, times
    yield "start of the loader", start_rows, starts


def bench_tokenizers(bench: Bench) -> Tables:
    """Text to ids. CPU seconds; the text is Python's standard library."""
    limit = 2**18 if bench.config.model.n_layer == 2 else 2**24
    texts, size = [], 0
    for path in sorted(Path(contextlib.__file__).parent.glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(texts[-1].encode())
        if size > limit:
            break
    makers = {
        "bytes": ByteTokenizer,
        "gpt2, tiktoken": lambda: get_tokenizer("gpt2"),
        "gpt2, gigatoken (a sample checked)": lambda: get_tokenizer("gpt2", "gigatoken"),
    }
    rows, times = [], {}
    for name, make in makers.items():
        try:
            tokenizer = make()
        except UserError as error:  # not installed, or no network for the vocabulary
            rows.append({"variant": name, "note": str(error)})
            continue
        times[name] = []
        for _ in range(min(bench.rounds, 5)):
            start = time.process_time()
            ids = tokenizer.encode_many(texts)
            times[name].append(time.process_time() - start)
        seconds = statistics.median(times[name])
        tokens = sum(map(len, ids))
        rows.append(
            {"variant": name, "MB per CPU-second": size / seconds / 1e6,
             "Mtok per CPU-second": tokens / seconds / 1e6, "bytes per token": size / tokens}
        )  # fmt: skip
    yield "tokenizers", rows, times


def bench_sampling(bench: Bench) -> Tables:
    """Greedy text with the KV cache, and by the whole forward pass for every token."""
    config = dataclasses.replace(bench.config.model, pos_emb="rove")
    model = GPT(config).to(bench.info.device).eval()
    prompt = torch.zeros(1, 16, dtype=torch.int64, device=bench.info.device)
    new = min(128, config.block_size - 16)

    def cached() -> None:
        for _ in generate(model, prompt, new, temperature=0):
            pass

    @torch.inference_mode()
    def whole() -> None:
        ids = prompt
        for _ in range(new):
            ids = torch.cat((ids, model.head(model.hidden(ids)[:, -1]).argmax(-1)[:, None]), 1)

    rows, times = bench.compare({"KV cache": cached, "no cache": whole}, "no cache")
    for row in rows:
        row["tokens/s"] = 1000 * new / row["ms"]
    yield f"sampling, {new} tokens after 16", rows, times


def bench_breakdown(bench: Bench) -> Tables:
    """Where a step of RoVE goes, by torch's profiler: the largest operators or kernels."""
    cuda = bench.info.device.type == "cuda"
    step = training_step(bench, "rove", "bf16" if cuda else "fp32", cuda)
    step(), step()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        wait(bench.info)
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda e: -getattr(e, name))
    total = sum(getattr(e, name) for e in events)
    rows = [
        {"operator": e.key[:60], "share": getattr(e, name) / total,
         "ms": getattr(e, name) / 3000, "calls": e.count // 3}
        for e in events[:15]
    ]  # fmt: skip
    yield "profile of a step", rows, None


SECTIONS = {
    "step": bench_step, "rotation": bench_rotation, "head": bench_head, "loader": bench_loader,
    "tokenizers": bench_tokenizers, "sampling": bench_sampling, "breakdown": bench_breakdown,
}  # fmt: skip


def sizes(quick: bool, device: torch.device) -> Config:
    """GPT-2 124M on a GPU; 6 layers of 384, 256 bytes, on a CPU; a toy with --quick."""
    configs = Path(__file__).resolve().parent.parent / "configs"
    config = load_config_file(configs / "gpt2_124m_rove.toml")
    batch = config.train.micro_batch_size
    model = config.model
    if quick:
        model, batch = GPTConfig(257, 64, 2, 2, 64, "rove"), 2
    elif device.type == "cpu":
        model, batch = GPTConfig(257, 256, 6, 6, 384, "rove"), 8
    train = dataclasses.replace(config.train, micro_batch_size=batch)
    return dataclasses.replace(config, model=model, train=train)


def main(args: Args) -> dict[str, Any]:
    """Measure, print Markdown, write both files; gives back what is in bench.json."""
    wanted = [name.strip() for name in args.only.split(",") if name.strip()] or list(SECTIONS)
    if unknown := [name for name in wanted if name not in SECTIONS]:
        raise UserError(f"--only {unknown[0]}: choose from {', '.join(SECTIONS)}")
    if args.rounds < 2:
        raise UserError(f"--rounds {args.rounds}: at least 2, or there is no spread")
    info = init_distributed("bf16")
    cuda = info.device.type == "cuda"
    device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    config = sizes(args.quick, info.device)
    bench = Bench(info, config, 3 if args.quick else args.rounds, device)
    model, batch = config.model, config.train.micro_batch_size
    report: dict[str, Any] = {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "threads": torch.get_num_threads(),
        "quick": args.quick,
        "rounds": bench.rounds,
        "time": "wall" if cuda else "CPU seconds of the process",
        "model": dataclasses.asdict(model) | {"micro_batch_size": batch},
        "versions": versions(),
        **git_state(),
        "tables": {},
        "times": {},
    }
    about = (
        f"{report['date']}, {device}, {report['threads']} threads, torch {torch.__version__};"
        f" {model.n_layer} layers, {model.n_embd} channels, {batch} x {model.block_size} tokens,"
        f" vocabulary {model.vocab_size}; {bench.rounds} interleaved rounds, {report['time']}"
        + ("; what is called fp32 is TF32" if cuda else "")
        + (" (--quick: toy sizes, no result)" if args.quick else "")
    )
    text = [about]
    print(about, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    with info.attention_kernels():
        for name in wanted:
            for title, rows, times in SECTIONS[name](bench):
                report["tables"][title], report["times"][title] = rows, times
                text.append(f"### {title}\n\n{table(rows)}")
                print(f"\n{text[-1]}", flush=True)
                # after every table: an hour's work is not lost to Ctrl-C
                result = json.dumps(strict(report), indent=1) + "\n"
                write_text_atomic(args.out / "bench.json", result)
                write_text_atomic(args.out / "bench.md", "\n\n".join(text) + "\n")
    return report


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Args, prog="python -m scripts.bench")) and None)
