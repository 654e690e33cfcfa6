"""`Task`: what one task has learned on a frozen base, in memory and as a file.

Loading and building need this file, the format, and the base. What makes a task of a network, or takes it further, is
imported where it is called.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from spalier import __version__, files
from spalier.adapters.codes import are_codes, pack, unpack
from spalier.adapters.kinds import Stored
from spalier.errors import ConfigError, TaskFileError
from spalier.tasks import format, numbers
from spalier.tasks.dry_run import inputs_of
from spalier.tasks.format import Density, Fingerprint
from spalier.tasks.rows import Cut, Delta, Mask, Matrices, Row
from spalier.tasks.table import Table, Writer
from spalier.text import InNotebooks, check_integer

if TYPE_CHECKING:
    from spalier.adapters.kinds import Adapter, ByLayer
    from spalier.refitting import Refitted
    from spalier.structure.structure import Structure
    from spalier.tasks.store import StorageCosts

Storage = Literal["exact", "fp32", "fp16", "bf16", "int8", "int8-all", "int4-head"]
"""How numbers are stored: as they are, in 32 or 16 bits, or as 8-bit integers with a scale for each row: those of
adapters, or norms and head too, or the head in 4 bits.

Codes are stored as they are in all of them; these are about their scales.
"""
STORAGES: tuple[Storage, ...] = get_args(Storage)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_IN_BYTES = ("int8", *numbers.SMALL)
_NEEDED = {"name", "adapter", "base", "density", "learned", "storage"}


@dataclass(frozen=True)
class TaskInfo(InNotebooks):
    """What a task says of itself. Print it."""

    # in the order in which files have them
    name: str
    adapter: dict[str, Any]
    """Its kind and its settings."""
    base: Fingerprint
    density: Density
    learned: int
    """How many numbers were learned."""
    storage: Storage = "exact"
    metrics: dict[str, float] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    licence: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)
    """What the base was traced with: dtypes and shapes of ``args`` and ``kwargs``; empty where nobody said."""

    def __post_init__(self) -> None:
        format.check_name(self.name)
        format.check_field("adapter", isinstance(self.adapter.get("kind"), str), "a dict with a kind")
        format.check_field("learned", format.is_sizes([self.learned], 1), "a number")
        format.check_field("storage", self.storage in STORAGES, f"one of {', '.join(STORAGES)}")
        are_numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.metrics.values())
        format.check_field("metrics", are_numbers, "a dict of numbers")
        format.check_field("classes", all(isinstance(c, str) for c in self.classes), "a list of names")
        format.check_text("licence", self.licence)
        for name in ("adapter", "metrics", "classes", "preprocessing", "provenance", "inputs"):
            format.check_plain(name, getattr(self, name))
        if self.inputs:
            inputs_of(self.inputs)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; fields that say nothing are left out."""
        found = {"format": format.VERSION, **asdict(self)}
        found["density"] = {key: pair for key, pair in found["density"].items() if pair}
        return {key: value for key, value in found.items() if value or key in _NEEDED}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TaskInfo:
        """What `to_dict` wrote; anything else is an error."""
        rest = dict(data)
        rest.pop("format", None)
        kinds: dict[str, type] = {
            **dict.fromkeys(("adapter", "base", "density", "metrics", "preprocessing", "provenance", "inputs"), dict),
            **dict.fromkeys(("name", "storage", "licence"), str),
            "learned": int,
            "classes": list,
        }
        format.check_field("description", set(rest) >= _NEEDED, f"the fields {', '.join(sorted(_NEEDED))}")
        for key, value in rest.items():
            format.check_field("description", key in kinds, f"no {format.quoted(key)}")
            format.check_field(key, type(value) is kinds[key], f"a {kinds[key].__name__}")
        rest["base"], rest["density"] = format.fingerprint_of(rest["base"]), format.density_of(rest["density"])
        return TaskInfo(**{**rest, "classes": tuple(rest.get("classes", ()))})

    def lines(self) -> list[tuple[str, str]]:
        """All that the file says of itself, in words."""
        settings = ", ".join(f"{key}={value}" for key, value in self.adapter.items() if key != "kind")
        some = ", ".join(self.classes[:5]) + (", ..." if len(self.classes) > 5 else "")
        return [
            ("name", self.name),
            ("adapter", f"{self.adapter['kind']}({settings})"),
            ("learned", f"{self.learned:,} parameters, stored as {self.storage}"),
            *((f.name, format.share_text(getattr(self.density, f.name))) for f in fields(Density)),
            *((key, f"{value:g}") for key, value in self.metrics.items()),
            ("classes", f"{len(self.classes)}: {some}" if self.classes else "not stated"),
            *((key, str(value)) for key, value in self.preprocessing.items()),
            ("licence", self.licence or "not stated"),
            *((key, str(value)) for key, value in self.provenance.items()),
            ("base", f"{self.base.architecture[:12]} with values {self.base.values[:12]}"),
        ]

    def __str__(self) -> str:
        width = max(len(key) for key, _ in self.lines())
        return "\n".join(f"{key:{width}}  {value}" for key, value in self.lines())


