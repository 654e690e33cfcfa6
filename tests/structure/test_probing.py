"""What the dry run of `trace` sees: nothing that it offers is refused by `prune_`."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from support import tiny_cnn
from torch import nn
from zoo.transformers_nets import _BERT, _PICTURE, _hugging, _ids, _pixels

import spalier as sp

TOKENS = torch.randn(2, 5, 12)


class Attention(nn.Module):
    """Two layers with a hidden one between them, and attention whose code holds sizes in one way or another."""

    def __init__(self):
        super().__init__()
        self.fit, self.hidden = nn.Linear(12, 16), nn.Linear(16, 16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def heads(self, x):
        return x.unflatten(-1, (4, -1)).transpose(1, 2)

    def forward(self, x):
        x = self.hidden(self.fit(x).relu())
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        return self.head(self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))).mean(1)

    def attend(self, q, k, v):
        return (self.scaled(q) @ k.transpose(-2, -1)).softmax(-1) @ v


class InKeyword(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=1 / q.shape[-1])


class InTensor(Attention):
    def scaled(self, q):
        return q / torch.sqrt(torch.tensor(q.size(-1)))


class InList(Attention):
    def scaled(self, q):
        return q / torch.tensor([1.0, q.size(-1)]).sum()


class InFilled(Attention):
    def scaled(self, q):
        return q / torch.full((1,), q.size(-1))


class InShape(Attention):
    def scaled(self, q):
        return q / torch.ones(q.size(-1)).sum()


class InTwin(Attention):
    def scaled(self, q):
        return q / torch.ones_like(q).sum(-1, keepdim=True)


@torch.jit.script
def _root(q: torch.Tensor, factor: int) -> torch.Tensor:
    return torch.sqrt(torch.tensor(q.size(-1), dtype=torch.float) * factor)


@torch.jit.script
def _inverse(q: torch.Tensor) -> torch.Tensor:
    return q * (q.size(-1) ** -0.5)


class InScript(Attention):
    def scaled(self, q):
        return q / _root(q, 3).to(q.dtype)


class InScriptToo(Attention):
    def scaled(self, q):
        return _inverse(q)


class AsIndex(Attention):
    """A number in a tensor is an index, so the code asks for its value."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(9, 1))

    def scaled(self, q):
        last = torch.tensor(q.size(-2)) - 1
        return q / torch.tensor(q.size(-1)) + self.places[1 : last + 2]


class BesideAttention(InFilled):
    """PyTorch's own attention runs another forward once it is cut."""

    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(16, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)

    def scaled(self, q):
        return q * q.size(-1) ** -0.5

    def forward(self, x):
        x = self.fit(x)
        x = self.layer(x + self.own(x, x, x)[0])
        q, k, v = (self.heads(layer(self.hidden(x))) for layer in (self.q, self.k, self.v))
        return self.head(self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))).mean(1)


class Collects(Attention):
    """Hooks of its own, which it sets when it runs first, hand states from layer to layer."""

    def __init__(self):
        super().__init__()
        self.states, self.is_hooked = [], False

    def collect(self, module, args, output):
        self.states.append(output)

    def scaled(self, q):
        return q * q.size(-1) ** -0.5

    def forward(self, x):
        if not self.is_hooked:
            self.hidden.register_forward_hook(self.collect)
            self.is_hooked = True
        self.states.clear()
        out = super().forward(x)
        return out + self.head(self.states[0]).mean(1)


SIZES = [
    InKeyword,
    InTensor,
    InList,
    InFilled,
    InShape,
    InTwin,
    InScript,
    InScriptToo,
    AsIndex,
    BesideAttention,
    Collects,
]


