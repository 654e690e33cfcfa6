"""`spalier`: the group of commands, what they print where, and what becomes of errors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import re
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import click

import spalier
from spalier.errors import SpalierError

COMMANDS = {
    "demo": "commands",
    "trace": "commands",
    "train": "commands",
    "sweep": "commands",
    "eval": "commands",
    "predict": "serving",
    "task": "task_commands",
    "serve": "serving",
    "bench": "commands",
    "report": "commands",
    "env": "commands",
}
"""The module of each command, in the order in which one meets them. It is imported when the command is called."""

EXIT_CODES = {
    0: "done",
    1: "failed: one line says what was found, what was expected and what to do",
    2: "wrong usage: a command, an option or a value that cannot be",
    3: "done, and something did not pass: a task file, or a run of a sweep",
    130: "interrupted; a run goes on when it is called again",
    143: "ended by SIGTERM; a run goes on when it is called again",
}
GLOBAL_OPTIONS = ("--debug", "--quiet", "-q")


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


class Commands(click.Group):
    """The commands, imported one at a time, so that help does not wait for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that was typed; one that does not exist gets the names that it is close to."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            from spalier.text import close_names

            close = " or ".join(map(repr, close_names(args[0], COMMANDS)))
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {close}?" if close else ""))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One command, imported now."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"spalier.cli.{COMMANDS[cmd_name]}")
        found: click.Command = getattr(module, "eval_" if cmd_name == "eval" else cmd_name)
        return found


@click.group(
    cls=Commands,
    epilog="\b\nExit codes:\n" + "\n".join(f"  {code:3}  {meaning}" for code, meaning in EXIT_CODES.items()),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(spalier.__version__, prog_name="spalier", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks, and all that libraries log and warn of.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no notes; results and errors only.")
@click.pass_context
def cli(ctx: click.Context, debug: bool, quiet: bool) -> None:
    """One frozen network, many tasks: each keeps some of its channels, and a low-rank correction, in a tiny file.

    Begin with `spalier demo`; `spalier COMMAND --help` has examples.
    """
    ctx.obj.debug, ctx.obj.quiet = debug, quiet
    # What the library logs is a note on standard error; the context takes all of this back at its end.
    logger, handler = logging.getLogger("spalier"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("note: %(message)s"))
    ctx.call_on_close(functools.partial(logger.setLevel, logger.level))
    ctx.call_on_close(functools.partial(logger.removeHandler, handler))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.ERROR if quiet else logging.WARNING)
    ctx.with_resource(warnings.catch_warnings())
    if not debug and not sys.warnoptions:
        warnings.simplefilter("ignore")


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry a command out; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _replace_closed_streams()
    with contextlib.suppress(OSError):  # the working directory may be gone
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)  # module:function may lie here; last, so that it hides nothing installed
    # The flag is looked up before click parses anything, so that errors of usage are documents too.
    console = Console(as_json="--json" in given)
    # What a network of the user's prints is no part of the document.
    prints = contextlib.redirect_stdout(sys.stderr) if console.as_json else contextlib.nullcontext()
    with prints, console.remember_interrupt():
        try:
            code = cli.main(_globals_first(given), prog_name="spalier", standalone_mode=False, obj=console)
            console.out.flush()
            return code if isinstance(code, int) else 0
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            return 2
        except (Exception, KeyboardInterrupt) as error:
            return _failed(error, console)


def _failed(error: Exception | KeyboardInterrupt, console: Console) -> int:
    """Say in one line what went wrong; the exit code."""
    if console.debug:
        traceback.print_exception(error)
    if console.interrupted or isinstance(error, KeyboardInterrupt | click.Abort):
        return console.fail(130, "interrupted", "interrupted")
    if isinstance(error, click.UsageError):
        command = "spalier" if error.ctx is None else error.ctx.command_path
        return console.fail(2, "usage", f"{_one_line(error.format_message())} See '{command} --help'.")
    if isinstance(error, OSError) and error.filename is None:
        _discard_output(console.out)
        if isinstance(error, BrokenPipeError):  # whoever read has enough, as `head` does
            return 1
    code, message = _described(error)
    return console.fail(1, code, as_typed(message, console.takes))


