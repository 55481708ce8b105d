"""Who am I among the processes, on which device, in which precision: decided here, once."""

import contextlib
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanorove.errors import UserError


@dataclass(frozen=True)
class DistInfo:
    """One process of a training: rank of world_size, on `device`."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def autocast(self) -> contextlib.AbstractContextManager:
        """bf16 matrix products on a GPU, plain fp32 on a CPU (where bf16 is no gain in general)."""
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def print0(self, text: str) -> None:
        """Print on rank 0 alone."""
        if self.rank == 0:
            print(text, flush=True)

    def sum_across_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on every rank (in place)."""
        if self.is_distributed:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.is_distributed:
            dist.barrier()


def init_distributed() -> DistInfo:
    """Join the processes that torchrun started (NCCL on GPUs, gloo on CPUs); alone without it.

    Raises UserError for more processes on this machine than GPUs.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {local_rank} has no GPU: {torch.cuda.device_count()} are visible;"
                f" lower torchrun's --nproc_per_node"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return DistInfo(int(os.environ.get("RANK", 0)), world_size, device)


def shutdown_distributed() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
