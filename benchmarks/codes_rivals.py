"""The rivals of the codes benchmark: weights in few bits without the base, and NNCodec's bitstreams of deltas.

NNCodec asks for a numpy older than torch's but works with ours: ``pip install --no-deps nncodec``.
"""

from __future__ import annotations

import sys
import types
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# weights without the base


class Rounding:
    """Weights outside of the head in 2^bits - 1 symmetric levels, a scale for each output: the best of eight."""

    def __init__(self, net: nn.Module, bits: int, head: str, every: int = 8) -> None:
        self.net, self.top, self.bits, self.every, self.step = net, 2 ** (bits - 1) - 1, bits, every, 0
        self.weights = list(matrices_of(net, head).values())
        self.kept: list[Tensor] = []
        self.scales: list[Tensor] = []

    @torch.no_grad()
    def round_(self, fresh: bool = False) -> None:
        """Scales are looked for every few steps."""
        if fresh or self.step % self.every == 0:
            self.scales = [self._best(weight.flatten(1)) for weight in self.weights]
        self.kept = [weight.clone() for weight in self.weights]
        for weight, scale in zip(self.weights, self.scales, strict=True):
            weight.copy_((self.codes(weight.flatten(1), scale) * scale).view_as(weight))
        self.step += 1

    @torch.no_grad()
    def restore_(self) -> None:
        for weight, kept in zip(self.weights, self.kept, strict=True):
            weight.copy_(kept)

    def codes(self, rows: Tensor, scale: Tensor) -> Tensor:
        return (rows / scale).round().clamp(-self.top, self.top)

    def _best(self, rows: Tensor) -> Tensor:
        most = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / self.top
        tried = torch.stack([most * share for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)])
        errors = torch.stack([(self.codes(rows, s) * s - rows).square().sum(1) for s in tried])
        return tried[errors.argmin(0), torch.arange(len(rows))]

    def bytes(self) -> int:
        """Packed codes, deflated where that is smaller, and scales in 16 bits."""
        total = 0
        for weight, scale in zip(self.kept, self.scales, strict=True):
            codes = self.codes(weight.flatten(1), scale).flatten().to(torch.int64).numpy() + self.top
            bits = (codes[:, None] >> np.arange(self.bits)) & 1
            packed = np.packbits(bits.astype(np.uint8)).tobytes()
            total += min(len(packed), len(zlib.compress(packed, 9))) + 2 * len(scale)
        return total


def matrices_of(net: nn.Module, head: str) -> dict[str, nn.Parameter]:
    """The weights of convolutions and linear layers outside of the head."""
    layers = {n: m for n, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and not n.startswith(head)}
    return {name: layer.get_parameter("weight") for name, layer in layers.items()}


# NNCodec


class TooFewBytes(Exception):
    """What has to be stored beside the bitstream is more than there is room for."""


def nncodec() -> Any:
    """Its coder; what it has for frameworks and data sets asks for libraries that are not needed here."""
    stub: Any = types.ModuleType("nncodec.framework")
    stub.tensorflow_model = stub.pytorch_model = stub.use_case_init = None
    sys.modules.setdefault("nncodec.framework", stub)
    from nncodec import nnc  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return nnc


def coded(deltas: dict[str, Any], limit: int) -> tuple[int, dict[str, Any], int]:
    """The finest step whose bitstream is within the limit: its bytes, what is decoded, the step's parameter."""
    nnc = nncodec()
    best: tuple[int, dict[str, Any], int] | None = None
    low, high = -160, 0  # in sixteenths of an octave
    while low < high:
        qp = (low + high) // 2
        options = {"qp": qp, "qp_density": 4, "use_dq": True, "row_skipping": True, "param_opt": True}
        stream = nnc.compress(deltas, bitstream_path=None, return_bitstream=True, **options)
        if len(stream) <= limit:
            best, high = (len(stream), nnc.decompress(stream), qp), qp
        else:
            low = qp + 1
    if best is None:
        raise TooFewBytes(f"no step gives {limit:,} bytes")
    return best
