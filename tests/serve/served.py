"""A real uvicorn on the loopback, and the small stores that it serves."""

import asyncio
import contextlib
import copy
import io
import threading
import time
from functools import cache

import httpx2
import numpy as np
import torch
import uvicorn
from PIL import Image
from support import awaken_, tiny_cnn

import spalier as sp

SIZE = 16
PREPROCESSING = {"size": SIZE, "stored": 18, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
CLASSES = ("cat", "dog", "newt")
JSON = {"content-type": "application/json"}
PNG = {"content-type": "image/png"}


def base():
    torch.manual_seed(0)
    return tiny_cnn().eval()


@cache
def _attached():
    """Tracing takes a second; every task is a copy of this."""
    net = base()
    sp.attach_(net, sp.SPLoRA(rank=2), head="8", example=torch.zeros(2, 3, SIZE, SIZE))
    return net


def task_of(net, seed=0, **said):
    """A task of a network as `base` makes it; it has learned something, which seeds tell apart."""
    torch.manual_seed(seed)
    adapted = copy.deepcopy(_attached())
    if not torch.equal(adapted[0].weight, net[0].weight):  # a base of other values
        adapted = copy.deepcopy(net)
        sp.attach_(adapted, sp.SPLoRA(rank=2), head="8", example=torch.zeros(2, 3, SIZE, SIZE))
    with torch.no_grad():
        adapted[8].bias.copy_(2 * torch.randn(3))
    known = {"classes": CLASSES, "preprocessing": PREPROCESSING, "metrics": {"accuracy": 0.9}}
    return sp.Task.of(awaken_(adapted), "a", **known | said)


def store_of(net, folder, names=("a", "b", "c")):
    store = sp.Store(folder)
    for seed, name in enumerate(names):
        store.add(task_of(net, seed), name)
    return store


def picture(seed=0, size=(40, 30), kind="PNG"):
    """The contents of an image file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@contextlib.contextmanager
def running(app, **options):
    """A server in a thread, and a client for it."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def code_of(response):
    return response.json()["error"]["code"]