def assert_never_refused(net, structure):
    """Every stream alone, and all of them by halves, thirds and at random."""
    rng = np.random.default_rng(0)
    sizes = {stream.name: stream.size for stream in structure.streams}
    plans = [{name: range(max(size // 2, 1))} for name, size in sizes.items()]
    plans += [{name: range(max(size // part, 1)) for name, size in sizes.items()} for part in (2, 3)]
    plans += [{name: range(rng.integers(1, size + 1)) for name, size in sizes.items()} for _ in range(3)]
    for keep in plans:
        sp.prune_(copy.deepcopy(net), sp.Plan(structure, keep))


@pytest.mark.parametrize("kind", SIZES)
def test_a_size_in_the_arithmetic_stays(kind):
    torch.manual_seed(0)
    net = kind().double().eval()
    with torch.no_grad():
        net(TOKENS.double())
    structure = sp.trace(net, TOKENS.double())
    assert "q#2" not in structure.index  # the size of heads
    assert {"fit", "hidden"} <= set(structure.index)  # and nothing else
    # a sum over channels is in the graph itself; all else is found by trying
    said = "splits channels" if kind is InTwin else "computes with a number of channels"
    assert any(said in f.reason for f in structure.frozen)
    assert_never_refused(net, structure)


def test_hooks_of_the_user_do_not_see_the_dry_run_of_a_network_that_needs_none():
    net, seen = InTensor(), []
    net.hidden.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))
    sp.trace(net, TOKENS)
    assert set(seen) <= {16}


class Reshaped(nn.Module):
    """Attention takes the width of its input for its own."""

    def __init__(self, heads):
        super().__init__()
        self.fit, self.qkv = nn.Linear(12, 16), nn.Linear(16, 48)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.mlp = nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 16))
        self.gain = nn.Parameter(torch.rand(heads, 1))
        self.num_heads = heads

    def forward(self, x):
        x = (self.fit(x).unflatten(-1, (self.num_heads, -1)) * self.gain).flatten(2)
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
        return self.head(x + self.mlp(x)).mean(1)


@pytest.mark.parametrize("heads", [2, 4])
def test_a_width_that_is_borrowed_is_set_right(heads):
    net = Reshaped(heads).double()
    structure = sp.trace(net, TOKENS.double())
    assert {"mlp.0", "fit", "qkv"} <= set(structure.index)
    assert {view.module for view in structure.views} == {""}
    assert_never_refused(net, structure)


class Pair(nn.Module):
    """Two streams of two units each, one of which takes the width of the other."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(2, 3)
        self.four, self.five = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        one, two = self.one(x), self.two(x)
        return self.three(one) + self.five(self.four(two.view(len(x), one.shape[-1])))


def test_streams_of_two_units_are_told_apart():
    net = Pair().double()
    structure = sp.trace(net, torch.randn(4, 6).double())
    assert {"one", "two", "four"} <= set(structure.index)
    assert_never_refused(net, structure)


_DEBERTA = {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "task", "options", "draw"),
    [
        ("Segformer", "ForSemanticSegmentation", _SEGFORMER, _pixels),
        ("Data2VecVision", "ForImageClassification", _PICTURE, _pixels),
        ("Deberta", "ForSequenceClassification", _DEBERTA, _ids("input_ids", "attention_mask")),
        ("DebertaV2", "ForSequenceClassification", _DEBERTA, _ids("input_ids", "attention_mask")),
        (
            "DebertaV2",
            "ForSequenceClassification",
            {**_DEBERTA, "share_att_key": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"},
            _ids("input_ids", "attention_mask"),
        ),
    ],
    ids=["segformer", "data2vec_vision", "deberta", "deberta_v2", "deberta_v3"],
)
def test_networks_whose_offers_were_refused(kind, task, options, draw):
    entry = zoo.make_entry(kind, lambda: _hugging(kind, task, **options), draw)
    net = entry.make()
    structure = sp.trace(net, entry.example())
    assert structure.streams
    assert_never_refused(net, structure)


class Checked(Attention):
    """Looks at values where nothing is compiled, so it is captured, and does not run without values."""

    def scaled(self, q):
        if not torch.compiler.is_compiling() and not bool(torch.isfinite(q).all()):
            raise ValueError("not finite")
        return q * q.size(-1) ** -0.5


def test_what_cannot_be_tried_is_said(tmp_path):
    net, example = Checked().double(), TOKENS.double()
    structure = sp.trace(net, example, cache=tmp_path)
    assert "q#2" in structure.index
    assert "not tried with fewer channels" in str(structure)
    assert str(sp.trace(net, example, cache=tmp_path)) == str(structure)
    assert "not tried" not in str(sp.trace(InTensor(), TOKENS))


def test_a_refusal_names_what_to_keep_whole():
    net, example = Checked().double(), TOKENS.double()
    structure = sp.trace(net, example)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    scores = sp.score(net, criterion="weight", structure=structure)
    plan = sp.select(net, scores, weights=0.4, ranking="local")
    with pytest.raises(sp.errors.PruneError, match=r"protect=\['q'\] to select, or freeze=\['q'\] to trace") as caught:
        sp.prune_(net, plan)
    assert str(caught.value).endswith("or leave 'q', 'q#2' out of the plan")
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    sp.prune_(copy.deepcopy(net), sp.select(net, scores, weights=0.5, ranking="local", protect=["q"]))
    sp.prune_(copy.deepcopy(net), sp.Plan(structure, {n: k for n, k in plan.keep.items() if n not in ("q", "q#2")}))
    frozen = sp.trace(net, example, freeze=["q"])
    scores = sp.score(net, criterion="weight", structure=frozen)
    sp.prune_(net, sp.select(net, scores, weights=0.7, ranking="local"))


@pytest.mark.parametrize("is_shared", [False, True])
def test_threads_take_turns(is_shared):
    nets = [tiny_cnn()] * 4 if is_shared else [tiny_cnn() for _ in range(4)]
    image = torch.randn(2, 3, 8, 8)
    wanted = sp.trace(tiny_cnn(), image).to_dict()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda net: sp.trace(net, image).to_dict(), nets * 2))
    assert found == [wanted] * 8
