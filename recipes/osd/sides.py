"""The sides of the live comparison: no speculation, the static draft, and online adaptation, in turn under one load."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

from distillspec.config import (
    AdaptConfig,
    EngineConfig,
    GateConfig,
    LossConfig,
    OnlineConfig,
    ReplayConfig,
    TargetConfig,
)
from distillspec.models import LanguageModel, load_target
from distillspec.models.draft import load_pretrained
from distillspec.recipes.osd.stream import prompts_of
from distillspec.recipes.osd.study import Segment
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.bench.load import Arrival, poisson_load
from distillspec.serving.online.adaptation import Adaptation, first_draft
from distillspec.serving.online.state.layout import OnlineSettings

SIDES = ("none", "static", "online")
NEVER = 1e9  # a margin that no gain exceeds
IDLE_S = 0.01
MINUTE_S = 60.0


@dataclass
class Minute:
    """One minute of the plan. A turn on a slow machine may take longer than planned, so `seconds` is measured."""

    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0
    versions: set[str] = field(default_factory=set)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / max(self.seconds, 1e-9)


def shifting_load(options: argparse.Namespace, segments: Sequence[Segment], target: LanguageModel) -> list[Arrival]:
    """Draw Poisson arrivals whose domain changes at equal intervals, the same for every side."""
    params = SamplingParams(temperature=1.0, max_tokens=options.max_tokens)
    each_s = 60 * options.minutes / len(segments)
    arrivals: list[Arrival] = []
    for place, segment in enumerate(segments):
        prompts = prompts_of(segment, target, options.max_prompt_tokens, options.seed)
        load = poisson_load(prompts, params, options.rate, each_s, options.seed + place)
        named = [replace(arrival.prompt, domain=segment.domain) for arrival in load]
        arrivals += [replace(a, at_s=a.at_s + place * each_s, prompt=p) for a, p in zip(load, named, strict=True)]
    return arrivals


class Side:
    """One engine under the load, with a trainer beside it. Its clock and the trainer are paused between turns."""

    def __init__(self, options: argparse.Namespace, name: str, arrivals: Sequence[Arrival]) -> None:
        self.name, self.minutes, self.turned_away = name, list[Minute](), 0
        self._coming, self._most_open, self._open = deque(enumerate(arrivals)), options.slots + options.waiting, 0
        settings = side_settings(options, name)
        target = load_target(TargetConfig(path=options.target))  # its own: an engine packs the target's weights
        path = first_draft(settings, target, options.draft)
        draft = None if name == "none" else load_pretrained(str(path), target, target.dtype)
        config = EngineConfig(
            max_slots=options.slots,
            speculation_length=options.speculation_length,
            controller="fixed" if name == "none" else options.controller,
            compile=False,  # as `distill serve`: compiling shapes during traffic would cost minutes
            seed=options.seed,
        )
        with ExitStack() as stack:
            self.engine = Engine(target, draft, config)
            stack.callback(self.engine.close)
            self.adaptation = stack.enter_context(Adaptation(self.engine, settings))
            stack.callback(self._signal_trainer, signal.SIGCONT)  # a stopped process would not notice the end
            self._signal_trainer(signal.SIGSTOP)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def serve(self, turn: int, seconds: float) -> None:
        """Serve turn number `turn`, of `seconds` each. Arrivals that find the queue full are turned away.

        The plan says to which minute a turn belongs, so that all sides count the same minutes.
        """
        started, before_s = time.monotonic(), sum(minute.seconds for minute in self.minutes)
        if turn * seconds >= MINUTE_S * len(self.minutes):
            self.minutes.append(Minute())
        minute = self.minutes[-1]
        self._signal_trainer(signal.SIGCONT)
        while (now := time.monotonic() - started) < seconds:
            self._submit_arrivals(before_s + now)
            output = self.engine.step()
            self.adaptation.on_step(output)
            self._open -= len(output.finished)
            if output.result is None:
                time.sleep(IDLE_S)
                continue
            minute.tokens += sum(len(delta.token_ids) for delta in output.deltas)
            minute.proposed += sum(row.nodes for row in output.result.rows)
            minute.accepted += sum(row.accepted for row in output.result.rows)
            for finished in output.finished:
                minute.versions.update(finished.stats.draft_versions)
        self._signal_trainer(signal.SIGSTOP)
        minute.seconds += now

    def end(self) -> dict[str, Any]:
        """Return the adaptation's figures so far."""
        self.adaptation.writer.flush()
        stats = self.adaptation.stats()
        trainer = {name: stats["trainer"][name] for name in ("updates", "cpu_s", "share", "skipped")}
        return {
            "trainer": trainer,
            "log": stats["log"],
            "verdicts": self.adaptation.verdicts(),
            "turned_away": self.turned_away,
        }

    def _submit_arrivals(self, now_s: float) -> None:
        while self._coming and self._coming[0][1].at_s <= now_s:
            number, arrival = self._coming.popleft()
            if self._open >= self._most_open:
                self.turned_away += 1
                continue
            prompt, name = arrival.prompt, f"{number}/{arrival.prompt.id}"
            self.engine.submit(Request(name, prompt.token_ids, arrival.params, domain=prompt.domain))
            self._open += 1

    def _signal_trainer(self, which: signal.Signals) -> None:
        supervisor = self.adaptation.supervisor
        if supervisor is not None and supervisor.pid is not None:
            os.killpg(supervisor.pid, which)


def side_settings(options: argparse.Namespace, side: str) -> OnlineSettings:
    """Return settings with a folder of the side's own. Candidates pass the gate on the side `online` only."""
    return OnlineSettings(
        OnlineConfig(mode="on", folder=str(options.output / side)),
        ReplayConfig(share=1.0, flush_s=5.0),
        AdaptConfig(
            every_requests=options.interval,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            niceness=options.niceness,
        ),
        GateConfig(margin=0.0 if side == "online" else NEVER),
        LossConfig(name=options.loss),
        seed=options.seed,
    )
