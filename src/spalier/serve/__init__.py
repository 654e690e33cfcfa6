"""Serve the tasks of a store over HTTP, from one process or from a cluster; needs ``spalier[serve]``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from spalier.predicting import Tokenizer
from spalier.serve.service import Limits
from spalier.tasks import Store
from spalier.text import import_optional

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Limits", "app", "deployment"]


def app(
    base: nn.Module,
    store: Store | str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    token: str | None = None,
    limits: Limits | None = None,
    fold: bool = False,
) -> FastAPI:
    """An ASGI application that answers for every task of a store: run it with uvicorn, or mount it in another.

    Args:
        base: the frozen network. It is only read, and must not be changed.
        store: a `Store`, or its folder. Tasks may come, go and be replaced while the service runs.
        tokenizer: for tasks that read texts; called as those of transformers are.
        token: what requests have to bring as ``Authorization: Bearer TOKEN``; None lets everyone in.
        limits: sizes, times and memory, which are all bounded.
        fold: fold batch norms, as in `Task.build`.

    >>> import tempfile
    >>> import spalier as sp
    >>> made = app(sp.models.resnet8(classes=2), tempfile.mkdtemp(), limits=Limits(batch=8))
    >>> "/v1/tasks/{name}/predict" in made.openapi()["paths"]
    True
    """
    for library in ("fastapi", "prometheus_client", "python_multipart", "PIL.Image"):
        import_optional(library, "serving")
    from spalier.serve.service import Service
    from spalier.serve.web import make_app

    return make_app(Service(base, store, tokenizer=tokenizer, limits=limits, fold=fold), token)


def deployment(
    base: nn.Module | Callable[[], nn.Module],
    store: str | os.PathLike[str],
    *,
    replicas: int = 1,
    tokenizer: Tokenizer | None = None,
    token: str | None = None,
    limits: Limits | None = None,
    fold: bool = False,
    **options: Any,
) -> Any:
    """The same as an application of Ray Serve, for ``serve.run`` or a graph of your own.

    Requests go to a replica that has their task's network ready, where there is one. A replica that dies takes no
    request with it: each is sent again to another, a few times at most. Needs ``spalier[serve,ray]``.

    Args:
        base: the frozen network, or a function that makes it, which every replica calls.
        store: a folder that every replica can read, or ``hub:OWNER/NAME``, which every replica pulls.
        replicas: how many processes hold the base.
        tokenizer: as in `app`.
        token: as in `app`.
        limits: as in `app`; those of networks and batches are each replica's.
        fold: as in `app`.
        options: of ``ray.serve.deployment`` for the replicas, such as ``ray_actor_options``.
    """
    for library in ("ray.serve", "fastapi", "prometheus_client", "python_multipart", "PIL.Image"):
        import_optional(library, "serving on a cluster")
    from spalier.serve.cluster import make_deployment

    return make_deployment(
        base, str(store), token, limits or Limits(), {"tokenizer": tokenizer, "fold": fold}, replicas, options
    )
