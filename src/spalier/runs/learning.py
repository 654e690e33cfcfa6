"""What a run does with batches: the parts of a training step, how good a network is, and what is written of a block.

A block's record is its row of figures, details, score histograms and example images.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from spalier.adapters.attachment import attachment_of
from spalier.adapters.geometry import is_norm
from spalier.adapters.kinds import ADAPTERS
from spalier.criteria.score import Scores, normalised
from spalier.data import Split
from spalier.errors import ConfigError, RunError
from spalier.inputs import Inputs, call, each, tensors_of
from spalier.networks import logits_of
from spalier.pruning.plan import Plan
from spalier.runs.checkpoint import Position
from spalier.runs.narrow import speed_of
from spalier.runs.processes import Machine, sum_over_ranks
from spalier.runs.settings import Settings
from spalier.tasks import Task
from spalier.text import import_optional
from spalier.timing import describe_machine, finished, quartiles, take_turns

Tensors = dict[str, Tensor]


# losses


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The cross entropy, summed over the batch."""
    return F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing, reduction="sum")


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """How far a network is from its teacher: T² KL(teacher ‖ network) at temperature T, summed over the batch.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> distillation(x, x, 2.0).item()
    0.0
    """
    own = F.log_softmax(logits.float() / temperature, dim=1)
    wanted = F.log_softmax(teacher.float() / temperature, dim=1)
    return temperature**2 * F.kl_div(own, wanted, log_target=True, reduction="sum")


