"""One base, many tasks: activation, the limit of bytes, threads, and tasks that fail."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import assert_unchanged, awaken_, snapshot, tiny_cnn

import spalier as sp
from spalier.errors import ConfigError, TaskFileError
from spalier.tasks import switcher as module

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    return tiny_cnn().eval()


@pytest.fixture(scope="module")
def tasks(base):
    return {name: task_of(base, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture
def store(tasks, tmp_path):
    store = sp.Store(tmp_path)
    for name, task in tasks.items():
        store.add(task, name)
    return store


def task_of(base, seed):
    torch.manual_seed(seed)
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head="8", example=torch.zeros(2, 3, 8, 8))
    with torch.no_grad():
        net[8].bias += seed
    return sp.Task.of(awaken_(net), "a")


@pytest.fixture
def wanted(base, store):
    with torch.no_grad():
        return {name: store.load(name).build(base)(X) for name in NAMES}


@torch.no_grad()
def test_activation_and_calls(base, store, wanted):
    before = snapshot(base)
    switcher = sp.Switcher(base, store)
    assert switcher.active is None
    with pytest.raises(TaskFileError, match="activate"):
        switcher(X)
    for name in "abcab":
        net = switcher.activate(name)
        assert switcher.active == name
        assert torch.equal(switcher(X), wanted[name])
        assert torch.equal(net(X), wanted[name])
    assert switcher.activate("a") is switcher.activate("a")
    assert switcher.network("d") is not None
    assert switcher.active == "a"
    assert_unchanged(base, before)


def test_the_least_used_go_first(base, store):
    size = sp.Switcher(base, store)
    size.activate("a")
    one = size.bytes
    assert one == sum(t.numel() * t.element_size() for t in store.load("a").build(base).state_dict().values())
    switcher = sp.Switcher(base, store, limit=2 * one)
    first = switcher.activate("a")
    switcher.activate("b")
    switcher.activate("a")
    switcher.activate("c")
    assert switcher.ready == ["a", "c"]
    assert switcher.bytes == 2 * one
    assert switcher.activate("a") is first
    tight = sp.Switcher(base, store, limit=0)
    tight.activate("a")
    tight.activate("b")
    assert tight.ready == ["b"]
    tight.network("c")
    assert tight.active == "b"
    assert "b" in tight.ready


def test_a_task_that_fails_leaves_the_active_one(base, store, wanted):
    switcher = sp.Switcher(base, store)
    switcher.activate("a")
    store.path("b").write_bytes(b"rubbish")
    for name, code in (("b", "truncated"), ("none", "missing"), ("../a", "name")):
        with pytest.raises(TaskFileError) as error:
            switcher.activate(name)
        assert error.value.code == code
        assert switcher.active == "a"
        with torch.no_grad():
            assert torch.equal(switcher(X), wanted["a"])
    store.add(task_of(base, 7), "b", overwrite=True)
    switcher.activate("b")


def test_a_replaced_file_is_built_anew(base, store):
    switcher = sp.Switcher(base, store)
    old = switcher.activate("a")
    store.add(task_of(base, 9), "a", overwrite=True)
    new = switcher.activate("a")
    assert new is not old
    with torch.no_grad():
        assert not torch.equal(new(X), old(X))
    store.remove("a")
    with pytest.raises(TaskFileError):
        switcher.activate("a")


@torch.no_grad()
def test_a_request_in_flight_finishes_where_it_began(base, store, wanted):
    switcher = sp.Switcher(base, store, limit=0)
    net = switcher.activate("a")
    started, go_on = threading.Event(), threading.Event()

    def wait(*_):
        started.set()
        assert go_on.wait(600)

    net[3].register_forward_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: switcher(X))
        assert started.wait(600)
        switcher.activate("b")
        switcher.activate("c")
        go_on.set()
        assert torch.equal(answer.result(), wanted["a"])
    assert torch.equal(switcher(X), wanted["c"])


def test_many_threads_get_what_they_ask_for(base, store, wanted):
    switcher = sp.Switcher(base, store, limit=3000)

    def work(seed):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist()
        with torch.no_grad():
            return all(torch.equal(switcher.activate(NAMES[n % 4])(X), wanted[NAMES[n % 4]]) for n in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_one_network_is_built_once_for_all_who_wait(base, store, monkeypatch):
    built = []
    slow = module.build

    def counted(*args, **kwargs):
        built.append(1)
        time.sleep(0.2)
        return slow(*args, **kwargs)

    monkeypatch.setattr(module, "build", counted)
    switcher = sp.Switcher(base, store)
    with ThreadPoolExecutor(6) as pool:
        nets = list(pool.map(lambda _: switcher.activate("a"), range(6)))
    assert len(built) == 1
    assert len(set(map(id, nets))) == 1


def test_all_who_wait_for_a_bad_task_are_told(base, store, monkeypatch):
    def fails(*args, **kwargs):
        time.sleep(0.1)
        raise TaskFileError("overflow", "too much")

    monkeypatch.setattr(module, "build", fails)
    switcher = sp.Switcher(base, store)

    def attempt(_):
        with pytest.raises(TaskFileError, match="too much"):
            switcher.activate("a")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(attempt, range(4)))
    monkeypatch.undo()
    assert switcher.activate("a") is not None


def test_what_the_base_has_counts_once(base, tmp_path):
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), targets="3", head="8", norms=False)
    store = sp.Store(tmp_path)
    store.add(sp.Task.of(net, "a"))
    switcher = sp.Switcher(base, tmp_path)
    built = switcher.activate("a")
    assert built[0].weight is not base[0].weight
    assert built[0].weight.data_ptr() == base[0].weight.data_ptr()
    own = built[3].weight.numel() + sum(p.numel() for p in built[8].parameters())
    norms = sum(t.numel() * t.element_size() for i in (1, 4) for t in built[i].buffers())
    assert switcher.bytes == 4 * own + norms


def test_bad_arguments(base, store):
    for limit in (-1, "1 GB", True, 0.5):
        with pytest.raises(ConfigError):
            sp.Switcher(base, store, limit=limit)
    with pytest.raises(TaskFileError):
        sp.Switcher("net", store)


def test_folded_networks(base, store, wanted):
    switcher = sp.Switcher(base, store, fold=True)
    switcher.activate("a")
    with torch.no_grad():
        torch.testing.assert_close(switcher(X), wanted["a"], rtol=1e-4, atol=1e-5)


def test_serving_needs_no_structure_and_no_training(tmp_path, base, store):
    """In a fresh process: no module that traces, scores, plans or trains is imported."""
    import subprocess
    import sys

    torch.save(base, tmp_path / "base.pt")
    code = (
        "import sys, torch; import spalier as sp;"
        f"base = torch.load({str(tmp_path / 'base.pt')!r}, weights_only=False);"
        f"net = sp.Switcher(base, {str(store.folder)!r}).activate('a');"
        "bad = [m for m in sys.modules if m.startswith(('spalier.structure.', 'spalier.criteria', 'spalier.budget',"
        " 'spalier.tracing', 'spalier.scheduling', 'spalier.pruning.prune', 'spalier.tasks.extract'))];"
        "print(bad)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_who_asks_after_a_replacement_gets_the_new_network(base, store, monkeypatch):
    """Also while another thread still builds the old one."""
    slow, started, go_on = module.build, threading.Event(), threading.Event()

    def waits(*args, **kwargs):
        if not started.is_set():
            started.set()
            assert go_on.wait(600)
        return slow(*args, **kwargs)

    monkeypatch.setattr(module, "build", waits)
    switcher = sp.Switcher(base, store)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(switcher.activate, "a")
        assert started.wait(600)
        store.add(task_of(base, 9), "a", overwrite=True)
        second = pool.submit(switcher.activate, "a")
        time.sleep(0.1)
        go_on.set()
        first.result()
        found = second.result()
    with torch.no_grad():
        torch.testing.assert_close(found(X), store.load("a").build(base)(X))


def test_networks_that_are_served_leave_the_base_alone(base, tmp_path):
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), targets="3", head="8")
    store = sp.Store(tmp_path)
    store.add(sp.Task.of(net, "a"))
    before = snapshot(base)
    switcher = sp.Switcher(base, store)
    served = switcher.activate("a")
    assert not served(X).requires_grad
    served.requires_grad_(True).half()
    assert_unchanged(base, before)


def test_a_task_that_was_removed_is_gone(base, store):
    switcher = sp.Switcher(base, store)
    switcher.network("a")
    store.remove("a")
    with pytest.raises(TaskFileError, match="no task 'a'"):
        switcher.network("a")
    assert switcher.ready == []
