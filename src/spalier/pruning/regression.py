"""The regression behind recovery: the update of a given rank that best makes up for what a layer's output misses.

It is a ridge regression from the layer's input to what is missing of its output, solved from second moments alone
(`Moments`), and then the best approximation of the adapter's rank (`reduced`): reduced-rank regression.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spalier.adapters.attachment import Changes
from spalier.adapters.codes import best_scales, codes_of
from spalier.adapters.forward import padded
from spalier.adapters.geometry import Window
from spalier.adapters.kinds import Coded, LowRank, Update
from spalier.errors import RecoveryError

_CHUNK = 1 << 24
"""How many numbers of a layer's input are laid out at a time."""


class Moments:
    """Sums over positions, in float64: of inputs by inputs, of inputs by what is missing, and of both."""

    def __init__(self, *, centred: bool) -> None:
        self.centred = centred
        """Whether means do not matter, because a norm takes them away."""
        self.count = 0
        self.power = 0.0
        """The mean power of the output that is wanted."""
        self._sums: list[Tensor] = []

    def add(self, x: Tensor, missing: Tensor) -> None:
        """(samples, features, positions) and (samples, outputs, positions)."""
        self.count += len(x) * x.shape[2]
        new = [
            _summed(x, x),  # (features, features)
            _summed(x, missing),  # (features, outputs)
            missing.square().sum(2).double().sum(0),
            x.sum(2).double().sum(0),
            missing.sum(2).double().sum(0),
        ]
        self._sums = new if not self._sums else [a + b for a, b in zip(self._sums, new, strict=True)]

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Second moments of the inputs, with what is missing, and of what is missing."""
        gram, cross, power, x, missing = (each / self.count for each in self._sums)
        if self.centred:
            gram, cross, power = gram - torch.outer(x, x), cross - torch.outer(x, missing), power - missing**2
        return gram, cross, power.sum()

    def shift(self, update: Tensor) -> Tensor:
        """The bias that goes with an update found without means."""
        x, missing = (self._sums[i] / self.count for i in (3, 4))
        return missing - x @ update


def _summed(a: Tensor, b: Tensor) -> Tensor:
    """Sum over samples and positions of a b^T; short sums are in single precision, the sum of these is not."""
    _, rows, positions = a.shape
    if positions >= rows:
        return torch.bmm(a, b.mT).sum(0, dtype=torch.float64)
    # few positions and many features: a matrix for each sample would take more memory than all samples do
    per = max(1, _SHORT // positions)
    total = torch.zeros(rows, b.shape[1], dtype=torch.float64, device=a.device)
    for part, other in zip(a.split(per), b.split(per), strict=True):
        total += part.transpose(0, 1).flatten(1) @ other.transpose(0, 1).flatten(1).T
    return total


_SHORT = 4096
"""How many positions are summed in single precision."""


def features(layer: Any, x: Tensor, missing: Tensor, whole: bool, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What an update multiplies and what it should make of it, laid out, some samples at a time."""
    if isinstance(layer, nn.Linear):
        # all positions of all samples as one sample: (1, features, positions)
        yield _wide(x.reshape(1, -1, x.shape[-1]).mT), _wide(missing.reshape(1, -1, missing.shape[-1]).mT)
        return
    if x.dim() < layer.weight.dim():
        x, missing = x[None], missing[None]
    x, padding = padded(layer, x)
    window = Window(layer.kernel_size, layer.stride, padding, layer.dilation)
    taps = 1 if not whole else layer.weight[0, 0].numel()
    every = max(1, -(-missing[:, 0].numel() // rows)) if whole else 1
    every += every % 2 == 0  # an odd stride meets all columns of an image
    per = max(1, _CHUNK // max(1, x[0].numel() * taps))
    for part, wanted in zip(x.split(per), missing.split(per), strict=True):
        seen = _patches(window, part) if whole else window.centre_tap(part).flatten(2)
        yield _wide(seen[:, :, ::every]), _wide(wanted.flatten(2)[:, :, ::every])


def _wide(x: Tensor) -> Tensor:
    """Half precision as single: sums of products overflow in it, or lose their digits."""
    return x.float() if x.dtype.itemsize < 4 else x


def _patches(window: Window, x: Tensor) -> Tensor:
    """Every tap's input at every output position: (samples, inputs times taps, positions)."""
    sizes = window.outputs(x.shape[2:])
    pads = [p for each in reversed(window.padding) for p in (each, each)]
    wide = F.pad(x, pads) if any(pads) else x
    seen = []
    for tap in product(*(range(k) for k in window.kernel)):
        index: list[slice] = [slice(None), slice(None)]
        for t, n, stride, dilation in zip(tap, sizes, window.stride, window.dilation, strict=True):
            index.append(slice(t * dilation, t * dilation + (n - 1) * stride + 1, stride))
        seen.append(wide[tuple(index)].flatten(2))
    return torch.stack(seen, 2).flatten(1, 2)


def set_best_(
    moments: Moments, layer: Any, update: Update | None, before: Tensor, ridge: float, changes: Changes, *, shifts: bool
) -> tuple[float, float]:
    """Set a layer's update to the best of its form, or its own weight where it has none.

    The ridge pulls to ``before``, a matrix of (features, outputs): the adapter as it was, or what it stands for.

    Returns the share of the output that was missing before, and is now.
    """
    gram, cross, power = moments.means()
    if not (torch.isfinite(gram).all() and torch.isfinite(cross).all()):
        raise RecoveryError("a layer sees NaN or infinite values in the calibration batches; look at these")
    before = before.double()
    # argmin |x D - missing|^2 + level |D - before|^2
    level = ridge * float(gram.diagonal().mean()) + 1e-12
    metric = gram + level * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    after = torch.linalg.solve(metric, cross + level * before)  # (features, outputs)
    if isinstance(update, LowRank):
        down, up = reduced(after, metric, update.rank)
        after = down @ up
        changes.set_values_(update.down, down.T.reshape(update.down.shape).to(update.down).contiguous())
        changes.set_values_(update.up, up.to(update.up))
    elif isinstance(update, Coded):
        after = _set_codes_(update, after.T, metric, changes).T
    else:
        weight: Any = layer.weight if update is None else update.residual
        changes.set_values_(weight, after.T.reshape(weight.shape).to(weight).contiguous())
    if shifts:
        changes.set_values_(layer.bias, moments.shift(after).to(layer.bias))
    # E |missing - x D|^2, expanded, so that the samples are not needed again
    errors = (float(power - 2 * (d * cross).sum() + (d * (gram @ d)).sum()) for d in (before, after))
    was, now = (max(error, 0.0) / max(moments.power, 1e-30) for error in errors)
    return was, now


def reduced(best: Tensor, metric: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The matrix of this rank that is nearest to ``best`` in a metric of its rows, as two factors of equal sizes.

    It is ``best`` projected on the directions of the output in which it does most, so the smaller side is decomposed.
    """
    rows, columns = best.shape  # (features, outputs)
    if columns <= rows:
        # the outputs' directions of largest power under the metric: (outputs, rank)
        directions = torch.linalg.eigh(best.T @ metric @ best)[1][:, -rank:]
    else:
        # the same from the other side, where that matrix is smaller
        root = torch.linalg.cholesky(metric)
        left = torch.linalg.eigh(root.T @ best @ best.T @ root)[1][:, -rank:]
        directions = torch.linalg.qr(best.T @ root @ left)[0]
    down, up = best @ directions, directions.T
    # factors of equal sizes learn equally fast
    sizes = (down.norm(dim=0) / up.norm(dim=1)).clamp(min=1e-12).sqrt()
    down, up = down / sizes, up * sizes[:, None]
    missing = rank - down.shape[1]  # more components than the matrix has directions
    return F.pad(down, (0, missing)), F.pad(up, (0, 0, 0, missing))


def _set_codes_(update: Coded, wanted: Tensor, metric: Tensor, changes: Changes) -> Tensor:
    """Let codes come as near to a matrix of (outputs, features) as they can; returns what they add."""
    step, scale = best_scales(wanted, update.levels, metric, by_row=update.by_row)
    for key, value in update.holding(wanted, step, scale).items():
        changes.set_values_(getattr(update, key), value)
    return scale[:, None] * codes_of(wanted, step[:, None], update.levels)


def matrix_of(layer: Any, update: Any) -> Tensor:
    """What an update adds, or what a layer's own weight is, as (features, outputs)."""
    if isinstance(update, LowRank):
        return update.down.detach().flatten(1).T @ update.up.detach()
    if isinstance(update, Coded):
        added: Tensor = update(torch.zeros_like(update.delta))
        return added.detach().flatten(1).T
    own: Tensor = layer.weight if update is None else update.residual
    return own.detach().flatten(1).T


def as_features(delta: Tensor, layer: Any, whole: bool) -> Tensor:
    """A delta of a layer's weight as (features, outputs): of all taps, or of the centre tap."""
    if not whole:
        for size in layer.weight.shape[2:]:
            delta = delta.select(2, size // 2)
    return delta.flatten(1).T
