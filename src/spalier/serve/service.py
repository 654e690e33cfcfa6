"""The service itself, without HTTP: batches by task, networks under a limit of bytes, and bounds on everything.

An event loop takes requests in; two pools of threads work. One builds cold networks, one runs batches, so that a cold
task never holds up a warm one. Whoever runs a batch takes all that waits for its task then. At most as many networks as
there are threads are held beside the cache.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import io
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier import files
from spalier.errors import ConfigError, DataError, RequestError, SpalierError, TaskFileError
from spalier.predicting import Raw, Sample, Tokenizer, collate, named, probabilities, to_sample
from spalier.tasks import Store, Switcher
from spalier.tasks.switcher import ReadyNetwork
from spalier.text import check_integer, import_optional


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a service takes on at most.

    >>> Limits(batch=8).batch
    8
    """

    batch: int = 32
    """How many inputs run together."""
    wait: float = 0.0
    """Seconds that a batch waits for others to join; those that wait anyway join without it."""
    inputs: int = 32
    """How many inputs a request may have."""
    queue: int = 128
    """How many requests may be under way; others are refused."""
    seconds: float = 30.0
    """How long a request may take."""
    body: int = 8 * 2**20
    """The bytes of a request."""
    pixels: int = 25_000_000
    """The pixels of an image."""
    cache: int | None = 2**30
    """The bytes of ready networks beside the base; None for no limit."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """How many batches run at once."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("wait", "seconds"):
                if not isinstance(value, int | float) or not 0 <= value < 1e6:
                    raise ConfigError(f"{name} is {value!r}, expected seconds")
            elif not (name == "cache" and value is None):
                check_integer(name, value, 0 if name == "cache" else 1)


