"""A service: several tasks on one base, asked over HTTP.

    python examples/serve.py           # needs spalier[cli,serve]

It writes handwritten digits as image files, learns two tasks from them (which digit it is; odd or even), puts both into
a store, serves the store, asks for each test image, and stops the server. `spalier serve FOLDER --base resnet20` serves
a store from the command line.
"""

import json
import threading
import time
import urllib.request
from pathlib import Path

import uvicorn
from PIL import Image
from sklearn.datasets import load_digits

import spalier as sp
from spalier.networks import open_network
from spalier.serve import app

digits = load_digits()
for number, (pixels, digit) in enumerate(zip(digits.images[:500], digits.target[:500], strict=True)):
    split = "test" if number % 5 == 0 else "train"
    for task, kind in (("digit", str(digit)), ("parity", "odd" if digit % 2 else "even")):
        file = Path("images", task, split, kind, f"{number}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).save(file)

store = sp.Store("store")
for name in ("digit", "parity"):
    task = sp.adapt("resnet20", f"folder:images/{name}", target=0.6, epochs=6, epochs_per_prune=2, refit_epochs=1)
    store.add(task, name)
print(store.list())

base = open_network("resnet20", pretrained=True)  # once, for all tasks
server = uvicorn.Server(uvicorn.Config(app(base, store), port=0, log_level="warning"))  # port 0 is any that is free
thread = threading.Thread(target=server.run)
thread.start()
while not server.started:
    time.sleep(0.01)
address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def ask(task: str, image: bytes) -> str:
    """The likeliest class."""
    request = urllib.request.Request(f"{address}/v1/tasks/{task}/predict?top=1", image, {"Content-Type": "image/png"})
    with urllib.request.urlopen(request) as answer:
        return next(iter(json.load(answer)["predictions"][0]))


try:
    images = sorted(Path("images/digit/test").glob("*/*.png"))
    answers = [(ask("digit", file.read_bytes()), ask("parity", file.read_bytes())) for file in images]
finally:
    server.should_exit = True  # it ends what is under way
    thread.join()

print(f"{images[0]}: the tasks say {' and '.join(answers[0])}")
right = sum(digit == file.parent.name for (digit, _), file in zip(answers, images, strict=True)) / len(images)
agree = sum((parity == "odd") == bool(int(digit) % 2) for digit, parity in answers) / len(images)
print(f"both tasks agree on {agree:.1%} of {len(images)} images")
print(f"{right:.1%} right, chance 10.0%")
