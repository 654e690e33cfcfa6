"""The format is what docs/task-format.md says: a second reader, written from that page, gives the same networks."""

import hashlib

import pytest
import torch
from learning import ADAPTERS, IMAGE, learned
from oracles import task_format
from support import tiny_cnn
from torch import nn
from trained import EXAMPLE, DigitNet
from zoo.made_convolutional import Concatenations

import spalier as sp


def grouped():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8),
        nn.Flatten(), nn.Linear(8 * 16, 6), nn.ReLU(), nn.Linear(6, 3),
    ).double()  # fmt: skip


def transposed():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(8, 6, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5), nn.Linear(5, 3),
    ).double()  # fmt: skip


class Words(nn.Module):
    """An embedding with a row that never learns, and attention."""

    def __init__(self):
        super().__init__()
        self.words, self.attention = nn.Embedding(11, 8, padding_idx=0), nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.words(x)
        return self.fc((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


WORDS = torch.tensor([[1, 2, 0, 5], [7, 0, 3, 10]])
CODED = {
    "1 bit": sp.SPDelta(bits=1),
    "2 bits": sp.SPDelta(bits=2),
    "3 bits, layer": sp.SPDelta(bits=3, scales="layer"),
    "4 bits": sp.SPDelta(bits=4),
}
CASES = {
    **{kind: (tiny_cnn, adapter, IMAGE, "8", False) for kind, adapter in ADAPTERS.items()},
    "residual": (lambda: DigitNet(8), sp.SPLoRA(rank=3), EXAMPLE, "fc", False),
    "free": (lambda: DigitNet(8), sp.SPLoRA(rank=3), EXAMPLE, "fc", True),
    "groups and flatten": (grouped, sp.SPLoRA(rank=2), IMAGE, "8", False),
    "transposed": (transposed, sp.SPLoRA(rank=2), IMAGE, "8", False),
    "transposed, pointwise": (transposed, sp.SPPaRA(), IMAGE, "8", False),
    "transposed, coded": (transposed, sp.SPDelta(bits=1), IMAGE, "8", False),
    "grouped, coded": (grouped, sp.SPDelta(bits=2), IMAGE, "8", False),
    "words": (Words, sp.SPLoRA(rank=2), WORDS, "fc", False),
    "words, coded": (Words, sp.SPDelta(bits=2, scales="layer"), WORDS, "fc", False),
    "concatenations": (Concatenations, sp.SPLoRA(rank=2), IMAGE, "fc", False),
    "concatenations, coded": (Concatenations, sp.SPDelta(bits=4), IMAGE, "fc", False),
    **{f"residual, {kind}": (lambda: DigitNet(8), adapter, EXAMPLE, "fc", True) for kind, adapter in CODED.items()},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("storage", ["exact", "fp16", "bf16", "int8", "int8-all", "int4-head"])
def test_a_second_reader_gives_the_same_network(case, storage, tmp_path):
    make, adapter, example, head, free = CASES[case]
    torch.manual_seed(3)
    base = make().double()
    example = example.double() if example.is_floating_point() else example
    net = learned(base, adapter, example=example, head=head, free=free)
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path, storage=storage)
    tensors = {name: tensor.numpy() for name, tensor in base.state_dict().items()}
    found = task_format.network(path, tensors)
    built = sp.Task.load(path).build(base).state_dict()
    assert set(found) == {name for name in built if not name.endswith("spread.index")}
    for name, value in found.items():
        torch.testing.assert_close(built[name].double(), torch.tensor(value), rtol=1e-6, atol=1e-9)


def test_digests_are_what_the_page_says(tmp_path):
    base = tiny_cnn()
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(learned(base), "a").save(path)
    description, table, _ = task_format.read(path)
    own = {f"{p}.{k}" for p, keys, *_, source in table["rows"] if source[0] in ("values", "integers") for k in keys}
    lines = []
    for name, tensor in sorted(base.state_dict().items()):
        if name not in own:
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            lines.append(f"{name}\t{str(tensor.dtype)[6:]}\t{list(tensor.shape)}\t{digest}\n")
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == description["base"]["values"]
    lines = []
    for name, module in base.named_modules():
        lines.append(f"{name}\t{type(module).__qualname__}\t{'' if name == '8' else module.extra_repr()}\n")
    for name in base.state_dict():
        if not name.startswith("8."):
            lines.append(f"{name}\t{name}\n")
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == description["base"]["architecture"]
