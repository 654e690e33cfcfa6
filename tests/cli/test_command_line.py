"""What all commands have in common: help, exit codes, errors in one line, completion, JSON."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path

import click
import pytest

import spalier as package
from spalier.cli.commands import EXTRAS, libraries
from spalier.cli.console import Console
from spalier.cli.main import EXIT_CODES, as_typed, cli
from spalier.networks import open_network

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/command_line.txt"


def commands(command=cli, path=("spalier",)):
    """Every command with its path, groups first."""
    context = click.Context(command, info_name=path[-1])
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), (*path, name))


ALL = {" ".join(path): command for path, command in commands()}
LEAVES = {name: command for name, command in ALL.items() if not isinstance(command, click.Group)}


def surface() -> str:
    """Every argument and option, in order, with its kind and default."""
    lines = []
    for name, command in ALL.items():
        lines.append(name)
        for parameter in command.params:
            words = "/".join([*parameter.opts, *parameter.secondary_opts])
            kind = (
                parameter.type.name
                if not isinstance(parameter.type, click.Choice)
                else "|".join(parameter.type.choices)
            )
            flags = [f for f in ("required", "multiple", "is_flag") if getattr(parameter, f, False)]
            default = parameter.to_info_dict().get("default")
            shown = "" if default in (None, False) else f" = {default}"
            lines.append("  " + " ".join([words, kind, *flags]) + shown)
    return "\n".join(lines) + "\n"


def page() -> str:
    """The help of every command, as docs/cli.md shows it."""
    lines = []
    for name, command in LEAVES.items():
        settings = {**cli.context_settings, "terminal_width": 110}
        with click.Context(command, info_name=name, **settings) as context:
            lines += [f"### `{name}`", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def test_the_page_shows_the_help_of_every_command(spalier):
    text = (ROOT / "docs/cli.md").read_text()
    assert "-h, --help" in spalier("train", "--help").out
    assert text.count("-h, --help") == len(LEAVES)
    assert text.partition("<!-- commands -->\n\n")[2].partition("\n<!-- /commands -->")[0] == page()


def test_the_usual_settings_are_options(spalier, tmp_path, monkeypatch):
    """They go into the run's settings; a device that is not there is refused before anything is read."""
    given = ("--epochs", 3, "--batch-size", 16, "--size", 40, "--lr", 0.1, "--seed", 5, "--random", "--device", "tpu:x")
    called = spalier("train", "--data", "digits", *given, "--folder", tmp_path / "run")
    assert (called.code, "device is 'tpu:x'" in called.err) == (1, True)
    seen = {}
    monkeypatch.setattr(package.TransferPruning, "run", lambda self, *_, **__: seen.update(vars(self)) or 1 / 0)
    spalier("train", "--data", "digits", *given[:-2], "--folder", tmp_path / "other")
    wanted = {"epochs": 3, "batch_size": 16, "image_size": 40, "lr": 0.1, "seed": 5, "pretrained": False}
    assert {name: seen[name] for name in wanted} == wanted
    spalier("train", "--data", "digits", "--pretrained", "--network", "timm:x", "--folder", tmp_path / "other")
    assert (seen["network"], seen["pretrained"]) == ("timm:x", True)


def test_errors_speak_of_options(spalier, tmp_path):
    """What Python calls weights=FILE is --weights FILE here."""
    called = spalier(
        "train", "--network", "users:net", "--pretrained", "--data", "digits", "--folder", tmp_path / "run"
    )
    assert called.code == 1
    assert "pass --weights FILE" in called.err
    assert "weights=" not in called.err


def test_the_settings_are_listed_by_group(spalier):
    lines = spalier("train", "--help-settings").out.splitlines()
    assert spalier("train", "--settings").out.splitlines() == lines  # as it was called first
    assert [line for line in lines if not line.startswith(" ")] == [
        f"{group}:" for group in ("data", "network", "adapter", "pruning", "training", "output")
    ]
    [lr] = [line.split() for line in lines if line.startswith("  lr ")]
    assert lr[:3] == ["lr", "by", "recipe"]
    assert max(map(len, lines)) <= 140


