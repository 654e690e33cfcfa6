"""The service on Ray Serve: a light ingress that speaks HTTP, and replicas that hold the base and its networks.

Ray's multiplexing sends a request to a replica that has seen its task. How many networks a replica keeps is decided by
their bytes, in its `Switcher`; what Ray keeps is the names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import ray
import torch
from ray import serve
from torch import nn

from spalier.errors import DataError, RequestError, SpalierError, TaskFileError
from spalier.serve.service import Limits, Service, in_time

TRIES = 4
"""How often a request is sent at most: replicas may die one after the other."""
NAMES = 10_000
"""How many tasks a replica tells the router of."""
_KINDS: dict[str, type[SpalierError]] = {kind.__name__: kind for kind in (DataError, RequestError, TaskFileError)}


class Replica:
    """One process with the base."""

    def __init__(self, base: nn.Module | Callable[[], nn.Module], store: str, limits: Limits, options: Any) -> None:
        torch.set_num_threads(1)
        net = base if isinstance(base, nn.Module) else base()
        self.service = Service(net, store, limits=limits, **options)

    @serve.multiplexed(max_num_models_per_replica=NAMES)  # type: ignore[untyped-decorator]
    async def claim(self, name: str) -> str:
        """Tell the router that this replica has the task; its network is built, and dropped, by the service."""
        return name

    async def predict(self, name: str, content_type: str, body: bytes, top: int) -> tuple[str, Any]:
        """An answer, or the kind of an error and what it is made of: Ray would wrap it in one of its own."""
        try:
            async with self.service.admitted():
                found = await self.service.predict(name, content_type, body, top)
        except tuple(_KINDS.values()) as error:
            return type(error).__name__, error.args
        await self.claim(name)  # not before: names that are not there are not told
        return "", {**found, "replica": serve.get_replica_context().replica_id.unique_id}

    async def tasks(self) -> list[dict[str, Any]]:
        """Every task of the store."""
        return await self.service.tasks()


class Remote:
    """Replicas, as the routes see whoever answers."""

    def __init__(self, handle: Any, limits: Limits) -> None:
        self.handle, self.limits = handle, limits

    def admitted(self) -> AbstractAsyncContextManager[None]:
        """A limited time; how many requests are under way is each replica's own bound."""
        return in_time(self.limits.seconds)

    async def predict(self, name: str, content_type: str, body: bytes, top: int) -> dict[str, Any]:
        """What a task says of the inputs in a body."""
        handle = self.handle.options(multiplexed_model_id=name)
        kind, found = await self._sent(lambda: handle.predict.remote(name, content_type, body, top))
        if kind:
            raise _KINDS[kind](*found)
        return found  # type: ignore[no-any-return]

    async def tasks(self) -> list[dict[str, Any]]:
        """Every task of the store."""
        return await self._sent(lambda: self.handle.tasks.remote())  # type: ignore[no-any-return]

    async def _sent(self, send: Callable[[], Any]) -> Any:
        """Send a request, and again where the replica dies that had it: predicting twice changes nothing."""
        for attempt in range(TRIES):
            try:
                return await send()
            except ray.exceptions.RayActorError:
                await asyncio.sleep(0.05 * 2**attempt)
            except ray.serve.exceptions.BackPressureError:
                break
        raise RequestError("busy", "no replica could answer; try again in a second")


def make_deployment(
    base: nn.Module | Callable[[], nn.Module],
    store: str,
    token: str | None,
    limits: Limits,
    service: dict[str, Any],
    replicas: int,
    options: dict[str, Any],
) -> Any:
    """The ingress in front of its replicas."""
    # what waits for a replica is bounded too
    ongoing = {"max_ongoing_requests": limits.queue, "max_queued_requests": limits.queue, "num_replicas": replicas}
    workers = serve.deployment(Replica, name="Replica").options(**ongoing | options).bind(base, store, limits, service)

    def build() -> Any:
        from spalier.serve.web import make_app

        return make_app(Remote(serve.get_deployment_handle("Replica"), limits), token)

    ingress = serve.deployment(serve.ingress(build)(), name="Ingress")
    most = limits.queue * (replicas + 1)
    return ingress.options(max_ongoing_requests=most, max_queued_requests=most).bind(workers)
