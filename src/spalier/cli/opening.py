"""From what is typed to networks, tasks and settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import click

from spalier.errors import ConfigError, RunError, TaskFileError, WeightsError

if TYPE_CHECKING:
    from torch import nn

    from spalier.runs.config import Settings
    from spalier.tasks.task import Task

SUFFIX = ".task.safetensors"
_BASE = (
    "A network's name (resnet8, resnet20, resnet18, resnet34, resnet50, torchvision:NAME, timm:NAME, hf:NAME, "
    "module:function), or the folder of a run, which names network, options and weights."
)


def base_options(command: Any) -> Any:
    """The options that name a base."""
    for option in reversed(
        (
            click.option("--base", help=f"{_BASE} By default the run that the task file lies in."),
            *_NETWORK_OPTIONS,
        )
    ):
        command = option(command)
    return command


def network_options(command: Any) -> Any:
    """The options of a network that is named by an argument."""
    for option in reversed(_NETWORK_OPTIONS):
        command = option(command)
    return command


_NETWORK_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--weights", type=click.Path(dir_okay=False), help="Its weights: safetensors, or .pth of tensors."
    ),
    click.option(
        "--classes", type=click.IntRange(1), help="How many classes it has; by default its own number."
    ),
    click.option(
        "--option",
        "options",
        multiple=True,
        metavar="KEY=VALUE",
        help="What else its constructor takes; repeatable.",
    ),
)


def open_base(
    base: str | None,
    file: Path | None = None,
    *,
    weights: str | None = None,
    classes: int | None = None,
    options: Sequence[str] = (),
) -> nn.Module:
    """The network that a command is about: as it is named, or that of the run which a task's file lies in."""
    from spalier.networks import open_network

    found = base if base is not None or file is None else run_beside(file)
    assert found is not None
    config = run_of(found)
    if config is None:
        return open_network(found, classes=classes, weights=weights, **_options(options))
    if options:
        raise click.UsageError(f"--option is for a network's name, and {found} is a run, which has options.")
    if config.network.startswith("given:"):
        raise ConfigError(
            f"the run in {found} was given its network as an object ({config.network.partition(':')[2]}), which no "
            "file can name; pass --base module:function, and --weights"
        )
    if weights is None and config.weights is not None and not Path(config.weights).is_file():
        raise WeightsError(
            f"{found}/run.yaml names the weights {config.weights}, and there is no such file here; pass --weights"
        )
    return open_network(
        config.network,
        classes=classes or _classes_of(Path(found)),
        weights=weights or config.weights,
        seed=config.seed,
        **config.network_options,
    )


def _options(given: Sequence[str]) -> dict[str, Any]:
    """What else a network's constructor takes."""
    found = dict(map(_pair, given))
    for name in ("name", "seed", "classes", "weights"):
        if name in found:
            instead = f"; there is --{name}" if name in ("classes", "weights") else ""
            raise click.UsageError(f"{name} is no option of a network{instead}.")
    return found


def run_beside(file: Path) -> str:
    """The run in whose folder a task lies. Its file must not name code to run: it may come from elsewhere."""
    folder = file.resolve().parent.parent
    config = run_in(folder)
    if config is None:
        raise click.UsageError(
            "--base is missing: the network that the tasks were learned on, or its run's folder."
        )
    library, colon, _ = config.network.partition(":")
    if colon and library not in ("torchvision", "timm", "hf", "given"):
        raise click.UsageError(
            f"{folder} says that its network is made by code ({config.network}); where you trust it, pass "
            f"--base {folder}."
        )
    return str(folder)


def run_of(text: str) -> Settings | None:
    """The settings of a run, where a text is its folder; None where it is a network's name."""
    found = run_in(Path(text))
    if found is None and Path(text).is_dir():
        raise ConfigError(
            f"{text} is a folder without a run in it (run.yaml); expected a run or a network's name"
        )
    return found


def run_in(folder: Path) -> Settings | None:
    """The settings of the run in a folder, if there is one."""
    if not (folder / "run.yaml").is_file():
        return None
    from spalier.runs.config import Settings

    return Settings.load(folder)


