"""Task files that were written by earlier versions, or in all ways that the format has, are read by every later one."""

import json

import numpy as np
import pytest
import torch
from artefacts.recipe import FORMAT_1, FORMAT_2, HERE, RECIPES, base_of, input_of, path_of, task_of
from oracles import task_format

import spalier as sp
from spalier.adapters.attachment import attachment_of
from spalier.adapters.kinds import LowRank

OUTPUTS = json.loads((HERE / "outputs.json").read_text())


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_is_read_and_built(name):
    task, base = sp.Task.load(path_of(name)), base_of(name)
    assert task.info.name == name
    assert task.info.storage == RECIPES[name].storage
    with torch.no_grad():
        found = task.build(base)(input_of(name)).flatten()
    torch.testing.assert_close(found, torch.tensor(OUTPUTS[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_is_applied(name):
    net = base_of(name)
    sp.Task.load(path_of(name)).apply_(net)
    with torch.no_grad():
        found = net.eval()(input_of(name)).flatten()
    torch.testing.assert_close(found, torch.tensor(OUTPUTS[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_a_task_that_was_applied_is_the_same_again(name, tmp_path):
    """Bytes go on as numbers, other codes as codes: what is saved then is the same network."""
    net, path = base_of(name), tmp_path / "a.task.safetensors"
    sp.Task.load(path_of(name)).apply_(net)
    coded = {e.name for e in attachment_of(net).updated if isinstance(e.update, LowRank) and e.update.levels}
    assert coded == {name.removesuffix(".weight") for name in RECIPES[name].coded}
    path.write_bytes(sp.Task.of(net, "a").to_bytes())
    assert sp.Task.load(path).info.storage == "exact"
    assert_same_network(name, path, rtol=1e-6)


def network(name, path):
    return task_format.network(path, {key: value.numpy() for key, value in base_of(name).state_dict().items()})


def assert_same_network(name, path, rtol=0.0):
    """Of a file, and of the one that is kept, by the second reader."""
    found, wanted = network(name, path), network(name, path_of(name))
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=rtol, atol=rtol)


def contents(path):
    """All that a file says; what is deflated is inflated, as libraries may deflate it to other bytes."""
    description, table, tensors = task_format.read(path)
    description.pop("inputs", None)  # which the first files of format 2 do not have
    description["provenance"] = {
        key: value for key, value in description["provenance"].items() if key not in ("spalier", "torch")
    }
    numbers = {k: v.tolist() for k, v in tensors.items() if k not in ("table", "codes")}
    return description, table, numbers, task_format.code_bytes(description, tensors)


@pytest.mark.parametrize("name", FORMAT_2)
def test_the_same_file_is_written_again(name, tmp_path):
    path = tmp_path / path_of(name).name
    path.write_bytes(sp.Task.load(path_of(name)).to_bytes())
    assert contents(path) == contents(path_of(name))
    path.write_bytes(task_of(name).to_bytes(storage=RECIPES[name].storage))
    assert contents(path) == contents(path_of(name))


@pytest.mark.parametrize("name", FORMAT_1)
def test_a_file_of_format_1_is_written_in_format_2(name, tmp_path):
    path = tmp_path / path_of(name).name
    path.write_bytes(sp.Task.load(path_of(name)).to_bytes())
    old, new = task_format.read(path_of(name))[0], task_format.read(path)[0]
    assert (old["format"], new["format"]) == (1, 2)
    for key in old.keys() - {"format", "table"}:
        assert new[key] == old[key], key
    assert_same_network(name, path)
    path.write_bytes(task_of(name).to_bytes(storage=RECIPES[name].storage))
    assert_same_network(name, path, rtol=1e-3 if RECIPES[name].storage == "int8" else 0)  # whose scales are halves now


@pytest.mark.parametrize("name", FORMAT_1)
def test_a_file_of_format_1_is_stored_in_other_ways(name, tmp_path):
    task, path = sp.Task.load(path_of(name)), tmp_path / "a.task.safetensors"
    for storage in ("exact", "fp32"):
        made = task.stored_as(storage)
        assert made.info.storage == storage
        assert not any(shape.levels for shape in made.adapter_shapes)
        path.write_bytes(made.to_bytes())
        assert_same_network(name, path, rtol=1e-6)


def test_the_artefacts_use_all_that_the_format_has():
    found = [contents(path_of(name)) for name in FORMAT_2]
    tables = [table for _, table, _, _ in found]
    sources = [row[4] for table in tables for row in table["rows"]]
    adapted = {"low-rank", "low-rank-whole", "pointwise", "delta"}
    assert {source[0] for source in sources} == {"base", "values", "integers", *adapted}
    assert {source[1] for source in sources if source[0] == "delta"} == {2, 3, 7, 15}
    assert {source[2] for source in sources if source[0] == "delta"} == {0, 1}
    assert {source[3] for source in sources if source[0] == "low-rank"} == {15, 255}
    assert {source[1] for source in sources if source[0] == "pointwise"} == {0, 255}
    assert {source[-1] for source in sources if source[0] in adapted} == {0, 1}
    for field in ("streams", "writers", "attributes", "heads", "folds", "axes"):
        assert any(table[field] for table in tables), field
    placements = [on for table in tables for axis in table["axes"] for on in axis]
    assert {_way(on) for on in placements} >= {"plain", "pattern", "runs"}
    described = [description for description, _, _, _ in found]
    assert {d["storage"] for d in described} == {"exact", "fp32", "fp16", "bf16", "int8", "int8-all", "int4-head"}
    kinds = {task_format.read(path_of(name))[2].get("scales", np.zeros(0)).dtype.name for name in FORMAT_2}
    assert kinds >= {"uint8", "float16", "float32"}
    assert {"codes" in d for d in described} == {True, False}
    assert {d["adapter"]["kind"] for d in described} >= {"SPDelta", "ByLayer", "LoRA", "SPPaRA"}


def _way(on):
    if isinstance(on, int):
        return "plain"
    return "pattern" if len(on) == 4 else "runs" if isinstance(on[1][0], list) else "units"
