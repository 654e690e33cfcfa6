"""What a package index shows of the README: it has no folder that relative links and pictures could lie in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def for_index(text: str) -> str:
    """The README without pictures of the repository, and with the words of links into it in place of the links.

    >>> for_index("![a\\nb](docs/a.svg) see [the page](docs/b.md) and [a site](https://pytorch.org)").strip()
    'see the page and [a site](https://pytorch.org)'
    """
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)  # code stays as it is
    for place in range(0, len(blocks), 2):
        block = re.sub(r"!\[[^\]]*\]\((?!https://)[^)]*\)|<(?:img|source)\b(?![^>]*https://)[^>]*>", "", blocks[place])
        blocks[place] = re.sub(r"\[([^\]]*)\]\((?!https?://|#)[^)]*\)", r"\1", block)
    return re.sub(r"\n{3,}", "\n\n", "".join(blocks))


class LongDescription(MetadataHookInterface):
    """Sets the readme of wheels and source archives."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put in what an index can show."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text)}
