"""A folder of tasks: names, listings, what it costs; faults of writing are in test_faults."""

import copy
import math
import warnings

import pytest
import torch
from support import awaken_, tiny_cnn
from torch import nn

import spalier as sp
from spalier.errors import TASK_FILE_CODES, TaskFileError
from spalier.tasks import StoreReport, TaskCost

IMAGE = torch.zeros(2, 3, 8, 8)


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    return tiny_cnn().eval()


def task_of(base, name="a", seed=0, **options):
    torch.manual_seed(seed)
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head="8", example=IMAGE)
    return sp.Task.of(awaken_(net), name, **options)


def test_tasks_are_added_listed_loaded_and_removed(base, tmp_path):
    store = sp.Store(tmp_path / "new" / "folder")
    assert list(store) == []
    assert store.add(task_of(base, "b")) == store.path("b")
    store.add(task_of(base), "flowers-102", storage="int8")
    assert list(store) == ["b", "flowers-102"]
    assert len(store) == 2
    assert "b" in store
    assert "c" not in store
    assert repr(store).endswith("2 tasks)")
    shown = str(store.list())
    assert "flowers-102" in shown
    assert "sound" in shown
    assert store.load("flowers-102").info.storage == "int8"
    store.remove("b")
    assert list(sp.Store(store.folder)) == ["flowers-102"]
    for attempt in (store.load, store.remove):
        with pytest.raises(TaskFileError, match="no task 'b'") as error:
            attempt("b")
        assert error.value.code == "missing"


def test_nothing_is_overwritten_unasked(base, tmp_path):
    store = sp.Store(tmp_path)
    store.add(task_of(base, seed=1))
    old = store.path("a").read_bytes()
    for name in ("a", "A"):
        with pytest.raises(TaskFileError, match="already") as error:
            store.add(task_of(base, seed=2), name)
        assert error.value.code == "exists"
    assert store.path("a").read_bytes() == old
    store.add(task_of(base, seed=2), overwrite=True)
    assert store.path("a").read_bytes() != old
    with pytest.raises(TaskFileError):
        store.add(task_of(base), "A", overwrite=True)


def test_verify_finds_what_is_wrong_and_goes_on(base, tmp_path):
    store = sp.Store(tmp_path)
    for name in ("bad", "good", "other"):
        store.add(task_of(base), name)
    store.path("bad").write_bytes(store.path("bad").read_bytes()[:-1])
    (tmp_path / "notes.txt").write_text("not a task")
    (tmp_path / "strange name.task.safetensors").write_bytes(b"")
    other = copy.deepcopy(base)
    with torch.no_grad():
        other[0].weight += 1
    found = {entry.name: entry for entry in store.verify(base)}
    assert found["good"].is_sound
    assert found["bad"].error.code == "truncated"
    assert found["strange name"].error.code == "name"
    assert {e.error.code for e in store.verify(other) if e.name in ("good", "other")} == {"base-values"}
    assert "truncated" in str(store.verify())
    other = copy.deepcopy(base)
    assert {e.name for e in store.verify(other) if e.is_sound} == {"good", "other"}
    other[0].weight.data.mul_(2)  # past PyTorch's count of writes
    assert not any(e.is_sound for e in store.verify(other))
    assert found["good"].info.name == "good"


def test_a_file_that_was_renamed_is_called_like_its_file(base, tmp_path):
    store = sp.Store(tmp_path)
    store.add(task_of(base, "birds"))
    store.path("birds").rename(store.path("flowers"))
    said = r"flowers\.task\.safetensors holds a task that calls itself 'birds'; here it is 'flowers'"
    with pytest.warns(UserWarning, match=said):
        task = store.load("flowers")
    assert task.name == "flowers"
    found = store.verify(base)
    assert found[0].is_sound
    assert "flowers" in str(found)
    assert "sound, calls itself birds" in str(found)
    store.add(task, overwrite=True)
    with warnings.catch_warnings(action="error"):
        assert store.load("flowers").name == "flowers"
        assert "calls itself" not in str(store.list())


