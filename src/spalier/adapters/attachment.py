"""What was changed on a network, so that all of it can be taken back.

`Attachment` is the record of one `attach_`. It is one private attribute on every module of the network, so that
parts of an adapted network, and modules around it, are known as such. `Changes` is a log that pruning writes and
`detach_` plays back. `Summary` is the table that `attach_` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from spalier.adapters.forward import OWN_FORWARD, adapter_name, divert_, undivert_, updates
from spalier.adapters.geometry import Added, Described, fast_path_closed
from spalier.adapters.kinds import Update
from spalier.errors import AttachmentError, NetworkError
from spalier.text import table

_ABSENT = "(absent)"


@dataclass
class Changes:
    """Entries of modules and values of tensors as they were, oldest first."""

    entries: list[tuple[nn.Module, str, Any, Any]] = field(default_factory=list)
    """Module, the dictionary of it that was changed (empty for plain attributes), the key, and what was there."""
    values: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    """Tensors that were given other values, the values they had, and their gradients."""

    def set_(self, module: nn.Module, place: str, key: Any, value: Any) -> None:
        """Change an entry of a module's dictionary, or an attribute where ``place`` is empty."""
        where = getattr(module, place) if place else module.__dict__
        self.entries.append((module, place, key, where.get(key, _ABSENT)))
        where[key] = value

    def drop_(self, module: nn.Module, place: str, key: Any) -> None:
        """Take an entry out of a module's dictionary."""
        self.entries.append((module, place, key, getattr(module, place).pop(key)))

    def note(self, module: nn.Module, place: str, key: Any) -> None:
        """Remember an entry that was added."""
        self.entries.append((module, place, key, _ABSENT))

    def set_values_(self, tensor: Tensor, values: Tensor) -> None:
        """Let a tensor hold other values, of another shape perhaps, and no gradient; whoever holds it sees them."""
        self.values.append((tensor, tensor.data, tensor.grad))
        _put(tensor, values, None)

    def undo_(self) -> None:
        """Put everything back as it was."""
        for tensor, values, grad in reversed(self.values):
            _put(tensor, values, grad)
        for module, place, key, value in reversed(self.entries):
            where = getattr(module, place) if place else module.__dict__
            if isinstance(value, str) and value == _ABSENT:  # a copied log holds a copy of the word
                where.pop(key, None)
            else:
                where[key] = moved(value, where.get(key))
        self.values.clear()
        self.entries.clear()

    def keep_(self, later: Changes) -> None:
        """Take up later entries as far as needed to undo everything: of each place, what was there first."""
        known = {(id(module), place, key) for module, place, key, _ in self.entries}
        for module, place, key, value in later.entries:
            if (id(module), place, key) not in known:
                known.add((id(module), place, key))
                self.entries.append((module, place, key, value))

    def tensors(self) -> list[Tensor]:
        """The tensors that gave way to others."""
        return [value for *_, value in self.entries if isinstance(value, Tensor)]

    def refuse_saving_(self, plain: nn.Module) -> None:
        """A smaller network cannot be saved by transformers."""
        if self.entries and hasattr(plain, "save_pretrained"):
            plain.__dict__["save_pretrained"] = SavingRefused()


def moved(before: Any, now: Any) -> Any:
    """What was there, or, where a network has been moved or cast since, that moved alike."""
    if not isinstance(before, Tensor) or not isinstance(now, Tensor) or before.is_meta:
        return before
    if (before.dtype, before.device) == (now.dtype, now.device):
        return before
    other = before.detach().to(now.device, now.dtype)
    return nn.Parameter(other, before.requires_grad) if isinstance(before, nn.Parameter) else other


def _put(tensor: Tensor, values: Tensor, grad: Tensor | None) -> None:
    """Other values in the same tensor object.

    A loss that is still around keeps the node that accumulates gradients, with the old shape; PyTorch makes another
    one only where the dtype changes, so it changes there and back.
    """
    tensor.grad = None
    if type(values) is Tensor and not values.is_meta:
        other = torch.float16 if values.dtype != torch.float16 else torch.float32
        tensor.data = torch.empty(0, dtype=other, device=values.device)
    tensor.data = values
    tensor.grad = grad


@dataclass(frozen=True)
class Row:
    """One module with parameters of its own."""

    name: str
    kind: str
    parameters: int
    rank: int | None
    learned: int
    learns: str
    """``adapter``, ``norm``, ``head``, ``weights``, or ``frozen`` with a reason."""

    @property
    def is_dear(self) -> bool:
        """True where the adapter costs more than the weight that it adapts."""
        return self.learns == "adapter" and self.learned > self.adapted

    adapted: int = 0
    """How many weights the adapter updates; biases are not among them."""


