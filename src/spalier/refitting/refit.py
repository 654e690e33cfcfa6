"""`refit_`: what a network has learned, in another adapter's form, in place.

The network becomes a task, the weights of that task get other sources, and the task is applied again: the base is read,
never written, and what cannot be done is refused before anything is changed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from spalier.adapters.attach import detach_, fuse
from spalier.adapters.attachment import Attachment, Changes, Updated, attachment_of, fused_value, owners_of
from spalier.adapters.codes import packed_size
from spalier.adapters.geometry import first_names, geometries, is_finite, tensors_of
from spalier.adapters.kinds import Adapter, ByLayer, Coded, FineTune, LowRank, Update
from spalier.errors import AttachmentError, ConfigError, NonFiniteError, SpalierError
from spalier.pruning.prune import cut, optimizers_of
from spalier.pruning.recovery import Recovered, Recovery, Wishes, calibration_of, centred_layers, recover_
from spalier.refitting.approximate import Delta, added, approximation
from spalier.refitting.measure import check_runs, metrics_of
from spalier.refitting.spend import NOTHING, Code, options_of, within, written
from spalier.tasks.apply import apply_to_
from spalier.tasks.base import Base
from spalier.tasks.extract import base_groups, base_tensors, settings_of, source_of
from spalier.tasks.rewrite import Sources, base_norms, rewritten
from spalier.tasks.task import Storage, Task
from spalier.text import check_integer, table


@dataclass(frozen=True)
class RefitRow:
    """One weight, and what has become of its delta."""

    name: str
    code: str
    error: float
    """The share of the layer's output that is missing; without batches, for inputs that are alike in all directions."""
    before: int
    """Bytes of the weight's numbers before, in float32."""
    after: int
    """Bytes of what is stored for it now, before deflating."""


@dataclass(frozen=True)
class Refitted:
    """What `refit_` has done, by weight. Print it."""

    rows: tuple[RefitRow, ...]
    before: int
    """Bytes of the task's file before, with every bit kept."""
    after: int
    """Bytes of its file now, in the storage below."""
    storage: Storage
    norms: int = 0
    """How many batch norms took new statistics."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Layers whose update is the best for inputs alike in all directions, and why."""

    def __str__(self) -> str:
        rows = [[r.name, r.code, f"{r.error:.4f}", f"{r.before:,}", f"{r.after:,}"] for r in self.rows]
        lines = [table(["weight", "code", "output missing", "bytes before", "after"], rows)]
        if self.skipped:
            lines.append(table(["without batches", "why"], [[name, why] for name, why in self.skipped.items()]))
        share = self.before / max(self.after, 1)
        lines.append(
            f"file: {self.before:,} bytes before, {self.after:,} as {self.storage} now (1/{share:.0f}); "
            f"{self.norms} norms recalibrated"
        )
        return "\n".join(lines)


def refit_(
    net: nn.Module,
    adapter: Adapter | ByLayer | FineTune | None = None,
    *,
    bytes: int | None = None,
    batches: Iterable[Any] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    storage: Storage = "int8-all",
    room: float = 0.0,
) -> Refitted:
    """Write what ``net`` has learned, by `FineTune` or any adapter, in another adapter's form, in place.

    Low rank and few bits are hard to learn and easy to store: learn all kept weights, then refit, then learn on for a
    few epochs with the network before as teacher. The base is untouched; norms, biases and the head stay as they were
    learned. With ``bytes``, a task of the network holds the statistics of its batch norms alone (`Task.of`). Everything
    can go on learning, be pruned on and saved. Make the optimizer anew, or pass it.

    Args:
        net: a network that `attach_` was called on.
        adapter: what to write: `SPLoRA`, `SPDelta`, `SPPaRA`, or `FineTune` to go on with all weights.
        bytes: instead of an adapter, how many bytes the task's file may have. Each weight gets the code that its bytes
            are best spent on: nothing, low rank, or few bits for each entry.
        batches: calibration batches; targets are not looked at. Each layer then becomes the best for its own inputs,
            layer by layer in order, and batch norms take new statistics.
        optimizer: one or several that train the network: parameters that are gone leave it, and new ones join its first
            group, without a state.
        storage: what the file's bytes are counted for; save it as that: ``task.save(path, storage="int8-all")``.
        room: the share by which codes are counted larger than they are. They grow when they learn on, signs excepted;
            0.04 is enough for a few epochs.

    >>> from spalier import FineTune, SPDelta, attach_
    >>> net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> _ = attach_(net, FineTune(), head="2")
    >>> with torch.no_grad():
    ...     _ = net[0].weight.add_(0.01)
    >>> refit_(net, SPDelta(bits=1)).rows[0].code
    'SPDelta(bits=1)'
    """
    attachment = attachment_of(net)
    _check_arguments(adapter, bytes, room)
    optimizers = optimizers_of(net, optimizer)
    calibration = None if batches is None else _on_device(net, calibration_of(Recovery(batches, head=False)))
    with torch.inference_mode(False):
        work = _Work(net, attachment, adapter, storage)
        plain = None if calibration is None else fuse(net)
        if plain is not None and calibration is not None:
            check_runs(plain, calibration[1])
        made = work.approximated() if bytes is None else work.budgeted(bytes, room, plain, calibration)
        task = work.rewritten(made)
        try:
            return work.replace_(task, made, plain, calibration)
        finally:  # where it fails it is the network before, with parameters of its own too
            _tell_(optimizers, net, work.learned)


