"""Attach an adapter to a network in place, and take it off again: plan everything, then change it at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from spalier.adapters.attachment import (
    Attachment,
    Updated,
    attachment_of,
    copies_of,
    is_marked,
)
from spalier.adapters.config import Adapter, Fit
from spalier.adapters.finetune import FineTune
from spalier.adapters.forward import adapted_reads, adapter_name
from spalier.adapters.layers import Geometry, described, is_finite, is_norm, is_uninitialised
from spalier.adapters.readers import read_layers
from spalier.adapters.selection import Names, Targets, select_adaptable, select_named
from spalier.adapters.summary import Row, Summary
from spalier.adapters.ties import check_ties
from spalier.adapters.updates import Update
from spalier.errors import (
    AttachmentError,
    ConfigError,
    NonFiniteError,
    RankError,
    TargetError,
    UnsupportedLayerError,
)

Weights = dict[str, tuple[Geometry, Fit]]


def attach_(
    net: nn.Module,
    adapter: Adapter | FineTune,
    *,
    targets: Targets = None,
    head: str | Sequence[str] | None = None,
    norms: bool = True,
) -> Summary:
    """What `spalier.attach_` does, but for an example: plan everything, then change it at once."""
    with torch.inference_mode(False):  # what learns has to be an ordinary tensor
        return _attach_(net, adapter, targets, head, norms)


def _attach_(
    net: nn.Module,
    adapter: Adapter | FineTune,
    targets: Targets,
    head: str | Sequence[str] | None,
    norms: bool,
) -> Summary:
    _check_arguments(net, adapter, targets, norms)
    names = Names(net)
    plan = _plan(names, adapter, targets, head, norms)
    updated = _build(names, plan, adapter)
    replaced = copies_of(list(names.of), set(plan.learned))
    attachment = Attachment(
        net,
        adapter,
        _summarise(names, plan),
        updated,
        replaced,
        modules=described(net),
        heads=tuple(names.of[m][0] for m, kind in plan.learned.items() if kind == "head"),
    )
    attachment.apply_()
    _reach_readers_(names, attachment)
    return attachment.summary


def detach_(net: nn.Module) -> None:
    """Take the adapter off and give the original network back, in place: the same tensors, bit for bit.

    What was learned is dropped; `fuse` first to keep it.

    >>> from spalier import SPLoRA
    >>> net = nn.Sequential(nn.Linear(4, 4))
    >>> before = net[0].weight
    >>> _ = attach_(net, SPLoRA(rank=1))
    >>> detach_(net)
    >>> net[0].weight is before, list(net.state_dict())
    (True, ['0.weight', '0.bias'])
    """
    attachment = attachment_of(net)
    attachment.check_present(whole=True)
    attachment.pruned.undo_()
    originals = [entry.moved_original() for entry in attachment.replaced]
    attachment.remove_()
    attachment.restore_(originals)
    attachment.reset_flags_()


@dataclass(frozen=True)
class _Plan:
    adapted: dict[nn.Module, Weights]
    learned: dict[nn.Module, str]
    """Modules whose own parameters learn as they are, and as what: norm, head or weights."""
    unpaid: set[nn.Module]
    """Layers that a cap left without a rank."""


def _plan(
    names: Names,
    adapter: Adapter | FineTune,
    targets: Targets,
    head: str | Sequence[str] | None,
    norms: bool,
) -> _Plan:
    learned = {m: "norm" for m in names.of if norms and is_norm(m)}
    chosen_head = select_named(names, "head", head)
    if chosen_head and not any(True for m in chosen_head for _ in m.parameters()):
        raise TargetError(f"the head {head!r} has no parameters that could learn")
    learned |= {m: "head" for m in names.of if m in chosen_head}
    if isinstance(adapter, FineTune):
        plan = _Plan({}, _fine_tuned(names, targets) | learned, set())
    else:
        chosen = select_adaptable(names, targets, excluded=set(learned))
        plan = _fit(names, adapter, chosen, learned)
    _check_finite(names, plan)
    _check_calls(names, plan.adapted)
    check_ties(names, {m: set(w) for m, w in plan.adapted.items()}, set(plan.learned))
    return plan


def _fine_tuned(names: Names, targets: Targets) -> dict[nn.Module, str]:
    owners = [m for m in names.of if any(True for _ in m.parameters(recurse=False))]
    if callable(targets) and not isinstance(targets, str):
        owners = [m for m in owners if targets(names.of[m][0], m)]
    elif targets is not None:
        chosen = select_named(names, "targets", targets)
        owners = [m for m in owners if m in chosen]
    if not owners:
        raise TargetError("nothing to fine-tune: no selected module has parameters of its own")
    return dict.fromkeys(owners, "weights")


def _fit(
    names: Names,
    adapter: Adapter,
    chosen: dict[nn.Module, dict[str, Geometry]],
    learned: dict[nn.Module, str],
) -> _Plan:
    adapted: dict[nn.Module, Weights] = {}
    unpaid = set()
    for layer, weights in chosen.items():
        _check_free(names.first(layer), layer, weights)
        try:
            fits = {name: (geometry, adapter.fit(geometry)) for name, geometry in weights.items()}
        except RankError as error:
            raise RankError(f"{names.first(layer)} ({type(layer).__name__}): {error}") from None
        paid = {name: entry for name, entry in fits.items() if entry[1].learned}
        if paid:
            adapted[layer] = paid
        else:
            unpaid.add(layer)
    if not adapted:
        why = (
            "no rank pays for any layer"
            if unpaid
            else "it has no layer that can be adapted outside of the head"
        )
        raise TargetError(f"nothing to adapt in this network: {why}")
    return _Plan(adapted, learned, unpaid)


def _check_free(name: str, layer: nn.Module, weights: Iterable[str]) -> None:
    taken = [adapter_name(weight) for weight in weights if hasattr(layer, adapter_name(weight))]
    if taken:
        raise AttachmentError(f"{name} has an attribute {taken[0]} of its own, where its adapter would sit")


def _build(names: Names, plan: _Plan, adapter: Adapter | FineTune) -> list[Updated]:
    if isinstance(adapter, FineTune):
        return []
    built: dict[int, Update] = {}  # tied weights share one update
    updated = []
    for layer, weights in plan.adapted.items():
        for name, (geometry, fit) in weights.items():
            weight = layer.get_parameter(name)
            if id(weight) not in built:
                built[id(weight)] = adapter.build(geometry, fit, weight)
            updated.append(Updated(names.first(layer), layer, name, built[id(weight)]))
    return updated


def _reach_readers_(names: Names, attachment: Attachment) -> None:
    """Let modules that read weights without calling layers see the adapters too."""
    adapted = {entry.layer for entry in attachment.updated}
    for module in names.of:
        is_encoder = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder)
        if is_encoder and adapted.intersection(module.modules()):  # close the inference fast paths
            attachment.override_(module, "activation_relu_or_gelu", 0)
            attachment.override_(module, "use_nested_tensor", False)
        if module not in adapted and not _is_encoder_layer(module) and adapted_reads(module):
            attachment.divert_(module)


def _is_encoder_layer(module: nn.Module) -> bool:
    """PyTorch's own, which reads weights on its fast path alone."""
    kind = nn.TransformerEncoderLayer
    return isinstance(module, kind) and type(module).forward is kind.forward


