"""Spalier: one frozen network, many tasks, each a tiny file of kept channels and low-rank corrections."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spalier import errors, models
from spalier.adapters import FineTune, LoRA, SPLoRA, SPPaRA, detach_, fuse
from spalier.attaching import attach_
from spalier.counting import count

if TYPE_CHECKING:
    from spalier import criteria
    from spalier.budget import select
    from spalier.criteria import Scores, score
    from spalier.pruning.attributes import resizes
    from spalier.pruning.kept import kept_units
    from spalier.pruning.plan import Plan
    from spalier.pruning.prune import prune_
    from spalier.pruning.recovery import Recovery
    from spalier.runs.sweep import Sweep
    from spalier.runs.transfer import TransferPruning
    from spalier.scheduling import Schedule
    from spalier.structure.structure import Structure
    from spalier.tasks.store import Store
    from spalier.tasks.switcher import Switcher
    from spalier.tasks.task import Task
    from spalier.tracing import trace

__version__ = "0.1.0"

__all__ = [
    "FineTune",
    "LoRA",
    "Plan",
    "Recovery",
    "SPLoRA",
    "SPPaRA",
    "Schedule",
    "Scores",
    "Store",
    "Structure",
    "Sweep",
    "Switcher",
    "Task",
    "TransferPruning",
    "attach_",
    "count",
    "criteria",
    "detach_",
    "errors",
    "fuse",
    "kept_units",
    "models",
    "prune_",
    "resizes",
    "score",
    "select",
    "trace",
]

# what only pruning needs, numpy above all, is imported when it is first asked for
_LATER = {
    "Plan": "pruning.plan",
    "Recovery": "pruning.recovery",
    "Schedule": "scheduling",
    "Scores": "criteria",
    "Store": "tasks.store",
    "Structure": "structure.structure",
    "Sweep": "runs.sweep",
    "Switcher": "tasks.switcher",
    "Task": "tasks.task",
    "TransferPruning": "runs.transfer",
    "kept_units": "pruning.kept",
    "prune_": "pruning.prune",
    "resizes": "pruning.attributes",
    "score": "criteria",
    "select": "budget",
    "trace": "tracing",
}


def __getattr__(name: str) -> Any:
    if name == "criteria":
        return import_module("spalier.criteria")
    if name not in _LATER:
        raise AttributeError(f"module 'spalier' has no attribute {name!r}")
    value = getattr(import_module(f"spalier.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, "criteria"})
