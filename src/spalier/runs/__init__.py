"""Whole runs: settings, the loop from data to task files, and sweeps of many runs."""

from spalier.runs.engine import Engine
from spalier.runs.run import Results, TransferPruning
from spalier.runs.settings import Settings
from spalier.runs.sweep import Sweep

__all__ = ["Engine", "Results", "Settings", "Sweep", "TransferPruning"]
