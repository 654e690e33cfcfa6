"""A criterion of second order: what the loss's curvature adds, by Hessian-vector products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spalier.criteria.batches import Batch, batches_of, loss_of
from spalier.criteria.criterion import Criterion
from spalier.criteria.probe import Probe, Totals, Values
from spalier.criteria.watching import Watch, sample_axis, seeing
from spalier.errors import ScoreError
from spalier.structure.capture import in_eval_mode


@dataclass(frozen=True)
class SecondOrder(Criterion):
    """``|g| + |H 1| / 2`` for each sample, where gates of value 1 multiply every unit of the network.

    g is the loss's gradient in the gates, H its Hessian, and H 1 one Hessian-vector product: how each unit's loss
    changes with all others, as in SOSP.
    """

    def measure(self, probe: Probe, batches: Any, loss: Any) -> Values:
        """A score for every unit that is left, by stream and layer."""
        twin = probe.twin()
        watches = [probe.watch(site) for site in probe.sites()]
        totals, samples = Totals(watches), [0]
        with in_eval_mode(twin), _gated(twin, watches, samples) as gates, sdpa_kernel(SDPBackend.MATH):
            for batch in batches_of(batches, probe.net, self.name):
                with torch.inference_mode(False), torch.enable_grad():
                    totals.add(_one(twin, batch, loss, gates, samples), batch)
        probe.samples = totals.samples
        return totals.means()

    @property
    def name(self) -> str:
        """What tables call it."""
        return "second_order"


Gates = list[list[Tensor]]
"""For each site, the gates of each call, (samples, units)."""


def _one(twin: nn.Module, batch: Batch, loss: Any, gates: Gates, samples: list[int]) -> list[Tensor | None]:
    samples[:] = [batch.size]
    for each in gates:
        each.clear()
    value = loss_of(loss, batch.run(twin), batch, twin) * batch.size  # the sum of the samples' own losses
    flat = [gate for each in gates for gate in each]
    try:
        first = torch.autograd.grad(value, flat, create_graph=True, materialize_grads=True)
        total = torch.stack([gradient.sum() for gradient in first]).sum()
        second = torch.autograd.grad(total, flat, materialize_grads=True)
    except RuntimeError as error:
        raise ScoreError(
            f"second_order needs the gradient of a gradient, and some operation of this network has none: {error}; "
            "use criterion 'taylor'"
        ) from error
    done = iter(zip(first, second, strict=True))
    return [_sensitivity([next(done) for _ in each]) for each in gates]


def _sensitivity(calls: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    if not calls:
        return None
    first, second = (torch.stack([c[i].detach() for c in calls]).sum(0) for i in (0, 1))
    return first.abs() + second.abs() / 2


@contextmanager
def _gated(net: nn.Module, watches: list[Watch], samples: list[int]) -> Iterator[Gates]:
    """Multiply every unit by a gate of its own for each sample."""
    gates: Gates = [[] for _ in watches]
    places = [
        (watch.site.module, watch.site.side, _Gate(watch, made, samples).applied)
        for watch, made in zip(watches, gates, strict=True)
    ]
    with seeing(net, places):
        yield gates


@dataclass(frozen=True)
class _Gate:
    watch: Watch
    gates: list[Tensor]
    samples: list[int]
    """How many samples the current batch has."""

    def applied(self, value: Tensor) -> Tensor:
        """Every unit of every sample times a gate of its own."""
        axis = self.watch.site.axis % value.dim()
        first = sample_axis(tuple(value.shape), axis, self.samples[0])
        samples = 1 if first is None else self.samples[0]
        gate = torch.ones(samples, self.watch.units, dtype=value.dtype, device=value.device).requires_grad_()
        self.gates.append(gate)
        padded = torch.cat([gate, torch.ones_like(gate[:, :1])], 1)[:, self.watch.where.to(value.device)]
        if first is None:
            return value * padded.view([-1 if a == axis else 1 for a in range(value.dim())])
        windows = value.shape[first] // samples  # those of one sample share its gates
        padded = padded.repeat_interleave(windows, 0)
        shape = [n if a in (first, axis) else 1 for a, n in enumerate(value.shape)]
        return value * (padded if first < axis else padded.T).reshape(shape)