def _described(error: BaseException) -> tuple[str, str]:
    """A code for programs and a message for people."""
    message = _one_line(str(error)) or type(error).__name__
    if isinstance(error, SpalierError):
        return error.code, message
    # PyTorch raises plain RuntimeErrors where memory runs out.
    if isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message.lower():
        return "memory", f"memory ran out: {message[:200]}; ask for smaller inputs, batches or networks"
    if isinstance(error, OSError) and error.strerror:
        return "system", f"{error.filename or 'the output'} cannot be used: {error.strerror}"
    return "unexpected", (
        f"{type(error).__name__}: {message}; this was not expected, so it may be a defect of Spalier or of code of "
        "yours that it runs: --debug shows where"
    )


_PYTHON_ONLY = {
    r",? or Data\.of\(dataset\)|; sets that need other arguments go to Data\.of|, or pass a dataset to Data\.of": "",
    r", or an object such as spalier\.criteria\S+|, as Task\.save and runs write it| \(detach_ gives it back\)": "",
    r'(open_data\(".*?", folder=".*?", download=True\))': r"in Python, spalier.data.\1",
    r"; folder= or the variable": "; data_folder or the variable",
    r"pass overwrite=True to replace it": "remove its file first, or name another --store",
    r"pass protect=(\[.*?\]) to select, or freeze=\[.*?\] to trace": r"pass --set 'select_options={protect: \1}'",
}
"""Remedies that a command cannot offer so, and what it can."""


def as_typed(message: str, takes: Collection[str]) -> str:
    """A message of the library as one who types a command can follow it: arguments of functions become its options.

    >>> as_typed("no head; pass head=, a name", ["--set"]), as_typed("pass weights=FILE", ["--weights"])
    ('no head; pass --set head=, a name', 'pass --weights FILE')
    """
    options = {option.strip("-").replace("-", "_"): f"{option} " for option in takes}
    if "--set" in takes:
        from spalier.runs import Settings

        options = {name: f"--set {name}=" for name in Settings.__dataclass_fields__} | options
    for words, instead in _PYTHON_ONLY.items():
        message = re.sub(words, instead, message)
    for name, option in options.items():
        message = re.sub(rf"\b(pass|or|without) {name}=(?:True\b)?", rf"\1 {option}", message)
    return re.sub(r" +(?=[ ,;.]|$)", "", message)


def _one_line(text: str) -> str:
    """A message without line breaks, and without the frames that PyTorch's C++ adds to its own."""
    return " ".join(text.split()).partition(" Exception raised from ")[0].partition(" frame #")[0]


def _discard_output(out: TextIO) -> None:
    """Python writes what is left in standard output at its exit: there it must not fail a second time."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _replace_closed_streams() -> None:
    """A stream that was closed, as by a service manager, is None in Python; an empty one takes its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - for good


def _globals_first(given: list[str]) -> list[str]:
    """The options of all commands may stand behind a command too.

    >>> _globals_first(["train", "--debug", "--folder", "x"])
    ['--debug', 'train', '--folder', 'x']
    """
    end = given.index("--") if "--" in given else len(given)
    moved = [word for word in given[:end] if word in GLOBAL_OPTIONS]
    return moved + [word for word in given[:end] if word not in GLOBAL_OPTIONS] + given[end:]


# what the modules of commands share

FILE, FOLDER = click.Path(dir_okay=False), click.Path(file_okay=False)
EXISTING_FILE, EXISTING_FOLDER = (click.Path(exists=True, dir_okay=False), click.Path(exists=True, file_okay=False))
JSON = click.Option(["--json"], is_flag=True, expose_value=False, help="Print one JSON document instead of text.")


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
