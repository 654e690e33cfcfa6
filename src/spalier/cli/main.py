"""`spalier`: the group of commands, and what becomes of errors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import click

import spalier
from spalier.cli.failing import failed, interrupted, misused
from spalier.cli.state import State
from spalier.errors import SpalierError

COMMANDS = {
    "demo": "demo",
    "trace": "looking",
    "train": "training",
    "sweep": "training",
    "eval": "evaluating",
    "task": "tasks",
    "switch": "switching",
    "bench": "measuring",
    "report": "looking",
    "doctor": "looking",
    "completion": "completing",
}
"""Where each command is: its module is imported when the command is called, so that help is quick."""

EXIT_CODES = {
    0: "done",
    1: "failed: one line says what, why and what to do, and names a log file",
    2: "wrong usage: a command, an option or a value that cannot be",
    3: "done, and something did not pass: a task, a run of a sweep, what the doctor needs",
    130: "interrupted; a run goes on when it is called again",
    143: "ended by SIGTERM, as well",
}


class Commands(click.Group):
    """The commands in the order in which one meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return list(COMMANDS)

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
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no notes; results and errors only.")
@click.option("--log", type=click.Path(dir_okay=False), help="Write everything that happens to this file.")
@click.pass_obj
def cli(state: State, debug: bool, quiet: bool, log: str | None) -> None:
    """One frozen network, many tasks: each keeps some of its channels, and a low-rank correction, in a tiny file.

    Begin with `spalier demo`; `spalier COMMAND --help` has examples.
    """
    state.begin_(debug=debug, quiet=quiet, log=log)


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry a command out; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams_()
    with contextlib.suppress(OSError):
        here = str(Path.cwd())  # module:function may be here; it is never found before what is installed
        if here not in sys.path:
            sys.path.append(here)
    with State(given) as state, state.interruptions():
        try:
            code = cli.main(_globals_first(given), prog_name="spalier", standalone_mode=False, obj=state)
            state.out.flush()
            return code if isinstance(code, int) else 0
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.ctx.get_help() if error.ctx else str(error), err=True)
            return 2
        except click.UsageError as error:
            return misused(error, state)
        except (KeyboardInterrupt, click.Abort):
            return interrupted(state)
        except BrokenPipeError:  # whoever read has enough, as `head` does
            _close_output_()
            return 1
        except SpalierError as error:
            return failed(error, error.code, state)
        except Exception as error:
            if isinstance(error, OSError) and error.filename is None and not state.interrupted:
                _close_output_()
            return interrupted(state) if state.interrupted else failed(error, "unexpected", state)


def _close_output_() -> None:
    """What is left to be written cannot be; nobody is to try again at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams_() -> None:
    """A stream that was closed is an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - for good


def _globals_first(given: list[str]) -> list[str]:
    """The options of all commands may stand behind a command too.

    >>> _globals_first(["train", "--debug", "--folder", "x", "--log", "f"])
    ['--debug', '--log', 'f', 'train', '--folder', 'x']
    """
    front: list[str] = []
    rest: list[str] = []
    words = iter(given)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in ("--debug", "--quiet", "-q") or word.startswith("--log="):
            front.append(word)
        elif word == "--log":
            front += [word, *([value] if (value := next(words, None)) is not None else [])]
        else:
            rest.append(word)
    return front + rest
