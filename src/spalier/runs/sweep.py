"""`Sweep`: one run for each combination of settings, and one table of what came out.

A sweep's folder:

sweep.yaml                 the settings that all runs share, and those that it goes through
NAME/                      the folder of each run, named after its settings
logs/NAME.txt              what the run's process had to say
sweep.csv, sweep.json      all rows so far, and what has failed
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spalier import files
from spalier.errors import ConfigError, RunError
from spalier.runs.config import FREE
from spalier.runs.fields import check_known, checked, differences, in_words, read
from spalier.runs.folder import RunFolder, writing
from spalier.runs.places import Job, Local, OnRay, Place, Report, carry_out
from spalier.runs.results import Results, Row, rows_to_csv
from spalier.runs.transfer import TransferPruning
from spalier.text import table

_LONGEST = 120  # characters of a run's name; file systems take 255 bytes
_MEASURED = ("validation", "test")


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in some settings: one for each combination.

    Args:
        base: the settings that all runs share.
        over: the values to go through, by setting; the last one changes fastest.

    >>> sweep = Sweep(TransferPruning(data="digits"), over={"criterion": ["taylor", "weight"], "seed": [0, 1]})
    >>> [name for name, _ in sweep.runs()][:2]
    ['criterion=taylor,seed=0', 'criterion=taylor,seed=1']
    """

    base: TransferPruning
    over: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        if not isinstance(self.base, TransferPruning):
            raise ConfigError(f"the base is a {type(self.base).__name__}, expected a TransferPruning")
        object.__setattr__(self, "over", _checked(self.over))
        self.runs()

    def runs(self) -> list[tuple[str, TransferPruning]]:
        """All runs by name; names are names of folders."""
        return [(name, self.base.replace(**given)) for name, given in self._combinations().items()]

    def _combinations(self) -> dict[str, dict[str, Any]]:
        """The settings that are gone through, by the name of the run."""
        found: dict[str, dict[str, Any]] = {}
        for values in itertools.product(*self.over.values()):
            given = dict(zip(self.over, values, strict=True))
            self._check(given)
            found[_name(given)] = given
        return found

    def _check(self, given: Mapping[str, Any]) -> None:
        try:
            self.base.replace(**given)
        except ConfigError as error:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ConfigError(f"the run with {shown} cannot be: {error}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Sweep:
        """The sweep in a YAML or TOML file with `base` and `over`, or that of a sweep's folder."""
        file = Path(path) / "sweep.yaml" if Path(path).is_dir() else Path(path)
        found = read(file)
        if set(found) != {"base", "over"} or not isinstance(found["base"], dict):
            raise ConfigError(f"{file} has {', '.join(found) or 'nothing'}; expected tables base and over")
        return Sweep(TransferPruning.of(found["base"], f"base in {file}"), found["over"])

    def to_yaml(self) -> str:
        """The sweep, as `load` reads it."""
        import yaml

        # as given, without what the recipe adds: that may depend on the settings which are gone through
        plain = json.loads(json.dumps({"base": self.base.given, "over": self.over}))
        return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None))

    def run(
        self,
        folder: str | os.PathLike[str],
        *,
        jobs: int | None = None,
        place: Literal["local", "ray"] = "local",
        retries: int = 1,
        threads: int | None = None,
        gpus: float = 0,
        strict: bool = False,
        progress: bool = True,
    ) -> SweepResults:
        """Carry all runs out, each in a process of its own, or go on with those that are not done.

        Args:
            folder: where the sweep is kept; on a cluster, on storage that all nodes share.
            jobs: how many runs at once: by default one, and on Ray as many as there is room for.
            place: this machine, or a Ray cluster.
            retries: how often a run that fails is tried again, from its last checkpoint.
            threads: of each run; by default its share of the processors, and on Ray one.
            gpus: of each run, on Ray.
            strict: whether to raise when runs have failed, once all others are done.
            progress: whether to say which runs are done.
        """
        _check_numbers(jobs, retries, threads)
        where = Path(folder).absolute()
        with RunFolder(where).locked():
            self._open_(where)
            gathering = _Gathering(self, where, progress)
            left = gathering.begin()
            if left:
                count = threads or _share_of_processors(jobs, place)
                todo = [Job.of(n, c, where / n, _log(where, n), count) for n, c in left]
                at_once = jobs or (1 if place == "local" else len(todo))
                with _placed(place, count, gpus) as chosen:
                    carry_out(todo, chosen, at_once=at_once, retries=retries, told=gathering.hear)
            gathering.write()
        if strict and gathering.failed:
            raise RunError("failed", gathering.results().failures())
        return gathering.results()

    def _open_(self, folder: Path) -> None:
        """Make the folder this sweep's, or see that it is."""
        file = folder / "sweep.yaml"
        if file.exists():
            self._check_same(Sweep.load(file), folder)
            return
        if any(
            entry.name != ".lock" and not entry.name.startswith(".spalier-") for entry in folder.iterdir()
        ):
            raise RunError(
                "folder", f"{str(folder)!a} holds no sweep, and is not empty; expected a new or empty folder"
            )
        with writing(folder):
            files.write(file, self.to_yaml().encode())

    def _check_same(self, begun: Sweep, folder: Path) -> None:
        different = {
            f"over {name}": (begun.over.get(name), self.over.get(name))
            for name in {**begun.over, **self.over}
            if begun.over.get(name) != self.over.get(name)
        }
        if not different:
            for (_, was), (_, now) in zip(begun.runs(), self.runs(), strict=True):
                different |= differences(was, now, FREE | set(self.over))
        if different:
            raise RunError(
                "changed",
                f"the sweep in {str(folder)!a} was begun as another: {in_words(different)}; go on with the one it "
                "was begun as (its sweep.yaml), or use another folder",
            )


