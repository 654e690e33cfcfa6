"""One family of exceptions, each with a stable code.

A message says what was found, what was expected, and what to do. Codes never change between releases,
so programs match on ``error.code`` and people read the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


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
    """A network cannot be captured, or which of its channels are coupled is not known."""

    code = "trace"


class PlanError(SpalierError):
    """A plan does not fit the network, or asks for what cannot be."""

    code = "plan"


class PruneError(SpalierError):
    """The network would no longer compute what the masked one computes; nothing was changed."""

    code = "prune"
    place: str | None = None
    """The path of the module that computes something else, where the two networks were compared."""


class ScoreError(SpalierError):
    """Units cannot be scored: a batch, a loss or a criterion is not what it has to be, or a value is not finite."""

    code = "score"


class BudgetError(PlanError):
    """A budget is outside of its range, or cannot be reached."""

    code = "budget"


class RecoveryError(SpalierError):
    """A pruned network cannot be recovered from these batches; it is as it was before."""

    code = "recovery"


class DataError(SpalierError):
    """A data set is missing, holds what cannot be learned from, or stopped coming; the message lists all of it."""

    code = "data"


class CodedError(SpalierError):
    """An error of several kinds: ``error.code`` says which, one of ``codes``.

    >>> try:
    ...     raise TaskFileError("missing", "there is no file 'a'")
    ... except CodedError as error:
    ...     print(error.code, error)
    missing there is no file 'a'
    """

    codes: ClassVar[Mapping[str, str]] = {}
    """What each code means."""

    def __init__(self, code: str, message: str) -> None:
        assert code in self.codes, code
        super().__init__(code, message)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


RUN_CODES = {
    "folder": "the folder holds something else than a run",
    "busy": "another process is working in the folder",
    "changed": "the run was begun with other settings, data or weights",
    "checkpoint": "the checkpoint cannot be read, or does not belong to the run",
    "not-finite": "the loss, or what was learned, is NaN or infinite",
    "classes": "the network's outputs are not the data's classes",
    "memory": "memory ran out",
    "write": "the folder cannot be written; the last good state is still there",
}
"""What can be wrong with a run, by code; codes never change."""


class RunError(CodedError):
    """A run cannot begin, go on or end; its folder still holds the last good state.

    ``code`` is one of `RUN_CODES`.
    """

    code = "run"
    codes = RUN_CODES


TASK_FILE_CODES = {
    "missing": "there is no such file or task",
    "unreadable": "the file or folder cannot be opened or read",
    "not-regular": "a folder, device, pipe or socket instead of a regular file",
    "symlink": "a symbolic link",
    "hard-link": "the file has another name elsewhere",
    "changed": "the file was changed while it was read",
    "foreign": "another format: pickle, zip, archive, plain text",
    "truncated": "the file ends too early",
    "too-large": "larger than the limit, or than memory",
    "header-length": "the header's length is impossible",
    "header": "the header is not strict JSON in UTF-8, or not of this shape",
    "tensors": "tensors that a task does not have, or lacks",
    "dtype": "a tensor of another dtype",
    "ranges": "ranges that overlap, leave gaps or end elsewhere than the file",
    "version": "a format version that is not known",
    "metadata": "the description lacks a field, or has one of another kind",
    "text": "text with control characters, or too much of it",
    "table": "the layer table is not strict JSON, or contradicts itself",
    "mask": "a mask of another length, without units, or with bits beyond them",
    "codes": "codes that are not deflated data, or hold digits beyond their levels",
    "sizes": "tensors that are longer or shorter than the table says",
    "non-finite": "NaN or infinite numbers",
    "base": "the base is another architecture",
    "base-values": "the base has other weights",
    "overflow": "fusing gives numbers beyond the base's dtype",
    "storage": "numbers that the storage dtype cannot hold",
    "fold": "a batch norm that cannot be folded exactly",
    "name": "a name that a task cannot have",
    "exists": "a task of that name is there already",
    "write": "the file could not be written; what was there is still there",
    "hub": "the hub refused, or has no such task",
}
"""What can be wrong with a task file, by code; codes never change."""


class TaskFileError(CodedError):
    """A task file, a task's name or a store is not what it has to be; the base is untouched.

    ``code`` is one of `TASK_FILE_CODES`.
    """

    code = "task-file"
    codes = TASK_FILE_CODES


REQUEST_CODES = {
    "token": "the bearer token is missing or wrong",
    "unknown-task": "the store has no such task",
    "body": "the body is not what its content type says, or holds no input",
    "content-type": "a content type that is not taken",
    "too-large": "more bytes or inputs than the limits allow",
    "busy": "too many requests are under way",
    "timeout": "the request took too long",
}
"""Why a service refuses a request, by code; codes never change."""


class RequestError(CodedError):
    """A request that a service refuses; ``code`` is one of `REQUEST_CODES`."""

    code = "request"
    codes = REQUEST_CODES
