"""The sides of the live comparison: no speculation, the static draft, and online adaptation, under one load."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from distillspec.config import AdaptConfig, EngineConfig, GateConfig, LossConfig, OnlineConfig, ReplayConfig
from distillspec.models import LanguageModel
from distillspec.models.draft import load_pretrained
from distillspec.progress import progress
from distillspec.recipes.osd.stream import prompts_of
from distillspec.recipes.osd.study import Segment
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.bench.load import Arrival, poisson_load
from distillspec.serving.online.adaptation import Adaptation, first_draft
from distillspec.serving.online.layout import OnlineSettings

SIDES = ("none", "static", "online")
NEVER = 1e9  # a margin that no gain exceeds
IDLE_S = 0.01


@dataclass
class Minute:
    """What happened in one minute of one side."""

    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    versions: set[str] = field(default_factory=set)


def shifting_load(options: argparse.Namespace, segments: Sequence[Segment], target: LanguageModel) -> list[Arrival]:
    """Poisson arrivals whose domain changes at equal times, the same for every side."""
    params = SamplingParams(temperature=1.0, max_tokens=options.max_tokens)
    each_s = 60 * options.minutes / len(segments)
    arrivals: list[Arrival] = []
    for place, segment in enumerate(segments):
        prompts = prompts_of(segment, target, options.max_prompt_tokens, options.seed)
        load = poisson_load(prompts, params, options.rate, each_s, options.seed + place)
        named = [replace(arrival.prompt, domain=segment.domain) for arrival in load]
        arrivals += [replace(a, at_s=a.at_s + place * each_s, prompt=p) for a, p in zip(load, named, strict=True)]
    return arrivals


def run_side(
    options: argparse.Namespace, side: str, target: LanguageModel, arrivals: Sequence[Arrival]
) -> tuple[list[Minute], dict[str, Any]]:
    """Serve the load; a row a minute, and what the adaptation says of itself at the end."""
    torch.manual_seed(options.seed)
    settings = side_settings(options, side)
    path = first_draft(settings, target, options.draft)
    draft = None if side == "none" else load_pretrained(str(path), target, target.dtype)
    config = EngineConfig(
        max_slots=options.slots,
        speculation_length=options.speculation_length,
        controller="fixed" if side == "none" else options.controller,
        compile=False,  # as `distill serve`: where shapes are compiled while people wait, minutes are lost
        seed=options.seed,
    )
    engine = Engine(target, draft, config)
    try:
        with Adaptation(engine, settings) as adaptation:
            minutes = _serve(engine, adaptation, arrivals, options, side)
            adaptation.writer.flush()
            stats = adaptation.stats()
            verdicts = adaptation.verdicts()
    finally:
        engine.close()
    trainer = {name: stats["trainer"][name] for name in ("updates", "cpu_s", "share", "skipped")}
    return minutes, {"trainer": trainer, "log": stats["log"], "verdicts": verdicts}


def side_settings(options: argparse.Namespace, side: str) -> OnlineSettings:
    """A folder of its own; on all sides but `online` no candidate passes the gate."""
    return OnlineSettings(
        OnlineConfig(mode="on", folder=str(options.output / side)),
        ReplayConfig(share=1.0, flush_s=5.0),
        AdaptConfig(
            every_requests=options.interval,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            niceness=options.niceness,
        ),
        GateConfig(margin=0.0 if side == "online" else NEVER, busy_share=options.busy_share),
        LossConfig(name=options.loss),
        seed=options.seed,
    )


def _serve(
    engine: Engine, adaptation: Adaptation, arrivals: Sequence[Arrival], options: argparse.Namespace, side: str
) -> list[Minute]:
    """Arrivals come at their times; what would wait behind `--waiting` others is turned away."""
    minutes = [Minute() for _ in range(max(1, round(options.minutes)))]
    seconds, open_, turned_away = 60 * options.minutes, 0, 0
    coming = deque(enumerate(arrivals))
    started = time.monotonic()
    with progress(f"{side}, {options.minutes:g} minutes") as line:
        while (now := time.monotonic() - started) < seconds:
            while coming and coming[0][1].at_s <= now:
                number, arrival = coming.popleft()
                if open_ >= options.slots + options.waiting:
                    turned_away += 1
                    continue
                prompt, name = arrival.prompt, f"{number}/{arrival.prompt.id}"
                engine.submit(Request(name, prompt.token_ids, arrival.params, domain=prompt.domain))
                open_ += 1
            output = engine.step()
            adaptation.on_step(output)
            open_ -= len(output.finished)
            if output.result is None:
                time.sleep(IDLE_S)
                continue
            minute = minutes[min(len(minutes) - 1, int((time.monotonic() - started) / 60))]
            minute.tokens += sum(len(delta.token_ids) for delta in output.deltas)
            minute.proposed += sum(row.proposed for row in output.result.rows)
            minute.accepted += sum(row.accepted for row in output.result.rows)
            for finished in output.finished:
                minute.versions.update(finished.stats.draft_versions)
            line.update(now / seconds, f"{sum(m.tokens for m in minutes) / now:.0f} tokens/s")
    print(f"{side}: {turned_away} of {len(arrivals)} requests found the queue full")
    return minutes
