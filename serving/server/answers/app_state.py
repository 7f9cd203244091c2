"""State of one server, shared by all routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fastapi import Request as HttpRequest

from distillspec.config import ServerConfig
from distillspec.serving.base.threads import compute_alone
from distillspec.serving.engine import Engine
from distillspec.serving.selection.selecting import selecting
from distillspec.serving.server.answers.text import TextCodec
from distillspec.serving.server.answers.turns import TenantTurns
from distillspec.serving.server.bridge.adjustable import AdjustableController
from distillspec.serving.server.bridge.bridge import EngineBridge
from distillspec.serving.server.bridge.catalogue import DraftCatalogue
from distillspec.serving.server.bridge.engine_thread import StepReport
from distillspec.serving.server.bridge.online_control import OnlineControl
from distillspec.serving.server.http.errors import full
from distillspec.serving.server.http.keys import KeyRing
from distillspec.serving.server.http.wrong_keys import WrongKeys
from distillspec.serving.server.observability.domains import IDLE_S, Domains
from distillspec.serving.server.observability.metrics import Metrics
from distillspec.serving.server.observability.telemetry import Telemetry
from distillspec.serving.server.observability.tracing import Tracing

log = logging.getLogger(__name__)

T = TypeVar("T")
TOKENIZER_THREADS = 2  # few: the engine needs the cores
MOST_COUNTING = 16  # requests of a tenant that wait for their tokens to be counted


@dataclass
class AppState:
    """Engine, bridge, metrics and settings of a server. Made once, before the event loop runs."""

    config: ServerConfig
    engine: Engine
    model: str
    keys: KeyRing
    admin: KeyRing
    codec: TextCodec
    metrics: Metrics
    telemetry: Telemetry
    tracing: Tracing
    controller: AdjustableController
    catalogue: DraftCatalogue | None = None
    online: OnlineControl | None = None
    bridge: EngineBridge = field(init=False)
    domains: Domains = field(init=False)
    wrong_keys: WrongKeys = field(default_factory=WrongKeys)
    started: int = field(default_factory=lambda: int(time.time()))
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # set when long-lived streams should end
    _admin_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    tokenizing: TenantTurns = field(default_factory=lambda: TenantTurns(TOKENIZER_THREADS))
    counting: TenantTurns = field(default_factory=lambda: TenantTurns(1))

    def __post_init__(self) -> None:
        self.bridge = EngineBridge(
            self.engine,
            max_queue=self.config.max_queue,
            tenant_share=self.config.tenant_share,
            full_status=self.config.full_status,
            on_step=self._observe,
            in_thread=None if self.online is None else self.online.on_step,
        )
        self.domains = Domains(
            self.config.max_domains,
            fixed=self.config.domains,
            idle_s=max(IDLE_S, 2 * self.config.deadline_s),
            on_dropped=self._forget_domain,
        )

    async def in_admin_thread(self, work: Callable[[], T]) -> T:
        """Run an operator's request in another thread, one at a time. The engine goes on."""

        def alone() -> T:
            compute_alone()
            return work()

        async with self._admin_work:
            return await asyncio.to_thread(alone)

    async def in_tokenizer_thread(self, work: Callable[[], T], tenant: str) -> T:
        """Tokenise prompts in another thread, `TOKENIZER_THREADS` requests at a time. The event loop goes on."""
        return await _in_thread(self.tokenizing, work, tenant)

    async def in_counting_thread(self, work: Callable[[], T], tenant: str) -> T:
        """Tokenise for /tokenize and /detokenize in another thread, one request at a time. Prompts do not wait.

        Raises:
            ApiError: too many of the tenant wait.
        """
        if self.counting.waiting(tenant) >= MOST_COUNTING:
            raise full(
                self.config.full_status,
                f"{MOST_COUNTING} of your requests wait for their tokens to be counted; try again later",
            )
        return await _in_thread(self.counting, work, tenant)

    async def update_online_figures(self) -> None:
        """Read the figures of online adaptation for /metrics and the dashboard. If that fails, those shown stay."""
        if self.online is None:
            return
        try:
            figures = await asyncio.to_thread(self.online.figures)
            self.metrics.online.figures = self.telemetry.online = figures
        except Exception:
            log.exception("cannot read the figures of online adaptation")

    def _forget_domain(self, name: str) -> None:
        self.metrics.acceptance.forget_domain(name)
        self.telemetry.forget_domain(name)

    def _observe(self, report: StepReport) -> None:
        self.metrics.observe_step(report)
        self.telemetry.observe_step(report)
        for output in report.output.finished:
            self.metrics.observe_finished(output)
            self.telemetry.observe_finished(output)


async def _in_thread(turns: TenantTurns, work: Callable[[], T], tenant: str) -> T:
    async with turns.place(tenant):
        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(task)
        finally:  # a client that disconnects does not end the thread, which keeps its turn
            await asyncio.gather(task, return_exceptions=True)


def app_state_of(request: HttpRequest) -> AppState:
    """Return the state of the server that handles the request."""
    state = request.app.state.server
    assert isinstance(state, AppState)
    return state


def make_app_state(
    config: ServerConfig,
    engine: Engine,
    *,
    keys: KeyRing | None = None,
    admin: KeyRing | None = None,
    tracing: Tracing | None = None,
    catalogue: DraftCatalogue | None = None,
    online: OnlineControl | None = None,
) -> AppState:
    """Make the state around an engine that does not run yet. The engine's length controller becomes adjustable."""
    controller = AdjustableController(engine.controller)
    engine.use_controller(controller)
    model = config.model_name or Path(engine.target.name).name
    slots, tokens = engine.slots, engine.limits.cache_tokens
    state = AppState(
        config,
        engine,
        model,
        keys or KeyRing(),
        admin or KeyRing(),
        TextCodec(engine.target.tokenizer, engine.max_model_len),
        Metrics(model, controller.speculation_length, slots, tokens, engine.settings.verification),
        Telemetry(slots),
        tracing or Tracing(config.tracing),
        controller,
        catalogue,
        online,
    )
    state.metrics.note_versions(engine.draft_versions)
    state.telemetry.note_versions(engine.draft_versions)
    if (chooses := selecting(controller)) is not None:
        state.metrics.selection.figures = chooses.figures
        state.metrics.selection.health = lambda: engine.draft_health
    return state
