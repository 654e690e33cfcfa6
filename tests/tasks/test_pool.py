"""Memory that is handed out again is in nobody's hands."""

import copy
import gc

import pytest
import torch
from support import awaken_
from torch import nn

import spalier as sp
from spalier.tasks.memory import IDLE, Pool


def test_pieces_in_use_are_never_handed_out():
    pool = Pool()
    first = pool.take(100, "float32")
    tensor = torch.from_numpy(first[10:20].reshape(2, 5))
    del first
    view = tensor[0]
    parameter = nn.Parameter(tensor)
    for held in ("tensor", "parameter", "view"):
        other = pool.take(100, "float32")
        assert not (other.ctypes.data <= view.data_ptr() < other.ctypes.data + other.nbytes)
        del other
        if held == "tensor":
            del tensor
        elif held == "parameter":
            del parameter
    place = view.data_ptr()
    assert len(pool._idle) == 1
    del view
    assert len(pool._idle) == 2
    pieces = [pool.take(100, "float32") for _ in range(2)]
    assert any(p.ctypes.data <= place < p.ctypes.data + p.nbytes for p in pieces)
    assert not pool._idle


def test_pieces_fit_and_idle_ones_are_let_go():
    pool = Pool()
    place = pool.take(100, "float32").ctypes.data
    assert pool.take(60, "float32").ctypes.data == place
    assert pool.take(40, "float32").ctypes.data != place
    assert pool.take(50, "float64").dtype == "float64"
    held = pool.take(1000, "float32")
    for size in (5000, 20000, 70000):
        pool.take(size, "float32")
    pool.trim()
    assert [memory.nbytes for memory in pool._idle] == [280_000, 80_000]
    assert len(pool._idle) == IDLE
    assert held.size == 1000
    held[:] = 1
    assert held.flags.writeable
    assert pool.take(0, "float32").size == 0


@pytest.mark.parametrize("keep", ["nothing", "network", "state", "tensor", "copy"])
@torch.no_grad()
def test_networks_that_someone_holds_stay_as_they_are(keep, tmp_path):
    """Whatever is held of a network that was dropped, building others does not change it."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    store, x = sp.Store(tmp_path), torch.randn(3, 16)
    for name in "abcd":
        net = copy.deepcopy(base)
        sp.attach_(net, sp.SPLoRA(rank=2))
        store.add(sp.Task.of(awaken_(net), name))
    wanted = {name: store.load(name).build(base)(x) for name in "abcd"}
    switcher = sp.Switcher(base, store, limit=0)
    held = []
    for name in "abcdabcdabcd":
        net = switcher.activate(name)
        assert torch.equal(net(x), wanted[name])
        if keep == "network":
            held.append((net, wanted[name]))
        elif keep == "state":
            held.append((net.state_dict(), copy.deepcopy(net.state_dict())))
        elif keep == "tensor":
            held.append((net[2].weight[1:], net[2].weight[1:].clone()))
        elif keep == "copy":
            held.append((copy.deepcopy(net), wanted[name]))
        del net
        gc.collect()
        for kept, value in held:
            if isinstance(kept, nn.Module):
                assert torch.equal(kept(x), value)
            elif isinstance(kept, dict):
                assert all(torch.equal(tensor, value[key]) for key, tensor in kept.items())
            else:
                assert torch.equal(kept, value)
    assert len(switcher._pool._idle) <= IDLE + 2
    assert keep in ("nothing", "copy") or len(held) == 12


def test_threads_never_share_a_piece():
    from concurrent.futures import ThreadPoolExecutor

    pool = Pool()

    def work(number):
        for _ in range(300):
            piece = pool.take(64, "float64")
            piece[:] = number
            if not (piece == number).all():
                return False
            del piece
            pool.trim()
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