def _checked(over: Any) -> dict[str, tuple[Any, ...]]:
    """The values to go through, each as its setting wants it."""
    if not isinstance(over, Mapping) or not over:
        raise ConfigError(
            f"over is {over!r}, expected lists of values by setting, such as {{'seed': [0, 1]}}"
        )
    check_known(TransferPruning, over, "over")
    found = {}
    for name, values in over.items():
        if not isinstance(values, list | tuple | range) or not values:
            raise ConfigError(f"over has {values!r} for {name}, expected a list of values")
        found[name] = tuple(checked(TransferPruning, name, value) for value in values)
        if len({json.dumps(value) for value in found[name]}) < len(values):
            raise ConfigError(f"over has {values!r} for {name}, expected each value once")
    return found


def _check_numbers(jobs: int | None, retries: int, threads: int | None) -> None:
    for name, number, least in (("jobs", jobs, 1), ("retries", retries, 0), ("threads", threads, 1)):
        if number is not None and (type(number) is not int or number < least):
            raise ConfigError(f"{name} is {number!r}, expected a whole number of at least {least}")


def _name(given: Mapping[str, Any]) -> str:
    """A name for a folder that is short, safe and no other run's, also where small and capital letters are the same."""
    texts = {name: _text(value) for name, value in given.items()}
    whole = ",".join(f"{name}={text}" for name, text in texts.items())
    if len(whole) <= _LONGEST and all(_is_plain(value, texts[name]) for name, value in given.items()):
        return whole
    digest = hashlib.blake2b(json.dumps(given).encode(), digest_size=5).hexdigest()
    return f"{re.sub('[^A-Za-z0-9_.=,-]+', '-', whole)[:_LONGEST]}-{digest}"


