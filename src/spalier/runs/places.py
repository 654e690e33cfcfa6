"""Where runs are carried out: each in a process of its own, on this machine or on the nodes of a Ray cluster.

A process that is killed, runs out of memory or crashes takes nothing else with it. Settings reach it as JSON, and what
came out is in the run's folder, so nothing is pickled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from spalier.errors import ConfigError, DataError, RunError
from spalier.runs.config import Settings
from spalier.runs.transfer import TransferPruning

GRACE = 60.0
"""Seconds that a run which is asked to stop has to end its step and write a checkpoint, before it is killed."""
HOPELESS = frozenset({"changed", "not-finite", "classes", "folder"})
"""Codes of errors of runs that come again however often a run is tried."""
_LOG = logging.getLogger("spalier")
_LOOK = 0.05
_WORDS = 1000
# the path comes first, so that the process finds this package where its parent has found it
_BEGIN = (
    "import json, sys; job = json.load(sys.stdin); sys.path[:] = job['path']; "
    "from spalier.runs.places import work; work(job)"
)


@dataclass(frozen=True)
class Job:
    """All that a process needs to know to carry a run out."""

    name: str
    folder: str
    log: str
    """A file for what the process has to say."""
    settings: dict[str, Any]
    threads: int
    path: list[str]
    """Where modules are found, and the working folder, as in the process that asks."""
    cwd: str
    environment: dict[str, str]

    @staticmethod
    def of(name: str, config: Settings, folder: Path, log: Path, threads: int) -> Job:
        """A job for a run in a folder."""
        return Job(
            name=name,
            folder=str(folder.absolute()),
            log=str(log.absolute()),
            settings={each.name: getattr(config, each.name) for each in fields(config)},
            threads=threads,
            path=list(sys.path),
            cwd=str(Path.cwd()),
            environment={key: value for key, value in os.environ.items() if key.startswith("SPALIER_")},
        )


@dataclass(frozen=True)
class Report:
    """How an attempt at a run ended."""

    done: bool
    message: str = ""
    again: bool = True
    """Whether another attempt may do better."""


class Place(Protocol):
    """What can carry runs out."""

    def start(self, job: Job) -> None:
        """Begin with a run, or go on with it."""

    def finished(self) -> list[tuple[str, Report]]:
        """The attempts that have ended since, by name; waits a little where there are none."""

    def stop(self) -> None:
        """Ask all runs to write a checkpoint and end, and see that they do."""

    def close(self) -> None:
        """Take down what was set up."""


def carry_out(
    jobs: Sequence[Job],
    place: Place,
    *,
    at_once: int,
    retries: int,
    told: Callable[[str, Report, int, bool], None],
) -> None:
    """Carry all jobs out, so many at once, and try those that fail again.

    ``told`` hears of each attempt: the run's name, the report, the attempt's number and whether there will be another.
    When it raises, or on Ctrl-C, all runs are stopped first.
    """
    waiting, running, attempts = deque(jobs), dict[str, Job](), Counter[str]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.popleft()
                running[job.name] = job
                attempts[job.name] += 1
                place.start(job)
            for name, report in place.finished():
                job, number = running.pop(name), attempts[name]
                again = not report.done and report.again and number <= retries
                if again:
                    waiting.append(job)
                told(name, report, number, again)
    except BaseException:
        place.stop()
        raise


# -- this machine -----------------------------------------------------------------------------------------------------


class Local:
    """Runs on this machine."""

    def __init__(self) -> None:
        self._running: dict[str, _Process] = {}
        self._unstarted: list[tuple[str, Report]] = []

    def start(self, job: Job) -> None:
        """Begin with a run in a process of its own."""
        try:
            self._running[job.name] = _Process(job)
        except OSError as error:
            self._unstarted.append((job.name, Report(False, f"no process could be started: {error}")))

    def finished(self) -> list[tuple[str, Report]]:
        """The processes that have ended since."""
        found, self._unstarted = self._unstarted, []
        for name, process in list(self._running.items()):
            report = process.report()
            if report is not None:
                found.append((name, report))
                del self._running[name]
        if not found:
            time.sleep(_LOOK)
        return found

    def stop(self) -> None:
        """Ask all processes to end, and kill those that have not after a while, or at a second Ctrl-C."""
        until = time.monotonic() + GRACE
        try:
            for process in self._running.values():
                process.ask_to_stop()
            while self._running and time.monotonic() < until:
                self.finished()
        finally:
            for process in self._running.values():
                process.kill()
            self._running.clear()

    def close(self) -> None:
        """Nothing was set up."""


class _Process:
    """A run in a process of its own, and in a process group, so that Ctrl-C reaches it once and through us."""

    def __init__(self, job: Job) -> None:
        self.job = job
        Path(job.log).parent.mkdir(parents=True, exist_ok=True)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe could be kept open by its children
        try:
            self._process = self._started()
        except BaseException:
            self._said.close()
            raise

    def _started(self) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as told, Path(self.job.log).open("ab") as log:
            told.write(self._told())
            told.seek(0)
            log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} ---\n".encode())
            log.flush()
            return subprocess.Popen(
                [sys.executable, "-c", _BEGIN],
                stdin=told,
                stdout=self._said,
                stderr=log,
                cwd=self.job.cwd,
                env=self._environment(),
                process_group=0 if os.name == "posix" else None,
            )

    def _told(self) -> bytes:
        path = list(dict.fromkeys([*self.job.path, *sys.path]))  # on a cluster this process may know more
        return json.dumps({**asdict(self.job), "path": path, "parent": os.getpid()}).encode()

    def _environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.job.threads))
        return {**os.environ, **self.job.environment, **threads}

    def report(self) -> Report | None:
        """How it ended, or None while it goes on."""
        code = self._process.poll()
        if code is None:
            return None
        if code:
            _kill_group(self._process.pid)  # it may have left workers behind
        with self._said as said:
            said.seek(0)
            words = said.read()
        try:
            return Report(**json.loads(words))
        except (ValueError, TypeError):
            return Report(False, _ending(code, Path(self.job.log)))

    def ask_to_stop(self) -> None:
        """Let it write a checkpoint and end."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)

    def kill(self) -> None:
        """End it now, with its workers."""
        self._process.kill()
        _kill_group(self._process.pid)
        self._process.wait()
        self._said.close()