def _on_device(net: nn.Module, calibration: tuple[Recovery, Any]) -> tuple[Recovery, Any]:
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    return calibration[0], tree_map_only(Tensor, lambda t: t.to(device), calibration[1])


def _check_arguments(adapter: object, budget: object, room: object) -> None:
    if not isinstance(room, int | float) or not 0 <= room <= 1:
        raise ConfigError(f"room is {room!r}, expected a share from 0 to 1")
    if (adapter is None) == (budget is None):
        raise ConfigError("refit_ takes an adapter such as SPDelta(bits=1), or bytes=..., and not both")
    if budget is not None:
        check_integer("bytes", budget)
    elif isinstance(adapter, type) or not (isinstance(adapter, FineTune | ByLayer) or hasattr(adapter, "fit")):
        raise ConfigError(f"adapter is {adapter!r}, expected one such as SPDelta(bits=1)")


Made = dict[str, Update | None]
"""The update of each weight; None where it is the base's as it is, or where all of it learns."""


class _Work:
    """A network as it is before it is written anew."""

    def __init__(self, net: nn.Module, attachment: Attachment, adapter: Any, storage: Storage) -> None:
        self.net, self.attachment, self.adapter, self.storage = net, attachment, adapter, storage
        self.structure = attachment.structure
        self.is_spent = False
        """Whether codes were chosen for a budget of bytes, which no regression may change any more."""
        self.codes: dict[str, str] = {}
        """What is written for each weight, in words."""
        self.task = Task.of(net, "refit", base_norms=False)  # which refuses NaN, and what cannot be saved
        updated = {_weight_name(entry): entry.update for entry in attachment.updated}
        self.unrounded = {name: copy.deepcopy(u.state_dict()) for name, u in updated.items() if _is_coded(u)}
        """What a task does not hold, in case of an error."""
        self.learned = [p for p in net.parameters() if p.requires_grad]
        self.owners = owners_of(net, first_names(tensors_of(net)))
        self.bases = base_tensors(attachment, self.owners)
        self.deltas = {delta.name: delta for delta in self._deltas()}
        if not self.deltas:
            raise AttachmentError("the network has no weights outside of its head that an adapter could write")
        if all(delta.is_nothing for delta in self.deltas.values()):
            raise AttachmentError("nothing has been learned yet: every weight is still the base's; train first")

    def _deltas(self) -> Iterable[Delta]:
        heads = set(self.attachment.heads)
        for row, left in self.task.cut_rows:
            for key, name in zip(row.keys, row.names, strict=True):
                module = self.owners[name][0].module
                if row.path in heads or row.source in ("base", "integers") or not _is_weight(module, key):
                    continue
                fused = fused_value(self.owners, name).detach()
                base = cut(self.bases[name].detach(), left.indices).to(fused)
                if not is_finite(fused):
                    raise NonFiniteError(f"{name} holds NaN or infinite values: training has diverged")
                yield Delta(name, row.path, geometries(module)[key], base.contiguous(), fused.contiguous())

    def approximated(self) -> Made:
        """Each delta as the adapter's best approximation of it, for inputs that are alike in all directions."""
        if isinstance(self.adapter, FineTune):
            self.codes = dict.fromkeys(self.deltas, _in_words(self.adapter))
            return dict.fromkeys(self.deltas)
        made: Made = {}
        for name, delta in self.deltas.items():
            adapter = self.adapter.adapters.get(name) if isinstance(self.adapter, ByLayer) else self.adapter
            paid = adapter is not None and adapter.fit(delta.geometry).learned
            made[name] = approximation(delta, adapter) if paid else None
            self.codes[name] = _in_words(adapter) if paid else str(NOTHING)
        if not any(made.values()) and not isinstance(self.adapter, ByLayer):
            raise AttachmentError(f"{self.adapter!r} leaves nothing for any layer; ask for more")
        return made

    def budgeted(self, budget: int, room: float, plain: nn.Module | None, calibration: Any) -> Made:
        """Each delta in the code that its bytes are best spent on."""
        if plain is not None:
            centred = centred_layers(self.structure)
            paths = {delta.path: delta.path in centred for delta in self.deltas.values()}
            metrics = metrics_of(plain, paths, calibration[1])
            for delta in self.deltas.values():
                found = metrics[delta.path]
                delta.metric = found if delta.is_layers_own else found.in_all_directions()
        options = {name: options_of(delta) for name, delta in self.deltas.items()}
        self.adapter, self.is_spent = ByLayer(), True

        def made(codes: Mapping[str, Code]) -> Made:
            return {n: None if code == NOTHING else written(self.deltas[n], code) for n, code in codes.items()}

        norms = base_norms(self.task, self.owners, self.bases)

        def file_size(codes: Mapping[str, Code]) -> int:
            return len(self.rewritten(made(codes), norms).to_bytes(storage=self.storage))

        codes = within(options, budget, file_size, room)
        self.codes = {name: str(code) for name, code in codes.items()}
        return made(codes)

    def rewritten(self, made: Made, more: Sources | None = None) -> Task:
        """The task with these updates."""
        sources: dict[str, Any] = dict(more or {})
        for name, update in made.items():
            if update is not None:
                groups = base_groups(self.net, self.owners[name][0].module, name)
                sources[name] = source_of(update, groups), update.stored()
            elif isinstance(self.adapter, FineTune):
                sources[name] = "values", self.deltas[name].fused
            else:
                sources[name] = "base", None
        return rewritten(self.task, sources, settings_of(self.adapter), self.bases)

    def replace_(self, task: Task, made: Made, plain: nn.Module | None, calibration: Any) -> Refitted:
        """Let the network be the task; on an error it becomes what it was."""
        net, adapter = self.net, self.adapter
        detach_(net)
        try:
            apply_to_(task, Base(net), self.structure)
            attachment = attachment_of(net)
            attachment.adapter, attachment.base_norms = adapter, self.is_spent
            if self.structure is not None:
                attachment.task = None
            recovered = Recovered(0, 0, {}, {})
            # the very numbers that codes were rounded from, so that they can learn on from there
            _fill_(attachment, {name: update.state_dict() for name, update in made.items() if _is_coded(update)})
            if plain is not None and calibration is not None:
                recovered = self._recovered(plain, calibration)
            return self._result(made, recovered)
        except BaseException:
            if "_spalier" in net.__dict__:
                detach_(net)
            apply_to_(self.task, Base(net), self.structure)
            attachment_of(net).base_norms = self.attachment.base_norms
            _fill_(attachment_of(net), self.unrounded)
            raise

    def _recovered(self, plain: nn.Module, calibration: Any) -> Recovered:
        recovery, inputs = calibration
        is_set = self.is_spent or isinstance(self.adapter, FineTune)  # only norms follow
        recovery = dataclasses.replace(recovery, adapters=not is_set)
        deltas = {delta.path: delta.values for delta in self.deltas.values() if delta.is_layers_own}
        wishes = Wishes(centred=centred_layers(self.structure), deltas=deltas)
        return recover_(self.net, plain, recovery, inputs, Changes(), wishes)

    def _result(self, made: Made, recovered: Recovered) -> Refitted:
        before, after = len(self.task.to_bytes()), len(Task.of(self.net, "refit").to_bytes(storage=self.storage))
        rows = []
        for name, delta in self.deltas.items():
            update = made[name]
            missing = delta.error(None if update is None else added(update, delta)) / max(delta.size, 1e-30)
            if isinstance(self.adapter, FineTune):
                missing = 0.0
            elif delta.path in recovered.layers and update is not None:
                missing = recovered.layers[delta.path][1]
            rows.append(RefitRow(name, self.codes[name], missing, 4 * delta.fused.numel(), self._bytes(update, delta)))
        return Refitted(tuple(rows), before, after, self.storage, recovered.norms, recovered.skipped)

    def _bytes(self, update: Update | None, delta: Delta) -> int:
        if update is None:
            return 4 * delta.fused.numel() if isinstance(self.adapter, FineTune) else 0
        size = {"exact": 4, "fp32": 4, "fp16": 2, "bf16": 2}.get(self.storage, 1)
        total = 0
        for values, scale, levels in update.stored():
            rows, length = values.shape
            if scale is None:
                total += size * rows * length + (2 * rows if size == 1 else 0)
            else:
                total += packed_size(rows * length, levels) + max(size, 2) * scale.numel()
        return total


