"""Batches as a pure function of (seed, step, micro_step, rank): nothing to save, nothing to lose.

The training shards are one long stream of tokens. It is cut into windows of block_size + 1 tokens
with stride block_size (inputs, and targets one further), across shard borders, so that each token
is predicted once an epoch; only the last, partial window is dropped. The order of an epoch is
drawn from (seed, epoch): the shards in a random order, then the windows that start in a shard in
a random order, so that a cold or network disk reads each shard once.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from data.shards import load_manifest, read_shard, shard_paths
from nanorove.errors import UserError


class TokenStream:
    """The shards of one split as one array of tokens, memory-mapped."""

    def __init__(self, data_dir: str | Path, split: str) -> None:
        paths = shard_paths(data_dir, load_manifest(data_dir), split)
        self.shards = [read_shard(path) for path in paths]
        # shard i holds the tokens starts[i] ... starts[i + 1] - 1 of the stream
        self.starts = np.concatenate(([0], np.cumsum([len(s) for s in self.shards])))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start ... start + count - 1 of the stream: (count,) int64."""
        out = np.empty(count, dtype=np.int64)
        done, shard = 0, int(np.searchsorted(self.starts, start, side="right")) - 1
        while done < count:
            offset = start + done - self.starts[shard]
            piece = self.shards[shard][offset : offset + count - done]
            out[done : done + len(piece)] = piece
            done, shard = done + len(piece), shard + 1
        return out


def _windows(
    stream: TokenStream, indices: np.ndarray, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows by index -> (x, y), each (B, T) int64; y is x one token later."""
    rows = np.stack([stream.read(int(i) * block_size, block_size + 1) for i in indices])
    tokens = torch.from_numpy(rows)  # (B, T + 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


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
        self.stream = TokenStream(data_dir, "train")
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

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step * self.sequences_per_step / self.n_windows

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's inputs and targets, each (micro_batch_size, block_size) int64, on the CPU."""
        place = (micro_step * self.world_size + self.rank) * self.micro_batch_size
        sequences = step * self.sequences_per_step + place + np.arange(self.micro_batch_size)
        return _windows(self.stream, self.window_indices(sequences), self.block_size)

    def window_indices(self, sequences: np.ndarray) -> np.ndarray:
        """Which window of the stream each sequence number of the training is."""
        return np.array([self._window(*divmod(int(s), self.n_windows)) for s in sequences])

    def _window(self, epoch: int, place: int) -> int:
        shards, ends = _shard_order(self.seed, epoch, self.counts)
        turn = int(np.searchsorted(ends, place, side="right"))
        shard = int(shards[turn])
        n = self.counts[shard]
        within = _window_order(self.seed, epoch, shard, n)
        return int(self.first[shard] + within[place - (ends[turn] - n)])


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
        self.stream = TokenStream(data_dir, "val")
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
            yield _windows(
                self.stream, self.indices[i : i + self.micro_batch_size], self.block_size
            )
