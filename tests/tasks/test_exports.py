"""A built network goes wherever PyTorch networks go: compiled, exported, in onnxruntime, in ExecuTorch."""

import copy
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
import zoo
from support import awaken_
from trained import EXAMPLE, DigitNet

import spalier as sp
from spalier.adapters.attachment import attachment_of

pytestmark = pytest.mark.slow

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def built(*, free, fold):
    torch.manual_seed(0)
    base = DigitNet(8).eval()
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head="fc", example=EXAMPLE)
    structure = attachment_of(net).structure
    rng = np.random.default_rng(0)
    keep = {s.name: rng.choice(s.size, s.size // 2, replace=False).tolist() for s in structure.streams}
    for writer in structure.writers if free else ():
        size = structure.streams[writer.stream].size
        keep[writer.name] = rng.choice(size, size // 2, replace=False).tolist()
    sp.prune_(awaken_(net), sp.Plan(structure, keep, writers="free" if free else "coupled"))
    return sp.Task.of(net.eval(), "a").build(base, fold=fold), net


OTHERS = ((False, False), (False, True), (True, False))
KINDS = pytest.mark.parametrize(
    ("free", "fold"), [(True, True), *(pytest.param(*kind, marks=pytest.mark.slow) for kind in OTHERS)]
)


@KINDS
@torch.no_grad()
def test_onnxruntime_computes_the_same(free, fold, tmp_path):
    net, adapted = built(free=free, fold=fold)
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own libraries
        batch = torch.export.Dim("batch")
        torch.onnx.export(
            net,
            (X,),
            str(path),
            dynamo=True,
            verbose=False,
            external_data=False,
            dynamic_shapes=({0: batch},),
        )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for x in (X, torch.randn(5, 1, 8, 8)):
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), adapted(x), rtol=1e-4, atol=1e-5)


@KINDS
@torch.no_grad()
def test_export_and_compile(free, fold, tmp_path):
    net, adapted = built(free=free, fold=fold)
    program = torch.export.export(net, (X,))
    torch.export.save(program, tmp_path / "net.pt2")
    for run in (program.module(), torch.export.load(tmp_path / "net.pt2").module()):
        torch.testing.assert_close(run(X), adapted(X), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), adapted(X), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_compiled_to_machine_code(compiler):
    net, adapted = built(free=False, fold=True)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(net)(X), adapted(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("free", [pytest.param(False, marks=pytest.mark.slow), True])
@torch.no_grad()
def test_executorchs_portable_format(free, tmp_path):
    """Written to a .pte file, and run by ExecuTorch's own runtime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that it brings along
        to_edge = pytest.importorskip("executorch.exir").to_edge
        runtime = pytest.importorskip("executorch.runtime")
        net, adapted = built(free=free, fold=True)
        program = to_edge(torch.export.export(net, (X,))).to_executorch()
        path = tmp_path / "net.pte"
        path.write_bytes(program.buffer)
        method = runtime.Runtime.get().load_program(path).load_method("forward")
        (found,) = method.execute([X])
    torch.testing.assert_close(found, adapted(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["torchvision/vit", "transformers/bert", "timm/convnext"])
@torch.no_grad()
def test_attention_and_other_libraries_export(name):
    entry = next(entry for entry in zoo.ZOO if entry.name.startswith(name))
    base, example = entry.make().eval(), entry.example()
    net = copy.deepcopy(base)
    structure = sp.trace(base, example)
    sp.attach_(net, sp.SPLoRA(rank=2))
    awaken_(net, 0.05)
    keep = {s.name: range(max(1, s.size // 2)) for s in structure.streams}
    sp.prune_(net, sp.Plan(structure, keep))
    net.eval()
    made = sp.Task.of(net, "a").build(base)
    args, kwargs = zoo.arguments(example)
    program = torch.export.export(made, args, kwargs)
    pairs = zip(
        torch.utils._pytree.tree_leaves(program.module()(*args, **kwargs)),
        torch.utils._pytree.tree_leaves(net(*args, **kwargs)),
        strict=True,
    )
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
