"""What a report is made of: runs and stores of tasks, read from their folders as plain data.

A folder may be damaged, still be written to, or come from someone else. A file that cannot be used becomes one
`RunError` that names it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spalier.adapters import ADAPTERS
from spalier.errors import ConfigError, RunError, SpalierError, TaskFileError
from spalier.files import reason
from spalier.runs import Settings
from spalier.runs.settings import RESUMABLE
from spalier.tasks import SUFFIX, Store, StoreReport, Task, TaskCost, check_name
from spalier.text import clean, import_optional

MEASURES = {"test": "test accuracy", "validation": "validation accuracy"}
"""What accuracy may be of, the better measure first."""
TASK_SETTINGS = ("name", "data", "classes")
"""Settings that say what is learned, rather than how."""
MAX_EXAMPLES, MAX_TEXT = 256, 500
MAX_PIXELS = 1 << 24
SMALLEST, LARGEST = 1e-100, 1e15
"""Between these lie all numbers that a run can measure, zero aside, and all that can be drawn."""
_METRICS = {"test": "accuracy", "validation": "validation"}
_SHARES = ("channels", "weights", "macs")
_MEASURED = (*_SHARES, "learned", "bytes", "latency_ms")
_SILENT = RESUMABLE | {"seed"}
_ORDER = (*TASK_SETTINGS, "method", "rank", "criterion", "network", "schedule", "ranking", "writers")
_RECIPE = (
    *("lr", "weight_decay", "optimizer", "epochs", "epochs_per_prune", "final_epochs", "batch_size"),
    *("lr_schedule", "schedule", "final_density", "densities", "prune_step", "prune_steps"),
    *("codes", "storage", "refit_lr", "refit_epochs"),
)
_FOLLOWS = {
    "name": ("data", "classes", "image_size", "max_train_samples", "network_options", "weights", *_RECIPE),
    "data": ("name", "classes", "image_size", "max_train_samples", "network_options", "weights", *_RECIPE),
    "classes": ("max_train_samples",),
    "recipe": (*_RECIPE, "learn", "writers", "recovery"),
    "method": (*_RECIPE, "learn", "rank", "grad_clip"),
    "learn": _RECIPE,
    "network": ("network_options", "weights", "head", "image_size"),
}
"""Settings that may follow from another one; where they do, a label does not repeat them."""


@dataclass(frozen=True)
class ScoreCounts:
    """How many units had which score before a prune: below the edges, in each bin, above them."""

    criterion: str
    samples: int
    edges: Sequence[float]
    streams: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    """By stream, counts of units that were kept and of those that were removed."""


@dataclass(frozen=True)
class Example:
    """An image or a text, its class, and what it was predicted as."""

    label: int
    guess: int
    confidence: float
    png: bytes = b""
    text: str = ""


@dataclass(frozen=True, eq=False)
class TaskResult:
    """One task: what was measured, and what its files hold."""

    key: str
    """Unique in the report; the address of the task on the page."""
    name: str
    run: str
    settings: Mapping[str, Any]
    """What tells it from tasks of other runs: data, method, rank, seed..."""
    target: float
    """The density that was asked for; tasks of several seeds are brought together by it."""
    numbers: Mapping[str, float]
    """What is known of test, validation, channels, weights, macs (shares), macs_left, learned, latency_ms, bytes..."""
    classes: Sequence[str] = ()
    confusion: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    layers: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    """The layers of the base, and which output channels the task keeps of each."""
    scores: ScoreCounts | None = None
    examples: Sequence[Example] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else the task's file says."""


@dataclass(frozen=True)
class Epoch:
    """A line of a run's metrics."""

    block: int
    step: int
    loss: float | None
    validation: float | None


@dataclass(frozen=True, eq=False)
class Run:
    """Tasks that came out of one another; in a store, those that seem to have."""

    name: str
    tasks: Sequence[TaskResult]
    epochs: Sequence[Epoch] = ()
    done: bool = True
    targets: Mapping[int, float] = field(default_factory=dict)
    """The density after each block, by its number; also where the block's task cannot be read."""


