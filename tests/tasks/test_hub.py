"""Pushing to and pulling from a hub on loopback, with the real `huggingface_hub`."""

import copy
import pickle
import re
import socket
import sys
import tempfile
import traceback

import pytest
import torch
import yaml
from fake_hub import COMMIT, FakeHub, Repository
from support import awaken_, tiny_cnn

import spalier
from spalier import Store, Task, files
from spalier.errors import TaskFileError
from spalier.tasks.hub import card, escaped

REPOSITORY = "someone/tasks"
TOKEN = "hf_secretsecretsecretsecret"
FILE = "a.task.safetensors"
HOSTILE = ["<script>alert(1)</script>", "| x |", "---", "`code`", "${{ secrets }}", "*b* _i_ [l](http://e.x)"]


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch, tmp_path):
    """No request leaves the machine, whatever the library thinks of; it waits for nothing and reads no log-in."""
    constants = pytest.importorskip("huggingface_hub.constants")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_DISABLE_XET": True,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
        "HF_TOKEN_PATH": str(tmp_path / "home" / "token"),
        "HF_STORED_TOKENS_PATH": str(tmp_path / "home" / "stored_tokens"),
        "AGENT_HARNESSES_PATH": str(tmp_path / "home" / "harnesses"),
        "ENDPOINT": "http://127.0.0.1:9",
        "HUGGINGFACE_CO_URL_TEMPLATE": "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(constants, name, value)
    strayed, lookup, connect = [], socket.getaddrinfo, socket.socket.connect

    def looked_up(host, *args, **options):
        return lookup(host, *args, **options) if host == "127.0.0.1" else stray(host)

    def connected(self, address):
        return connect(self, address) if address[0] == "127.0.0.1" else stray(address)

    def stray(where):
        strayed.append(where)
        raise OSError(f"a test tried to reach {where}")

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(socket.socket, "connect", connected)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    assert not strayed
    assert not list((tmp_path / "temporary").iterdir())


@pytest.fixture
def hub():
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def base():
    return tiny_cnn().eval()


@pytest.fixture
def task(base):
    return task_of(base)


def task_of(base, **said):
    net = copy.deepcopy(base)
    spalier.attach_(net, spalier.SPLoRA(rank=2), head="8")
    return Task.of(awaken_(net), "a", **{"classes": ["cat", "dog", "eel"], **said})


@pytest.fixture
def store(tmp_path, task):
    store = Store(tmp_path / "store")
    store.add(task)
    return store


@pytest.fixture
def other(tmp_path):
    return Store(tmp_path / "other")


def refused(call, *args, **options):
    """The error of a call, after a look at what it shows: one line, and no token in all of the traceback."""
    with pytest.raises(TaskFileError) as caught:
        call(*args, **options)
    error = caught.value
    assert "\n" not in str(error)
    assert "secret" not in "".join(traceback.format_exception(error))
    return error


def contents(store):
    return {p.name: p.read_bytes() for p in store.folder.iterdir() if p.name != ".lock"}


def serve(hub, data, file=FILE):
    hub.repositories[REPOSITORY] = Repository(files={file: data})


@pytest.mark.parametrize("storage", ["exact", "fp16", "int8"])
def test_a_task_comes_back_byte_for_byte_and_builds(hub, tmp_path, base, task, other, storage):
    store = Store(tmp_path / "store")
    path = store.add(task, storage=storage)
    address = store.push("a", REPOSITORY, endpoint=hub.address)
    assert address == f"{hub.address}/{REPOSITORY}/commit/{COMMIT}"
    assert hub.repositories[REPOSITORY].files[FILE] == path.read_bytes()
    pulled = other.pull(REPOSITORY, "a", endpoint=hub.address)
    assert pulled == other.path("a")
    assert contents(other) == {FILE: path.read_bytes()}
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(other.load("a").build(base)(x), store.load("a").build(base)(x))


