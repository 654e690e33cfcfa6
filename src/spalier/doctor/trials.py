"""Trials as processes, a few at a time: one that hangs or crashes ends alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spalier.doctor.catalogue import Probe
from spalier.doctor.probes import MARK

_PAUSE = 0.02
_OFFLINE = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONIOENCODING": "utf-8"}
"""Trials call nobody."""


@dataclass(frozen=True)
class _Trial:
    """A process that is under way."""

    probe: Probe
    process: subprocess.Popen[bytes]
    output: Any
    """A file, since a pipe that nobody reads would stop the process."""
    begun: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun


def run_trials(
    probes: Sequence[Probe], *, timeout: float, together: int, environment: Mapping[str, str] | None
) -> Iterator[tuple[Probe, dict[str, Any]]]:
    """Each trial with what it found, as they end; whatever happens, no process stays behind."""
    waiting, running = list(probes), list[_Trial]()
    around = {**(os.environ if environment is None else environment), **_OFFLINE}
    try:
        while waiting or running:
            while waiting and len(running) < together:
                running.append(_begun(waiting.pop(0), around))
            ended = [t for t in running if t.process.poll() is not None or t.seconds > timeout]
            for trial in ended:
                running.remove(trial)
                yield trial.probe, _outcome(trial, timeout)
            if not ended:
                time.sleep(_PAUSE)
    finally:
        for trial in running:
            _end(trial)


def _begun(probe: Probe, environment: Mapping[str, str]) -> _Trial:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the trial has ended
    process = subprocess.Popen(
        probe.command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,  # so that its own children can be ended with it
    )
    return _Trial(probe, process, output, time.monotonic())


def _outcome(trial: _Trial, timeout: float) -> dict[str, Any]:
    late = trial.process.poll() is None
    text = _end(trial)
    if late:
        return {"state": "broken", "detail": f"it did not come back within {timeout:g} s"}
    for line in reversed(text.splitlines()):
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    return {"state": "broken", "detail": _death(trial.process.returncode, text)}


def _end(trial: _Trial) -> str:
    """End a trial with all that it has started; what it wrote."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):  # it has ended, and so have its children
            os.killpg(trial.process.pid, signal.SIGKILL)
    elif trial.process.poll() is None:
        trial.process.kill()
    trial.process.wait()
    with trial.output as file:
        file.seek(0)
        return bytes(file.read()).decode("utf-8", "replace")


def _death(code: int, text: str) -> str:
    """How a process ended that found nothing."""
    how = f"it crashed ({signal.Signals(-code).name})" if code < 0 else f"it ended with exit code {code}"
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return f"{how}: {last[:200]}" if last else how