@dataclass(frozen=True, eq=False, repr=False)
class Task(InNotebooks):
    """Which channels a task keeps of its base, and what it has learned.

    >>> from spalier import SPLoRA, attach_, models
    >>> base = models.resnet18(classes=10)
    >>> net = models.resnet18(classes=10)
    >>> _ = net.load_state_dict(base.state_dict())
    >>> _ = attach_(net, SPLoRA(rank=2), head="fc")
    >>> task = Task.of(net, "digits", metrics={"accuracy": 0.98})
    >>> plain = task.build(base)
    >>> type(plain).__name__, plain.training
    ('ResNet', False)
    """

    info: TaskInfo
    """What the task says of itself. Print it."""
    table: Table
    """Which tensors the network has, and where their numbers come from."""
    masks: list[Mask]
    """The units that each stream, and each free writer, keeps."""
    adapters: Tensor
    """The numbers of all adapters that are not coded, in the order of the table, as they are stored."""
    codes: Tensor
    """The packed codes of the others: those of two levels first, then of three..., each in the order of the table."""
    scales: Tensor
    """What codes are multiplied with, in the order of the table."""
    values: Tensor
    """Norms with their statistics, biases, the head: all that is the task's own, as numbers in every storage."""
    integers: tuple[int, ...] = ()
    """Integers of the task's own: how many batches a norm has seen."""
    packed: Tensor | None = None
    """The bytes that values are read from, in the storages that have them so: saved again they are the same."""
    refitted: Refitted | None = None
    """What each layer has lost, where `from_checkpoint` has just made the task; no file has it. Print it."""

    @staticmethod
    def of(
        net: nn.Module,
        name: str,
        *,
        metrics: Mapping[str, float] | None = None,
        classes: Sequence[str] = (),
        preprocessing: Mapping[str, Any] | None = None,
        licence: str = "",
        provenance: Mapping[str, Any] | None = None,
        structure: Structure | None = None,
        base_norms: bool | None = None,
    ) -> Task:
        """What an adapted network has learned, pruned or not; the network stays as it is.

        Args:
            net: a network that `attach_` was called on.
            name: letters, digits, '-', '_' and '.'; the file is called NAME.task.safetensors.
            metrics: numbers to remember: accuracy, loss.
            classes: the names of the classes, in the order of the outputs.
            preprocessing: how inputs are made, as plain data: size, mean, std.
            licence: under which the task may be used; an SPDX name.
            provenance: where it comes from, as plain data: data set, recipe, author.
            structure: what the network was pruned with, where it does not remember.
            base_norms: let weights and biases of batch norms be the base's, and move their statistics so that the
                network computes the same: two numbers for each channel instead of four. Norms that this cannot be done
                to keep four. Applied again, the norms' statistics go on, and their weights stay the base's. By default
                where `refit_` was given a budget of bytes.
        """
        from spalier.adapters.attachment import attachment_of
        from spalier.tasks.extract import extract
        from spalier.tasks.rewrite import with_base_norms

        format.check_name(name)
        if isinstance(classes, str):
            raise TaskFileError("metadata", f"classes is the text {classes!a}, expected a list of names")
        versions = {"spalier": __version__, "torch": torch.__version__.partition("+")[0]}
        said = {
            "metrics": format.plain_dict("metrics", metrics),
            "classes": tuple(format.plain(list(classes))),
            "preprocessing": format.plain_dict("preprocessing", preprocessing),
            "licence": licence or "",
            "provenance": versions | format.plain_dict("provenance", provenance),
        }
        task = extract(net, structure, name, said)
        is_small = attachment_of(net).base_norms if base_norms is None else base_norms
        return with_base_norms(task, net) if is_small else task

    @staticmethod
    def from_checkpoint(
        base: nn.Module,
        finetuned: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str],
        *,
        name: str = "checkpoint",
        bytes: int | None = None,
        adapter: Adapter | ByLayer | None = None,
        batches: Iterable[Any] | None = None,
        test: Iterable[Any] | None = None,
        head: str | Sequence[str] | None = None,
        example: Any = None,
        storage: Storage = "int8-all",
        **said: Any,
    ) -> Task:
        """What a fine-tuned network has learned beyond its base, in few bytes; both are only read.

        ``print(task.refitted)`` shows the error of each layer, ``task.info.metrics`` what was measured on batches.

        Args:
            base: the network that was fine-tuned, as it was before; its head may have other classes.
            finetuned: the network now: a module, a state_dict, a file (safetensors, or .pth of tensors alone), or a
                folder that transformers has saved.
            name: of the task.
            bytes: how many the file may have; by default a bit for each weight, and what norms and head take.
            adapter: instead of bytes, one form for all layers, such as ``SPLoRA(rank=8)`` or ``SPDelta(bits=1)``.
            batches: of inputs and class numbers; each layer is then fit to its own inputs.
            test: batches on which accuracy, or the loss and perplexity of what the network returns, is measured before
                and after; by default ``batches``.
            head: the modules that may have other classes; by default the classifier.
            example: an input, as for `trace`, to prune further.
            storage: how the task is stored, and what ``bytes`` are counted for.
            said: what else `Task.of` takes: ``classes``, ``preprocessing``, ``licence``, ``provenance``, ``metrics``.

        >>> base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        >>> tuned = {key: value + 0.01 * torch.randn_like(value) for key, value in base.state_dict().items()}
        >>> task = Task.from_checkpoint(base, tuned, bytes=2000)
        >>> len(task.to_bytes()) <= 2000
        True
        """
        from spalier.refitting.finetuned import from_checkpoint

        options: dict[str, Any] = {"name": name, "bytes": bytes, "adapter": adapter, "head": head, "said": said}
        return from_checkpoint(base, finetuned, batches=batches, test=test, example=example, storage=storage, **options)

    @staticmethod
    def from_peft(
        folder: str | os.PathLike[str], base: nn.Module, *, name: str = "lora", example: Any = None, **said: Any
    ) -> Task:
        """A LoRA that PEFT's ``save_pretrained`` has written, as it is; neither PEFT nor pickles are needed.

        Args:
            folder: has adapter_config.json and adapter_model.safetensors.
            base: the network that it was learned on; it is only read.
            name: of the task.
            example: an input, as for `trace`, to prune further.
            said: what else `Task.of` takes: ``classes``, ``metrics``, ``licence``.
        """
        from spalier.refitting.peft import from_peft

        return from_peft(folder, base, name=name, example=example, said=said)

    def to_peft(self, folder: str | os.PathLike[str], base: nn.Module | None = None) -> None:
        """Write an unpruned low-rank task as a folder that PEFT's ``PeftModel.from_pretrained`` loads.

        Embeddings and Hugging Face's Conv1D need the base, to be told apart.
        """
        from spalier.refitting.peft import to_peft

        to_peft(self, folder, base)

    @property
    def name(self) -> str:
        """What the task is called."""
        return self.info.name

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {self.info.learned:,} learned, stored as {self.info.storage})"

    def __str__(self) -> str:
        return str(self.info)

    def build(self, base: nn.Module, *, fold: bool = False, share: bool = False) -> nn.Module:
        """A plain, small, dense network in eval mode: the base cut down, the adapters added. The base is only read.

        Args:
            base: the network that the task was learned on; its head may have other classes.
            fold: fold every batch norm into the layer before it; an error where that would not be exact.
            share: whether tensors may lie in one piece of memory, and those that the task takes as they are may be
                the base's own: quicker and smaller, for a network that is only run, as a `Switcher` does.
        """
        from spalier.tasks.base import Base
        from spalier.tasks.build import build

        return build(self, Base(base), fold=fold, share=share)

    def apply_(self, base: nn.Module, *, example: Any = None) -> None:
        """Make the base the adapted network again, in place, to go on training; `detach_` gives the base back.

        Args:
            base: the network that the task was learned on.
            example: an input for it, as for `trace`, to go on pruning.
        """
        from spalier.tasks.apply import apply_

        apply_(self, base, example)

    def storage_costs(self, base: nn.Module, batches: Iterable[Any]) -> StorageCosts:
        """What each storage costs in accuracy and saves in bytes, on batches of inputs and class numbers. Print it."""
        from spalier.tasks.store import storage_costs

        return storage_costs(self, base, batches)

    def stored_as(self, storage: Storage) -> Task:
        """The task as it is after it has been stored so: ``"fp16"``, ``"bf16"``, ``"int8"`` lose precision.

        ``"int8"`` stores adapters as integers with a scale for each row, and the rest in half precision;
        ``"int8-all"`` stores all numbers so, and ``"int4-head"`` the weights of heads in 4 bits: for small networks,
        whose head is a large part of the file.
        """
        if storage not in STORAGES:
            raise ConfigError(f"storage is {storage!r}, expected one of {', '.join(map(repr, STORAGES))}")
        task = self
        if storage in _IN_BYTES:
            task = replace(self, table=self.table.in_bytes, **numbers.assembled(map(numbers.in_bytes, self.stored())))
        elif self.info.storage in _IN_BYTES:
            task = replace(self, table=self.table.in_numbers, **numbers.assembled(self._with_numbers()))
        packed = self.packed if storage == self.info.storage else None
        task = replace(task, info=replace(self.info, storage=storage), packed=packed)
        if storage == "exact":
            return task
        dtype = _DTYPES.get(storage, torch.float16)
        if storage in numbers.SMALL:
            packed = task._packed()
            task, values = replace(task, packed=packed), numbers.values_of_bytes(packed, *task._own_shapes)
        else:
            values = numbers.cast(task.values, dtype, "norms or head")
        return replace(
            task,
            adapters=numbers.cast(task.adapters, dtype, "adapters"),
            scales=numbers.cast_scales(task.scales, dtype, task.adapter_shapes, storage),
            values=values,
        )

    def to_bytes(self, *, storage: Storage = "exact") -> bytes:
        """The contents of the task's file."""
        task = self if storage == "exact" else self.stored_as(storage)
        raw, length = task.table.to_bytes()
        tensors = {
            "table": torch.frombuffer(bytearray(raw), dtype=torch.uint8),
            "masks": torch.from_numpy(task.table.pack(task.masks)),
            "adapters": task.adapters,
            "values": task.values,
        }
        description = {**task.info.to_dict(), "table": length}
        if task.scales.numel():
            tensors["scales"] = task.scales
        is_small = task.info.storage in numbers.SMALL
        if is_small:
            tensors["values"] = task._packed()
        if is_small and task.scales.numel():
            small = numbers.scales_in_bytes(task.scales)
            if torch.equal(numbers.scales_of_bytes(small), task.scales.float()):
                tensors["scales"] = small
        if task.codes.numel():
            tensors["codes"], before = numbers.deflated(task.codes)
            description |= {"codes": before} if before else {}
        if task.integers:
            # most are alike: the norms of a network have seen equally many batches
            description["integers"] = [[number, len(list(run))] for number, run in groupby(task.integers)]
        return format.pack_container(description, tensors, packed=is_small)

    @staticmethod
    def from_bytes(data: bytes) -> Task:
        """A task from the contents of its file, checked as `load` does."""
        return _parsed(*format.unpack_container(io.BytesIO(data), len(data)))

    def save(self, path: str | os.PathLike[str], *, storage: Storage = "exact") -> int:
        """Write NAME.task.safetensors, whole and durable or not at all; how many bytes it has.

        ``storage="exact"`` keeps every bit of a task that is in no smaller storage; those are `stored_as`'s.
        """
        target = _path(path)
        if not target.name.endswith(format.SUFFIX):
            raise TaskFileError("name", f"{target.name!a} does not end in {format.SUFFIX}, as task files do")
        format.check_name(target.name.removesuffix(format.SUFFIX))
        data = self.to_bytes(storage=storage)
        files.write(target, data)
        return len(data)

    @staticmethod
    def load(path: str | os.PathLike[str], *, limit: int = format.MAX_BYTES) -> Task:
        """Read a task file. No code of it is run, nothing in it is trusted; what is wrong is a `TaskFileError`.

        Args:
            path: one regular file, no link.
            limit: how many bytes it may have.
        """
        check_integer("limit", limit)
        with files.opened(_path(path), limit) as (file, size):
            contents = format.unpack_container(file, size)
        return _parsed(*contents)

    # what building, applying and checking need

    def _packed(self) -> Tensor:
        """Values in bytes. Rounding what was rounded could take another way, so what they were read from is kept."""
        shapes, kept = self._own_shapes, self.packed
        if kept is not None and torch.equal(numbers.values_of_bytes(kept, *shapes), self.values):
            return kept
        return numbers.values_in_bytes(self.values, *shapes)

    @cached_property
    def cut_rows(self) -> list[tuple[Row, Cut]]:
        """The rows of the table, with what the masks leave of each."""
        return self.table.cut(self.masks)

    @cached_property
    def adapter_shapes(self) -> Matrices:
        """The matrices of all adapters: how many rows each has, and how long these are."""
        return tuple([shape for _, cut in self.cut_rows for shape in cut.matrices])

    @property
    def _bytes_of_codes(self) -> int:
        """How many bytes all codes have."""
        return sum(shape.bytes for shape in self.adapter_shapes)

    @cached_property
    def spreads(self) -> list[tuple[Writer, Mask]]:
        """The free writers, with which of their stream's units that are left they write."""
        own = self.masks[len(self.table.streams) :]
        return [(w, mask[self.masks[w.stream]]) for w, mask in zip(self.table.writers, own, strict=True)]

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """Where each matrix begins: among the numbers, among the bytes of codes, and among the scales."""
        shapes = self.adapter_shapes
        begin, code = [0] * len(shapes), 0
        for number in sorted(range(len(shapes)), key=lambda i: shapes[i].levels):  # which keeps the table's order
            begin[number] = code
            code += shapes[number].bytes
        found, number, scale = [], 0, 0
        for shape, first in zip(shapes, begin, strict=True):
            found.append((number, first, scale))
            number, scale = number + (0 if shape.levels else shape.numel), scale + shape.scales
        return found

    def stored(self) -> Iterator[Stored]:
        """The matrices of all adapters, as numbers or as codes with their scales."""
        codes = self.codes.numpy()
        for shape, (number, code, scale) in zip(self.adapter_shapes, self.places, strict=True):
            if not shape.levels:
                yield Stored(self.adapters[number : number + shape.numel].view(shape.rows, shape.length))
                continue
            found = unpack(codes[code : code + shape.bytes], shape.numel, shape.levels)
            matrix = torch.from_numpy(found).view(shape.rows, shape.length)
            yield Stored(matrix, self.scales[scale : scale + shape.scales], shape.levels)

    def _with_numbers(self) -> Iterator[Stored]:
        """The same, with the numbers that ``int8`` has stored in bytes."""
        stored = self.stored()
        for row, cut in self.cut_rows:
            for matrix in islice(stored, len(cut.matrices)):
                yield matrix if isinstance(row.source, Delta) else numbers.as_numbers(matrix)

    @property
    def _own_shapes(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """What is left of each tensor whose values are the task's own, and its levels where heads are packed."""
        rows = [(row, cut.shape) for row, cut in self.cut_rows if row.source == "values" for _ in row.keys]
        shapes, heads = [shape for _, shape in rows], set(self.table.heads if self.info.storage == "int4-head" else ())
        coarse = [row.path in heads and len(shape) > 1 for row, shape in rows]
        return shapes, [numbers.HEAD_LEVELS if each else numbers.BYTE_LEVELS for each in coarse] if any(coarse) else []

    def _check_numbers(self) -> None:
        """Refuse numbers that the table has no place for, or that are not finite."""
        shapes = self.adapter_shapes
        sizes = {
            "adapters": sum(shape.numel for shape in shapes if not shape.levels),
            "codes": self._bytes_of_codes,
            "scales": sum(shape.scales for shape in shapes),
            "values": sum(map(math.prod, self._own_shapes[0])),
        }
        for name, expected in sizes.items():
            tensor: Tensor = getattr(self, name)
            if tensor.numel() != expected:
                raise TaskFileError("sizes", f"{name} has {tensor.numel():,} numbers, the table says {expected:,}")
            if not math.isfinite(format.largest(tensor)):
                raise TaskFileError("non-finite", f"{name} holds NaN or infinite numbers")
        codes = self.codes.numpy()
        for shape, (_, begin, _) in zip(shapes, self.places, strict=True):
            if shape.levels and not are_codes(codes[begin : begin + shape.bytes], shape.numel, shape.levels):
                raise TaskFileError("codes", f"codes of {shape.levels} levels hold digits that these do not have")
        if self.info.storage in _IN_BYTES and sizes["adapters"]:
            raise TaskFileError("metadata", f"the storage is said to be {self.info.storage}, and is not")


def _parsed(description: dict[str, Any], tensors: dict[str, Tensor]) -> Task:
    """A task of what a file holds, where all of it fits together."""
    version = format.known_version(description.get("format"))
    length, pairs = description.pop("table", None), description.pop("integers", [])
    length_of_codes = description.pop("codes", None) if version > 1 else None
    info = TaskInfo.from_dict(description)
    lacking = {"table", "masks", "adapters", "values"} - set(tensors)
    if lacking:
        raise TaskFileError("tensors", f"the file has no {', '.join(sorted(lacking))}")
    table = Table.from_bytes(tensors["table"].numpy().tobytes(), length, version)
    masks = table.unpack(tensors["masks"].numpy())
    empty, no_bytes = torch.empty(0, device="cpu"), torch.empty(0, dtype=torch.uint8, device="cpu")
    held: dict[str, Any] = {
        "adapters": tensors["adapters"],
        "codes": tensors.get("codes", no_bytes),
        "scales": tensors.get("scales", empty),
    }
    if version == 1:
        _check_version_1(info, tensors)
    elif held["adapters"].dtype == torch.int8:
        raise TaskFileError("dtype", "adapters is I8, expected floating point in format 2, whose codes are apart")
    is_small, in_bytes_now = version > 1 and info.storage in numbers.SMALL, tensors["values"].dtype == torch.int8
    if in_bytes_now != is_small:
        raise TaskFileError("dtype", f"values are {'' if in_bytes_now else 'not '}I8, with the storage {info.storage}")
    if held["scales"].dtype == torch.uint8:
        if not is_small:
            raise TaskFileError("dtype", f"scales are U8, with the storage {info.storage}")
        held["scales"] = numbers.scales_of_bytes(held["scales"])
    if version == 1 and info.storage == "int8":
        table = table.in_bytes
        # 8-bit integers as codes of 255 levels: one in a byte, so whatever matrices they are of
        codes = torch.from_numpy(pack(tensors["adapters"].numpy(), numbers.BYTE_LEVELS))
        held |= {"adapters": empty, "codes": codes}
    task = Task(info, table, masks, **held, values=tensors["values"], integers=numbers.expanded(pairs, table.integers))
    # nobody has seen the task yet, and what masks leave of its table takes as long to find as all the rest
    if length_of_codes is not None:
        vars(task)["codes"] = numbers.inflated(task.codes, length_of_codes, task._bytes_of_codes)
    if in_bytes_now:
        vars(task)["packed"] = tensors["values"]
        vars(task)["values"] = numbers.values_of_bytes(tensors["values"], *task._own_shapes)
    task._check_numbers()
    return task


def _check_version_1(info: TaskInfo, tensors: Mapping[str, Tensor]) -> None:
    """In format 1, 8-bit integers are numbers like others."""
    if "codes" in tensors:
        raise TaskFileError("tensors", "the file holds 'codes', which format 1 does not have")
    if "scales" in tensors and tensors["scales"].dtype != torch.float32:
        raise TaskFileError("dtype", "scales are not F32, as format 1 has them")
    if (tensors["adapters"].dtype == torch.int8) != (info.storage == "int8") or info.storage in numbers.SMALL:
        raise TaskFileError("metadata", f"the storage is said to be {info.storage}, and is not")


def own_tensors(task: Task, source: Literal["values", "integers"], flat: Tensor) -> Iterator[Tensor]:
    """A task's own tensors of one source, in the order of the table, as views of all their numbers."""
    shapes = [cut.shape for row, cut in task.cut_rows if row.source == source for _ in row.keys]
    if not any(shapes):  # counts of batches: a view of each would cost more than all the rest
        return iter(flat.unbind())
    parts = flat.split([math.prod(shape) for shape in shapes])
    return iter([p if len(s) == 1 else p.view(s) for p, s in zip(parts, shapes, strict=True)])


def _path(path: object) -> Path:
    try:
        return Path(path)  # type: ignore[arg-type]
    except TypeError:
        raise TaskFileError("name", f"the path is a {type(path).__name__}, expected a file's name") from None
