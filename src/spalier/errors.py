"""One family of exceptions, each with a stable code.

A message says what was found, what was expected, and what to do. Codes never change between releases,
so programs match on ``error.code`` and people read the message.
"""

from __future__ import annotations


class SpalierError(Exception):
    """Base of every error that Spalier raises on purpose.

    >>> try:
    ...     raise RankError("rank 0 was asked for, expected at least 1")
    ... except SpalierError as error:
    ...     print(error.code)
    rank
    """

    code = "spalier"


class ConfigError(SpalierError):
    """An option has the wrong type or a value outside its range."""

    code = "config"


class RankError(ConfigError):
    """A rank is not a positive integer, or a fraction comes to no rank at all for some layer."""

    code = "rank"


class TargetError(SpalierError):
    """A pattern or predicate selects nothing, or selects what cannot be adapted."""

    code = "target"


class UnsupportedLayerError(TargetError):
    """A layer was asked for by name whose kind no adapter can update exactly."""

    code = "unsupported-layer"


class TiedWeightError(TargetError):
    """Layers that share one weight were not selected together."""

    code = "tied-weight"


class AttachmentError(SpalierError):
    """The network is already adapted, or is not adapted where it has to be."""

    code = "attachment"


class NonFiniteError(SpalierError):
    """A weight is NaN or infinite, or became so while an adapter was fused into it."""

    code = "non-finite"


class WeightsError(SpalierError):
    """A file or mapping of weights does not fit the network."""

    code = "weights"


class ExampleError(SpalierError):
    """An example input does not run through the network, or says nothing about a sample."""

    code = "example"


class NetworkError(SpalierError):
    """A network of another library cannot be made: the library is missing or broken, or has none of that name."""

    code = "network"


class TraceError(SpalierError):
    """A network cannot be captured, or nothing is known of how its channels hang together."""

    code = "trace"


class PlanError(SpalierError):
    """A plan does not fit the network, or asks for what cannot be."""

    code = "plan"


class PruneError(SpalierError):
    """The network would no longer compute what the masked one computes; nothing was changed."""

    code = "prune"


class ScoreError(SpalierError):
    """Units cannot be scored: a batch, a loss or a criterion is not what it has to be, or a value is not finite."""

    code = "score"


class BudgetError(PlanError):
    """A budget is outside of its range, or cannot be reached."""

    code = "budget"


class RecoveryError(SpalierError):
    """A pruned network cannot be recovered from these batches; it is as it was before."""

    code = "recovery"
