"""From what is typed to networks, tasks and settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import click

from spalier.errors import ConfigError, TaskFileError

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
    files: Sequence[Path] = (),
    *,
    weights: str | None = None,
    classes: int | None = None,
    options: Sequence[str] = (),
) -> nn.Module:
    """The network that a command is about."""
    from spalier.networks import open_network

    found = base if base is not None else _beside(files)
    config = run_of(found)
    if config is None:
        given = dict(map(_pair, options))
        return open_network(found, classes=classes, weights=weights, **given)
    if options:
        raise click.UsageError(f"--option is for a network's name, and {found} is a run, which has options.")
    if config.network.startswith("given:"):
        raise ConfigError(
            f"the run in {found} was given its network as an object ({config.network.partition(':')[2]}), which no "
            "file can name; pass --base module:function, and --weights"
        )
    return open_network(
        config.network,
        classes=classes or _classes_of(Path(found)),
        weights=weights or config.weights,
        seed=config.seed,
        **config.network_options,
    )


def _beside(files: Sequence[Path]) -> str:
    """The run in whose folder the tasks lie. Its file must not name code to run: it may come from elsewhere."""
    folders = {file.resolve().parent.parent for file in files}
    runs = [folder for folder in sorted(folders) if (folder / "run.yaml").is_file()]
    if len(runs) != len(folders) or not runs:
        raise click.UsageError(
            "--base is missing: the network that the tasks were learned on, or its run's folder."
        )
    config = run_of(str(runs[0]))
    assert config is not None
    library, colon, _ = config.network.partition(":")
    if colon and library not in ("torchvision", "timm", "hf", "given"):
        raise click.UsageError(
            f"{runs[0]} says that its network is made by code ({config.network}); where you trust it, pass "
            f"--base {runs[0]}."
        )
    return str(runs[0])


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
    for file in sorted((run / "tasks").glob(f"*{SUFFIX}")):
        from spalier.tasks.task import Task

        return len(Task.load(file).info().classes) or None
    return None


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


def named(files: Sequence[Path]) -> dict[str, Task]:
    """Tasks by names that tell them apart."""
    from spalier.tasks.task import Task

    found: dict[str, Task] = {}
    for file in files:
        task = Task.load(file)
        name = task.name
        if name in found:
            name = str(file)
        found[name] = task
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
        name, value = _pair(text, "--set")
        if name in found:
            raise click.UsageError(f"{name} is set twice.")
        found[name] = _listed(value, text.partition("=")[2]) if _is_tuple(hints.get(name)) else value
    return found


def _is_tuple(hint: Any) -> bool:
    return get_origin(hint) is tuple or any(get_origin(each) is tuple for each in get_args(hint))


def _listed(value: Any, text: str) -> Any:
    """0.5,0.2 where a list is expected."""
    if isinstance(value, list) or value is None:
        return value
    return [_value(part) for part in text.split(",")] if "," in text else [value]


def _pair(text: str, option: str = "--option") -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is no setting, expected KEY=VALUE.", param_hint=option)
    return name, _value(value)


def _value(text: str) -> Any:
    """A value as YAML means it: 3, 0.5, true, null, [1, 2], {stem: cifar}, or text."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.BadParameter(f"{text!r} cannot be read: {' '.join(str(error).split())}") from error


def values_of(text: str) -> tuple[str, list[Any]]:
    """KEY=V1,V2 as a name and its values; a JSON list for values with commas."""
    name, value = _pair(text, "--over")
    raw = text.partition("=")[2]
    if raw.startswith("["):
        try:
            return name, list(json.loads(raw))
        except ValueError:
            return name, list(value)
    return name, [_value(part) for part in raw.split(",")]
