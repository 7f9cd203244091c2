"""ASGI middleware of every request: header checks, bounded body, request id, log line."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import Counter
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distillspec.config import ServerConfig
from distillspec.serving.server.http.errors import ApiError, bad_request
from distillspec.serving.server.http.wrong_keys import SLOWED_DOWN
from distillspec.serving.server.observability.logs import REQUEST_ID, access
from distillspec.serving.server.observability.metrics import Metrics

log = logging.getLogger(__name__)

ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
SINGLE = ("host", "authorization", "content-length", "content-type", "transfer-encoding")
MODEL_ROUTES = ("/v1/", "/tokenize", "/detokenize")  # whose refusals are counted
UNMATCHED = "unmatched"  # the route of unknown URLs
QUIET = ("/health", "/metrics", "/dashboard/events")  # polled all the time: not logged
HEADER_BYTES = 16 << 10  # of the request line and headers, as h11 itself allows by default: clients send less
CLOSE = {"Connection": "close"}  # the rest of the body is not read


class Guard:
    """ASGI middleware that checks and logs every request.

    Args:
        app: the application.
        config: limits.
        metrics: counts requests by route and status.
        local_names_only: refuse Host headers other than this machine's names. A server without keys needs this against
            DNS rebinding: pages of other sites whose name resolves to 127.0.0.1.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics, *, local_names_only: bool) -> None:
        self.app = app
        self.config = config
        self.metrics = metrics
        self.names = {"localhost", "127.0.0.1", "[::1]", config.host} if local_names_only else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body = _LimitedBody(receive, headers, self.config)
        answer = _Answer(send, _request_id(headers), body)
        token = REQUEST_ID.set(answer.request_id)
        started_s = time.monotonic()
        try:
            _check_size(scope)
            self._check(headers)
            await self.app(scope, body, answer)
        except ApiError as error:
            await _respond(error, scope, receive, answer)
        except ClientDisconnect:
            pass  # the client left while it sent its request: nobody reads an answer
        except Exception:
            log.exception("a request failed")
            failure = ApiError(
                500, "an internal error; see the server's log", kind="server_error", code="internal_error"
            )
            await _respond(failure, scope, receive, answer)
        finally:
            self._record(scope, answer, time.monotonic() - started_s)
            REQUEST_ID.reset(token)

    def _check(self, headers: Headers) -> None:
        counts = Counter(name for name, _ in headers.items())
        for name in SINGLE:
            if counts[name] > 1:
                raise bad_request(f"the header {name} is given {counts[name]} times; give it once")
        if "transfer-encoding" in headers and "content-length" in headers:
            raise ApiError(400, "Transfer-Encoding and Content-Length exclude each other", headers=CLOSE)
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise bad_request("Content-Length must be a number")
        if int(length[:20]) > self.config.max_body_kib * 1024:
            raise _too_large(self.config.max_body_kib * 1024)
        if self.names is not None and _host_name(headers.get("host", "")) not in self.names:
            raise ApiError(
                421,
                "this server answers under this machine's own name only; start it with an API key to use other names",
                code="wrong_host",
            )

    def _record(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        status = answer.status or 499
        self.metrics.observe_http(route, status)
        if answer.code == SLOWED_DOWN or _refuses_work(status, route, scope["path"]):
            self.metrics.observe_refusal(_reason(status, answer.code))
        if scope["path"] in QUIET and status < 400:
            return
        fields = {"event": "http", "method": scope["method"], "route": route, "status": status}
        access.info("request", extra={"fields": {**fields, "seconds": round(seconds, 4), "code": answer.code}})


@dataclass
class _Answer:
    """Sending side of a request. Notes the status, adds headers, closes the connection if the body is unread."""

    send: Send
    request_id: str
    body: _LimitedBody
    status: int | None = None
    code: str | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=message["headers"])
            self.code = headers.get("x-error-code")
            headers["X-Request-Id"] = self.request_id
            headers["X-Content-Type-Options"] = "nosniff"
            if self.body.unread:
                headers.update(CLOSE)
            message = {**message, "headers": headers.raw}
        await self.send(message)


class _LimitedBody:
    """Receiving side of a request. Refuses a body that is too long or too slow while it arrives."""

    def __init__(self, receive: Receive, headers: Headers, config: ServerConfig) -> None:
        self._receive = receive
        self._limit_bytes = config.max_body_kib * 1024
        self._limit_s = config.body_timeout_s
        self._received_bytes, self._more = 0, True
        self._announced = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self._deadline_s: float | None = None

    @property
    def unread(self) -> bool:
        """True while the client has more to send."""
        return self._announced and self._more

    async def __call__(self) -> Message:
        if not self._more:
            return await self._receive()
        loop = asyncio.get_running_loop()
        if self._deadline_s is None:
            self._deadline_s = loop.time() + self._limit_s
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._limit_s:g} s (server.body_timeout_s)",
                code="body_timeout",
                headers=CLOSE,
            ) from None
        if message["type"] == "http.request":
            self._received_bytes += len(message.get("body", b""))
            self._more = message.get("more_body", False)
            if self._received_bytes > self._limit_bytes:
                raise _too_large(self._limit_bytes)
        return message


def error_response(error: ApiError) -> JSONResponse:
    """Return the response of an error. Its code is a header too, for the log."""
    return JSONResponse(error.body, error.status, {"X-Error-Code": error.code or error.kind, **error.headers})


async def _respond(error: ApiError, scope: Scope, receive: Receive, answer: _Answer) -> None:
    if answer.status is None:
        await error_response(error)(scope, receive, answer)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limit_bytes} bytes (server.max_body_kib)", code="too_large", headers=CLOSE
    )


def _request_id(headers: Headers) -> str:
    """Return the client's own id if it is safe to log, else a new one."""
    given = headers.get("x-request-id", "")
    return given if ACCEPTED_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    return host.rpartition(":")[0] if re.fullmatch(r".*:\d+", host) else host


def _check_size(scope: Scope) -> None:
    """Refuse a long request line and headers. h11 bounds those that come in pieces alone."""
    target = len(scope["raw_path"]) + len(scope["query_string"])
    if target + sum([len(name) + len(value) for name, value in scope["headers"]]) > HEADER_BYTES:
        raise ApiError(400, f"request line and headers are above {HEADER_BYTES >> 10} KiB", headers=CLOSE)


def _refuses_work(status: int, route: str, path: str) -> bool:
    """Return True for a refused key or a refused request for the model, False for a probe's 503 and an unknown URL."""
    if status in (401, 403):
        return True
    refuses = 400 <= status < 499 or status == 503
    return refuses and path.startswith(MODEL_ROUTES) and (status, route) != (404, UNMATCHED)


def _reason(status: int, code: str | None) -> str:
    """Return the label under which /metrics counts a refusal."""
    if code in ("queue_full", "draining", "engine_dead", "too_large"):
        return code
    if code == SLOWED_DOWN:
        return "unauthorised"
    return {400: "invalid", 401: "unauthorised", 403: "unauthorised", 413: "too_large"}.get(status, "other")
