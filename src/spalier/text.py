"""Helpers that all packages share: tables, numbers and names in text, checks of options, imports of optional libraries.

Also units along an axis, written short: mostly each of n in turn, for a run of indices each, several times over.
"""

from __future__ import annotations

import math
import statistics
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from spalier.errors import ConfigError, SpalierError

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_EXTRAS = {
    "cli": ("click", "jinja2"),
    "hub": ("huggingface_hub",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "ray": ("ray",),
    "report": ("resvg_py",),
    "serve": ("fastapi", "prometheus_client", "python_multipart", "uvicorn"),
    "train": ("PIL", "accelerate", "sklearn", "tqdm", "yaml"),
}
"""What each extra installs, by the names of modules; other libraries are installed by their own names."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; numbers to the right, words to the left.

    >>> print(table(["layer", "learned"], [["conv1", "536"], ["fc", "5,130"]]))
    layer  learned
    conv1      536
    fc       5,130
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(rows) and all(not c or c[0].isdigit() or c == "-" for c in column[1:]) for column in columns]
    lines = []
    for cells in (header, *rows):
        padded = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(cells, widths, right, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def first_line(error: Exception) -> str:
    """What an error says, in one line; its kind, where it says nothing.

    >>> first_line(ValueError("\\n  no such key\\n  in file x"))
    'no such key'
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def printable(name: object) -> str:
    """A name as a message may show it: control characters and broken encodings are escaped.

    >>> printable("cats"), printable("a" + chr(10) + "b")
    ('cats', 'a\\\\nb')
    """
    text = str(name)
    return text if text.isprintable() else ascii(text)[1:-1]


def first_few(names: Sequence[object], most: int = 5) -> str:
    """The first few of many names, and how many more there are.

    >>> first_few(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(printable(name) for name in names[:most]) + more


def near(name: object, known: Iterable[str]) -> str:
    """Names to try in place of one that is not known: those that are close to it, or else the first few.

    >>> near("con1", ["conv1", "fc"]), near("x", ["conv1", "fc"])
    ("'conv1'", "'conv1', 'fc'")
    """
    names = list(dict.fromkeys(known))
    return ", ".join(map(repr, close_names(name, names) or names[:3])) or "none: there is nothing to name"


def close_names(name: object, known: Iterable[str]) -> list[str]:
    """The names that one may have meant, the closest first; the case of letters does not matter.

    >>> close_names("Taylr", ["taylor", "weight"]), close_names("xyz", ["taylor"])
    (['taylor'], [])
    """
    lower = {each.lower(): each for each in known}
    return [lower[each] for each in get_close_matches(str(name).lower(), lower, n=3)]


class InNotebooks:
    """What prints well, shown so in a notebook too: nothing of its text becomes HTML."""

    def _repr_html_(self) -> str:
        return "<pre>" + escape("\n".join(map(clean, str(self).split("\n")))) + "</pre>"


def clean(text: str) -> str:
    """Text of unknown origin as a page can show it: invisible and direction characters become U+FFFD.

    >>> clean("a\\u202eb\\x00") == "a\\ufffdb\\ufffd"
    True
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join("\ufffd" if is_hidden(character) else character for character in text)


def is_hidden(character: str) -> bool:
    """Whether it shows nothing, or turns the line around: controls, direction marks, ends of lines."""
    joins = character in "\u200c\u200d"  # emoji and several scripts need them
    return not joins and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent.

    >>> percent(0.935), percent(None)
    ('93.5%', '–')
    """
    return "–" if share is None else f"{100 * share:.{digits}f}%"


def short_number(value: float | None) -> str:
    """A number with three digits and a unit of thousands.

    >>> short_number(11_173_962), short_number(950), short_number(0.0123), short_number(None)
    ('11.2 M', '950', '0.0123', '–')
    """
    if not value:
        return "–" if value is None else "0"
    units = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
    power, unit = next((u for u in units if abs(value) >= u[0] * 0.99995), (1.0, ""))
    digits = max(0, 2 - math.floor(math.log10(abs(value / power))))
    text = f"{value / power:.{min(digits, 12)}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + unit


def byte_size(count: float | None) -> str:
    """A number of bytes with its unit.

    >>> byte_size(123_456), byte_size(12)
    ('123 kB', '12 B')
    """
    text = short_number(count)
    return text if count is None else f"{text}B" if " " in text else f"{text} B"


def check_integer(name: str, value: object, minimum: int = 0) -> int:
    """An option as an integer of at least ``minimum``; integers of numpy and torch will do."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value.__index__()) < minimum:
        raise ConfigError(f"{name} is {value!r}, expected an integer of at least {minimum}")
    return int(value.__index__())


def import_optional(name: str, purpose: str, error: type[SpalierError] = ConfigError) -> Any:
    """Import a library that only some users need, or raise an error that says how to install it.

    >>> import_optional("json.decoder", "an example").__name__
    'json.decoder'
    """
    library = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != library:
            raise  # the library is there, but its own installation is broken
        wanted = next((f"spalier[{extra}]" for extra, names in _EXTRAS.items() if library in names), library)
        raise error(f"{library} is needed for {purpose} and is not installed; pip install '{wanted}'") from missing
    except RuntimeError as broken:
        if "torchvision::" not in str(broken):
            raise
        raise error(
            f"torchvision cannot load its compiled operators beside torch {version('torch')} ({broken}), and "
            f"{library} needs it or looks for it; install torch and torchvision of matching versions from the same "
            "place, or uninstall torchvision if nothing else needs it"
        ) from broken


def pattern(units: int, run: int, times: int) -> Ints:
    """Each of several units in turn, for a run of indices each, the whole several times over.

    >>> pattern(2, 2, 2).tolist()
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    return np.tile(np.repeat(np.arange(units), run), times)


def pattern_of(units: Ints) -> tuple[int, int, int] | None:
    """The pattern that some units are; None where they are none.

    >>> pattern_of(np.array([0, 0, 1, 1])), pattern_of(np.array([0, 2, 1]))
    ((2, 2, 1), None)
    """
    count = int(units.max()) + 1
    for run in (1, int((units != units[0]).argmax()) or len(units)):
        if count and len(units) % (count * run) == 0:
            times = len(units) // (count * run)
            if np.array_equal(units, pattern(count, run, times)):
                return count, run, times
    return None


@dataclass(frozen=True)
class Mean:
    """A number over several runs."""

    value: float
    deviation: float | None
    """The standard deviation, with n - 1; None for one run."""
    count: int

    @property
    def share_range(self) -> tuple[float, float]:
        """The mean of a share less and plus its deviation."""
        deviation = self.deviation or 0.0
        return max(self.value - deviation, 0.0), min(self.value + deviation, 1.0)

    def __str__(self) -> str:
        return f"{self.value:.1f}" if self.deviation is None else f"{self.value:.1f} ± {self.deviation:.1f}"


def mean(values: Sequence[float]) -> Mean | None:
    """The mean of some values; None of nothing.

    >>> str(mean([50.0, 70.0])), mean([])
    ('60.0 ± 14.1', None)
    """
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Mean(statistics.fmean(values), deviation, len(values))
