"""What an adapted linear layer keeps for backward: what its input was made of, where that is kept anyway."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

import spalier as sp
from spalier.adapters import forward


class Block(nn.Module):
    """The half of a transformer's block that its widest activation is in."""

    def __init__(self, act="gelu"):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.gate = nn.Linear(8, 64) if act == "gated" else nn.Identity()
        self.act = act

    def inner(self, x):
        x = self.norm(x)
        match self.act:
            case "gelu":
                return F.gelu(self.up(x))
            case "tanh":
                return F.gelu(self.up(x), approximate="tanh")
            case "silu":
                return F.silu(self.up(x))
            case "gated":
                return F.silu(self.gate(x)) * self.up(x)
            case "relu":
                return F.relu(self.up(x))
            case "dropout":
                return F.dropout(F.gelu(self.up(x)), 0.5)
            case "halved":
                return F.gelu(self.up(x)) * 0.5
            case "in place":
                return F.gelu(self.up(x)).mul_(2)
            case "behind autograd's back":
                made = F.gelu(self.up(x))
                with torch.no_grad():
                    made.mul_(2)
                return made
            case "twice":
                made = F.gelu(self.up(x))
                return made + self.up(self.down(made))

    def forward(self, x):
        return x + self.down(self.inner(x))


REMADE = ("gelu", "tanh", "silu", "gated")
KEPT = ("relu", "dropout", "halved", "in place", "behind autograd's back", "twice")


def adapted(act, dtype=torch.float32):
    torch.manual_seed(0)
    net = Block(act).to(dtype)
    sp.attach_(net, sp.SPLoRA(rank=2, init_range=0.3))
    return net


def grads(net, run=None, x=None):
    """The loss and all gradients, of the input too."""
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8, dtype=net.up.weight.dtype) if x is None else x
    x = x.clone().requires_grad_()
    net.zero_grad()
    out = (net if run is None else run)(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in net.parameters() if p.requires_grad)]


def plainly(monkeypatch, net, **options):
    """The same with every input kept, as it would be without any of this."""
    with monkeypatch.context() as patch:
        patch.setattr(forward, "_made_of", lambda x: None)
        return grads(net, **options)


def same(found, wanted):
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", REMADE + KEPT)
def test_gradients_are_the_same_to_the_bit(act, dtype, monkeypatch):
    net = adapted(act, dtype)
    assert same(grads(net), plainly(monkeypatch, net))


def kept_storages(out):
    """What is kept for backward: the bytes of each storage."""
    waiting, seen, found = [out.grad_fn], set(), {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [n for n, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for kept in [*getattr(node, "saved_tensors", ()), *(getattr(node, name) for name in names)]:
            for tensor in kept if isinstance(kept, list | tuple) else [kept]:
                if isinstance(tensor, torch.Tensor):
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("act", [*REMADE, "halved", "behind autograd's back"])
def test_the_widest_activation_is_kept_only_where_it_cannot_be_made_again(act):
    net, seen = adapted(act), []
    net.down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    out = net(torch.randn(3, 5, 8))
    is_kept = seen[0].untyped_storage().data_ptr() in kept_storages(out)
    assert is_kept == (act not in REMADE)


def test_the_activation_goes_at_once_and_the_graph_with_its_output():
    net, seen = adapted("gelu"), []
    net.up.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    net.down.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    gc.disable()  # no cycle is to be collected
    try:
        out = net(torch.randn(3, 5, 8))
        assert [each() is None for each in seen] == [False, True]
        del out
        assert seen[0]() is None
    finally:
        gc.enable()
    with torch.no_grad():
        assert net(torch.randn(3, 5, 8)).grad_fn is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_left_alone(reentrant, monkeypatch):
    net = adapted("gated")
    # the region ends between the activation and the layer, where the graph would tell too much
    run = lambda x: x + net.down(checkpoint(net.inner, x, use_reentrant=reentrant))  # noqa: E731
    whole = lambda x: checkpoint(net, x, use_reentrant=reentrant)  # noqa: E731
    wanted = plainly(monkeypatch, net)
    assert same(grads(net, run), wanted)
    assert same(grads(net, whole), wanted)


def test_hooks_that_keep_tensors_elsewhere(monkeypatch):
    net = adapted("gelu")
    packed = []

    def run(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
            return net(x)

    assert same(grads(net, run), plainly(monkeypatch, net))
    assert packed
    assert same(grads(net, lambda x: _offloaded(net, x)), plainly(monkeypatch, net))


def _offloaded(net, x):
    with torch.autograd.graph.save_on_cpu():
        return net(x)


@pytest.mark.parametrize("act", ["gelu", "gated"])
def test_autocast(act, monkeypatch):
    net = adapted(act)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    assert same(grads(net, run), plainly(monkeypatch, net, run=run))


@pytest.mark.parametrize("act", ["gelu", "gated"])
def test_second_derivatives(act):
    net = adapted(act, torch.float64)
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    factors = [net.down.weight_adapter.down, net.down.weight_adapter.up]

    def run(x, *factors):
        return forward.linear(net.inner(x), net.down.weight, net.down.bias, *factors)

    assert torch.autograd.gradcheck(run, (x, *factors))
    assert torch.autograd.gradgradcheck(run, (x, *factors))


def test_compiled_and_under_func(monkeypatch):
    net = adapted("gelu")
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(grads(net, compiled), plainly(monkeypatch, net), strict=True):
        torch.testing.assert_close(found, wanted)
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    x = torch.randn(4, 5, 8)

    def loss(params, x):
        return torch.func.functional_call(net, params, (x,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    for name, found in per_sample.items():
        net.zero_grad()
        net(x[2]).square().sum().backward()
        torch.testing.assert_close(found[2], net.get_parameter(name).grad)


def test_a_copy_in_another_thread_and_a_graph_that_is_kept(monkeypatch):
    net = adapted("gelu")
    x = torch.randn(3, 5, 8)
    out = net(x).square().sum()
    learned = [p for p in net.parameters() if p.requires_grad]
    first = torch.autograd.grad(out, learned, retain_graph=True)
    again = torch.autograd.grad(out, learned)
    assert same(first, again)
    twin = copy.deepcopy(net)
    assert same(grads(twin), plainly(monkeypatch, net))


def test_a_bert_keeps_a_quarter_more_than_norms_and_head_alone():
    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "num_hidden_layers": 3}
    bound = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes, **off)).train()
    net = copy.deepcopy(bound)
    for name, parameter in bound.named_parameters():
        parameter.requires_grad_("LayerNorm" in name or "classifier" in name)
    layers = [name for name, m in net.named_modules() if isinstance(m, nn.Linear) and name != "classifier"]
    sp.attach_(net, sp.SPLoRA(rank=2), targets=layers, head="classifier")
    batch = {"input_ids": torch.randint(0, 50, (4, 32)), "labels": torch.zeros(4, dtype=torch.long)}

    def kept(each):
        own = {tensor.untyped_storage().data_ptr() for tensor in (*each.parameters(), *each.buffers())}
        return sum(size for pointer, size in kept_storages(each(**batch).loss).items() if pointer not in own)

    assert kept(bound) < kept(net) <= 1.25 * kept(bound)
