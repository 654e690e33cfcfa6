"""The notebooks as pages of the site: their text and their code, in order. Outputs are made where they are run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add a page for each notebook."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page(path)))
    return files


def page(path: Path) -> str:
    """One notebook as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title, *rest = map(_written, cells)
    note = f"*This page is `notebooks/{path.name}` of the repository: run it there and look at what it prints.*"
    text = "\n\n".join([title, note, *rest]) + "\n"
    text = re.sub(r"\[!\[([^\]]*)\]\([^)]*\)\]", r"[\1]", text)  # the site loads no picture from another host
    return text.replace("](../docs/", "](../")  # links that hold in the repository hold on the site


def _written(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"]).strip()
    return f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
