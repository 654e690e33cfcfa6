"""Networks measured side by side: how long a batch takes, and whether a smaller network is a faster one."""

from spalier.benching.measuring import bench
from spalier.benching.results import Benchmark, Comparison, Timing

__all__ = ["Benchmark", "Comparison", "Timing", "bench"]
