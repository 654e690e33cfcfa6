"""What ``import spalier`` costs beyond ``import torch``: fresh interpreters, taking turns.

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


def seconds(module: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


def main() -> None:
    times: dict[str, list[float]] = {"torch": [], "spalier": []}
    for _ in range(REPEATS):
        for module, found in times.items():
            found.append(round(seconds(module), 4))
    extra = statistics.median(b - a for a, b in zip(*times.values(), strict=True))
    base = statistics.median(times["torch"])
    print(f"import torch: {base:.2f} s; import spalier: {extra:+.2f} s (medians of {REPEATS} turns)")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"seconds": times, "extra": round(extra, 4)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