@contextlib.asynccontextmanager
async def in_time(seconds: float) -> AsyncIterator[None]:
    """A limited time for a request."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise RequestError("timeout", f"it took longer than {seconds:g} seconds") from None


@dataclass(eq=False)
class _Job:
    """A request that waits for its batch."""

    inputs: Sequence[Raw]
    top: int
    done: asyncio.Future[dict[str, Any]]


class Service:
    """Answers requests for the tasks of a store from one base; all calls belong to one event loop."""

    def __init__(
        self,
        base: nn.Module,
        store: Store | str | os.PathLike[str],
        *,
        tokenizer: Tokenizer | None = None,
        limits: Limits | None = None,
        fold: bool = False,
    ) -> None:
        self.limits, self.tokenizer = limits or Limits(), tokenizer
        self.switcher = Switcher(base, open_store(store), limit=self.limits.cache, fold=fold, digests=True)
        self.under_way = 0
        self.seen: Callable[[str, float], None] = lambda what, value: None
        """Told of what is done: the inputs of each "batch", the seconds of each "build"."""
        self._waiting: dict[str, deque[_Job]] = {}
        self._drains: set[asyncio.Task[None]] = set()
        self._listed: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {}
        self._listing = asyncio.Lock()
        self._speed: dict[str, float] = {}
        count = self.limits.threads
        self._builders, self._runners = (ThreadPoolExecutor(count, f"spalier-{name}") for name in ("build", "run"))
        self._build_slots, self._run_slots = asyncio.Semaphore(count), asyncio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """A place among the requests that are under way, for a limited time."""
        if self.under_way >= self.limits.queue:
            raise RequestError("busy", f"{self.under_way} requests are under way; try again in a second")
        self.under_way += 1
        try:
            async with in_time(self.limits.seconds):
                yield
        finally:
            self.under_way -= 1

    async def predict(self, name: str, content_type: str, body: bytes, top: int) -> dict[str, Any]:
        """What a task says of the inputs in a body."""
        start = time.perf_counter()
        self._check_known(name)
        given = content_type, body, self.limits.inputs
        # a large body takes a while to look through
        inputs = await asyncio.to_thread(parse_body, *given) if len(body) > 2**17 else parse_body(*given)
        job = _Job(inputs, top, asyncio.get_running_loop().create_future())
        if name not in self._waiting:
            self._waiting[name] = deque()
            drain = asyncio.create_task(self._drain(name))
            self._drains.add(drain)  # a task that nobody holds may be collected
            drain.add_done_callback(self._drains.discard)
        self._waiting[name].append(job)
        found = await job.done
        return {"task": name, **found, "milliseconds": round(1000 * (time.perf_counter() - start), 3)}

    def _check_known(self, name: str) -> None:
        """Strangers may ask for any name: nothing is kept of one that is not there."""
        try:
            files.stamp(self.switcher.store.path(name))
        except (OSError, TaskFileError):
            raise RequestError("unknown-task", "there is no such task; GET /v1/tasks lists them") from None

    async def _drain(self, name: str) -> None:
        """Run what waits for a task, batch after batch, until nothing does."""
        queue = self._waiting[name]
        try:
            while queue:
                if self.limits.wait and sum(len(job.inputs) for job in queue) < self.limits.batch:
                    await asyncio.sleep(self.limits.wait)
                await self._batch(name, queue)
        finally:
            del self._waiting[name]

    async def _batch(self, name: str, queue: deque[_Job]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._run_slots:
                ready = self.switcher.look(name)
                if ready is not None:
                    return self._settle(name, await loop.run_in_executor(self._runners, self._run, ready, queue))
            async with self._build_slots:
                start = time.perf_counter()
                ready = await loop.run_in_executor(self._builders, self.switcher.fetch, name)
                self.seen("build", time.perf_counter() - start)
                async with self._run_slots:
                    self._settle(name, await loop.run_in_executor(self._runners, self._run, ready, queue))
        except Exception as error:  # everyone who waits hears of it, and the next request begins anew
            self._settle(name, [(job, error) for job in _take(queue, len(queue))])

    def _settle(self, name: str, outcomes: list[tuple[_Job, dict[str, Any] | Exception]]) -> None:
        for job, outcome in outcomes:
            if job.done.done():  # its client has gone, or its time is over
                continue
            if isinstance(outcome, Exception):
                job.done.set_exception(outcome)
            else:
                self._speed[name] = outcome["run_milliseconds"] / outcome["batch"]
                job.done.set_result(outcome)

    # in a thread

    def _run(self, ready: ReadyNetwork, queue: deque[_Job]) -> list[tuple[_Job, dict[str, Any] | Exception]]:
        """Run what waits as one batch; an input that cannot be used fails its own request alone."""
        jobs = [job for job in _take(queue, self.limits.batch) if not job.done.done()]
        outcomes: list[tuple[_Job, dict[str, Any] | Exception]] = []
        groups: dict[Any, list[tuple[_Job, list[Sample]]]] = {}
        for job in jobs:
            try:
                samples = [to_sample(ready.info, raw, pixels=self.limits.pixels) for raw in job.inputs]
                kind = {None if isinstance(s, str | tuple) else (type(s), s.shape) for s in samples}
                if len(kind) > 1:
                    raise DataError("the inputs of a request differ in kind or shape; send several requests")
                groups.setdefault(kind.pop(), []).append((job, samples))
            except Exception as error:
                outcomes.append((job, error))
        for group in groups.values():
            outcomes += self._run_group(ready, group)
        return outcomes

    def _run_group(
        self, ready: ReadyNetwork, group: list[tuple[_Job, list[Sample]]]
    ) -> list[tuple[_Job, dict[str, Any] | Exception]]:
        start = time.perf_counter()
        try:
            batch = collate(ready.info, [sample for _, samples in group for sample in samples], self.tokenizer)
            found = probabilities(ready.net, batch)
        except Exception as error:
            if len(group) > 1:  # whoever's input it is, the others are answered
                return [outcome for one in group for outcome in self._run_group(ready, [one])]
            return [(group[0][0], error if isinstance(error, SpalierError) else _unusable(error))]
        spent = round(1000 * (time.perf_counter() - start), 3)
        self.seen("batch", len(found))
        said = {"digest": ready.digest, "batch": len(found), "run_milliseconds": spent}
        rows = iter(found.split([len(samples) for _, samples in group]))
        return [(job, self._answer(ready, next(rows), job.top, said)) for job, _ in group]

    def _answer(self, ready: ReadyNetwork, rows: Tensor, top: int, said: dict[str, Any]) -> dict[str, Any] | Exception:
        if not bool(torch.isfinite(rows).all()):
            return DataError("the network's outputs for this input are not finite")
        return {"predictions": named(ready.info, rows, top), **said}

    # the tasks

    async def tasks(self) -> list[dict[str, Any]]:
        """Every task of the store: what it costs, how good it is, and what is wrong with it, if something is."""
        async with self._listing:
            found = await asyncio.get_running_loop().run_in_executor(self._builders, self._list)
        ready = set(self.switcher.ready)
        return [
            {**entry, "ready": entry["name"] in ready, "milliseconds": self._speed.get(entry["name"])}
            for entry in found
        ]

    def _list(self) -> list[dict[str, Any]]:
        """Files that were not changed are not read again; what is gone from the store is forgotten."""
        store, known = self.switcher.store, self._listed
        self._listed = {}
        for name in store:
            with contextlib.suppress(OSError, TaskFileError):  # it has just gone
                stamp = files.stamp(store.path(name))
                before = known.get(name)
                self._listed[name] = (
                    before if before and before[0] == stamp else (stamp, _described(store, name, stamp[2]))
                )
        for name in {*self.switcher.ready, *self._speed} - set(self._listed):
            self._speed.pop(name, None)
            with contextlib.suppress(TaskFileError, OSError):
                self.switcher.look(name)  # which drops a network without a file
        return [entry for _, entry in self._listed.values()]


def _take(queue: deque[_Job], most: int) -> list[_Job]:
    """The next requests, of so many inputs together, and one at least."""
    taken: list[_Job] = []
    while queue and (not taken or sum(len(job.inputs) for job in (*taken, queue[0])) <= most):
        taken.append(queue.popleft())
    return taken


def _unusable(error: Exception) -> DataError:
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return DataError("the input is too large for the network; send fewer or smaller ones")
    return DataError("the network cannot take the input; GET /v1/tasks says what each task expects")


def _described(store: Store, name: str, size: int) -> dict[str, Any]:
    try:
        task, digest = store.read(name)
    except TaskFileError as error:
        return {"name": name, "bytes": size, "error": error.code}
    info = task.info
    density = {key: pair[0] / pair[1] for key, pair in asdict(info.density).items() if pair}
    kind = "text" if info.preprocessing.get("kind") == "text" else "image"
    said = {"learned": info.learned, "density": density, "metrics": info.metrics, "classes": list(info.classes)}
    return {"name": name, "bytes": size, "digest": digest, "kind": kind, **said, "error": None}


def open_store(place: Store | str | os.PathLike[str]) -> Store:
    """A store, its folder, or ``hub:OWNER/NAME``: all tasks of a repository, pulled into a folder of this process."""
    if not isinstance(place, str) or not place.startswith("hub:"):
        return place if isinstance(place, Store) else Store(place)
    from spalier.tasks.hub import names_in

    repository = place.removeprefix("hub:")
    store = Store(tempfile.mkdtemp(prefix="spalier-"))
    for name in names_in(repository):
        store.pull(repository, name)
    return store


# bodies


def parse_body(content_type: str, body: bytes, most: int) -> list[Raw]:
    """The inputs in a request's body, one at least and no more than allowed.

    >>> parse_body("application/json", b'{"text": "good"}', 8)
    ['good']
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        found = _from_json(body)
    elif kind == "multipart/form-data":
        found = _from_form(content_type, body)
    elif kind == "text/plain":
        found = [_text(body)]
    elif kind.startswith("image/") or kind in ("application/octet-stream", "application/x-npy"):
        found = _from_file(body)
    else:
        raise RequestError(
            "content-type", f"the body is {kind[:80]!a}, expected an image, a form, JSON, .npy or plain text"
        )
    if not 1 <= len(found) <= most:
        raise RequestError(
            "too-large" if found else "body", f"the request has {len(found)} inputs, expected 1 to {most}"
        )
    return found


