"""The service over HTTP: routes, the token, security headers, metrics, one line of log for a request, and the page."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from importlib.resources import files as package_files
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import spalier
from spalier.errors import TASK_FILE_CODES, DataError, RequestError, SpalierError, TaskFileError
from spalier.serve.service import Limits, Service
from spalier.text import clean

LOG = logging.getLogger("spalier.serve")
STATUS = {"token": 401, "unknown-task": 404, "body": 400, "content-type": 415, "too-large": 413, "busy": 503}
STATUS["timeout"] = 504
"""Of each code of `RequestError`."""
OPEN = re.compile(r"/(healthz|docs|openapi\.json)?$")
"""What needs no token: nothing there tells of tasks."""
_GONE = 499  # as nginx logs a client that has gone

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Backend(Protocol):
    """Whoever answers: this process, or replicas elsewhere."""

    limits: Limits

    def admitted(self) -> Any:
        """A place among the requests that are under way."""

    async def predict(self, name: str, content_type: str, body: bytes, top: int) -> dict[str, Any]:
        """What a task says of the inputs in a body."""

    async def tasks(self) -> list[dict[str, Any]]:
        """Every task of the store."""


class Metrics:
    """What Prometheus reads. No metric has a task's name: there may be a great many of them."""

    def __init__(self, backend: Backend) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("spalier_requests", "Requests by status", ["status"], **own)
        self.seconds = Histogram("spalier_request_seconds", "Seconds of predictions", **own)
        sizes = (1, 2, 4, 8, 16, 32, 64, float("inf"))
        self.batch = Histogram("spalier_batch_inputs", "Inputs that ran together", buckets=sizes, **own)
        self.build = Histogram("spalier_build_seconds", "Seconds from a file to a ready network", **own)
        if isinstance(backend, Service):
            backend.seen = lambda what, value: (self.batch if what == "batch" else self.build).observe(value)
            switcher = backend.switcher
            for name, help_text, value in (
                ("spalier_under_way", "Requests that are under way", lambda: backend.under_way),
                ("spalier_ready_networks", "Networks that are ready", lambda: len(switcher.ready)),
                ("spalier_ready_bytes", "What they take beyond the base", lambda: switcher.bytes),
            ):
                Gauge(name, help_text, **own).set_function(value)


