"""What the page on integrations shows runs as it stands."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs/integrations.md"


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated")
def test_code_on_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:  # each goes on where the one before it ended
        exec(compile(block, PAGE.name, "exec"), names)
        left, whole = names.pop("task").info.density.channels
        assert 0.4 * whole < left <= 0.5 * whole
    assert (tmp_path / "noise.task.safetensors").is_file()
