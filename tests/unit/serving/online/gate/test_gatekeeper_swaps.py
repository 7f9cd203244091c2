"""Drafts that come through the gate while requests run: not a token of anybody's answer depends on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry

from ...conftest import MakeEngine, hf_greedy, prompts
from ...test_engine_draft_swap import PROMPT
from ...test_engine_sampling import POLICIES, excess
from ..conftest import Answer
from .conftest import candidate, keeper_of, scored


def off_by(target: LanguageModel, noise: float) -> LanguageModel:
    """A draft of all the target's layers, so much off."""
    made = initialise_draft(DraftConfig(layers=4), target)
    with torch.no_grad():
        for parameter in made.layers.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return made


class Improving:
    """Makes, judges and promotes a better candidate every few steps, and rolls back the last one."""

    NOISES = (0.025, 0.012, 0.0)

    def __init__(
        self, engine: Engine, settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, every: int
    ) -> None:
        self.engine, self.registry, self.settings, self.every = engine, registry, settings, every
        self.keeper = keeper_of(settings, registry, replay, swap=self._swap)
        self.swaps: list[str] = []

    def __call__(self, step: int) -> None:
        number, now = divmod(step, self.every)
        if now != self.every - 1:
            return
        if number < len(self.NOISES):
            candidate(self.registry, off_by(self.engine.target, self.NOISES[number]), self.engine.target)
            scored(self.settings)
        elif number == len(self.NOISES):
            self.registry.rollback("by hand")
        self.keeper.work()

    def _swap(self, version, acceptance) -> None:  # type: ignore[no-untyped-def]
        self.swaps.append(self.engine.load_draft(version.path, acceptance))


@pytest.fixture
def improving(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    target: LanguageModel,
    answer: Answer,
    make_engine: MakeEngine,
) -> Callable[[int, int], Improving]:
    replay.append([answer(f"r{i}") for i in range(48)])
    serving = registry.current()
    assert serving is not None
    path: Path = serving.path

    def make(slots: int, every: int) -> Improving:
        draft = load_pretrained(str(path), target, target.dtype)
        engine = make_engine(draft, speculation_length=3, max_slots=slots)
        return Improving(engine, settings, registry, replay, every)

    return make


def test_what_is_emitted_across_gated_swaps_follows_the_target(
    improving: Callable[[int, int], Improving], target: LanguageModel
) -> None:
    between = improving(64, 4)
    params = POLICIES["plain"]
    assert float(excess(between.engine, target, params, requests=400, between_steps=between).max()) < 5
    assert len(between.swaps) == 4, [version.reason for version in between.registry.versions()]  # and a rollback
    assert len(set(between.swaps)) == 3


def test_greedy_answers_across_gated_swaps_are_transformers_own(
    improving: Callable[[int, int], Improving], target: LanguageModel, make_engine: MakeEngine
) -> None:
    texts = [PROMPT[:9], *prompts()[:3]]
    expected = [hf_greedy(target, text, 40) for text in texts]
    between = improving(4, 4)
    engine, step, found = between.engine, 0, {}
    for number, text in enumerate(texts):
        params = SamplingParams(temperature=0.0, max_tokens=len(expected[number]), ignore_eos=True)
        engine.submit(Request(str(number), tuple(text), params))
    versions: set[str] = set()
    while engine.has_work:
        between(step)
        for output in engine.step().finished:
            found[int(output.request_id)] = list(output.token_ids)
            versions |= set(output.stats.draft_versions)
        step += 1
    assert [found[i] for i in range(len(texts))] == expected
    assert len(between.swaps) >= 3
    assert len(versions) >= 3
