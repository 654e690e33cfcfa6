"""Four-way invariant on the zoo: masked ≡ pruned ≡ fused ≡ saved and reloaded, in float64, coupled and free, twice."""

import numpy as np
import pytest
import torch
import zoo
from oracles.masking import masked_copy
from support import awaken_
from torch.utils._pytree import tree_leaves, tree_map_only

import spalier as sp
from spalier.errors import SpalierError

# what float32 inside of a float64 network (norms that cast, rotary tables) leaves
COARSE = ("llama", "mistral", "qwen", "gemma", "t5", "whisper")

# a weight divided by its own norm: a row of zeros gives NaN in the oracle, not in the library's own comparison
DIVIDES = ("made/functional_weights",)

# nothing of these can go: recurrent layers, statistics over channels, sizes in the code, weights tied to outputs
WHOLE = (
    "made/channel_statistics",
    "made/constant_groups",
    "made/constant_view",
    "made/fourier",
    "made/gru",
    "made/gru_cell_loop",
    "made/lstm",
    "made/lstm_deep",
    "made/pool_and_unpool",
    "made/tied_layers",
)


def double(example):
    return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, example)


def run(net, example):
    args, kwargs = zoo.arguments(example, torch.float64)
    # with gradients on, encoder layers call their norms; their fast path reads the weights past the oracle
    with torch.enable_grad():
        return [t.detach() for t in tree_leaves(net(*args, **kwargs)) if isinstance(t, torch.Tensor)]


def assert_same(found, wanted, name):
    tolerance = 1e-4 if any(part in name for part in COARSE) else 1e-8
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.isfinite(b).all()
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max())))


def random_plan(structure, density, rng, *, free, kept):
    """Each stream, or each free writer, keeps about this share of its base's units, of those that are left."""
    sizes = {s.name: s.size for s in structure.streams}
    left = {name: kept["streams"][name] if kept else range(size) for name, size in sizes.items()}
    if free:
        for writer in structure.writers:
            stream = structure.streams[writer.stream].name
            own = (kept or {"writers": {}})["writers"].get(writer.name, left[stream])
            left[writer.name], sizes[writer.name] = own, sizes[stream]
        for stream in {structure.streams[w.stream].name for w in structure.writers}:
            if stream not in {w.name for w in structure.writers}:
                del left[stream]  # as wide as its writers make it
    keep = {
        name: sorted(
            rng.choice(units, max(1, min(len(units), round(sizes[name] * density))), replace=False).tolist()
        )
        for name, units in left.items()
    }
    return sp.Plan(structure, keep, writers="free" if free else "coupled")


def check_reloaded(net, base, example, folder, name):
    """What is built from the file computes the same; what is applied is the same to the last bit."""
    path = folder / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    task = sp.Task.load(path)
    values = {key: value.clone() for key, value in base.state_dict().items()}
    built = task.build(base)
    assert not any(
        type(m).__module__.startswith("spalier") for m in built.modules() if type(m).__name__ != "Spread"
    )
    assert_same(run(built, example), run(net, example), name)
    task.apply_(base)
    adapted, again = net.state_dict(), base.state_dict()
    assert list(adapted) == list(again)
    assert all(torch.equal(value, again[key]) for key, value in adapted.items())
    assert_same(run(base.eval(), example), run(net, example), name)
    sp.detach_(base)
    assert all(torch.equal(value, base.state_dict()[key]) for key, value in values.items())


def check(entry, structure, example, *, free, seed, folder):
    """Prune twice, and compare each time."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net = entry.make().double()
    adapted = attach(net)
    plain = sp.fuse(net) if adapted else entry.make().double()
    before = sum(p.numel() for p in net.parameters())
    for density in (0.7, 0.4):
        sp.prune_(net, random_plan(structure, density, rng, free=free, kept=sp.kept_units(net)))
        pruned = run(net, example)
        if adapted:
            assert_same(run(sp.fuse(net), example), pruned, entry.name)
            check_reloaded(net, entry.make().double(), example, folder, entry.name)
        masked = masked_copy(plain, structure, sp.kept_units(net))
        if masked is not None and entry.name not in DIVIDES:
            assert_same(pruned, run(masked, example), entry.name)
    assert sum(p.numel() for p in net.parameters()) < before


def attach(net):
    try:
        sp.attach_(net, sp.SPLoRA(rank=2))
    except SpalierError:
        return False
    awaken_(net, 0.05)
    return True


@pytest.mark.parametrize("entry", zoo.ZOO, ids=lambda entry: entry.name)
def test_masked_is_pruned_is_fused_is_reloaded(entry, tmp_path):
    example = double(entry.example())
    structure = sp.trace(entry.make().double(), example)
    assert bool(structure.streams) == (entry.name not in WHOLE)
    if structure.streams:
        check(entry, structure, example, free=False, seed=0, folder=tmp_path)
    if structure.writers:
        check(entry, structure, example, free=True, seed=1, folder=tmp_path)
