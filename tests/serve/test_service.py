"""The service over a real connection: what it answers, how it joins requests, and what it refuses."""

import base64
import io
import json
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from served import CLASSES, PNG, base, code_of, picture, running, store_of, task_of

import spalier as sp
from spalier.errors import ConfigError, RequestError
from spalier.predicting import predict, to_sample
from spalier.serve import Limits, app
from spalier.serve.service import Service, parse_body

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def net():
    return base()


@pytest.fixture
def store(net, tmp_path):
    return store_of(net, tmp_path / "store", NAMES)


@pytest.fixture
def client(net, store):
    with running(app(net, store, limits=Limits(threads=2))) as client:
        yield client


@pytest.fixture(scope="module")
def steady(net, tmp_path_factory):
    """A service whose store nobody changes."""
    with running(app(net, store_of(net, tmp_path_factory.mktemp("steady"), NAMES))) as client:
        yield client


def wanted(net, store, name, *pictures):
    task = store.load(name)
    return predict(task.build(net), task.info, pictures)


def assert_same(found, expected):
    assert [list(row) for row in found] == [list(row) for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert list(row.values()) == pytest.approx(list(other.values()), abs=1e-5)


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_every_form_of_input_gets_the_same_answer(client, net, store):
    image = picture()
    tensor = collated(store.load("a").info, image)
    expected = wanted(net, store, "a", image)
    url = "/v1/tasks/a/predict"
    coded = base64.b64encode(image).decode()
    for response in (
        client.post(url, content=image, headers=PNG),
        client.post(url, content=image, headers={"content-type": "application/octet-stream"}),
        client.post(url, files={"file": ("x.png", image)}),
        client.post(url, json={"image": coded}),
        client.post(url, json={"images": [f"data:image/png;base64,{coded}"]}),
        client.post(url, json={"inputs": tensor.tolist()}),
        client.post(url, content=npy(tensor.numpy()), headers={"content-type": "application/x-npy"}),
        client.post(
            url, content=npy(np.asfortranarray(tensor.double())), headers={"content-type": "application/x-npy"}
        ),
    ):
        assert response.status_code == 200, response.text
        found = response.json()
        assert_same(found["predictions"], expected)
        assert found["task"] == "a"
        assert found["digest"] == store.read("a")[1]
        assert 0 < found["run_milliseconds"] <= found["milliseconds"]


def collated(info, *pictures):
    from spalier.predicting import collate

    return collate(info, [to_sample(info, data) for data in pictures])


def test_several_at_once_and_fewer_classes(client, net, store):
    pictures = [picture(seed) for seed in range(4)]
    response = client.post("/v1/tasks/b/predict?top=2", files=[("file", data) for data in pictures])
    expected = [dict(list(row.items())[:2]) for row in wanted(net, store, "b", *pictures)]
    assert_same(response.json()["predictions"], expected)


def test_the_tasks_are_listed_with_what_they_cost(client, store):
    client.post("/v1/tasks/a/predict", content=picture(), headers=PNG)
    (store.folder / "bad.task.safetensors").write_bytes(b"garbage")
    entries = {entry["name"]: entry for entry in client.get("/v1/tasks").json()["tasks"]}
    assert list(entries) == ["a", "b", "bad", "c"]
    first = entries["a"]
    assert first["bytes"] == store.path("a").stat().st_size
    assert first["metrics"] == {"accuracy": 0.9}
    assert first["classes"] == list(CLASSES)
    assert first["density"]["channels"] == 1
    assert (first["ready"], entries["b"]["ready"]) == (True, False)
    assert first["milliseconds"] > 0
    assert entries["b"]["milliseconds"] is None
    assert entries["bad"]["error"] == "truncated"


def test_health_metrics_and_the_description(client):
    assert client.get("/healthz").json() == {"status": "ok", "version": sp.__version__}
    assert client.post("/v1/tasks/a/predict", content=picture(), headers=PNG).status_code == 200
    assert client.post("/v1/tasks/none/predict", content=picture(), headers=PNG).status_code == 404
    text = client.get("/metrics").text
    read = dict(re.findall(r"^(spalier_\S+) (\S+)$", text, re.MULTILINE))
    assert float(read['spalier_requests_total{status="404"}']) == 1
    assert float(read["spalier_batch_inputs_sum"]) == float(read["spalier_build_seconds_count"]) == 1
    assert float(read["spalier_ready_networks"]) == 1
    assert float(read["spalier_ready_bytes"]) > 0
    described = client.get("/openapi.json").json()["paths"]["/v1/tasks/{name}/predict"]["post"]
    assert {"image/*", "application/json", "multipart/form-data"} <= set(described["requestBody"]["content"])
    page = client.get("/docs")
    assert "openapi.json" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "//" not in re.sub(r"</?script>|</?style>", "", page.text), "the page names another host"


# refusals


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"no image", "image/png", 400, "input"),
        (b"", "image/png", 400, "input"),
        (b"x", "application/zip", 415, "content-type"),
        (b"{", "application/json", 400, "body"),
        (b"[" * 100_000, "application/json", 400, "body"),
        (b"{}", "application/json", 400, "body"),
        (b'{"image": "***"}', "application/json", 400, "body"),
        (b'{"images": []}', "application/json", 400, "body"),
        (b'{"images": [1]}', "application/json", 400, "body"),
        (b'{"inputs": [[1, 2], [3]]}', "application/json", 400, "body"),
        (b'{"inputs": 3}', "application/json", 400, "body"),
        (b'{"inputs": [[1, 2], [3, 4]]}', "application/json", 400, "input"),
        (b'{"inputs": [NaN]}', "application/json", 400, "input"),
        (b'{"text": "a film"}', "application/json", 400, "input"),
        (b"\xff\xfe", "text/plain", 400, "body"),
        (b"--x\r\nContent-Disposition: form", "multipart/form-data; boundary=x", 400, "body"),
        (b"abc", "multipart/form-data", 400, "body"),
        (b"\x93NUMPY\x01\x00", "application/x-npy", 400, "body"),
        (npy(np.zeros((10, 3))).replace(b"(10, 3)", b"(99, 3)"), "application/x-npy", 400, "body"),
        (npy(np.array(["text"])), "application/x-npy", 400, "body"),
        (npy(np.zeros((40, 3, 16, 16), np.float16)), "application/x-npy", 413, "too-large"),
    ],
)
def test_what_cannot_be_used_is_refused(steady, content, kind, status, code):
    response = steady.post("/v1/tasks/a/predict", content=content, headers={"content-type": kind})
    assert (response.status_code, code_of(response)) == (status, code)
    assert "Traceback" not in response.text
    assert 'File "' not in response.text