def test_file_and_card_are_one_commit(hub, store):
    store.push("a", REPOSITORY, endpoint=hub.address, message="first")
    found = hub.repositories[REPOSITORY]
    assert set(found.files) == {FILE, "README.md"}
    assert [commit["summary"] for commit in found.commits] == ["first"]
    assert f'store.pull("{REPOSITORY}", "a")' in found.files["README.md"].decode()


def test_a_task_is_pushed_under_the_name_that_the_store_has(hub, tmp_path, task, other):
    store = Store(tmp_path / "store")
    store.add(task, "renamed")
    store.push("renamed", REPOSITORY, endpoint=hub.address)
    assert f'store.pull("{REPOSITORY}", "renamed")' in hub.repositories[REPOSITORY].files["README.md"].decode()
    assert other.pull(REPOSITORY, "renamed", endpoint=hub.address).read_bytes() == store.path("renamed").read_bytes()


def test_a_repository_without_an_owner_is_the_callers(hub, store):
    store.push("a", "tasks", endpoint=hub.address)
    assert list(hub.repositories) == ["me/tasks"]


def test_pushing_again_replaces(hub, store, base):
    store.push("a", REPOSITORY, endpoint=hub.address)
    store.add(task_of(base, classes=["x", "y", "z"]), overwrite=True)
    store.push("a", REPOSITORY, endpoint=hub.address)
    assert hub.repositories[REPOSITORY].files[FILE] == store.path("a").read_bytes()


def test_private_is_kept_and_a_public_repository_is_refused(hub, store):
    store.push("a", REPOSITORY, endpoint=hub.address, private=True)
    assert hub.repositories[REPOSITORY].private
    hub.repositories[REPOSITORY] = Repository(private=False)
    error = refused(store.push, "a", REPOSITORY, endpoint=hub.address, private=True)
    assert error.code == "hub"
    assert "public" in str(error)
    assert not hub.repositories[REPOSITORY].files


def test_what_cannot_be_loaded_is_not_pushed(hub, store):
    store.path("a").write_bytes(store.path("a").read_bytes()[:-1])
    assert refused(store.push, "a", REPOSITORY, endpoint=hub.address).code == "truncated"
    assert refused(store.push, "b", REPOSITORY, endpoint=hub.address).code == "missing"
    assert not hub.requests


def test_a_task_that_is_replaced_while_it_is_read_is_pushed_as_it_was(hub, store, base, monkeypatch):
    before, newer = store.path("a").read_bytes(), task_of(base, classes=["x", "y", "z"])
    really = files.read_exactly

    def reading(file, size):
        found = really(file, size)
        store.add(newer, overwrite=True)
        return found

    monkeypatch.setattr(files, "read_exactly", reading)
    store.push("a", REPOSITORY, endpoint=hub.address)
    assert store.path("a").read_bytes() != before
    pushed = hub.repositories[REPOSITORY].files
    assert pushed[FILE] == before
    assert "cat, dog" in pushed["README.md"].decode()


def test_the_token_is_sent_with_every_request(hub, store, other):
    store.push("a", REPOSITORY, endpoint=hub.address, token=TOKEN)
    other.pull(REPOSITORY, "a", endpoint=hub.address, token=TOKEN)
    assert {sent for *_, sent in hub.requests} == {f"Bearer {TOKEN}"}


def test_a_revision_is_asked_for(hub, task, other):
    serve(hub, task.to_bytes())
    other.pull(REPOSITORY, "a", endpoint=hub.address, revision=COMMIT)
    error = refused(other.pull, REPOSITORY, "a", endpoint=hub.address, revision="v2", overwrite=True)
    assert error.code == "hub"
    assert "no such revision" in str(error)


def test_pushing_to_a_branch_that_is_not_there_is_refused(hub, store):
    error = refused(store.push, "a", REPOSITORY, endpoint=hub.address, revision="v2")
    assert error.code == "hub"
    assert "no such revision" in str(error)


