"""What goes wrong around a service: clients, files, disks, clocks, signals. It answers everyone else all the while."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from served import PNG, base, code_of, picture, running, store_of, task_of

import spalier as sp
from spalier.serve import Limits, app

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def net():
    return base()


@pytest.fixture
def store(net, tmp_path):
    return store_of(net, tmp_path / "store", NAMES)


def answers(client, name="a"):
    return client.post(f"/v1/tasks/{name}/predict", content=picture(), headers=PNG).status_code == 200


def connect(client):
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=30)


def head(length, path="/v1/tasks/a/predict"):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {length}\r\n\r\n".encode()


def until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def metric(client, name):
    return float(re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)[1])


def test_clients_that_go_away(net, store):
    """Before the body, in the middle of it, and while their batch runs."""
    data = picture()
    with running(app(net, store)) as client:
        for sent in (head(len(data)), head(len(data)) + data[:100], head(len(data)) + data):
            for _ in range(5):
                with connect(client) as connection:
                    connection.sendall(sent)
        assert answers(client)
        until(lambda: metric(client, "spalier_under_way") == 0)


def test_half_a_body_takes_its_time_and_no_more(net, store):
    with running(app(net, store, limits=Limits(seconds=0.3, queue=2))) as client, connect(client) as connection:
        connection.sendall(head(1000) + b"x" * 500)
        until(lambda: metric(client, "spalier_under_way") == 1)
        assert answers(client)
        assert connection.recv(12) == b"HTTP/1.1 504"
        until(lambda: metric(client, "spalier_under_way") == 0)


@pytest.mark.slow
def test_ten_thousand_unknown_names(net, store):
    made = app(net, store)
    with running(made) as client:
        connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=30)
        for number in range(10_000):
            connection.request("POST", f"/v1/tasks/name{number}/predict", b"x", PNG)
            response = connection.getresponse()
            response.read()
            assert response.status == 404
        connection.close()
        assert metric(client, 'spalier_requests_total{status="404"}') == 10_000
        assert "name9" not in client.get("/metrics").text
        service = made.state.backend
        assert (service._waiting, service._speed, service.switcher._paths, service.switcher.ready) == ({}, {}, {}, [])
        assert answers(client)


def test_a_file_that_becomes_garbage_under_load(net, store):
    """Its own requests hear of it, all others are answered; when it is mended, so are they."""
    path, whole = store.path("a"), store.path("a").read_bytes()
    seen, ended = {"a": set(), "b": set()}, threading.Event()
    with running(app(net, store)) as client, ThreadPoolExecutor(2) as pool:

        def ask(name):
            while not ended.is_set():
                response = client.post(f"/v1/tasks/{name}/predict", content=picture(), headers=PNG)
                seen[name].add((response.status_code, "" if response.status_code == 200 else code_of(response)))

        asking = [pool.submit(ask, name) for name in seen]
        for place in range(0, len(whole), max(1, len(whole) // 20)):
            path.write_bytes(whole[:place] + b"\xff" * 40 + whole[place + 40 :])  # in place: not what Store does
            time.sleep(0.02)
        until(lambda: any(status == 422 for status, _ in seen["a"]))
        path.write_bytes(whole)
        ended.set()
        assert [future.result() for future in asking] == [None, None]
        assert answers(client)
    assert seen["b"] == {(200, "")}
    assert {status for status, _ in seen["a"]} <= {200, 404, 422}


def test_two_servers_on_one_store(net, store):
    with running(app(net, store)) as one, running(app(net, store)) as other:
        assert answers(one)
        assert answers(other)
        store.add(task_of(net, 9), "a", overwrite=True)
        digests = {
            client.post("/v1/tasks/a/predict", content=picture(), headers=PNG).json()["digest"]
            for client in (one, other)
        }
        assert digests == {store.read("a")[1]}
        store.remove("a")
        assert not answers(one)
        assert not answers(other)


def test_clocks_that_jump(net, store, monkeypatch):
    """Time of day is used for nothing but the log; a file from the future, or older than the last, is a new file."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    with running(app(net, store, limits=Limits(seconds=20))) as client:
        for jump, moment in ((1e8, 2e9), (-1e8, 1e9), (0.0, 1.5e9)):
            shift[0] = jump
            store.add(task_of(net, int(moment) % 97), "a", overwrite=True)
            os.utime(store.path("a"), (moment, moment))
            response = client.post("/v1/tasks/a/predict", content=picture(), headers=PNG)
            assert response.json()["digest"] == store.read("a")[1]
            assert 0 <= response.json()["milliseconds"] < 20_000