@dataclass(frozen=True)
class Summary:
    """What learns in an adapted network, by module and in total; prints as a table."""

    rows: tuple[Row, ...]
    parameters: int
    learned: int

    def __str__(self) -> str:
        cells = []
        for row in self.rows:
            rank, mark = "-" if row.rank is None else str(row.rank), " (!)" if row.is_dear else ""
            cells.append([row.name, row.kind, f"{row.parameters:,}", rank, f"{row.learned:,}", row.learns + mark])
        lines = [table(["layer", "kind", "parameters", "rank", "learned", "learns"], cells)]
        share = 100 * self.learned / self.parameters
        lines.append(f"learned: {self.learned:,} of {self.parameters:,} parameters ({share:.1f}%)")
        if any(row.is_dear for row in self.rows):
            lines.append("(!) the adapter costs more than the weight it adapts; cap=True lowers its rank")
        return "\n".join(lines)


MARK = "_spalier"
"""The one private attribute, on every module of an adapted network."""


@dataclass(frozen=True)
class Updated:
    """A frozen weight and the update that learns for it."""

    name: str
    layer: nn.Module
    weight: str
    update: Update

    @property
    def path(self) -> str:
        """How plans call the adapter: by its layer, and by its weight where that is not called ``weight``."""
        if self.weight == "weight":
            return self.name
        return f"{self.name}.{self.weight}" if self.name else self.weight


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
    base_norms: bool = False
    """Whether tasks hold the statistics of batch norms alone, as a budget of bytes has it."""

    def apply_(self) -> None:
        """Freeze the network, let copies learn, and put each update beside its weight. Only assigns."""
        for module in list(self.root.modules()):
            module.__dict__[MARK] = self
            own = {key: p for key, p in module._parameters.items() if p is not None}
            self.flags[module] = {key: p.requires_grad for key, p in own.items()}
        for parameter in self.root.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None  # an optimizer would go on stepping with it
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

    def close_fast_path_(self, module: nn.Module) -> None:
        """Let an encoder compute by the layers inside of it, and remember what it was."""
        for attribute, value in fast_path_closed(module).items():
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
        gone += [type(m).__name__ for m in self.flags if whole and m not in present and not isinstance(m, Added)]
        if gone:
            raise AttachmentError(
                f"modules were replaced or removed since attach_ ({', '.join(gone[:3])}); put them back first"
            )


def _close_fast_paths_(net: nn.Module) -> None:
    """PyTorch's inference fast paths know nothing of attention that has fewer heads."""
    pruned = [m for m in net.modules() if OWN_FORWARD in m.__dict__]
    for module in net.modules() if pruned else ():
        if not isinstance(module, nn.TransformerEncoderLayer) or module.self_attn in pruned:
            module.__dict__.update(fast_path_closed(module))


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
    raise AttachmentError(f"this {type(net).__name__} is not adapted; expected a network that attach_ was called on")


def copies_of(modules: list[nn.Module], learned: set[nn.Module], also: Mapping[nn.Module, set[str]]) -> list[Replaced]:
    """Copies for the parameters of what learns and for every buffer; tensors that are tied stay tied."""
    copies: dict[int, Tensor] = {}
    found = []
    for module in modules:
        entries = [("_buffers", key, t) for key, t in module._buffers.items()]
        if module in learned:
            entries += [("_parameters", key, p) for key, p in module._parameters.items()]
        entries += [("_parameters", key, module._parameters[key]) for key in sorted(also.get(module, ()))]
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


@dataclass(frozen=True)
class Owner:
    """A place that holds a tensor; tied tensors have several."""

    module: nn.Module
    place: str
    """``_parameters`` or ``_buffers``."""
    key: str

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        found: Tensor = getattr(self.module, self.place)[self.key]
        return found

    @property
    def update(self) -> Update | None:
        """What learns for the tensor at this place."""
        return updates(self.module).get(self.key)


def owners_of(net: nn.Module, names: Mapping[str, str]) -> dict[str, list[Owner]]:
    """Every place that holds each tensor, by its first name."""
    found: dict[str, list[Owner]] = {}
    modules = dict(net.named_modules(remove_duplicate=False))
    for name, first in names.items():
        path, _, key = name.rpartition(".")
        module = modules[path]
        place = "_parameters" if key in module._parameters else "_buffers"
        found.setdefault(first, []).append(Owner(module, place, key))
    return found


def update_of(owners: Sequence[Owner]) -> Update | None:
    """What learns for the tensor at these places; tied tensors share it."""
    return next((update for owner in owners if (update := owner.update) is not None), None)


def fused_value(owners: Mapping[str, list[Owner]], name: str) -> Tensor:
    """A tensor as the network computes with it: its adapter is fused."""
    tensor, update = owners[name][0].tensor.detach(), update_of(owners[name])
    return tensor if update is None else update(tensor)


class SavingRefused:
    """In place of ``save_pretrained``: the files would name the base's sizes, and nothing could load them.

    Pickled it is a text, so that whoever loads the network needs nothing of Spalier.
    """

    words = (
        "the network is smaller than its configuration says, so from_pretrained could not load what save_pretrained "
        "writes; save its task (Task.save) and build it on the base (Task.build), or the network itself (torch.save)"
    )

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Say what to do instead."""
        raise NetworkError(self.words)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.words,)

    def __deepcopy__(self, _: object) -> SavingRefused:
        return self
