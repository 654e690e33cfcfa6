"""The service on a real Ray: tasks find their replica, and one that is killed takes no request with it."""

import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import httpx2
import pytest
from served import PNG, base, code_of, picture, store_of

from spalier.predicting import predict
from spalier.serve import Limits, deployment

TESTS = Path(__file__).resolve().parents[1]
NAMES = tuple("abcdef")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two replicas over one store, and a client."""
    import ray
    from ray import serve

    places = [TESTS, TESTS / "serve", TESTS.parent / "src"]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}
    # a busy machine is no reason for Ray to give its own processes up
    environment |= {f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S": "120" for check in ("READY", "HEALTH")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        net = base()
        store = store_of(net, tmp_path_factory.mktemp("cluster"), NAMES)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        made = deployment(base, store.folder, replicas=2, limits=Limits(threads=1), ray_actor_options={"num_cpus": 0.1})
        serve.run(made)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client, net, store
        serve.shutdown()
        ray.shutdown()


def ask(client, name):
    return client.post(f"/v1/tasks/{name}/predict", content=picture(), headers=PNG)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tasks_find_the_replica_that_has_them_and_survive_its_death(cluster):
    import ray

    client, net, store = cluster
    expected = {}
    for name in NAMES:
        task = store.load(name)
        (expected[name],) = predict(task.build(net), task.info, [picture()])

    def is_right(name, response):
        (found,) = response.json()["predictions"]
        return found == pytest.approx(expected[name], abs=1e-5)

    # every form of answer is that of one process
    assert len(client.get("/v1/tasks").json()["tasks"]) == len(NAMES)
    assert (ask(client, "none").status_code, code_of(ask(client, "none"))) == (404, "unknown-task")
    assert code_of(client.post("/v1/tasks/a/predict", content=b"x", headers=PNG)) == "input"
    (store.folder / "broken.task.safetensors").write_bytes(b"garbage")
    assert (ask(client, "broken").status_code, code_of(ask(client, "broken"))) == (422, "truncated")

    # once the router has heard where a task is, nearly all its requests go there
    for name in NAMES:
        assert is_right(name, ask(client, name))
    time.sleep(2)
    homes = {name: Counter(ask(client, name).json()["replica"] for _ in range(10)) for name in NAMES}
    assert sum(max(home.values()) for home in homes.values()) >= 0.9 * 10 * len(NAMES)

    # one is killed under load
    seen, ended = [], threading.Event()

    def load(name):
        with httpx2.Client(base_url=client.base_url, timeout=60) as own:
            while not ended.is_set():
                seen.append((name, ask(own, name)))

    threads = [threading.Thread(target=load, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    try:
        while len(seen) < 30:
            time.sleep(0.05)
        victim = homes["a"].most_common(1)[0][0]
        named = ray.util.list_named_actors(all_namespaces=True)
        actor = next(entry for entry in named if entry["name"].endswith(f"#{victim}"))
        ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
        before = len(seen)
        while len(seen) < before + 150:
            time.sleep(0.05)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    statuses = Counter(response.status_code for _, response in seen)
    assert set(statuses) <= {200, 503}
    assert statuses[503] <= 0.05 * len(seen)
    assert all(is_right(name, response) for name, response in seen if response.status_code == 200)
    after = {response.json()["replica"] for _, response in seen[-30:] if response.status_code == 200}
    assert victim not in after
