"""`spalier predict` and `spalier serve`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spalier.cli.console import Console, Texts, command
from spalier.cli.opening import SUFFIX, base_options, load_task, one_file, open_base, run_beside, run_in, tokenizer_of
from spalier.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from spalier.predicting import Tokenizer
    from spalier.serve import Limits

LOG = logging.getLogger("spalier.serve")


@command()
@click.argument("task", metavar="TASK")
@click.argument("inputs", nargs=-1, required=True, metavar="IMAGE|TEXT...")
@base_options
@click.option("--top", type=click.IntRange(1), default=3, help="How many classes to show of each.")
def predict(console: Console, task: str, inputs: Texts, base: str | None, top: int, **network: Any) -> None:
    """What a task says of images or texts: classes with their probabilities.

    Images are prepared as the task's run prepared them.

    Examples:
        spalier predict runs/mine/tasks/mine-30.task.safetensors cat.jpg dog.jpg
        spalier predict reviews.task.safetensors --base hf:bert-base-uncased "What a film."
    """
    from spalier import predicting
    from spalier.text import printable, table

    file = one_file(task)
    found = load_task(file)
    where = base or run_beside(file)
    net = open_base(where, **network)
    reads = predicting.is_text(found.info)
    raws: list[Any] = list(inputs) if reads else [Path(name) for name in inputs]
    tokenizer = tokenizer_of(where, net) if reads else None
    rows = predicting.predict(found.build(net, share=True), found.info, raws, tokenizer=tokenizer, top=top)
    cells = [
        [printable(name) if place == 0 else "", printable(label), f"{share:.1%}"]
        for name, row in zip(inputs, rows, strict=True)
        for place, (label, share) in enumerate(row.items())
    ]
    said = [{"input": name, "classes": row} for name, row in zip(inputs, rows, strict=True)]
    console.show(table(["text" if reads else "image", "class", "probability"], cells), {"predictions": said})


# serve


@command()
@click.argument("store")
@base_options
@click.option("--host", default="127.0.0.1", help="Where to listen; 0.0.0.0 for everyone.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 for any that is free.")
@click.option("--token", envvar="SPALIER_TOKEN", help="What requests have to bring; better in SPALIER_TOKEN.")
@click.option("--batch", type=click.IntRange(1), default=32, help="How many inputs run together.")
@click.option("--wait", type=click.FloatRange(0), default=0.0, help="Milliseconds that a batch waits for more.")
@click.option("--queue", type=click.IntRange(1), default=128, help="How many requests may be under way.")
@click.option("--timeout", type=click.FloatRange(0.1), default=30.0, help="Seconds that a request may take.")
@click.option("--body", type=click.IntRange(1), default=8, help="MB that a request may have.")
@click.option("--pixels", type=click.IntRange(1), default=25, help="Millions of pixels that an image may have.")
@click.option("--cache", type=click.IntRange(0), default=1024, help="MB of ready networks beside the base.")
@click.option("--threads", type=click.IntRange(1), help="How many batches run at once; by default all cores.")
@click.option("--fold", is_flag=True, help="Fold batch norms.")
@click.option("--ray", is_flag=True, help="On a Ray cluster, or a local one where there is none.")
@click.option("--replicas", type=click.IntRange(1), default=1, help="With --ray: how many processes hold the base.")
def serve(console: Console, store: str, base: str | None, **options: Any) -> None:
    """Answer requests for all tasks of a STORE from one base, over HTTP, until it is stopped.

    STORE is a folder of task files, a run, or hub:OWNER/NAME, which is pulled. Tasks may come, go and be replaced
    meanwhile. There is a page at /, and the interface is described at /docs. Each request is a line of log; with
    --json that is a JSON document. SIGTERM ends what is under way first.

    Examples:
        spalier serve runs/digits
        spalier serve tasks --base resnet50 --weights w.pth --host 0.0.0.0 --cache 4096
        spalier serve tasks --base my_package:make --ray --replicas 4
    """
    network = {name: options.pop(name) for name in ("weights", "pretrained", "classes", "options")}
    place = Path(store) / "tasks" if run_in(Path(store)) is not None else Path(store)
    if not store.startswith("hub:") and not place.is_dir():
        raise click.BadParameter(f"there is no folder {store}; expected a store, a run or hub:OWNER/NAME.")
    where = base or run_beside(place / f"any{SUFFIX}")
    source = store if store.startswith("hub:") else str(place.absolute())
    log_requests(as_json=console.as_json, quiet=console.quiet)
    if options.pop("ray"):
        return serve_on_ray(source, where, network, options)
    options.pop("replicas")
    net = open_base(where, **network)
    return serve_here(net, source, tokenizer_of(where, net), **options)


def limits_of(options: dict[str, Any]) -> Limits:
    """The limits that options name, each in its unit."""
    from spalier.serve import Limits

    sizes = {"body": 2**20 * options["body"], "cache": 2**20 * options["cache"], "pixels": 10**6 * options["pixels"]}
    times = {"wait": options["wait"] / 1000, "seconds": options["timeout"]}
    threads = {} if options["threads"] is None else {"threads": options["threads"]}
    return Limits(batch=options["batch"], queue=options["queue"], **sizes, **times, **threads)


def serve_here(
    net: nn.Module,
    store: str,
    tokenizer: Tokenizer | None,
    host: str,
    port: int,
    token: str | None,
    fold: bool = False,
    show: bool = False,
    **options: Any,
) -> None:
    """Serve in this process until a signal ends it."""
    import torch

    from spalier import serve as service
    from spalier.text import import_optional

    uvicorn = import_optional("uvicorn", "serving")
    limits = limits_of(options) if options else service.Limits()
    app = service.app(net, store, tokenizer=tokenizer, token=token, limits=limits, fold=fold)
    torch.set_num_threads(1)  # batches run beside each other instead
    with contextlib.closing(_listen(host, port)) as listening:
        address = f"http://{host}:{listening.getsockname()[1]}/"
        LOG.info("%s is served at %s (page), %sdocs (interface); Ctrl-C ends it", store, address, address)
        if show and sys.stdout.isatty():
            click.launch(address)
        logs = {"log_config": None, "access_log": False, "server_header": False}
        most = {"limit_concurrency": 16 * limits.queue, "timeout_graceful_shutdown": int(limits.seconds) + 1}
        uvicorn.Server(uvicorn.Config(app, **logs, **most)).run([listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened at: {os.strerror(error.errno or 0)}; pass another --host or --port"
        ) from error


def serve_on_ray(store: str, base: str, network: dict[str, Any], options: dict[str, Any]) -> None:
    """Serve on a cluster until a signal ends it."""
    from spalier import serve as service
    from spalier.text import import_optional

    application = service.deployment(
        partial(open_base, base, **network),
        store,
        tokenizer=tokenizer_of(base, open_base(base, **network)),
        **{name: options[name] for name in ("replicas", "token", "fold")},
        limits=limits_of(options),
    )
    ray_serve = import_optional("ray.serve", "serving on a cluster")
    ray_serve.start(http_options={"host": options["host"], "port": options["port"]})
    LOG.info("%s is served at http://%s:%d/; Ctrl-C ends it", store, options["host"], options["port"])
    ray_serve.run(application, blocking=True)


def log_requests(*, as_json: bool, quiet: bool) -> None:
    """One line a request to standard error; a full disk there costs lines, never requests."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(as_json))
    LOG.handlers, LOG.propagate = [handler], False
    LOG.setLevel(logging.ERROR if quiet else logging.INFO)
    logging.raiseExceptions = False


class _Lines(logging.Formatter):
    """A record in one line, as text or as JSON."""

    def __init__(self, as_json: bool) -> None:
        super().__init__("%(asctime)s %(message)s")
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        if not self._as_json:
            return super().format(record)
        said = getattr(record, "request", {"message": record.getMessage()})
        found = {"time": self.formatTime(record), "level": record.levelname, **said}
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)
