"""Configurations as plain data: fields by their annotations, files that people write, and what differs."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
import types
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from spalier.errors import ConfigError


def checked(kind: type[Any], name: str, value: Any) -> Any:
    """The value of one field, as its annotation says; lists become tuples, and 1e-3 read as text a number."""
    expected = _hints(kind)[name]  # type: ignore[arg-type]  # classes are hashable
    found, fits = _as(expected, value)
    if not fits:
        raise ConfigError(f"{name} is {value!r}, expected {_words(expected)}")
    return found


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _as(expected: Any, value: Any) -> tuple[Any, bool]:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        tried = [_as(each, value) for each in arguments]
        return next((each for each in tried if each[1]), (value, False))
    if origin is Literal:
        return value, any(value == each and type(value) is type(each) for each in arguments)
    if origin is tuple:
        return _tuple(arguments[0], value)
    if origin is dict:
        return (dict(value), _is_plain(value)) if isinstance(value, Mapping) else (value, False)
    return _scalar(expected, value)


def _tuple(expected: Any, value: Any) -> tuple[Any, bool]:
    if not isinstance(value, list | tuple):
        return value, False
    parts = [_as(expected, each) for each in value]
    return tuple(part for part, _ in parts), all(fits for _, fits in parts)


_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML takes 1e-3 for text


def _scalar(expected: Any, value: Any) -> tuple[Any, bool]:
    if expected is type(None):
        return None, value is None
    if isinstance(value, np.generic):
        value = value.item()
    if expected is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if expected is float:
        if isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
            value = float(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return (float(value), math.isfinite(value)) if number else (value, False)
    return value, type(value) is expected


def _is_plain(value: Any) -> bool:
    """True for what YAML and JSON can hold."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)


def _words(expected: Any) -> str:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(each) for each in arguments)
    if origin is Literal:
        return " or ".join(repr(each) for each in arguments)
    if origin is tuple:
        return f"a list of {_words(arguments[0])}"
    if expected is type(None):
        return "nothing"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(expected, "a table of plain values")


def read(path: Path) -> dict[str, Any]:
    """The settings in a YAML or TOML file."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}; expected a YAML or TOML file") from error
    text = text.removeprefix("\ufeff")
    found = _toml(path, text) if path.suffix.lower() == ".toml" else _yaml(path, text)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{path} holds a {type(found).__name__}, expected settings by name")
    return found


def _toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def _library() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError("YAML files need PyYAML; pip install spalier[train]") from error
    return yaml


def _yaml(path: Path, text: str) -> Any:
    yaml = _library()

    class Strict(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """Refuses keys that come twice, of which YAML would take the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = [key for i, key in enumerate(keys) if key in keys[:i]]
            if twice:
                raise yaml.YAMLError(f"{twice[0]!r} is there twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Strict)  # a SafeLoader
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error


_BREAKS = ("\\x85", "\\u2028", "\\u2029")  # which YAML reads as ends of lines, and its writer does not know


def written(config: Any) -> str:
    """A configuration as YAML, every field of it."""
    yaml = _library()
    plain = {f.name: _listed(getattr(config, f.name)) for f in dataclasses.fields(config)}
    readable = not any(mark in repr(plain) for mark in _BREAKS)
    return str(
        yaml.safe_dump(plain, sort_keys=False, allow_unicode=readable, default_flow_style=None, width=100)
    )


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _listed(inner) for key, inner in value.items()}
    return [_listed(inner) for inner in value] if isinstance(value, list | tuple) else value


def check_known(kind: type[Any], settings: Mapping[str, Any], where: str) -> None:
    """Refuse names that are no fields, with the nearest that is."""
    known = [f.name for f in dataclasses.fields(kind)]
    for name in settings:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected some of {', '.join(known)}"
            raise ConfigError(f"{where} has {name!r}, which is no setting; {hint}")


def differences(one: Any, other: Any, ignored: frozenset[str]) -> dict[str, tuple[Any, Any]]:
    """The fields that two configurations do not have in common."""
    pairs = {
        f.name: (getattr(one, f.name), getattr(other, f.name))
        for f in dataclasses.fields(one)
        if f.name not in ignored
    }
    return {name: pair for name, pair in pairs.items() if _listed(pair[0]) != _listed(pair[1])}


def in_words(different: Mapping[str, tuple[Any, Any]]) -> str:
    """What differs, in a line.

    >>> in_words({"rank": (8, 4), "seed": (0, 1)})
    'rank was 8 and is 4, seed was 0 and is 1'
    """
    return ", ".join(f"{name} was {was!r} and is {now!r}" for name, (was, now) in different.items())
