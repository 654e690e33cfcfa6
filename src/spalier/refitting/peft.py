"""LoRAs of Hugging Face's PEFT as tasks, and tasks as LoRAs: its folders are read and written here, without PEFT.

``scaling * B A`` of PEFT is ``up^T down`` of Spalier: ``down`` is A, and ``up`` is B, transposed and scaled. A folder
may come from a stranger: only JSON and safetensors are read, and what is not understood is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spalier import files
from spalier.adapters.attach import attach_with_
from spalier.adapters.attachment import attachment_of
from spalier.adapters.geometry import Geometry, geometries, is_transformers_conv1d, tensors_of
from spalier.adapters.kinds import ByLayer, LowRank, SPLoRA
from spalier.errors import ConfigError, SpalierError, TaskFileError, WeightsError
from spalier.models import read_weights
from spalier.refitting.finetuned import resized_copy
from spalier.tasks import rows
from spalier.tasks.base import Base
from spalier.tasks.build import check_base
from spalier.tasks.format import MAX_BYTES, MAX_HEADER, dump_json, parse_json, quoted
from spalier.tasks.task import Task, own_tensors
from spalier.text import first_few
from spalier.tracing import trace

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "init_lora_weights"}
# about training, or about which layers get an adapter: the file's own tensors tell
_IDLE = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"),
    *("lora_bias", "lora_dropout", "fan_in_fan_out", "runtime_config", "ensure_weight_tying", "qalora_group_size"),
    *("eva_config", "corda_config", "loftq_config", "lora_ga_config", "velora_config", "megatron_core"),
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_MERGE = "merge it in PEFT (merge_and_unload), and pass that network to Task.from_checkpoint"


# from PEFT


def from_peft(
    folder: str | PathLike[str], base: nn.Module, *, name: str, example: Any, said: Mapping[str, Any]
) -> Task:
    """What `Task.from_peft` does."""
    known, place = Base(base), Path(folder)
    config = _config(place)
    found = _Found(known, config, _tensors(place))
    net = resized_copy(base, found.values)
    structure = None if example is None else trace(net, example)
    heads = sorted({path for path in map(_module_of, found.values) if found.is_head(path)})
    also = {key for key in found.values if _module_of(key) not in heads and known.flags[key] is not None}
    chosen = {_module_of(weight) for weight in found.factors}
    try:
        attach_with_(net, found.adapter(), lambda path, _: path in chosen, heads or None, norms=False, also=also)
    except SpalierError as error:
        raise WeightsError(f"the adapter in {place} does not fit the base: {error}") from error
    attachment = attachment_of(net)
    attachment.structure = structure
    with torch.no_grad():
        for entry in attachment.updated:
            assert isinstance(entry.update, LowRank)
            down, up = found.factors[f"{entry.name}.{entry.weight}" if entry.name else entry.weight]
            entry.update.down.copy_(down.reshape(entry.update.down.shape))
            entry.update.up.copy_(up)
        for key, tensor in tensors_of(net).items():
            if key in found.values:
                tensor.copy_(found.values[key])
    return Task.of(net, name, **said)


def _config(folder: Path) -> dict[str, Any]:
    """What the folder says of its adapter, as far as it is a LoRA that a task can hold."""
    with files.opened(_inside(folder, CONFIG)) as (file, size):
        if size > MAX_HEADER:
            raise WeightsError(f"{folder / CONFIG} has {size:,} bytes, expected a few hundred")
        found = parse_json("header", CONFIG, bytes(files.read_exactly(file, size)))
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        kind = found.get("peft_type") if isinstance(found, dict) else type(found).__name__
        raise WeightsError(f"{folder / CONFIG} describes {quoted(kind)}, expected the peft_type LORA; {_MERGE}")
    others = [key for key, value in found.items() if key not in _READ | _IDLE and value not in (None, False, {}, [])]
    if others:
        raise WeightsError(f"{folder / CONFIG} sets {first_few(others)}, which no task can hold; {_MERGE}")
    if found.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise WeightsError(
            f"{folder / CONFIG} has init_lora_weights={quoted(found['init_lora_weights'])}, which changes the base's "
            f"weights; save it in PEFT with path_initial_model_for_weight_conversion=, or {_MERGE}"
        )
    patterns = [found.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    own = [number for pattern in patterns if type(pattern) is dict for number in pattern.values()]
    numbers = [found.get("r", 8), found.get("lora_alpha", 8), *own]
    if not all(type(p) is dict for p in patterns) or not all(_is_positive(number) for number in numbers):
        raise WeightsError(f"{folder / CONFIG}: r, lora_alpha and their patterns are not positive numbers")
    return found


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1e6  # type: ignore[operator]


def _inside(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise WeightsError(f"there is no folder {str(folder)!a}; expected one that PEFT's save_pretrained has written")
    if not (folder / name).is_file():
        why = "expected what PEFT's save_pretrained writes"
        if (folder / "adapter_model.bin").exists():
            why = "it has adapter_model.bin, a pickle, which is never loaded: save it again as safetensors"
        raise WeightsError(f"{str(folder)!a} has no {name}; {why}")
    return (folder / name).resolve()  # the hub's cache has links to files


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors by the names that they have in the base, with PEFT's own parts behind those."""
    path = _inside(folder, TENSORS)
    with files.opened(path) as (_, size):
        if size > MAX_BYTES:
            raise WeightsError(f"{folder / TENSORS} has {size:,} bytes, more than the limit of {MAX_BYTES:,}")
    found = {}
    for key, tensor in read_weights(path).items():
        if not tensor.is_floating_point() and tensor.numel() > 1:
            raise WeightsError(f"{folder / TENSORS}: {quoted(key)} is {tensor.dtype}, expected floating point")
        found[key.removeprefix(_PREFIX).replace(".base_layer.", ".")] = tensor
    return found


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


