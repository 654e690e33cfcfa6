"""Text from elsewhere: strict JSON, words that are safe to print, and names that are safe as file names."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any, NoReturn

from spalier.errors import TaskFileError

SUFFIX = ".task.safetensors"
MAX_NAME = 100
MAX_DEPTH = 16

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_JOINERS = "\u200c\u200d"  # between letters of several scripts, and inside of emoji


def check_name(name: object) -> str:
    """A task's name, which is also the name of its file on every file system.

    >>> check_name("flowers-102")
    'flowers-102'
    """
    rule = (
        f"expected 1 to {MAX_NAME} of the letters a-z, A-Z, digits, '-', '_' and '.', a letter or digit first"
    )
    if not isinstance(name, str):
        raise TaskFileError("name", f"a task's name is a {type(name).__name__}, {rule}")
    shown = ascii(name if len(name) <= MAX_NAME else name[:20] + "...")
    if len(name) > MAX_NAME:
        raise TaskFileError("name", f"the name {shown} has {len(name)} characters, {rule}")
    if not _NAME.fullmatch(name) or ".." in name or name.endswith("."):
        raise TaskFileError("name", f"{shown} cannot be a task's name: {rule}, and no two dots in a row")
    if _RESERVED.fullmatch(name):
        raise TaskFileError("name", f"{shown} is reserved by an operating system; choose another name")
    if name.lower().endswith((".task", ".safetensors")):
        raise TaskFileError("name", f"{shown} ends like the file's own suffix; leave that out")
    return name


def check_text(what: str, text: str) -> str:
    """Text that is safe to print: no control characters, no terminal escapes, nothing that turns the line around."""
    if text.isascii() and text.isprintable():
        return text
    for character in text:
        if character in _JOINERS:
            continue
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            raise TaskFileError(
                "text",
                f"{what} has the character U+{ord(character):04X}, expected printable text: control characters, "
                "line breaks, terminal escapes and direction marks are refused",
            )
    return text


def shown(text: object) -> str:
    """Text of a stranger as a message may show it: short, and in ASCII."""
    return ascii(text)[:100]


def check_plain(what: str, value: Any, depth: int = 0) -> Any:
    """Plain data with safe text in it: what JSON can hold, finite, and not too deep."""
    if depth > MAX_DEPTH:
        raise TaskFileError("metadata", f"{what} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        return check_text(what, value)
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TaskFileError("metadata", f"{what} has the key {key!r}, expected text")
            check_text(what, key)
            check_plain(what, inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_plain(what, inner, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise TaskFileError("metadata", f"{what} holds {value}, expected finite numbers")
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        raise TaskFileError("metadata", f"{what} holds a number of more than 64 bits")
    elif not (value is None or isinstance(value, bool | int | float)):
        raise TaskFileError(
            "metadata",
            f"{what} holds a {type(value).__name__}, expected text, numbers, lists and dicts of them",
        )
    return value


def parse(code: str, what: str, raw: bytes) -> Any:
    """JSON, strictly: UTF-8, no key twice, no NaN, nothing before the value."""
    try:
        if raw[:1] not in (b"{", b"["):
            raise ValueError("it does not begin with { or [")
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_without_doubles, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deep"
        raise TaskFileError(code, f"{what} is not strict JSON: {ascii(reason)[1:-1][:120]}") from None


def dump(value: Any) -> str:
    """JSON without blanks; equal data give equal text."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")