def test_a_wrong_repository_is_refused(hub, other):
    error = refused(other.pull, REPOSITORY, "a", endpoint=hub.address)
    assert error.code == "hub"
    assert "no such repository" in str(error)
    assert REPOSITORY in str(error)
    assert not contents(other)


def test_a_task_that_the_repository_lacks_is_refused(hub, task, other):
    serve(hub, task.to_bytes())
    error = refused(other.pull, REPOSITORY, "b", endpoint=hub.address)
    assert error.code == "hub"
    assert "no such task" in str(error)
    assert not contents(other)


@pytest.mark.parametrize(("status", "advice"), [(401, "token"), (403, "token"), (500, "later"), (418, "check")])
def test_a_hub_that_refuses_is_one_error(hub, store, other, status, advice):
    hub.failure = (status, "no " * 95 + f"{TOKEN}\nnever \x1b[31m")
    before = contents(store)
    for call, args in ((store.push, ("a", REPOSITORY)), (other.pull, (REPOSITORY, "a"))):
        error = refused(call, *args, endpoint=hub.address, token=TOKEN)
        assert error.code == "hub"
        assert str(status) in str(error)
        assert advice in str(error)
        assert str(error).isprintable()
    assert contents(store) == before
    assert not contents(other)


def test_a_refused_connection_is_one_error(store, other):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for call, args in ((store.push, ("a", REPOSITORY)), (other.pull, (REPOSITORY, "a"))):
            error = refused(call, *args, endpoint=endpoint)
            assert error.code == "hub"
            assert "refused" in str(error)
            assert "connection" in str(error)
    assert not contents(other)


def test_offline_mode_is_said(hub, other, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refused(other.pull, REPOSITORY, "a", endpoint=hub.address)
    assert error.code == "hub"
    assert "HF_HUB_OFFLINE" in str(error)


def test_a_token_that_cannot_be_sent_is_not_shown(hub, other):
    error = refused(other.pull, REPOSITORY, "a", endpoint=hub.address, token=f"{TOKEN}\n")
    assert error.code == "hub"
    assert not hub.requests


@pytest.mark.parametrize("agrees", [False, True])
def test_a_truncated_file_is_refused(hub, task, other, agrees):
    serve(hub, task.to_bytes())
    hub.cut, hub.agrees_on_size = 100, agrees
    error = refused(other.pull, REPOSITORY, "a", endpoint=hub.address)
    assert error.code == ("truncated" if agrees else "hub")
    assert not contents(other)


def planted():
    raise AssertionError("code of a file was run")


class Planted:
    def __reduce__(self):
        return planted, ()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (pickle.dumps(Planted()), "foreign"),
        (b"PK\x03\x04" + bytes(100), "foreign"),
        (b"<!doctype html>", "header-length"),
        (b"", "truncated"),
    ],
    ids=["pickle", "zip", "page", "empty"],
)
def test_a_malicious_file_is_refused(hub, task, store, data, code):
    serve(hub, data)
    before = contents(store)
    error = refused(store.pull, REPOSITORY, "a", endpoint=hub.address, overwrite=True)
    assert error.code == code
    assert contents(store) == before


def test_an_existing_name_is_refused_before_anything_is_asked(hub, store, base):
    serve(hub, task_of(base, classes=["x", "y", "z"]).to_bytes())
    before = contents(store)
    assert refused(store.pull, REPOSITORY, "a", endpoint=hub.address).code == "exists"
    assert refused(store.pull, REPOSITORY, "A", endpoint=hub.address, overwrite=True).code == "exists"
    assert contents(store) == before
    assert not hub.requests
    store.pull(REPOSITORY, "a", endpoint=hub.address, overwrite=True)
    assert contents(store) == hub.repositories[REPOSITORY].files


def test_names_that_leave_the_store_are_refused(hub, other):
    for name in ("../a", "a/b", "", ".lock"):
        assert refused(other.pull, REPOSITORY, name, endpoint=hub.address).code == "name"
    assert not hub.requests


