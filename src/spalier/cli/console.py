"""What a command is, and what it prints where."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

import click

Texts = tuple[str, ...]
"""What is given for an argument or option that may be repeated."""
FILE, FOLDER = click.Path(dir_okay=False), click.Path(file_okay=False)
EXISTING_FILE, EXISTING_FOLDER = (click.Path(exists=True, dir_okay=False), click.Path(exists=True, file_okay=False))
JSON = click.Option(["--json"], is_flag=True, expose_value=False, help="Print one JSON document instead of text.")


class Console:
    """Where one call of the command line prints: results to standard output, all else to standard error."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.debug = False
        self.quiet = False
        self.interrupted = False
        self.takes: list[str] = []  # the options of the command
        self.out = sys.stdout

    def note(self, text: str) -> None:
        """Print something worth knowing that is no result."""
        if not self.quiet:
            self._print(text, sys.stderr, "", dim=True)

    def show(self, text: object, data: Any) -> None:
        """Print a result: text for people, or with --json one document for programs."""
        if self.as_json:
            click.echo(json.dumps(data, indent=1, allow_nan=False), file=self.out)
        else:
            self._print(str(text), self.out, r"\bfaster \d\S*|\bsound\b", fg="green")

    def fail(self, exit_code: int, code: str, message: str) -> int:
        """Print an error, as a document too where one was asked for; its exit code."""
        if self.as_json:
            self.show("", {"error": {"code": code, "message": message}})
        self._print(f"spalier: {message}", sys.stderr, "^spalier:", fg="red", bold=True)
        return exit_code

    @staticmethod
    def _print(text: str, out: TextIO, styled: str, **style: Any) -> None:
        """Print text; on a terminal in colours, unless it is asked for none (no-color.org)."""
        is_plain = not out.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if not is_plain:
            text = re.sub(styled or "(?s).+", lambda found: click.style(found[0], **style), text)
        click.echo(text, file=out, color=not is_plain)

    @contextlib.contextmanager
    def remember_interrupt(self) -> Iterator[None]:
        """Note a Ctrl-C: a library that is interrupted in the middle of an import may raise something else."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
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


def command(name: str | None = None, group: click.Group | None = None) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function that takes the console first. The examples of its docstring end its help."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("Examples:\n")
        # \b: lines stay as they are
        epilog = "\b\nExamples:\n" + textwrap.indent(textwrap.dedent(examples), "  ")

        @click.pass_context
        def call(ctx: click.Context, /, **given: Any) -> Any:
            ctx.obj.takes = [option for parameter in ctx.command.params for option in parameter.opts]
            return function(ctx.obj, **given)

        # the options are those that decorators have put on the function
        made = click.command(name, help=text, epilog=epilog)(functools.update_wrapper(call, function))
        made.params.append(JSON)
        if group is not None:
            group.add_command(made)
        return made

    return decorate