def test_the_options_are_the_golden_ones():
    """Write them anew with ``python tests/cli/test_command_line.py`` when a change is meant."""
    assert surface() == GOLDEN.read_text()


def test_there_is_every_command_that_was_promised():
    promised = ["demo", "trace", "train", "sweep", "eval", "bench", "report", "env"]
    tasks = ["info", "verify", "build", "export", "push", "pull", "list"]
    assert {f"spalier {name}" for name in promised} | {f"spalier task {name}" for name in tasks} <= set(LEAVES)


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_help(name, spalier):
    called = spalier(*name.split()[1:], "--help")
    assert called.code == 0
    assert called.out.startswith(f"Usage: {name}")
    if name in LEAVES:
        assert f"    {name} " in called.out or f"    {name}\n" in called.out


@pytest.mark.parametrize("name", LEAVES)
def test_examples_are_commands_that_exist(name):
    """Each example parses: its options are options, its command is one."""
    for line in re.findall(r"^  (spalier .*)$", LEAVES[name].epilog, re.MULTILINE):
        words = line.split("#")[0].split()[1:]
        command, context = cli, click.Context(cli, info_name="spalier")
        while isinstance(command, click.Group):
            command = command.get_command(context, words.pop(0))
            assert command is not None, line
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_exit_codes_are_documented(spalier):
    shown = spalier("--help").out
    table = re.findall(r"^\| (\d+) \|", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    assert [int(code) for code in table] == list(EXIT_CODES)
    for code, meaning in EXIT_CODES.items():
        assert f"{code}  {meaning}" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demonstrate"], "No such command 'demonstrate'"),
        (["trian"], "No such command 'trian'. (Did you mean one of: 'trace', 'train'?)"),
        (["task", "lst"], "No such command 'lst'. Did you mean 'list'"),
        (["train", "--foldr", "new"], "'--folder'"),
        (["train"], "Missing option '--folder'"),
        (["train", "--folder", "new"], "give a CONFIG file, or settings"),
        (["trace", "resnet8"], "Missing option '--shape'"),
        (["trace", "resnet8", "--shape", "3,x"], "'3,x', expected numbers such as 3,224,224"),
        (["bench", "resnet8"], "Missing argument 'TASK...'"),
        (["bench", "resnet8", "t", "--batch", "0"], "expected numbers such as 1,64"),
        (["bench", "resnet8", "t", "--backends", "fast"], "expected some of eager,compiled,onnxruntime"),
        (["train", "--folder", "new", "--set", "epochs"], "expected KEY=VALUE"),
        (["train", "--folder", "new", "--set", "epochs=1", "--set", "epochs=2"], "epochs is set twice"),
        (["train", "--folder", "new", "--set", "epochs=[1"], "cannot be read"),
        (["report", "absent"], "'absent' does not exist"),
        (["trace", "resnet8", "--shape", "3,8,8", "--option", "classes=3"], "there is --classes"),
        (["demo", "--seed", "99999999999999999999999"], "is not in the range"),
        (["bench", "resnet8", "t", "--threads", "100000"], "is not in the range"),
    ],
)
def test_wrong_usage(arguments, words, spalier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    called = spalier(*arguments)
    assert called.code == 2
    assert words in called.err
    assert called.err.count("\n") == 1
    assert "--help" in called.err
    assert not called.out
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trace", "resnet19", "--shape", "3,8,8"], "there is no network 'resnet19'; did you mean"),
        (
            ["train", "--folder", "new", "--set", "epoch=1"],
            "'epoch', which is no setting; did you mean 'epochs'?",
        ),
        (["train", "--folder", "new", "--rank", "0"], "rank"),
        (["train", "--folder", "new", "--data", "digit"], "digits"),
        (["task", "info", "absent.task.safetensors"], "absent.task.safetensors"),
        (["report", "."], "expected"),
        (["eval", ".", "--base", "resnet8"], "no task files"),
        (["trace", ".", "--shape", "3,8,8"], "without a run in it"),
        (["train", "empty.yaml", "--folder", "new"], "empty.yaml has no settings"),
        (["sweep", "empty.yaml", "--over", "seed=0,1", "--folder", "new"], "empty.yaml has no settings"),
    ],
)
def test_errors_are_one_line(arguments, words, spalier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text("# nothing yet\n")
    called = spalier(*arguments)
    assert called.code == 1
    lines = [line for line in called.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1
    assert words in lines[0]
    assert lines[0].startswith("spalier: ")
    assert not called.out


def test_what_is_typed_is_what_errors_speak_of(spalier, tmp_path):
    """The library's messages name arguments of functions; a command has options and settings."""
    folder = ("--folder", tmp_path / "new")
    for arguments, words, not_words in [
        (["train", *folder, "--data", "digit"], "folder:PATH", "Data.of"),
        (["train", *folder, "--set", "criterion=taylr"], "did you mean 'taylor'?", "spalier.criteria"),
        (["trace", "resnet8", "--shape", "3,8,8", "--option", "num_classes=3"], "pass --classes", "classes="),
    ]:
        found = spalier(*arguments).err
        assert words in found
        assert not_words not in found.partition("num_classes")[0]
        assert "  " not in found


@pytest.mark.parametrize(
    ("message", "takes", "shown"),
    [
        ("b; pass head=, a name", ["--folder", "--set"], "b; pass --set head=, a name"),
        ("b; pass head=, a name", ["--folder"], "b; pass head=, a name"),
        ("build without fold=True", ["--fold"], "build without --fold"),
        ("or pass data_folder=X", ["--data-folder"], "or pass --data-folder X"),
        ("pass protect=['a'] to select, or freeze=['a'] to trace, or leave it", ["--set"],
         "pass --set 'select_options={protect: ['a']}', or leave it"),
        ("the plain network (detach_ gives it back)", [], "the plain network"),
        ("has a task 'a' already; pass overwrite=True to replace it", ["--store"],
         "has a task 'a' already; remove its file first, or name another --store"),
    ],
)  # fmt: skip
def test_arguments_of_functions_become_options(message, takes, shown):
    assert as_typed(message, takes) == shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_are_for_terminals(monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    shown = {}
    for kind, out, variables in [
        ("terminal", Terminal(), {}),
        ("pipe", io.StringIO(), {}),
        ("NO_COLOR", Terminal(), {"NO_COLOR": "1"}),
        ("dumb", Terminal(), {"TERM": "dumb"}),
        ("JSON", Terminal(), {}),
    ]:
        monkeypatch.setattr("sys.stderr", out)
        monkeypatch.setattr("sys.stdout", out)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        console = Console(as_json=kind == "JSON")
        console.show("a  faster 2.00x (1.9-2.1x)", {"text": "faster 2.00x"})
        console.note("by the way")
        if kind != "JSON":
            console.fail(1, "config", "spalier: it is wrong")
        shown[kind] = out.getvalue()
        for name in variables:
            monkeypatch.delenv(name)
    plain = "a  faster 2.00x (1.9-2.1x)\nby the way\nspalier: spalier: it is wrong\n"
    assert shown["pipe"] == shown["NO_COLOR"] == shown["dumb"] == plain
    assert click.unstyle(shown["terminal"]) == plain
    assert [part for part in re.findall(r"\x1b\[([0-9;]+)m", shown["terminal"]) if part != "0"] == [
        "32",
        "2",
        "31",
        "1",
    ]
    assert json.loads(shown["JSON"].partition("\x1b")[0])["text"] == "faster 2.00x"


def test_an_empty_folder_is_an_empty_store(spalier, tmp_path):
    called = spalier("task", "list", tmp_path, "--json")
    assert called.code == 0
    assert called.json == {"tasks": []}


def test_errors_as_json(spalier):
    called = spalier("trace", "resnet19", "--shape", "3,8,8", "--json")
    assert called.code == 1
    assert called.json["error"]["code"] == "network"
    assert called.err == f"spalier: {called.json['error']['message']}\n"
    assert spalier("trace", "resnet8", "--json").json["error"]["code"] == "usage"


def test_a_traceback_only_with_debug(spalier):
    assert "Traceback" not in spalier("trace", "resnet19", "--shape", "3,8,8").err
    assert "Traceback" in spalier("--debug", "trace", "resnet19", "--shape", "3,8,8").err
    assert "Traceback" in spalier("trace", "resnet19", "--shape", "3,8,8", "--debug").err


def test_a_defect_is_said_to_be_one(spalier, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("spalier.networks.open_network", broken)
    called = spalier("trace", "resnet8", "--shape", "3,8,8")
    assert called.code == 1
    assert called.err.startswith("spalier: ZeroDivisionError: division by zero; this was not expected")


def test_the_version(spalier):
    assert spalier("--version").out == f"spalier {package.__version__}\n"


def test_listening_ends_with_the_call(spalier):
    logger = logging.getLogger("spalier")
    before = logger.handlers[:], logger.level, logger.propagate, warnings.filters[:]
    spalier("trace", "resnet8", "--shape", "3,8,8")
    assert before == (logger.handlers[:], logger.level, logger.propagate, warnings.filters[:])


@pytest.mark.parametrize(
    ("options", "shown"),
    [((), "note: heed\n"), (("-q",), ""), (("--debug",), "note: heed\nnote: detail\n")],
)
def test_what_the_library_logs_is_a_note(options, shown, spalier, monkeypatch):
    def logging_open(*_, **__):
        logging.getLogger("spalier").warning("heed")
        logging.getLogger("spalier").debug("detail")
        return real("resnet8")

    real = open_network
    monkeypatch.setattr("spalier.networks.open_network", logging_open)
    assert spalier("trace", "resnet8", "--shape", "3,8,8", *options).err == shown


def test_a_result_is_one_document(capsys):
    Console(as_json=True).show("for people", {"a": [1]})
    assert json.loads(capsys.readouterr().out) == {"a": [1]}


def started(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "spalier", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.slow
def test_interrupted_and_gone_on_with(tmp_path):
    """Ctrl-C ends a run with 130 and a checkpoint; the same command without settings goes on with it."""
    folder = tmp_path / "run"
    small = ["--set", "max_train_samples=60", "--set", "network_options={width: 4}", "--set", "trackers=[]"]
    process = started(
        "train",
        "--data",
        "digits",
        "--network",
        "resnet8",
        *small,
        "--set",
        "epochs=2000",
        "--set",
        "densities=[]",
        "--folder",
        folder,
    )
    deadline = time.monotonic() + 600
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "spalier: interrupted"
    assert "Traceback" not in err
    assert (folder / "checkpoint.safetensors").exists()


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error(tmp_path):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = started("trace", "resnet8", "--shape", "3,8,8", "--json", env=environment)
    process.stdout.close()
    _, err = process.communicate(timeout=600)
    assert "Traceback" not in err
    assert "unexpected" not in err


def test_without_click_there_is_a_message(tmp_path):
    code = "import sys; sys.modules['click'] = None; from spalier.cli import entry; entry()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "pip install 'spalier[cli]'" in found.stderr


@pytest.mark.parametrize("arguments", [[], ["task"]])
def test_without_a_command_there_is_help(arguments, spalier):
    called = spalier(*arguments)
    assert called.code == 2
    assert called.err.startswith("Usage: spalier")
    assert called.err.count("\n") > 10


@pytest.mark.parametrize("name", ["open_network", "interrupted"])
def test_an_interruption_that_a_library_hides(name, spalier, monkeypatch):
    """A Ctrl-C in the middle of an import may come out as anything."""

    def half_imported(*_, **__):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise AttributeError("module 'sympy' has no attribute 'core'") from None

    monkeypatch.setattr("spalier.networks.open_network", half_imported)
    as_json = ["--json"] if name == "interrupted" else []
    called = spalier("trace", "resnet8", "--shape", "3,8,8", *as_json)
    assert called.code == 130
    assert called.err == "spalier: interrupted\n"
    if as_json:
        assert called.json["error"]["code"] == "interrupted"


def test_what_a_network_prints_is_no_part_of_the_document(spalier, tmp_path, monkeypatch):
    (tmp_path / "talking.py").write_text(
        "from spalier.models import resnet8\ndef make(classes=10):\n    print('hello')\n    return resnet8(classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    called = spalier("trace", "talking:make", "--shape", "3,8,8", "--json")
    assert called.json["streams"]
    assert "hello" in called.err


def test_no_streams(tmp_path):
    """Whatever is missing around it, an error is one line."""
    code = (
        "import sys, torch\n"
        "from spalier.cli.main import main\n"
        "code = main(['trace', 'resnet19', '--shape', '3,8,8'])\n"
        "sys.stdin = sys.stdout = None\n"
        "code += main(['--version'])\n"
        "sys.exit(code)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stderr
    assert found.stderr.startswith("spalier: there is no network")
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--version"], ["env", "--json"]])
def test_a_full_disk_behind_the_output(arguments):
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "spalier", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert process.returncode == 1
    assert "the output cannot be used: No space left on device" in process.stderr


def test_memory_that_ran_out_is_no_defect(spalier, monkeypatch):
    def large(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 TB. frame #0: x frame #1: y")

    monkeypatch.setattr("spalier.networks.open_network", large)
    called = spalier("trace", "resnet8", "--shape", "3,8,8", "--json")
    assert called.json["error"]["code"] == "memory"
    assert "frame" not in called.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_click_completes_for_shells(shell):
    command = [sys.executable, "-m", "spalier"]
    environment = {**os.environ, "_SPALIER_COMPLETE": f"{shell}_source"}
    script = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert f"_SPALIER_COMPLETE={shell}_complete" in script
    words, word = ("spalier", "ta") if shell == "fish" else ("spalier ta", "1")
    environment |= {"_SPALIER_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": word}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert "task" in found


def test_env_shows_what_is_installed_and_what_is_missing(spalier, monkeypatch):
    from importlib import metadata

    real = metadata.version

    def version(name):
        if name == "ray":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    called = spalier("env", "--json")
    assert called.code == 0
    assert called.json["spalier"] == package.__version__
    assert called.json["libraries"]["numpy"] == real("numpy")
    assert called.json["libraries"]["ray"] is None
    text = spalier("env").out
    assert re.search(r"^ray +missing +pip install 'spalier\[ray\]'$", text, re.MULTILINE)
    assert f"torch: {called.json['torch']}" in text
    assert called.json["threads"] >= 1


def test_env_works_where_torch_does_not(spalier, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "spalier.timing", raising=False)
    called = spalier("env", "--json")
    assert called.code == 0
    assert called.json["torch"].startswith("cannot be imported: ModuleNotFoundError")
    assert called.json["libraries"]["torch"]


def test_env_names_every_library_of_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = libraries()
    for extra in ("cli", "hub", "onnx", "ray", "report", "train"):
        for requirement in extras[extra]:
            name = re.match(r"[\w-]+", requirement)[0].replace("_", "-")
            assert name == "spalier" or known[name] == f"spalier[{extra}]"
    assert set(EXTRAS) | {"bench", "docs", "test"} == set(extras)
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]
        assert known[name] == name


if __name__ == "__main__":
    GOLDEN.write_text(surface())
    CLI = ROOT / "docs/cli.md"
    before, _, rest = CLI.read_text().partition("<!-- commands -->")
    after = rest.partition("<!-- /commands -->")[2]
    CLI.write_text(f"{before}<!-- commands -->\n\n{page()}\n<!-- /commands -->{after}")
