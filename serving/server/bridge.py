"""Between the event loop and the engine's thread: requests in, gains out, nobody waits for the other."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from distillspec.errors import ConfigError
from distillspec.serving.core import StepOutput
from distillspec.serving.engine import Engine
from distillspec.serving.requests import Request, RequestRefused
from distillspec.serving.server.errors import ApiError, bad_request, unavailable
from distillspec.serving.server.pace import Pace
from distillspec.serving.server.ticket import Ticket
from distillspec.serving.server.worker import EngineThread, StepReport

log = logging.getLogger(__name__)


class EngineBridge:
    """Everything but `_from_thread` runs on the event loop.

    Args:
        engine: is stepped by a thread of the bridge's own from `start` to `stop`.
        max_queue: answers that may be open beyond the engine's slots.
        tenant_share: the most of slots and queue that one tenant's answers may take.
        full_status: HTTP status of the refusal then.
        on_step: sees every step, on the event loop.
        in_thread: sees every step too, in the engine's thread; must not block, and never raises.
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
        self.engine, self.max_queue, self.full_status = engine, max_queue, full_status
        self.tenant_share = tenant_share
        self._on_step, self._in_thread = on_step, in_thread
        self._tickets: dict[str, Ticket] = {}  # engine request id → its ticket
        self.open_answers = 0
        self._places: Counter[str] = Counter()  # tenant → its answers, open or being tokenised
        self._pace = Pace()
        self.draining = False
        self.dead: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.thread = EngineThread(engine, self._from_thread, self._death_from_thread)

    def start(self) -> None:
        """Start the engine's thread; called on the event loop that is served."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    def check_ready(self) -> None:
        """Raise the 503 that a new request would get now."""
        if self.dead is not None or not self.thread.alive:
            raise unavailable(f"the engine has stopped: {self.dead or 'its thread ended'}", "engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down; send this to another", "draining")

    @contextmanager
    def reading(self, answers: int, tenant: str) -> Iterator[None]:
        """Keep places for answers whose prompts are being tokenised.

        Raises:
            ApiError: the server is full, draining or dead: there is no use in tokenising.
        """
        self.check_ready()
        self._check_room(answers, tenant)
        self._places[tenant] += answers
        try:
            yield
        finally:
            self._places[tenant] -= answers

    @contextmanager
    def open(self, requests: Sequence[Request], param: str) -> Iterator[Ticket]:
        """Submit requests; leaving the block ends those that still run.

        Raises:
            ApiError: the server is full, draining or dead, or the engine refuses a request.
        """
        self.check_ready()
        ticket = Ticket(requests)
        self._check_room(ticket.answers, ticket.tenant)
        self._check_requests(requests, param)
        for request in requests:
            self.engine.submit(request)
            self._tickets[request.id] = ticket
        if not self.open_answers:
            self._pace.begin()
        self.open_answers += ticket.answers
        self._places[ticket.tenant] += ticket.answers
        self._idle.clear()
        self.thread.wake()
        try:
            yield ticket
        finally:
            self._close(ticket)

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new; whether all that ran was done within the limit."""
        self.draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cut(self, reason: str) -> int:
        """End everything that runs; how many answers were lost."""
        self.draining = True
        lost = self.open_answers
        self._fail_all(unavailable(reason, "shutting_down"))
        return lost

    async def stop(self) -> None:
        """Stop the engine's thread after its step."""
        if not await asyncio.to_thread(self.thread.stop):
            log.error("the engine did not finish its step in time")

    def _check_room(self, answers: int, tenant: str) -> None:
        most = self.engine.slots + self.max_queue
        own_most = max(1, int(self.tenant_share * most))
        if answers > own_most:
            raise bad_request(f"{answers} answers in one request; this server holds {own_most} at a time", "n")
        taken, own = self._places.total(), self._places[tenant]
        if (beyond := taken + answers - most) > 0:
            waiting = max(0, taken - self.engine.slots)
            raise self._full(f"the server is full: {waiting} answers wait already; try again later", beyond)
        if (beyond := own + answers - own_most) > 0:
            raise self._full(f"{own} answers of yours are open; this server holds {own_most} at a time", beyond)

    def _full(self, message: str, beyond: int) -> ApiError:
        kind = "rate_limit_exceeded" if self.full_status == 429 else "server_error"
        headers = {"Retry-After": str(self._pace.seconds_until(beyond))}
        return ApiError(self.full_status, message, kind=kind, code="queue_full", headers=headers)

    def _check_requests(self, requests: Sequence[Request], param: str) -> None:
        """All or none: nothing is submitted before each could be."""
        for request in requests:
            try:
                self.engine.core.check(request)
            except RequestRefused as error:
                problem = str(error).removeprefix(f"request {request.id}: ")
                code = "context_length_exceeded" if "leaves no room" in problem else "invalid_value"
                raise bad_request(problem, param, code) from error
            except ConfigError as error:
                raise bad_request(str(error), code="invalid_value") from error

    def _close(self, ticket: Ticket) -> None:
        for request in ticket.requests:
            if self._tickets.pop(request.id, None) is not None and request.id not in ticket.outputs:
                self.engine.abort(request.id)
        self.thread.wake()
        self.open_answers -= ticket.answers
        self._places[ticket.tenant] -= ticket.answers
        self._pace.ended(ticket.answers)
        if not self._tickets:
            self._idle.set()

    def _from_thread(self, report: StepReport) -> None:
        """In the engine's thread: one message to the loop a step, however many requests it moved."""
        if self._in_thread is not None:
            self._in_thread(report.output)  # first: who has an answer may ask at once that it be deleted from the log
        self._loop.call_soon_threadsafe(self._deliver, report)

    def _death_from_thread(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._die, reason)

    def _die(self, reason: str) -> None:
        self.dead = reason
        log.critical("the engine is given up: %s", reason)
        self._fail_all(ApiError(500, f"the engine stopped: {reason}", kind="server_error", code="engine_dead"))

    def _fail_all(self, failure: ApiError) -> None:
        for ticket in set(self._tickets.values()):
            ticket.fail(failure)

    def _deliver(self, report: StepReport) -> None:
        result = report.output.result
        rows = {} if result is None else {row.sequence_id: row for row in result.rows}
        for delta in report.output.deltas:
            if (ticket := self._tickets.get(delta.request_id)) is not None:
                ticket.put(delta, rows.get(f"{delta.request_id}/{delta.index}"))
        for output in report.output.finished:
            if (ticket := self._tickets.get(output.request_id)) is not None:
                ticket.finish(output)
        self._on_step(report)
