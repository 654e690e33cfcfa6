"""`Settings`: everything that says what a run does, as plain data."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from spalier.adapters.kinds import ADAPTERS
from spalier.criteria.criterion import Criterion, Random
from spalier.criteria.score import CRITERIA
from spalier.errors import ConfigError, TaskFileError
from spalier.runs.fields import check_known, checked, read, written
from spalier.runs.recipes import RECIPES, settings
from spalier.runs.seeds import seed_of
from spalier.scheduling import agp, iterative
from spalier.tasks.format import check_name

SELECT_OPTIONS = ("normalise", "aggregate", "min_keep", "round_to", "protect", "rank")
FILLED = frozenset({"name", "network_options", "final_epochs"}.union(*RECIPES.values()))
"""Settings that follow from others where nobody gives them."""
SMALL_DATA = frozenset(
    f"torchvision:{name}"
    for name in ("CIFAR10", "CIFAR100", "FashionMNIST", "KMNIST", "MNIST", "SVHN", "USPS")
) | {"digits"}
"""Data sets whose own images are of up to 64 pixels."""
STEMMED = ("resnet18", "resnet34", "resnet50")
"""Networks that have two stems."""
FREE = frozenset({"num_workers", "cache_folder", "data_folder", "checkpoint_seconds", "trackers"})
"""Settings that do not change what comes out, and may differ when a run goes on."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run. Those that are None are the recipe's; a run writes down what they came to.

    Args:
        recipe: "fast", for small data, or "paper", section 4 of the paper.
        name: what task files are called, before the density; by default the data's name.
        network: resnet8, resnet20, resnet18, resnet34, resnet50, torchvision:NAME, timm:NAME, hf:NAME or
            module:function.
        network_options: what else its constructor takes. Built-in networks get the CIFAR stem for images of up to
            64 pixels, where they have two.
        weights: a file of pretrained weights: safetensors, or .pth with tensors alone.
        head: the classifier's module; by default it is looked for.
        start_task: a task file to begin with, instead of a first block.
        data: digits, torchvision:NAME, hf:NAME or folder:PATH.
        data_folder: where data sets lie; by default the environment variable SPALIER_DATA, or ./data.
        image_size: the side of the images.
        classes: the classes to learn, of those that the data have; by default all.
        max_train_samples: at most so many training samples.
        validation_split: the share of the training samples that every choice is made on.
        labels: whether there are labels; without them the network learns from its teacher alone.
        augment: whether training images are shifted and flipped.
        skip_bad: whether to leave out files that cannot be read, and write down which.
        cache_folder: a folder for decoded images; by default they are kept in memory.
        num_workers: processes that load data; 0 for none.
        method: splora, sppara, lora or fine-pruning, the baseline that learns all weights.
        rank: the adapters' rank, as for `SPLoRA`.
        adapter_options: what else the adapter takes: kernel, cap, init_range.
        criterion: what units are scored by, as for `score`.
        criterion_options: what else the criterion takes, such as literal.
        schedule: "iterative", "agp" or "one_shot".
        final_density: the last density.
        prune_step: how much the iterative schedule takes each time.
        prune_steps: in how many steps the cubic one goes.
        densities: the densities themselves, falling, instead of a schedule; bytes where that is the budget.
        budget: what densities are of: channels, weights, macs, latency or bytes.
        ranking: "global" or "local".
        writers: "coupled", or "free": each layer of a residual stream keeps channels of its own.
        select_options: what else `select` takes: normalise, aggregate, min_keep, round_to, protect, rank.
        score_samples: how many training samples units are scored on.
        recovery_samples: how many the network is recovered on; they are in memory all at once.
        recovery: restored in closed form after each prune: "none", "norms" (statistics of batch norms) or "all".
        epochs: of the first block.
        epochs_per_prune: after each prune.
        final_epochs: after the last one; by default as after each.
        batch_size: samples in a batch, of all processes together.
        optimizer: "sgd" or "adamw".
        lr: the learning rate.
        scale_lr: whether it is for a batch of 256, and grows with the batch.
        momentum: of SGD.
        weight_decay: weight decay.
        weight_decay_norms: whether norms and biases decay too.
        lr_schedule: "step" (a fifth after each quarter of a block), "cosine" or "constant".
        warmup_epochs: epochs over which the rate rises at the start of a block.
        keep_optimizer: whether the optimizer's state goes on across a prune, cut along, instead of beginning anew.
        label_smoothing: of labels.
        grad_clip: the largest norm of the gradient.
        ema_decay: the decay of a moving average of what learns; a block ends with the average.
        keep_best: whether a block ends with the epoch that was best on the validation samples, instead of its last.
        validate_every: epochs between looks at the validation samples; 0 for the end of a block only.
        teacher: "self", to learn from the unpruned adapted network, or a task file of a better one.
        distill_weight: the teacher's share of the loss.
        temperature: at which teacher and network are compared.
        mixed_precision: "no", "bf16" or "fp16".
        channels_last: the memory layout of images and weights; by default on CPUs.
        deterministic: PyTorch's deterministic algorithms, for runs that repeat to the bit.
        seed: of everything random.
        checkpoint_seconds: how much work may be lost, at most, when a run is killed.
        trackers: besides metrics.jsonl: "auto" (TensorBoard where it is installed), or names that Accelerate knows.

    >>> config = Settings(recipe="paper", data="torchvision:CIFAR10", rank=32)
    >>> config.epochs, config.lr, config.targets()[:3], len(config.targets())
    (30, 0.01, (0.95, 0.9, 0.85), 19)
    """

    recipe: Literal["fast", "paper"] = "fast"
    name: str | None = None
    network: str = "resnet18"
    network_options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    head: str | None = None
    start_task: str | None = None
    data: str = "digits"
    data_folder: str | None = None
    image_size: int | None = None
    classes: tuple[str, ...] | None = None
    max_train_samples: int | None = None
    validation_split: float = 0.1
    labels: bool = True
    augment: bool = True
    skip_bad: bool = False
    cache_folder: str | None = None
    num_workers: int = 0
    method: Literal["splora", "sppara", "lora", "fine-pruning"] = "splora"
    rank: int | float = 8
    adapter_options: dict[str, Any] = field(default_factory=dict)
    criterion: str = "taylor"
    criterion_options: dict[str, Any] = field(default_factory=dict)
    schedule: Literal["iterative", "agp", "one_shot"] | None = None
    final_density: float | None = None
    prune_step: float = 0.05
    prune_steps: int = 5
    densities: tuple[float, ...] | None = None
    budget: Literal["channels", "weights", "macs", "latency", "bytes"] = "channels"
    ranking: Literal["global", "local"] = "global"
    writers: Literal["coupled", "free"] | None = None
    select_options: dict[str, Any] = field(default_factory=dict)
    score_samples: int = 1024
    recovery_samples: int = 256
    recovery: Literal["none", "norms", "all"] | None = None
    epochs: int | None = None
    epochs_per_prune: int | None = None
    final_epochs: int | None = None
    batch_size: int | None = None
    optimizer: Literal["sgd", "adamw"] | None = None
    lr: float | None = None
    scale_lr: bool | None = None
    momentum: float = 0.9
    weight_decay: float | None = None
    weight_decay_norms: bool | None = None
    lr_schedule: Literal["step", "cosine", "constant"] | None = None
    warmup_epochs: float = 0.0
    keep_optimizer: bool = False
    label_smoothing: float = 0.0
    grad_clip: float | None = None
    ema_decay: float | None = None
    keep_best: bool = False
    validate_every: int = 0
    teacher: str | None = None
    distill_weight: float = 0.5
    temperature: float = 2.0
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    channels_last: bool | None = None
    deterministic: bool = False
    seed: int = 0
    checkpoint_seconds: float = 60.0
    trackers: tuple[str, ...] = ("auto",)

    def __post_init__(self) -> None:
        for each in fields(self):
            self._set(each.name, checked(type(self), each.name, getattr(self, each.name)))
        self._set("_given", copy.deepcopy({each.name: getattr(self, each.name) for each in fields(self)}))
        for name, value in settings(self.recipe, vars(self)).items():
            if getattr(self, name) is None:
                self._set(name, value)
        if self.final_epochs is None:
            self._set("final_epochs", self.epochs_per_prune)
        self._set("name", self.name or _name(self.data))
        if self.network in STEMMED and "stem" not in self.network_options and self._is_small():
            self._set("network_options", {**self.network_options, "stem": "cifar"})
        _check(self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _is_small(self) -> bool:
        small = self.data in SMALL_DATA
        return self.image_size <= 64 if self.image_size is not None else small

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The settings in a YAML or TOML file, or those of a run's folder."""
        file = Path(path) / "run.yaml" if Path(path).is_dir() else Path(path)
        return cls.of(read(file), str(file))

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = "the configuration") -> Self:
        """A configuration from settings by name; names that are none are refused."""
        check_known(cls, given, where)
        config = cls(**given)
        plain = {name: value for name, value in given.items() if value is not None}
        for name in (
            FILLED & plain.keys()
        ):  # a run writes everything down; what nobody chose goes on following the recipe
            without = {other: value for other, value in plain.items() if other != name}
            try:
                if cls(**without) == config:
                    plain = without
            except ConfigError:
                continue
        return cls(**plain)

    @property
    def given(self) -> dict[str, Any]:
        """The settings as they were given, before the recipe filled in the rest."""
        return copy.deepcopy(dict(vars(self)["_given"]))

    def to_yaml(self) -> str:
        """All settings, as `load` reads them."""
        return written(self)

    def replace(self, **changes: Any) -> Self:
        """The same but for some settings; those that nobody gave follow the recipe again.

        >>> Settings(rank=8).replace(seed=3).seed
        3
        """
        check_known(type(self), changes, "replace")
        return type(self)(**{**self.given, **changes})

    def targets(self) -> tuple[float, ...]:
        """The densities after the first block, falling."""
        if self.densities is not None:
            return self.densities
        assert self.final_density is not None
        if self.schedule == "one_shot":
            return (self.final_density,) if self.final_density < 1 else ()
        if self.schedule == "agp":
            found = [
                agp(i / self.prune_steps, end=self.final_density) for i in range(1, self.prune_steps + 1)
            ]
        else:
            count = round((1 - self.final_density) / self.prune_step + 0.4999999)
            found = [
                iterative(i / (count + 1), end=self.final_density, step=self.prune_step)
                for i in range(1, count + 1)
            ]
        return tuple(round(density, 6) for density in found if density < 1)

    def epochs_of(self, block: int) -> int:
        """How many epochs a block has; the first one is number 0."""
        epochs = self.epochs if block == 0 else self.epochs_per_prune
        if block == len(self.targets()) > 0:
            epochs = self.final_epochs
        assert epochs is not None
        return epochs

    def make_adapter(self) -> Any:
        """The adapter that the method means."""
        options = dict(self.adapter_options)
        if self.method in ("splora", "lora"):
            options["rank"] = self.rank
        try:
            return ADAPTERS[self.method](**options)
        except TypeError as error:
            raise ConfigError(
                f"adapter_options has settings that {self.method} does not take: {error}"
            ) from error

    def make_criterion(self, block: int) -> Criterion:
        """The criterion, for one block: random numbers are others each time."""
        options = dict(self.criterion_options)
        if CRITERIA[self.criterion] is Random:
            options.setdefault("seed", seed_of(self.seed, "random", block))
        try:
            made: Criterion = CRITERIA[self.criterion](**options)
        except TypeError as error:
            raise ConfigError(f"criterion_options do not fit {self.criterion}: {error}") from error
        return made

    @property
    def initial_lr(self) -> float:
        """The learning rate at the start of a block."""
        assert self.lr is not None
        assert self.batch_size is not None
        return self.lr * self.batch_size / 256 if self.scale_lr else self.lr


