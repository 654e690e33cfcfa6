"""What `attach_` changed on a network, so that all of it can be taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spalier.adapters.forward import adapter_name, divert_, undivert_
from spalier.errors import AttachmentError

if TYPE_CHECKING:
    from spalier.adapters.summary import Summary


@dataclass(frozen=True)
class Updated:
    """A frozen weight and the update that learns for it."""

    name: str
    layer: nn.Module
    weight: str
    update: nn.Module


@dataclass(frozen=True)
class Replaced:
    """A base tensor that gave way to a learned copy of itself."""

    module: nn.Module
    kind: str
    """``_parameters`` or ``_buffers``."""
    key: str
    original: Tensor


@dataclass
class Attachment:
    """The record of one `attach_`, kept on the network as its one private attribute."""

    adapter: object
    summary: Summary
    updated: list[Updated] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    flags: list[tuple[nn.Parameter, bool]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    diverted: list[nn.Module] = field(default_factory=list)

    def freeze_(self, net: nn.Module) -> None:
        """Stop every parameter from learning, and remember which did."""
        self.flags = [(p, p.requires_grad) for p in net.parameters()]
        net.requires_grad_(False)

    def thaw_(self, modules: list[nn.Module]) -> None:
        """Let these modules' own tensors learn in copies; tensors that are tied stay tied."""
        copies: dict[int, Tensor] = {}
        for module in modules:
            for kind, entries in (("_parameters", module._parameters), ("_buffers", module._buffers)):
                for key, tensor in entries.items():
                    if tensor is None:
                        continue
                    self.replaced.append(Replaced(module, kind, key, tensor))
                    if id(tensor) not in copies:
                        copies[id(tensor)] = _learned_copy(tensor)
                    entries[key] = copies[id(tensor)]  # type: ignore[assignment]

    def adapt_(self, updated: list[Updated]) -> None:
        """Put each update beside its weight and let the layer see it."""
        self.updated = updated
        for entry in updated:
            entry.layer.add_module(adapter_name(entry.weight), entry.update)
        for layer in dict.fromkeys(entry.layer for entry in updated):
            self.divert_(layer)

    def divert_(self, layer: nn.Module) -> None:
        """Let calls of a layer see its updates."""
        divert_(layer)
        self.diverted.append(layer)

    def override_(self, module: nn.Module, attribute: str, value: object) -> None:
        """Set a plain attribute, and remember what it was."""
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

    def restore_(self) -> None:
        """Put the base tensors back where copies learned, and let learn what learned before."""
        for entry in self.replaced:
            table = getattr(entry.module, entry.kind)
            current, original = table[entry.key], entry.original
            if current.dtype != original.dtype or current.device != original.device:
                original.data = original.data.to(current.device, current.dtype)  # the network moved meanwhile
            table[entry.key] = original
        for parameter, flag in self.flags:
            parameter.requires_grad_(flag)


def attachment_of(net: nn.Module) -> Attachment:
    """The record on an adapted network; an error on any other."""
    found = net.__dict__.get("_spalier") if isinstance(net, nn.Module) else None
    if isinstance(found, Attachment):
        return found
    wrapped = getattr(net, "module", None) or getattr(net, "_orig_mod", None)
    if isinstance(wrapped, nn.Module) and "_spalier" in wrapped.__dict__:
        raise AttachmentError(
            f"this {type(net).__name__} wraps the adapted network; pass the network that attach_ was given"
        )
    raise AttachmentError(
        f"this {type(net).__name__} is not adapted; expected a network that attach_ was called on"
    )


def _learned_copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    if not isinstance(tensor, nn.Parameter):
        return copy
    return nn.Parameter(copy, requires_grad=torch.is_floating_point(copy))
