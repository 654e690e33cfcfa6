"""Made: attention, recurrence, tied weights and products of features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from zoo.entry import Entry, make_entry, noise
from zoo.parts import Head, conv, pictures


class AttentionBlock(nn.Module):
    """``nn.MultiheadAttention`` between norms and a feed-forward pair; the sequence first or second."""

    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options)
        self.up, self.down, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.embed(x)
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return self.head(x + self.down(F.gelu(self.up(x))))


class CrossAttention(nn.Module):
    """Keys and values of other widths than the queries, with weights that are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 16), nn.Linear(5, 10), nn.Linear(5, 14)
        self.attention = nn.MultiheadAttention(16, 2, kdim=10, vdim=14, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x, memory):
        attended, weights = self.attention(self.query(x), self.key(memory), self.value(memory))
        return self.head(attended), weights


class Encoder(nn.Module):
    """``nn.TransformerEncoder``, whose layers have a fast path with an operator of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **options)
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(1))


class EncoderDecoder(nn.Module):
    """``nn.Transformer``, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.head = nn.Linear(6, 16), nn.Embedding(20, 16), nn.Linear(16, 20)
        self.body = nn.Transformer(16, 4, 1, 1, 24, batch_first=True)
        self.body.encoder.enable_nested_tensor = False

    def forward(self, x, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        return self.head(self.body(self.source(x), self.target(ids), tgt_mask=mask, tgt_is_causal=True))


class Recurrent(nn.Module):
    """An embedding, a recurrent network and a head on the mean of its states."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(20, 8), kind(8, 10, batch_first=True, **options)
        self.head = nn.Linear(20 if options.get("bidirectional") else 10, 5)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids))[0].mean(1))


class CellLoop(nn.Module):
    """A recurrence that is spelled out: the same cell at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(6, 8), nn.GRUCell(8, 10), nn.Linear(10, 5)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 10)
        for step in self.embed(x).unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class TiedLanguageModel(nn.Module):
    """The embedding's weight is the head's as well: its columns are tied to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(20, 12), nn.Linear(12, 16), nn.Linear(16, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(F.relu(self.up(x)))))


class TiedLayers(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 8)
        self.bias_two, self.bias_one = nn.Parameter(torch.zeros(12)), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        code = torch.tanh(self.two(torch.tanh(self.one(x))))
        back = torch.tanh(F.linear(code, self.two.weight.t(), self.bias_two))
        return torch.addmm(self.bias_one, back, self.one.weight)


class HandmadeVit(nn.Module):
    """Class token, positions, layer scales, and queries, keys and values from one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 5, 16))
        self.norm1, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale1, self.scale2 = (
            nn.Parameter(torch.full((16,), 1e-5)),
            nn.Parameter(torch.full((16,), 1e-5)),
        )
        self.head = nn.Linear(16, 5)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (width // 4) ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = x + self.scale1 * self.attend(self.norm1(x))
        x = x + self.scale2 * self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x[:, 0])


class EinsumAttention(nn.Module):
    """Heads and widths are axes of the weights, contracted by ``einsum``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.query_weight = nn.Parameter(torch.randn(12, 3, 4))
        self.key_weight = nn.Parameter(torch.randn(12, 3, 4))
        self.value_weight = nn.Parameter(torch.randn(12, 3, 5))
        self.out_weight, self.head = nn.Parameter(torch.randn(3, 5, 12)), nn.Linear(12, 5)

    def forward(self, x):
        x = self.embed(x)
        q = torch.einsum("bld,dhk->bhlk", x, self.query_weight)
        k = torch.einsum("bld,dhk->bhlk", x, self.key_weight)
        v = torch.einsum("bld,dhk->bhlk", x, self.value_weight)
        weights = torch.einsum("bhlk,bhmk->bhlm", q, k).div(2).softmax(-1)
        return self.head(x + torch.einsum("bhlm,bhmk,hkd->bld", weights, v, self.out_weight))


class PooledHeads(nn.Module):
    """Heads are samples for a convolution that pools them; a term of the scores is an ``einsum``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(6, 16), nn.Linear(16, 24), nn.Linear(8, 16)
        self.pool, self.num_heads = nn.Conv1d(2, 2, 3, padding=1, groups=2), 4
        self.positions, self.head = nn.Parameter(torch.zeros(4, 2)), nn.Linear(16, 5)

    def forward(self, x):
        x = self.embed(x)
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q = self.pool(q.flatten(0, 1).transpose(1, 2)).transpose(1, 2).reshape(batch, self.num_heads, length, -1)
        scores = q @ k.transpose(2, 3) + torch.einsum("bhnc,kc->bhnk", q, self.positions)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.head(x + self.out(mixed))