@dataclass(frozen=True, eq=False)
class ReportData:
    """All that a folder holds, for a report."""

    kind: str
    """"run", "sweep", "store" or "folder of runs"."""
    name: str
    runs: Sequence[Run]
    settings: Mapping[str, Any]
    """Settings that all runs share."""
    varied: Sequence[str]
    """Settings that tell series apart, without the seed."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Runs that failed and files that cannot be read, with what is wrong."""
    date: str = ""

    @property
    def tasks(self) -> list[TaskResult]:
        """The tasks of all runs."""
        return [task for run in self.runs for task in run.tasks]

    @property
    def measure(self) -> str:
        """Which accuracy is shown: that of test samples, where there are any."""
        return next((m for m in MEASURES if any(m in task.numbers for task in self.tasks)), "test")


# -- folders ----------------------------------------------------------------------------------------------------------


def load(source: str | os.PathLike[str]) -> ReportData:
    """Read the folder of a run, a sweep, a store, or a folder of runs."""
    folder = Path(source).expanduser()
    with _readable(folder, "a run, a sweep, a store, or a folder of runs", OSError):
        if (folder / "run.yaml").exists():
            return _load_runs("run", folder, [folder], {})
        is_sweep = (folder / "sweep.yaml").exists()
        paths = {path.parent for pattern in ("*/run.yaml", "*/*/run.yaml") for path in folder.glob(pattern)}
        if paths or is_sweep:
            kind = "sweep" if is_sweep else "folder of runs"
            return _load_runs(kind, folder, sorted(paths), _failed(folder / "sweep.json"))
        if any(folder.glob(f"*{SUFFIX}")):
            return _load_store(folder)
        what = "holds no run.yaml, sweep.yaml or task files, and no run within two levels"
        raise _unusable(folder, what if folder.is_dir() else "is no folder", "a run, a sweep or a store")


def _unusable(path: Path, what: str, expected: str) -> RunError:
    return RunError("folder", f"{str(path)!a} {what}; expected {expected}")


@contextlib.contextmanager
def _readable(path: Path, expected: str, errors: type[Exception] = Exception) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one error that names it."""
    try:
        yield
    except SpalierError:
        raise
    except errors as error:  # decoders of JSON and images raise nearly everything
        named = Path(error.filename) if isinstance(error, OSError) and error.filename else path
        why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        what = f"cannot be read ({ascii(why)[1:-1][:200]})"
        raise _unusable(named, what, f"{expected}: restore it, or remove it and run again") from error


def _failed(path: Path) -> dict[str, str]:
    """The runs of a sweep that failed, and why."""
    if not path.exists():
        return {}
    with _readable(path, "the rows of a sweep"):
        found = json.loads(path.read_text("utf-8"))["failed"]
        return {clean(str(name)): clean(str(why)) for name, why in found.items()}


def _load_runs(kind: str, folder: Path, paths: Sequence[Path], failed: dict[str, str]) -> ReportData:
    settings, runs = {}, []
    for path in paths:
        name = folder.absolute().name if path == folder else clean(str(path.relative_to(folder)))
        settings[name] = _settings(path)
        runs.append(_load_run(path, name, settings[name], failed))
    first, *others = settings.values() or [{}]
    shared = {n: v for n, v in first.items() if n not in RESUMABLE and all(other[n] == v for other in others)}
    names = varied([first, *others])
    if len({task.settings.get("code") for run in runs for task in run.tasks}) > 1:
        names.append("code")
    return ReportData(kind, folder.absolute().name, runs, shared, names, failed, _newest(folder))


def _settings(folder: Path) -> dict[str, Any]:
    try:
        loaded = Settings.load(folder)
    except ConfigError as error:
        raise RunError("folder", f"{str(folder)!a} has settings that cannot be read: {error}") from error
    return asdict(loaded)


def _newest(folder: Path) -> str:
    """When the newest result was written."""
    patterns = ("results.json", "blocks/*.json", f"*{SUFFIX}", f"tasks/*{SUFFIX}")
    paths = [path for below in ("", "*/", "*/*/") for p in patterns for path in folder.glob(below + p)]
    newest = max((path.stat().st_mtime for path in paths), default=None)
    return "" if newest is None else datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d %H:%M UTC")


def varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that differ between runs, without the seed and without those that follow from another one."""
    names = [n for n in settings[0] if n not in _SILENT and len({_as_text(s[n]) for s in settings}) > 1]
    for leader, followers in _FOLLOWS.items():
        if leader in names:
            pairs = {n: {(_as_text(s[leader]), _as_text(s[n])) for s in settings} for n in names}
            known = len(pairs[leader])  # one that follows adds no pair
            names = [n for n in names if n not in followers or len(pairs[n]) > known]
    return sorted(names, key=lambda n: (_ORDER.index(n) if n in _ORDER else len(_ORDER), n))


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# -- runs -------------------------------------------------------------------------------------------------------------


