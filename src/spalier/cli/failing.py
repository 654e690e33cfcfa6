"""What is said when something fails: one line, and a log file with the rest."""

from __future__ import annotations

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
    message = " ".join(str(error).split()) or type(error).__name__
    if code == "unexpected":
        message = (
            f"{type(error).__name__}: {message}; this was not expected, so it may be a defect of Spalier or of code of "
            "yours that it runs: see the log"
        )
    log = _written(error, state)
    where = "no log could be written" if log is None else f"log: {log}"
    if state.debug:
        traceback.print_exception(error)
    if state.as_json:
        click.echo(
            json.dumps({"error": {"code": code, "message": message, "log": log and str(log)}}, indent=1)
        )
    click.echo(f"spalier: {message} ({where})", err=True)
    return 1


def misused(error: click.UsageError, state: State) -> int:
    """Say which argument is wrong, and where help is."""
    command = "spalier" if error.ctx is None else error.ctx.command_path
    message = " ".join(error.format_message().split())
    if state.as_json:
        click.echo(json.dumps({"error": {"code": "usage", "message": message, "log": None}}, indent=1))
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
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for place in (folder(), Path(tempfile.gettempdir())):
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / f"spalier-{name}").write_text(text, "utf-8", errors="backslashreplace")
        except OSError:
            continue
        _tidy_(place)
        return place / f"spalier-{name}"
    return None


def _tidy_(place: Path) -> None:
    for old in sorted(place.glob("spalier-*.log"))[:-_KEPT]:
        old.unlink(missing_ok=True)


def _torch() -> str:
    module = sys.modules.get("torch")
    return "torch not loaded" if module is None else f"torch {module.__version__}"
