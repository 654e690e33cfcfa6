"""Two processes: scores of all samples on both, the same plans, and an error where they would differ."""

import os
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from trained import EXAMPLE, DigitNet

import spalier as sp
from spalier import budget
from spalier.errors import PlanError


def make():
    torch.manual_seed(0)
    net = DigitNet(8)
    sp.attach_(net, sp.SPLoRA(rank=2), head="fc", example=EXAMPLE)
    return net


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 1, 8, 8, generator=generator), torch.randint(0, 10, (24,), generator=generator)


def part(rank):
    """Parts of different sizes, in batches of different sizes."""
    x, y = data()
    chosen = slice(0, 16) if rank == 0 else slice(16, 24)
    return list(zip(x[chosen].split(6), y[chosen].split(6), strict=True))


def size(net):
    return sum(parameter.numel() for parameter in net.parameters())


def work(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        net = make()
        found = {}
        for name in ("taylor", "gradient", "lrp", "second_order", "movement"):
            scores = sp.score(net, part(rank), name, loss=F.cross_entropy)
            found[name] = scores["layers.1.conv1"].tolist()
            found["samples"] = scores.samples
        plan = sp.select(net, sp.score(net, part(rank), "taylor", loss=F.cross_entropy), macs=0.5)
        found["plan"] = plan.keep
        sp.prune_(net, plan, recover=part(rank))
        found["weights"] = [p.sum().item() for p in net.parameters()] + [b.sum().item() for b in net.buffers()]
        try:
            sp.select(net, sp.score(net, criterion=sp.criteria.Random(seed=rank)), channels=0.3)
        except PlanError as error:
            found["error"] = str(error)
        # a clock of each rank's own, so that they agree only if they listen to one
        budget.seconds = lambda nets, example, rounds=9: [size(net) ** (1 + 0.2 * rank) for net in nets]
        found["latency"] = sp.select(net, sp.score(net, criterion="weight"), latency=0.5).keep
        results[rank] = found
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_processes_agree():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(work, (port, results), nprocs=2)
        first, second = dict(results[0]), dict(results[1])
    assert first["plan"] == second["plan"]
    assert first["weights"] == second["weights"]
    assert "of rank 1 differs from rank 0's" in first["error"]
    assert first["latency"] == second["latency"]
    x, y = data()
    net = make()
    for name in ("taylor", "gradient", "lrp", "second_order", "movement"):
        alone = sp.score(net, [(x, y)], name, loss=F.cross_entropy)
        assert first["samples"] == second["samples"] == alone.samples == 24
        assert first[name] == second[name]
        np.testing.assert_allclose(first[name], alone["layers.1.conv1"], rtol=2e-3, atol=1e-6)
    plan = sp.select(net, sp.score(net, [(x, y)], "taylor", loss=F.cross_entropy), macs=0.5)
    assert {name: list(units) for name, units in plan.keep.items()} == {n: list(u) for n, u in first["plan"].items()}
