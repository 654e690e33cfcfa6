"""`Settings`: everything that says what a run does, as plain data; recipes for those that nobody gives.

One name in Python, in YAML and TOML files, and in ``--set NAME=VALUE``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import re
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import numpy as np

from spalier.adapters.kinds import ADAPTERS
from spalier.criteria.criterion import Criterion, Random
from spalier.criteria.score import CRITERIA, criterion_of
from spalier.errors import ConfigError, TaskFileError
from spalier.runs.narrow import Form, check_wide, form_of
from spalier.runs.recipes import BY_DATA, BY_RECIPES, filled_in, fitted, is_text
from spalier.runs.settings_files import plain, read_settings, write_yaml
from spalier.scheduling import agp
from spalier.tasks import check_name
from spalier.text import close_names

BY_RECIPE: Any = None
"""The default of settings that the recipe fills in."""
RESUMABLE = frozenset({"num_workers", "data_folder", "channels_last", "checkpoint_seconds", "trackers", "device"})
"""Settings that a run may be resumed with other values of: nothing changes, or rounding (channels_last, device)."""
SELECT_OPTIONS = ("normalise", "aggregate", "min_keep", "round_to", "protect", "rank")
_LONGEST_SUFFIX = "-1000000000B"  # what a task's name may have behind the run's


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run.

    Those that nobody gives are filled in by the recipe, and a run's file says what they came to.

    Args: Data
        data: digits, torchvision:NAME, hf:NAME, folder:PATH or text:PATH.
        data_folder: where data sets are; by default $SPALIER_DATA, or ./data.
        image_size: the side of the images in pixels; by default as the data set has it.
        classes: the classes to learn; by default all.
        max_train_samples: use at most so many training samples.
        validation_split: the share of the training samples to validate on.
        tokenizer: the network whose tokenizer texts go through; by default the run's own.
        max_length: tokens of a text at most; by default what the tokenizer says, at most 512.
        text_column: the column of texts, by default text, sentence...; with hf:NAME it says that the set has texts.
        label_column: the column of classes; by default label, class, category...
        labels: false to learn from the teacher alone, without labels.
        augment: shift and flip training images.
        skip_bad: leave out files that cannot be read, and list them in the results.
        num_workers: processes that load data; 0 loads in the run's own process.

    Args: Network
        network: resnet8 to resnet50, torchvision:NAME, timm:NAME, hf:NAME or module:function.
        network_options: more arguments of its constructor; ResNets get a small stem for up to 64 pixels.
        weights: a file of pretrained weights: safetensors, or .pth with nothing but tensors.
        pretrained: the library's own weights; true for resnet20, whose weights come with Spalier.
        head: the name of the classifier's module; by default it is looked for.
        start_task: a task file to prune further, instead of training a first block.

    Args: Adapter
        method: spdelta (fast), splora (paper), sppara, lora, or fine-pruning, which learns and stores all weights.
        rank: the adapters' rank; a float is a share of each layer's largest rank.
        adapter_options: more arguments of the adapter: bits, kernel, cap, init_range.
        learn: wide learns all kept weights and writes them narrow at each density; direct learns the narrow form.
        codes: the narrow forms to write: splora-r8, spdelta-1bit, bytes-1/20...; by default the method's.

    Args: Pruning
        criterion: what units are scored by: taylor, weight, gradient, lrp, random...
        criterion_options: more arguments of the criterion, such as literal.
        densities: the densities to prune to, falling; bytes where that is the budget.
        schedule: iterative or agp, instead of a list of densities.
        final_density: where a schedule ends.
        prune_step: how much the iterative schedule removes each time.
        prune_steps: in how many steps the agp schedule goes.
        budget: what densities are shares of: channels, weights, macs or latency; or bytes.
        ranking: global, or local to rank each layer by itself.
        writers: coupled, or free to let each layer of a residual stream keep channels of its own.
        select_options: more arguments of select: normalise, aggregate, min_keep, round_to, protect, rank.
        score_samples: how many training samples units are scored on.
        recovery: what each prune restores in closed form: none, norms (batch statistics) or all.
        recovery_samples: on how many samples; they are in memory all at once.

    Args: Training
        recipe: fast, for small data, or paper, section 4 of the paper.
        epochs: epochs of the first block, before the first prune.
        epochs_per_prune: epochs after each prune.
        final_epochs: epochs after the last prune; by default as after each.
        refit_epochs: epochs that each narrow form learns on, with the wide network as teacher.
        batch_size: samples in a batch, of all processes together.
        optimizer: sgd or adamw.
        lr: the learning rate at the start of each block.
        refit_lr: the learning rate of narrow forms; their factors and scales learn five times as fast.
        head_lr_scale: how many times as fast the head learns; 4 helps small networks and BERTs.
        scale_lr: take lr as that of a batch of 256, and scale it with the batch size.
        lr_schedule: step (a fifth after each quarter of a block), cosine or constant.
        warmup_epochs: epochs at the start of each block over which the learning rate rises.
        momentum: the momentum of SGD.
        weight_decay: weight decay.
        weight_decay_norms: whether norms and biases decay too.
        keep_optimizer: keep the optimizer's state across prunes, cut to size, instead of a new one.
        label_smoothing: label smoothing.
        grad_clip: the largest norm of the gradient.
        ema_decay: decay of a moving average of what is learned; a block ends with the average.
        validate_every: epochs between validations; 0 validates at the end of a block only.
        keep_best: end a block with its best epoch on the validation samples, not its last.
        teacher: a task file to learn from, or "self" for the network before its first prune.
        distill_weight: the teacher's share of the loss.
        temperature: the temperature of distillation.
        mixed_precision: no, bf16 or fp16.
        channels_last: the memory layout; by default channels last on CPUs only.
        deterministic: use PyTorch's deterministic algorithms.
        device: cpu, cuda, cuda:1, mps...; by default what there is.
        seed: seeds the data's order, augmentation, dropout and new weights.

    Args: Output
        name: what task files are called, before the density; by default the data's name.
        storage: how task files are stored: exact, fp32, fp16, bf16, int8, int8-all or int4-head.
        checkpoint_seconds: how much work may be lost at most when a run is killed.
        trackers: names that Accelerate knows; auto is TensorBoard where it is installed.

    >>> config = Settings(recipe="paper", data="torchvision:CIFAR10", rank=32)
    >>> config.epochs, config.lr, config.targets()[:3], len(config.targets())
    (30, 0.01, (0.95, 0.9, 0.85), 19)
    """

    data: str = "digits"
    data_folder: str | None = None
    image_size: int | None = None
    classes: tuple[str, ...] | None = None
    max_train_samples: int | None = None
    validation_split: float = 0.1
    tokenizer: str | None = None
    max_length: int | None = None
    text_column: str | None = None
    label_column: str | None = None
    labels: bool = True
    augment: bool = True
    skip_bad: bool = False
    num_workers: int = 0

    network: str = "resnet20"
    network_options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    pretrained: bool = BY_RECIPE
    head: str | None = None
    start_task: str | None = None

    method: Literal["splora", "spdelta", "sppara", "lora", "fine-pruning"] = BY_RECIPE
    rank: int | float = BY_RECIPE
    adapter_options: dict[str, Any] = field(default_factory=dict)
    learn: Literal["direct", "wide"] = BY_RECIPE
    codes: tuple[str, ...] | None = None

    criterion: str = "taylor"
    criterion_options: dict[str, Any] = field(default_factory=dict)
    densities: tuple[float, ...] | None = BY_RECIPE
    schedule: Literal["iterative", "agp"] | None = BY_RECIPE
    final_density: float | None = BY_RECIPE
    prune_step: float = 0.05
    prune_steps: int = 5
    budget: Literal["channels", "weights", "macs", "latency", "bytes"] = BY_RECIPE
    ranking: Literal["global", "local"] = "global"
    writers: Literal["coupled", "free"] = BY_RECIPE
    select_options: dict[str, Any] = field(default_factory=dict)
    score_samples: int = 1024
    recovery: Literal["none", "norms", "all"] = BY_RECIPE
    recovery_samples: int = 256

    recipe: Literal["fast", "paper"] = "fast"
    epochs: int = BY_RECIPE
    epochs_per_prune: int = BY_RECIPE
    final_epochs: int = BY_RECIPE
    refit_epochs: int = BY_RECIPE
    batch_size: int = BY_RECIPE
    optimizer: Literal["sgd", "adamw"] = BY_RECIPE
    lr: float = BY_RECIPE
    refit_lr: float = BY_RECIPE
    head_lr_scale: float = 1.0
    scale_lr: bool = BY_RECIPE
    lr_schedule: Literal["step", "cosine", "constant"] = BY_RECIPE
    warmup_epochs: float = BY_RECIPE
    momentum: float = 0.9
    weight_decay: float = BY_RECIPE
    weight_decay_norms: bool = BY_RECIPE
    keep_optimizer: bool = False
    label_smoothing: float = 0.0
    grad_clip: float | None = BY_RECIPE
    ema_decay: float | None = None
    validate_every: int = 0
    keep_best: bool = False
    teacher: str | None = None
    distill_weight: float = 0.5
    temperature: float = 2.0
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    channels_last: bool | None = None
    deterministic: bool = False
    device: str | None = None
    seed: int = 0

    name: str = BY_RECIPE
    storage: Literal["exact", "fp32", "fp16", "bf16", "int8", "int8-all", "int4-head"] = BY_RECIPE
    checkpoint_seconds: float = 60.0
    trackers: tuple[str, ...] = ("auto",)

    filled: InitVar[Mapping[str, Any] | None] = None
    """What the recipe came to, of a run that was begun: used instead of asking the recipe again."""

    def __post_init__(self, filled: Mapping[str, Any] | None) -> None:
        given = {each.name: checked(each.name, getattr(self, each.name)) for each in fields(self)}
        if filled is None:
            filled = _where_missing(given, filled_in(given))
        else:
            check_known(filled, "filled")
            filled = {name: checked(name, value) for name, value in filled.items()}
        for name, value in {**given, **filled, "_given": copy.deepcopy(given), "_filled": filled}.items():
            object.__setattr__(self, name, value)
        _check(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The settings in a YAML or TOML file, or those of a run's folder."""
        file = Path(path) / "run.yaml" if Path(path).is_dir() else Path(path)
        return cls.from_dict(read_settings(file), str(file))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str = "the mapping") -> Self:
        """Settings by name; unknown names are refused, with what they may have meant."""
        check_known(given, where)
        return cls(**given)

    @property
    def given(self) -> dict[str, Any]:
        """The settings as they were given, None where the recipe fills them in."""
        return copy.deepcopy(dict(vars(self)["_given"]))

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed. Those that nobody gave follow the recipe again.

        >>> Settings(rank=8).replace(seed=3).seed
        3
        """
        check_known(changes, "what was given")
        return type(self)(**{**self.given, **changes})

    def fitted(self, samples: int, side: int, parameters: int | None = None) -> Self:
        """A copy with what follows from the data and the network, for settings that nobody gave.

        >>> Settings().batch_size, Settings().fitted(samples=100, side=32).batch_size
        (64, 8)
        """
        known = {**self.given, "method": self.method, "learn": self.learn}
        found = _where_missing(self.given, fitted(known, samples, side, parameters))
        return self.with_filled(self.filled_values | found)

    def with_filled(self, filled: Mapping[str, Any]) -> Self:
        """A copy whose recipe came to this."""
        return type(self)(**self.given, filled=filled)

    def with_paths(self) -> Self:
        """A copy whose files and folders are found from any working directory."""
        changed: dict[str, Any] = {}
        for name in ("weights", "start_task", "teacher", "data_folder"):
            value = self.given[name]
            if value not in (None, "self"):
                changed[name] = str(Path(value).expanduser().absolute())
        for name in ("data", "network", "tokenizer"):
            kind, colon, path = (self.given[name] or "").partition(":")
            if name == "tokenizer" and not colon:  # a folder, or a name on the hub
                kind, path = "", kind
            is_local = kind in ("hf", "") and bool(path) and Path(path).is_dir()  # else a name on the hub
            if kind in ("folder", "text") or is_local:
                changed[name] = f"{kind}{colon}{Path(path).expanduser().absolute()}"
        is_same = all(value == self.given[name] for name, value in changed.items())
        return self if is_same else type(self)(**{**self.given, **changed}, filled=self.filled_values)

    @property
    def filled_values(self) -> dict[str, Any]:
        """What the recipe came to."""
        return dict(vars(self)["_filled"])

    def to_yaml(self) -> str:
        """The settings as `load` reads them: what was given, group by group, then what the recipe filled in."""
        parts = []
        for group, entries in setting_groups().items():
            parts.append(f"# {group}\n" + write_yaml({name: self.given[name] for name, _, _ in entries}))
        filled = textwrap.indent(write_yaml(self.filled_values), "  ")
        return "\n".join([*parts, f"# what the recipe filled in\nfilled:\n{filled}"])

    def targets(self) -> tuple[float, ...]:
        """The densities after the first block, falling."""
        if self.densities is not None:
            return self.densities
        end = self.final_density
        assert end is not None
        if self.schedule == "agp":
            found = [agp(i / self.prune_steps, end=end) for i in range(1, self.prune_steps + 1)]
        else:
            steps = math.ceil((1 - end) / self.prune_step - 1e-9)  # 0.95 / 0.05 is a little more than 19
            found = [max(end, 1 - i * self.prune_step) for i in range(1, steps + 1)]
        return tuple(round(density, 6) for density in found if density < 1)

    def epochs_of(self, block: int, form: int = 0) -> int:
        """How many epochs a block has, or one of its narrow forms. Block 0 comes before the first prune."""
        if form:
            return self.refit_epochs if self.forms[form - 1].name != "wide" else 0
        if block == 0 and self.start_task is not None:
            return 0
        if block == len(self.targets()) > 0:
            return self.final_epochs
        return self.epochs if block == 0 else self.epochs_per_prune

    def make_adapter(self) -> Any:
        """The adapter of the method, with its rank and options."""
        options = dict(self.adapter_options)
        if self.method in ("splora", "lora"):
            options["rank"] = self.rank
        return _made(ADAPTERS[self.method], options, f"adapter_options do not fit {self.method}")

    def make_criterion(self, block: int) -> Criterion:
        """The criterion of one block. Random scores differ from block to block."""
        options = dict(self.criterion_options)
        if CRITERIA[self.criterion] is Random:
            options.setdefault("seed", seed_of(self.seed, "random", block))
        made: Criterion = _made(CRITERIA[self.criterion], options, f"criterion_options do not fit {self.criterion}")
        return made

    @property
    def is_text(self) -> bool:
        """Whether the data are texts."""
        return is_text(vars(self))

    @property
    def forms(self) -> list[Form]:
        """The narrow forms that are written at each density; none where the narrow form is learned directly."""
        return [form_of(name) for name in self.codes or ()] if self.learn == "wide" else []

    @property
    def initial_lr(self) -> float:
        """The learning rate at the start of a block."""
        return self.lr * self.batch_size / 256 if self.scale_lr else self.lr


def _made(kind: Callable[..., Any], options: Mapping[str, Any], misfit: str) -> Any:
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(f"{misfit}: {error}") from error


def setting_groups() -> dict[str, list[tuple[str, Any, str]]]:
    """All settings by group: the name of each, its default and a line of help.

    >>> setting_groups()["adapter"][1]
    ('rank', 'by recipe', "the adapters' rank; a float is a share of each layer's largest rank.")
    """
    defaults = Settings().given | dict.fromkeys((*BY_RECIPES, "refit_lr", "pretrained"), "by recipe")
    groups: dict[str, list[tuple[str, Any, str]]] = {}
    entries: list[tuple[str, Any, str]] = []
    for line in (Settings.__doc__ or "").splitlines():
        if heading := re.fullmatch(r" *Args: (\w+)", line):
            entries = groups.setdefault(heading[1].lower(), [])
        elif entry := re.fullmatch(r" {8}(\w+): (.+)", line):
            entries.append((entry[1], defaults[entry[1]], entry[2]))
    # python -OO strips docstrings, and with them groups and help
    return groups or {"settings": [(name, default, "") for name, default in defaults.items()]}


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits that depends on every part: randomness follows from where a run is, with no state to save."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def differences(was: Settings, now: Settings, ignored: frozenset[str] = RESUMABLE) -> dict[str, str]:
    """The settings that differ, in words, by name.

    >>> differences(Settings(rank=4), Settings(rank=8))
    {'rank': 'rank was 4 and is 8'}
    """
    names = [each.name for each in fields(was) if each.name not in ignored]
    # what nobody gave was fitted to the data, which have a check of their own, or is new since
    later = BY_DATA | {n for n in names if was.given[n] is None and n not in was.filled_values}
    names = [n for n in names if n not in later or was.given[n] != now.given[n]]
    return {
        name: f"{name} was {getattr(was, name)!r} and is {getattr(now, name)!r}"
        for name in names
        if plain(getattr(was, name)) != plain(getattr(now, name))
    }


def _where_missing(given: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe may fill in: nothing that was given, but for tables, which it adds to."""
    return {name: value for name, value in filled.items() if given[name] is None or isinstance(given[name], dict)}


