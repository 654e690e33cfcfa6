"""Batches are the same whatever the number of workers, processes and restarts; faults are said."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from spalier.data import Data, Loader, open_data
from spalier.data.data import ArraySplit, Preprocessing
from spalier.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on machines of few cores


@pytest.fixture(scope="module")
def split():
    return open_data("digits", max_train_samples=100).train


def numbered(count):
    """Sample i has label i, so that labels tell which samples came."""
    images = np.zeros((count, 4, 4, 3), np.uint8)
    return ArraySplit(images, np.arange(count), np.arange(count), Preprocessing.small(4, (0.5,) * 3, (0.5,) * 3))


def epoch(loader, number=0, start=0):
    with loader:
        return list(loader.epoch(number, start))


def same(one, other):
    assert len(one) == len(other)
    for (x, y), (z, w) in zip(one, other, strict=True):
        assert torch.equal(x, z)
        assert torch.equal(y, w)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(split, workers):
    alone = Loader(split, batch_size=16, seed=5)
    with Loader(split, batch_size=16, seed=5, num_workers=workers) as shared:
        before = torch.random.get_rng_state()
        for number in (0, 1, 0):
            same(list(shared.epoch(number)), list(alone.epoch(number)))
        same(list(shared.epoch(2, start=3)), list(alone.epoch(2))[3:])
        assert torch.equal(torch.random.get_rng_state(), before)
        assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in [next(iter(shared.epoch(1)))])


def test_any_batch_can_be_had_again(split):
    loader = Loader(split, batch_size=16, seed=5)
    every = list(loader.epoch(7))
    for start in range(len(loader) + 1):
        same(list(loader.epoch(7, start)), every[start:])
    with pytest.raises(ConfigError, match="at most"):
        loader.epoch(7, len(loader) + 1)


def test_epochs_and_seeds_differ(split):
    batches = {
        (s, e): next(Loader(split, batch_size=16, seed=s).epoch(e))[0] for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))
    }
    values = list(batches.values())
    assert not any(torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 50),
    batch=st.integers(1, 12),
    world=st.integers(1, 4),
    shuffle=st.booleans(),
    drop=st.booleans(),
    start=st.integers(0, 3),
)
def test_all_processes_together_see_what_one_sees(count, batch, world, shuffle, drop, start):
    batch *= world
    if drop and count < batch and count % world:
        with pytest.raises(ConfigError, match="shared equally"):
            Loader(numbered(count), batch_size=batch, world_size=world, drop_last=drop)
        return
    make = lambda rank, of: Loader(  # noqa: E731
        numbered(count), batch, seed=3, shuffle=shuffle, drop_last=drop, rank=rank, world_size=of
    )
    one = make(0, 1)
    start = min(start, len(one))
    expected = [labels.tolist() for _, labels in one.epoch(2, start)]
    shares = [[labels.tolist() for _, labels in make(r, world).epoch(2, start)] for r in range(world)]
    for i, whole in enumerate(expected):
        for rank in range(world):
            mine = whole[rank::world]
            assert (shares[rank][i] if i < len(shares[rank]) else []) == mine
    seen = sorted(n for whole in expected for n in whole)
    if start == 0 and not drop:
        assert seen == list(range(count))
        assert len(one) == -(-count // batch)
    assert len(set(seen)) == len(seen)
    if drop:
        assert all(len(whole) == min(batch, count) for whole in expected)
        assert len(one) == max(1, count // batch)


def test_a_set_smaller_than_a_batch_is_one_batch():
    loader = Loader(numbered(5), batch_size=256)
    assert len(loader) == 1
    assert sorted(next(loader.epoch(0))[1].tolist()) == [0, 1, 2, 3, 4]


def test_evaluation_is_in_order_and_not_augmented(split):
    loader = Loader(split, batch_size=32, shuffle=False, drop_last=False)
    assert not loader.augment
    found = list(loader.epoch(9))
    expected, labels = split.fetch(np.arange(len(split)), None)
    assert torch.equal(torch.cat([x for x, _ in found]), expected)
    assert torch.equal(torch.cat([y for _, y in found]), labels)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 10, "world_size": 4}, "shared equally"),
        ({"rank": 2, "world_size": 2}, "less than the 2"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "integer"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"world_size": True}, "world_size is True"),
    ],
)
def test_options_are_checked(options, says):
    with pytest.raises(ConfigError, match=says):
        Loader(numbered(8), **options)


def test_nothing_to_load_is_said():
    with pytest.raises(DataError, match="no samples"):
        Loader(numbered(0))
    with pytest.raises(ConfigError, match="epoch is -1"):
        Loader(numbered(4)).epoch(-1)


def test_an_epoch_that_was_left_gives_nothing_of_the_next(split):
    with Loader(split, batch_size=16, num_workers=1) as loader:
        left = loader.epoch(0)
        next(left)
        second = loader.epoch(1)
        same([next(second)], [next(Loader(split, batch_size=16).epoch(1))])
        with pytest.raises(ConfigError, match="left for another"):
            next(left)


def test_workers_end_with_the_loader(split):
    before = len(multiprocessing.active_children())
    loader = Loader(split, batch_size=16, num_workers=2)
    batches = loader.epoch(0)
    next(batches)
    assert len(multiprocessing.active_children()) >= before + 2
    loader.close()
    assert len(multiprocessing.active_children()) == before
    loader.close()
    with pytest.raises(ConfigError, match="closed"):
        next(batches)
    same(epoch(loader), epoch(Loader(split, batch_size=16)))  # it starts anew when it is asked


class Deadly(Dataset):
    """Kills the worker that asks for a certain sample."""

    classes = ("a", "b")

    def __init__(self, fatal, parent):
        self.fatal, self.parent, self.targets = fatal, parent, [0, 1] * 10

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if i == self.fatal and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3, 4, 4), self.targets[i]


@pytest.fixture
def no_handler():
    """Loaders of other tests may have left PyTorch's handler, which raises wherever this process is."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "Connection reset by peer")])
