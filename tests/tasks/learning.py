"""Networks that have learned something and have lost channels, for tests of tasks."""

import copy

import numpy as np
import torch
from support import awaken_
from torch import nn

import spalier as sp
from spalier.adapters.attachment import attachment_of

IMAGE = torch.zeros(2, 3, 8, 8)


def learned(base, adapter=None, *, density=0.5, example=IMAGE, head="8", free=False, seed=0, **options):
    """A copy of the base that has learned something and has lost channels."""
    torch.manual_seed(seed)
    net = copy.deepcopy(base)
    sp.attach_(net, adapter or sp.SPLoRA(rank=2), head=head, example=example, **options)
    awaken_(net)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                if module.weight.requires_grad:
                    module.weight.uniform_(0.5, 2)
                module.num_batches_tracked += 7
    structure = attachment_of(net).structure
    if density < 1:
        rng = np.random.default_rng(seed)
        names = [w.name for w in structure.writers] if free else []
        keep = {
            s.name: rng.choice(s.size, max(1, round(s.size * density)), replace=False).tolist()
            for s in structure.streams
        }
        for name in names:
            size = structure.streams[next(w.stream for w in structure.writers if w.name == name)].size
            keep[name] = rng.choice(size, max(1, round(size * density)), replace=False).tolist()
        sp.prune_(net, sp.Plan(structure, keep, writers="free" if free else "coupled"))
    return net.eval()


def same_state(one, other):
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def places(net):
    return {tensor.data_ptr() for tensor in net.state_dict().values()}


def reloaded(net, tmp_path, **options):
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path, **options)
    return sp.Task.load(path)


ADAPTERS = {
    "splora": sp.SPLoRA(rank=2),
    "kernel": sp.SPLoRA(rank=2, kernel="full"),
    "lora": sp.LoRA(rank=2),
    "sppara": sp.SPPaRA(),
    "finetune": sp.FineTune(),
}
