"""Where something was measured."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch


def machine(device: torch.device, threads: int) -> dict[str, str | int]:
    """The processor and versions, as plain data."""
    found: dict[str, str | int] = {"cpu": processor(), "cores": cores(), "threads": threads}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    elif device.type != "cpu":
        found["device"] = str(device)
    found["torch"] = torch.__version__
    if "onnxruntime" in sys.modules:
        found["onnxruntime"] = str(sys.modules["onnxruntime"].__version__)
    return found


def processor() -> str:
    """What the system calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def cores() -> int:
    """How many of them this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
