"""Spalier: one frozen network, many tasks, each a tiny file of kept channels and low-rank corrections."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spalier import errors

if TYPE_CHECKING:
    from spalier import criteria, models
    from spalier.adapters import ByLayer, FineTune, LoRA, SPDelta, SPLoRA, SPPaRA, attach_, detach_, fuse
    from spalier.adapting import adapt, load
    from spalier.benching import bench
    from spalier.counting import count, print_trainable_parameters
    from spalier.criteria import Scores, score
    from spalier.pruning.modules import resizes
    from spalier.pruning.plan import Plan, kept_units
    from spalier.pruning.prune import prune_
    from spalier.pruning.recovery import Recovery
    from spalier.refitting import refit_
    from spalier.reporting import report
    from spalier.runs import Sweep, TransferPruning
    from spalier.scheduling import Schedule
    from spalier.selecting import select
    from spalier.structure.structure import Structure
    from spalier.tasks import Store, Switcher, Task
    from spalier.tracing import trace

__version__ = "0.2.0"

__all__ = ["ByLayer", "FineTune", "LoRA", "Plan", "Recovery", "SPDelta", "SPLoRA", "SPPaRA", "Schedule", "Scores"]
__all__ += ["Store", "Structure", "Sweep", "Switcher", "Task", "TransferPruning"]
__all__ += ["adapt", "attach_", "bench", "count", "detach_", "fuse", "kept_units", "load", "print_trainable_parameters"]
__all__ += ["prune_", "refit_", "report", "resizes", "score", "select", "trace"]
__all__ += ["criteria", "errors", "models"]

# everything is imported when it is first asked for: the command line answers before torch is there
_BY_MODULE = {
    "adapters": "ByLayer FineTune LoRA SPDelta SPLoRA SPPaRA attach_ detach_ fuse",
    "adapting": "adapt load",
    "benching": "bench",
    "counting": "count print_trainable_parameters",
    "criteria": "Scores score",
    "pruning.modules": "resizes",
    "pruning.plan": "Plan kept_units",
    "pruning.prune": "prune_",
    "pruning.recovery": "Recovery",
    "refitting": "refit_",
    "reporting": "report",
    "runs": "Sweep TransferPruning",
    "scheduling": "Schedule",
    "selecting": "select",
    "structure.structure": "Structure",
    "tasks": "Store Switcher Task",
    "tracing": "trace",
}
_LATER = {name: module for module, names in _BY_MODULE.items() for name in names.split()}
_MODULES = ("criteria", "models")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"spalier.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'spalier' has no attribute {name!r}")
    value = getattr(import_module(f"spalier.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})
