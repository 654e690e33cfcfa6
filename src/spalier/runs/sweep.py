"""Sweeps: one run for each combination of some settings, and one table of what came out."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import torch

from spalier.errors import ConfigError, RunError
from spalier.runs.checkpoint import RunFolder, other_contents
from spalier.runs.run import COLUMNS, TITLES, Results, Row, TransferPruning, WithRows, cell
from spalier.runs.settings import RESUMABLE, check_known, checked, differences
from spalier.runs.settings_files import read_settings, write_yaml
from spalier.text import check_integer, first_line, import_optional, mean, table
from spalier.timing import available_cores

_LONGEST_NAME = 100  # file systems take 255 bytes
_WORD = "(?!(null|true|false)$)[a-z][a-z0-9_.-]*"  # text that cannot be taken for another value
_MEASURED = ("validation", "test")
_MEMORY = 2**27  # of the Ray that is started for jobs: runs hand nothing over
_LOG = logging.getLogger("spalier")


@dataclass(frozen=True)
class Sweep:
    """Many runs: one for each combination of values of some settings.

    Args:
        base: the settings that all runs share.
        over: the values to go through, by setting.

    >>> sweep = Sweep(TransferPruning(data="digits"), over={"criterion": ["taylor", "weight"], "seed": [0, 1]})
    >>> [name for name, _ in sweep.runs()][:2]
    ['criterion=taylor,seed=0', 'criterion=taylor,seed=1']
    """

    base: TransferPruning
    over: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "over", _checked_values(self.over))
        self.runs()

    def runs(self) -> list[tuple[str, TransferPruning]]:
        """All runs by name; names are names of folders."""
        found = []
        for name, given in self._combinations().items():
            try:
                found.append((name, self.base.replace(**given)))
            except ConfigError as error:
                shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
                raise ConfigError(f"the run with {shown} cannot be: {error}") from error
        return found

    def _combinations(self) -> dict[str, dict[str, Any]]:
        """The values of each run, by its name."""
        combinations = [dict(zip(self.over, values, strict=True)) for values in itertools.product(*self.over.values())]
        return {_name_of(given): given for given in combinations}

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Sweep:
        """The sweep in a YAML or TOML file with `base` and `over`, or that of a sweep's folder."""
        file = Path(path) / "sweep.yaml" if Path(path).is_dir() else Path(path)
        found = read_settings(file)
        if set(found) != {"base", "over"} or not isinstance(found["base"], dict):
            raise ConfigError(f"{file} has {', '.join(found) or 'nothing'}; expected tables base and over")
        return Sweep(TransferPruning.from_dict(found["base"], f"base in {file}"), found["over"])

    def to_yaml(self) -> str:
        """The sweep, as `load` reads it."""
        # as given: what the recipe fills in may depend on the settings that are gone through
        parts = {"base": self.base.given, "over": self.over}
        return "".join(f"{name}:\n{indent(write_yaml(values), '  ')}" for name, values in parts.items())

    def run(
        self,
        folder: str | os.PathLike[str],
        *,
        jobs: int = 1,
        place: Literal["local", "ray"] = "local",
        threads: int | None = None,
        gpus: float = 0,
        progress: bool = True,
    ) -> SweepResults:
        """Carry out all runs that are not done yet. Those that were interrupted, or have failed, are resumed.

        Args:
            folder: where the sweep is kept; on a cluster, on storage that all nodes share.
            jobs: how many runs at once on this machine; more than one are tasks of a Ray that is started here.
            place: this machine, or a Ray cluster, which decides by itself how many run at once.
            threads: of each run; by default its share of the processors, and on Ray one.
            gpus: of each run, on Ray.
            progress: print which runs are done.
        """
        check_integer("jobs", jobs, 1)
        share = torch.get_num_threads() if jobs == 1 else max(1, available_cores() // jobs)
        threads = check_integer("threads", (1 if place == "ray" else share) if threads is None else threads, 1)
        if place not in ("local", "ray"):
            raise ConfigError(f'place is {place!r}, expected "local" or "ray"')
        if place == "local" and gpus:
            raise ConfigError("gpus is for runs on Ray; here, set CUDA_VISIBLE_DEVICES")
        where = Path(folder).absolute()
        with RunFolder(where).locked():
            self._claim(where)
            runs = self.runs()
            todo = [
                _Job(name, config, where / name, where / "logs" / f"{name}.txt", threads)
                for name, config in runs
                if not (where / name / "results.json").exists()
            ]
            if place == "local" and jobs == 1:
                ended = ((job.name, job.run(progress)) for job in todo)
            else:  # Ray has at least as many processors here as the runs that go on at once
                here = {"address": "local", "num_cpus": jobs * threads, "object_store_memory": _MEMORY}
                ended = _on_ray(todo, threads, gpus, **(here if place == "local" else {}))
            shown = sys.stderr if progress else io.StringIO()
            print(f"{len(todo)} of {len(runs)} runs to do", file=shown, flush=True)
            failed: dict[str, str] = {}
            with contextlib.closing(ended):  # stops what is running if this is interrupted
                for number, (name, error) in enumerate(ended, len(runs) - len(todo) + 1):
                    if error:
                        failed[name] = error
                    print(f"[{number}/{len(runs)}] {name}: {error or 'done'}", file=shown, flush=True)
                    self._write(where, failed)
            return self._write(where, failed)

    def _claim(self, folder: Path) -> None:
        """Make the folder this sweep's, or check that it is."""
        file = folder / "sweep.yaml"
        if file.exists():
            begun = Sweep.load(file)
            different = [*differences(begun.base, self.base, RESUMABLE | set(self.over)).values()]
            if begun.over != self.over:
                different.append(f"over was {begun.over} and is {self.over}")
            if different:
                raise RunError(
                    "changed",
                    f"the sweep in {str(folder)!a} was begun as another: {', '.join(different)}; resume that one (its "
                    "sweep.yaml), or use another folder",
                )
        elif any(not entry.name.startswith((".lock", ".spalier-")) for entry in folder.iterdir()):
            raise other_contents(folder, "sweep")
        else:
            RunFolder(folder).write(file, self.to_yaml().encode())

    def _write(self, folder: Path, failed: dict[str, str]) -> SweepResults:
        """Put the tables of what is there so far in place."""
        rows = []
        for name, given in self._combinations().items():
            if (folder / name / "results.json").exists():
                rows += [_with_settings(name, given, row) for row in Results.load(folder / name).rows]
        results = SweepResults(folder, tuple(self.over), rows, failed)
        RunFolder(folder).write(folder / "sweep.csv", results.to_csv().encode())
        RunFolder(folder).write_json(folder / "sweep.json", results.to_dict())
        return results


def _checked_values(over: Any) -> dict[str, tuple[Any, ...]]:
    """The values to go through, each as its setting wants it."""
    if not isinstance(over, Mapping) or not over:
        raise ConfigError(f"over is {over!r}, expected lists of values by setting, such as {{'seed': [0, 1]}}")
    check_known(over, "over")
    found = {}
    for name, values in over.items():
        if not isinstance(values, list | tuple | range) or not values:
            raise ConfigError(f"over has {values!r} for {name}, expected a list of values")
        found[name] = tuple(checked(name, value) for value in values)
        if len({json.dumps(value) for value in found[name]}) < len(values):
            raise ConfigError(f"over has {values!r} for {name}, expected each value once")
    return found


def _name_of(given: Mapping[str, Any]) -> str:
    """A folder's name that is short, safe and unique, also where file systems do not tell capital letters apart."""
    texts = {name: _text(value) for name, value in given.items()}
    whole = ",".join(f"{name}={text}" for name, text in texts.items())
    forms = {name: _WORD if isinstance(value, str) else "[a-z0-9.-]+" for name, value in given.items()}
    says_all = all(re.fullmatch(forms[name], text) for name, text in texts.items())
    if says_all and len(whole) <= _LONGEST_NAME:
        return whole
    digest = hashlib.blake2b(json.dumps(given).encode(), digest_size=5).hexdigest()
    return f"{re.sub('[^A-Za-z0-9_.=,-]+', '-', whole)[:_LONGEST_NAME]}-{digest}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


# carrying runs out


@dataclass(frozen=True)
class _Job:
    """One run that is to do."""

    name: str
    config: TransferPruning
    folder: Path
    log: Path
    threads: int

    def run(self, progress: bool = True) -> str:
        """Carry the run out, or resume it; what went wrong, or nothing."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            self.config.run(self.folder, progress=progress)
        except Exception as error:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("a") as file:
                traceback.print_exc(file=file)
            return f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]
        finally:
            torch.set_num_threads(before)
        return ""

    def run_on_node(self, cwd: str, path: list[str], variables: dict[str, str]) -> str:
        """The same as a task of Ray, with the modules, the working folder and the variables of the sweep."""
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        if Path(cwd).is_dir():
            os.chdir(cwd)
        os.environ.update(variables)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            return self.run()


def _on_ray(todo: Sequence[_Job], threads: int, gpus: float, **cluster: Any) -> Generator[tuple[str, str]]:
    """Carry runs out as tasks of the Ray cluster that this process has joined or RAY_ADDRESS names, or of a new one.

    The name of each as it ends, and what went wrong.
    """
    ray = import_optional("ray", "sweeps on Ray, and several runs at once")
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **cluster)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= threads and node.get("GPU", 0) >= gpus for node in nodes):
        # Ray waits for ever, because such a node may still come
        _LOG.warning("no node of the Ray cluster has %d CPUs and %g GPUs; runs wait for one", threads, gpus)
    # Ray itself tries again when a worker or a node is lost; each run gets a fresh worker
    task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=2, max_calls=1)(_Job.run_on_node)
    variables = {name: value for name, value in os.environ.items() if name.startswith("SPALIER_")}
    running: dict[Any, str] = {}
    try:
        for job in todo:
            running[task.remote(job, str(Path.cwd()), list(sys.path), variables)] = job.name
        while running:
            [ended], _ = ray.wait(list(running))
            try:
                error = str(ray.get(ended))
            except ray.exceptions.RayError as lost:
                error = f"{type(lost).__name__}: {first_line(lost)}"
            yield running.pop(ended), error
    finally:
        for each in running:
            ray.cancel(each)  # a run writes a checkpoint then, and ends
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=60)
        if is_ours:
            ray.shutdown()


# tables


def _with_settings(name: str, given: Mapping[str, Any], row: Row) -> Row:
    """A row of a run, with the settings that tell it from the others. Row and settings may share names (epochs)."""
    plain = json.loads(json.dumps(given))
    return {"run": name, **{f"{n}_setting" if n in row else n: v for n, v in plain.items()}, **row}


def _setting(row: Row, name: str) -> Any:
    return row[f"{name}_setting"] if f"{name}_setting" in row else row[name]


@dataclass(frozen=True)
class SweepResults(WithRows):
    """The rows of all runs of a sweep. Print them."""

    folder: Path
    over: Sequence[str]
    """The settings that the sweep goes through."""
    rows: Sequence[Row]
    failed: Mapping[str, str] = field(default_factory=dict)
    """What went wrong in each run that has failed, by its name."""

    def __str__(self) -> str:
        cells = [
            [*(_text(_setting(row, name)) for name in self.over), *(cell(name, row.get(name)) for name in COLUMNS)]
            for row in self.rows
        ]
        lines = [table([*self.over, *TITLES], cells)]
        if self.failed:
            lines.append(f"{len(self.failed)} failed in {str(self.folder)!a}; run the sweep again to resume them")
        return "\n".join([*lines, *(f"{name}: {why} (logs/{name}.txt)" for name, why in self.failed.items())])

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"format": 1, "over": list(self.over), "rows": list(self.rows), "failed": dict(self.failed)}

    def summary(self, over: str | Sequence[str] = "seed") -> Summary:
        """Means and standard deviations over some of the settings, by all the others and the density."""
        averaged = (over,) if isinstance(over, str) else tuple(over)
        for name in averaged:
            if name not in self.over:
                raise ConfigError(f"the sweep does not go through {name!r}, expected some of {', '.join(self.over)}")
        others = [name for name in self.over if name not in averaged]
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            key = json.dumps([[_setting(row, name) for name in others], row["target"], row.get("code")])
            groups.setdefault(key, []).append(row)
        return Summary(tuple(others), [_summarised(others, rows) for rows in groups.values()])


def _summarised(others: Sequence[str], rows: Sequence[Row]) -> Row:
    found = {name: _setting(rows[0], name) for name in others}
    found |= {name: rows[0][name] for name in ("target", "code") if name in rows[0]}
    for name in _MEASURED:
        of = mean([row[name] for row in rows if row[name] is not None])
        values = (None, None, 0) if of is None else (of.value, of.deviation, of.count)
        found |= dict(zip((f"{name}_mean", f"{name}_deviation", f"{name}_count"), values, strict=True))
    return found


def _cell(name: str, value: Any) -> str:
    is_share = isinstance(value, float) and name.endswith(("_mean", "_deviation"))
    return "-" if value is None else f"{value:.1%}" if is_share else f"{value:g}" if name == "target" else _text(value)


@dataclass(frozen=True)
class Summary(WithRows):
    """Accuracies over several runs: the mean, the standard deviation (n - 1) and how many there are. Print them."""

    settings: Sequence[str]
    rows: Sequence[Row]

    def __str__(self) -> str:
        names = self._names
        return table(names, [[_cell(name, row.get(name, "-")) for name in names] for row in self.rows])