def _classes_of(run: Path) -> int | None:
    """How many classes a run learns: it may have started from random weights, which depend on that."""
    try:
        return len(json.loads((run / "blocks" / "00.json").read_text("utf-8"))["classes"]) or None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "folder", f"{run} does not say how many classes it has (blocks/00.json): {error}; pass --classes"
        ) from error


def task_files(given: Sequence[str]) -> list[Path]:
    """The files of task arguments: each a file, or a folder of them, or a run."""
    found: list[Path] = []
    for text in given:
        path = Path(text)
        if (path / "run.yaml").is_file():
            path = path / "tasks"
        inside = sorted(path.glob(f"*{SUFFIX}"), key=_by_density) if path.is_dir() else [path]
        if not inside:
            raise TaskFileError(
                "missing", f"{text} has no task files (*{SUFFIX}); expected a file or a store"
            )
        found += inside
    return found


def _by_density(path: Path) -> tuple[str, float]:
    """Tasks of a run, whole ones first."""
    stem = path.name.removesuffix(SUFFIX)
    name, _, density = stem.rpartition("-")
    try:
        return name, -float(density)
    except ValueError:
        return stem, float("-inf")


def load(file: Path) -> Task:
    """A task, or an error that names its file."""
    from spalier.tasks.task import Task

    try:
        return Task.load(file)
    except TaskFileError as error:
        raise TaskFileError(error.code, f"{file}: {error}") from error


def named(files: Sequence[Path]) -> dict[str, Task]:
    """Tasks by names that tell them apart; a file that is given twice counts once."""
    found: dict[str, Task] = {}
    for file in dict.fromkeys(file.resolve() for file in files):
        task = load(file)
        found[task.name if task.name not in found else str(file)] = task
    return found


def shape_of(text: str | None, tasks: Sequence[Task] = ()) -> tuple[int, ...]:
    """The shape of one input: as typed, or the size that a task was learned at."""
    if text is not None:
        try:
            shape = tuple(int(part) for part in text.split(","))
        except ValueError:
            shape = ()
        if not shape or min(shape) < 1:
            raise click.BadParameter(
                f"{text!r} is no shape, expected numbers such as 3,224,224.", param_hint="--shape"
            )
        return shape
    sizes = {task.info().preprocessing.get("size") for task in tasks}
    if len(sizes) == 1 and type(size := sizes.pop()) is int:
        return (3, size, size)
    raise click.UsageError("--shape is missing: the shape of one input, such as 3,224,224.")


def settings_of(given: Sequence[str], shortcuts: dict[str, Any]) -> dict[str, Any]:
    """Settings from ``--set`` and the options that stand for some of them."""
    from spalier.runs.config import Settings

    hints = get_type_hints(Settings)
    found: dict[str, Any] = {name: value for name, value in shortcuts.items() if value is not None}
    for text in given:
        name, raw = _split(text, "--set")
        if name in found:
            raise click.UsageError(f"{name} is set twice.")
        found[name] = _setting(hints.get(name), raw)
    return found


def _setting(hint: Any, raw: str) -> Any:
    """A value as its setting means it: text is text, 4,5,6 a list where a list is expected."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if raw == "null" or raw.startswith("["):
        return _value(raw)
    for kind in kinds:
        if get_origin(kind) is tuple:
            of_text = get_args(kind)[0] is str
            return [part if of_text else _value(part) for part in raw.split(",")]
    if str in kinds:
        return raw
    return _value(raw)


def _pair(text: str, option: str = "--option") -> tuple[str, Any]:
    name, raw = _split(text, option)
    return name, _value(raw)


def _split(text: str, option: str) -> tuple[str, str]:
    name, equals, raw = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is no setting, expected KEY=VALUE.", param_hint=option)
    return name, raw


def _value(text: str) -> Any:
    """A value as YAML means it: 3, 0.5, true, null, [1, 2], {stem: cifar}, or text."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.BadParameter(f"{text!r} cannot be read: {' '.join(str(error).split())}") from error


def values_of(text: str) -> tuple[str, list[Any]]:
    """KEY=V1,V2 as a name and its values; a JSON list for values that have commas."""
    from spalier.runs.config import Settings

    name, raw = _split(text, "--over")
    if raw.startswith("["):
        found = _value(raw)
        return name, found if isinstance(found, list) else [found]
    hint = get_type_hints(Settings).get(name)
    return name, [_setting(hint, part) for part in raw.split(",")]