def test_objects_in_arrays_are_never_unpickled(client):
    with pytest.raises(RequestError, match="no numbers"):
        parse_body("application/x-npy", npy(np.array([{"a": 1}], object)), 8)


def test_unknown_names_are_not_found_and_leave_nothing(net, store):
    made = app(net, store)
    with running(made) as client:
        for name in ("none", "..%2f..%2fetc%2fpasswd", "a.task.safetensors", "%00", "x" * 300):
            response = client.post(f"/v1/tasks/{name}/predict", content=b"x", headers=PNG)
            assert response.status_code == 404, name
    assert made.state.backend._waiting == {}


def test_a_broken_file_is_unprocessable_with_its_code(client, store):
    path = store.path("a")
    whole = path.read_bytes()
    for data, code in ((b"garbage", "truncated"), (whole[:-10], "truncated"), (b"PK\x03\x04" + whole, "foreign")):
        path.unlink()
        path.write_bytes(data)
        response = client.post("/v1/tasks/a/predict", content=picture(), headers=PNG)
        assert (response.status_code, code_of(response)) == (422, code)
        assert str(store.folder) not in response.text
    assert client.post("/v1/tasks/b/predict", content=picture(), headers=PNG).status_code == 200


def test_a_task_of_another_base_is_unprocessable(client, store):
    torch.manual_seed(5)
    other = base()
    with torch.no_grad():
        other[0].weight += 1
    store.add(task_of(other), "other")
    response = client.post("/v1/tasks/other/predict", content=picture(), headers=PNG)
    assert (response.status_code, code_of(response)) == (422, "base-values")