_PART = re.compile(r"(?:(.+)\.)?lora_(A\.weight|B\.weight|B\.bias|embedding_A|embedding_B|\w+.*)")


@dataclass
class _Found:
    """What a folder holds, sorted by what it is for."""

    base: Base
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(down, up) of each weight that is adapted."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """What learned in full: heads, biases, norms."""

    def __post_init__(self) -> None:
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.tensors.items():
            part = _PART.fullmatch(key)
            if part is not None and key not in self.base.ties:
                parts.setdefault(part[1] or "", {})[part[2]] = tensor
            else:
                self._take_value(key, tensor)
        if not parts:
            raise WeightsError(f"the adapter has no LoRA at all, but {first_few(list(self.tensors)) or 'nothing'}")
        for path, own in parts.items():
            self._take_factors(path, own)

    def is_head(self, path: str) -> bool:
        """Whether a module learned as a whole, and may have other classes than the base's: no norm, no single bias."""
        weight = f"{path}.weight" if path else "weight"
        return weight in self.values and bool(geometries(self.base.modules[path]))

    def adapter(self) -> SPLoRA | ByLayer:
        """One for all layers where they are alike."""
        each = {name: SPLoRA(rank=len(down), kernel="full") for name, (down, _) in self.factors.items()}
        return next(iter(each.values())) if len(set(each.values())) == 1 else ByLayer(each)

    def _take_value(self, key: str, tensor: Tensor) -> None:
        first = self.base.ties.get(key)
        if first is None:
            raise WeightsError(f"the adapter has {quoted(key)}, and the base no such layer; expected its own base")
        own = self.base.tensors[first].detach()
        is_classes = bool(geometries(self.base.modules[_module_of(first)])) and tensor.dim() == own.dim()
        if tensor.shape != own.shape and not (is_classes and tensor.shape[1:] == own.shape[1:]):
            raise self._misfit(key, tensor.shape, tuple(own.shape))
        if tensor.shape != own.shape or not torch.equal(own.to(tensor.dtype), tensor.to(own.device)):
            self.values[first] = tensor.to(own.device, own.dtype)  # PEFT saves embeddings along that are the base's

    def _take_factors(self, path: str, parts: dict[str, Tensor]) -> None:
        weight, geometry = self._weight(path)
        names = ("embedding_A", "embedding_B") if "embedding_A" in parts else ("A.weight", "B.weight")
        if not set(names) <= set(parts) <= {*names, "B.bias"}:
            raise WeightsError(
                f"{quoted(path)} has lora_{', lora_'.join(sorted(parts))}, expected lora_A and lora_B; {_MERGE}"
            )
        (a, b), like = (parts[name] for name in names), self.base.tensors[weight]
        rank = self._of_pattern("rank_pattern", path, self.config.get("r", 8))
        ones = (1,) * len(geometry.kernel)
        for key, found, shape in (
            (names[0], a, (rank, geometry.inputs, *geometry.kernel)),
            (names[1], b, (geometry.outputs, rank, *ones)),
        ):
            if tuple(found.shape) != shape:
                raise self._misfit(f"{path}.lora_{key}", found.shape, shape)
        alpha = self._of_pattern("alpha_pattern", path, self.config.get("lora_alpha", 8))
        scaling = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        a, b = (factor.to(like.device, torch.promote_types(like.dtype, torch.float32)) for factor in (a, b))
        self.factors[weight] = a.flatten(1), b.flatten(1).T * scaling
        if "B.bias" in parts:
            self._add_bias(path, parts["B.bias"], scaling)

    def _add_bias(self, path: str, bias: Tensor, scaling: float) -> None:
        key = f"{path}.bias" if path else "bias"
        own = self.values.get(key, self.base.tensors.get(key))
        if own is None or own.shape != bias.shape:
            raise WeightsError(f"{quoted(path)} has a lora_bias, and the layer no bias of that length; {_MERGE}")
        self.values[key] = own.detach() + scaling * bias.to(own)

    def _weight(self, path: str) -> tuple[str, Geometry]:
        """The one weight of a layer, by its first name, and how it maps channels."""
        module = self.base.modules.get(path)
        try:
            found = {} if module is None else geometries(module)
        except SpalierError as error:
            raise WeightsError(f"{quoted(path)} cannot be adapted: {error}") from error
        if len(found) != 1:
            kind = "no such layer" if module is None else f"a {type(module).__name__} there"
            raise WeightsError(f"the adapter is for {quoted(path)}, and the base has {kind}; expected its own base")
        ((key, geometry),) = found.items()
        if geometry.groups > 1 or (geometry.inputs_first and geometry.kernel):
            raise WeightsError(f"{quoted(path)} is a grouped or transposed convolution, which no task takes from PEFT")
        return self.base.ties[f"{path}.{key}" if path else key], geometry

    def _of_pattern(self, key: str, path: str, default: Any) -> Any:
        """A number for a layer: as PEFT finds it, by the first pattern that the end of its name matches."""
        for pattern, value in (self.config.get(key) or {}).items():
            # a stranger's pattern may not take for ever
            if len(pattern) > 300 or re.search(r"\)[*+{?]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3:
                raise WeightsError(f"{key} has the pattern {quoted(pattern)}, expected a layer's name, or a simple one")
            try:
                if re.match(rf"(.*\.)?({pattern})$", path):
                    return value
            except re.error as error:
                raise WeightsError(f"{key} has the pattern {quoted(pattern)}, which is none: {error}") from error
        return default

    def _misfit(self, key: str, found: Any, expected: Any) -> WeightsError:
        return WeightsError(f"{quoted(key)} has shape {tuple(found)}, expected {tuple(expected)} on this base")


# to PEFT


def to_peft(task: Task, folder: str | PathLike[str], base: nn.Module | None) -> None:
    """What `Task.to_peft` does."""
    if not all(mask.all() for mask in task.masks):
        raise ConfigError("the task is pruned, and PEFT knows no pruned layers; task.build(base) makes the network")
    known = None if base is None else Base(base)
    if known is not None:
        check_base(task, known)
    written = _Written(known)
    stored, values = task.stored(), own_tensors(task, "values", task.values)
    integers = own_tensors(task, "integers", torch.tensor(task.integers, dtype=torch.int64))
    for row, cut in task.cut_rows:
        for name in row.names:
            if row.source in ("values", "integers"):
                written.own[name] = next(values if row.source == "values" else integers)
            elif isinstance(row.source, rows.LowRank):
                numbers = [
                    m.values if m.scale is None else m.values * m.scale[:, None]
                    for m in (next(stored) for _ in cut.matrices)
                ]
                written.add_factors_(name, row, *numbers)
            elif row.source != "base":
                raise ConfigError(
                    f"{name} is stored as {type(row.source).__name__}, and PEFT knows low rank alone; apply_ the task, "
                    "refit_(net, SPLoRA(rank=8)), and take Task.of that"
                )
    _write(Path(folder), written)


@dataclass
class _Written:
    """What goes into a folder."""

    base: Base | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)
    transposed: bool = False

    def add_factors_(self, name: str, row: rows.Row, down: Tensor, up: Tensor) -> None:
        """The factors of a weight, in the shapes that PEFT has for its layer."""
        assert isinstance(row.source, rows.LowRank)
        path, _, key = name.rpartition(".")
        kernel = row.shape[2:]
        if key != "weight" or row.source.groups > 1 or (row.source.inputs_first and kernel):
            raise ConfigError(
                f"{name} is of a layer that PEFT has no LoRA for: grouped, transposed, or attention's own"
            )
        prefix, suffixes = f"{_PREFIX}{path}." if path else _PREFIX, ("lora_A.weight", "lora_B.weight")
        if row.source.inputs_first:
            if self.base is None:
                raise ConfigError(f"{name} is of an embedding, or of a Conv1D; pass base=, which tells")
            is_linear = is_transformers_conv1d(self.base.modules[path])
            self.transposed = self.transposed or is_linear
            suffixes = suffixes if is_linear else ("lora_embedding_A", "lora_embedding_B")
        rank = len(down)
        if kernel and row.source.taps == 1:  # of the centre tap alone
            whole = down.new_zeros(rank, row.shape[1], *kernel)
            tap: tuple[Any, ...] = (..., *(k // 2 for k in kernel))
            whole[tap] = down
            down = whole
        down, up = down.reshape(rank, -1, *kernel), up.T.reshape(-1, rank, *(1 for _ in kernel))
        self.tensors |= {prefix + suffixes[0]: down.contiguous(), prefix + suffixes[1]: up.contiguous()}
        self.ranks[path] = rank

    def modules_to_save(self) -> list[str]:
        """Modules that learned as a whole; PEFT finds them by how their names end."""
        found = sorted({_module_of(name) for name in self.own if name.endswith("weight")} - set(self.ranks))
        every = set(self.ranks) | (set() if self.base is None else set(self.base.modules))
        confused = [f"{other} for {path}" for path in found for other in every - set(found) if other.endswith(path)]
        if confused:
            raise ConfigError(
                f"PEFT would take {first_few(confused)}, as it looks at the ends of names; rename the head"
            )
        return found

    def config(self) -> dict[str, Any]:
        """What PEFT reads first."""
        if not self.ranks:
            raise ConfigError("the task has no low-rank adapter that PEFT could take")
        ((rank, _),) = Counter(self.ranks.values()).most_common(1)
        others = {f"^{re.escape(path)}": each for path, each in self.ranks.items() if each != rank}
        learned = {_module_of(name) for name in self.own}
        return {
            "peft_type": "LORA",
            "task_type": None,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": rank,  # so that nothing is scaled
            "rank_pattern": others,
            "alpha_pattern": others,
            "lora_dropout": 0.0,
            "target_modules": "|".join(re.escape(path) for path in self.ranks),  # one pattern: names in full
            "modules_to_save": self.modules_to_save() or None,
            "bias": "lora_only" if learned & set(self.ranks) else "none",
            "fan_in_fan_out": self.transposed,
        }


def _write(folder: Path, written: _Written) -> None:
    from safetensors.torch import save

    config = written.config()
    tensors = dict(written.tensors)
    for name, tensor in written.own.items():
        path, _, key = name.rpartition(".")
        inner = f"{path}.base_layer.{key}" if path in written.ranks else name
        tensors[_PREFIX + inner] = tensor.clone().contiguous()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TaskFileError("write", f"{str(folder)!a} cannot be made: {files.reason(error)}") from error
    files.write(folder / TENSORS, save(tensors, {"format": "pt"}))
    files.write(folder / CONFIG, json.dumps(json.loads(dump_json(config)), indent=2).encode())
