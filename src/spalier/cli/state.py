"""What all commands share: how much is said, in which form, and the log of what happened."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, TextIO

import click

_RECORDS = 10_000


class State:
    """One call of the command line."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.debug = False
        self.quiet = False
        self.as_json = "--json" in self.arguments
        self.interrupted = False
        self.out: TextIO = sys.stdout
        """Where results go."""
        self.records: list[str] = []
        self._warnings = warnings.catch_warnings()
        self._handlers: list[logging.Handler] = []
        self._levels: list[tuple[logging.Logger, int, bool]] = []

    def __enter__(self) -> State:
        self.out = sys.stdout
        if self.as_json:  # what a network of the user's prints is no part of the document
            sys.stdout = sys.stderr
        self._listen_(_Remembering(self.records), logging.DEBUG)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout = self.out
        logging.captureWarnings(False)
        if self._levels:
            self._warnings.__exit__(None, None, None)
        for handler in self._handlers:
            for name in ("spalier", "py.warnings"):
                logging.getLogger(name).removeHandler(handler)
            handler.close()
        for logger, level, propagates in self._levels:
            logger.setLevel(level)
            logger.propagate = propagates

    def begin_(self, *, debug: bool, quiet: bool, log: str | None) -> None:
        """Listen to what the library says."""
        self.debug, self.quiet = debug, quiet
        for name in ("spalier", "py.warnings"):
            logger = logging.getLogger(name)
            self._levels.append((logger, logger.level, logger.propagate))
            logger.setLevel(logging.DEBUG)
            logger.propagate = False
        self._warnings.__enter__()
        if not sys.warnoptions:
            warnings.simplefilter("default")
        logging.captureWarnings(True)  # libraries' warnings go to the log, not over the results
        if not quiet:
            self._listen_(_Noting(), logging.WARNING, ("spalier",))
        if log is not None:
            try:
                handler = logging.FileHandler(log, mode="w", encoding="utf-8")
            except OSError as error:
                raise click.BadParameter(
                    f"{log!r} cannot be written: {error.strerror}", param_hint="--log"
                ) from error
            self._listen_(handler, logging.DEBUG)

    def _listen_(
        self, handler: logging.Handler, level: int, names: Sequence[str] = ("spalier", "py.warnings")
    ) -> None:
        handler.setLevel(level)
        if not isinstance(handler, _Noting):
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in names:
            logging.getLogger(name).addHandler(handler)
        self._handlers.append(handler)

    @property
    def shows_progress(self) -> bool:
        """Whether long work says how far it is, on standard error."""
        return not self.quiet

    def note(self, text: str) -> None:
        """Something worth knowing that is no result."""
        if not self.quiet:
            click.echo(text, err=True)

    def show(self, text: object, data: Any) -> None:
        """A result: text for people, or with --json one document for programs."""
        if self.as_json:
            click.echo(json.dumps(data, indent=1, allow_nan=False), file=self.out)
        else:
            click.echo(str(text), file=self.out)

    @contextlib.contextmanager
    def interruptions(self) -> Iterator[None]:
        """Remember a Ctrl-C: libraries that are interrupted at odd moments may raise something else."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


class _Remembering(logging.Handler):
    """Keeps the last lines for the log of an error."""

    def __init__(self, records: list[str]) -> None:
        super().__init__()
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        """One more line."""
        self.records.append(self.format(record))
        del self.records[:-_RECORDS]


class _Noting(logging.Handler):
    """Says warnings in one line."""

    def emit(self, record: logging.LogRecord) -> None:
        """One note."""
        click.echo(f"note: {' '.join(record.getMessage().split())}", err=True)


def pass_state(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the state first."""
    return click.pass_obj(command)


def json_option(command: Any) -> Any:
    """``--json``: the flag is looked up in the arguments, so that errors come as JSON too."""
    return click.option(
        "--json", "as_json", is_flag=True, expose_value=False, help="Print one JSON document instead of text."
    )(command)


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