def test_bounds_of_body_pixels_and_inputs(net, store):
    limits = Limits(body=3000, pixels=500, inputs=2)
    with running(app(net, store, limits=limits)) as client:
        url = "/v1/tasks/a/predict"

        def chunks():  # without a length in the header
            for _ in range(50):
                yield b"x" * 100

        for content in (b"x" * 3001, chunks()):
            response = client.post(url, content=content, headers=PNG)
            assert (response.status_code, code_of(response)) == (413, "too-large")
        response = client.post(url, content=picture(size=(26, 20)), headers=PNG)
        assert (response.status_code, code_of(response)) == (400, "input")
        assert "520" in response.json()["error"]["message"] or "pixels" in response.json()["error"]["message"]
        small = picture(size=(16, 16))
        assert client.post(url, files=[("file", small)] * 3).status_code == 413
        assert client.post(url, files=[("file", small)] * 2).status_code == 200


def test_a_bomb_is_refused_before_it_is_decoded(client):
    """A PNG of 60,000 x 60,000 pixels in a few bytes; all of it would take 10 GB."""
    import struct
    import zlib

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 10**6))
        + chunk(b"IEND", b"")
    )
    response = client.post("/v1/tasks/a/predict", content=bomb, headers=PNG)
    assert (response.status_code, code_of(response)) == (400, "input")
    assert "pixels" in response.json()["error"]["message"]


def test_a_token_is_asked_for(net, store):
    with running(app(net, store, token="secret")) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/").status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer"},
        ):
            for path in ("/v1/tasks", "/metrics", "/v1/tasks/a/predict"):
                response = client.get(path, headers=headers)
                assert (response.status_code, code_of(response)) == (401, "token")
                assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/tasks", headers={"authorization": "Bearer secret"}).status_code == 200


def test_the_token_is_compared_in_constant_time(net, store, monkeypatch):
    seen = []
    monkeypatch.setattr("spalier.serve.web.hmac.compare_digest", lambda *pair: seen.append(pair))
    with running(app(net, store, token="secret")) as client:
        assert client.get("/v1/tasks", headers={"authorization": "Bearer x"}).status_code == 401
    assert seen == [(b"Bearer x", b"Bearer secret")]


def test_it_can_be_mounted(net, store):
    from fastapi import FastAPI

    outer = FastAPI()
    outer.mount("/vision", app(net, store, token="secret"))
    with running(outer) as client:
        assert client.get("/vision/healthz").status_code == 200
        assert client.get("/vision/v1/tasks").status_code == 401
        answer = client.get("/vision/v1/tasks", headers={"authorization": "Bearer secret"})
        assert len(answer.json()["tasks"]) == 3


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"queue": "many"}, {"seconds": -1}, {"cache": -1}, {"threads": 1.5}])
def test_limits_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


# batches, the cache, the queue


class Gate:
    """A network that waits at a gate, and notes what came through."""

    def __init__(self, monkeypatch):
        from spalier.serve import service

        self.open, self.sizes, real = threading.Event(), [], service.probabilities

        def gated(net, batch):
            assert self.open.wait(30)
            self.sizes.append(len(batch))
            return real(net, batch)

        monkeypatch.setattr(service, "probabilities", gated)


def until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def under_way(client):
    return float(re.search(r"^spalier_under_way (\S+)", client.get("/metrics").text, re.MULTILINE)[1])


def test_requests_that_wait_are_run_together(net, store, monkeypatch):
    gate = Gate(monkeypatch)
    expected = [wanted(net, store, "a", picture(seed)) for seed in range(7)]
    with running(app(net, store, limits=Limits(batch=4, threads=1))) as client, ThreadPoolExecutor(7) as pool:
        asked = [
            pool.submit(client.post, "/v1/tasks/a/predict", content=picture(seed), headers=PNG) for seed in range(7)
        ]
        until(lambda: under_way(client) == 7)
        gate.open.set()
        for future, rows in zip(asked, expected, strict=True):
            assert_same(future.result().json()["predictions"], rows)
    assert sum(gate.sizes) == 7
    assert len(gate.sizes) <= 4
    assert max(gate.sizes) == 4


