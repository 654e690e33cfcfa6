"""Modules whose code takes a width from another tensor: what it asks for is set right while it runs."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import zoo
from oracles import task_format
from oracles.masking import masked_copy
from support import awaken_
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from zoo.transformers_nets import _LLAMA, _hugging, _tokens

import spalier as sp
from spalier.adapters.calls import CALLS, Calls, Corrected
from spalier.errors import PruneError, TaskFileError

ENTRY = zoo.by_name("made/borrowers")


def halved(net, structure):
    sp.prune_(net, sp.Plan(structure, {s.name: range(0, s.size, 2) for s in structure.streams}))
    return net


@pytest.fixture(scope="module")
def pruned():
    """The base, its structure, and half of it, which is adapted."""
    base, example = ENTRY.make().double(), ENTRY.example().double()
    structure = sp.trace(base, example)
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head="head")
    return base, structure, awaken_(halved(net, structure), 0.05)


def pictures(batch, height, width):
    return torch.randn(batch, 3, height, width, dtype=torch.float64)


@pytest.mark.parametrize("size", [(1, 32, 32), (5, 32, 32), (2, 16, 24), (3, 40, 8)])
def test_pictures_and_batches_of_other_sizes(pruned, size):
    base, structure, _ = pruned
    net = halved(copy.deepcopy(base), structure)
    x = pictures(*size)
    wanted = masked_copy(base, structure, sp.kept_units(net))(x).detach()
    torch.testing.assert_close(net(x).detach(), wanted, rtol=0, atol=1e-9 * float(wanted.abs().max()))


@pytest.mark.filterwarnings("ignore:While compiling")  # the strict export warns of the mode itself
def test_a_built_network_is_copied_pickled_compiled_and_exported(pruned):
    base, _, net = pruned
    built = sp.Task.of(net, "a").build(base)
    x, other = ENTRY.example().double(), pictures(3, 16, 24)
    wanted = built(x)
    torch.testing.assert_close(wanted, net(x), rtol=0, atol=1e-9)
    for twin in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert twin.one.forward.args[0] is twin.one
        assert torch.equal(twin(x), wanted)
    compiled = torch.compile(built, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), wanted, rtol=0, atol=1e-9)
    for strict in (False, True):
        batch = torch.export.Dim("batch", min=2, max=64)
        program = torch.export.export(built, (x,), dynamic_shapes=({0: batch},), strict=strict).module()
        torch.testing.assert_close(program(torch.cat([x, x])), built(torch.cat([x, x])), rtol=0, atol=1e-9)
    assert built(other).shape == (3, 5)


def test_detached_to_the_bit(pruned):
    base, _, net = pruned
    net = copy.deepcopy(net)
    assert CALLS in net.one.__dict__
    sp.detach_(net)
    x = ENTRY.example().double()
    assert torch.equal(net(x), base(x))
    for ours, theirs in zip(net.modules(), base.modules(), strict=True):
        assert set(ours.__dict__) == set(theirs.__dict__)


def test_modules_that_keep_all_their_weights_are_left_alone(pruned):
    base, structure, _ = pruned
    net = copy.deepcopy(base)
    sp.prune_(net, sp.Plan(structure, {"two.qkv": [0, 2]}))
    assert [path for path, module in net.named_modules() if CALLS in module.__dict__] == ["two"]


class Turns(nn.Module):
    """Another way for long inputs, with a view that was never seen."""

    def __init__(self):
        super().__init__()
        self.fit, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.fit(x)
        B, N, C = x.shape
        if N > 4:
            return self.two(self.one(x).reshape(B, N, 1, 1, C).reshape(B, N, C))
        return self.two(self.one(x).reshape(B, N, 2, C // 2).flatten(2))


def test_another_way_than_the_examples_is_an_error_that_says_so():
    net = Turns().double()
    structure = sp.trace(net, torch.randn(2, 4, 6).double())
    sp.prune_(net, sp.Plan(structure, {"fit": [0, 1, 5]}))
    assert net(torch.randn(1, 3, 6).double()).shape == (1, 3, 3)
    with pytest.raises(PruneError, match="takes another way than on the example"):
        net(torch.randn(2, 5, 6).double())


def test_a_view_into_another_dtype_is_none_of_ours():
    with Corrected(Calls(((1, 1, 0, 1, 2),))):
        assert torch.zeros(4).view(torch.int32).dtype == torch.int32
        assert torch.zeros(4).view(2, 2).reshape((4,)).shape == (4,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_of_any_width(dtype):
    x, weights = torch.randn(9, 5).to(dtype), torch.randn(3, 5, 7).to(dtype)
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    with Corrected(Calls()):
        found = nn.functional.grouped_mm(x, weights, offs=ends)
    torch.testing.assert_close(found, torch.cat([x[:4] @ weights[0], x[4:] @ weights[2]]))


@pytest.mark.slow
def test_experts_with_grouped_products():
    torch.manual_seed(0)
    net = _hugging("Mixtral", "ForCausalLM", num_local_experts=4, **_LLAMA).eval()
    structure = sp.trace(net, {"input_ids": _tokens(7, 50)})
    assert structure.grouped == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert structure["model.layers.0.mlp.experts"].size == 64
    sp.prune_(net, sp.Plan(structure, {s.name: range(s.size // 2 + 1) for s in structure.streams}))
    assert net.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 66, 17)


# the second reader


class AsRead(TorchFunctionMode):
    """What a file says of the code of a module, done by hand."""

    def __init__(self, views, scales):
        super().__init__()
        self.views, self.scales = views, dict(scales)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.view, Tensor.reshape):
            args = (args[0], *task_format.view_of(self.views, args[0].shape, args[1:]))
        elif func in (Tensor.mul, Tensor.div) and isinstance(args[1], float):
            args = (args[0], self.scales.get(args[0].dim(), args[1]))
        return func(*args, **(kwargs or {}))


def set_right_(module, views, scales):
    forward = module.forward

    def by_hand(*args):
        with AsRead(views, scales):
            return forward(*args)

    module.forward = by_hand


def test_a_second_reader_sets_the_same_calls_right(pruned, tmp_path):
    base, _, net = pruned
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    tensors = task_format.network(path, {name: tensor.numpy() for name, tensor in base.state_dict().items()})
    found, calls = copy.deepcopy(base), task_format.calls(path)
    for name, value in tensors.items():
        owner, _, key = name.rpartition(".")
        module = found.get_submodule(owner)
        setattr(module, key, nn.Parameter(torch.tensor(value)))
        if isinstance(module, nn.LayerNorm):
            module.normalized_shape = module.weight.shape
    sizes = task_format.attributes(
        path, lambda p, key: (type(base.get_submodule(p)).__name__, getattr(base.get_submodule(p), key))
    )
    for owner, values in sizes.items():
        found.get_submodule(owner).__dict__.update(values)
    assert any(scales for _, scales in calls.values())
    for owner, (views, scales) in calls.items():
        set_right_(found.get_submodule(owner), views, scales)
    x = ENTRY.example().double()
    torch.testing.assert_close(found(x), sp.Task.load(path).build(base)(x), rtol=0, atol=1e-9)
    for owner in calls:
        del found.get_submodule(owner).forward
    with pytest.raises(RuntimeError):
        found(x)


# files of strangers


def with_calls(task, calls):
    return replace(task, table=replace(task.table, calls=calls))


def test_a_file_sets_only_views_that_masks_imply(pruned, tmp_path):
    base, _, net = pruned
    task = sp.Task.of(net, "a")
    assert set(task.table.calls) == {"outlook", "one", "two"}
    views = task.table.calls["two"].views
    longer = tuple((*kind, size + 1) for *kind, size in views)
    for wrong in (longer, ((3, 5, 0, 2, 1),), ((9, 9, 0, 1, 2),)):
        with pytest.raises(TaskFileError, match=r"no mask leaves that share|does not run"):
            with_calls(task, {**task.table.calls, "two": Calls(wrong, task.table.calls["two"].scales)}).build(base)
    with pytest.raises(TaskFileError, match="no module"):
        with_calls(task, {"nowhere": Calls(views)}).build(base)


@pytest.mark.parametrize(
    "calls",
    [
        {},
        {"two": [[]]},
        {"two": [[[3, 5, 0, 1]], []]},
        {"two": [[[3, 5, 0, 6, 2]], []]},
        {"two": [[[3, 5, 6, 1, 2]], []]},
        {"two": [[[3, 5, 0, 1, 0]], []]},
        {"two": [[[3, 5, 0, 1, 2]] * 65, []]},
        {"two": [[], [[4, 0.0]]]},
        {"two": [[], [[4, 1]]]},
        {"two": [[], [[4, "1.0"]]]},
        {"two": [[], [[99, 1.0]]]},
        ["two"],
    ],
)
def test_calls_that_are_none_are_refused(pruned, calls):
    from spalier.tasks.table import _Parser

    data = {"streams": [], "writers": [], "rows": [], "axes": [], "attributes": {}, "heads": [], "folds": []}
    with pytest.raises(TaskFileError):
        _Parser({**data, "calls": calls}, 2, is_safe=True).table()
