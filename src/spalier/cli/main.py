"""`spalier`: the group of commands, and what becomes of errors."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO

import click

import spalier
from spalier.cli.commands import bench, demo, env, eval_, report, sweep, trace, train
from spalier.cli.console import Console
from spalier.cli.serving import predict, serve
from spalier.cli.task_commands import task
from spalier.errors import SpalierError

EXIT_CODES = {
    0: "done",
    1: "failed: one line says what was found, what was expected and what to do",
    2: "wrong usage: a command, an option or a value that cannot be",
    3: "done, and something did not pass: a task file, or a run of a sweep",
    130: "interrupted; a run goes on when it is called again",
    143: "ended by SIGTERM; a run goes on when it is called again",
}
GLOBAL_OPTIONS = ("--debug", "--quiet", "-q")


class Commands(click.Group):
    """Lists commands in the order in which one meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return list(self.commands)


@click.group(
    cls=Commands,
    commands=[demo, trace, train, sweep, eval_, predict, task, serve, bench, report, env],
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
