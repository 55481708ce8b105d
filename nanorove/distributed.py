"""Who am I among the processes, on which device, in which precision: decided here, once.

    device, dtype   matrix products               left in fp32 is   AdamW   backend
    cuda,   bf16    bf16 autocast                 TF32              fused   nccl
    cuda,   fp32    plain fp32                    plain fp32        fused   nccl
    cpu,    bf16    bf16 autocast                 plain fp32        fused   gloo
    cpu,    fp32    plain fp32 (the reference)    plain fp32        fused   gloo

Weights, gradients and optimizer are fp32 in every row. Attention kernels are torch's choice, but on
Hopper (compute capability 9.0) cuDNN's come first, except where `deterministic` rules them out.
"""

import contextlib
import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanorove.errors import UserError, run_cli

Dtype = Literal["fp32", "bf16"]
T = TypeVar("T")

# a save or an evaluation of one rank may take this long before the others give it up; a rank that
# died is noticed at once all the same, by its closed connection and by torchrun
TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class DistInfo:
    """One process of a training: rank of world_size, on `device`, matrix products in `dtype`."""

    rank: int
    world_size: int
    device: torch.device
    dtype: Dtype = "fp32"
    cudnn_attention: bool = False

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def pin_memory(self) -> bool:
        """Batches go to a GPU from pinned memory, so that the copy waits for nothing."""
        return self.device.type == "cuda"

    def autocast(self) -> contextlib.AbstractContextManager:
        """For forward passes: matrix products in bf16, or nothing at all."""
        if self.dtype == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def attention_kernels(self) -> contextlib.AbstractContextManager:
        """In which order torch's attention tries its kernels; around a whole training, since
        backward may compute a forward pass again. What cuDNN cannot do (fp32), the next one does.
        """
        if self.cudnn_attention:
            order = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
            return sdpa_kernel([getattr(SDPBackend, name) for name in order], set_priority=True)
        return contextlib.nullcontext()  # torch's own order: flash first

    def print0(self, text: str) -> None:
        """Print on rank 0 alone. Nobody may be there to read it (a closed terminal, a `| tee` that
        Ctrl-C ended), and that must not cost the checkpoint that comes next."""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                print(text, flush=True)

    def sum_across_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on every rank (in place)."""
        if self.is_distributed:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """(...) of each rank -> (world_size, ...) on every rank."""
        if not self.is_distributed:
            return tensor[None]
        rows = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(rows, tensor)
        return torch.stack(rows)

    def from_rank0(self, what: Callable[[], T]) -> T:
        """What `what()` gives on rank 0, on every rank; the others wait for it.

        A UserError of rank 0 is raised on every rank: none is left alone in a collective.
        """
        if not self.is_distributed:
            return what()
        answer: list = [None, None]
        if self.rank == 0:
            try:
                answer[0] = what()
            except UserError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise UserError(answer[1])
        return answer[0]


def init_distributed(dtype: Dtype = "fp32", deterministic: bool = False) -> DistInfo:
    """Join the processes that torchrun started (NCCL on GPUs, gloo on CPUs); alone without it.

    deterministic: only kernels that give the same bits each time; CPU kernels do so anyway. Raises
    UserError for more processes on this machine than GPUs, and for a GPU without bf16.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device, cudnn_attention = torch.device("cpu"), False
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {local_rank} has no GPU: {torch.cuda.device_count()} are visible;"
                f" lower torchrun's --nproc_per_node"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if dtype == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UserError(
                f"{torch.cuda.get_device_name()} has no bf16; use --train.dtype fp32 (slower)"
            )
        # on an H100 about 5 % of a 124M's step; elsewhere flash is the faster one
        hopper = torch.cuda.get_device_capability(device) == (9, 0)
        cudnn_attention = hopper and not deterministic
        # TF32 for what autocast leaves in fp32, unless fp32 was asked for
        torch.set_float32_matmul_precision("high" if dtype == "bf16" else "highest")
    if deterministic:  # cuBLAS reads it at its first call
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)  # both ways: a process may train twice
    if world_size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        ranks = dict(rank=int(os.environ["RANK"]), world_size=world_size)
        dist.init_process_group(backend, timeout=TIMEOUT, store=_store(world_size), **ranks)
    rank = int(os.environ.get("RANK", 0))
    return DistInfo(rank, world_size, device, dtype, cudnn_attention)


def _store(world_size: int) -> dist.Store | None:
    """Where the processes find each other; None leaves it to torch.

    On one machine torchrun (torch 2.13) keeps its store when it restarts the workers, and these may
    read the addresses of the dead and wait for them for ever; a prefix keeps the lives apart.
    Machines count restarts each on its own, so there the store must be a new one each time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if os.environ["GROUP_WORLD_SIZE"] != "1":
        if os.environ["RANK"] == "0":
            print(
                "note: restarts on several machines need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in"
                " the environment of torchrun, see docs/training.md",
                flush=True,
            )
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, world_size, is_master=False, timeout=TIMEOUT)
    return dist.PrefixStore(f"life_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def run_distributed(main: Callable[[], object]) -> None:
    """`run_cli` for a script that joins a process group: it leaves the group on errors too."""

    def then_leave() -> None:
        try:
            main()
        finally:
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()

    run_cli(then_leave)