def _name(data: str) -> str:
    """A task's name from the data's: letters, digits and dashes."""
    last = Path(data.partition(":")[2] or data).name
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in last).strip("-_")
    return kept[:60] or "task"


_LONGEST = "1000000000B"  # what a task's name may have behind the run's


def _check(config: Settings) -> None:
    try:
        check_name(f"{config.name}-{_LONGEST}")
    except TaskFileError as error:
        raise ConfigError(f"name: {error}") from error
    _check_numbers(config)
    if config.seed >= 2**63:
        raise ConfigError(f"seed is {config.seed}, expected less than 2**63")
    if config.criterion not in CRITERIA:
        raise ConfigError(f"criterion is {config.criterion!r}, expected one of {', '.join(CRITERIA)}")
    unknown = sorted(set(config.select_options) - set(SELECT_OPTIONS))
    if unknown:
        raise ConfigError(f"select_options has {unknown[0]!r}, expected some of {', '.join(SELECT_OPTIONS)}")
    told = sorted({"name", "classes", "weights", "seed"} & set(config.network_options))
    if told:
        raise ConfigError(f"network_options has {told[0]!r}, which is a setting of the run; set it there")
    _check_densities(config)
    if not config.labels and not config.teacher:
        raise ConfigError(
            'labels is false, so there has to be a teacher; set teacher: "self" and start_task, or a task file'
        )
    if not config.labels and config.teacher == "self" and config.start_task is None:
        raise ConfigError(
            "labels is false and the network is to teach itself; set start_task to the task that it has learned"
        )
    if config.keep_best and not (config.validation_split and config.validate_every):
        raise ConfigError(
            "keep_best is true, which needs validation_split above 0 and validate_every of at least 1"
        )
    config.make_adapter()
    config.make_criterion(0)


