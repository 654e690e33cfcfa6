"""The model card of a task: a README.md for the hub, where whatever the task says shows as text, never as markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from spalier.tasks.description import Density, Description
from spalier.tasks.text import SUFFIX, dump

if TYPE_CHECKING:
    from spalier.tasks.task import Task

MAX_CLASSES = 50
"""How many classes a card lists."""

_PLACEHOLDER = "OWNER/NAME"
_PUNCTUATION = re.compile(
    r"[!-+:-@\[-`{-~]|(?<!\w)-|-(?!\w)"
)  # all of ASCII but , . / and the - inside of words

# the hub refuses a card whose licence is not among its own (huggingface_hub issue 4218): SPDX names in lower case, a
# few of models, and families such as "gpl", which are left out here
_LICENCES = """
    afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc-by-2.0
    cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0
    cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0
    cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0 ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
    gemma gpl-2.0 gpl-3.0 isc lgpl-2.1 lgpl-3.0 llama2 llama3 llama3.1 llama3.2 llama3.3 lppl-1.3c mit mpl-2.0 ms-pl
    ncsa ofl-1.1 openrail osl-3.0 postgresql unlicense wtfpl zlib
"""


def card(task: Task, size: int, repository: str = _PLACEHOLDER) -> str:
    """The README.md of a task's repository on the hub.

    Args:
        task: what the card is of.
        size: how many bytes its file has.
        repository: where it is, for the example of use.
    """
    said = task.description
    parts = [
        f"# {escaped(said.name)}",
        "A task for one frozen base network: which of its channels are kept, and what was learned on top. With the "
        "base, it builds a plain network that is smaller and faster; without it, it is of no use.",
        _section("Facts", ("", ""), _facts(said, size)),
        _section("Metrics", ("metric", "value"), ((k, f"{v:g}") for k, v in said.metrics.items())),
        _classes(said),
        _section("Preprocessing", ("setting", "value"), _items(said.preprocessing)),
        _section("Provenance", ("", ""), _items(said.provenance)),
        _usage(said.name, repository),
    ]
    return f"{_front_matter(said)}\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown and HTML show as it is, in a table too.

    >>> escaped("a|b <i>")
    'a&#124;b &#60;i&#62;'
    """
    return _PUNCTUATION.sub(lambda match: f"&#{ord(match[0])};", text)


def _front_matter(said: Description) -> str:
    """YAML of JSON strings, so that no value can end or add a line."""
    tags = ["spalier", "structured-pruning", said.adapter["kind"].lower()]
    lines = ["---", f"library_name: {_quoted('spalier')}", "tags:", *_listed(filter(None, tags))]
    if said.licence:
        lines += _licence(said.licence)
    if said.metrics:
        lines += ["metrics:", *_listed(said.metrics)]
    return "\n".join([*lines, "---"])


def _licence(licence: str) -> list[str]:
    """The licence as the hub knows it, or as another one with its name."""
    known = licence.lower().removesuffix("-only")
    if known in _LICENCES.split():
        return [f"license: {_quoted(known)}"]
    name = re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-.")
    return [f"license: {_quoted('other')}", *([f"license_name: {_quoted(name)}"] if name else [])]


def _listed(values: Iterable[str]) -> list[str]:
    return [f"- {_quoted(value)}" for value in values]


def _quoted(value: str) -> str:
    """A JSON string, which is YAML too as long as characters beyond 16 bits are not written as two escapes."""
    return json.dumps(value, ensure_ascii=False)


def _facts(said: Description, size: int) -> list[tuple[str, str]]:
    settings = ", ".join(f"{key}={_shown(value)}" for key, value in said.adapter.items() if key != "kind")
    return [
        ("adapter", f"{said.adapter['kind']}({settings})"),
        ("learned parameters", f"{said.learned:,}"),
        *((f"{f.name} kept", _share(getattr(said.density, f.name))) for f in fields(Density)),
        ("stored as", said.storage),
        ("file", f"{said.name}{SUFFIX}"),
        ("file size", f"{size:,} bytes"),
        ("base, its architecture", said.base.architecture),
        ("base, its values", said.base.values),
        ("licence", said.licence or "not stated"),
    ]


def _share(pair: tuple[int, int] | None) -> str:
    return "not known" if pair is None else f"{pair[0]:,} of {pair[1]:,} ({pair[0] / pair[1]:.1%})"


def _classes(said: Description) -> str:
    names = list(said.classes)
    found = _section(
        "Classes", ("output", "class"), ((str(i), name) for i, name in enumerate(names[:MAX_CLASSES]))
    )
    rest = len(names) - MAX_CLASSES
    return f"{found}\n\nand {rest:,} more, which are in the file." if rest > 0 else found


def _items(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, _shown(value)) for key, value in values.items()]


def _shown(value: object) -> str:
    return value if isinstance(value, str) else dump(value)


def _section(title: str, header: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    """A table under a heading, or nothing: in a cell, no text can begin a list, a rule or a block."""
    lines = [f"| {escaped(key)} | {escaped(value)} |" for key, value in rows]
    if not lines:
        return ""
    return "\n".join([f"## {title}", "", f"| {header[0]} | {header[1]} |", "| --- | --- |", *lines])


def _usage(name: str, repository: str) -> str:
    return "\n".join(
        [
            "## How to use",
            "",
            "`base` is the network that the task was learned on; its fingerprints are checked.",
            "",
            "```python",
            "from spalier import Store, Switcher",
            "",
            'store = Store("tasks")',
            f"store.pull({json.dumps(repository)}, {json.dumps(name)})",
            f"net = Switcher(base, store).activate({json.dumps(name)})",
            "```",
        ]
    )
