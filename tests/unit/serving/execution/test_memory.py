"""Slots and their length: what settings, models and free memory allow."""

from __future__ import annotations

import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, memory
from distillspec.serving import EngineSettings
from distillspec.serving.execution import memory as engine_memory
from distillspec.serving.execution.memory import CachePlan, choose_model_len, plan_cache

TOKEN = 2 * 4 * 2 * 16 * 4  # bytes of the target's: keys and values, layers, heads, dim, bytes


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory be taken at once, as on CUDA."""
    monkeypatch.setattr(engine_memory, "commits_lazily", lambda device: False)


def gib(tokens: float) -> float:
    return tokens * TOKEN / 2**30


def test_slots_and_length_come_from_memory_and_model(
    at_once: None, target: LanguageModel, draft: LanguageModel
) -> None:
    tight = EngineSettings(max_slots=16, cache_gib=gib(5.5 * 101))
    assert plan_cache(tight, [target], 100) == CachePlan(5, 100, 500)
    assert plan_cache(tight, [target, draft], 100).slots == 3  # the draft has half the layers
    assert plan_cache(EngineSettings(max_slots=2), [target], 100).slots == 2
    with pytest.raises(ConfigError, match=r"needs .* GiB of cache and there are .*; lower max_model_len"):
        plan_cache(EngineSettings(cache_gib=1e-6), [target], 100)
    assert choose_model_len(EngineSettings(), target) == 2048
    with pytest.raises(ConfigError, match="max_model_len=4096: tiny reads at most 2048 tokens"):
        choose_model_len(EngineSettings(max_model_len=4096), target)


@pytest.mark.parametrize("free_slots", [0.5, 1, 7.9, 40])
def test_engine_and_slot_generator_have_the_same_slots_in_the_same_memory(
    at_once: None, target: LanguageModel, draft: LanguageModel, monkeypatch: pytest.MonkeyPatch, free_slots: float
) -> None:
    models, fit = [target, draft], int(min(free_slots, 16))
    free = 2 * free_slots * memory.slot_bytes(models, 100)  # half of it is for caches
    for module in (memory, engine_memory):
        monkeypatch.setattr(module, "free_bytes", lambda device: free)
    assert memory.slots_that_fit(models, 16, 100) == fit
    if fit:
        assert plan_cache(EngineSettings(max_slots=16), models, 100).slots == fit
    else:
        with pytest.raises(ConfigError, match="one sequence of max_model_len=100 needs"):
            plan_cache(EngineSettings(max_slots=16), models, 100)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is committed as it is written on Linux")
@pytest.mark.parametrize(
    ("tokens", "together", "block"),
    [
        (1 << 20, 16 * 2000, 1),  # room for all
        (6500, 6464, 64),  # three whole slots, or sixteen shorter texts
        (2050, 2048, 64),
    ],
)
def test_slots_that_take_memory_as_texts_grow_may_be_more_than_could_be_full(
    target: LanguageModel, tokens: int, together: int, block: int
) -> None:
    plan = plan_cache(EngineSettings(max_slots=16, cache_gib=gib(tokens)), [target], 2000)
    assert plan == CachePlan(16, 2000, together, True, block)
    assert plan.bytes([target]) <= tokens * TOKEN
    assert "as texts grow" in plan.describe([target])
    with pytest.raises(ConfigError, match="one sequence of max_model_len=2000 needs"):
        plan_cache(EngineSettings(cache_gib=gib(1990)), [target], 2000)
    own = EngineSettings(cache_gib=gib(tokens), max_cache_tokens=700)
    assert plan_cache(own, [target], 2000).tokens == 700


@pytest.mark.parametrize(
    ("tokens", "max_len", "together", "count"),
    [
        (1 << 20, 2000, 16 * 2000, 16 * 125),  # room for all
        (1 << 20, 2001, 16 * 2001, 16 * 126),
        (6500, 2000, 405 * 16, 405),  # one page takes what padding writes
        (6500, 2001, 389 * 16, 405),  # sixteen full slots may end within a page
        (2032, 2000, 2016, 126),
    ],
)
def test_pages_are_planned_in_the_memory_there_is(
    target: LanguageModel, tokens: int, max_len: int, together: int, count: int
) -> None:
    plan = plan_cache(EngineSettings(max_slots=16, cache_gib=gib(tokens)), [target], max_len, page=16)
    assert plan == CachePlan(16, max_len, together, block=16, page_count=count)
    assert plan.bytes([target]) <= tokens * TOKEN
    assert "in pages of 16" in plan.describe([target])
    pages = plan.pages()
    assert pages is not None
    assert pages.count == count


def test_pages_for_fewer_tokens_and_for_too_few(target: LanguageModel) -> None:
    settings = EngineSettings(max_slots=16, cache_gib=gib(1 << 20), max_cache_tokens=700)
    assert plan_cache(settings, [target], 2000, page=16) == CachePlan(16, 2000, 688, block=16, page_count=43)
    with pytest.raises(ConfigError, match="one sequence of max_model_len=2000 needs"):
        plan_cache(EngineSettings(cache_gib=gib(2000)), [target], 2000, page=16)
    with pytest.raises(ConfigError, match="max_cache_tokens=9 is less than a page of 16 tokens; set page_tokens lower"):
        plan_cache(EngineSettings(max_cache_tokens=9), [target], 2000, page=16)


@given(
    most=st.integers(1, 6),
    max_len=st.integers(2, 70),
    page=st.integers(1, 20),
    tokens=st.integers(40, 500),
    lengths=st.lists(st.integers(1, 70), max_size=6),
)
def test_there_are_pages_for_every_text_within_the_plan(
    target: LanguageModel, most: int, max_len: int, page: int, tokens: int, lengths: list[int]
) -> None:
    """Reservations are whole pages or a whole slot, as the scheduler makes them."""
    try:
        plan = plan_cache(EngineSettings(max_slots=most, cache_gib=gib(tokens)), [target], max_len, page=page)
    except ConfigError:
        assume(False)
    pages, room = plan.pages(), plan.tokens
    assert pages is not None
    for slot, length in enumerate(lengths[:most]):
        reserved = min(-(-length // page) * page, max_len)
        if reserved <= room:
            room -= reserved
            assert not pages.lacks(slot, reserved)
            pages.resize(slot, reserved)
    pages.check_integrity()


def test_a_slots_bytes_are_those_of_the_caches(target: LanguageModel, draft: LanguageModel) -> None:
    token = 2 * 2 * 16 * 4  # keys and values, heads, dim, bytes
    assert memory.slot_bytes([target, draft], 100) == (4 + 2) * token * 101  # one spare place
