"""What `attach_` changed on a network, so that all of it can be taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spalier.adapters.changes import Changes, moved
from spalier.adapters.forward import OWN_FORWARD, adapter_name, divert_, undivert_
from spalier.adapters.layers import Added, Described
from spalier.adapters.updates import Update
from spalier.errors import AttachmentError

if TYPE_CHECKING:
    from spalier.adapters.summary import Summary

MARK = "_spalier"
"""The one private attribute, on every module of an adapted network."""


@dataclass(frozen=True)
class Updated:
    """A frozen weight and the update that learns for it."""

    name: str
    layer: nn.Module
    weight: str
    update: Update


@dataclass(frozen=True)
class Replaced:
    """A base tensor that gave way to a copy of itself, to learn in."""

    module: nn.Module
    kind: str
    """``_parameters`` or ``_buffers``."""
    key: str
    original: Tensor
    copy: Tensor

    def moved_original(self) -> Tensor:
        """The base tensor, or itself where the network has been moved or cast since."""
        current, original = getattr(self.module, self.kind).get(self.key), self.original
        if current is not None and original.is_meta and not current.is_meta:
            return current  # type: ignore[no-any-return]  # the base had no values before it was materialised
        return moved(original, current)  # type: ignore[no-any-return]


@dataclass
class Attachment:
    """The record of one `attach_`."""

    root: nn.Module
    adapter: object
    summary: Summary
    updated: list[Updated]
    replaced: list[Replaced]
    flags: dict[nn.Module, dict[str, bool]] = field(default_factory=dict)
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    diverted: list[nn.Module] = field(default_factory=list)
    pruned: Changes = field(default_factory=Changes)
    """What pruning has changed since."""
    modules: tuple[Described, ...] = ()
    """What the network was before it was adapted and pruned."""
    heads: tuple[str, ...] = ()
    """The paths of the head, and of all modules inside of it."""
    task: Any = None
    """The task that was applied, until the network is pruned on."""
    structure: Any = None
    """What `trace` found of the network, where an example was given; later calls take it from here."""

    def apply_(self) -> None:
        """Freeze the network, let copies learn, and put each update beside its weight. Only assigns."""
        for module in list(self.root.modules()):
            module.__dict__[MARK] = self
            own = {key: p for key, p in module._parameters.items() if p is not None}
            self.flags[module] = {key: p.requires_grad for key, p in own.items()}
        for parameter in self.root.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None  # an optimizer would go on with it
        for entry in self.replaced:
            getattr(entry.module, entry.kind)[entry.key] = entry.copy
        for updated in self.updated:
            updated.layer.add_module(adapter_name(updated.weight), updated.update)
        for layer in dict.fromkeys(entry.layer for entry in self.updated):
            self.divert_(layer)

    def divert_(self, module: nn.Module) -> None:
        """Let calls of a module see the updates."""
        divert_(module)
        self.diverted.append(module)

    def override_(self, module: nn.Module, attribute: str, value: object) -> None:
        """Set a plain attribute, and remember what it was."""
        if hasattr(module, attribute):
            self.attributes.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)

    def remove_(self) -> None:
        """Take the updates off, and leave the weights and what was learned in place."""
        for entry in self.updated:
            entry.layer._modules.pop(adapter_name(entry.weight), None)
        for layer in self.diverted:
            undivert_(layer)
        for module, attribute, value in self.attributes:
            setattr(module, attribute, value)
        _close_fast_paths_(self.root)
        for module in (*self.flags, *self.root.modules()):
            module.__dict__.pop(MARK, None)

    def restore_(self, originals: list[Tensor]) -> None:
        """Put the base tensors back where copies learned."""
        for entry, original in zip(self.replaced, originals, strict=True):
            getattr(entry.module, entry.kind)[entry.key] = original

    def reset_flags_(self) -> None:
        """Let learn what learned before; a parameter that came later keeps its own flag."""
        for module, flags in self.flags.items():
            for key, flag in flags.items():
                parameter = module._parameters.get(key)
                if parameter is not None:
                    parameter.requires_grad_(flag)

    def check_present(self, *, whole: bool) -> None:
        """Refuse to go on where adapted layers (or any module, if ``whole``) were taken out of the network since."""
        present = set(self.root.modules())
        gone = [e.name for e in self.updated if e.layer not in present]
        gone += [
            type(m).__name__ for m in self.flags if whole and m not in present and not isinstance(m, Added)
        ]
        if gone:
            raise AttachmentError(
                f"modules were replaced or removed since attach_ ({', '.join(gone[:3])}); put them back first"
            )


def _close_fast_paths_(net: nn.Module) -> None:
    """PyTorch's inference fast paths know nothing of attention that has fewer heads."""
    pruned = [m for m in net.modules() if OWN_FORWARD in m.__dict__]
    for module in net.modules() if pruned else ():
        if isinstance(module, nn.TransformerEncoderLayer) and module.self_attn in pruned:
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def attachment_of(net: nn.Module) -> Attachment:
    """The record on an adapted network; an error on any other."""
    found = net.__dict__.get(MARK) if isinstance(net, nn.Module) else None
    if isinstance(found, Attachment):
        if found.root is net:
            return found
        raise AttachmentError(
            f"this {type(net).__name__} is a part of an adapted network; pass the network that attach_ was given"
        )
    wrapped = getattr(net, "module", None) or getattr(net, "_orig_mod", None)
    if isinstance(wrapped, nn.Module) and MARK in wrapped.__dict__:
        raise AttachmentError(
            f"this {type(net).__name__} wraps the adapted network; pass the network that attach_ was given"
        )
    raise AttachmentError(
        f"this {type(net).__name__} is not adapted; expected a network that attach_ was called on"
    )


def copies_of(modules: list[nn.Module], learned: set[nn.Module]) -> list[Replaced]:
    """Copies for the parameters of what learns and for every buffer; tensors that are tied stay tied."""
    copies: dict[int, Tensor] = {}
    found = []
    for module in modules:
        entries = [("_buffers", key, t) for key, t in module._buffers.items()]
        if module in learned:
            entries += [("_parameters", key, p) for key, p in module._parameters.items()]
        for kind, key, tensor in entries:
            if tensor is not None:
                if id(tensor) not in copies:
                    copies[id(tensor)] = _learned_copy(tensor)
                copy = copies[id(tensor)]
                found.append(Replaced(module, kind, key, tensor, copy))
    return found


def _learned_copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    if not isinstance(tensor, nn.Parameter):
        return copy
    return nn.Parameter(copy, requires_grad=copy.is_floating_point() or copy.is_complex())


def is_marked(module: nn.Module) -> bool:
    """True for a module of an adapted network."""
    return isinstance(module.__dict__.get(MARK), Attachment)
