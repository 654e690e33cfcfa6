"""The notebooks run as they are committed: without an error, without a warning, to the values that they promise."""

import json
import sys
from pathlib import Path

import nbclient
import nbformat
import notebook_pages
import pytest
from jupyter_client.manager import AsyncKernelManager

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STRICT = "import torch, warnings\nwarnings.simplefilter('error')\ntorch.set_num_threads(1)"
# transformers imports torchvision and torchao where they are installed, which complain of what they miss
TRANSFORMERS = f"""import logging, sys, warnings
warnings.filterwarnings("ignore", message="IProgress not found")
sys.path.insert(0, {str(FOLDER.parent / "tools")!r})
import torchvision_ops
torchvision_ops.declare()
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
import transformers.models.bert.modeling_bert
"""


class Kernel(AsyncKernelManager):
    """A kernel in the interpreter that runs the tests, whatever kernels are installed."""

    def format_kernel_cmd(self, extra_arguments=None):
        return [sys.executable, "-m", "ipykernel_launcher", "-f", self.connection_file]


def executed(name: str, folder: Path, *values: str, first: str = "") -> list[object]:
    """Run a notebook in an empty folder; what some expressions come to at its end."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    question = f"import json\nprint(json.dumps([{', '.join(values)}]))"
    cells = [nbformat.v4.new_code_cell(first + STRICT), *notebook.cells, nbformat.v4.new_code_cell(question)]
    notebook.cells = cells
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_manager_class=Kernel, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()  # an error in a cell is an error here
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    errors = [output.text for output in outputs if output.get("name") == "stderr"]
    assert errors == []
    return json.loads(cells[-1].outputs[0].text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_badge_opens_colab_and_the_site_has_its_words_alone(path):
    colab = "https://colab.research.google.com"
    first = nbformat.read(path, as_version=4).cells[0].source
    assert f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/" in first
    shown = notebook_pages.page(path)
    assert f"\n[Open in Colab]({colab}/" in shown
    assert "![" not in shown


@pytest.mark.slow
def test_the_first_task_is_learned_pruned_and_built_again(tmp_path):
    values = ("adapted", "taylor", "chance", "recovered", "pruned", "difference", "len(store)")
    adapted, taylor, chance, recovered, pruned, difference, count = executed("first_task.ipynb", tmp_path, *values)
    assert adapted > 0.85
    assert taylor > chance
    assert recovered > taylor
    assert pruned > 0.8
    assert difference < 1e-4
    assert count == 1


@pytest.mark.slow
def test_three_tasks_are_served_from_one_base(tmp_path):
    values = ("right", "tight.ready", "report.break_even", "[entry.is_sound for entry in store.verify(base)]")
    right, ready, pays_from, sound = executed("many_tasks.ipynb", tmp_path, *values)
    assert min(right.values()) > 0.85
    assert ready == ["six-or-nine"]
    assert pays_from > 3
    assert sound == [True, True, True]


@pytest.mark.slow
def test_questions_are_told_apart_by_half_of_a_bert(tmp_path):
    values = ("whole", "half", "names", "list(macs.values())", "results.rows[1]['macs']")
    whole, half, names, macs, share = executed("trec.ipynb", tmp_path, *values, first=TRANSFORMERS)
    assert whole > 0.5, "chance has a third"
    assert half > 0.4
    assert names == ["human", "location", "number"]
    assert macs == sorted(macs)
    assert share <= 0.5