class HeadsOfOne(nn.Module):
    """As many heads as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.attention = nn.MultiheadAttention(8, 8, batch_first=True)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


class GroupedQueries(nn.Module):
    """Two query heads share each pair of key and value heads, with positions that rotate halves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.out = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.key, self.value, self.head = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 5)

    def heads(self, x):
        return x.unflatten(-1, (-1, 4)).transpose(1, 2)

    def rotate(self, x):
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        first, second = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    def forward(self, x):
        x = self.embed(x)
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


class ChannelAttention(nn.Module):
    """Attention between channels, by ``bmm``, and a token that weighs the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.query, self.value, self.head = (
            conv(3, 8),
            nn.Conv2d(8, 6, 1),
            nn.Conv2d(8, 6, 1),
            Head(6),
        )

    def forward(self, x):
        x = self.stem(x)
        q, v = self.query(x).flatten(2), self.value(x).flatten(2)
        mixed = torch.bmm(F.softmax(torch.bmm(q, v.mT), dim=-1), v)
        return self.head(mixed.view(*mixed.shape[:2], *x.shape[2:]))


class BilinearLayer(nn.Module):
    """``nn.Bilinear`` has two inputs in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.pair = nn.Linear(6, 8), nn.Linear(6, 7), nn.Bilinear(8, 7, 9)
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        return self.head(F.relu(self.pair(F.relu(self.left(x)), F.relu(self.right(x)))))


class OuterProduct(nn.Module):
    """Each pair of features is one input of the next layer, and their inner product another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 5)
        self.join, self.head = nn.Linear(20, 8), nn.Linear(9, 5)

    def forward(self, x):
        left, right = self.left(x), self.right(x)
        pairs = F.relu(self.join((left[:, :, None] * right[:, None, :]).flatten(1)))
        return self.head(torch.cat([pairs, (left * left).sum(-1, keepdim=True)], -1))


class TokenMixing(nn.Module):
    """Positions and channels change places between layers, so that a linear layer mixes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 12), nn.LayerNorm(12)
        self.mix, self.unmix = nn.Linear(4, 10), nn.Linear(10, 4)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.unmix(F.gelu(self.mix(self.norm(x).transpose(1, 2)))).mT
        return self.head(x.mean(1))