def training_loss(config: Settings, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    """The loss of the labels, of the teacher's logits, or both weighted; summed over the batch."""
    if teacher is None:
        return cross_entropy(logits, labels, config.label_smoothing)
    taught = distillation(logits, teacher, config.temperature)
    if not config.labels or config.distill_weight == 1:  # then labels may be missing
        return taught
    labelled = cross_entropy(logits, labels, config.label_smoothing)
    return (1 - config.distill_weight) * labelled + config.distill_weight * taught


def mean_loss(output: Any, labels: Tensor) -> Tensor:
    """The mean cross entropy of a batch, as criteria take it."""
    return cross_entropy(logits_of(output), labels) / len(labels)


def select_options(config: Settings, target: float) -> dict[str, Any]:
    """What `select` is given for a density; layers of the paper have no floor."""
    floor = {"min_keep": 1} if config.recipe == "paper" else {}
    budget: dict[str, Any] = {config.budget: int(target) if config.budget == "bytes" else target}
    return {**floor, **budget, "ranking": config.ranking, "writers": config.writers, **config.select_options}


def drops_last(config: Settings, samples: int, batch_size: int, machine: Machine) -> bool:
    """Whether the samples behind the last full batch wait for another epoch, as less than a quarter of a batch does.

    The paper drops them. So do processes that cannot share `SHARED` equally: a run is the same on 1, 2, 4 and 8.
    """
    few = samples % batch_size < max(SHARED, batch_size // 4)
    return config.recipe == "paper" or few or SHARED % machine.world_size > 0


SHARED = 8
"""The last batch of an epoch is a multiple of this."""


# learning rates


def lr_factor(kind: Literal["step", "cosine", "constant"], step: int, steps: int, warmup: float = 0.0) -> float:
    """What the learning rate is multiplied by at one step of a block; it rises to 1 over ``warmup`` steps first.

    >>> [round(lr_factor("step", i, 8), 3) for i in range(8)]
    [1.0, 1.0, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008]
    >>> [round(lr_factor("cosine", i, 4, warmup=2), 3) for i in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    progress = (step - warmup) / max(steps - warmup, 1)
    if kind == "step":
        return float(0.2 ** int(4 * progress + 1e-9))
    return 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0


# the optimizer, and what it updates


def learned_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are learned, by name."""
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def make_optimizer(config: Settings, net: nn.Module, *, is_narrow: bool = False) -> Optimizer:
    """SGD or AdamW in groups: what decays, and norms and biases where these do not; each by its speed."""
    spared = set() if config.weight_decay_norms else _norms_and_biases(net)
    heads = attachment_of(net).heads
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in learned_parameters(net).items():
        decay = 0.0 if name in spared else config.weight_decay
        speed = config.head_lr_scale if name.rpartition(".")[0] in heads else 1.0
        if is_narrow:
            speed = speed_of(net, name)
        found.setdefault((decay, speed), []).append(parameter)
    ordered = sorted(found.items(), key=lambda item: (-item[0][0], item[0][1]))
    groups = [{"params": p, "weight_decay": decay, "speed": speed} for (decay, speed), p in ordered]
    if is_narrow:
        return AdamW(groups, lr=config.refit_lr)
    if config.optimizer == "sgd":
        return SGD(groups, lr=config.initial_lr, momentum=config.momentum)
    return AdamW(groups, lr=config.initial_lr)


def _norms_and_biases(net: nn.Module) -> set[str]:
    norms = {
        f"{path}.{name}" if path else name
        for path, module in net.named_modules()
        if is_norm(module)
        for name, _ in module.named_parameters(recurse=False)
    }
    return norms | {name for name in learned_parameters(net) if name.endswith("bias")}


def set_lr_(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, each by its speed."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("speed", 1.0)


def optimizer_state(optimizer: Optimizer, net: nn.Module) -> Tensors:
    """An optimizer's state by the names of parameters. SGD and AdamW have nothing but tensors in it."""
    found: Tensors = {}
    for name, parameter in learned_parameters(net).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found[f"{key}/{name}"] = torch.as_tensor(value).detach()
    return found


def restore_optimizer_(optimizer: Optimizer, net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put an optimizer's state back."""
    parameters = learned_parameters(net)
    for place, value in state.items():
        key, _, name = place.partition("/")
        if name not in parameters:
            raise RunError("checkpoint", f"the checkpoint has a state of {name!r}, which the network does not learn")
        parameter = parameters[name]
        device = "cpu" if key == "step" else parameter.device  # where PyTorch keeps it
        optimizer.state[parameter][key] = value.to(device).clone()


def values_of(net: nn.Module) -> Tensors:
    """A copy of what the task has of its own: learned parameters and buffers."""
    found = {name: p.detach().clone() for name, p in learned_parameters(net).items()}
    return found | {name: b.detach().clone() for name, b in net.named_buffers()}


def digest(net: nn.Module) -> str:
    """One number for all values of the base."""
    found = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):  # extra state of a module's own
            found.update(f"{name} {tensor!r}\n".encode())
            continue
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Average:
    """An exponential moving average of what is learned, statistics of norms included."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay, self.values = decay, values_of(net)

    @torch.no_grad()
    def update_(self, net: nn.Module) -> None:
        """Move a little towards the network's values; integers, which count batches, are taken as they are."""
        own: Tensors = dict(learned_parameters(net)) | dict(net.named_buffers())
        moving = [name for name, value in self.values.items() if value.is_floating_point()]
        torch._foreach_lerp_([self.values[n] for n in moving], [own[n].detach() for n in moving], 1 - self.decay)
        for name in self.values.keys() - set(moving):
            self.values[name].copy_(own[name])


# memory


@torch.no_grad()
def set_memory_format_(net: nn.Module, channels_last: bool) -> None:
    """Give every parameter and buffer fresh memory of its own in one layout.

    Kernels choose their order of summation by strides and alignment. A network that was just pruned and the same one
    read from a checkpoint have equal values in different memory; after this they compute the same bits.
    """
    seen: set[int] = set()
    for tensor in (*net.parameters(), *net.buffers()):
        # views and expanded tensors have to stay in the memory that they share
        is_alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if id(tensor) in seen or tensor.is_meta or not is_alone:
            continue
        seen.add(id(tensor))
        wide = channels_last and tensor.dim() == 4
        layout = torch.channels_last if wide else torch.contiguous_format
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)
        tensor.data = fresh.copy_(tensor)


# samples


@dataclass(frozen=True)
class Samples:
    """Batches of some training samples, not augmented, to score and recover on.

    They are made anew each time, so that no more than one batch is in memory. Without labels the teacher's guesses are
    taken for them.
    """

    split: Split
    indices: np.ndarray[Any, Any]
    batch_size: int
    to_device: Callable[[Inputs], Inputs]
    teacher: nn.Module | None

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        for start in range(0, len(self.indices), self.batch_size):
            inputs, labels = self.split.fetch(self.indices[start : start + self.batch_size], None)
            inputs = self.to_device(inputs)
            if self.teacher is not None:
                labels = logits_of(call(self.teacher, inputs)).argmax(1)
            yield inputs, labels.to(tensors_of(inputs)[0].device)


def alike(split: Split, rows: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """So many of these samples; of texts those of middling lengths, so that a batch of all of them is hardly padded."""
    lengths = getattr(split, "lengths", None)
    if lengths is None:
        return rows[:count]
    some = rows[: 4 * count]
    start = (len(some) - min(count, len(some))) // 2
    return some[np.argsort(lengths[some], kind="stable")][start : start + count]


_BINS = 40
_TILE = 64
_EXAMPLES = 8
_SHOWN = 500  # characters of a text
_EXAMPLES_FROM = 512  # looking at more would take longer than the figure is worth


@dataclass(frozen=True)
class Evaluation:
    """The loss and the confusions of a network on some samples."""

    loss: float
    confusion: list[list[int]]
    """How many samples of each class (row) were taken for each (column)."""

    @property
    def samples(self) -> int:
        """How many there were."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """The share that is right."""
        return sum(row[i] for i, row in enumerate(self.confusion)) / max(self.samples, 1)


@torch.no_grad()
def evaluate(
    net: nn.Module,
    batches: Iterable[tuple[Inputs, Tensor]],
    classes: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    teacher: nn.Module | None = None,
) -> Evaluation:
    """Run a network in eval mode, over all ranks. With a teacher, its guesses are the labels, for data without any."""
    confusion = torch.zeros(classes * classes + 1, dtype=torch.float64, device=device)
    for inputs, labels in batches:
        inputs, labels = each(lambda t: t.to(device), inputs), labels.to(device)
        with autocast():
            logits = logits_of(call(net, inputs))
            if teacher is not None:
                labels = logits_of(call(teacher, inputs)).argmax(1)
        confusion[-1] += cross_entropy(logits, labels).double()
        pairs = labels * classes + logits.argmax(1)
        confusion[:-1] += torch.bincount(pairs, minlength=classes * classes)
    confusion = sum_over_ranks(confusion)
    counts = confusion[:-1].view(classes, classes).long()
    return Evaluation(float(confusion[-1]) / max(int(counts.sum()), 1), counts.tolist())


@torch.no_grad()
def latency_ms(net: nn.Module, example: Inputs) -> float:
    """Milliseconds that the first sample of an example takes, here and now."""
    one = each(lambda t: t[:1], example)
    device = tensors_of(one)[0].device
    return round(1000 * quartiles(take_turns({"": finished(lambda: call(net, one), device)}, rounds=15)[""])[0], 4)


# blocks


def block_row(position: Position, target: float, task: Task, seen: Mapping[str, Evaluation]) -> dict[str, Any]:
    """The numbers of a block that are the same each time the run is made."""
    density, validation, test = task.info.density, seen.get("validation"), seen.get("test")
    row: dict[str, Any] = {"task": task.name, "block": position.block, "target": target}
    row |= {name: _share(getattr(density, name)) for name in ("channels", "weights", "macs")}
    row["parameters"] = None if density.weights is None else density.weights[0]
    row["macs_left"] = None if density.macs is None else density.macs[0]
    row |= {"learned": task.info.learned, "validation": None if validation is None else validation.accuracy}
    row |= {"test": None if test is None else test.accuracy, "test_loss": None if test is None else test.loss}
    return row | {"epochs": position.epochs, "steps": position.step}


def block_details(
    row: dict[str, Any], classes: Sequence[str], seen: Mapping[str, Evaluation], plan: Plan | None, device: torch.device
) -> dict[str, Any]:
    """A row with confusions, the units that are kept, and where it was measured."""
    confusion = {name: seen[name].confusion if name in seen else None for name in ("validation", "test")}
    kept = {} if plan is None else {name: list(units) for name, units in plan.keep.items()}
    ranks = {} if plan is None else {name: len(units) for name, units in plan.ranks.items()}
    found = {"row": row, "classes": list(classes), "confusion": confusion, "kept": kept, "ranks": ranks}
    return found | {"machine": describe_machine(device, torch.get_num_threads())}


def _share(pair: tuple[int, int] | None) -> float | None:
    return None if pair is None else pair[0] / pair[1]


def share_left(task: Task, budget: str) -> float:
    """How much of the base a task has left, in terms of a budget; 1 where the task does not say."""
    share = _share(getattr(task.info.density, budget, None))
    return 1.0 if share is None else share


def check_start_task(config: Settings, task: Task) -> None:
    """Refuse to begin with a task that the settings do not describe."""
    found = task.info.adapter
    is_direct = config.learn == "direct"  # else whatever it was learned with, all of it goes on
    if is_direct and found["kind"] != ADAPTERS[config.method].__name__:
        learned_with = next((name for name, kind in ADAPTERS.items() if kind.__name__ == found["kind"]), found["kind"])
        raise ConfigError(f"method is {config.method!r}, and start_task was learned with {learned_with!r}; set that")
    if is_direct and found.get("rank", config.rank) != config.rank:
        raise ConfigError(f"rank is {config.rank}, and start_task has rank {found['rank']}; set that")
    left = share_left(task, config.budget)
    above = [target for target in config.targets() if config.budget != "bytes" and target >= left]
    if above:
        raise ConfigError(
            f"start_task has {left:.1%} of the {config.budget} left, and {above[0]:g} is asked for; "
            "expected lower densities"
        )


def row_in_words(row: dict[str, Any]) -> str:
    """A row in a line, for the progress."""
    names = ("channels", "macs", "validation", "test")
    channels, macs, *seen = ("-" if row[name] is None else f"{row[name]:.1%}" for name in names)
    left = f"{channels} of channels, {macs} of MACs, {row['learned']:,} learned"
    return f"{row['task']}: {left}, validation {seen[0]}, test {seen[1]}"


# score histograms


def score_histograms(scores: Scores, plan: Plan) -> dict[str, Any]:
    """How many units of each score stay and go, stream by stream, in bins that all streams share.

    Bins are even in the logarithm. Before them comes one for what is below, zero and negative scores included, and
    behind them one for what is above.
    """
    found: dict[str, Any] = {}
    for name, layers in scores.layers.items():
        if plan.writers == "free" and len(layers) > 1:  # each keeps channels of its own
            found |= {layer: normalised(values, scores.normalise) for layer, values in layers.items()}
        else:
            found[name] = scores.of(name)
    everything = np.concatenate([values[~np.isnan(values)] for values in found.values()])
    positive = everything[everything > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
    edges = np.geomspace(low, high if high > low else 2 * low, _BINS + 1)
    streams = {}
    for name, values in found.items():
        stays = np.zeros(len(values), bool)
        stays[list(plan.keep.get(name, range(len(values))))] = True
        alive = ~np.isnan(values)
        streams[name] = {
            "kept": _counts(values[alive & stays], edges),
            "removed": _counts(values[alive & ~stays], edges),
        }
    return {"criterion": scores.criterion, "samples": scores.samples, "edges": edges.tolist(), "streams": streams}


def _counts(values: Any, edges: Any) -> list[int]:
    """Counts below, in and above bins; the highest score of all is in the last bin, not above it.

    >>> _counts(np.array([-1.0, 1.0, 1.5, 4.0]), np.array([1.0, 2.0, 4.0]))
    [1, 2, 1, 0]
    """
    highest = np.nextafter(edges[-1], np.inf)
    return np.histogram(values, [-np.inf, *edges[:-1], highest, np.inf])[0].tolist()  # type: ignore[no-any-return]


# examples


@torch.no_grad()
def examples(
    net: nn.Module, split: Split, to_device: Callable[[Inputs], Inputs], batch_size: int
) -> tuple[dict[str, Any], bytes | None] | None:
    """A few samples that the network is surest of, wrong ones and right ones: texts, or images as one PNG.

    None where samples are neither, or have no labels.
    """
    indices = np.sort(np.random.default_rng(0).permutation(len(split))[:_EXAMPLES_FROM])
    if not len(indices) or bool((split.labels < 0).any()):
        return None
    texts = getattr(split, "texts", None)
    first = split.fetch(indices[:1], None)[0]
    is_image = isinstance(first, Tensor) and first.dim() == 4 and first.shape[1] in (1, 3)
    if texts is None and not (is_image and first.dtype.is_floating_point):  # type: ignore[union-attr]
        return None
    starts = range(0, len(indices), batch_size)
    batches = (to_device(split.fetch(indices[i : i + batch_size], None)[0]) for i in starts)
    logits = torch.cat([logits_of(call(net, inputs)).float().cpu() for inputs in batches])
    labels = torch.from_numpy(split.labels[indices])
    sure, guess = logits.softmax(1).max(1)
    is_right = guess == labels
    chosen = [*_surest(sure, labels, ~is_right), *_surest(sure, labels, is_right)]
    items = [{"label": int(labels[i]), "guess": int(guess[i]), "confidence": round(float(sure[i]), 4)} for i in chosen]
    if texts is not None:
        said = [item | {"text": texts[indices[i]][:_SHOWN]} for item, i in zip(items, chosen, strict=True)]
        return {"items": said}, None
    images = split.fetch(indices[np.array(chosen, np.int64)], None)[0]
    assert isinstance(images, Tensor)
    tiles, side = _tiles(images)
    return {"side": side, "columns": _EXAMPLES, "items": items}, _png(tiles, side)


def _surest(sure: Tensor, labels: Tensor, among: Tensor) -> list[int]:
    """The samples that the network is surest of, the first of every class before the second of any."""
    seen: Counter[int] = Counter()
    ranked = []
    order = torch.argsort(sure, descending=True, stable=True)
    for i in order[among[order]].tolist():
        seen[int(labels[i])] += 1
        ranked.append((seen[int(labels[i])], i))
    return [i for _, i in sorted(ranked, key=lambda pair: pair[0])][:_EXAMPLES]  # which keeps ties in order


def _tiles(images: Tensor) -> tuple[Tensor, int]:
    """Images as bytes of at most so many pixels, each stretched over the whole range of grey."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    scaled = (images - low) / (high - low).clamp_min(1e-12)
    side = min(_TILE, max(images.shape[2:]))
    scaled = torch.nn.functional.interpolate(scaled, (side, side), mode="area")
    pixels = (scaled * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
    return pixels.permute(0, 2, 3, 1), side  # (images, side, side, 3)


def _png(tiles: Tensor, side: int) -> bytes:
    """Tiles side by side, a row of them after the other."""
    rows = -(-len(tiles) // _EXAMPLES)
    whole = tiles.new_zeros(rows * _EXAMPLES, side, side, 3)
    whole[: len(tiles)] = tiles
    sheet = whole.view(rows, _EXAMPLES, side, side, 3).transpose(1, 2).reshape(rows * side, -1, 3).numpy()
    out = io.BytesIO()
    import_optional("PIL.Image", "example images").fromarray(sheet).save(out, "PNG", optimize=True)
    return out.getvalue()