def _in_words(adapter: Any) -> str:
    """An adapter with what tells it from others of its kind."""
    told = {"SPLoRA": ("rank", "kernel"), "SPDelta": ("bits",)}.get(type(adapter).__name__, ())
    return f"{type(adapter).__name__}({', '.join(f'{key}={getattr(adapter, key)!r}' for key in told)})"


def _is_weight(module: nn.Module, key: str) -> bool:
    try:
        return key in geometries(module)
    except SpalierError:  # a layer that no adapter fits goes on learning in full
        return False


def _is_coded(update: Update | None) -> TypeGuard[Update]:
    return isinstance(update, Coded | LowRank) and bool(update.levels)


def _weight_name(entry: Updated) -> str:
    return f"{entry.name}.{entry.weight}" if entry.name else entry.weight


def _fill_(attachment: Attachment, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give updates these numbers."""
    for entry in attachment.updated:
        if _weight_name(entry) in states:
            entry.update.load_state_dict(states[_weight_name(entry)])


def _tell_(optimizers: Sequence[Optimizer], net: nn.Module, before: Sequence[nn.Parameter]) -> None:
    """Parameters that are gone leave their optimizers, and new ones join the first."""
    gone, learned = set(before), [p for p in net.parameters() if p.requires_grad]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in gone]
        for parameter in [p for p in optimizer.state if p in gone]:
            del optimizer.state[parameter]
    for optimizer in optimizers[:1]:
        optimizer.param_groups[0]["params"] += learned
