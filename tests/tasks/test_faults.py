"""Whatever happens while a task is written, what is in the store is whole: old or new, never a part.

Processes that are killed, or that write at once, are forks of a process that runs this file as a program.
"""

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import spalier
from attacks.parts import base, task, valid
from spalier.errors import TaskFileError
from spalier.files import LEFTOVER_AGE
from spalier.tasks import SUFFIX

fcntl, resource = pytest.importorskip("fcntl"), pytest.importorskip("resource")
HERE = Path(__file__).parents[1]
PATIENCE = 600
"""Seconds after which a process is taken to hang; on a busy machine any may be slow."""


def variant(number: int, of: spalier.Task) -> spalier.Task:
    """A task that says its number everywhere, so that a mixture of two would show."""
    info = replace(of.info, provenance={"number": number})
    return replace(of, values=torch.full_like(of.values, float(number)), info=info)


def number_of(path: Path) -> int:
    """Which variant a file holds; all of it has to be of one."""
    found = spalier.Task.load(path)
    number = found.info.provenance["number"]
    assert torch.equal(found.values, torch.full_like(found.values, float(number)))
    return number


def leftovers(folder: Path) -> list[Path]:
    return sorted(folder.glob(".spalier-*"))


def grow_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - LEFTOVER_AGE - 10,) * 2, follow_symlinks=False)