# checks


_RANGES: list[tuple[str, Callable[[float], bool], tuple[str, ...]]] = [
    ("at least 1", lambda x: x >= 1, ("prune_steps", "score_samples", "recovery_samples", "batch_size")),
    ("at least 2", lambda x: x >= 2, ("max_length",)),
    ("at least 0", lambda x: x >= 0, ("epochs", "epochs_per_prune", "final_epochs", "refit_epochs", "num_workers")),
    ("at least 0", lambda x: x >= 0, ("validate_every", "weight_decay", "warmup_epochs", "checkpoint_seconds")),
    ("more than 0", lambda x: x > 0, ("lr", "refit_lr", "head_lr_scale", "grad_clip", "temperature")),
    ("more than 0", lambda x: x > 0, ("image_size", "max_train_samples")),
    ("a number in [0, 1)", lambda x: 0 <= x < 1, ("validation_split", "momentum", "label_smoothing")),
    ("a number in (0, 1]", lambda x: 0 < x <= 1, ("prune_step", "final_density", "distill_weight")),
    ("a number in (0, 1)", lambda x: 0 < x < 1, ("ema_decay",)),
    ("a number from 0 to less than 2**63", lambda x: 0 <= x < 2**63, ("seed",)),
]


def _check(config: Settings) -> None:
    """Refuse settings that no run can have, before anything is set up."""
    for expected, fits, names in _RANGES:
        for name in names:
            value = getattr(config, name)
            if value is not None and not fits(value):
                raise ConfigError(f"{name} is {value!r}, expected {expected}")
    try:
        check_name(config.name + _LONGEST_SUFFIX)
    except TaskFileError as error:
        raise ConfigError(f"name: {error}") from error
    criterion_of(config.criterion)
    for name in sorted(set(config.select_options) - set(SELECT_OPTIONS)):
        raise ConfigError(f"select_options has {name!r}, expected some of {', '.join(SELECT_OPTIONS)}")
    for name in sorted({"name", "classes", "weights", "pretrained", "seed"} & set(config.network_options)):
        raise ConfigError(f"network_options has {name!r}, which is a setting of the run; set it there")
    if config.pretrained and config.weights is not None:
        raise ConfigError("weights and pretrained are both given; expected one of them")
    _check_densities(config)
    check_wide(config)
    knows_nothing = config.teacher == "self" and config.start_task is None
    if not config.labels and (config.teacher is None or knows_nothing):
        raise ConfigError('labels is false; expected a teacher: a task file, or "self" together with start_task')
    if config.keep_best and not config.validation_split:
        raise ConfigError("keep_best is true, which needs validation_split above 0")
    config.make_adapter()
    config.make_criterion(0)


