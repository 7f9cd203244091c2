"""Slots and their length: what settings, models and free memory allow."""

from __future__ import annotations

import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, memory
from distillspec.serving import EngineSettings
from distillspec.serving.execution import memory as engine_memory
from distillspec.serving.execution.memory import choose_model_len, choose_slots


def test_slots_and_length_come_from_memory_and_model(target: LanguageModel, draft: LanguageModel) -> None:
    token = 2 * 4 * 2 * 16 * 4  # keys and values, layers, heads, dim, bytes
    tight = EngineSettings(max_slots=16, cache_gib=5.5 * 101 * token / 2**30)
    assert choose_slots(tight, [target], 100) == 5
    assert choose_slots(tight, [target, draft], 100) == 3  # the draft has half the layers
    assert choose_slots(EngineSettings(max_slots=2), [target], 100) == 2
    with pytest.raises(ConfigError, match=r"needs .* GiB of cache and there are .*; lower max_model_len"):
        choose_slots(EngineSettings(cache_gib=1e-6), [target], 100)
    assert choose_model_len(EngineSettings(), [target]) == 2048
    with pytest.raises(ConfigError, match="max_model_len=4096: tiny reads at most 2048 tokens"):
        choose_model_len(EngineSettings(max_model_len=4096), [target])


@pytest.mark.parametrize("free_slots", [0.5, 1, 7.9, 40])
def test_engine_and_slot_generator_have_the_same_slots_in_the_same_memory(
    target: LanguageModel, draft: LanguageModel, monkeypatch: pytest.MonkeyPatch, free_slots: float
) -> None:
    models, fit = [target, draft], int(min(free_slots, 16))
    free = 2 * free_slots * memory.slot_bytes(models, 100)  # half of it is for caches
    for module in (memory, engine_memory):
        monkeypatch.setattr(module, "free_bytes", lambda device: free)
    assert memory.slots_that_fit(models, 16, 100) == fit
    if fit:
        assert choose_slots(EngineSettings(max_slots=16), models, 100) == fit
    else:
        with pytest.raises(ConfigError, match="one sequence of max_model_len=100 needs"):
            choose_slots(EngineSettings(max_slots=16), models, 100)


def test_a_slots_bytes_are_those_of_the_caches(target: LanguageModel, draft: LanguageModel) -> None:
    token = 2 * 2 * 16 * 4  # keys and values, heads, dim, bytes
    assert memory.slot_bytes([target, draft], 100) == (4 + 2) * token * 101  # one spare place
