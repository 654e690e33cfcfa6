"""What the dry run remembers: it finds the same as one that runs every module every time."""

import pytest
import torch
import zoo
from torch import nn

import spalier as sp
from spalier import noting, tracing

TOKENS = torch.randn(2, 5, 12)


class Block(nn.Module):
    """A hidden layer whose size is in the arithmetic, so that its channels are refused, and one that may shrink."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.up, self.down, self.wide, self.narrow = (nn.Linear(*n) for n in ((16, 24), (24, 16)) * 2)

    def forward(self, x):
        Block.calls += 1
        hidden = self.up(x).relu()
        x = x + self.down(hidden / hidden.shape[-1])
        return x + self.narrow(self.wide(x).relu())


class Blocks(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.fit, self.blocks = nn.Linear(12, 16), nn.Sequential(*(Block() for _ in range(count)))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.blocks(self.fit(x)).mean(1))


class Stores(nn.Module):
    """Keeps what another module reads."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(16, 10), None

    def forward(self, x):
        self.kept = self.layer(x)
        return x


class Gathers(nn.Module):
    """Adds to a list that it is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, x, several):
        several.append(self.layer(x))
        return x


class Flat(nn.Module):
    """Returns what its caller reshapes in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, x):
        return self.layer(x).unsqueeze(0)


class Awkward(nn.Module):
    """Blocks that are refused one after the other, between modules that do more than return a tensor."""

    def __init__(self):
        super().__init__()
        self.fit, self.first, self.second, self.head = nn.Linear(12, 16), Block(), Block(), nn.Linear(10, 3)
        self.stores, self.gathers, self.flat = Stores(), Gathers(), Flat()

    def forward(self, x):
        x, several = self.fit(x), []
        x = self.gathers(self.stores(x), several)
        flat = self.flat(self.second(self.first(x)))
        flat.squeeze_(0)
        return self.head(flat * several[0] + self.stores.kept).mean(1)


class Forgetful(noting.Memory):
    """The oracle: every module runs every time."""

    def __init__(self, *args):
        super().__init__(*args)
        self.is_off = True


@pytest.mark.parametrize(
    ("make", "example"),
    [
        pytest.param(Blocks, lambda: TOKENS, id="blocks"),
        pytest.param(Awkward, lambda: TOKENS, id="awkward"),
        *(
            pytest.param(entry.make, entry.example, id=name, marks=[pytest.mark.slow] if name in zoo.LARGE else [])
            for name in ("torchvision/vit_b_16", "timm/cait_xxs24_224", "torchvision/swin_t", "timm/levit_128s")
            for entry in [zoo.by_name(name)]
        ),
    ],
)
def test_the_same_is_found_without_a_memory(make, example, monkeypatch):
    torch.manual_seed(0)
    net, x = make(), example()
    found = sp.trace(net, x).to_dict()
    monkeypatch.setattr(tracing, "Memory", Forgetful)
    assert found == sp.trace(net, x).to_dict()


def test_only_what_a_cut_changes_runs_again(monkeypatch):
    net = Blocks(6)
    Block.calls = 0
    sp.trace(net, TOKENS)
    remembered, Block.calls = Block.calls, 0
    monkeypatch.setattr(tracing, "Memory", Forgetful)
    sp.trace(net, TOKENS)
    assert 2 * remembered < Block.calls


def test_calls_of_modules_are_as_before_afterwards():
    call = nn.Module.__call__
    sp.trace(Blocks(1), TOKENS)
    assert nn.Module.__call__ is call