_AT_LEAST = {
    **dict.fromkeys(("prune_steps", "score_samples", "recovery_samples", "batch_size"), 1),
    **dict.fromkeys(
        ("epochs", "epochs_per_prune", "final_epochs", "num_workers", "validate_every", "seed"), 0
    ),
    **dict.fromkeys(("weight_decay", "warmup_epochs", "checkpoint_seconds"), 0),
}
_BETWEEN = {
    "validation_split": "[0, 1)",
    "prune_step": "(0, 1]",
    "final_density": "(0, 1]",
    "momentum": "[0, 1)",
    "label_smoothing": "[0, 1)",
    "ema_decay": "(0, 1)",
    "distill_weight": "(0, 1]",
}
_POSITIVE = ("lr", "grad_clip", "temperature", "image_size", "max_train_samples")


def _check_numbers(config: Settings) -> None:
    values = {name: getattr(config, name) for name in (*_AT_LEAST, *_BETWEEN, *_POSITIVE)}
    for name, value in values.items():
        if value is None:
            continue
        if name in _AT_LEAST and value < _AT_LEAST[name]:
            raise ConfigError(f"{name} is {value!r}, expected at least {_AT_LEAST[name]}")
        if name in _POSITIVE and value <= 0:
            raise ConfigError(f"{name} is {value!r}, expected more than 0")
        if name in _BETWEEN:
            span = _BETWEEN[name]
            above = value > 0 or (span[0] == "[" and value == 0)
            below = value < 1 or (span[-1] == "]" and value == 1)
            if not (above and below):
                raise ConfigError(f"{name} is {value!r}, expected a number in {span}")


def _check_densities(config: Settings) -> None:
    given = config.densities
    if given is not None and (config.schedule or config.final_density is not None):
        raise ConfigError(
            "densities is given, and schedule or final_density too; expected the densities themselves or a schedule"
        )
    if given is None:
        if config.budget == "bytes":
            raise ConfigError("the budget is bytes, so densities has to list them, such as [300000, 100000]")
        return
    whole = config.budget == "bytes"
    for density in given:
        if whole and (density < 1 or density != int(density)):
            raise ConfigError(f"densities has {density!r}, expected whole numbers of bytes")
        if not whole and not 0 < density < 1:
            raise ConfigError(f"densities has {density!r}, expected shares above 0 and below 1")
    if list(given) != sorted(set(given), reverse=True):
        raise ConfigError(f"densities is {list(given)}, expected falling numbers, each once")
