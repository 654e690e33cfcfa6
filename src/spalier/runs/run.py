"""`TransferPruning`: a run, from its settings and a folder to its results."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spalier.adapters.attach import detach_
from spalier.adapters.attachment import is_marked
from spalier.data import Data, open_data
from spalier.distributed import from_first_rank
from spalier.errors import AttachmentError, ConfigError, RunError, SpalierError
from spalier.inputs import call, each
from spalier.networks import head_of, heads_of, logits_of, name_classes_, open_network, warn_if_untrained
from spalier.runs.checkpoint import WIDE, RunFolder
from spalier.runs.engine import Engine
from spalier.runs.learning import digest
from spalier.runs.processes import Machine
from spalier.runs.recipes import TEXT
from spalier.runs.settings import Settings
from spalier.tasks import SUFFIX, Store, Task
from spalier.text import InNotebooks, byte_size, first_few, table

Row = dict[str, Any]
_SIZES = ("channels", "weights", "macs", "learned", "bytes")
COLUMNS = ("task", *_SIZES, "validation", "test", "latency_ms", "seconds")
TITLES = [{"macs": "MACs", "latency_ms": "ms"}.get(name, name) for name in COLUMNS]
"""Of the columns that are printed. Times are measured, and differ from run to run."""
_GIVEN = "given:"
_OF_DATA = (
    *("seed", "max_length", "max_train_samples", "classes", "image_size", "validation_split"),
    *("skip_bad", "text_column", "label_column"),
)
"""The settings that `open_data` takes under the same names."""


class WithRows:
    """What came out of runs, as rows of plain values."""

    rows: Sequence[Row]

    @property
    def _names(self) -> list[str]:
        """Every name that occurs in a row."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def to_csv(self) -> str:
        """The rows with all their columns, for a spreadsheet."""
        out = io.StringIO()
        writer = csv.DictWriter(out, self._names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()


@dataclass(frozen=True)
class Results(WithRows, InNotebooks):
    """The rows of a run, one for each density. Print them."""

    folder: Path
    rows: Sequence[Row]
    skipped: Sequence[str] = field(default=())
    """Files that were left out because they are bad, where that was asked for."""
    base: str = ""
    """The digest of the base's values."""
    data: str = ""
    """The digest of the data."""

    def __str__(self) -> str:
        shown = [[cell(name, row.get(name)) for name in COLUMNS] for row in self.rows]
        return f"{table(TITLES, shown)}\n\n{self.summary()}"

    @property
    def best(self) -> Row:
        """The row of the smallest network that is as good as the best but for a point, by validation samples.

        Without any, the last one: nothing is ever chosen by test samples.
        """
        seen = [row["validation"] for row in self.rows if row.get("validation") is not None]
        good = [row for row in self.rows if seen and (row.get("validation") or 0.0) >= max(seen) - 0.01]
        return good[-1] if good else self.rows[-1]

    def summary(self) -> str:
        """What came out, what it cost and what to do next."""
        if not self.rows:
            return "nothing came out: the run has no rows"
        row, whole = self.best, self.rows[0]
        part = "test" if row.get("test") is not None else "validation"
        right, first = (cell(part, each.get(part)) for each in (row, whole))
        kept = cell("channels", row.get("channels"))
        came_out = f"{row['task']}: {right} right ({part}) with {kept} of the channels; whole, {first}"
        sizes = f"{byte_size(row['bytes'])} for this task, {byte_size(sum(r['bytes'] for r in self.rows))} for all"
        cost = f"{self.rows[-1]['seconds']:,.0f} s, {self.rows[-1]['steps']:,} steps; {sizes} {len(self.rows)}"
        place = shlex.quote(str(self.folder))
        file = shlex.quote(str(self.folder / "tasks" / f"{row['task']}{SUFFIX}"))
        lines = [["came out", came_out], ["cost", cost], *_advice(row, whole, part)]
        following = (f"eval {place}", f"task export {file} -o small.onnx", f"report {place}")
        lines += [["next" if not number else "", f"spalier {text}"] for number, text in enumerate(following)]
        return "\n".join(f"{title:9} {text}" for title, text in lines)

    @property
    def tasks(self) -> Store:
        """The task files, as a store that a `Switcher` can use."""
        return Store(self.folder / "tasks")

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        own = {"rows": list(self.rows), "skipped": list(self.skipped), "base": self.base, "data": self.data}
        return {"format": 1, **own}

    @staticmethod
    def load(folder: Path) -> Results:
        """The results of a run that is done."""
        file = folder / "results.json"
        try:
            found = json.loads(file.read_text("utf-8"))
            return Results(folder, list(found["rows"]), list(found["skipped"]), found["base"], found["data"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                "folder", f"{str(file)!a} cannot be read ({type(error).__name__}); expected the results of a run"
            ) from error


def _advice(row: Row, whole: Row, part: str) -> list[list[str]]:
    """What to try where little was learned, or much was lost."""
    last, first = row.get(part), whole.get(part)
    if last is None or first is None:
        return []
    if first < 0.5:
        return [["note", "little was learned: try a pretrained base (--pretrained), more --epochs, another --lr"]]
    if last < first - 0.05:
        return [["note", "pruning cost much: try more --set epochs_per_prune=, or densities in smaller steps"]]
    return []


def cell(name: str, value: Any) -> str:
    """A value of a row as tables show it."""
    if value is None:
        return "-"
    if name in ("channels", "weights", "macs", "validation", "test"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.2f}" if name == "latency_ms" else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, kw_only=True)
class TransferPruning(Settings):
    """A run: learn a task on a frozen network, then score, select, prune and train again until the last density.

    It takes the settings of `spalier.runs.Settings`, all of them as keywords; the recipe fills in most of them.

    >>> config = TransferPruning(recipe="paper", data="torchvision:CIFAR10", network="resnet50", rank=8)
    >>> config.epochs, config.epochs_per_prune, len(config.targets())
    (30, 20, 19)
    """

    def run(
        self,
        folder: str | os.PathLike[str],
        *,
        network: nn.Module | None = None,
        data: Data | None = None,
        progress: bool = True,
        engine: type[Engine] = Engine,
    ) -> Results:
        """Carry the run out in a folder, or resume it there. A run that is done returns its results at once.

        Args:
            folder: where the run keeps its settings, metrics, checkpoint and task files.
            network: a network of your own, instead of one by name; unchanged afterwards.
            data: data of your own, as `Data.of` makes them, instead of a data set by name.
            progress: show how far the run is: a bar on a terminal, lines elsewhere.
            engine: a subclass of `Engine` that does some part of the loop in another way.
        """
        config = _name_objects(self.with_paths(), network, data)
        where = RunFolder(folder)
        if where.results.exists():
            where.claim(config)
            return _done(where, network, data)
        with contextlib.ExitStack() as stack:
            machine = stack.enter_context(contextlib.closing(Machine(config, where)))
            _open(where, config, stack)
            where.is_writable = machine.is_first
            machine.track()
            stack.enter_context(_memory_errors(config, where))
            stack.enter_context(_random_state(config))
            is_begun = where.checkpoint.exists()
            if is_begun:  # with what was filled in then
                config = config.with_filled(Settings.load(where.settings).filled_values)
            samples = _with_classes(config, data if data is not None else open_samples(config))
            size = {"samples": len(samples.train), "side": samples.shape[-1]}
            config = config if is_begun else config.fitted(**size)
            net = network if network is not None else _open_network(config, samples)
            if not is_begun:
                config = config.fitted(**size, parameters=sum(p.numel() for p in net.parameters()))
                where.write(where.settings, config.to_yaml().encode())
                if config.start_task is None:
                    warn_if_untrained(net, config.network.removeprefix(_GIVEN))
            head = [] if config.head is None else [config.head]
            head = head or (heads_of(net) if samples.is_text else [head_of(net, classes=len(samples.classes))])
            stack.enter_context(_unchanged(net, machine))
            _check_fit(config, net, samples, machine)
            loop = engine(config, where, net, head, samples, machine)
            rows, skipped = loop.run(progress), list(map(str, samples.skipped))
            results = Results(where.path, rows, skipped, loop.base_digest, samples.digest)
            where.write_json(where.results, results.to_dict())
            if machine.is_first:  # until here a run that is killed needs it to go on
                (where.path / WIDE).unlink(missing_ok=True)
            return results


def _name_objects(config: Settings, network: nn.Module | None, data: Data | None) -> Settings:
    """Settings that name what was given as an object, so that a run which is resumed asks for it again."""
    named = {}
    if network is not None:
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"network is a {type(network).__name__}, expected a torch.nn.Module; names go in the settings"
            )
        if any(tensor.is_meta for tensor in (*network.parameters(), *network.buffers())):
            raise ConfigError("the network is on the meta device, where nothing can be learned; load its weights first")
        if is_marked(network):
            raise AttachmentError("the network is adapted already; call spalier.detach_(net) first")
        _refuse(config, "a network", "weights", "pretrained", "network_options")
        named["network"] = f"{_GIVEN}{type(network).__name__}"
    if data is not None:
        if not isinstance(data, Data):
            raise ConfigError(f"data is a {type(data).__name__}, expected spalier.data.Data; Data.of(dataset) makes it")
        _refuse(config, "data", "data_folder", "tokenizer", *_OF_DATA[2:])
        named["data"] = f"{_GIVEN}{TEXT if data.is_text else ''}{data.name}"
    for what in ("network", "data"):
        if what not in named and getattr(config, what).startswith(_GIVEN):
            raise ConfigError(f"the run was given its {what} as an object; pass {what}= again to resume it")
    # one that was loaded from its folder is as it is, with what the recipe came to then
    return config if all(getattr(config, n) == v for n, v in named.items()) else config.replace(**named)


def _refuse(config: Settings, what: str, *names: str) -> None:
    """Settings that would have no effect are mistakes."""
    defaults = Settings().given
    for name in names:
        if config.given[name] != defaults[name]:
            raise ConfigError(f"{name} is set, and {what} was given, which it does not apply to; leave one of them out")


def _done(folder: RunFolder, network: nn.Module | None, data: Data | None) -> Results:
    """The results, where nothing else was given than then."""
    results = Results.load(folder.path)
    if network is not None and digest(network) != results.base:
        raise RunError("changed", "the run is done, with a network of other weights; use another folder")
    if data is not None and data.digest != results.data:
        raise RunError("changed", "the run is done, with other data; use another folder")
    return results


def _open(folder: RunFolder, config: Settings, stack: contextlib.ExitStack) -> None:
    """Let the first process open the folder and lock it; what it finds wrong is raised in all of them."""

    def attempt() -> SpalierError | None:
        try:
            stack.enter_context(folder.locked())
            folder.claim(config)
        except SpalierError as error:
            return error
        return None

    error = from_first_rank(attempt)
    if error is not None:
        raise error


@contextlib.contextmanager
def _memory_errors(config: Settings, folder: RunFolder) -> Iterator[None]:
    """Say what helps when memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = " ".join(str(error).split())[:200]
        # PyTorch's CPU allocator raises a plain RuntimeError
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in words:
            raise
        raise RunError(
            "memory",
            f"memory ran out with batches of {config.batch_size} ({words or 'MemoryError'}); the last checkpoint in "
            f"{str(folder.path)!a} is whole: free some memory and run again, or begin another run with a smaller "
            "batch_size, image_size or score_samples",
        ) from error


@contextlib.contextmanager
def _random_state(config: Settings) -> Iterator[None]:
    """Leave the caller's random state and choice of algorithms as they were."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextlib.contextmanager
def _unchanged(net: nn.Module, machine: Machine) -> Iterator[None]:
    """Use a network, and give it back without adapters, with its device, modes and gradients."""
    first = next(net.parameters(), None)
    device = first.device if first is not None else machine.device
    modes = [(module, module.training) for module in net.modules()]
    grads = [(parameter, parameter.grad) for parameter in net.parameters()]
    net.to(machine.device)
    try:
        yield
    finally:
        if is_marked(net):
            detach_(net)
        net.to(device)
        for module, training in modes:
            module.training = training
        for parameter, grad in grads:
            parameter.grad = grad


def open_samples(config: Settings) -> Data:
    """The data of a run."""
    return open_data(
        config.data,
        folder=config.data_folder,
        # data sets by name have labels, if only to evaluate with
        labels=config.labels or not config.data.startswith(("folder:", "hf:", "text:")),
        tokenizer=(config.tokenizer or config.network) if config.is_text else None,
        **{name: getattr(config, name) for name in _OF_DATA},
    )


def _with_classes(config: Settings, data: Data) -> Data:
    """Samples without labels have the classes of the task that the network starts from, or is taught by."""
    if config.labels and bool((data.train.labels < 0).all()):
        raise ConfigError(
            "the samples have no labels; set labels: false, and a teacher to learn from (teacher, start_task)"
        )
    if data.classes:
        return data
    file = next(path for path in (config.start_task, config.teacher) if path not in (None, "self"))
    classes = tuple(Task.load(file).info.classes)
    if not classes:
        raise RunError("classes", f"the samples have no classes, and {file!a} names none; expected a task with classes")
    return dataclasses.replace(data, classes=classes)


def _open_network(config: Settings, data: Data) -> nn.Module:
    said = {name: getattr(config, name) for name in ("weights", "pretrained", "seed")}
    net = open_network(config.network, classes=len(data.classes), **said, **config.network_options)
    _check_order(net, data)
    name_classes_(net, data.classes)
    return net


def _check_order(net: nn.Module, data: Data) -> None:
    """Refuse a classifier whose classes are the data's in another order."""
    named = list(dict(getattr(getattr(net, "config", None), "id2label", None) or {}).values())
    if sorted(map(str, named)) == sorted(data.classes) and named != list(data.classes):
        raise RunError(
            "classes",
            f"the network's outputs are {first_few(named)}, and the data's classes {first_few(data.classes)}, in "
            "another order; set classes to the network's",
        )


@torch.no_grad()
def _check_fit(config: Settings, net: nn.Module, data: Data, machine: Machine) -> None:
    """Refuse a network that does not run on the data, or has another number of outputs than these have classes."""
    if config.keep_best and data.validation is None:
        raise ConfigError("keep_best is true, and the data have no validation samples; give them some")
    net.eval()
    hardest = getattr(data.train, "hardest", None)
    inputs = data.example() if hardest is None else data.train.fetch(hardest(), None)[0]
    try:
        logits = logits_of(call(net, each(lambda t: t.to(machine.device), inputs)))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        words, remedy = f"float32 images of {data.shape}", "set image_size, convert the network (net.float())"
        if data.is_text:
            words = f"texts of up to {data.preprocessing['max_length']} tokens"
            remedy = "set max_length to what it can read, tokenizer to the network whose words it knows"
        raise RunError("classes", f"the network does not run on {words}: {error}; {remedy}, or use another") from error
    if logits.dim() != 2 or logits.shape[1] != len(data.classes):
        raise RunError(
            "classes",
            f"the network returns {tuple(logits.shape[1:])} numbers for a sample, and {data.name} has "
            f"{len(data.classes)} classes; give the network a head with that many outputs",
        )
    _check_order(net, data)