def _load_run(folder: Path, name: str, settings: Mapping[str, Any], failed: dict[str, str]) -> Run:
    tasks: list[TaskResult] = []
    targets: dict[int, float] = {}
    for path in block_files(folder):
        with _readable(path, "the row of a block, its classes and their confusion"):
            block = json.loads(path.read_text("utf-8"))
            row, number = block["row"], int(path.stem.partition("-")[0])  # a narrow form's name may follow
            if (target := measured(row.get("target"), SMALLEST)) is not None:
                targets[number] = target
            task = str(row.get("task"))
            if task in {other.name for other in tasks}:
                raise ValueError(f"another block is of the task {task} too")
            try:
                file = Task.load(folder / "tasks" / f"{check_name(task)}{SUFFIX}")
            except TaskFileError as error:
                failed[clean(f"{name}/{task}")] = str(error)
                continue
            code = {"code": clean(str(row["code"]))} if row.get("code") else {}
            result = _task_result(file, name, {**settings, **code}, targets.get(number, 1.0))
            tasks.append(_block_result(path, block, replace(result, key=f"{name}/{file.name}")))
    return Run(name, tasks, _epochs(folder / "metrics.jsonl"), (folder / "results.json").exists(), targets)


def block_files(folder: Path) -> list[Path]:
    """What is known of each block that is done, in order."""
    paths = (folder / "blocks").glob("*.json")  # NN.scores.json lie beside them
    found = {p: match for p in paths if (match := re.fullmatch("([0-9]+)(-[^.]+)?", p.stem))}
    return sorted(found, key=lambda p: (int(found[p][1]), p.name))


def _block_result(path: Path, block: Mapping[str, Any], result: TaskResult) -> TaskResult:
    """A task with what its run measured and looked at."""
    row, examples, sheet = block["row"], block.get("examples"), path.with_suffix(".png")
    classes = [clean(str(name)) or "(no name)" for name in block.get("classes") or ()]
    square = (len(classes), len(classes))
    confusion = {part: _counts(c, square) for part, c in (block.get("confusion") or {}).items() if c}
    numbers = {name: measured(row.get(name)) for name in _MEASURED}
    numbers |= {name: share(row.get(name)) for name in MEASURES}
    numbers |= {f"{part}_f1": macro_f1(counts) for part, counts in confusion.items()}
    machine = block.get("machine") or {}
    words = clean(", ".join(f"{key} {value}" for key, value in machine.items()))[:300]
    return replace(
        result,
        numbers=_known({**result.numbers, **numbers}, result.target),
        facts={**result.facts, **({"machine": words} if words else {})},
        classes=classes,
        confusion=confusion,
        scores=_scores(path.with_name(f"{path.stem.partition('-')[0]}.scores.json")),
        examples=_examples(sheet, examples, len(classes)) if examples and examples.get("items") else (),
    )


def measured(value: Any, least: float = 0.0) -> float | None:
    """A number that was measured, None for whatever is none; one that cannot be true is an error."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # integers beyond floats compare with them, but become none
    if value < least or (value and not SMALLEST <= abs(value) < LARGEST):
        raise ValueError(f"a number is not between {least:g} and {LARGEST:g}")
    return value


def share(value: Any) -> float | None:
    """A number from 0 to 1, None for whatever else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= 1 else None


def macro_f1(counts: Sequence[Sequence[int]]) -> float | None:
    """The mean F1 of all classes that occur or are predicted, each counted alike; None where nothing was.

    >>> macro_f1([[3, 1], [1, 3]])  # of either class, 2 x 3 of 4 + 4
    0.75
    """
    of = np.array(counts, float).reshape(len(counts), len(counts))
    both = of.sum(0) + of.sum(1)
    return float((2 * of.diagonal()[both > 0] / both[both > 0]).mean()) if both.any() else None