def test_a_store_is_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskFileError) as error:
        sp.Store(tmp_path / "file")
    assert error.value.code == "unreadable"


def test_the_report_counts_adapters_too(base, tmp_path):
    store = sp.Store(tmp_path)
    for name in "abc":
        store.add(task_of(base), name)
    report = store.report(base)
    assert report.base == sum(p.numel() * 4 for p in base.parameters())
    assert report.on_disk == report.base + sum(store.path(n).stat().st_size for n in "abc")
    built = store.load("a").build(base)
    assert report.costs[0].network == sum(p.numel() * 4 for p in built.parameters())
    assert report.resident() == report.base + 3 * report.costs[0].network
    assert report.resident(1) == report.base + report.costs[0].network
    assert store.report().costs == report.costs
    assert "bytes" in str(report)
    store.path("c").write_bytes(b"rubbish")
    assert store.report(base).left_out == ("'c' (truncated)",)
    assert "'c' (truncated)" in str(store.report(base))
    wide = copy.deepcopy(base)
    wide[8] = nn.Linear(12, 1000)  # another head makes the base larger, and no task
    assert store.report(wide).costs == store.report(base).costs
    other = copy.deepcopy(base)
    with torch.no_grad():
        other[0].weight += 1
    assert len(store.report(other).left_out) == 3


@pytest.mark.parametrize(("density", "share"), [(0.3, 0.02), (0.1, 0.02), (0.05, 0.06), (1.0, 0.1)])
def test_break_even_is_where_the_bytes_are(density, share):
    """T (d - a) > 1, against counting one task after the other."""
    base = 1_000_000
    report = StoreReport(base, (TaskCost("a", int(share * base), int(density * base)),))
    saves = [t for t in range(1, 10_000) if base + t * int(share * base) < t * int(density * base)]
    assert report.break_even == (saves[0] if saves else None)
    if saves:
        assert saves[0] == math.floor(1 / (density - share)) + 1


def test_a_report_says_for_each_task_from_how_many_on_it_pays():
    costs = [TaskCost("dense", 10, 1000), TaskCost("thin", 10, 20), TaskCost("whole", 30, 20)]
    text = str(StoreReport(1000, tuple(costs)))
    rows = {line.split()[0]: line.split()[-1] for line in text.splitlines()}
    for cost in costs:
        saves = [t for t in range(1, 9999) if 1000 + t * cost.file < t * cost.network]
        assert rows[cost.name] == (str(saves[0]) if saves else "never")
    assert "a mix like these 3 tasks pays from 4 tasks on" in text
    assert "a mix" not in str(StoreReport(1000, tuple(costs[:1])))
    assert "a mix like these 2 tasks never pays" in str(StoreReport(1000, (costs[2],) * 2))
    assert "a mix" not in str(StoreReport(1000, ()))


def test_tasks_of_several_bases_have_no_common_report(base, tmp_path):
    store = sp.Store(tmp_path)
    store.add(task_of(base, "a"))
    other = nn.Sequential(*tiny_cnn(), nn.Identity())
    store.add(task_of(other, "b"))
    with pytest.raises(TaskFileError, match="2 bases"):
        store.report()
    assert sp.Store(tmp_path / "empty").report(base).break_even is None


def test_codes_are_documented():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "task-format.md").read_text()
    for code, meaning in TASK_FILE_CODES.items():
        assert f"| `{code}` | {meaning} |" in text


def test_a_store_stays_where_it_was(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = sp.Store("tasks")
    store.add(task_of(base), "b")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert list(store) == ["b"]
    assert store.load("b").name == "b"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(sp.Store("~/tasks")) == ["b"]
    for wrong in (None, 3):
        with pytest.raises(TaskFileError):
            sp.Store(wrong)
    with pytest.raises(TaskFileError, match=r"Task\.of"):
        store.add(base)