def _kill_group(leader: int) -> None:
    if os.name == "posix":
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)


def _ending(code: int, log: Path) -> str:
    """What can be said of a process that could say nothing itself."""
    how = f"the process ended with code {code}"
    if code < 0:
        how = f"the process was ended by {signal.Signals(-code).name}"
    if -code == getattr(signal, "SIGKILL", 9):
        how += ", as the system does when memory runs out"
    last = log.read_text("utf-8", errors="replace").strip().rpartition("\n")[2]
    return how if last.startswith("--- ") else f"{how}; its last words: {last[:_WORDS]}"


# -- the process of a run ---------------------------------------------------------------------------------------------


def work(told: Mapping[str, Any]) -> None:
    """What the process of a run does; its report goes where standard output went, all that is printed to the log."""
    job = Job(**{each.name: told[each.name] for each in fields(Job)})
    said = os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable()
    _listen()
    threading.Thread(target=_watch, args=(told["parent"],), daemon=True).start()
    torch.set_num_threads(job.threads)
    report = _attempt(job)
    os.write(said, json.dumps(asdict(report)).encode())
    raise SystemExit(0 if report.done else 1)


def _listen() -> None:
    """Hear signals, though a shell's background jobs ignore Ctrl-C and Ray's processes block it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _watch(parent: int) -> None:
    """End with a checkpoint when whoever started this process has died, and without one if that takes too long."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    _kill_group(os.getpid())


def _attempt(job: Job) -> Report:
    try:
        _run(TransferPruning.of(job.settings, job.name), job.folder)
    except KeyboardInterrupt:  # the sweep was asked to stop, and knows
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        traceback.print_exc()
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Report(False, words[:_WORDS], again=not _is_hopeless(error))
    return Report(True)


def _run(config: TransferPruning, folder: str) -> None:
    until = time.monotonic() + GRACE
    while True:
        try:
            config.run(folder)
            return
        except RunError as error:  # busy: a process of a sweep that was killed may not have ended yet
            if error.code != "busy" or time.monotonic() > until:
                raise
        time.sleep(0.5)


def _is_hopeless(error: Exception) -> bool:
    known = isinstance(error, RunError) and error.code in HOPELESS
    return known or isinstance(error, ConfigError | DataError)


# -- a Ray cluster ----------------------------------------------------------------------------------------------------


class OnRay:
    """Runs on a Ray cluster: the one that this process has joined or RAY_ADDRESS names, or one of its own."""

    def __init__(self, threads: int, gpus: float = 0) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("sweeps on Ray need it; pip install spalier[ray]") from error
        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        # Ray's own retries are for workers and nodes that are lost; what a run raises comes back as a report
        self._task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=2)(_on_node)
        self._running: dict[Any, str] = {}
        self._warn(threads, gpus)

    def _warn(self, threads: int, gpus: float) -> None:
        """Ray lets a task wait for ever for what no node has, because one may still come."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= threads and node.get("GPU", 0) >= gpus for node in nodes):
            _LOG.warning(
                "no node of the Ray cluster has %d CPUs and %g GPUs; runs wait for one", threads, gpus
            )

    def start(self, job: Job) -> None:
        """Hand a run to the cluster."""
        self._running[self._task.remote(json.dumps(asdict(job)))] = job.name

    def finished(self) -> list[tuple[str, Report]]:
        """The tasks that have ended since."""
        ended, _ = self._ray.wait(list(self._running), timeout=10 * _LOOK)
        return [(self._running.pop(task), self._report(task)) for task in ended]

    def _report(self, task: Any) -> Report:
        try:
            return Report(**json.loads(self._ray.get(task)))
        except self._ray.exceptions.RayError as error:
            words = str(error).strip().splitlines() or [""]
            return Report(False, f"{type(error).__name__}: {words[-1][:_WORDS]}")

    def stop(self) -> None:
        """Cancel all tasks; their processes write checkpoints and end."""
        tasks = list(self._running)
        for task in tasks:
            self._ray.cancel(task)
        _, left = self._ray.wait(tasks, num_returns=len(tasks), timeout=GRACE) if tasks else ([], [])
        for task in left:
            self._ray.cancel(task, force=True)
        self._running.clear()

    def close(self) -> None:
        """Leave a cluster that was joined as it is; end one that was started here."""
        if self._is_ours:
            self._ray.shutdown()


def _on_node(text: str) -> str:
    """One attempt at a run, as a task of Ray; in a process of its own here too, so that a crash spares Ray's worker."""
    told = json.loads(text)
    if not Path(told["cwd"]).is_dir():
        told["cwd"] = str(Path.cwd())  # where Ray has unpacked the working_dir of its runtime environment
    here = Local()
    here.start(Job(**told))
    try:
        while not (found := here.finished()):
            pass
    except BaseException:  # cancelled
        here.stop()
        raise
    return json.dumps(asdict(found[0][1]))
