"""Batches as a pure function of (seed, step, micro_step, rank): nothing to save, nothing to lose.

The training shards are one long stream of tokens. It is cut into windows of block_size + 1 tokens
with stride block_size (inputs, and targets one further), across shard borders, so that each token
is predicted once an epoch; only the last, partial window is dropped. The order of an epoch is
drawn from (seed, epoch): the shards in a random order, then the windows that start in a shard in
a random order, so that a cold or network disk reads each shard once.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from data.shards import HEADER_BYTES, TokenStream, load_manifest
from nanorove.errors import UserError


def _tensors(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows (B, T + 1) -> (x, y), each (B, T) int64; y is x one token later."""
    tokens = torch.from_numpy(rows.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class ShardReader:
    """The shard in use and the next one, as arrays in memory, each read from first to last.

    The windows of a shard are taken in a random order, and a cold or network disk is slow at that.
    So a shard is read once, whole, and the one after it in a thread while this one is used: at most
    two are in memory (uint16), and the change from one to the next waits for nothing.
    """

    def __init__(self, stream: TokenStream, block_size: int) -> None:
        self.stream, self.block_size = stream, block_size
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="next-shard")
        self.shard, self.tokens = -1, np.empty(0, dtype=np.uint16)
        self.ahead: tuple[int, Future] | None = None

    def get(self, shard: int, next_shard: int) -> np.ndarray:
        """Tokens of `shard` and the block_size ones behind it, which its last window may need;
        `next_shard` is what will be asked for after it."""
        if shard != self.shard:
            self.tokens = np.empty(0, dtype=np.uint16)  # before another one comes
            ready = self.ahead is not None and self.ahead[0] == shard
            self.tokens = self.ahead[1].result() if ready else self.read(shard)
            self.shard, self.ahead = shard, None
            if next_shard != shard:
                self.ahead = next_shard, self.pool.submit(self.read, next_shard)
        return self.tokens

    def read(self, shard: int) -> np.ndarray:
        """Read one shard from the disk. Raises UserError if it is not as long as at the start."""
        path, start = self.stream.paths[shard], int(self.stream.starts[shard])
        count = len(self.stream.shards[shard])
        behind = min(self.block_size, len(self.stream) - start - count)
        tokens = np.empty(count + behind, dtype="<u2")
        with path.open("rb") as file:
            file.seek(HEADER_BYTES)
            got = file.readinto(memoryview(tokens[:count]).cast("B"))
        if got != 2 * count:
            raise UserError(f"{path}: shorter than at the start; prepare or download it again")
        if behind:
            tokens[count:] = self.stream.read(start + count, behind)
        return tokens


class TrainLoader:
    """Training batches. Sequence number s of the training (step * sequences per step + its place
    in the step) is window order(epoch)[s mod windows]; ranks and micro-steps share out the
    sequences of a step, so that its tokens do not depend on the number of GPUs."""

    def __init__(
        self,
        data_dir: str | Path,
        *,
        block_size: int,
        micro_batch_size: int,
        sequences_per_step: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Raises UserError if the split is shorter than one window (block_size + 1 tokens)."""
        self.stream = TokenStream(data_dir, load_manifest(data_dir), "train")
        self.block_size = block_size
        self.micro_batch_size = micro_batch_size
        self.sequences_per_step = sequences_per_step
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.n_windows = (len(self.stream) - 1) // block_size  # the last one needs its + 1 token
        if self.n_windows < 1:
            raise UserError(
                f"{data_dir}: {len(self.stream):,} training tokens; one window of block_size"
                f" {block_size} needs {block_size + 1:,}: prepare more, or lower block_size"
            )
        # the windows first[i] ... first[i + 1] - 1 start in shard i
        first = -(-self.stream.starts // block_size)
        self.first = np.minimum(first, self.n_windows)
        self.counts = tuple(int(n) for n in np.diff(self.first))
        self.reader = ShardReader(self.stream, block_size)

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step * self.sequences_per_step / self.n_windows

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's inputs and targets, each (micro_batch_size, block_size) int64, on the CPU."""
        return _tensors(self.rows(step, micro_step))

    def rows(self, step: int, micro_step: int) -> np.ndarray:
        """The same as windows: (micro_batch_size, block_size + 1) uint16."""
        place = (micro_step * self.world_size + self.rank) * self.micro_batch_size
        sequences = step * self.sequences_per_step + place + np.arange(self.micro_batch_size)
        rows = np.empty((self.micro_batch_size, self.block_size + 1), dtype=np.uint16)
        for row, sequence in zip(rows, sequences.tolist(), strict=True):
            row[:] = self._window(sequence)  # a copy, so that a shard can go when it is used up
        return rows

    def _window(self, sequence: int) -> np.ndarray:
        """The window that is sequence number `sequence` of the training: (T + 1,) uint16."""
        epoch, place = divmod(sequence, self.n_windows)
        shards, ends = _shard_order(self.seed, epoch, self.counts)
        turn = int(np.searchsorted(ends, place, side="right"))
        shard, n = int(shards[turn]), self.counts[int(shards[turn])]
        within = _window_order(self.seed, epoch, shard, n)
        window = int(self.first[shard] + within[place - (ends[turn] - n)])
        tokens = self.reader.get(shard, self._next_shard(epoch, turn))
        start = window * self.block_size - int(self.stream.starts[shard])
        return tokens[start : start + self.block_size + 1]

    def _next_shard(self, epoch: int, turn: int) -> int:
        """The shard whose turn comes next, maybe in the next epoch; shards in which no window
        starts have no turn."""
        while True:
            shards, _ = _shard_order(self.seed, epoch, self.counts)
            for shard in shards[turn + 1 :]:
                if self.counts[shard]:
                    return int(shard)
            epoch, turn = epoch + 1, -1


# RandomState and not default_rng: numpy promises that its numbers never change
@lru_cache(maxsize=4)
def _shard_order(seed: int, epoch: int, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Shards in this epoch's order, and the number of windows up to and with each."""
    order = np.random.RandomState([seed, epoch]).permutation(len(counts))
    return order, np.cumsum(np.array(counts)[order])


@lru_cache(maxsize=4)
def _window_order(seed: int, epoch: int, shard: int, count: int) -> np.ndarray:
    """The windows that start in a shard, in this epoch's order."""
    return np.random.RandomState([seed, epoch, shard]).permutation(count)


class ValLoader:
    """The first val_tokens of the validation split as disjoint windows, always the same ones,
    whatever the batch size and the number of ranks."""

    def __init__(
        self,
        data_dir: str | Path,
        *,
        block_size: int,
        micro_batch_size: int,
        val_tokens: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Raises UserError if the split is shorter than val_tokens, or that than one window."""
        self.stream = TokenStream(data_dir, load_manifest(data_dir), "val")
        self.block_size, self.micro_batch_size = block_size, micro_batch_size
        n_windows = val_tokens // block_size
        if n_windows < 1 or len(self.stream) < n_windows * block_size + 1:
            raise UserError(
                f"{data_dir}: train.val_tokens ({val_tokens:,}) must be at least one block_size"
                f" ({block_size:,}) and below the {len(self.stream):,} tokens of the val split"
            )
        self.indices = np.arange(rank, n_windows, world_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's share: (x, y), each (up to micro_batch_size, block_size) int64."""
        for i in range(0, len(self.indices), self.micro_batch_size):
            starts = self.indices[i : i + self.micro_batch_size] * self.block_size
            yield _tensors(np.stack([self.stream.read(s, self.block_size + 1) for s in starts]))
