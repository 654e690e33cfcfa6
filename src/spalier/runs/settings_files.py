"""Settings in files: YAML and TOML, read strictly and written for people."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spalier.errors import ConfigError
from spalier.text import import_optional


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or TOML file."""
    try:
        text = path.read_text("utf-8").removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}; expected a YAML or TOML file") from error
    try:
        found = tomllib.loads(text) if path.suffix.lower() == ".toml" else _read_yaml(path, text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{path} holds a {type(found).__name__}, expected settings by name")
    return found


def _read_yaml(path: Path, text: str) -> Any:
    yaml = import_optional("yaml", "YAML files")

    class Strict(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """Refuses a key that is there twice, where YAML would take the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for twice in (key for i, key in enumerate(keys) if key in keys[:i]):
                raise yaml.YAMLError(f"{twice!r} is there twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Strict)
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error


def write_yaml(values: Mapping[str, Any]) -> str:
    """Plain values as YAML, each in a line of its own; those that are None or empty tables are left out."""
    yaml = import_optional("yaml", "YAML files")
    # YAML reads these as ends of lines, and PyYAML writes them as they are unless all text is escaped
    readable = not any(mark in repr(values) for mark in ("\\x85", "\\u2028", "\\u2029"))
    options = {"sort_keys": False, "allow_unicode": readable, "width": 100}
    lines = []
    for name, value in plain(values).items():
        if value not in (None, {}):
            inline = None if isinstance(value, dict | list) else False  # PyYAML's None: only inner values inline
            lines.append(yaml.safe_dump({name: value}, default_flow_style=inline, **options))
    return "".join(lines)


def plain(value: Any) -> Any:
    """A copy as JSON and YAML have it: tuples become lists."""
    return json.loads(json.dumps(value))
