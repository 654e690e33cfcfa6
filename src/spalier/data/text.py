"""What messages say: foreign names made harmless, long lists made short, options checked."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from spalier.errors import ConfigError, DataError

EXTRAS = {"PIL": "spalier[train]", "sklearn": "spalier[train]"}


def shown(name: object) -> str:
    """A name as a message may hold it: control characters and broken encodings are escaped.

    >>> shown("cats"), shown("a" + chr(10) + "b")
    ('cats', 'a\\\\nb')
    """
    text = str(name)
    return text if text.isprintable() else ascii(text)[1:-1]


def some(names: Sequence[object], most: int = 5) -> str:
    """The first few of many, and how many more there are.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more


def imported(name: str, purpose: str) -> Any:
    """A library that only some data sets need."""
    library = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        wanted = EXTRAS.get(library, library)
        raise DataError(f"{purpose} needs {library}, which is not installed; pip install {wanted}") from error


def whole(name: str, value: object, least: int = 0) -> int:
    """An option that has to be an integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value.__index__()) < least:
        raise ConfigError(f"{name} is {value!r}, expected an integer of at least {least}")
    return int(value.__index__())
