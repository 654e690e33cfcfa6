"""The bottleneck of adapters is pruned like channels are."""

import copy

import numpy as np
import pytest
import torch
from support import assert_unchanged, awaken_, snapshot, tiny_cnn
from torch import nn

import spalier as sp
from spalier.errors import PlanError, PruneError

EXAMPLE = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def adapted(adapter=None):
    torch.manual_seed(0)
    net = tiny_cnn().double().eval()
    sp.attach_(net, adapter or sp.SPLoRA(rank=4), head="8", example=EXAMPLE)
    return awaken_(net)


@pytest.mark.parametrize("adapter", [sp.SPLoRA(4), sp.SPLoRA(4, kernel="full"), sp.LoRA(4)])
def test_the_fused_weight_changes_by_what_was_removed_and_nothing_else(adapter):
    net = adapted(adapter)
    before, structure = sp.fuse(net), net._spalier.structure
    down, up = (f.detach().clone() for f in (net[3].weight_adapter.down, net[3].weight_adapter.up))
    sp.prune_(net, sp.Plan(structure, {}, ranks={"3": [0, 2]}))
    after = sp.fuse(net)
    changed = (before[3].weight - after[3].weight).flatten(2)
    removed = torch.einsum("ro,ri...->oi...", up[[1, 3]], down[[1, 3]])
    if removed.dim() == 2:
        torch.testing.assert_close(changed[:, :, 4], removed)
        changed[:, :, 4] = 0
        assert not changed.any()
    else:
        torch.testing.assert_close(changed, removed.flatten(2))
    assert torch.equal(before[0].weight, after[0].weight)
    assert (net[3].weight_adapter.rank, net[0].weight_adapter.rank) == (2, 4)


def test_importance_is_the_size_of_what_a_component_adds():
    for layer in (
        nn.Conv2d(6, 4, 3),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.Linear(5, 7),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
    ):
        net = nn.Sequential(layer).double()
        sp.attach_(net, sp.SPLoRA(rank=2))
        awaken_(net)
        update, weight = net[0].weight_adapter, net[0].weight
        for component in range(update.rank):
            twin = copy.deepcopy(update)
            with torch.no_grad():
                twin.up[component] = 0
            size = (update(weight) - twin(weight)).norm()
            torch.testing.assert_close(update.importance()[component], size.detach())


def test_the_least_important_components_go():
    net = adapted()
    plan = sp.select(net, rank=0.5)
    for name, kept in plan.ranks.items():
        sizes = net.get_submodule(name).weight_adapter.importance()
        gone = [i for i in range(4) if i not in kept]
        assert not gone or sizes[list(kept)].min() >= sizes[gone].max()


def test_channels_and_ranks_go_together():
    """In one plan or one after the other: the same network."""
    both, one = adapted(), adapted()
    structure = both._spalier.structure
    keep = {"0": [1, 3, 4], "3": [0, 5, 7, 8]}
    sp.prune_(both, sp.Plan(structure, keep, ranks={"0": [1], "3": [0, 1, 3]}))
    sp.prune_(one, sp.Plan(one._spalier.structure, keep))
    sp.prune_(one, sp.Plan(one._spalier.structure, {}, ranks={"0": [1], "3": [0, 1, 3]}))
    torch.testing.assert_close(both(EXAMPLE), one(EXAMPLE))
    assert both[3].weight_adapter.down.shape == (3, 3)
    sp.detach_(both)
    assert both[3].weight.shape == (12, 8, 3, 3)


def test_optimizer_state_is_cut_along():
    net = adapted().train()
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
    net(EXAMPLE).sum().backward()
    optimizer.step()
    update = net[3].weight_adapter
    state = {k: v.clone() for k, v in optimizer.state[update.down].items()}
    sp.prune_(net, sp.Plan(net._spalier.structure, {"0": [1, 3, 4]}, ranks={"3": [2, 3]}), optimizer=optimizer)
    wanted = state["exp_avg"][[2, 3]][:, [1, 3, 4]]
    assert torch.equal(optimizer.state[update.down]["exp_avg"], wanted)
    net(EXAMPLE).sum().backward()
    optimizer.step()


def test_bad_components_are_refused():
    net = adapted()
    structure, before = net._spalier.structure, snapshot(net)
    for ranks, match in (
        ({"3": [4]}, "it has rank 4"),
        ({"3": []}, "at least one"),
        ({"3": [0, 0]}, "named twice"),
        ({"3": [-1]}, "counted from 0"),
        ({"3": [0.5]}, "whole numbers"),
        ({"4": [0]}, "has no low-rank adapter"),
    ):
        with pytest.raises(PlanError, match=match):
            sp.prune_(net, sp.Plan(structure, {}, ranks=ranks))
    plain = tiny_cnn().double()
    with pytest.raises(PlanError, match="not adapted"):
        sp.prune_(plain, sp.Plan(sp.trace(plain, EXAMPLE), {}, ranks={"3": [0]}))
    assert_unchanged(net, before)


def test_a_prune_that_fails_puts_components_back(monkeypatch):
    net = adapted()
    before = snapshot(net)

    def fail(*args):
        raise PruneError("no")

    monkeypatch.setattr("spalier.pruning.prune.verify", fail)
    with pytest.raises(PruneError):
        sp.prune_(net, sp.Plan(net._spalier.structure, {"0": [1, 2]}, ranks={"3": [1, 2]}))
    assert_unchanged(net, before)
    assert np.prod(net[3].weight_adapter.down.shape) == 32
