"""A folder becomes `Findings`: a run, a sweep, a store, or a folder of runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spalier.errors import ConfigError, RunError, SpalierError, TaskFileError
from spalier.files import reason
from spalier.reporting import reading
from spalier.reporting.model import Entry, Findings, Run
from spalier.reporting.naming import clean, repeated, varied, without_method
from spalier.runs.config import Settings
from spalier.tasks.container import SUFFIX, check_name
from spalier.tasks.store import Store
from spalier.tasks.task import Task

_SHARES = ("channels", "weights", "macs")
_MEASURED = ("test", "validation", *_SHARES, "learned", "bytes", "latency_ms", "seconds")


def gather(source: str | os.PathLike[str]) -> Findings:
    """Read a folder; one that holds none of this is refused."""
    folder = Path(source).expanduser()
    try:
        return _gathered(folder)
    except OSError as error:
        path = folder if error.filename is None else Path(error.filename)
        raise reading.wrong(path, f"cannot be read ({reason(error)})", "files of a run or a store") from error


def _gathered(folder: Path) -> Findings:
    if not folder.is_dir():
        raise RunError("folder", f"{str(folder)!a} is no folder; expected that of a run, a sweep or a store")
    if (folder / "run.yaml").exists():
        return _findings("run", folder, [folder], {})
    if (folder / "sweep.yaml").exists():
        return _sweep(folder)
    runs = _below(folder)
    if runs:
        return _findings("folder of runs", folder, runs, {})
    if any(folder.glob(f"*{SUFFIX}")):
        return _store(folder)
    raise RunError(
        "folder",
        f"{str(folder)!a} holds no run.yaml, sweep.yaml or task files, and no folder of a run within two levels; "
        "expected the folder of a run, a sweep, a store, or a folder of runs",
    )


def _below(folder: Path) -> list[Path]:
    found = [path.parent for pattern in ("*/run.yaml", "*/*/run.yaml") for path in folder.glob(pattern)]
    return sorted(set(found))


def _sweep(folder: Path) -> Findings:
    failed: dict[str, str] = {}
    if (folder / "sweep.json").exists():
        said = reading.json_of(folder / "sweep.json", "the rows of a sweep")
        told = said.get("failed", {}) if isinstance(said, dict) else None
        if not isinstance(told, dict):
            raise reading.wrong(folder / "sweep.json", "does not say what failed", "the rows of a sweep")
        failed = {clean(str(name)): clean(str(why)) for name, why in told.items()}
    runs = sorted(path.parent for path in folder.glob("*/run.yaml"))
    return _findings("sweep", folder, runs, failed)


def _findings(kind: Any, folder: Path, paths: Sequence[Path], failed: dict[str, str]) -> Findings:
    settings = {path: _settings(path) for path in paths}
    names = {
        path: folder.absolute().name if path == folder else clean(str(path.relative_to(folder)))
        for path in paths
    }
    runs = [_run(path, names[path], settings[path], failed) for path in paths]
    lengths = {run.name: len(run.entries) for run in runs}
    again = repeated({names[path]: said for path, said in settings.items()}, lengths)
    shown = [run for run in runs if run.name not in again]
    shared = {
        name: value
        for name, value in (next(iter(settings.values())) if settings else {}).items()
        if all(other[name] == value for other in settings.values())
    }
    differ = varied(list(settings.values()))
    return Findings(kind, folder.absolute().name, shown, shared, differ, failed, _date(folder), again)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        loaded = Settings.load(folder)
    except ConfigError as error:
        raise RunError("folder", f"{str(folder)!a} has settings that cannot be read: {error}") from error
    return {each.name: getattr(loaded, each.name) for each in fields(Settings)}


def _run(folder: Path, name: str, settings: Mapping[str, Any], failed: dict[str, str]) -> Run:
    done = (folder / "results.json").exists()
    entries, targets = [], dict[int, float]()
    for number, path, block in reading.blocks(folder):
        row, target = block["row"], reading.target(block, path)
        if target is not None:
            targets[number] = target
        try:
            task = Task.load(folder / "tasks" / f"{check_name(row.get('task'))}{SUFFIX}")
        except TaskFileError as error:
            failed[clean(f"{name}/{row.get('task')}")] = str(error)
            continue
        entries.append(_entry(path, name, settings, number, block, task))
    return Run(name, entries, reading.epochs(folder), "done" if done else "not finished", targets)


def _entry(
    path: Path, run: str, settings: Mapping[str, Any], number: int, block: dict[str, Any], task: Task
) -> Entry:
    row, folder = block["row"], path.parent.parent
    classes = [clean(str(c)) or "(no name)" for c in block.get("classes") or task.description.classes]
    target = reading.target(block, path)
    measured = {name: reading.amount(row.get(name), path) for name in _MEASURED}
    measured |= {name: reading.share(row.get(name)) for name in ("test", "validation")}
    return Entry(
        key=f"{run}/{task.name}",
        name=task.name,
        run=run,
        settings=settings,
        seed=settings["seed"],
        target=1.0 if target is None else target,
        numbers={**_numbers(task), **{k: v for k, v in measured.items() if v is not None}},
        classes=classes,
        confusion=reading.confusion(path, block, len(classes)),
        layers=reading.layers(task),
        scores=reading.scores(folder, number),
        examples=reading.examples(folder, number, block),
        facts=_facts(task),
        architecture=task.description.base.architecture,
    )


def _numbers(task: Task) -> dict[str, float | None]:
    """What a task's file says in numbers; networks in float32."""
    said, found = task.description, dict[str, float | None]()
    for name in _SHARES:
        pair = getattr(said.density, name)
        found[name], found[f"{name}_left"], found[f"{name}_of"] = (
            (None, None, None) if pair is None else (pair[0] / pair[1], pair[0], pair[1])
        )
    weights = said.density.weights
    found["network"], found["base"] = (None, None) if weights is None else (4 * weights[0], 4 * weights[1])
    found["test"] = reading.share(said.metrics.get("accuracy"))
    found["validation"] = reading.share(said.metrics.get("validation"))
    return {**found, "learned": said.learned}


