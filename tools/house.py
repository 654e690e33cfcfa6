#!/usr/bin/env python3
"""Count the house: files, lines of code, the longest of them, comments, tests, and what a batch walks through.

    python tools/house.py                  # the table of docs/design.md, for this tree
    python tools/house.py --tree ../other  # for another checkout
    python tools/house.py --walk           # and the files that a small run goes through, from settings to a saved task
    python tools/house.py --tests          # and the processor time of the README's test command

A line of code holds at least one token that is neither a comment nor part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import resource
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):  # type: ignore[attr-defined]
            lines -= set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]
    return lines


def comment_lines(text: str) -> int:
    """How many lines have a comment; instructions for linters do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return sum(not re.match(r"#\s*(type: ignore|noqa|!)", comment) for comment in comments)


def longest_function(text: str, code: set[int]) -> int:
    """The code lines of the longest function, its signature included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    spans = (range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in functions)
    return max((len(code & set(span)) for span in spans), default=0)


def counted(tree: Path) -> dict[str, str]:
    """The rows of the table, from the files alone."""
    texts = {path: path.read_text("utf-8") for path in sorted((tree / "src/spalier").rglob("*.py"))}
    code = {path: code_lines(text) for path, text in texts.items()}
    total = sum(map(len, code.values()))
    tests = sum(len(code_lines(path.read_text("utf-8"))) for path in (tree / "tests").rglob("*.py"))
    names = Counter(path.name for path in texts if path.name != "__init__.py")
    comments = sum(map(comment_lines, texts.values()))
    return {
        "source files": f"{len(texts)}",
        "lines of code": f"{total:,}",
        "file names that occur twice": f"{sum(count > 1 for count in names.values())}",
        "longest file, all lines": f"{max(len(text.splitlines()) for text in texts.values())}",
        "longest function, lines of code": f"{max(longest_function(t, code[p]) for p, t in texts.items())}",
        "comments in 1,000 lines of code": f"{1000 * comments / total:.0f}",
        "test to source, lines of code": f"{tests / total:.2f}",
    }


_WALK = """
import sys, threading
sys.path[:0] = [{src!r}]
import spalier as sp
seen = set()
def note(frame, event, _):
    if event == "call" and frame.f_code.co_name != "<module>":
        seen.add(frame.f_code.co_filename)
few = {{"epochs": 1, {each!r}: 1, {limit!r}: 40, {batch!r}: 20}}
run = sp.TransferPruning(data="digits", network="resnet8", densities=(0.5,), **few)
threading.setprofile(note); sys.setprofile(note)
run.run({folder!r}, progress=False)
sys.setprofile(None)
ours = sorted(name.split("src/spalier/")[1] for name in seen if "src/spalier/" in name)
print("\\n".join(ours))
"""
_NAMES = {
    True: {"each": "epochs_per_prune", "limit": "max_train_samples", "batch": "batch_size"},
    False: {"each": "epochs_each", "limit": "limit", "batch": "batch"},  # before they were renamed
}


def walked(tree: Path) -> list[str]:
    """The files whose functions run between `TransferPruning.run` and the last task file that it saves."""
    source = "\n".join(path.read_text("utf-8") for path in (tree / "src/spalier/runs").glob("*.py"))
    with tempfile.TemporaryDirectory() as folder:
        names = _NAMES["epochs_per_prune" in source]
        script = _WALK.format(src=str(tree / "src"), folder=f"{folder}/run", **names)
        command = [sys.executable, "-W", "ignore", "-c", script]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.split()


def tested(tree: Path) -> float:
    """Seconds of processor time that the README's test command takes, with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "dev.py", "test"], cwd=tree, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--walk", action="store_true")
    parser.add_argument("--tests", action="store_true")
    asked = parser.parse_args()
    rows = counted(asked.tree)
    if asked.walk:
        files = walked(asked.tree)
        print("\n".join(files))
        rows["files on the way of a batch"] = f"{len(files)}"
    if asked.tests:
        rows["processor seconds of the tests"] = f"{tested(asked.tree):.0f}"
    width = max(map(len, rows))
    print("\n".join(f"{name:{width}}  {value}" for name, value in rows.items()))


if __name__ == "__main__":
    main()
