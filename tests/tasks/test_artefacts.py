"""Task files of format 1, written by version 0.1.0, are read and built by every later version."""

import json

import pytest
import torch
from artefacts.recipe import HERE, RECIPES, base_of, input_of, path_of, task_of
from oracles import task_format

import spalier as sp

OUTPUTS = json.loads((HERE / "outputs.json").read_text())


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_of_format_1_is_read_and_built(name):
    task, base = sp.Task.load(path_of(name)), base_of(name)
    assert task.info.name == name
    assert task.info.storage == RECIPES[name].storage
    with torch.no_grad():
        found = task.build(base)(input_of(name)).flatten()
    torch.testing.assert_close(found, torch.tensor(OUTPUTS[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_of_format_1_is_applied(name):
    net = base_of(name)
    sp.Task.load(path_of(name)).apply_(net)
    with torch.no_grad():
        found = net.eval()(input_of(name)).flatten()
    torch.testing.assert_close(found, torch.tensor(OUTPUTS[name]), rtol=1e-4, atol=1e-6)


def contents(path):
    """All that a file says; the table inflated, as libraries may deflate it to other bytes."""
    description, table, tensors = task_format.read(path)
    description["provenance"] = {
        key: value for key, value in description["provenance"].items() if key not in ("spalier", "torch")
    }
    return description, table, {k: v.tolist() for k, v in tensors.items() if k != "table"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_file_is_written_again(name, tmp_path):
    path = tmp_path / path_of(name).name
    path.write_bytes(sp.Task.load(path_of(name)).to_bytes())
    assert contents(path) == contents(path_of(name))
    path.write_bytes(task_of(name).to_bytes(storage=RECIPES[name].storage))
    assert contents(path) == contents(path_of(name))


def test_the_artefacts_use_all_that_the_format_has():
    found = [contents(path_of(name)) for name in RECIPES]
    tables = [table for _, table, _ in found]
    sources = {row[4][0] for table in tables for row in table["rows"]}
    assert sources == {"base", "values", "integers", "low-rank", "low-rank-whole", "pointwise"}
    for field in ("streams", "writers", "attributes", "heads", "folds"):
        assert any(table[field] for table in tables), field
    placements = [on for table in tables for row in table["rows"] for axis in row[3] for on in axis]
    assert {1 if isinstance(on, int) else len(on) for on in placements} >= {1, 4}
    assert {description["storage"] for description, _, _ in found} == {"exact", "fp32", "fp16", "int8"}
