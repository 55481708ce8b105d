"""The order of the data against a second, brute-force implementation of its specification."""

import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import loader as module
from data.loader import TrainLoader, ValLoader
from nanorove.errors import UserError
from tests.conftest import write_data_dir


def numbered_shards(sizes: list[int]) -> list[list[int]]:
    """The token at place i of the stream is i, so that a window tells where it comes from."""
    ends = np.cumsum(sizes)
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def reference_order(sizes: list[int], block_size: int, seed: int, epoch: int) -> list[int]:
    """First tokens of the windows of one epoch, in order, straight from the specification."""
    total = sum(sizes)
    shard_of = np.repeat(np.arange(len(sizes)), sizes)  # of every token
    starts = [t for t in range(0, total, block_size) if t + block_size + 1 <= total]
    order = []
    for shard in np.random.RandomState([seed, epoch]).permutation(len(sizes)):
        here = [t for t in starts if shard_of[t] == shard]
        permutation = np.random.RandomState([seed, epoch, shard]).permutation(len(here))
        order += [here[i] for i in permutation]
    return order


def loader(folder: Path, block_size: int, seed: int, micro: int, steps: int, **kwargs):
    return TrainLoader(folder, block_size=block_size, micro_batch_size=micro,
                       sequences_per_step=steps, seed=seed, **kwargs)  # fmt: skip