def _check_densities(config: Settings) -> None:
    densities = config.densities
    if densities is None:
        if config.budget == "bytes":
            raise ConfigError("the budget is bytes, so densities has to list them, such as [300000, 100000]")
        return
    if config.schedule is not None or config.final_density is not None:
        raise ConfigError("densities is given, and schedule or final_density too; expected one or the other")
    for density in densities:
        if config.budget == "bytes" and (density < 1 or density != int(density)):
            raise ConfigError(f"densities has {density!r}, expected whole numbers of bytes")
        if config.budget != "bytes" and not 0 < density < 1:
            raise ConfigError(f"densities has {density!r}, expected shares above 0 and below 1")
    if list(densities) != sorted(set(densities), reverse=True):
        raise ConfigError(f"densities is {list(densities)}, expected falling numbers, each once")


def check_known(given: Mapping[str, Any], where: str) -> None:
    """Refuse names that are no settings, with the nearest that is one."""
    known = [each.name for each in fields(Settings)]
    for name in given:
        if name not in known and name != "filled":
            close = close_names(name, known)
            hint = f"did you mean {close[0]!r}?" if close else f"expected some of {', '.join(known)}"
            raise ConfigError(f"{where} has {name!r}, which is no setting; {hint}")


# types by annotation


_HINTS = get_type_hints(Settings)


def checked(name: str, value: Any) -> Any:
    """A value as the setting's annotation says: lists become tuples, numbers of numpy plain ones."""
    if value is None and getattr(Settings, name, ...) is None:  # the default; tables have none on the class
        return None
    try:
        return _converted(_HINTS[name], value)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}, expected {_words(_HINTS[name])}") from None


def _converted(expected: Any, value: Any) -> Any:
    """The value as a type; ValueError where it is of another one."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        for each in arguments:
            with contextlib.suppress(ValueError):
                return _converted(each, value)
    elif origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_converted(arguments[0], each) for each in value)
    elif origin is dict:
        if isinstance(value, Mapping):
            with contextlib.suppress(TypeError):
                return plain(dict(value))
    else:
        return _scalar(expected, value)
    raise ValueError


def _scalar(expected: Any, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if expected is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if expected is float:
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
            value = float(value)  # YAML takes 1e-3 for text
        if isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
    if type(value) is not expected or (expected is float and not math.isfinite(value)):
        raise ValueError
    return value


def _words(expected: Any) -> str:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list of {_words(arguments[0])}"
    if expected is types.NoneType:
        return "nothing"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(expected, "a table of plain values")
