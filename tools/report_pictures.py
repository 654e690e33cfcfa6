"""Make the pictures of docs/report.md anew, from the runs of a demo.

spalier demo
python tools/report_pictures.py spalier-demo
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import spalier

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
PICTURES = {"report-accuracy.png": "accuracy-bytes.png", "report-network.png": "network-0to9.png"}
"""What the page calls them, and what they are among the figures of the demo's report."""


def make_pictures(runs: Path, folder: Path) -> None:
    """Draw the report's figures, and take two of them."""
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch) / "figures"
        spalier.report(runs, Path(scratch) / "report.html", figures=figures)
        for name, figure in PICTURES.items():
            shutil.copyfile(figures / figure, folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", nargs="?", type=Path, default=Path("spalier-demo"), help="the folder of spalier demo")
    make_pictures(parser.parse_args().demo / "runs", ASSETS)
