"""Room for one more draft of a pool: it fits or is refused by name, and takes slots of the next start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.models import LanguageModel
from distillspec.models.memory import token_bytes
from distillspec.serving import EngineSettings
from distillspec.serving.execution import draft_room
from distillspec.serving.execution import memory as engine_memory
from distillspec.serving.execution.draft_room import room_for
from distillspec.serving.execution.memory import plan_cache

LENGTH = 100


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_memory, "commits_lazily", lambda device: False)


def test_what_fits_into_the_memory_that_is_set_takes_no_slots(target: LanguageModel, draft: LanguageModel) -> None:
    bytes_ = 4 * (LENGTH + 1) * token_bytes([target, draft, draft])
    settings = EngineSettings(max_slots=4, cache_gib=1.01 * bytes_ / 2**30)
    plan = plan_cache(settings, [target, draft], LENGTH)
    assert plan.slots == 4
    found = room_for(settings, target, [draft], replace(draft, name="code-specialist"), plan)
    assert found == (None, 4)


def test_what_does_not_fit_is_refused_by_name(target: LanguageModel, draft: LanguageModel) -> None:
    bytes_ = 4 * (LENGTH + 1) * token_bytes([target, draft])
    settings = EngineSettings(max_slots=4, cache_gib=1.01 * bytes_ / 2**30)
    plan = plan_cache(settings, [target, draft], LENGTH)
    found = room_for(settings, target, [draft], replace(draft, name="code-specialist"), plan)
    assert found.slots == 0
    assert found.problem is not None
    assert found.problem.startswith("the draft code-specialist needs")


def test_its_weights_and_cache_take_slots_of_the_next_start(
    target: LanguageModel, draft: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(max_slots=8)
    own = (LENGTH + 1) * token_bytes([target, draft])
    monkeypatch.setattr(engine_memory, "cache_budget", lambda device: 8.5 * own)
    plan = plan_cache(settings, [target, draft], LENGTH)
    assert plan.slots == 8
    new = replace(draft, name="new")
    weights = sum(weight.numel() * weight.element_size() for weight in new.model.parameters())
    for free, slots in ((100 * own + weights, 8), (8 * own + weights, 6)):
        monkeypatch.setattr(draft_room, "free_bytes", lambda device, free=free: free)
        # Half of what is free and what the caches have now, for a target and two drafts of half its layers.
        expected = min(8, int(8 * ((free - weights + 8 * own) / 2 // token_bytes([target, new, new])) / plan.tokens))
        assert room_for(settings, target, [draft], new, plan) == (None, expected)
        assert expected == slots
    monkeypatch.setattr(draft_room, "free_bytes", lambda device: None)
    assert room_for(settings, target, [draft], new, plan) == (None, 8)