def _from_json(body: bytes) -> list[Raw]:
    try:
        said = json.loads(body)
        ((key, value),) = said.items()
        several = [value] if key in ("image", "text") else list(value)
    except (ValueError, TypeError, AttributeError, RecursionError):
        several, key = [], ""
    if key in ("image", "images") and all(isinstance(one, str) for one in several):
        try:
            # what browsers make of a file begins with its kind and a comma
            return [base64.b64decode(one.partition(",")[2] or one, validate=True) for one in several]
        except (binascii.Error, ValueError):
            raise RequestError("body", "an image is not base64") from None
    if key in ("text", "texts") and all(_is_text(one) for one in several):
        return [one if isinstance(one, str) else tuple(one) for one in several]
    if key == "inputs":
        with contextlib.suppress(ValueError, TypeError, RecursionError, OverflowError):
            return list(torch.from_numpy(np.array(several, np.float32)).unbind())
        raise RequestError("body", "inputs is no tensor: lists of numbers in lists, all of one length")
    raise RequestError("body", "the JSON is none of {image}, {images}, {text}, {texts} and {inputs}")


def _is_text(value: object) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) for one in value)
    return isinstance(value, str) or is_pair


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise RequestError("body", "the text is not UTF-8") from None


def _from_form(content_type: str, body: bytes) -> list[Raw]:
    forms = import_optional("python_multipart.multipart", "forms")
    found: list[Raw] = []

    def on_file(file: Any) -> None:
        file.file_object.seek(0)
        found.extend(_from_file(file.file_object.read()))
        file.close()

    def on_field(field: Any) -> None:
        found.append(_text(field.value or b""))

    try:
        # all of it is in memory already, so none has to go to a disk
        sizes = {"MAX_MEMORY_FILE_SIZE": len(body) + 1, "MAX_BODY_SIZE": len(body) + 1}
        parser = forms.create_form_parser({"Content-Type": content_type.encode()}, on_field, on_file, config=sizes)
        parser.write(body)
        parser.finalize()
    except ValueError:  # its own errors are ValueErrors
        raise RequestError("body", "the form is cut off, or not what its content type says") from None
    return found


def _from_file(data: bytes) -> list[Raw]:
    """An image as it is, or the samples of an array."""
    return list(_from_npy(data).unbind()) if data.startswith(b"\x93NUMPY") else [data]


def _from_npy(data: bytes) -> Tensor:
    """An array, whose header is believed only where as many bytes follow."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, by_columns, dtype = readers[version](file)
        if dtype.kind not in "fiu" or not shape or shape[0] == 0:
            raise ValueError("no numbers")
        found = np.frombuffer(data, dtype, offset=file.tell())
        return torch.from_numpy(found.reshape(shape, order="F" if by_columns else "C").astype(np.float32))
    except (ValueError, KeyError, TypeError, OverflowError, EOFError, SyntaxError):
        raise RequestError("body", "the .npy file is cut off, or holds no numbers") from None