@pytest.mark.parametrize("name", ["a/b/c", "", "a b", "../../x", "a--b", "é/b", None, 7])
def test_what_is_no_repository_is_refused(hub, store, other, name):
    for call, args in ((store.push, ("a", name)), (other.pull, (name, "a"))):
        error = refused(call, *args, endpoint=hub.address)
        assert error.code == "hub"
        assert "OWNER/NAME" in str(error)
    assert not hub.requests


def test_without_the_library_it_says_what_to_install(store, other, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call, args in ((store.push, ("a", REPOSITORY)), (other.pull, (REPOSITORY, "a"))):
        error = refused(call, *args)
        assert error.code == "hub"
        assert "pip install 'spalier[hub]'" in str(error)


def parts(text):
    """The front matter, parsed, and the body of a card."""
    start, front, body = text.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(front), body


def test_a_card_says_what_the_task_is(task):
    front, body = parts(card(task, 12345))
    assert front == {"library_name": "spalier", "tags": ["spalier", "structured-pruning", "splora"]}
    for said in (
        "12,345 bytes",
        task.info.base.architecture[:12],
        task.info.base.values[:12],
        "rank&#61;2",
        "cat, dog",
        "not stated",
    ):
        assert said in body
    code = re.search(r"```python\n(.*)```", body, re.DOTALL)[1]
    compile(code, "card", "exec")
    assert 'store.pull("OWNER/NAME", "a")' in code
    assert 'Switcher(base, store).activate("a")' in code


def test_a_card_lists_fifty_classes(base):
    body = parts(card(task_of(base, classes=[f"c{i}" for i in range(60)]), 1))[1]
    assert "c48, c49 and" in body
    assert "c50" not in body
    assert "10 more" in body


@pytest.mark.parametrize(
    ("licence", "front"),
    [
        ("Apache-2.0", {"license": "apache-2.0"}),
        ("GPL-3.0-only", {"license": "gpl-3.0"}),
        ("My own: ask", {"license": "other", "license_name": "my-own-ask"}),
        ("---", {"license": "other"}),
        ("", {}),
    ],
)
def test_the_licence_of_a_card_is_one_that_the_hub_takes(base, licence, front):
    found = parts(card(task_of(base, licence=licence), 1))[0]
    assert {key: value for key, value in found.items() if key.startswith("license")} == front


def test_hostile_text_shows_as_text_in_the_card_that_is_uploaded(hub, tmp_path, base):
    store = Store(tmp_path / "store")
    words = dict.fromkeys(HOSTILE, 0.5)
    store.add(task_of(base, classes=HOSTILE, metrics=words, preprocessing=words, provenance={k: [k] for k in HOSTILE}))
    store.push("a", REPOSITORY, endpoint=hub.address)
    front, body = parts(hub.repositories[REPOSITORY].files["README.md"].decode())
    assert front["metrics"] == HOSTILE
    for word in HOSTILE:
        assert word not in body.replace("<pre>", "").replace("</pre>", "")
        assert body.count(escaped(word)) >= 3 + 1  # a class, and three keys
    assert re.findall("<.*", body) == ["<pre>", "</pre>"]  # nothing ends the block but its end
    assert body.count("`") == 2 + 6  # `base`, and the fence
    assert "|" not in body


def test_characters_beyond_16_bits_and_quotes_survive_the_front_matter(base):
    names = ['"', "\\", "'", "😀", "名", "a: b # c", "- x", "\u00a0", "!!python/object", "&a", "*a", "%"]
    front, _ = parts(card(task_of(base, metrics=dict.fromkeys(names, 1)), 1))
    assert front["metrics"] == names


def test_escaped_text_has_no_markup_left():
    from html import unescape

    text = "".join(map(chr, range(32, 127))) + " www.e.x -- a-b é"
    found = escaped(text)
    assert unescape(found) == text
    assert not set(re.sub(r"&#\d+;", "", found)) & set("<>&|`*_[](){}#+!~$:@=\\\"'^")