def _check_calls(names: Names, adapted: Iterable[nn.Module]) -> None:
    """Refuse layers whose calls could not be made to see an adapter."""
    for module in names.of:
        reads = {} if _is_encoder_layer(module) else read_layers(module)
        read = {path: layer for path, layer in reads.items() if layer in adapted}
        if (module in adapted or read) and "forward" in module.__dict__:
            raise UnsupportedLayerError(
                f"{names.first(module)} ({type(module).__name__}) has a forward of its own on the instance, set by "
                "another library perhaps, which an adapter would displace; leave it out with targets="
            )
        for path, layer in read.items():
            if "." in path:
                raise UnsupportedLayerError(
                    f"{names.first(layer)} is read by {names.first(module)} ({type(module).__name__}) from afar, as "
                    f"self.{path}.weight, past any adapter; leave it out with targets="
                )


def _summarise(names: Names, plan: _Plan) -> Summary:
    rows = []
    counted: set[int] = set()
    for module in names.of:
        own = {key: p for key, p in module.named_parameters(recurse=False) if id(p) not in counted}
        counted.update(map(id, own.values()))
        if own or module in plan.adapted:
            rows.append(_row(names.first(module), module, own, plan))
    total, learned = sum(r.parameters for r in rows), sum(r.learned for r in rows)
    return Summary(tuple(rows), total, learned)


def _row(name: str, module: nn.Module, own: dict[str, nn.Parameter], plan: _Plan) -> Row:
    """``own`` are the parameters that no row before has counted: a tied weight and its adapter count once."""
    kind, parameters = type(module).__name__, sum(p.numel() for p in own.values())
    if module in plan.learned:
        return Row(name, kind, parameters, None, parameters, plan.learned[module])
    if module not in plan.adapted:
        reason = "frozen (no rank pays)" if module in plan.unpaid else "frozen"
        return Row(name, kind, parameters, None, 0, reason)
    fits = [entry for key, entry in plan.adapted[module].items() if key in own]
    if not fits:
        return Row(name, kind, parameters, None, 0, "adapter (tied)")
    adapted = sum(geometry.numel for geometry, _ in fits)
    return Row(
        name, kind, parameters, fits[0][1].rank, sum(fit.learned for _, fit in fits), "adapter", adapted
    )


def _check_arguments(net: object, adapter: object, targets: object, norms: object) -> None:
    if not isinstance(net, nn.Module):
        raise ConfigError(f"net is a {type(net).__name__}, expected a torch.nn.Module")
    if isinstance(adapter, type) or not (
        isinstance(adapter, FineTune) or (hasattr(adapter, "fit") and hasattr(adapter, "build"))
    ):
        raise ConfigError(f"adapter is {adapter!r}, expected one such as SPLoRA(rank=8)")
    if not isinstance(norms, bool):
        raise ConfigError(f"norms is {norms!r}, expected True or False")
    if isinstance(targets, type):
        raise ConfigError(
            f"targets is the class {targets.__name__}; write lambda name, module: isinstance(module, ...)"
        )
    if any(is_marked(module) for module in net.modules()):
        raise AttachmentError(
            "the network, or one that it shares modules with, is adapted already; call detach_ on that first"
        )
    if is_uninitialised(net):
        raise UnsupportedLayerError(
            "the network has a lazy layer without a shape yet; run one batch through it first"
        )


def _check_finite(names: Names, plan: _Plan) -> None:
    for module in (*plan.adapted, *plan.learned):
        for key, parameter in module.named_parameters(recurse=False):
            if not is_finite(parameter):
                raise NonFiniteError(
                    f"{names.first(module)}.{key} holds NaN or infinite values before any training; "
                    "load sound weights first"
                )