class Experts(nn.Module):
    """Each token's experts are all computed and weighed by the largest two of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 10), nn.SiLU(), nn.Linear(10, 8)) for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        best, which = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros_like(self.router(x)).scatter(-1, which, best)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head(x + (outputs * weights.unsqueeze(-2)).sum(-1))


class BorrowedWidth(nn.Module):
    """Attention that takes the width of its input for that of all its heads, keys of a smaller picture (PVT, Twins)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.q, self.kv, self.out = nn.Linear(12, 12), nn.Linear(12, 24), nn.Linear(12, 12)
        self.pool, self.norm = nn.Conv2d(12, 12, 2, 2), nn.LayerNorm(12)

    def forward(self, x, size):
        B, N, C = x.shape
        q = self.q(x).reshape(B, N, self.num_heads, C // self.num_heads).transpose(1, 2)
        x = self.pool(x.transpose(1, 2).reshape(B, C, *size)).reshape(B, C, -1).transpose(1, 2)
        kv = self.kv(self.norm(x)).reshape(B, -1, 2, self.num_heads, C // self.num_heads)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(B, N, C))


class BorrowedScale(nn.Module):
    """The same with a scale that is a number made of that width (torchvision's Swin), and tokens of any number."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = 4, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * (C // self.num_heads) ** -0.5) @ k.transpose(-2, -1)
        return self.out((attn.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


class Outlook(nn.Module):
    """Heads attend to the pixels around each other, which are unfolded and folded again (VOLO)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.v, self.attn, self.out = nn.Linear(12, 12), nn.Linear(12, 81 * 2), nn.Linear(12, 12)

    def forward(self, x):
        B, H, W, C = x.shape
        v = F.unfold(self.v(x).permute(0, 3, 1, 2), 3, padding=1)
        v = v.reshape(B, self.num_heads, C // self.num_heads, 9, H * W).permute(0, 1, 4, 3, 2)
        attn = self.attn(x).reshape(B, H * W, self.num_heads, 9, 9).permute(0, 2, 1, 3, 4).softmax(-1)
        x = (attn @ v).permute(0, 1, 4, 3, 2).reshape(B, C * 9, H * W)
        return self.out(F.fold(x, (H, W), 3, padding=1).permute(0, 2, 3, 1))


class Borrowers(nn.Module):
    """A residual stream through attention of three kinds that borrows its width, and tokens mixed by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 2, 2)
        self.outlook, self.one, self.two = Outlook(), BorrowedWidth(), BorrowedScale()
        self.mlp, self.norms = nn.Linear(12, 12), nn.ModuleList(nn.LayerNorm(12) for _ in range(3))
        self.mix, self.head = nn.Conv1d(2, 1, 1), nn.Linear(12, 5)

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        x = x + self.outlook(self.norms[0](x))
        size, x = x.shape[1:3], x.flatten(1, 2)
        x = x + self.one(self.norms[1](x), size)
        x = x + self.mlp(F.gelu(self.two(self.norms[2](x))))
        return self.head(self.mix(torch.stack([x.mean(1), x.amax(1)], 1)).squeeze(1))


class ExpertMatrices(nn.Module):
    """The matrices of all experts in one tensor; each token takes those of its best two (Mixtral)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 5)
        self.up_weight, self.down_weight = nn.Parameter(torch.randn(3, 20, 8)), nn.Parameter(torch.randn(3, 8, 10))

    def forward(self, x):
        x = self.embed(x).flatten(0, 1)
        best, which = self.router(x).softmax(-1).topk(2)
        chosen = which.reshape(-1)
        gate, up = torch.bmm(self.up_weight[chosen], x.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        out = torch.bmm(self.down_weight[chosen], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return self.head(x + (out * best.reshape(-1, 1)).view(len(x), 2, -1).sum(1))


class BareParameters(nn.Module):
    """Matrices without a layer, on the right and on the left, and one that is both."""

    def __init__(self) -> None:
        super().__init__()
        self.one_weight, self.two_weight = nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(10, 8))
        self.both_weight, self.bias, self.head = (
            nn.Parameter(torch.zeros(10, 10)),
            nn.Parameter(torch.zeros(8)),
            nn.Linear(10, 5),
        )

    def forward(self, x):
        x = torch.relu(x @ self.one_weight + self.bias)
        x = (self.two_weight @ x.t()).t()
        return self.head(torch.tanh(x @ (self.both_weight + self.both_weight.t())))


class Bag(nn.Module):
    """Sums of embeddings, and embeddings of two tables side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.one, self.two = (
            nn.EmbeddingBag(20, 8, mode="sum"),
            nn.Embedding(20, 4),
            nn.Embedding(20, 4),
        )
        self.up, self.head = nn.Linear(8, 10), nn.Linear(10, 5)

    def forward(self, ids):
        both = torch.cat([self.one(ids[:, 0]), self.two(ids[:, 1])], -1)
        return self.head(self.up(self.bag(ids) + both).relu())


class DataDependentSize(nn.Module):
    """How many rows there are is known only when it runs; export gives that number a name and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(8, 10), nn.Linear(10, 5)

    def forward(self, x):
        x = self.one(x).relu()
        return self.head(self.two(x[x.sum(-1) > 1]).relu())


class MultilayerPerceptron(nn.Sequential):
    """Dropouts, norms and activations that leave channels where they are."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.LeakyReLU(0.1),
            nn.Dropout(0.5),
            nn.Linear(12, 10),
            nn.LayerNorm(10),
            nn.Hardswish(),
            nn.Linear(10, 8, bias=False),
            nn.Softplus(),
            nn.Linear(8, 5),
        )


def entries() -> list[Entry]:
    sequence, vector, ids = noise(2, 4, 6), noise(9, 6), partial(torch.randint, 20, (2, 7))
    rows: list[tuple[str, Callable[[], nn.Module], Callable[[], Any]]] = [
        ("attention_batch_first", partial(AttentionBlock, True), sequence),
        ("attention_sequence_first", partial(AttentionBlock, False, bias=False), sequence),
        ("cross_attention", CrossAttention, lambda: (torch.randn(2, 4, 6), torch.randn(2, 3, 5))),
        ("transformer_encoder", Encoder, sequence),
        ("transformer_encoder_norm_first", partial(Encoder, norm_first=True, activation="gelu"), sequence),
        ("transformer", EncoderDecoder, lambda: (torch.randn(2, 4, 6), torch.randint(20, (2, 7)))),
        ("lstm", partial(Recurrent, nn.LSTM), ids),
        ("lstm_deep", partial(Recurrent, nn.LSTM, num_layers=2, bidirectional=True), ids),
        ("gru", partial(Recurrent, nn.GRU), ids),
        ("gru_cell_loop", CellLoop, sequence),
        ("tied_language_model", TiedLanguageModel, ids),
        ("tied_layers", TiedLayers, vector),
        ("einsum_attention", EinsumAttention, sequence),
        ("pooled_heads", PooledHeads, sequence),
        ("heads_of_one", HeadsOfOne, sequence),
        ("grouped_queries", GroupedQueries, sequence),
        ("bilinear", BilinearLayer, vector),
        ("outer_product", OuterProduct, vector),
        ("token_mixing", TokenMixing, sequence),
        ("experts", Experts, sequence),
        ("expert_matrices", ExpertMatrices, sequence),
        ("bare_parameters", BareParameters, vector),
        ("bag", Bag, ids),
        ("data_dependent_size", DataDependentSize, vector),
        ("perceptron", MultilayerPerceptron, vector),
    ]
    made = [make_entry(f"made/{name}", build, draw) for name, build, draw in rows]
    return [*pictures(HandmadeVit, ChannelAttention, Borrowers), *made]
