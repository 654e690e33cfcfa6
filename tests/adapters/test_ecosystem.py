"""Adapted networks inside of what PyTorch users wrap around networks."""

import copy
import functools
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import awaken_
from torch import nn
from torch.utils.checkpoint import checkpoint

import spalier as sp
from spalier.adapters import forward as fast


class Small(nn.Module):
    """A convolution used twice, a grouped one, attention, a linear layer and an embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x).movedim(-1, 1)
        x = self.twice(torch.relu(self.norm(self.twice(x))))
        x = self.grouped(x).flatten(2).mT
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def adapted(adapter=None, dtype=torch.float64):
    torch.manual_seed(1)
    net = Small().to(dtype)
    sp.attach_(net, adapter or sp.SPLoRA(2), targets=lambda name, module: name != "head")
    awaken_(net)
    return net


def images(batch=4):
    return torch.randint(0, 5, (batch, 6, 6), generator=torch.Generator().manual_seed(2))


def gradients(net, loss):
    learned = [p for p in net.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, learned)


def assert_same_gradients(got, want, **tolerance):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


ADAPTERS = [sp.SPLoRA(2), sp.SPLoRA(2, kernel="full"), sp.SPPaRA(), sp.FineTune()]


def test_a_layer_used_twice_equals_plain_autograd():
    net = adapted()
    plain = sp.fuse(net)
    x = images()
    update, layer = net.twice.weight_adapter, plain.twice
    grads = torch.autograd.grad(net(x).square().sum(), [update.down, update.up])
    (dense,) = torch.autograd.grad(plain(x).square().sum(), [layer.weight])
    centre = dense[:, :, 1, 1]
    assert_same_gradients(grads, [update.up @ centre, update.down @ centre.T], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_autocast(adapter):
    net = adapted(adapter, torch.float32)
    x = images()
    want = net(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = net(x)
        loss = got.float().square().sum()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.1)  # bfloat16 keeps 8 bits
    grads = gradients(net, loss)
    assert all(g.dtype == torch.float32 for g in grads)
    exact = torch.cat([g.flatten() for g in gradients(net, want.square().sum())])
    assert torch.cosine_similarity(torch.cat([g.flatten() for g in grads]), exact, dim=0) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_torch_compile(adapter):
    torch.compiler.reset()
    net = adapted(adapter)
    x = images()
    want = net(x)
    expected = gradients(net, want.square().sum())
    compiled = torch.compile(net, backend="aot_eager")
    got = compiled(x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(net, got.square().sum()), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_torch_compile_of_a_cnn_is_one_graph():
    torch.compiler.reset()
    net = sp.models.resnet18(classes=10, stem="cifar").double()
    sp.attach_(net, sp.SPLoRA(2), head="fc")
    awaken_(net, 0.05)
    net.eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_torch_compile_with_inductor(compiler):
    torch.compiler.reset()
    net = adapted()
    x = images()
    want = net(x)
    expected = gradients(net, want.square().sum())
    got = torch.compile(net)(x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert_same_gradients(gradients(net, got.square().sum()), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_torch_export(adapter, strict):
    net = adapted(adapter).eval()
    x = images()
    exported = torch.export.export(net, (x,), strict=strict).module()
    torch.testing.assert_close(exported(x), net(x), rtol=1e-10, atol=1e-10)


def test_torch_export_of_the_fused_network():
    net = adapted().eval()
    x = images()
    exported = torch.export.export(sp.fuse(net), (x,)).module()
    torch.testing.assert_close(exported(x), net(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_gradient_checkpointing(adapter, reentrant):
    net = adapted(adapter)
    body = nn.Sequential(net.twice, nn.ReLU(), net.grouped)
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(p for p in body.parameters() if p.requires_grad)]
    want = torch.autograd.grad(body(x).square().sum(), leaves)
    for leaf in leaves:
        leaf.grad = None
    checkpoint(body, x, use_reentrant=reentrant).square().sum().backward()
    assert_same_gradients([leaf.grad for leaf in leaves], want, rtol=1e-12, atol=1e-12)


def test_functional_gradients():
    net = adapted().eval()
    x = images()
    learned = {k: v.detach() for k, v in net.named_parameters() if v.requires_grad}

    def loss(parameters):
        return torch.func.functional_call(net, parameters, (x,)).square().sum()

    want = gradients(net, net(x).square().sum())
    assert_same_gradients(torch.func.grad(loss)(learned).values(), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layer", [nn.Linear(4, 5), nn.Conv2d(4, 5, 3, padding=1)], ids=lambda m: type(m).__name__)
def test_per_sample_gradients_by_vmap(layer, fused, monkeypatch):
    monkeypatch.setattr(fast, "_fusing_pays", lambda pixels, weight: fused)
    net = nn.Sequential(copy.deepcopy(layer)).double()
    sp.attach_(net, sp.SPLoRA(2))
    awaken_(net)
    x = torch.randn(3, *((4,) if isinstance(layer, nn.Linear) else (4, 5, 5)), dtype=torch.float64)
    learned = {k: v.detach() for k, v in net.named_parameters() if v.requires_grad}

    def loss(parameters, sample):
        return torch.func.functional_call(net, parameters, (sample.unsqueeze(0),)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(learned, x)
    for index, sample in enumerate(x):
        alone = torch.func.grad(loss)(learned, sample)
        for key, grads in together.items():
            torch.testing.assert_close(grads[index], alone[key], rtol=1e-10, atol=1e-10)


def _train_in_a_process(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    net = adapted()
    net.eval()  # batch statistics would differ between half batches and the whole
    wrapped = nn.parallel.DistributedDataParallel(net)
    x = images(8)[rank::2]
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    torch.save(dict(net.named_parameters()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel_with_two_processes(tmp_path):
    port = _free_port()
    mp.spawn(_train_in_a_process, (port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    net = adapted()
    net.eval()
    start = copy.deepcopy(dict(net.named_parameters()))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(images(8)).square().mean().backward()
        optimizer.step()
    for key, parameter in net.named_parameters():
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=0)
        torch.testing.assert_close(first[key], parameter.data, rtol=1e-9, atol=1e-9, check_device=False)
        assert torch.equal(parameter, start[key]) != parameter.requires_grad


@functools.cache
def _free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_threads_may_share_an_adapted_network():
    from concurrent.futures import ThreadPoolExecutor

    net = adapted(sp.SPPaRA()).eval()
    batches = [images() for _ in range(8)]
    with torch.no_grad():
        want = [net(x) for x in batches]

    def run(x):
        with torch.no_grad():
            return net(x)

    with ThreadPoolExecutor(4) as pool:
        for a, b in zip(pool.map(run, batches), want, strict=True):
            assert torch.equal(a, b)