def _facts(task: Task) -> dict[str, str]:
    said = task.description
    settings = ", ".join(f"{k}={v}" for k, v in said.adapter.items() if k != "kind")
    return {
        "adapter": f"{said.adapter['kind']}({settings})",
        "storage": said.storage,
        "licence": said.licence or "not stated",
        "base": f"{said.base.architecture[:12]} with values {said.base.values[:12]}",
        "file": f"{said.name}{SUFFIX}",
    }


# -- stores -----------------------------------------------------------------------------------------------------------


def _store(folder: Path) -> Findings:
    store, failed = Store(folder), dict[str, str]()
    loaded: list[tuple[Task, int]] = []
    for name in store:
        try:
            loaded.append((store.load(name), (folder / f"{name}{SUFFIX}").stat().st_size))
        except (SpalierError, OSError) as error:
            failed[name] = str(error)
    settings = _told_apart([task for task, _ in loaded])
    entries = [_stored(task, size, said) for (task, size), said in zip(loaded, settings, strict=True)]
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(repr((sorted(entry.settings.items()), entry.seed)), []).append(entry)
    runs = [_row_of_tasks(members) for members in groups.values()]
    names = {run.name: run for run in runs}
    if len(names) < len(runs):
        runs = [Run(f"{run.name} ({place})", run.entries) for place, run in enumerate(runs, 1)]
    return Findings("store", folder.absolute().name, runs, {}, varied(settings), failed, _date(folder))


def _row_of_tasks(members: list[Entry]) -> Run:
    first = members[0]
    seed = "" if first.seed is None else f" seed {first.seed}"
    ordered = sorted(members, key=lambda e: (-e.target, e.name))
    return Run(f"{stem(first.name)[0]}{seed}", ordered)


def _told_apart(tasks: list[Task]) -> list[dict[str, Any]]:
    """What says which tasks belong together; where that does not tell two apart, their names do too.

    Files say which run they are of; the names of older ones hold it, with the method.
    """
    found = [_said(task) for task in tasks]
    plain = [without_method(stem(task.name)[0]) for task in tasks]
    if any(_run_of(task) for task in tasks):
        found = [{**s, "name": _run_of(t) or name} for s, t, name in zip(found, tasks, plain, strict=True)]
    seen: dict[str, int] = {}
    keys = [
        repr((said, t.description.provenance.get("seed"), _target(t)))
        for said, t in zip(found, tasks, strict=True)
    ]
    for key in keys:
        seen[key] = seen.get(key, 0) + 1
    if any(count > 1 for count in seen.values()):
        found = [{**said, "name": name} for said, name in zip(found, plain, strict=True)]
    return found


def _run_of(task: Task) -> str:
    return str(task.description.provenance.get("run") or "")


def _said(task: Task) -> dict[str, Any]:
    said = task.description
    data = str(said.provenance.get("data") or without_method(stem(task.name)[0]))
    method = str(said.provenance.get("method") or said.adapter["kind"].lower())
    found = {"data": data, "classes": list(said.classes), "method": method, "rank": said.adapter.get("rank")}
    return {**found, "storage": said.storage, "base": said.base.architecture[:8]}


def stem(name: str) -> tuple[str, float | None]:
    """A task's name without its density, and that.

    >>> stem("flowers-42.5"), stem("flowers-start"), stem("birds")
    (('flowers', 0.425), ('flowers', 1.0), ('birds', None))
    """
    if name.endswith("-start"):
        return name.removesuffix("-start"), 1.0
    match = re.fullmatch(r"(.+)-(\d{1,3}(?:\.\d+)?)", name)
    if match is None or not 0 < float(match[2]) <= 100:
        return name, None
    return match[1], round(float(match[2]) / 100, 6)


def _target(task: Task) -> float:
    named = stem(task.name)[1]
    channels = task.description.density.channels
    if named is not None:
        return named
    return 1.0 if channels is None else round(channels[0] / channels[1], 2)


def _stored(task: Task, size: int, settings: Mapping[str, Any]) -> Entry:
    said = task.description
    return Entry(
        key=task.name,
        name=task.name,
        run=f"{stem(task.name)[0]}",
        settings=settings,
        seed=said.provenance.get("seed"),
        target=_target(task),
        numbers={**_numbers(task), "bytes": size},
        classes=list(said.classes),
        layers=reading.layers(task),
        facts=_facts(task),
        architecture=said.base.architecture,
    )


def _date(folder: Path) -> str:
    """When the newest result was written."""
    patterns = ("results.json", "blocks/*.json", f"*{SUFFIX}", f"tasks/*{SUFFIX}")
    below = ("", "*/", "*/*/")
    times = [p.stat().st_mtime for b in below for pattern in patterns for p in folder.glob(b + pattern)]
    if not times:
        return ""
    return datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%d %H:%M UTC")
