"""What layers see, and what the loss feels of them: the metric in which deltas are approximated.

One pass over calibration batches. The loss is that of labels which are drawn from the network's own predictions, so no
targets are needed: the mean square of its gradient is the Fisher information of each output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from spalier.adapters.geometry import geometries
from spalier.errors import RecoveryError
from spalier.networks import logits_of
from spalier.pruning.regression import Moments, features
from spalier.refitting.approximate import Metric
from spalier.structure.graph import in_eval_mode
from spalier.text import first_line

_ROWS = 65536
"""How many positions the moments of a layer look at, at most; they are taken evenly."""
_PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@torch.no_grad()
def check_runs(net: nn.Module, inputs: Any) -> None:
    """Refuse calibration batches that the network does not run on, or returns no finite numbers for."""
    args, kwargs = inputs
    with in_eval_mode(net):
        try:
            found = logits_of(net(*args, **kwargs))
        except Exception as error:  # whatever the network's own code raises
            raise RecoveryError(f"the network does not run on the calibration batches: {first_line(error)}") from error
    if not torch.isfinite(found).all():
        raise RecoveryError("the network returns NaN or infinite values on the calibration batches; look at these")


def metrics_of(net: nn.Module, layers: Mapping[str, bool], inputs: Any) -> dict[str, Metric]:
    """The metric of each layer by its path; ``layers`` says of which a norm takes the mean away."""
    args, kwargs = inputs
    watched = {path: _Watched(net.get_submodule(path), centred) for path, centred in layers.items()}
    flags = [(p, p.requires_grad) for p in net.parameters()]
    with ExitStack() as stack:
        stack.enter_context(in_eval_mode(net))
        stack.enter_context(torch.enable_grad())
        for each in watched.values():
            stack.callback(each.layer.register_forward_hook(each.look, with_kwargs=True).remove)
        for parameter, flag in flags:  # gradients reach every layer's output
            stack.callback(parameter.requires_grad_, flag)
            parameter.requires_grad_(parameter.is_floating_point())
        _run(net, args, kwargs, list(watched.values()))
    return {path: each.metric() for path, each in watched.items()}


def _run(net: nn.Module, args: Any, kwargs: Any, watched: Sequence[_Watched]) -> None:
    logits = logits_of(net(*args, **kwargs)).float()
    logits = logits.reshape(-1, logits.shape[-1])
    generator = torch.Generator().manual_seed(0)
    chances = logits.detach().softmax(1).cpu()
    drawn = torch.multinomial(chances, 1, generator=generator)[:, 0].to(logits.device)
    loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
    edges = [edge for each in watched for edge, _ in each.edges]
    grads = iter(torch.autograd.grad(loss, edges, allow_unused=True))  # None where the loss does not depend on it
    for each in watched:
        for _, axis in each.edges:
            each.felt.append(_per_sample(next(grads), axis, each.layer))


class _Watched:
    """A layer, and what was seen of it."""

    def __init__(self, layer: Any, centred: bool) -> None:
        self.layer = layer
        own = next((kind for kind in _PLAIN if isinstance(layer, kind)), None)
        self._is_plain = own is not None and getattr(layer, "groups", 1) == 1
        self._moments = Moments(centred=centred)
        self._power: list[Tensor] = []
        self.felt: list[Tensor] = []
        self.edges: list[tuple[Any, int]] = []
        """Where gradients of what it returned can be had, as it was before anybody changed it in place."""

    def look(self, layer: Any, given: Any, named: Any, output: Any) -> None:
        """Note what a call takes, and what the loss feels of what it returns."""
        x = given[0] if given else next(iter(named.values()))
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return
        with torch.no_grad():
            if self._is_plain and x.is_floating_point():
                for seen, _ in features(layer, x.detach(), output.detach(), True, _ROWS):
                    self._moments.add(seen, seen[:, :1])
            elif x.is_floating_point():
                self._power.append(x.detach().float().square().mean())
            elif isinstance(layer, nn.Embedding):  # each of its rows is read as often as any other
                self._power.append(torch.tensor(1 / layer.num_embeddings))
        if output.requires_grad:
            axis = 1 if isinstance(layer, nn.modules.conv._ConvNd) and output.dim() > 2 else -1
            self.edges.append((torch.autograd.graph.get_gradient_edge(output), axis))

    def metric(self) -> Metric:
        """Of what was seen; the same in all directions where nothing was."""
        outputs = torch.stack(self.felt).mean(0) if self.felt else None
        if self._moments.count:
            return Metric(self._moments.means()[0].float(), outputs)
        power = float(torch.stack(self._power).mean()) if self._power else 1.0
        return Metric(None, outputs, power)


def _per_sample(grad: Tensor | None, axis: int, layer: Any) -> Tensor:
    """The squares of a gradient, summed over positions, as a mean over samples: (outputs,)."""
    if grad is None:
        return torch.zeros(sum(geometry.outputs for geometry in geometries(layer).values()), device=layer.weight.device)
    return grad.float().movedim(axis, -1).reshape(-1, grad.shape[axis]).square().sum(0) / len(grad)
