"""Batches on their way to the device: made one ahead in a thread, sent as uint16, cast there."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from nanorove.distributed import DistInfo

Batch = tuple[torch.Tensor, torch.Tensor]


class Prefetcher:
    """Puts rows(step, micro_step) of the loader on the device, and prepares the next ones.

    rows: (B, T + 1) uint16; y is x one token later, so one row holds both. The thread's copy into
    pinned memory and the transfer overlap with the computation; nothing in here waits for the GPU.
    `wait_s` adds up how long the training waited for data.
    """

    def __init__(
        self,
        rows: Callable[[int, int], np.ndarray],
        info: DistInfo,
        start_step: int,
        end_step: int,
        accum_steps: int,
    ) -> None:
        self.rows, self.info = rows, info
        self.places = ((s, m) for s in range(start_step, end_step) for m in range(accum_steps))
        self.pool = ThreadPoolExecutor(1, "next-batch", self._start_thread)
        self.wait_s = 0.0
        self._submit()

    def _start_thread(self) -> None:
        if self.info.device.type == "cuda":  # or every process would pin its memory on GPU 0
            torch.cuda.set_device(self.info.device)

    def _submit(self) -> None:
        place = next(self.places, None)
        self.ahead = None if place is None else (place, self.pool.submit(self._make, *place))

    def _make(self, step: int, micro_step: int) -> torch.Tensor:
        tokens = torch.from_numpy(self.rows(step, micro_step))
        return tokens.pin_memory() if self.info.pin_memory else tokens

    def get(self, step: int, micro_step: int) -> Batch:
        """(x, y), each (B, T) int64 on the device. Batches are taken in their order."""
        place, future = self.ahead
        assert place == (step, micro_step), f"{place} is next, not {(step, micro_step)}"
        start = time.perf_counter()
        tokens = future.result()
        self.wait_s += time.perf_counter() - start
        self._submit()
        tokens = tokens.to(self.info.device, non_blocking=True).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
