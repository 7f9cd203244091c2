"""What the routes work with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fastapi import Request as HttpRequest

from distillspec.config import ServerConfig
from distillspec.serving.engine import Engine
from distillspec.serving.server.adjustable import AdjustableController
from distillspec.serving.server.bridge import EngineBridge
from distillspec.serving.server.catalogue import DraftCatalogue
from distillspec.serving.server.domains import IDLE_S, Domains
from distillspec.serving.server.keys import KeyRing
from distillspec.serving.server.metrics import Metrics
from distillspec.serving.server.online_control import OnlineControl
from distillspec.serving.server.telemetry import Telemetry
from distillspec.serving.server.text import TextCodec
from distillspec.serving.server.tracing import Tracing
from distillspec.serving.server.worker import StepReport
from distillspec.serving.threads import compute_alone

T = TypeVar("T")
READERS = 2  # threads that tokenise prompts: the engine needs the cores


@dataclass
class Parts:
    """Made once for a server; the bridge joins when the event loop runs."""

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
    started: int = field(default_factory=lambda: int(time.time()))
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # set when long-lived streams should end
    _admin_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    _readers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READERS))
    _counting: asyncio.Lock = field(default_factory=asyncio.Lock)

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

    async def slowly(self, work: Callable[[], T]) -> T:
        """Run operators' work in another thread, one at a time; the engine goes on."""

        def alone() -> T:
            compute_alone()
            return work()

        async with self._admin_work:
            return await asyncio.to_thread(alone)

    async def reading(self, work: Callable[[], T]) -> T:
        """Tokenise prompts in another thread, few requests at a time; the event loop goes on."""
        async with self._readers:
            reading = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(reading)
            finally:  # a client that leaves does not end the thread, which keeps its place
                await asyncio.gather(reading, return_exceptions=True)

    async def counting(self, work: Callable[[], T]) -> T:
        """The same for text that nobody generates from, of any length, one at a time: prompts do not wait for it."""
        async with self._counting:
            return await asyncio.to_thread(work)

    async def look_at_online(self) -> None:
        """Take over how online adaptation stands, for metrics and page."""
        if self.online is not None:
            figures = await asyncio.to_thread(self.online.figures)
            self.metrics.observe_online(figures)
            self.telemetry.online = figures

    def _forget_domain(self, name: str) -> None:
        self.metrics.acceptance.forget_domain(name)
        self.telemetry.forget_domain(name)

    def _observe(self, report: StepReport) -> None:
        self.metrics.observe_step(report)
        self.telemetry.observe_step(report)
        for output in report.output.finished:
            self.metrics.observe_finished(output)
            self.telemetry.observe_finished(output)


def parts_of(request: HttpRequest) -> Parts:
    """The server's parts, from any route."""
    parts = request.app.state.parts
    assert isinstance(parts, Parts)
    return parts


def make_parts(
    config: ServerConfig,
    engine: Engine,
    *,
    keys: KeyRing | None = None,
    admin: KeyRing | None = None,
    catalogue: DraftCatalogue | None = None,
    online: OnlineControl | None = None,
) -> Parts:
    """Everything around an engine that does not run yet; puts an operator's hand on its length controller."""
    controller = AdjustableController(engine.core.controller)
    engine.use_controller(controller)
    model = config.model_name or Path(engine.target.name).name
    slots, tokens = engine.slots, engine.core.limits.cache_tokens
    return Parts(
        config,
        engine,
        model,
        keys or KeyRing(),
        admin or KeyRing(),
        TextCodec(engine.target.tokenizer, engine.max_model_len),
        Metrics(model, controller.longest, slots, tokens),
        Telemetry(slots),
        Tracing(config.tracing),
        controller,
        catalogue,
        online,
    )
