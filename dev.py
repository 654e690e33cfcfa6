#!/usr/bin/env python3
"""Set up and run everything, with nothing but Python: ``python3 dev.py demo``, ``python3 dev.py test``.

The first call makes a virtual environment in .venv and installs into it what the command needs, at the versions
pinned in constraints.txt. Later calls find it there and install nothing.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

PYTEST = ["-m", "pytest", "-n", "2", "--dist", "loadscope"]
CORE = [
    "tests/test_repository.py",
    "tests/adapters/test_attach.py",
    "tests/adapters/test_updates.py",
    "tests/structure",
    "tests/pruning/test_prune.py",
    "tests/tasks/test_task.py",
    "tests/tasks/test_store.py",
    "tests/tasks/test_switcher.py",
]

# command: (what it is for, the extra it needs, what it runs)
COMMANDS: dict[str, tuple[str, str, list[list[str]]]] = {
    "demo": (
        "one base, three tasks, two methods, and a report: about a minute",
        "cli",
        [["-m", "spalier", "demo"]],
    ),
    "quick": ("run the tests of the core, under a minute", "test", [[*PYTEST, "-m", "not slow", *CORE]]),
    "test": ("run the tests", "test", [[*PYTEST, "-m", "not slow"]]),
    "slow": ("run the slow tests", "test", [[*PYTEST, "-m", "slow"]]),
    "all": ("run all tests", "test", [PYTEST]),
    "docs": ("build the site into site/", "docs", [["-m", "mkdocs", "build", "--strict"]]),
    "check": (
        "lint, check the format and the types",
        "test",
        [["-m", "ruff", "check", "."], ["-m", "ruff", "format", "--check", "."], ["-m", "mypy"]],
    ),
    "paper": (
        "run the paper's experiments: paper --help",
        "cli",
        [["-m", "experiments.paper"]],
    ),
    "bench": ("measure a training step against the peers", "bench", [["benchmarks/training_step.py"]]),
    "bench-structure": (
        "measure trace and prune_ against Torch-Pruning",
        "bench",
        [["benchmarks/structure.py"]],
    ),
    "bench-scoring": ("measure what scoring costs", "bench", [["benchmarks/scoring.py"]]),
    "bench-recovery": ("measure criteria and recovery on CIFAR-10", "bench", [["benchmarks/recovery.py"]]),
    "bench-switching": ("measure switches, and what comes of them", "bench", [["benchmarks/switching.py"]]),
    "bench-serving": ("measure a service with a thousand tasks", "bench", [["benchmarks/serving.py"]]),
    "bench-transfer": ("measure whole runs", "bench", [["benchmarks/transfer.py"]]),
    "bench-loading": ("measure what loading data costs", "bench", [["benchmarks/loading.py"]]),
    "bench-import": ("measure what an import costs", "cli", [["benchmarks/import_time.py"]]),
}


def main(arguments: list[str]) -> int:
    """Run one command; what follows its name goes to what it runs."""
    if sys.version_info < (3, 11):  # noqa: UP036 - a plain message is the point
        print(
            f"Python {sys.version.split()[0]} found, 3.11 or newer needed: python3.11 dev.py ...",
            file=sys.stderr,
        )
        return 2
    if not arguments or arguments[0] not in COMMANDS:
        print(f"{__doc__}\nCommands:")
        for name, (purpose, _, _) in COMMANDS.items():
            print(f"  {name:12} {purpose}")
        return 2 if arguments and arguments[0] not in ("-h", "--help") else 0
    _, extra, steps = COMMANDS[arguments[0]]
    install(extra)
    for step in steps:
        code = subprocess.call([str(PYTHON), *step, *arguments[1:]], cwd=ROOT)
        if code:
            return code
    return 0


def install(extra: str) -> None:
    """Install the package with an extra, unless this very set was installed before."""
    stamp = VENV / f".installed-{extra}"
    wanted = fingerprint()
    if stamp.is_file() and stamp.read_text() == wanted and PYTHON.exists():
        return
    if not PYTHON.exists():
        print(f"making a virtual environment in {VENV.name}", flush=True)
        subprocess.check_call([sys.executable, "-m", "venv", str(VENV)])
    print(f"installing spalier[{extra}] at the pinned versions; the first time takes a few minutes", flush=True)
    constraints = ROOT / "constraints.txt"
    environment = {**os.environ, "PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.check_call(
        [str(PYTHON), "-m", "pip", "install", "--quiet", "--editable", f".[{extra}]"],
        cwd=ROOT,
        env=environment,
    )
    stamp.write_text(wanted)


def fingerprint() -> str:
    """What an installation depends on; when it changes, the next call installs again."""
    files = (ROOT / name for name in ("pyproject.toml", "constraints.txt"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() + sys.version


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"dev.py: {' '.join(error.cmd[:4])} ... failed with exit code {error.returncode}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