@st.composite
def cases(draw) -> dict:
    block_size = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    if sum(sizes) < block_size + 1:
        sizes[-1] += block_size
    world_size, micro = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return dict(
        sizes=sizes, block_size=block_size, seed=draw(st.integers(0, 2**32 - 1)),
        world_size=world_size, micro=micro, accumulation=draw(st.integers(1, 3)),
    )  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_against_brute_force(case):
    """Every window of an epoch once, across shard borders, in shard-grouped seeded order, shared
    out to ranks and micro-steps by global position alone."""
    sizes, T, seed = case["sizes"], case["block_size"], case["seed"]
    world, micro, accumulation = case["world_size"], case["micro"], case["accumulation"]
    per_step = world * micro * accumulation
    per_epoch = len(reference_order(sizes, T, seed, 0))
    epochs = [reference_order(sizes, T, seed, e) for e in range(2 + 2 * per_step // per_epoch)]
    expected = sum(epochs, [])
    steps = min(2 * per_epoch // per_step + 1, len(expected) // per_step)

    with tempfile.TemporaryDirectory() as tmp:
        folder = write_data_dir(Path(tmp), numbered_shards(sizes), [[0, 1]])
        loaders = [
            loader(folder, T, seed, micro, per_step, rank=r, world_size=world) for r in range(world)
        ]
        seen = []
        for step in range(steps):
            for micro_step in range(accumulation):
                for rank in range(world):
                    x, y = loaders[rank].batch(step, micro_step)
                    assert x.shape == y.shape == (micro, T)
                    seen += x[:, 0].tolist()
                    # the stream's token i is i: so each row must go on one by one from its first
                    assert torch.equal(x, x[:, :1] + torch.arange(T))
                    assert torch.equal(y, x + 1)
        assert seen == expected[: len(seen)]
        assert len(seen) == steps * per_step
    for epoch in epochs:  # the reference itself: complete, nothing twice
        assert sorted(epoch) == list(range(0, T * per_epoch, T))
    assert per_epoch == (sum(sizes) - 1) // T


SIZES = [23, 1, 40, 2, 17]  # 83 tokens; two shards are shorter than a window


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_data_dir(tmp_path_factory.mktemp("data"), numbered_shards(SIZES), [[0, 1]])


def test_order_of_one_small_case_worked_out_by_hand(folder):
    """Windows of 10 in shards of 23, 1, 40, 2, 17 tokens: 0 10 20 | - | 30 40 50 60 | - | 70.
    The two permutations are written down, so that a new numpy or a new draw shows up here."""
    assert np.random.RandomState([5, 0]).permutation(5).tolist() == [1, 3, 4, 2, 0]
    assert np.random.RandomState([5, 0, 2]).permutation(4).tolist() == [2, 3, 1, 0]
    assert np.random.RandomState([5, 0, 0]).permutation(3).tolist() == [0, 2, 1]
    data = loader(folder, 10, 5, 8, 8)
    assert data.n_windows == 8
    assert data.batch(0, 0)[0][:, 0].tolist() == [70, 50, 60, 40, 30, 0, 20, 10]


def test_ranks_and_micro_steps_do_not_change_the_tokens_of_a_step(folder):
    """Also the same tokens after a change of GPUs in the middle of a run."""
    splits = [(1, 12), (1, 1), (1, 4), (2, 6), (2, 3), (3, 2), (4, 3), (12, 1), (6, 1)]
    for step in range(4):
        batches = set()
        for world, micro in splits:
            rows = []
            for micro_step in range(12 // (world * micro)):
                for rank in range(world):
                    data = loader(folder, 10, 1, micro, 12, rank=rank, world_size=world)
                    rows += data.batch(step, micro_step)[0].tolist()
            batches.add(tuple(map(tuple, rows)))
        assert len(batches) == 1


def test_batch_is_pure(folder):
    """A batch depends on its arguments and not on the calls before: resume is an index."""
    places = [(step, micro_step) for step in range(6) for micro_step in range(2)]
    data = loader(folder, 5, 3, 2, 4)
    forward = {place: data.batch(*place) for place in places}
    for place in reversed(places):
        fresh = loader(folder, 5, 3, 2, 4).batch(*place)
        for again in (data.batch(*place), fresh):
            assert torch.equal(again[0], forward[place][0])
            assert torch.equal(again[1], forward[place][1])
    forward[places[0]][0].fill_(0)  # the caller's copy, not the loader's
    assert not torch.equal(data.batch(*places[0])[0], forward[places[0]][0])


def test_epochs_differ_and_repeat_by_seed(folder):
    def epoch(seed: int, number: int) -> list[int]:
        return loader(folder, 2, seed, 41, 41).batch(number, 0)[0][:, 0].tolist()

    orders = [epoch(0, 0), epoch(0, 1), epoch(0, 2), epoch(1, 0)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(0, 82, 2)) for order in orders)
    assert epoch(0, 1) == orders[1]


def test_a_batch_may_span_epochs(folder):
    data = loader(folder, 10, 0, 5, 5)  # 8 windows an epoch, 5 a step: step 1 has 3 + 2
    first, second = (reference_order(SIZES, 10, 0, epoch) for epoch in (0, 1))
    assert data.batch(1, 0)[0][:, 0].tolist() == first[5:] + second[:2]
    assert data.epoch(8) == 5.0
    small = loader(folder, 41, 0, 7, 7)  # 2 windows: one batch spans more than three epochs
    order = sum((reference_order(SIZES, 41, 0, epoch) for epoch in range(4)), [])
    assert small.batch(0, 0)[0][:, 0].tolist() == order[:7]


def test_each_shard_is_read_in_one_go(folder):
    """A network disk must not be asked for a shard twice in an epoch."""
    shard_of = np.repeat(np.arange(len(SIZES)), SIZES)
    data = loader(folder, 3, 9, 27, 27)
    for epoch in range(3):
        shards = shard_of[data.batch(epoch, 0)[0][:, 0].numpy()]
        changes = 1 + np.count_nonzero(np.diff(shards))
        assert changes == len(set(shards))


def test_dtype_and_values_of_uint16(tmp_path):
    """Ids above 32767 must not turn negative, nor above 65535 wrap."""
    write_data_dir(tmp_path, [[65535, 32768, 50256, 0]], [[0, 1]])
    x, y = loader(tmp_path, 3, 0, 1, 1).batch(0, 0)
    assert x.dtype == y.dtype == torch.int64
    assert (x.tolist(), y.tolist()) == ([[65535, 32768, 50256]], [[32768, 50256, 0]])


def test_shortest_training_set(tmp_path):
    """T + 1 tokens are one window (build-nanogpt#41, nanoGPT#292); T tokens are refused."""
    write_data_dir(tmp_path, numbered_shards([4, 5]), [[0, 1]])
    data = loader(tmp_path, 8, 0, 2, 2)
    assert data.n_windows == 1
    assert data.batch(0, 0)[0].tolist() == 2 * [list(range(8))]
    assert data.batch(0, 0)[1].tolist() == 2 * [list(range(1, 9))]
    with pytest.raises(UserError) as error:
        loader(tmp_path, 9, 0, 1, 1)
    for part in (str(tmp_path), "9 training tokens", "block_size 9", "10"):
        assert part in str(error.value)


def val_rows(folder: Path, **kwargs) -> list[list[list[int]]]:
    arguments = dict(block_size=4, micro_batch_size=3, val_tokens=40) | kwargs
    return [[*x.tolist(), *y.tolist()] for x, y in ValLoader(folder, **arguments)]


@pytest.fixture(scope="module")
def val_folder(tmp_path_factory):
    train = [list(range(100, 130))]
    return write_data_dir(tmp_path_factory.mktemp("val"), train, numbered_shards([30, 1, 10]))


def test_validation_set_is_fixed(val_folder):
    """The same windows for any batch size and world size, each once, in every pass."""
    expected = [list(range(4 * i, 4 * i + 5)) for i in range(10)]  # x and its last target
    for world in (1, 2, 3, 4, 11, 16):
        for micro in (1, 3, 4, 100):
            windows = []
            for rank in range(world):
                data = ValLoader(val_folder, block_size=4, micro_batch_size=micro, val_tokens=40,
                                 rank=rank, world_size=world)  # fmt: skip
                first, second = list(data), list(data)
                assert len(first) == len(second)
                for (x, y), (x2, y2) in zip(first, second, strict=True):
                    assert torch.equal(x, x2) and torch.equal(y, y2)
                    assert x.shape == y.shape and 1 <= len(x) <= micro
                    assert torch.equal(x[:, 1:], y[:, :-1])
                    windows += torch.cat((x, y[:, -1:]), 1).tolist()
            assert sorted(windows) == expected


def test_validation_reads_the_budget_and_no_more(val_folder):
    def tokens(val_tokens: int) -> int:
        data = ValLoader(val_folder, block_size=4, micro_batch_size=3, val_tokens=val_tokens)
        return sum(y.numel() for _, y in data)

    assert tokens(40) == 40  # 41 tokens are there: T + 1 for the last window
    assert tokens(4) == 4
    assert tokens(11) == 8  # whole windows


@pytest.mark.parametrize(("val_tokens", "block_size"), [(44, 4), (3, 4), (41, 41)])
def test_validation_set_too_short(val_folder, val_tokens, block_size):
    with pytest.raises(UserError) as error:
        ValLoader(val_folder, block_size=block_size, micro_batch_size=1, val_tokens=val_tokens)
    for part in (str(val_folder), f"({val_tokens})", f"({block_size})", "41 tokens"):
        assert part in str(error.value)


def test_train_and_val_do_not_mix(val_folder):
    x, _ = loader(val_folder, 4, 0, 7, 7).batch(0, 0)
    assert 100 <= int(x.min()) and int(x.max()) < 130
    assert max(max(row) for rows in val_rows(val_folder) for row in rows) <= 40


def test_folder_without_manifest(tmp_path):
    with pytest.raises(UserError, match="python -m data.stdlib"):
        loader(tmp_path, 8, 0, 1, 1)


# The shard in use is in memory, and the next one comes meanwhile.


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases(), st.data())
def test_resume_anywhere_with_another_number_of_ranks(case, data):
    """What follows step n is the same, whoever reads it and whatever was read before."""
    per_step = case["world_size"] * case["micro"] * case["accumulation"]
    T, seed = case["block_size"], case["seed"]
    step = data.draw(st.integers(0, 40), label="step")
    worlds = [w for w in range(1, per_step + 1) if per_step % w == 0]
    world = data.draw(st.sampled_from(worlds), label="new world size")
    share = per_step // world
    micro = data.draw(st.sampled_from([m for m in range(1, share + 1) if share % m == 0]))
    per_epoch = (sum(case["sizes"]) - 1) // T
    first, last = step * per_step // per_epoch, (step + 3) * per_step // per_epoch
    orders = [reference_order(case["sizes"], T, seed, e) for e in range(first, last + 1)]
    skip = step * per_step - first * per_epoch
    with tempfile.TemporaryDirectory() as tmp:
        folder = write_data_dir(Path(tmp), numbered_shards(case["sizes"]), [[0, 1]])
        loaders = [
            loader(folder, T, seed, micro, per_step, rank=r, world_size=world) for r in range(world)
        ]
        found = [
            token
            for s in range(step, step + 3)
            for micro_step in range(share // micro)
            for rank in loaders
            for token in rank.batch(s, micro_step)[0][:, 0].tolist()
        ]
    assert found == sum(orders, [])[skip : skip + 3 * per_step]


@pytest.fixture
def watched(monkeypatch):
    """Every reading of a whole shard: its number, the thread, and a reference that keeps nothing
    alive."""
    reads, read = [], module.ShardReader.read

    def watch(self, shard):
        tokens = read(self, shard)
        reads.append((shard, threading.current_thread(), weakref.ref(tokens)))
        return tokens

    monkeypatch.setattr(module.ShardReader, "read", watch)
    return reads


def test_each_shard_is_read_once_an_epoch_and_ahead(folder, watched):
    data = loader(folder, 10, 5, 1, 1)  # 8 windows, in shards 0 (3), 2 (4) and 4 (1)
    shards = []
    for step in range(3 * 8):
        x, _ = data.batch(step, 0)
        shards.append(int(np.searchsorted(np.cumsum(SIZES), x[0, 0], side="right")))
        if data.reader.ahead is not None:
            data.reader.ahead[1].result()
        assert sum(tokens() is not None for _, _, tokens in watched) <= 2
    turns = [a for a, b in zip(shards, [None, *shards], strict=False) if a != b]
    read = [shard for shard, _, _ in watched]
    assert read[: len(turns)] == turns  # in the order of use, none twice in a turn
    assert len(read) <= len(turns) + 1
    assert set(turns) == {0, 2, 4}  # the short ones have no window of their own
    waited = [thread is threading.main_thread() for _, thread, _ in watched]
    assert waited == [True] + [False] * (len(read) - 1)


def test_one_shard_is_read_once_for_all_epochs(tmp_path, watched):
    write_data_dir(tmp_path, numbered_shards([50]), [[0, 1]])
    data = loader(tmp_path, 7, 0, 2, 2)
    for step in range(20):
        data.batch(step, 0)
    assert len(watched) == 1


def test_a_batch_over_many_shards_holds_two(tmp_path, watched):
    write_data_dir(tmp_path, numbered_shards([9] * 12), [[0, 1]])
    data = loader(tmp_path, 3, 0, 35, 35)
    for step in range(3):
        data.batch(step, 0)
        data.reader.ahead[1].result()
        assert sum(tokens() is not None for _, _, tokens in watched) <= 2


def test_a_shard_that_was_cut_since_the_start(tmp_path):
    write_data_dir(tmp_path, numbered_shards([20, 30]), [[0, 1]])
    data = loader(tmp_path, 4, 0, 1, 1)
    for i in (1, 2):
        path = tmp_path / f"tiny_train_{i:06d}.bin"
        path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"tiny_train_00000\d.bin: shorter than at the start"):
        for step in range(12):
            data.batch(step, 0)
