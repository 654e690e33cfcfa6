"""Attach an adapter to a network in place, take it off again, or fuse it into the weights.

`attach_` plans everything first and then only assigns, so a call that is refused has changed nothing. The plan says
which layers are adapted, and which modules learn as they are.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from spalier.adapters.attachment import MARK, Attachment, Row, Summary, Updated, attachment_of, copies_of, is_marked
from spalier.adapters.forward import adapted_reads, adapter_name, is_strided_pointwise, read_layers
from spalier.adapters.geometry import Geometry, described, is_finite, is_norm, is_uninitialised, plain_tensors
from spalier.adapters.kinds import Adapter, ByLayer, FineTune, Fit, Update
from spalier.adapters.targets import AdapterOf, Names, Targets, adapters_of, check_ties, select_adaptable, select_named
from spalier.errors import AttachmentError, ConfigError, NonFiniteError, RankError, TargetError, UnsupportedLayerError

Weights = dict[str, tuple[Geometry, Fit]]
Head = str | Sequence[str] | None
AnyAdapter = Adapter | ByLayer | FineTune


def attach_(
    net: nn.Module,
    adapter: Adapter | ByLayer | FineTune,
    *,
    example: Any = None,
    targets: Targets = None,
    head: str | Sequence[str] | None = None,
    norms: bool = True,
) -> Summary:
    """Freeze ``net`` and put an adapter on its layers, in place.

    Module names, classes and the keys of the base weights stay. The adapters, the norms and the head learn,
    nothing else; the returned summary prints what learns. The base tensors are neither copied nor changed,
    however long the network trains: norms and head learn in copies, and `detach_` gives the very network back.
    Make the optimizer after this call, from the parameters that require gradients.

    Args:
        net: any network; a layer of an unsupported kind stays frozen and is listed in the summary.
        adapter: `SPLoRA`, `SPDelta`, `SPPaRA`, `LoRA`, `FineTune`, or a `ByLayer` of them.
        example: an input for it, as for `trace`. The network then remembers its structure, and `score` and `select`
            need nothing but the network.
        targets: what to adapt; by default all that can be. A name or glob pattern of module names, or several,
            each meaning all inside of it too; or a predicate of name and module.
        head: the classifier, learned in full instead of adapted; a name or pattern like ``targets``, or "auto" to
            look for it as runs do. Without one, a layer that looks like a classifier is adapted, and that is logged.
        norms: whether normalisation layers learn (their running statistics are the task's own).

    >>> from spalier import SPLoRA
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    >>> print(attach_(net, SPLoRA(rank=2), head="3"))
    layer  kind         parameters  rank  learned  learns
    0      Conv2d              224     2       22  adapter
    1      BatchNorm2d          16     -       16  norm
    3      Linear               18     -       18  head
    learned: 56 of 258 parameters (21.7%)
    """
    _check_unwrapped(net)
    head = _head(net, head)
    structure = None
    if example is not None and isinstance(net, nn.Module):
        from spalier.tracing import trace  # only pruning needs it, and it stands above this package

        structure = trace(net, example)
    with torch.inference_mode(False):  # what learns has to be an ordinary tensor
        summary = attach_with_(net, adapter, targets, head, norms)
    attachment_of(net).structure = structure
    # tasks stand above this package, too; by name, as mypy mixes up modules and functions in so large a circle
    extract = import_module("spalier.tasks.extract")
    try:
        extract.check_savable(net, structure)  # now, and not after hours of training
    except BaseException:
        detach_(net)
        raise
    return summary


def _head(net: nn.Module, head: Head) -> Head:
    """The head as it was given, or where "auto" was, the classifier that is found; a hint where nothing was given."""
    if head not in (None, "auto") or not isinstance(net, nn.Module) or is_marked(net):
        return head
    networks = import_module("spalier.networks")  # it stands above this package
    if head == "auto":
        found: str = networks.head_of(net)
        return found
    if name := networks.known_head(net):
        hint = "%s looks like the classifier, and gets an adapter like any other layer; pass head=%r to learn it whole"
        logging.getLogger("spalier").info(hint, name, name)
    return None


def attach_with_(
    net: nn.Module, adapter: AnyAdapter, targets: Targets, head: Head, norms: bool, also: Collection[str] = ()
) -> Summary:
    """What `attach_` does, with single parameters that learn in full besides: biases of adapted layers, say."""
    _check_arguments(net, adapter, targets, norms)
    names = Names(net)
    plan = _plan(names, adapter, targets, head, norms, also)
    updated = _build(names, plan)
    replaced = copies_of(list(names.of), set(plan.learned), plan.also)
    summary, modules = _summarise(names, plan), described(net)
    heads = tuple(names.of[m][0] for m, kind in plan.learned.items() if kind == "head")
    attachment = Attachment(net, adapter, summary, updated, replaced, modules=modules, heads=heads)
    attachment.apply_()
    _reach_readers_(names, attachment)
    for module in plan.learned:  # adapted layers are diverted already
        if is_strided_pointwise(module) and "forward" not in module.__dict__:
            attachment.divert_(module)
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
    adapter_of: AdapterOf = lambda layer, weight: None
    """The adapter of each weight; None leaves it frozen."""
    also: dict[nn.Module, set[str]] = field(default_factory=dict)
    """Single parameters that learn as they are, in modules that do not."""
    refused: dict[nn.Module, str] = field(default_factory=dict)
    """Layers of a kind that can be adapted, which themselves cannot be, and why."""


def _plan(names: Names, adapter: AnyAdapter, targets: Targets, head: Head, norms: bool, also: Collection[str]) -> _Plan:
    learned = {m: "norm" for m in names.of if norms and is_norm(m)}
    chosen_head = select_named(names, "head", head)
    if chosen_head and not any(True for m in chosen_head for _ in m.parameters()):
        raise TargetError(f"the head {head!r} has no parameters that could learn")
    learned |= {m: "head" for m in names.of if m in chosen_head}
    if isinstance(adapter, FineTune):
        plan = _Plan({}, _fine_tuned(names, targets) | learned, set())
    elif isinstance(adapter, ByLayer) and not adapter.adapters:  # a budget may be spent on norms and head alone
        plan = _Plan({}, learned, set())
    else:
        chosen, refused = select_adaptable(names, targets, excluded=set(learned))
        plan = replace(_fit(names, adapter, chosen), learned=learned, refused=refused)
    plan.also.update(_named_parameters(names, also, plan.learned))
    _check_finite(names, plan)
    _check_calls(names, plan.adapted)
    check_ties(names, {m: set(w) for m, w in plan.adapted.items()}, set(plan.learned), plan.also)
    return plan


def _named_parameters(
    names: Names, wanted: Collection[str], learned: Collection[nn.Module]
) -> dict[nn.Module, set[str]]:
    """The modules, of those that do not learn as a whole, that hold these parameters under any of their names."""
    found: dict[nn.Module, set[str]] = {}
    for module, paths in names.of.items():
        for key, parameter in module._parameters.items() if wanted and module not in learned else ():
            if parameter is not None and any((f"{p}.{key}" if p else key) in wanted for p in paths):
                found.setdefault(module, set()).add(key)
    return found


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


def _fit(names: Names, adapter: Adapter | ByLayer, chosen: dict[nn.Module, dict[str, Geometry]]) -> _Plan:
    adapted: dict[nn.Module, Weights] = {}
    unpaid = set()
    adapter_of = adapters_of(names, adapter, chosen)
    for layer, weights in chosen.items():
        taken = [adapter_name(weight) for weight in weights if hasattr(layer, adapter_name(weight))]
        if taken:
            where = f"{names.first(layer)} has an attribute {taken[0]} of its own"
            raise AttachmentError(f"{where}, where its adapter would sit")
        try:
            fits = {
                name: (geometry, each.fit(geometry))
                for name, geometry in weights.items()
                if (each := adapter_of(layer, name)) is not None
            }
        except RankError as error:
            raise RankError(f"{names.first(layer)} ({type(layer).__name__}): {error}") from None
        paid = {name: entry for name, entry in fits.items() if entry[1].learned}
        if paid:
            adapted[layer] = paid
        else:
            unpaid.add(layer)
    if not adapted:
        why = "no rank pays for any layer" if unpaid else "it has no layer that can be adapted outside of the head"
        raise TargetError(f"nothing to adapt in this network: {why}")
    return _Plan(adapted, {}, unpaid, adapter_of)


def _build(names: Names, plan: _Plan) -> list[Updated]:
    built: dict[int, Update] = {}  # tied weights share one update
    updated = []
    for layer, weights in plan.adapted.items():
        for name, (geometry, fit) in weights.items():
            weight = layer.get_parameter(name)
            if id(weight) not in built:
                each = plan.adapter_of(layer, name)
                assert each is not None
                built[id(weight)] = each.build(geometry, fit, weight)
            updated.append(Updated(names.first(layer), layer, name, built[id(weight)]))
    return updated


def _reach_readers_(names: Names, attachment: Attachment) -> None:
    """Let modules that read weights without calling layers see the adapters too."""
    adapted = {entry.layer for entry in attachment.updated}
    for module in names.of:
        is_encoder = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder)
        if is_encoder and adapted.intersection(module.modules()):
            attachment.close_fast_path_(module)
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
    also = sum(own[key].numel() for key in plan.also.get(module, ()) if key in own)
    if module not in plan.adapted:
        why = "no rank pays" if module in plan.unpaid else plan.refused.get(module)
        reason = f"frozen ({why})" if why else "frozen"
        return Row(name, kind, parameters, None, also, "weights" if also else reason)
    fits = [entry for key, entry in plan.adapted[module].items() if key in own]
    if not fits:
        return Row(name, kind, parameters, None, also, "adapter (tied)")
    adapted = sum(geometry.numel for geometry, _ in fits)
    learned = also + sum(fit.learned for _, fit in fits)
    return Row(name, kind, parameters, fits[0][1].rank, learned, "adapter", adapted + also)


def _check_unwrapped(net: object) -> None:
    """Refuse what wraps the network: its tensors have other names there, under which no base could take a task."""
    is_parallel = isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel)
    key = "module" if is_parallel else "_orig_mod"  # which torch.compile gives
    if isinstance(net, nn.Module) and list(net._modules) == [key]:
        inner = type(net._modules[key]).__name__
        raise AttachmentError(
            f"this {type(net).__name__} wraps the network (a {inner}), and what it learns would be saved under names "
            f"that no base has; call attach_ on the network itself (net.{key}), and wrap that afterwards"
        )


def _check_arguments(net: object, adapter: object, targets: object, norms: object) -> None:
    if not isinstance(net, nn.Module):
        raise ConfigError(f"net is a {type(net).__name__}, expected a torch.nn.Module")
    if isinstance(adapter, type) or not (
        isinstance(adapter, FineTune | ByLayer) or (hasattr(adapter, "fit") and hasattr(adapter, "build"))
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
        raise UnsupportedLayerError("the network has a lazy layer without a shape yet; run one batch through it first")


def _check_finite(names: Names, plan: _Plan) -> None:
    for module in (*plan.adapted, *plan.learned):
        for key, parameter in module.named_parameters(recurse=False):
            if not is_finite(parameter):
                raise NonFiniteError(
                    f"{names.first(module)}.{key} holds NaN or infinite values before any training; "
                    "load sound weights first"
                )


@torch.no_grad()
def fuse(net: nn.Module) -> nn.Module:
    """A new, plain network that computes what the adapted ``net`` computes; ``net`` is not changed.

    Shapes, classes and keys are the original network's. The result shares no tensor with the base.

    >>> from spalier import SPLoRA, attach_
    >>> net = nn.Sequential(nn.Linear(4, 4)).double()
    >>> _ = attach_(net, SPLoRA(rank=1))
    >>> x = torch.randn(2, 4, dtype=torch.float64)
    >>> plain = fuse(net)
    >>> torch.allclose(plain(x), net(x)), plain
    (True, Sequential(
      (0): Linear(in_features=4, out_features=4, bias=True)
    ))
    """
    attachment = attachment_of(net)
    attachment.check_present(whole=False)
    check_finite(net)
    memo: dict[int, object] = plain_tensors(net)  # what deepcopy takes instead of copying
    for entry in attachment.updated:
        weight = entry.layer._parameters.get(entry.weight)
        if weight is None:
            raise AttachmentError(
                f"{entry.name}.{entry.weight} is no longer a parameter (pruned or parametrized since attach_?); "
                "undo that first"
            )
        if id(weight) not in memo:
            memo[id(weight)] = nn.Parameter(_fused(entry, weight), requires_grad=False)
        memo[id(entry.update)] = entry.update
    for replaced in attachment.replaced:
        memo[id(replaced.original)] = replaced.original
    memo |= {id(tensor): tensor for tensor in attachment.pruned.tensors()}
    plain = copy.deepcopy(net, memo)
    twin: Attachment = plain.__dict__[MARK]
    _check_arrived(net, plain, attachment, memo)
    twin.remove_()
    twin.reset_flags_()
    attachment.pruned.refuse_saving_(plain)
    return plain


def _check_arrived(net: nn.Module, plain: nn.Module, attachment: Attachment, memo: dict[int, object]) -> None:
    """Whether modules that say themselves how they are copied have taken the fused weights."""
    paths = {module: path for path, module in net.named_modules()}
    for entry in attachment.updated:
        wanted = memo[id(entry.layer._parameters[entry.weight])]
        if plain.get_submodule(paths[entry.layer])._parameters.get(entry.weight) is not wanted:
            raise AttachmentError(
                f"{entry.name} lies in a module that copies itself in its own way, and would lose its adapter"
            )


def _fused(entry: Updated, weight: Tensor) -> Tensor:
    update = entry.update
    if weight.dtype.itemsize < 4:  # half precision is the storage's, not the sum's
        fused: Tensor = copy.deepcopy(update).float()(weight.float()).to(weight.dtype)
    else:
        fused = update(weight)
    if not is_finite(fused):
        raise NonFiniteError(
            f"fusing {entry.name}.{entry.weight} gives NaN or values beyond {weight.dtype}; "
            "the adapter has diverged: go back to an earlier state, or fuse in a wider dtype with net.float()"
        )
    return fused


def check_finite(net: nn.Module) -> None:
    """Refuse a network whose training has diverged; masks that are infinite on purpose are no matter."""
    learned = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    statistics = [
        (f"{path}.{key}", buffer)
        for path, module in net.named_modules()
        if is_norm(module)
        for key, buffer in module.named_buffers(recurse=False)
    ]
    for name, tensor in (*learned, *statistics):
        if tensor.is_floating_point() and not is_finite(tensor):
            raise NonFiniteError(
                f"{name} holds NaN or infinite values: training has diverged; go back to an earlier state"
            )
