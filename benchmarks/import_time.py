"""What Spalier's adapters cost to import beyond ``import torch``, and what the command line's help takes.

Fresh interpreters, taking turns.

python3 dev.py bench-import
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPEATS = 15
RESULTS = Path(__file__).parent / "results" / "import_time.json"


CODE = {
    "torch": "import torch",
    "spalier": "import spalier as sp; sp.attach_, sp.SPLoRA, sp.fuse, sp.count, sp.models",
    "help": "from spalier.cli.main import main; main(['--help'])",
}


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in CODE}
    for _ in range(REPEATS):
        for name, code in CODE.items():
            times[name].append(round(seconds(code), 4))
    extra = statistics.median(b - a for a, b in zip(times["torch"], times["spalier"], strict=True))
    base, shown = (statistics.median(times[name]) for name in ("torch", "help"))
    print(f"import torch: {base:.2f} s; spalier's adapters: {extra:+.2f} s (medians of {REPEATS} turns)")
    print(f"spalier --help: {shown:.2f} s")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"seconds": times, "extra": round(extra, 4)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
