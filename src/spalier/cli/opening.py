"""From what is typed to networks, tasks and settings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import spalier
from spalier.cli.console import FILE
from spalier.errors import ConfigError, ExampleError, RunError, TaskFileError, WeightsError

if TYPE_CHECKING:
    from torch import nn

    from spalier.data.texts import Tokenizer
    from spalier.inputs import Inputs
    from spalier.runs import Settings
    from spalier.tasks import Task

SUFFIX = ".task.safetensors"


# networks


def base_options(command: Any) -> Any:
    """The options that name a base."""
    text = (
        "A network's name (resnet8, resnet20, resnet18, resnet34, resnet50, torchvision:NAME, timm:NAME, hf:NAME, "
        "module:function), or the folder of a run, which names network, options and weights. By default the run "
        "that the task file lies in."
    )
    return click.option("--base", help=text)(network_options(command))


def network_options(command: Any) -> Any:
    """The options of a network that is named by an argument."""
    weights = click.option("--weights", type=FILE, help="Its weights: safetensors, or .pth of tensors.")
    number = click.IntRange(1)
    classes = click.option("--classes", type=number, help="How many classes it has; by default its own number.")
    text = "What else its constructor takes; repeatable."
    others = click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help=text)
    pretrained = click.option("--pretrained", is_flag=True, help="Load the weights that its library has for it.")
    return weights(pretrained(classes(others(command))))


def settings_option(command: Any) -> Any:
    """``--set``."""
    text = "A setting of the run, as in its file; repeatable. `spalier train --help-settings` lists them."
    return click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=text)(command)


def settings_list_option(command: Any) -> Any:
    """``--help-settings``: all settings of a run by group, each with its default and a line of help."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if not wanted or context.resilient_parsing:
            return
        from spalier.runs.settings import setting_groups

        for group, entries in setting_groups().items():
            click.echo(f"{group}:")
            for name, default, text in entries:
                shown = ", ".join(default) if isinstance(default, tuple) else str(default).lower()
                click.echo(f"  {name:18}  {'' if default in (None, {}) else shown:11}  {text}")
        context.exit()

    text = "List all settings with their defaults, and exit."
    options: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": show}
    return click.option("--help-settings", "--settings", "_", help=text, **options)(command)


def open_base(
    base: str,
    *,
    weights: str | None = None,
    pretrained: bool = False,
    classes: int | None = None,
    options: Sequence[str] = (),
) -> nn.Module:
    """The network that a command is about: by its name, or that of a run."""
    from spalier.networks import open_network

    run = run_in(Path(base))
    if run is None:
        if Path(base).is_dir():
            raise ConfigError(f"{base} is a folder without a run in it (run.yaml); expected a run or a network's name")
        named = _constructor_options(options)
        return open_network(base, classes=classes, weights=weights, pretrained=pretrained, **named)
    if options:
        raise click.UsageError(f"--option is for a network's name, and {base} is a run, which has options.")
    if run.network.startswith("given:"):
        raise ConfigError(
            f"the run in {base} was given its network as an object ({run.network.partition(':')[2]}), which no "
            "file can name; pass --base module:function, and --weights"
        )
    if weights is None and run.weights is not None and not Path(run.weights).is_file():
        raise WeightsError(
            f"{base}/run.yaml names the weights {run.weights}, and there is no such file here; pass --weights"
        )
    classes, pretrained = classes or _class_count(Path(base)), weights is None and (pretrained or run.pretrained)
    said: dict[str, Any] = {"weights": weights or run.weights, "seed": run.seed}
    return open_network(run.network, classes=classes, pretrained=pretrained, **said, **run.network_options)


def tokenizer_name(base: str, net: nn.Module) -> str | None:
    """Where the words of a base that reads texts are: what its run was told, or the base itself; None for others."""
    from spalier.networks import reads_texts

    run = run_in(Path(base))
    network, told = (base, None) if run is None else (run.network, run.tokenizer)
    own = network if network.startswith("hf:") else None
    return (told or own) if reads_texts(net) else None


def tokenizer_of(base: str, net: nn.Module) -> Tokenizer | None:
    """The tokenizer of a base that reads texts; None for others."""
    from spalier.data.texts import Tokenizer

    name = tokenizer_name(base, net)
    return None if name is None else Tokenizer.load(name)


def _constructor_options(given: Sequence[str]) -> dict[str, Any]:
    found = {name: _value(raw) for name, raw in (_split(text, "--option") for text in given)}
    for name in ("name", "seed", "classes", "weights", "pretrained"):  # arguments of open_network itself
        if name in found:
            instead = f"; there is --{name}" if name in ("classes", "weights", "pretrained") else ""
            raise click.UsageError(f"{name} is no option of a network{instead}.")
    return found