def _known(numbers: Mapping[str, float | None], target: float) -> dict[str, float]:
    """The numbers that are known, with what follows from them."""
    found = {name: value for name, value in numbers.items() if value is not None} | {"density": target}
    if all(found.get(name) for name in ("bytes", "network", "base")):
        cost = TaskCost("", int(found["bytes"]), int(found["network"]))
        pays = StoreReport(int(found["base"]), (cost,)).break_even
        found |= {} if pays is None else {"pays": pays}
    return found


def _counts(values: Any, shape: tuple[int, ...]) -> Any:
    """Whole numbers of a given shape, as lists."""
    found = np.array(values)
    is_whole = found.shape == shape and found.dtype.kind == "i"  # integers beyond 64 bits are objects
    if not is_whole or (found.size and not 0 <= found.min() <= found.max() < LARGEST):
        raise ValueError(f"counts of shape {found.shape} do not fit; expected {shape} whole numbers")
    return found.tolist()


def _epochs(path: Path) -> list[Epoch]:
    """The lines of the metrics that are about epochs; a last line without an end is still being written."""
    with _readable(path, "metrics of a run"):
        lines = path.read_text("utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
        entries = [entry for entry in map(json.loads, lines) if entry["kind"] == "epoch"]
        entries = [entry for entry in entries if not entry.get("form")]  # narrow forms stand beside the run's own steps
        places = [_counts([entry["block"], entry["step"]], (2,)) for entry in entries]
        return [
            Epoch(block, step, measured(entry["loss"], -LARGEST), share(entry["validation"]))
            for entry, (block, step) in zip(entries, places, strict=True)
        ]


def _scores(path: Path) -> ScoreCounts | None:
    if not path.exists():
        return None
    with _readable(path, "counts of scores between rising edges"):
        found = json.loads(path.read_text("utf-8"))
        edges = [measured(edge, SMALLEST) or 0.0 for edge in found["edges"]]
        if len(edges) < 2 or min(np.diff([0.0, *edges])) <= 0:
            raise ValueError("the edges of scores do not rise")
        bins = (len(edges) + 1,)
        streams = {
            clean(name): (_counts(each["kept"], bins), _counts(each["removed"], bins))
            for name, each in found["streams"].items()
        }
        return ScoreCounts(clean(str(found["criterion"])), _counts(found["samples"], ()), edges, streams)


def _examples(path: Path, said: Mapping[str, Any], classes: int) -> list[Example]:
    """Texts, or the images of a sheet, one by one, with what the block says of them."""
    items = said["items"]
    guesses = _counts([[item["label"], item["guess"]] for item in items], (len(items), 2))
    if any(share(item["confidence"]) is None for item in items):
        raise ValueError("confidences are not between 0 and 1")
    if np.max(guesses) >= classes or len(items) > MAX_EXAMPLES:
        raise ValueError("examples are too many, or of other classes")
    if "side" not in said:
        texts = [clean(str(item["text"]))[:MAX_TEXT] for item in items]
        return [Example(a, b, i["confidence"], text=t) for i, (a, b), t in zip(items, guesses, texts, strict=True)]
    if not path.exists():
        return []
    side, columns = _counts([said["side"], said["columns"]], (2,))
    sheet_size = (side * columns, side * math.ceil(len(items) / columns))
    if not 0 < math.prod(sheet_size) <= MAX_PIXELS:
        raise ValueError("examples are too large")
    image_module = import_optional("PIL.Image", "images of a report")
    found = []
    with _readable(path, f"a PNG with {len(items)} images of {side} pixels in rows of {columns}"):
        with image_module.open(path, formats=["PNG"]) as image:
            if image.size != sheet_size:  # before anything is decoded
                raise ValueError(f"it has {image.size} pixels")
            sheet = image.convert("RGB")
        for i, (item, (label, guess)) in enumerate(zip(items, guesses, strict=True)):
            x, y, out = side * (i % columns), side * (i // columns), io.BytesIO()
            # written anew: nothing of somebody's file but pixels gets into a page
            sheet.crop((x, y, x + side, y + side)).save(out, "PNG", optimize=True)
            found.append(Example(label, guess, item["confidence"], out.getvalue()))
    return found


# -- task files -------------------------------------------------------------------------------------------------------


def layers(task: Task) -> dict[str, npt.NDArray[np.bool_]]:
    """The layers of the base with the channels that a task keeps of each, in the order of the network."""
    found: dict[str, npt.NDArray[np.bool_]] = {}
    for row in task.table.rows:
        if len(row.shape) < 2 or row.path in task.table.heads:
            continue
        axis = int(getattr(row.source, "inputs_first", False))
        kept = np.ones(row.shape[axis], bool)
        for placement in row.axes[axis]:
            placement.keep_(kept, task.masks)
        keys = [key for key in row.keys if key.endswith("weight")]
        found |= {row.path if key == "weight" else f"{row.path}.{key}".strip("."): kept for key in keys}
    return found


def _task_result(task: Task, run: str, settings: Mapping[str, Any], target: float) -> TaskResult:
    """What a task's file says; networks are counted in float32."""
    said = task.info
    numbers: dict[str, float | None] = {"learned": said.learned}
    numbers |= {name: share(said.metrics.get(key)) for name, key in _METRICS.items()}
    for name in _SHARES:
        if (pair := getattr(said.density, name)) is not None:
            numbers |= {name: pair[0] / pair[1], f"{name}_left": pair[0], f"{name}_of": pair[1]}
    if said.density.weights is not None:
        numbers["network"], numbers["base"] = (4 * count for count in said.density.weights)
    facts = dict(said.lines())
    versions = ", ".join(f"{name} {facts.pop(name, 'unknown')}" for name in ("spalier", "torch"))
    result = TaskResult(task.name, task.name, run, settings, target, _known(numbers, target), list(said.classes))
    return replace(result, layers=layers(task), facts={**facts, "versions": versions})


# -- stores -----------------------------------------------------------------------------------------------------------


def _load_store(folder: Path) -> ReportData:
    store, failed = Store(folder), dict[str, str]()
    groups: dict[str, list[TaskResult]] = {}
    for name in store:
        try:
            task = _stored(store.load(name), store.path(name).stat().st_size)
        except (SpalierError, OSError) as error:
            failed[name] = str(error)
        else:
            groups.setdefault(_as_text(task.settings), []).append(task)
    names = [tasks[0].run for tasks in groups.values()]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    ordered = [sorted(tasks, key=lambda t: (-t.target, t.name)) for tasks in groups.values()]
    runs = [Run(name, tasks) for name, tasks in zip(names, ordered, strict=True)]
    settings = [tasks[0].settings for tasks in groups.values()] or [{}]
    return ReportData("store", folder.absolute().name, runs, {}, varied(settings), failed, _newest(folder))


def _stored(task: Task, file_bytes: int) -> TaskResult:
    said = task.info
    origin, channels = said.provenance, said.density.channels
    name, target = split_name(task.name)
    if target is None:
        target = 1.0 if channels is None else round(channels[0] / channels[1], 2)
    methods = {kind.__name__: method for method, kind in ADAPTERS.items()}
    settings = {
        "name": str(origin.get("run") or name),
        "data": str(origin.get("data") or name),
        "classes": list(said.classes),
        "method": str(origin.get("method") or methods.get(said.adapter["kind"], said.adapter["kind"])),
        "rank": said.adapter.get("rank"),
        "storage": said.storage,
        "code": str(origin["code"]) if origin.get("code") else None,
        "base": said.base.architecture[:8],
        "seed": origin.get("seed"),
    }
    run = name if settings["seed"] is None else f"{name} seed {settings['seed']}"
    result = _task_result(task, run, settings, target)
    return replace(result, numbers=_known({**result.numbers, "bytes": file_bytes}, target))


def split_name(name: str) -> tuple[str, float | None]:
    """A task's name without its density, and the density.

    >>> split_name("flowers-42.5"), split_name("flowers-start"), split_name("birds")
    (('flowers', 0.425), ('flowers', 1.0), ('birds', None))
    """
    if name.endswith("-start"):
        return name.removesuffix("-start"), 1.0
    match = re.fullmatch(r"(.+)-(\d{1,3}(?:\.\d+)?)", name)
    if match is None or not 0 < float(match[2]) <= 100:
        return name, None
    return match[1], round(float(match[2]) / 100, 6)
