"""`examine`: what is installed and what works, by trying it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from spalier.data.places import VARIABLE, data_folder
from spalier.doctor.catalogue import PROBES, Probe
from spalier.doctor.trials import run_trials
from spalier.errors import ConfigError
from spalier.text import table

State = Literal["works", "missing", "broken", "not tried"]
_MARKS: dict[State, str] = {
    "works": "works",
    "missing": "missing",
    "broken": "BROKEN",
    "not tried": "not tried",
}
_OLDEST = (3, 11)
_LITTLE_DISK, _LITTLE_MEMORY = 1 << 30, 1 << 30
_TIMEOUTS = {True: 60.0, False: 300.0}
_LAYOUT = (
    "PyTorch's CPU builds get the weight gradient of a strided 1x1 convolution with 2 to 6 inputs wrong in "
    "channels-last layout (seen in 2.13). Runs avoid it; it is not tried here, since it corrupts memory."
)
_MISMATCH = (
    "torchvision was built for another PyTorch: install matching versions of torch and torchvision from the same "
    "place, or uninstall torchvision if nothing else needs it"
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that was looked at."""

    name: str
    state: State
    needed_for: str
    version: str = ""
    detail: str = ""
    """What was tried, or what happened."""
    remedy: str = ""
    """What to do; empty where it works."""
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All that was looked at. Print it."""

    entries: tuple[Entry, ...]
    quick: bool
    notes: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether nothing is missing or broken that everything needs."""
        return all(entry.state == "works" for entry in self.entries if entry.required)

    def entry(self, name: str) -> Entry:
        """The entry of that name."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(f"{name!r} was not looked at; {', '.join(e.name for e in self.entries)} were")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "is_sound": self.is_sound,
            "quick": self.quick,
            "notes": list(self.notes),
            "entries": [asdict(entry) for entry in self.entries],
        }

    def __str__(self) -> str:
        rows = [[e.name, _MARKS[e.state], e.version or "", e.detail, e.needed_for] for e in self.entries]
        advice = [f"{e.name}: {e.remedy}" for e in self.entries if e.remedy]
        verdict = "sound" if self.is_sound else "not sound: " + ", ".join(self._faults())
        parts = [table(["what", "state", "version", "found", "needed for"], rows), "\n".join(advice)]
        return "\n\n".join([*filter(None, parts), "\n".join([*self.notes, verdict])])

    def _faults(self) -> list[str]:
        return [f"{e.name} {e.state}" for e in self.entries if e.required and e.state != "works"]


def examine(
    *,
    quick: bool = True,
    probes: Sequence[Probe] = PROBES,
    timeout: float | None = None,
    together: int = 2,
    environment: Mapping[str, str] | None = None,
    progress: Callable[[Entry], None] | None = None,
) -> Examination:
    """Try what Spalier uses, each in a process of its own, so that one that crashes or hangs is an entry and no more.

    Args:
        quick: leave out what takes long: torch.compile, ExecuTorch, Lightning. They are entries that were not tried.
        probes: what is tried.
        timeout: the seconds that one trial has, by default a minute, or five if there is time.
        together: how many trials run at once.
        environment: variables for the trials, by default those of this process.
        progress: is told each entry when it is known.
    """
    limit = _TIMEOUTS[quick] if timeout is None else timeout
    if not limit > 0 or isinstance(together, bool) or together < 1:
        raise ConfigError(
            f"timeout is {timeout!r} and together {together!r}, expected more than 0 seconds and at least 1 process"
        )
    found: dict[str, Entry] = {}

    def note(entry: Entry) -> None:
        found[entry.name] = entry
        if progress is not None:
            progress(entry)

    own = [_python(), _disk(), _memory(), _data(environment)]
    for entry in own:
        note(entry)
    tried = []
    for probe in probes:
        entry_or_none = _known(probe, quick)
        if entry_or_none is None:
            tried.append(probe)
        else:
            note(entry_or_none)
    for probe, outcome in run_trials(tried, timeout=limit, together=together, environment=environment):
        note(_entry(probe, outcome))
    order = [own[0].name, *(p.name for p in probes), *(e.name for e in own[1:])]
    return Examination(entries=tuple(found[name] for name in order), quick=quick, notes=(_LAYOUT,))


def _entry(probe: Probe, outcome: Mapping[str, Any]) -> Entry:
    detail = str(outcome.get("detail", ""))
    remedy = "" if outcome["state"] == "works" else probe.remedy
    if outcome.get("remedy"):
        remedy = str(outcome["remedy"])
    elif "torchvision::nms" in detail:
        remedy = _MISMATCH
    elif outcome.get("needs"):
        remedy = f"pip install {outcome['needs']}"
    elif outcome["state"] == "broken" and remedy.startswith("pip install "):
        remedy = remedy.replace("pip install ", "pip install --force-reinstall ", 1)
    return _of(probe, outcome["state"], version=str(outcome.get("version", "")), detail=detail, remedy=remedy)


def _of(probe: Probe, state: State, **values: str) -> Entry:
    return Entry(name=probe.name, state=state, needed_for=probe.needed_for, required=probe.required, **values)


def _known(probe: Probe, quick: bool) -> Entry | None:
    """What can be said without a trial, where none is due."""
    if probe.programs and not any(map(shutil.which, probe.programs)):
        return _of(
            probe, "missing", detail=f"there is none of {', '.join(probe.programs)}", remedy=probe.remedy
        )
    if not (probe.slow and quick):
        return None
    try:
        versions = [metadata.version(name) for name in probe.packages]
    except metadata.PackageNotFoundError as error:
        return _of(probe, "missing", detail=f"{error.name} is not installed", remedy=probe.remedy)
    return _of(
        probe,
        "not tried",
        version=", ".join(versions),
        detail="installed; a trial takes long",
        remedy="spalier doctor --thorough, or examine(quick=False), tries it",
    )


# what this process can see itself


def _python() -> Entry:
    fits = sys.version_info[:2] >= _OLDEST
    return Entry(
        name="Python",
        state="works" if fits else "broken",
        needed_for="everything",
        version=platform.python_version(),
        detail=f"{platform.system()} {platform.machine()}",
        remedy="" if fits else f"use Python {'.'.join(map(str, _OLDEST))} or later",
        required=True,
    )


def _disk() -> Entry:
    free = shutil.disk_usage(Path.cwd()).free
    return _room("disk space", free, _LITTLE_DISK, "runs and data", "free in this folder", "make room")


def _memory() -> Entry:
    free = _available()
    if free is None:
        return Entry(name="memory", state="not tried", needed_for="runs", detail="this system does not tell")
    return _room(
        "memory", free, _LITTLE_MEMORY, "runs", "available", "end other programs, or take smaller batches"
    )


def _room(name: str, free: int, little: int, needed_for: str, what: str, remedy: str) -> Entry:
    enough = free >= little
    return Entry(
        name=name,
        state="works" if enough else "broken",
        needed_for=needed_for,
        detail=f"{free / (1 << 30):.1f} GiB {what}",
        remedy="" if enough else remedy,
    )


def _available() -> int | None:
    """Bytes of memory that can be had."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _data(environment: Mapping[str, str] | None) -> Entry:
    folder = data_folder((os.environ if environment is None else environment).get(VARIABLE))
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
    shown = ", ".join((found or [])[:6]) + (", ..." if found and len(found) > 6 else "")
    return Entry(
        name="data folder",
        state="missing" if found is None else "works",
        needed_for="data sets by name",
        detail=f"{folder} is no folder" if found is None else f"{folder}: {shown or 'empty'}",
        remedy=f"make it, or let {VARIABLE} name the folder that holds data sets" if found is None else "",
    )
