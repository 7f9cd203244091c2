"""Logged answers without an engine, and settings for a folder of the test's own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.config import AdaptConfig, DraftConfig, GateConfig, OnlineConfig, ReplayConfig, TargetConfig
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.recording import top_signal
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.signals import TeacherSignal
from distillspec.types import SamplingPolicy

ENTRIES = 16
NAMES = ("general", "maths")  # of a pool's drafts
Answer = Callable[..., LoggedAnswer]


@pytest.fixture
def key(target: LanguageModel) -> LogKey:
    return LogKey.of(target.identity, ENTRIES)


@pytest.fixture
def answer(target: LanguageModel) -> Answer:
    """`answer("r1", tenant="a")`: random text with the target's true signal, half of it accepted.

    The text is drawn from the ids of `vocabulary`.
    """

    def make(
        name: str,
        *,
        tokens: int = 20,
        entries: int = ENTRIES,
        vocabulary: Sequence[int] = range(3, 250),
        **changes: Any,
    ) -> LoggedAnswer:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        places = torch.randint(0, len(vocabulary), (6 + tokens,), generator=generator).tolist()
        ids = [vocabulary[place] for place in places]
        with torch.no_grad():
            logits = target.logits(torch.tensor([ids]))[0, 5:-1]
        best, logprobs, tail, *_ = top_signal(logits, entries)
        of_text = logits.log_softmax(-1).gather(-1, torch.tensor(ids[6:])[:, None])[:, 0]
        made = LoggedAnswer(
            request_id=name,
            index=0,
            tenant="default",
            domain="default",
            policy=SamplingPolicy(),
            time_s=1000.0,
            finished=False,
            prompt_ids=tuple(ids[:6]),
            response_ids=tuple(ids[6:]),
            signal=TeacherSignal("topk", best.int(), logprobs.half(), tail),
            policy_logprobs=of_text.half(),
            policy_log_z=torch.zeros(tokens, dtype=torch.float16),
            outcomes=torch.tensor([i % 2 for i in range(tokens)], dtype=torch.uint8),
            draft_tokens=torch.arange(tokens, dtype=torch.int32),
            draft_probs=torch.full((tokens,), 0.5, dtype=torch.float16),
            draft_entropies=torch.ones(tokens, dtype=torch.float16),
            draft_versions=("one",),
            version_of=torch.zeros(tokens, dtype=torch.uint8),
        )
        return replace(made, **changes)

    return make


@pytest.fixture
def settings(tmp_path: Path) -> OnlineSettings:
    return OnlineSettings(
        OnlineConfig(mode="decoupled", folder=str(tmp_path / "online"), metrics_s=0.2),
        ReplayConfig(share=1.0, entries=ENTRIES, shard_positions=200, flush_s=0.2),
        AdaptConfig(every_requests=20, min_requests=4, learning_rate=2e-3, max_steps=40, epochs=4, on_drift=False),
        GateConfig(
            requests=48, min_requests=4, margin=0.0, domain_requests=4, rollback_requests=8, bootstrap_samples=200
        ),
        target=TargetConfig(path="tiny", dtype="float32", device="cpu"),
    )


@pytest.fixture
def small_draft(target: LanguageModel) -> LanguageModel:
    return initialise_draft(DraftConfig(layers=2), target)


@pytest.fixture
def registry(settings: OnlineSettings, small_draft: LanguageModel, target: LanguageModel) -> VersionRegistry:
    """Return a registry with one promoted version."""
    made = VersionRegistry(settings.layout.versions)
    first = made.add(lambda folder: save_draft(small_draft, folder, target))
    made.promote(first.name, "first draft")
    return made


@pytest.fixture
def replay(settings: OnlineSettings, key: LogKey) -> ReplayLog:
    return ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 2000.0)


@pytest.fixture
def folders(target: LanguageModel, tmp_path: Path) -> dict[str, Path]:
    """Return the folders of a pool's drafts by name."""
    for name, layers in zip(NAMES, (2, 1), strict=True):
        save_draft(initialise_draft(DraftConfig(layers=layers), target), tmp_path / name, target)
    return {name: tmp_path / name for name in NAMES}