def make_app(backend: Backend, token: str | None = None) -> FastAPI:
    """The routes over whoever answers."""
    about: dict[str, Any] = {"title": "Spalier", "version": spalier.__version__, "summary": "One base, many tasks"}
    app = FastAPI(**about, docs_url=None, redoc_url=None)  # FastAPI's own pages load scripts from another host
    metrics = Metrics(backend)
    app.add_middleware(Guard, token=token, metrics=metrics)
    app.state.backend = backend

    @app.get("/", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    async def page(request: Request) -> HTMLResponse:
        text, policy = page_and_policy("docs" if request.url.path.endswith("/docs") else "page")
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    @app.get("/healthz", summary="Whether the service runs")
    async def health() -> dict[str, str]:
        return {"status": "ok", "version": spalier.__version__}

    @app.get("/metrics", summary="What Prometheus reads")
    async def read_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/tasks", summary="Every task: what it costs and how good it is")
    async def tasks() -> JSONResponse:
        async with backend.admitted():
            return JSONResponse({"tasks": await backend.tasks()})

    @app.post("/v1/tasks/{name}/predict", summary="What a task says of some inputs", openapi_extra=_BODY)
    async def predict(name: str, request: Request, top: Annotated[int, Query(ge=1, le=100_000)] = 5) -> JSONResponse:
        start = time.perf_counter()
        async with backend.admitted():
            body = await _read(request, backend.limits.body)
            found = await backend.predict(name, request.headers.get("content-type", ""), body, top)
        metrics.seconds.observe(time.perf_counter() - start)
        return JSONResponse(found)

    for kind in (SpalierError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _on_error)
    return app


async def _read(request: Request, most: int) -> bytes:
    """A body, as far as its length is allowed."""
    parts, size = [], int(length) if (length := request.headers.get("content-length", "0")).isdecimal() else 0
    if size <= most:
        size = 0
        async for chunk in request.stream():
            parts.append(chunk)
            size += len(chunk)
            if size > most:
                break
    if size > most:
        raise RequestError("too-large", f"the body has more than {most:,} bytes")
    return b"".join(parts)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    """An answer that says what was wrong with a request, and nothing of the code."""
    headers = {}
    if isinstance(error, RequestError | TaskFileError):
        code, status = error.code, STATUS.get(error.code, 422)
        if code == "missing":  # removed since the request was let in
            code, status = "unknown-task", 404
        # what else the error says may name folders
        meaning = "" if isinstance(error, RequestError) else TASK_FILE_CODES[error.code]
        message = f"the task's file cannot be used: {meaning}" if meaning else str(error)
        headers = {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(status, {})
    elif isinstance(error, DataError):
        status, code, message = 400, "input", str(error)
    elif isinstance(error, HTTPException):
        status, code, message = error.status_code, "http", str(error.detail)
    elif isinstance(error, RequestValidationError):
        status, code, message = 400, "query", "; ".join(f"{e['loc'][-1]}: {e['msg']}" for e in error.errors())
    else:
        LOG.error("%s", type(error).__name__, exc_info=error)
        status, code, message = 500, "internal", "the service failed; its log says why"
    return JSONResponse({"error": {"code": code, "message": clean(message)}}, status, headers)


class Guard:
    """Around every request: the token, headers for browsers, a line of log, and an answer whatever happens inside."""

    def __init__(self, app: Callable[..., Awaitable[None]], token: str | None, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics
        self.token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), _GONE

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        try:
            await self._answer(scope, receive, sending)
        except ClientDisconnect:
            pass
        finally:
            self.metrics.requests.labels(str(status)).inc()
            self._log(scope, status, 1000 * (time.perf_counter() - start))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self.token and not OPEN.match(path) and not hmac.compare_digest(given, self.token):
            refusal = RequestError("token", "the request has no Authorization: Bearer TOKEN, or another token")
            await (await _on_error(Request(scope), refusal))(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            raise
        except Exception as error:  # before the answer has begun, which all of ours send at once
            await (await _on_error(Request(scope), error))(scope, receive, send)

    def _log(self, scope: Scope, status: int, spent: float) -> None:
        path = clean(scope["path"])[:200]
        fields = {"method": scope["method"], "path": path, "status": status, "milliseconds": round(spent, 3)}
        fields["client"] = scope["client"][0] if scope.get("client") else "-"
        LOG.info("%(client)s %(method)s %(path)s %(status)d %(milliseconds).1f ms", fields, extra={"request": fields})


_HEADERS = [
    *((b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY")),
    *((b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-store")),
]


@cache
def page_and_policy(name: str) -> tuple[str, str]:
    """A page, and a policy under which nothing runs but what is in it."""
    files = package_files("spalier.serve")
    text = files.joinpath(f"{name}.html").read_text("utf-8")
    text = text.replace("/* style.css */", files.joinpath("style.css").read_text("utf-8"))

    def digest(tag: str) -> str:
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert inside is not None
        return "'sha256-" + base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode() + "'"

    policy = f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
    return text, policy + "img-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


_BINARY, _TEXT = {"type": "string", "format": "binary"}, {"type": "string"}
_SEVERAL = {
    "images": _TEXT | {"format": "base64"},
    "texts": _TEXT,
    "inputs": {"description": "a tensor, samples first"},
}
_KINDS = {
    **dict.fromkeys(("image/*", "application/x-npy"), _BINARY),
    "text/plain": _TEXT,
    "multipart/form-data": {"type": "object", "properties": {"file": {"type": "array", "items": _BINARY}}},
    "application/json": {
        "type": "object",
        "description": "one of these",
        "properties": {name: {"type": "array", "items": kind} for name, kind in _SEVERAL.items()},
    },
}
_BODY = {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind, schema in _KINDS.items()}}}
"""What OpenAPI says of a prediction's body, which is read as it is."""