def at_call(count: int, name: str, act):
    """Let the n-th call of a function of `os` do something else first."""
    really, calls = getattr(os, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == count:
            act()
        return really(*args, **kwargs)

    return wrapped


def failing(number: int):
    def act():
        raise OSError(number, os.strerror(number))

    return act


def code_of(act) -> str | None:
    """The code that something is refused with; None if it is not."""
    try:
        act()
    except TaskFileError as error:
        return error.code
    return None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# programs that fork


def fork(act) -> int:
    """Do something in a fork of this process; its id."""
    made = os.fork()
    if made:
        return made
    try:
        act()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def killed_at_any_call(store: spalier.Store, of: spalier.Task) -> None:
    """A process replaces one task and adds another, and is killed at some call; at each once."""
    kills = 0
    for name, most in (("open", 6), ("fdopen", 2), ("fsync", 4), ("replace", 2), ("close", 4)):
        for count in range(1, most + 1):
            store.add(variant(0, of), "a", overwrite=True)
            if "b" in store:
                store.remove("b")

            def write(name=name, count=count):
                setattr(os, name, at_call(count, name, die))
                store.add(variant(1, of), "a", overwrite=True)
                store.add(variant(2, of), "b")

            _, status = os.waitpid(fork(write), 0)
            kills += os.WIFSIGNALED(status)
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
            check_whole(store, {0, 1, 2})
    assert kills >= 10, kills


def killed_at_random(store: spalier.Store, of: spalier.Task) -> None:
    """A process that writes without end is killed at any moment."""

    def write():
        for number in range(10**6):
            store.add(variant(number, of), f"t{number % 3}", overwrite=True)

    for name in ("t0", "t1", "t2"):
        store.add(variant(0, of), name)
    chance = random.Random(0)
    for _ in range(40):
        writer = fork(write)
        time.sleep(chance.uniform(0.002, 0.03))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        check_whole(store, range(10**6))
        assert len(store) == 3


def check_whole(store: spalier.Store, numbers) -> None:
    """Every file is one variant, and what a dead writer has left goes with the next look."""
    for name in store:
        assert number_of(store.path(name)) in numbers
    assert len(leftovers(store.folder)) <= 1
    spalier.Store(store.folder)  # too young to be swept
    grow_old(*leftovers(store.folder))
    assert not leftovers(spalier.Store(store.folder).folder)
    assert all(entry.is_sound for entry in store.list())


def disk_full(store: spalier.Store, of: spalier.Task) -> None:
    """Files may not grow beyond a limit, as on a full disk."""
    store.add(variant(0, of), "a")
    size = store.path("a").stat().st_size

    def write(limit: int):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        for name in ("a", "b"):
            assert code_of(lambda name=name: store.add(variant(1, of), name, overwrite=True)) == "write"

    for limit in (0, 1, 8, size // 2, size - 1):
        _, status = os.waitpid(fork(lambda limit=limit: write(limit)), 0)
        assert status == 0
        assert list(store) == ["a"]
        assert number_of(store.path("a")) == 0
        assert not leftovers(store.folder)


def writers_at_once(store: spalier.Store, of: spalier.Task) -> None:
    """Two processes write one name and one of their own each, two more save past the store; a reader never fails."""
    enough = store.folder.parent / "enough"
    shared = store.folder.parent / f"shared{SUFFIX}"

    def add(own: int):
        number = own
        while not enough.exists():
            store.add(variant(number, of), "both", overwrite=True)
            store.add(variant(number, of), f"own{own}", overwrite=True)
            variant(number, of).save(shared)
            number += 2

    store.add(variant(0, of), "both")
    variant(0, of).save(shared)
    started = [fork(lambda own=own: add(own)) for own in (1, 2)]
    seen, reads, end = set(), 0, time.time() + PATIENCE
    while reads < 20 or {n % 2 for n in seen if n} != {0, 1}:  # until both writers were seen
        assert time.time() < end
        seen.add(number_of(store.path("both")))
        seen.add(number_of(shared))
        for name in store:
            number_of(store.path(name))
        assert all(entry.is_sound for entry in store.list())
        reads += 1
    enough.touch()
    assert [os.waitpid(pid, 0)[1] for pid in started] == [0, 0]
    assert list(store) == ["both", "own1", "own2"]
    assert not leftovers(store.folder)


def one_of_many_adds(store: spalier.Store, of: spalier.Task) -> None:
    """Of processes that add the same name without overwriting, one succeeds."""

    def add(number: int):
        while not (store.folder / "go").exists():
            pass
        code = code_of(lambda: store.add(variant(number, of), "Aa"[number % 2]))
        os._exit({None: 0, "exists": 7}.get(code, 1))

    for _ in range(5):
        started = [fork(lambda n=n: add(n)) for n in range(4)]
        (store.folder / "go").touch()
        codes = sorted(os.WEXITSTATUS(os.waitpid(pid, 0)[1]) for pid in started)
        assert codes == [0, 7, 7, 7]
        (name,) = store
        number_of(store.path(name))
        store.remove(name)
        (store.folder / "go").unlink()


PROGRAMS = [killed_at_any_call, killed_at_random, disk_full, writers_at_once, one_of_many_adds]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """What went wrong in each of them; all run in one process of their own, which forks."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "seed").write_bytes(valid())
    paths = [str(HERE), str(HERE.parent / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", [act.__name__ for act in PROGRAMS])
def test_processes_that_die_fail_or_compete(name, faults):
    assert faults[name] == ""


# in one process


@pytest.fixture
def store(tmp_path):
    """A store with one task, number 0."""
    made = spalier.Store(tmp_path / "store")
    made.add(variant(0, task()), "a")
    return made


def test_a_full_disk(store, monkeypatch):
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
        for name, count in (("open", 2), ("fsync", 1), ("replace", 1)):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, at_call(count, name, failing(number)))
                assert code_of(lambda: store.add(variant(1, task()), "a", overwrite=True)) == "write"
            assert number_of(store.path("a")) == 0
            assert not leftovers(store.folder)


def test_a_write_that_fails_in_the_middle(store, monkeypatch):
    really = os.fdopen

    class Full:
        """Takes a hundred bytes."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            self.file.write(data[:100])
            failing(errno.ENOSPC)()

    monkeypatch.setattr(os, "fdopen", lambda handle, mode, **how: Full(really(handle, mode, **how)))
    with pytest.raises(TaskFileError) as caught:
        store.add(variant(1, task()), "a", overwrite=True)
    monkeypatch.undo()
    assert caught.value.code == "write"
    assert number_of(store.path("a")) == 0
    assert not leftovers(store.folder)


def test_the_folder_cannot_be_synced(store, monkeypatch):
    """The file is in its place by then: either that is no error, or the error does not claim the old one is there."""
    said = ""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", at_call(2, "fsync", failing(errno.EINVAL)))
        try:
            store.add(variant(1, task()), "a", overwrite=True)
        except TaskFileError as error:
            said = str(error)
    assert "unchanged" not in said
    assert number_of(store.path("a")) == 1
    assert not leftovers(store.folder)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_an_interrupt(name, kind, store, monkeypatch):
    def interrupt():
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(os, name, at_call(1, name, interrupt))
        with pytest.raises(kind):
            store.add(variant(1, task()), "a", overwrite=True)
    assert number_of(store.path("a")) == 0
    assert not leftovers(store.folder)
    store.add(variant(2, task()), "a", overwrite=True)  # the lock is free again
    assert number_of(store.path("a")) == 2


def test_a_task_that_cannot_be_stored_changes_nothing(store):
    bad = replace(task(), values=torch.full_like(task().values, 1e30))
    with pytest.raises(TaskFileError) as caught:
        store.add(bad, "a", storage="fp16", overwrite=True)
    assert caught.value.code == "storage"
    assert number_of(store.path("a")) == 0


def test_only_leftovers_are_swept(store):
    folder = store.folder
    locked, free, young = (folder / f".spalier-1-{name}.tmp" for name in ("locked", "free", "young"))
    pipe, link, inside = (folder / f".spalier-2-{name}.tmp" for name in ("pipe", "link", "folder"))
    others = [folder / name for name in ("notes.txt", ".spalier-x", "x.tmp", f".hidden{SUFFIX}")]
    for path in (locked, free, young, *others):
        path.write_bytes(b"x")
    os.mkfifo(pipe)
    link.symlink_to(others[0])
    inside.mkdir()
    grow_old(locked, free, pipe, link, inside, *others)
    with locked.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        spalier.Store(folder)
        assert {p for p in (locked, free, young, pipe, link, inside) if os.path.lexists(p)} == {
            locked,
            young,
            inside,
        }
    spalier.Store(folder)
    assert not locked.exists()
    assert all(path.exists() for path in others)
    assert list(store) == ["a"]


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(mask, expected, tmp_path):
    before = os.umask(mask)
    try:
        store = spalier.Store(tmp_path / "store")
        path = store.add(task())
        task().save(tmp_path / f"b{SUFFIX}")
    finally:
        os.umask(before)
    for made in (path, tmp_path / f"b{SUFFIX}"):
        assert stat.S_IMODE(made.stat().st_mode) == expected


def test_a_folder_that_may_not_be_written(store, monkeypatch):
    store.folder.chmod(0o555)
    try:
        if os.access(store.folder, os.W_OK):  # whoever may write everywhere gets the system's answer to others
            monkeypatch.setattr(os, "open", _read_only(os.open))
        for attempt in (lambda: store.add(task(), "b"), lambda: task().save(store.folder / f"c{SUFFIX}")):
            with pytest.raises(TaskFileError) as caught:
                attempt()
            assert caught.value.code == "write"
        assert spalier.Store(store.folder).load("a").name == task().name
    finally:
        store.folder.chmod(0o755)
    assert list(store) == ["a"]


def _read_only(really):
    def opened(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, flags, *args, **kwargs)

    return opened


def test_a_folder_that_is_none(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    for folder in (file, file / "inside"):
        with pytest.raises(TaskFileError) as caught:
            spalier.Store(folder)
        assert caught.value.code == "unreadable"
        with pytest.raises(TaskFileError) as caught:
            task().save(folder / f"a{SUFFIX}")
        assert caught.value.code == "write"
    with pytest.raises(TaskFileError) as caught:
        task().save(tmp_path / "nowhere" / f"a{SUFFIX}")
    assert caught.value.code == "write"
    assert file.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [file]


def test_a_store_that_is_gone(store):
    for path in (*store.folder.iterdir(), store.folder):
        path.rmdir() if path.is_dir() else path.unlink()
    for code, attempt in (
        ("write", lambda: store.add(task())),
        ("write", lambda: store.remove("a")),
        ("missing", lambda: store.load("a")),
    ):
        with pytest.raises(TaskFileError) as caught:
            attempt()
        assert caught.value.code == code
    assert list(store) == []


def test_a_task_that_goes_while_the_store_is_listed(store, monkeypatch):
    really = spalier.Task.load

    def load(path, **options):
        found = really(path, **options)
        path.unlink()
        return found

    monkeypatch.setattr(spalier.Task, "load", staticmethod(load))
    assert len(store.list()) <= 1  # as it was, or as it is


def test_what_stands_in_the_way_stays(tmp_path):
    """A folder of the name is an error; a link is replaced, and what it points to is not written to."""
    store = spalier.Store(tmp_path / "store")
    folder, link, target = store.path("folder"), store.path("link"), tmp_path / "target"
    folder.mkdir()
    (folder / "x").touch()
    target.write_bytes(b"mine")
    link.symlink_to(target)
    with pytest.raises(TaskFileError) as caught:
        store.add(task(), "folder", overwrite=True)
    assert caught.value.code == "write"
    assert (folder / "x").exists()
    store.add(task(), "link", overwrite=True)
    assert target.read_bytes() == b"mine"
    assert not link.is_symlink()
    store.load("link").build(base())
    with pytest.raises(TaskFileError) as caught:
        store.remove("folder")
    assert caught.value.code == "write"


def test_a_lock_that_is_a_link_is_not_followed(store, tmp_path):
    target = tmp_path / "target"
    (store.folder / ".lock").unlink()
    (store.folder / ".lock").symlink_to(target)
    with pytest.raises(TaskFileError) as caught:
        store.add(task(), "b")
    assert caught.value.code == "write"
    assert not target.exists()


def test_nothing_is_replaced_unasked(store):
    for name in ("a", "A"):
        with pytest.raises(TaskFileError) as caught:
            store.add(variant(1, task()), name)
        assert caught.value.code == "exists"
    with pytest.raises(TaskFileError) as caught:
        store.add(variant(1, task()), "A", overwrite=True)
    assert caught.value.code == "exists"
    assert list(store) == ["a"]
    assert number_of(store.path("a")) == 0
    store.add(variant(2, task()), "a", overwrite=True)
    assert number_of(store.path("a")) == 2


def fault_of(act, folder: Path) -> str:
    seed = folder / f"{act.__name__}{SUFFIX}"
    seed.write_bytes((folder / "seed").read_bytes())
    try:
        act(spalier.Store(folder / act.__name__ / "store"), spalier.Task.load(seed))
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({act.__name__: fault_of(act, Path(sys.argv[1])) for act in PROGRAMS}))
