"""Find what can be pruned in a network: labels on its graph, streams of channels, and what is frozen, and why."""

from spalier.structure.streams import Frozen, Member, Stream
from spalier.structure.structure import Structure

__all__ = ["Frozen", "Member", "Stream", "Structure"]
