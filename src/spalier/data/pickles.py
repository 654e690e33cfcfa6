"""Pickles of plain data and arrays, read without running anything: CIFAR is published in them."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

import numpy as np

from spalier.data.augment import Bytes
from spalier.data.text import shown
from spalier.errors import DataError

# A pickle runs whatever it names. These stand in for the few names that batches hold, and do nothing.


class Array:
    """What a pickle says of a numpy array."""

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def bytes_of(self, width: int, name: str) -> Bytes:
        """Rows of bytes, if that is what it holds."""
        try:
            _, shape, kind, fortran, data = self.state
            if kind.code in (b"u1", "u1") and shape[1:] == (width,) and not fortran:
                return np.frombuffer(data, np.uint8).reshape(shape)
        except (TypeError, ValueError, AttributeError):
            pass
        raise DataError(
            f"{name} holds an array of another kind, expected bytes of (n, {width}); fetch it again"
        )


class _Kind:
    """What a pickle says of a dtype."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None: ...


def _reconstruct(*_: Any) -> Array:
    return Array()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How pickles of old protocols write bytes."""
    return str(text).encode("latin1")


_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    """Admits stand-ins for arrays of numpy and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise DataError(f"asks for {shown(module)}.{shown(name)}")
        return _ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> NoReturn:
        raise DataError("asks for an object from elsewhere")


def unpickled(data: bytes, name: str) -> dict[Any, Any]:
    """A pickled dictionary of plain data and arrays; nothing that it names is run."""
    try:
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except DataError as error:
        raise DataError(
            f"{name} is no batch of CIFAR: its pickle {error}, and nothing but arrays is admitted; do not open it "
            "with anything else, and fetch it again from its authors"
        ) from None
    except Exception as error:  # a damaged pickle raises anything
        raise DataError(f"{name} is not a readable pickle: {type(error).__name__}; fetch it again") from error
    if not isinstance(found, dict):
        raise DataError(f"{name} holds a {type(found).__name__}, expected a dictionary; fetch it again")
    return found
