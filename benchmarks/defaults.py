"""What the defaults of a run come to with few photographs: three classes of Oxford Flowers, 40 images each.

    SPALIER_DATA=folder/with/data python3 benchmarks/defaults.py --seeds 3

The folder is as in experiments/paper. The three classes that have most images are taken; what is beyond 40 of each is
the test set. The base is the small one that comes with the package, images have 32 pixels. What the results have
already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
from PIL import Image

import spalier as sp
from experiments.paper.paper_data import open_set
from spalier import files
from spalier.text import table

RESULTS = Path(__file__).parent / "results" / "defaults.json"
LEARNED_FROM, DENSITIES = 40, (0.5, 0.3, 0.1)
WAYS: dict[str, dict[str, Any]] = {
    "before": {"method": "splora", "batch_size": 64, "epochs": 8, "epochs_per_prune": 4, "lr": 3e-3},
    "SPLoRA of rank 8, learned directly": {"method": "splora"},
    "the default: learned wide, two bits": {},
}


def write_flowers(data: Path, folder: Path) -> str:
    """The images as a folder of classes; what there are."""
    found = open_set("flowers102", data, image_size=96)
    splits: list[Any] = [found.train, found.test]
    images = np.concatenate([split.images[split.rows] for split in splits])
    labels = np.concatenate([split.labels for split in splits])
    counts = np.bincount(labels)
    chosen = np.argsort(-counts, kind="stable")[:3]
    for label in chosen:
        for number, row in enumerate(np.flatnonzero(labels == label)):
            place = folder / ("train" if number < LEARNED_FROM else "test") / f"flower-{label + 1}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[row]).save(place / f"{number}.png")
    return f"classes {', '.join(str(label + 1) for label in chosen)}; {counts[chosen].sum() - 3 * LEARNED_FROM} tested"


def measure(folder: Path, way: str, seed: int) -> dict[str, Any]:
    start = time.process_time()
    config = sp.TransferPruning(
        data=f"folder:{folder}", network="resnet20", densities=DENSITIES, seed=seed, trackers=(), **WAYS[way]
    )
    with tempfile.TemporaryDirectory() as scratch:
        rows = config.run(Path(scratch) / "run", progress=False).rows
    found: dict[str, Any] = {f"{row['channels']:.0%}": round(100 * row["test"], 2) for row in rows}
    found["bytes"] = rows[-2]["bytes"]
    return found | {"seconds": round(time.process_time() - start, 1)}


def shown(found: dict[str, Any]) -> str:
    """A row for each way, means over seeds."""
    keys = ("100%", "50%", "30%", "10%", "bytes", "seconds")
    rows = []
    for way in WAYS:
        several = [entry for name, entry in found.items() if name.rpartition("/")[0] == way]
        if several:
            means = [statistics.mean(entry[key] for entry in several) for key in keys]
            spread = [statistics.stdev(e[key] for e in several) if len(several) > 1 else 0.0 for key in keys]
            cells = [f"{mean:.1f} ± {error:.1f}" for mean, error in zip(means[:4], spread, strict=False)]
            rows.append([way, *cells, f"{means[4]:,.0f}", f"{means[5]:.0f}", str(len(several))])
    return table(["", *keys, "seeds"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPALIER_DATA"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.data is None:
        parser.error("pass --data, or set SPALIER_DATA")
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        print(write_flowers(Path(options.data), Path(scratch)), flush=True)
        for seed in range(options.seeds):
            for way in WAYS:
                name = f"{way}/{seed}"
                if name not in found:
                    found[name] = measure(Path(scratch), way, seed)
                    print(name, json.dumps(found[name]), flush=True)
                    files.write(options.output, (json.dumps(found, indent=1, sort_keys=True) + "\n").encode())
    print(shown(found))


if __name__ == "__main__":
    main()
