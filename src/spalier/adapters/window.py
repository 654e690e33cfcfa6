"""Where a convolution's kernel sits: the arithmetic of stride, padding and dilation."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Window(NamedTuple):
    """A sliding kernel over zero-padded inputs, one entry per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def outputs(self, sizes: torch.Size) -> torch.Size:
        """The spatial shape of the output for inputs of these spatial sizes."""
        return torch.Size(
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(sizes, *self, strict=True)
        )

    def is_aligned(self) -> bool:
        """True where the centre tap of each output meets the input at the same position."""
        centred = (
            d * (k // 2) == p for k, p, d in zip(self.kernel, self.padding, self.dilation, strict=True)
        )
        odd = (k % 2 == 1 for k in self.kernel)
        return all(s == 1 for s in self.stride) and all(centred) and all(odd)

    def centre_tap(self, x: Tensor) -> Tensor:
        """The inputs that the centre tap meets, one per output position; zero where it meets padding."""
        if self.is_aligned():
            return x
        index, pads = self._centre(x.shape[2:])
        met = (F.pad(x, pads) if any(pads) else x)[index]
        if x.stride(1) == 1:  # what a stride leaves is copied later: keep the channels last
            return met.movedim(1, -1).contiguous().movedim(-1, 1)
        return met

    def centre_view(self, x: Tensor) -> Tensor | None:
        """The same as a view of x, to be written to; None where the centre tap meets padding."""
        index, pads = self._centre(x.shape[2:])
        return None if any(pads) else x[index]

    def _centre(self, sizes: torch.Size) -> tuple[tuple[slice, ...], list[int]]:
        """Where the centre tap meets inputs of these sizes, and the padding that it needs."""
        pads: list[int] = []
        index = [slice(None), slice(None)]
        for size, out, k, s, p, d in zip(sizes, self.outputs(sizes), *self, strict=True):
            first = (k // 2) * d - p
            last = first + (out - 1) * s
            before, after = max(0, -first), max(0, last - size + 1)
            pads = [before, after, *pads]  # F.pad counts axes from the last
            index.append(slice(first + before, last + before + 1, s))
        return tuple(index), pads

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution itself, in one group."""
        out: Tensor = torch.ops.aten.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, self._zeros(), 1
        )
        return out

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, of: Literal["input", "weight"]) -> Tensor:
        """The gradient of the input or of the weight, and of nothing else."""
        mask = [of == "input", of == "weight", False]
        geometry = (self.stride, self.padding, self.dilation, False, self._zeros(), 1)
        grads = torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, mask)
        chosen: Tensor = grads[mask.index(True)]
        return chosen

    def _zeros(self) -> list[int]:
        return [0] * len(self.kernel)