def test_a_batch_waits_for_others_where_it_is_told_to(net, store, monkeypatch):
    gate = Gate(monkeypatch)
    gate.open.set()
    with running(app(net, store, limits=Limits(wait=0.5))) as client, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(client.post, "/v1/tasks/a/predict", content=picture(), headers=PNG) for _ in range(3)]
        assert all(future.result().json()["batch"] == 3 for future in asked)


def test_one_bad_input_fails_its_own_request_alone(net, store, monkeypatch):
    """A tensor that the network cannot take beside others in one batch, and an image that is none."""
    for name in NAMES:
        store.add(task_of(net, preprocessing={"size": None}), name, overwrite=True)
    gate = Gate(monkeypatch)
    good = {"inputs": torch.zeros(1, 3, 16, 16).tolist()}
    with running(app(net, store, limits=Limits(threads=1))) as client, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(client.post, "/v1/tasks/a/predict", json=body) for body in (good, good)]
        asked.append(pool.submit(client.post, "/v1/tasks/a/predict", json={"inputs": [[1.0, 2.0]]}))
        asked.append(pool.submit(client.post, "/v1/tasks/a/predict", content=b"x", headers=PNG))
        until(lambda: under_way(client) == 4)
        gate.open.set()
        assert [future.result().status_code for future in asked] == [200, 200, 400, 400]


def test_a_full_queue_refuses_and_recovers(net, store, monkeypatch):
    gate = Gate(monkeypatch)
    with running(app(net, store, limits=Limits(queue=3, threads=1))) as client, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(client.post, "/v1/tasks/a/predict", content=picture(), headers=PNG) for _ in range(3)]
        until(lambda: under_way(client) == 3)
        for _ in range(20):
            response = client.post("/v1/tasks/b/predict", content=picture(), headers=PNG)
            assert (response.status_code, code_of(response)) == (503, "busy")
            assert response.headers["retry-after"] == "1"
        assert client.get("/healthz").status_code == 200
        gate.open.set()
        assert all(future.result().status_code == 200 for future in asked)
        assert client.post("/v1/tasks/b/predict", content=picture(), headers=PNG).status_code == 200


def test_a_request_has_its_time(net, store, monkeypatch):
    gate = Gate(monkeypatch)
    with running(app(net, store, limits=Limits(seconds=0.2, threads=1))) as client:
        response = client.post("/v1/tasks/a/predict", content=picture(), headers=PNG)
        assert (response.status_code, code_of(response)) == (504, "timeout")
        gate.open.set()
        until(lambda: client.post("/v1/tasks/a/predict", content=picture(), headers=PNG).status_code == 200)


def test_a_cold_task_holds_up_no_warm_one(net, store, monkeypatch):
    from spalier.tasks import switcher

    gate, real = threading.Event(), switcher.build

    def slow(task, *given, **options):
        if len(task.info.classes) == 2:
            assert gate.wait(30)
        return real(task, *given, **options)

    for name in ("cold1", "cold2", "cold3"):
        store.add(task_of(net, classes=("x", "y")), name)
    monkeypatch.setattr(switcher, "build", slow)
    with running(app(net, store, limits=Limits(threads=2))) as client, ThreadPoolExecutor(3) as pool:
        client.post("/v1/tasks/a/predict", content=picture(), headers=PNG)
        names = ("cold1", "cold2", "cold3")
        asked = [
            pool.submit(client.post, f"/v1/tasks/{name}/predict", content=picture(), headers=PNG) for name in names
        ]
        until(lambda: under_way(client) == 3)
        for _ in range(5):
            assert client.post("/v1/tasks/a/predict", content=picture(), headers=PNG).status_code == 200
        assert not any(future.done() for future in asked)
        gate.set()
        assert all(future.result().status_code == 200 for future in asked)


