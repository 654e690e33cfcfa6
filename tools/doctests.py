"""Examples in docstrings become blocks of code on the site; Markdown would take ``>>>`` for a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts every example of a docstring into a fence of its own."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with its examples in fences.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2\\n")
    'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n'
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```", text)