def test_a_worker_that_dies_while_it_hands_a_batch_over(error):
    """It was told to end in the middle of that: seen once in a long while."""
    loader = Loader(Data.of(Deadly(99, os.getpid())).train, batch_size=5, num_workers=1)

    def broken():
        raise error
        yield

    with pytest.raises(DataError, match="a data-loader worker died"):
        loader._next(broken())


@pytest.mark.usefixtures("no_handler")
@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_a_dead_worker_is_an_error_that_helps():
    data = Data.of(Deadly(13, os.getpid()))
    loader = Loader(data.train, batch_size=5, shuffle=False, num_workers=1)
    batches = loader.epoch(0)
    next(batches)
    for _ in range(600):
        if not multiprocessing.active_children():
            break
        time.sleep(0.05)  # the worker dies while this process is busy elsewhere, and nothing is raised here
    with pytest.raises(DataError, match="worker died") as error:
        for _ in batches:
            pass
    assert "fewer" in str(error.value)
    assert "memory" in str(error.value)
    assert "SIGKILL" in str(error.value)
    assert not multiprocessing.active_children()
    assert len(epoch(Loader(data.train, batch_size=5, shuffle=False))) == 4  # without workers it lives
    loader.close()


class Failing(Deadly):
    def __getitem__(self, i):
        if i == self.fatal:
            raise OSError("the disk is gone")
        return torch.zeros(3, 4, 4), self.targets[i]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_that_fails_is_named(workers):
    data = Data.of(Failing(None, os.getpid()))
    data.train.dataset.fatal = 13
    with Loader(data.train, batch_size=5, shuffle=False, num_workers=workers) as loader:
        batches = loader.epoch(0)
        next(batches)
        with pytest.raises(DataError, match="sample 13 cannot be had: OSError: the disk is gone") as error:
            list(batches)
    assert "__getitem__" in "".join(error.value.__notes__)


def test_a_process_that_ends_leaves_no_workers():
    code = """
    import torch
    from torch.utils.data import TensorDataset
    from spalier.data import Data, Loader
    data = Data.of(TensorDataset(torch.rand(64, 3, 4, 4), torch.arange(64) % 2))
    loader = Loader(data.train, batch_size=16, num_workers=2)
    next(loader.epoch(0))
    print(*[worker.pid for worker in loader._loader._iterator._workers])
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("count", "sizes"), [(40, [16, 16, 8]), (45, [16, 16, 8]), (39, [16, 16]), (48, [16] * 3)])
def test_a_last_batch_is_cut_to_what_processes_can_share(count, sizes):
    whole = Loader(numbered(count), 16, drop_last=False, round_last=8)
    assert len(whole) == len(sizes)
    batches = [labels for _, labels in whole.epoch(0)]
    assert [len(labels) for labels in batches] == sizes
    halves = [Loader(numbered(count), 16, drop_last=False, round_last=8, rank=rank, world_size=2) for rank in (0, 1)]
    for together, *shares in zip(batches, *(half.epoch(0) for half in halves), strict=True):
        assert [len(labels) for _, labels in shares] == [len(together) // 2] * 2
        assert sorted(int(n) for _, labels in shares for n in labels) == sorted(map(int, together))