# as a process

SLOW = """
import time
from served import base

def make():
    net = base()
    net.register_forward_hook(lambda *given: time.sleep({seconds}))
    return net
"""


class Process:
    """`spalier serve` of its own, and a client for it."""

    def __init__(self, store, folder, *options, err=subprocess.PIPE, seconds=0.0, env=None):
        (folder / "slow_base.py").write_text(SLOW.format(seconds=seconds))
        tests = Path(__file__).resolve().parents[1]
        places = [folder, tests, tests / "serve", tests.parent / "src"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), **(env or {})}
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        arguments = ["serve", str(store.folder), "--base", "slow_base:make", "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spalier", *arguments],
            stderr=err,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def __enter__(self):
        for _ in range(1200):
            try:
                if self.client.get("/healthz").status_code == 200:
                    return self
            except httpx2.TransportError:
                assert self.process.poll() is None, self.process.communicate()
                time.sleep(0.05)
        raise AssertionError("it never listened")

    def __exit__(self, *given):
        self.client.close()
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_sigterm_finishes_what_is_under_way(store, tmp_path):
    with Process(store, tmp_path, "--json", seconds=1.5) as served, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.client.post, "/v1/tasks/a/predict", content=picture(), headers=PNG)
        until(lambda: metric(served.client, "spalier_under_way") == 1)
        served.process.send_signal(signal.SIGTERM)
        assert asked.result().status_code == 200
        _, err = served.process.communicate(timeout=30)
        assert served.process.returncode in (0, -signal.SIGTERM)
    lines = [line for line in err.splitlines() if line.startswith("{")]
    assert any('"path": "/v1/tasks/a/predict", "status": 200' in line for line in lines)
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_full_disk_for_logs_fails_no_request(store, tmp_path):
    with Path("/dev/full").open("w") as full, Process(store, tmp_path, err=full) as served:
        assert all(answers(served.client, name) for name in NAMES * 3)
        assert served.client.post("/v1/tasks/none/predict", content=b"x", headers=PNG).status_code == 404


@pytest.mark.slow
def test_a_token_from_the_environment(store, tmp_path):
    with Process(store, tmp_path, env={"SPALIER_TOKEN": "secret"}) as served:
        assert not answers(served.client)
        served.client.headers["authorization"] = "Bearer secret"
        assert answers(served.client)


def test_a_port_that_is_taken(store, capsys):
    from calling import call

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        called = call(capsys, "serve", store.folder, "--base", "served:base", "--port", port)
    assert called.code == 1
    assert "Address already in use; pass another --host or --port" in called.err
    assert "there is no folder" in call(capsys, "serve", "nowhere", "--base", "served:base").err
    assert "--base is missing" in call(capsys, "serve", store.folder).err


def test_a_store_from_the_hub(net, store, monkeypatch):
    from spalier.serve.service import open_store

    monkeypatch.setattr("spalier.tasks.hub.names_in", lambda repository: ["b", "c"])
    pulled = []

    def pull(self, repository, name):
        pulled.append((repository, name))
        return self.add(store.load(name), name)

    monkeypatch.setattr(sp.Store, "pull", pull)
    assert list(open_store("hub:owner/tasks")) == ["b", "c"]
    assert pulled == [("owner/tasks", "b"), ("owner/tasks", "c")]
    assert open_store(store) is store