def _class_count(run: Path) -> int | None:
    """How many classes a run learns: random weights that it may have started from depend on that."""
    try:
        found = sorted((run / "blocks").glob("00-*.json"))  # a run with several codes has a file for each
        first = found[0] if found else run / "blocks" / "00.json"
        return len(json.loads(first.read_text("utf-8"))["classes"]) or None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "folder", f"{run} does not say how many classes it has (blocks/00.json): {error}; pass --classes"
        ) from error


# runs


def run_in(folder: Path) -> Settings | None:
    """The settings of the run in a folder, if there is one."""
    if not (folder / "run.yaml").is_file():
        return None
    from spalier.runs import Settings

    return Settings.load(folder)


def run_beside(file: Path) -> str:
    """The run in whose folder a task lies. Its file must not name code to run: it may come from elsewhere."""
    folder = file.resolve().parent.parent
    run = run_in(folder)
    if run is None:
        raise click.UsageError("--base is missing: the network that the tasks were learned on, or its run's folder.")
    library, colon, _ = run.network.partition(":")
    if colon and library not in ("torchvision", "timm", "hf", "given"):
        raise click.UsageError(
            f"{folder} says that its network is made by code ({run.network}); where you trust it, pass --base {folder}."
        )
    return str(folder)


# tasks


def task_files(given: Sequence[str]) -> list[Path]:
    """The files of task arguments, each once: an argument is a file, a folder of them, or a run."""
    found: dict[Path, Path] = {}
    for text in given:
        path = Path(text)
        if (path / "run.yaml").is_file():
            path = path / "tasks"
        inside = sorted(path.glob(f"*{SUFFIX}"), key=_by_density) if path.is_dir() else [path]
        if not inside:
            raise TaskFileError("missing", f"{text} has no task files (*{SUFFIX}); expected a file or a store")
        for file in inside:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _by_density(path: Path) -> tuple[str, float]:
    """Tasks of a run, the densest first."""
    stem = path.name.removesuffix(SUFFIX)
    name, _, density = stem.rpartition("-")
    try:
        return name, -float(density)
    except ValueError:
        return stem, float("-inf")


def load_task(file: Path) -> Task:
    """A task, or an error that names its file."""
    try:
        return spalier.Task.load(file)
    except TaskFileError as error:
        raise TaskFileError(error.code, f"{file}: {error}") from error


def load_tasks(files: Sequence[Path]) -> dict[str, Task]:
    """Tasks by names that tell them apart: their own, or else their files'."""
    found: dict[str, Task] = {}
    for file in files:
        task = load_task(file)
        found[task.name if task.name not in found else str(file.resolve())] = task
    return found


def one_file(task: str) -> Path:
    """The file of a task argument that names one task."""
    files = task_files([task])
    if len(files) != 1:
        raise click.UsageError(f"{task} holds {len(files)} tasks; name one of them, such as {files[0]}.")
    return files[0]


def example_of(net: nn.Module, batch: int, shape: str | None, tasks: Sequence[Task] = ()) -> Inputs:
    """A batch for a network: images of a shape, or texts of so many tokens, as typed or as tasks were learned with."""
    from spalier.benching import noise

    try:
        return noise(net, tasks, batch, None if shape is None else numbers(shape, "--shape", "3,224,224"))
    except ExampleError as error:
        raise click.UsageError(f"{error}.") from error


def numbers(text: str, option: str, example: str) -> tuple[int, ...]:
    """Positive numbers with commas between them."""
    found = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in found):
        raise click.BadParameter(f"{text!r}, expected numbers such as {example}.", param_hint=option)
    return tuple(map(int, found))


# settings


def read_config(config: str) -> dict[str, Any]:
    """What a file of settings says; there has to be something."""
    from spalier.runs.settings_files import read_settings

    found = read_settings(Path(config))
    if not found:
        raise ConfigError(f"{config} has no settings; expected some, such as data: digits")
    return found


def settings_of(given: Sequence[str], shortcuts: dict[str, Any]) -> dict[str, Any]:
    """Settings from ``--set``, and from the options that stand for some of them."""
    found = {name: value for name, value in shortcuts.items() if value is not None}
    for text in given:
        name, raw = _split(text, "--set")
        if name in found:
            raise click.UsageError(f"{name} is set twice.")
        found[name] = _setting(name, raw)
    return found


def values_of(text: str) -> tuple[str, list[Any]]:
    """KEY=V1,V2 as a name and its values; a JSON list for values that have commas."""
    name, raw = _split(text, "--over")
    if raw.startswith("["):
        return name, _value(raw)
    return name, [_setting(name, part) for part in raw.split(",")]


def _setting(name: str, raw: str) -> Any:
    """A value as its setting means it: text is text, 4,5,6 a list where a list is expected."""
    from spalier.runs.settings import checked

    readings = (_value, lambda text: list(map(_value, text.split(","))), lambda text: text.split(","), str)
    for read in () if raw.startswith("[") else readings:  # the first that the setting takes
        with contextlib.suppress(ConfigError, KeyError, click.BadParameter):
            return checked(name, read(raw))
    return _value(raw)  # the setting takes it, or says what it expects


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
