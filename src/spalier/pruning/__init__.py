"""Take channels out of a network physically, and prove that nothing else has changed."""

from spalier.pruning.attributes import Resize, resizes
from spalier.pruning.kept import kept_units
from spalier.pruning.plan import Plan
from spalier.pruning.prune import prune_
from spalier.pruning.recovery import Recovered, Recovery

__all__ = ["Plan", "Recovered", "Recovery", "Resize", "kept_units", "prune_", "resizes"]
