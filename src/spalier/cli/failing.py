"""What is said when something fails: one line, and a log file with the rest."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from pathlib import Path

import click

import spalier
from spalier.cli.state import State

_KEPT = 20


def failed(error: Exception, code: str, state: State) -> int:
    """Say what went wrong; the exit code."""
    message = _one_line(error) or type(error).__name__
    if code == "unexpected":
        code, message = _explained(error, message)
    log = _written(error, state)
    where = "no log could be written" if log is None else f"log: {log}"
    if state.debug:
        traceback.print_exception(error)
    _told(state, code, message, log)
    click.echo(f"spalier: {message} ({where})", err=True)
    return 1


def _one_line(error: Exception) -> str:
    """A message without line breaks, and without the frames that PyTorch's C++ adds to its own."""
    words = " ".join(str(error).split())
    return words.partition(" Exception raised from ")[0].partition(" frame #")[0]


def _explained(error: Exception, message: str) -> tuple[str, str]:
    """What no part of Spalier has foreseen, by its kind."""
    if (
        isinstance(error, MemoryError)
        or "can't allocate memory" in message
        or "out of memory" in message.lower()
    ):
        return "memory", f"memory ran out: {message[:200]}; ask for smaller inputs, batches or networks"
    if isinstance(error, OSError) and error.strerror:
        return "system", f"{error.filename or 'the output'} cannot be used: {error.strerror}"
    return "unexpected", (
        f"{type(error).__name__}: {message}; this was not expected, so it may be a defect of Spalier or of code of "
        "yours that it runs: see the log"
    )


def _told(state: State, code: str, message: str, log: Path | None = None) -> None:
    """An error as a document, where one was asked for."""
    if state.as_json:
        document = {"error": {"code": code, "message": message, "log": None if log is None else str(log)}}
        click.echo(json.dumps(document, indent=1), file=state.out)


def interrupted(state: State) -> int:
    """Say so; the exit code."""
    _told(state, "interrupted", "interrupted")
    click.echo("interrupted", err=True)
    return 130


def misused(error: click.UsageError, state: State) -> int:
    """Say which argument is wrong, and where help is."""
    command = "spalier" if error.ctx is None else error.ctx.command_path
    message = " ".join(error.format_message().split())
    _told(state, "usage", message)
    click.echo(f"spalier: {message} See '{command} --help'.", err=True)
    return 2


def folder() -> Path:
    """Where logs are: $XDG_STATE_HOME/spalier, or ~/.local/state/spalier."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "spalier"


def _written(error: Exception, state: State) -> Path | None:
    """A file with everything that may help: the call, versions, what was logged, the traceback."""
    text = "\n".join(
        [
            f"spalier {spalier.__version__}, Python {platform.python_version()}, {_torch()}, {platform.platform()}",
            f"$ spalier {shlex.join(state.arguments)}",
            *state.records,
            "".join(traceback.format_exception(error)),
        ]
    )
    name = f"spalier-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for place in (folder, lambda: Path(tempfile.gettempdir())):
        try:
            place().mkdir(parents=True, exist_ok=True)
            (place() / name).write_text(text, "utf-8", errors="backslashreplace")
        except (OSError, RuntimeError):  # no home, no room, no rights
            continue
        if place is folder:
            _tidy_(place())
        return place() / name
    return None


def _tidy_(place: Path) -> None:
    for old in sorted(place.glob("spalier-*.log"))[:-_KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()


def _torch() -> str:
    module = sys.modules.get("torch")
    return "torch not loaded" if module is None else f"torch {module.__version__}"