def test_the_cache_is_limited_in_bytes(net, store):
    one = sp.Switcher(net, store).fetch("a").bytes
    with running(app(net, store, limits=Limits(cache=2 * one))) as client:
        for name in (*NAMES, *NAMES):
            assert client.post(f"/v1/tasks/{name}/predict", content=picture(), headers=PNG).status_code == 200
        ready = [entry["name"] for entry in client.get("/v1/tasks").json()["tasks"] if entry["ready"]]
        assert ready == ["b", "c"]


def test_tasks_come_change_and_go_without_a_failed_request(net, store):
    """Under load: each answer is one of the task as it was or as it is, and its digest says which."""
    tasks = [task_of(net, seed) for seed in (0, 7)]
    digests, expected = [], {}
    for task in tasks:
        store.add(task, "a", overwrite=True)
        digests.append(store.read("a")[1])
        expected[digests[-1]] = predict(task.build(net), task.info, [picture()])
    seen, ended = [], threading.Event()
    with running(app(net, store)) as client, ThreadPoolExecutor(2) as pool:

        def ask():
            while not ended.is_set():
                seen.append(client.post("/v1/tasks/a/predict", content=picture(), headers=PNG))

        asking = [pool.submit(ask) for _ in range(2)]
        for number in range(30):
            store.add(tasks[number % 2], "a", overwrite=True)
        until(lambda: len(seen) > 20)
        ended.set()
        assert [future.result() for future in asking] == [None, None]
        for response in seen:
            assert response.status_code == 200
            assert_same(response.json()["predictions"], expected[response.json()["digest"]])
        store.add(tasks[0], "new")
        assert client.post("/v1/tasks/new/predict", content=picture(), headers=PNG).status_code == 200
        store.remove("new")
        assert client.post("/v1/tasks/new/predict", content=picture(), headers=PNG).status_code == 404
        store.remove("a")
        assert [entry["name"] for entry in client.get("/v1/tasks").json()["tasks"]] == ["b", "c"]
        assert "spalier_ready_networks 0.0" in client.get("/metrics").text


def test_a_request_is_one_line_of_log(client, caplog):
    with caplog.at_level(logging.INFO, "spalier.serve"):
        client.post("/v1/tasks/a%0Aforged/predict", content=b"x", headers=PNG)
        until(lambda: any(record.name == "spalier.serve" for record in caplog.records))  # after the answer
    (record,) = [record for record in caplog.records if record.name == "spalier.serve"]
    assert "\n" not in record.getMessage()
    assert record.request["status"] == 404
    assert json.dumps(record.request)


def test_what_fails_inside_says_nothing_of_the_code(net, store, monkeypatch, caplog):
    def broken(*given):
        raise KeyError("/secret/place")

    monkeypatch.setattr(Service, "tasks", broken)
    with running(app(net, store)) as client:
        response = client.get("/v1/tasks")
    assert (response.status_code, code_of(response)) == (500, "internal")
    assert "secret" not in response.text
    assert any(record.exc_info for record in caplog.records)


def test_texts_over_http(net, tmp_path):
    from test_predicting import text_task
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    bert = BertForSequenceClassification(
        BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=2, **sizes)
    ).eval()
    store = sp.Store(tmp_path)
    store.add(text_task(bert))

    def tokenizer(texts, **options):
        assert options == {"padding": True, "truncation": True, "max_length": 6, "return_tensors": "pt"}
        return {"input_ids": torch.tensor([[len(text) % 50, 3, 4] for text in texts])}

    with running(app(bert, store, tokenizer=tokenizer)) as client:
        assert client.get("/v1/tasks").json()["tasks"][0]["kind"] == "text"
        for response in (
            client.post("/v1/tasks/reviews/predict", json={"texts": ["a", "longer", ["a", "pair"]]}),
            client.post("/v1/tasks/reviews/predict", content="a film", headers={"content-type": "text/plain"}),
            client.post("/v1/tasks/reviews/predict", data={"text": "a film"}, files={"none": ("", b"")}),
        ):
            assert response.status_code == 200, response.text
            assert all(set(row) == {"bad", "good"} for row in response.json()["predictions"])
        assert client.post("/v1/tasks/reviews/predict", content=picture(), headers=PNG).status_code == 400
