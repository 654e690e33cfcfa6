"""What things are called on the page: methods, series, numbers."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

_METHODS = {
    "splora": "SPLoRA",
    "sppara": "SPPaRA",
    "lora": "LoRA",
    "fine-pruning": "fine-pruning",
    "finetune": "fine-pruning",
}
_FIRST = (
    "name",
    "data",
    "classes",
    "method",
    "rank",
    "criterion",
    "network",
    "schedule",
    "ranking",
    "writers",
    "budget",
)
TASK_SETTINGS = ("name", "data", "classes")
"""Settings that say what is learned, rather than how."""
_SILENT = frozenset({"seed", "num_workers", "cache_folder", "data_folder", "checkpoint_seconds", "trackers"})
_RECIPE = (
    "lr",
    "weight_decay",
    "optimizer",
    "epochs",
    "epochs_per_prune",
    "final_epochs",
    "batch_size",
    "lr_schedule",
    "schedule",
    "final_density",
    "densities",
    "prune_step",
    "prune_steps",
)
_FOLLOWS = {
    "name": ("data", "classes", "image_size", "max_train_samples", "network_options", "weights", *_RECIPE),
    "data": ("name", "classes", "image_size", "max_train_samples", "network_options", "weights", *_RECIPE),
    "classes": ("max_train_samples",),
    "recipe": (*_RECIPE, "writers", "recovery"),
    "method": (*_RECIPE, "rank", "grad_clip"),
    "network": ("network_options", "weights", "head", "image_size"),
}
"""Settings that may follow from another one, and then say nothing more."""


def varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that differ between runs, the seed aside, and without those that follow from another one."""
    if not settings:
        return []
    names = [n for n in settings[0] if n not in _SILENT and len({_text(s[n]) for s in settings}) > 1]
    for leader, followers in _FOLLOWS.items():
        if leader in names:
            names = [n for n in names if n not in followers or not _determined(settings, leader, n)]
    return sorted(names, key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n))


def repeated(settings: Mapping[str, Mapping[str, Any]], lengths: Mapping[str, int]) -> dict[str, str]:
    """Runs that another one repeats, seed included, and that other one: the one with most tasks, or the first.

    >>> repeated({"a": {"seed": 0}, "b": {"seed": 0}, "c": {"seed": 1}}, {"a": 2, "b": 3, "c": 3})
    {'a': 'b'}
    """
    alike: dict[str, list[str]] = {}
    for name, said in settings.items():
        told = {n: v for n, v in said.items() if n not in _SILENT or n == "seed"}
        alike.setdefault(_text(told), []).append(name)
    shown = {group: max(names, key=lambda n: lengths[n]) for group, names in alike.items()}
    return {n: shown[group] for group, names in alike.items() for n in names if n != shown[group]}


def _determined(settings: Sequence[Mapping[str, Any]], by: str, name: str) -> bool:
    pairs = {(_text(s[by]), _text(s[name])) for s in settings}
    return len(pairs) == len({first for first, _ in pairs})


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def value_name(setting: str, value: Any) -> str:
    """A setting's value in a series' name.

    >>> value_name("method", "splora"), value_name("rank", 8), value_name("writers", "free")
    ('SPLoRA', 'rank 8', 'free')
    """
    if setting == "method":
        return _METHODS.get(str(value), str(value))
    if setting == "data":
        return data_name(str(value))
    if isinstance(value, str):
        return value
    if setting == "classes" and value:
        return " ".join(map(str, value))
    return f"{setting} {'none' if value is None else _text(value)}"


def without_method(name: str) -> str:
    """A name without the method that was put into it.

    >>> without_method("456-fine-pruning"), without_method("lora-birds"), without_method("explora")
    ('456', 'birds', 'explora')
    """
    words = "|".join(map(re.escape, _METHODS))
    return re.sub(rf"(^|[-_ ,])({words})(?=$|[-_ ,])", "", name).strip("-_ ,") or name


def data_name(data: str) -> str:
    """The data's name without where they lie.

    >>> data_name("folder:/some/where/birds"), data_name("digits")
    ('birds', 'digits')
    """
    return data.partition(":")[2].rstrip("/").rpartition("/")[2] or data if ":" in data else data


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent.

    >>> percent(0.935), percent(None)
    ('93.5%', '–')
    """
    return "–" if share is None else f"{100 * share:.{digits}f}%"


def density(share: float) -> str:
    """A density as it was asked for: a share, or bytes.

    >>> density(0.3), density(0.425), density(300000.0)
    ('30%', '42.5%', '300 kB')
    """
    return size(share) if share > 1 else f"{100 * share:.4g}%"


def short(value: float | None) -> str:
    """A number with three digits and a unit of thousands.

    >>> short(11_173_962), short(950), short(0.0123), short(None)
    ('11.2 M', '950', '0.0123', '–')
    """
    if value is None:
        return "–"
    for power, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= power * 0.99995:
            return f"{_three(value / power)}{unit}"
    return _three(value)


def _three(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 12)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(count: float | None) -> str:
    """Bytes with a unit.

    >>> size(123_456), size(12)
    ('123 kB', '12 B')
    """
    if count is None:
        return "–"
    text = short(count)
    return f"{text}B" if " " in text else f"{text} B"


def clean(text: str) -> str:
    """Text of strangers as a page can show it: what cannot be seen, or turns a line around, becomes U+FFFD.

    >>> clean("a\\u202eb\\x00") == "a\\ufffdb\\ufffd"
    True
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join("\ufffd" if _is_hidden(character) else character for character in text)


def _is_hidden(character: str) -> bool:
    joins = character in "\u200c\u200d"
    return not joins and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def breadth(text: str, points: float = 11) -> float:
    """About how many pixels a text takes, rather too many.

    >>> breadth("iii") < breadth("MMM")
    True
    """
    return points * sum(_wide(character) for character in text)


def _wide(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    if not character.isascii():
        narrow = unicodedata.east_asian_width(character) in ("N", "Na", "H")
        return 0.7 if narrow and character.isalnum() else 1.25
    if character in "iIjl.,:;|!'()[]{}ftr1 ":
        return 0.45
    return 0.92 if character in "MW@%mw" else 0.66


def fitted(text: str, room: float, points: float = 11) -> str:
    """A text that takes at most so many pixels: its beginning and its end, where it is too long."""
    text = clean(text)
    if breadth(text, points) <= room:
        return text
    kept = len(text) - 1
    while kept > 1 and breadth(_halves(text, kept), points) > room:
        kept -= 1
    return _halves(text, kept)


def _halves(text: str, kept: int) -> str:
    last = kept * 2 // 5
    return f"{text[: kept - last].rstrip()}…{text[len(text) - last :].lstrip()}"


def fitted_end(text: str, room: float, points: float = 11) -> str:
    """The end of a text that takes at most so many pixels: what tells layers apart."""
    text = clean(text)
    while len(text) > 2 and breadth(text, points) > room:
        text = f"…{text[2:]}"
    return text