def _is_plain(value: Any, text: str) -> bool:
    """True for a text that says which value it was."""
    if isinstance(value, str):
        return bool(re.fullmatch("[a-z][a-z0-9_.-]*", text)) and text not in ("null", "true", "false")
    return bool(re.fullmatch("[a-z0-9.-]+", text))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _log(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.txt"


def _share_of_processors(jobs: int | None, place: str) -> int:
    if place == "ray" and jobs is None:
        return 1
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (here or 1) // (jobs or 1))


@contextlib.contextmanager
def _placed(place: str, threads: int, gpus: float) -> Iterator[Place]:
    if place not in ("local", "ray"):
        raise ConfigError(f'place is {place!r}, expected "local" or "ray"')
    if place == "local" and gpus:
        raise ConfigError("gpus is for runs on Ray; here, set CUDA_VISIBLE_DEVICES")
    found: Place = Local() if place == "local" else OnRay(threads, gpus)
    try:
        yield found
    finally:
        found.close()


class _Gathering:
    """The rows of a sweep, as its runs come to an end."""

    def __init__(self, sweep: Sweep, folder: Path, shown: bool) -> None:
        self.sweep, self.folder, self.shown = sweep, folder, shown
        self.given = sweep._combinations()
        self.rows: dict[str, list[Row]] = {}
        self.failed: dict[str, str] = {}

    def begin(self) -> list[tuple[str, TransferPruning]]:
        """Take what is done already; the runs that are left."""
        left = []
        for name, config in self.sweep.runs():
            where = RunFolder(self.folder / name)
            with contextlib.suppress(RunError):  # its process will meet the same, and report it
                if where.results.exists():
                    where.open_(config)
                    self.rows[name] = list(Results.load(where.path).rows)
            if name not in self.rows:
                left.append((name, config))
        self._say(f"{len(left)} of {len(self.given)} runs to do")
        return left

    def hear(self, name: str, report: Report, attempt: int, again: bool) -> None:
        """An attempt at a run has ended."""
        try:
            if not report.done:
                raise RunError("failed", report.message)
            self.rows[name] = list(Results.load(self.folder / name).rows)
            self.failed.pop(name, None)
            self._say(f"{name}: done")
        except RunError as error:
            self.failed[name] = str(error)
            self._say(f"{name}: attempt {attempt} failed{', will be tried again' * again}: {error}")
        self.write()

    def _say(self, text: str) -> None:
        if self.shown:
            print(f"[{len(self.rows)}/{len(self.given)}] {text}", file=sys.stderr, flush=True)

    def results(self) -> SweepResults:
        """What is there so far, in the order of the sweep."""
        rows = [
            _row(name, given, row) for name, given in self.given.items() for row in self.rows.get(name, [])
        ]
        failed = {name: self.failed[name] for name in self.given if name in self.failed}
        return SweepResults(self.folder, tuple(self.sweep.over), rows, failed)

    def write(self) -> None:
        """Put the tables in place, whole."""
        found = self.results()
        with writing(self.folder):
            files.write(self.folder / "sweep.csv", found.to_csv().encode())
            text = json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n"
            files.write(self.folder / "sweep.json", text.encode())


def _row(name: str, given: Mapping[str, Any], row: Row) -> Row:
    """A row of a run, with the settings that tell it from the others."""
    plain = json.loads(json.dumps(given))
    return {"run": name, **{_column(n, row): value for n, value in plain.items()}, **row}


def _column(setting: str, row: Row) -> str:
    """What a setting is called in a row, which may have a number of the same name (epochs, weights)."""
    return f"{setting}_setting" if setting in row else setting


@dataclass(frozen=True)
class SweepResults:
    """The rows of all runs of a sweep. Print them."""

    folder: Path
    over: Sequence[str]
    """The settings that the sweep goes through."""
    rows: Sequence[Row]
    failed: Mapping[str, str] = field(default_factory=dict)
    """What the last attempt at each run that failed has said, by the run's name."""

    def __str__(self) -> str:
        titles = list(self.over)
        cells = [[_text(_setting(row, name)) for name in self.over] for row in self.rows]
        own = table(titles, cells).splitlines()
        width = max(map(len, own))
        lines = str(Results(self.folder, self.rows)).splitlines()
        both = [f"{mine.ljust(width)}  {line}" for mine, line in zip(own, lines, strict=True)]
        return "\n".join([*both, *([self.failures()] if self.failed else [])])

    def failures(self) -> str:
        """The runs that failed, and why."""
        lines = [f"{name}: {message} (logs/{name}.txt)" for name, message in self.failed.items()]
        return "\n".join([f"{len(lines)} failed in {str(self.folder)!a}; run again to try again", *lines])

    def to_csv(self) -> str:
        """The rows with all their columns, for a spreadsheet."""
        return rows_to_csv(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"format": 1, "over": list(self.over), "rows": list(self.rows), "failed": dict(self.failed)}

    def summary(self, over: str | Sequence[str] = "seed") -> Summary:
        """Means and standard deviations over some of the settings, by all the others and the density."""
        averaged = (over,) if isinstance(over, str) else tuple(over)
        for name in averaged:
            if name not in self.over:
                raise ConfigError(
                    f"the sweep does not go through {name!r}, expected some of {', '.join(self.over)}"
                )
        others = [name for name in self.over if name not in averaged]
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            key = json.dumps([[_setting(row, name) for name in others], row["target"]])
            groups.setdefault(key, []).append(row)
        return Summary(tuple(others), [_averaged(others, rows) for rows in groups.values()])


def _setting(row: Row, name: str) -> Any:
    return row[f"{name}_setting"] if f"{name}_setting" in row else row[name]


def _averaged(others: Iterable[str], rows: Sequence[Row]) -> Row:
    first = rows[0]
    found = {name: _setting(first, name) for name in others} | {"target": first["target"]}
    for name in _MEASURED:
        values = [row[name] for row in rows if row[name] is not None]
        found[f"{name}_mean"] = statistics.fmean(values) if values else None
        found[f"{name}_deviation"] = statistics.stdev(values) if len(values) > 1 else None
        found[f"{name}_count"] = len(values)
    return found


@dataclass(frozen=True)
class Summary:
    """Accuracies over several runs: the mean, the standard deviation (n - 1) and how many there are. Print them."""

    settings: Sequence[str]
    rows: Sequence[Row]

    def __str__(self) -> str:
        shown = [
            [*(_text(row[name]) for name in self.settings), f"{row['target']:g}", *_cells(row)]
            for row in self.rows
        ]
        return table([*self.settings, "target", *(t for n in _MEASURED for t in (n, "±", "of"))], shown)

    def to_csv(self) -> str:
        """The rows with all their columns, for a spreadsheet."""
        return rows_to_csv(self.rows)


def _cells(row: Row) -> Iterator[str]:
    for name in _MEASURED:
        for kind in ("mean", "deviation"):
            value = row[f"{name}_{kind}"]
            yield "-" if value is None else f"{value:.1%}"
        yield str(row[f"{name}_count"])
