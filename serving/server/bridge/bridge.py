"""Bridge between the event loop and the engine's thread. Neither waits for the other."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from distillspec.errors import ConfigError
from distillspec.serving.base.requests import Request, RequestRefused
from distillspec.serving.engine import Engine
from distillspec.serving.server.bridge.engine_thread import EngineThread, StepReport
from distillspec.serving.server.bridge.request_stream import RequestStream
from distillspec.serving.server.bridge.retry_after import RetryAfterEstimator
from distillspec.serving.server.http.errors import ApiError, bad_request, full, unavailable
from distillspec.serving.step.output import StepOutput

log = logging.getLogger(__name__)

# Seconds of steps that are delivered together. Events take processor time that the engine lacks, and nobody
# reads faster. First tokens and ends of answers do not wait.
TOGETHER_S = 0.04


class EngineBridge:
    """Submits requests to the engine's thread and delivers its outputs to request streams.

    All methods but `_from_thread` and `_death_from_thread` run on the event loop.

    Args:
        engine: the bridge's thread steps it from `start` to `stop`.
        max_queue: most answers that wait beyond the engine's slots.
        tenant_share: largest share of slots and queue that one tenant's answers may take.
        full_status: HTTP status of a refusal because the server is full.
        on_step: called with every step, on the event loop.
        in_thread: called with every step in the engine's thread. Must neither block nor raise.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int,
        tenant_share: float,
        full_status: int,
        on_step: Callable[[StepReport], None],
        in_thread: Callable[[StepOutput], None] | None = None,
    ) -> None:
        self.engine = engine
        self.max_queue = max_queue
        self.full_status = full_status
        self.tenant_share = tenant_share
        self._on_step, self._in_thread = on_step, in_thread
        self._streams: dict[str, RequestStream] = {}  # by engine request id
        self.open_answers = 0
        self.places: Counter[str] = Counter()  # by tenant: answers that are open or being tokenised
        self._retry_after = RetryAfterEstimator()
        self.draining = False
        self.dead: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._steps: deque[StepReport] = deque()  # not delivered yet
        self._arranged = False  # a delivery is scheduled
        self._timer: asyncio.TimerHandle | None = None
        self._delivered_s = 0.0  # when steps were delivered last, on the loop's clock
        self.thread = EngineThread(engine, self._from_thread, self._death_from_thread)

    def start(self) -> None:
        """Start the engine's thread. Call it on the server's event loop."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    def check_ready(self) -> None:
        """Raise ApiError 503 if the engine is dead or the server drains."""
        if self.dead is not None or not self.thread.alive:
            raise unavailable(f"the engine has stopped: {self.dead or 'its thread ended'}", "engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down; send this to another", "draining")

    @contextmanager
    def reserve(self, answers: int, tenant: str) -> Iterator[None]:
        """Reserve places for answers while their prompts are tokenised.

        Raises:
            ApiError: the server is full, draining or dead.
        """
        self.check_ready()
        self._check_room(answers, tenant)
        self.places[tenant] += answers
        try:
            yield
        finally:
            self.places[tenant] -= answers

    @contextmanager
    def open(self, requests: Sequence[Request], param: str) -> Iterator[RequestStream]:
        """Submit requests. Leaving the block aborts those that still run.

        Raises:
            ApiError: the server is full, draining or dead, or the engine refuses a request.
        """
        self.check_ready()
        stream = RequestStream(requests)
        self._check_room(stream.answers, stream.tenant)
        self._check_requests(requests, param)
        for request in requests:
            self.engine.submit(request)
            self._streams[request.id] = stream
        if not self.open_answers:
            self._retry_after.begin()
        self.open_answers += stream.answers
        self.places[stream.tenant] += stream.answers
        self._idle.clear()
        self.thread.wake()
        try:
            yield stream
        finally:
            self._close(stream)

    async def drain(self, limit_s: float) -> bool:
        """Refuse new requests and wait for the open ones. Return True if they ended within `limit_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def abort_all(self, reason: str) -> int:
        """Abort all unfinished answers with a 503. Return how many there were."""
        self.draining = True
        return self._fail_all(unavailable(reason, "shutting_down"))

    async def stop(self) -> None:
        """Stop the engine's thread after its current step."""
        if not await asyncio.to_thread(self.thread.stop):
            log.error("the engine did not finish its step in time")

    def _check_room(self, answers: int, tenant: str) -> None:
        most = self.engine.slots + self.max_queue
        tenant_most = max(1, int(self.tenant_share * most))
        if answers > tenant_most:
            raise bad_request(f"{answers} answers in one request; this server holds {tenant_most} at a time", "n")
        taken, of_tenant = self.places.total(), self.places[tenant]
        if (excess := taken + answers - most) > 0:
            waiting = max(0, taken - self.engine.slots)
            raise self._full(f"the server is full: {waiting} answers wait already; try again later", excess)
        if (excess := of_tenant + answers - tenant_most) > 0:
            raise self._full(
                f"{of_tenant} answers of yours are open; this server holds {tenant_most} at a time", excess
            )

    def _full(self, message: str, excess: int) -> ApiError:
        return full(self.full_status, message, self._retry_after.seconds_until(excess))

    def _check_requests(self, requests: Sequence[Request], param: str) -> None:
        """Raise ApiError 400 for the first request that the engine refuses. Nothing is submitted before all pass."""
        for request in requests:
            try:
                self.engine.check(request)
            except RequestRefused as error:
                problem = str(error).removeprefix(f"request {request.id}: ")
                code = "context_length_exceeded" if "leaves no room" in problem else "invalid_value"
                raise bad_request(problem, param, code) from error
            except ConfigError as error:
                raise bad_request(str(error), code="invalid_value") from error

    def _close(self, stream: RequestStream) -> None:
        for request in stream.requests:
            if self._streams.pop(request.id, None) is not None and request.id not in stream.outputs:
                self.engine.abort(request.id)
        self.thread.wake()
        self.open_answers -= stream.answers
        self.places[stream.tenant] -= stream.answers
        self._retry_after.ended(stream.answers)
        if not self._streams:
            self._idle.set()

    def _from_thread(self, report: StepReport) -> None:
        """Send a step to the event loop, in the engine's thread. Steps that come close together share one message."""
        if self._in_thread is not None:
            self._in_thread(report.output)  # first: a client with its answer may delete it from the log at once
        self._steps.append(report)
        if (urgent := _is_urgent(report.output)) or not self._arranged:
            self._arranged = True
            self._loop.call_soon_threadsafe(self._arrange, urgent)

    def _death_from_thread(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._die, reason)

    def _die(self, reason: str) -> None:
        self.dead = reason
        log.critical("the engine has stopped for good: %s", reason)
        self._fail_all(ApiError(500, f"the engine stopped: {reason}", kind="server_error", code="engine_dead"))

    def _fail_all(self, failure: ApiError) -> int:
        """End all streams that are not at their end. Return the number of their answers."""
        self._deliver_all()  # what was written before is read before
        cut = {stream for stream in self._streams.values() if not stream.ended}
        for stream in cut:
            stream.fail(failure)
        return sum(stream.answers for stream in cut)

    def _arrange(self, urgent: bool) -> None:
        """Deliver what waits, now or when it is due."""
        wait_s = 0.0 if urgent else self._delivered_s + TOGETHER_S - self._loop.time()
        if wait_s <= 0:
            self._deliver_all()
        elif self._timer is None:
            self._timer = self._loop.call_later(wait_s, self._deliver_all)

    def _deliver_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # A step that is added from here on schedules a delivery, or is taken below.
        self._timer = None
        self._arranged = False
        self._delivered_s = self._loop.time()
        while self._steps:
            try:
                self._deliver(self._steps.popleft())
            except Exception:  # the steps behind it, and a shutdown that waits for them, go on
                log.exception("a step could not be delivered whole")

    def _deliver(self, report: StepReport) -> None:
        result = report.output.result
        rows = {} if result is None else {row.sequence_id: row for row in result.rows}
        for delta in report.output.deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.put(delta, rows.get(f"{delta.request_id}/{delta.index}"))
        for output in report.output.finished:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.finish(output)
        self._on_step(report)


def _is_urgent(output: StepOutput) -> bool:
    """Return True for a step with which answers begin or end."""
    result = output.result
    begins = result is None or len(result.rows) > len(result.view.rows)  # a prompt was read whole
    return begins or bool(output.finished) or any(delta.finish_reason is not None for delta in output.deltas)
