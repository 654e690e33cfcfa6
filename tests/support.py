"""Helpers that several test files use."""

import torch
from torch import nn


def awaken_(net: nn.Module, scale: float = 0.3) -> nn.Module:
    """Give the adapters values that matter, as training would; the default start is near zero."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "_adapter." in name:
                parameter.normal_(0, scale)
    return net


def snapshot(net: nn.Module) -> dict[str, object]:
    """Everything about a network that a refused call must leave alone."""
    return {
        "modules": [(name, id(m), type(m), tuple(m.__dict__)) for name, m in net.named_modules()],
        "tensors": [(k, id(v), v.requires_grad) for k, v in net.named_parameters(remove_duplicate=False)],
        "buffers": [(k, id(v)) for k, v in net.named_buffers()],
        "values": [v.detach().clone() for v in net.state_dict().values()],
        "training": [m.training for m in net.modules()],
    }


def assert_unchanged(net: nn.Module, before: dict[str, object]) -> None:
    after = snapshot(net)
    for key in before:
        if key == "values":
            same = (torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after[key], before[key], strict=True))
            assert all(same)
        else:
            assert after[key] == before[key], key


def tiny_cnn(classes: int = 3) -> nn.Sequential:
    """Two convolutions, 0 and 3, with norms, 1 and 4, and the head, 8."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, classes),
    )


TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
"""Sizes for a network of transformers that is made in no time."""


class Clock:
    """Seconds that pass only where somebody works."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def worker(self, name, seconds):
        def run():
            self.now += seconds
            self.log.append(name)

        return run
