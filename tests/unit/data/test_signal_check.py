"""Recorded signals are compared with the target's own pass over the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distillspec.commands import samples as commands
from distillspec.config import DataConfig
from distillspec.data import signal_check
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.data.signal_check import FAR, strange_signals, strange_text
from distillspec.errors import ConfigError, RunError
from distillspec.generation import SlotGenerator
from distillspec.models import LanguageModel
from distillspec.signals import SignalRequest, TeacherSignal
from distillspec.types import GenerationRequest, Prompt, Sample, SamplingPolicy

PROMPTS = [Prompt(str(i), tuple(range(20 + i, 26 + 2 * i))) for i in range(4)]


def written(target: LanguageModel, kind: str = "topk") -> list[Sample]:
    asked = [GenerationRequest(prompt, 8, seed=1) for prompt in PROMPTS]
    signal = SignalRequest(kind, 8)  # type: ignore[arg-type]
    return [own for _, own in SlotGenerator(target).generate(asked, SamplingPolicy(), stop_ids=(), signal=signal)]


def spoilt(sample: Sample) -> Sample:
    """The sample with the signals of other places."""
    assert isinstance(sample.signal, TeacherSignal)
    return replace(sample, signal=sample.signal.at(torch.arange(len(sample.signal)).roll(1)))


@pytest.mark.parametrize("kind", ["topk", "sampled"])
def test_sound_signals_pass_and_those_of_other_places_do_not(target: LanguageModel, kind: str) -> None:
    sound = written(target, kind)
    assert strange_signals(sound, target) is None
    found = strange_signals([spoilt(sample) for sample in sound], target)
    assert found is not None
    assert f"nats off what {target.name} says" in found
    assert float(found.split(" nats")[0].split()[-1]) > FAR


def test_text_without_signals_passes(target: LanguageModel) -> None:
    assert strange_signals([], target) is None
    assert strange_signals([replace(sample, signal=None) for sample in written(target)], target) is None


def test_training_begins_with_sound_signals_alone(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = DataFolder(tmp_path), DataConfig(max_new_tokens=8, signal_entries=8)
    folder.write_prompts(PromptSet(tuple(PROMPTS), ()))
    cached = replace(config, cache=str(tmp_path))
    assert len(commands.prepare_samples(config, target, folder, 0)) == len(PROMPTS)
    assert len(commands.prepare_samples(cached, target, folder, 0)) == len(PROMPTS)
    read = commands.read_samples
    for place in (commands, signal_check):
        monkeypatch.setattr(place, "read_samples", lambda *args: [spoilt(sample) for sample in read(*args)])
    with pytest.raises(ConfigError, match=r"data\.cache=.* nats off .* write the text again"):
        commands.prepare_samples(cached, target, folder, 0)
    with pytest.raises(RunError, match=r"nats off .* try data\.generator=engine"):
        commands.prepare_samples(config, target, folder, 0)


@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(0.8, 0, 0.9, 0.0)])
def test_the_targets_own_text_passes_and_text_of_another_does_not(
    target: LanguageModel, policy: SamplingPolicy
) -> None:
    asked = [GenerationRequest(Prompt(str(i), tuple(range(20 + i, 30 + i))), 64, seed=i) for i in range(8)]
    own = [sample for _, sample in SlotGenerator(target).generate(asked, policy, stop_ids=())]
    assert strange_text(own, target, policy) is None
    hot = [sample for _, sample in SlotGenerator(target).generate(asked, SamplingPolicy(4.0), stop_ids=())]
    assert "nats a token off" in str(strange_text(hot, target, SamplingPolicy()))
    assert strange_text(own[:1], target, policy) is None or len(own[0].response_ids) >= 64, "too little to say anything"


def test_recorded_text_of_another_is_refused_by_name(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = written(target)
    monkeypatch.setattr(signal_check, "read_samples", lambda *args: sound)
    assert signal_check.read_checked(tmp_path, target, "stop.text=RUN") == sound
    monkeypatch.setattr(signal_check, "read_samples", lambda *args: [spoilt(sample) for sample in sound])
    with pytest.raises(ConfigError, match=r"stop\.text=RUN: .* nats off"):
        signal_check.read_checked(tmp_path, target, "stop.text=RUN")


def test_greedy_text_of_another_is_known_by_its_tokens(target: LanguageModel) -> None:
    """A greedy policy gives every allowed token the probability 1, so that none of them surprises."""
    asked = [GenerationRequest(Prompt(str(i), tuple(range(20 + i, 30 + i))), 64, seed=i) for i in range(4)]
    greedy = SamplingPolicy(temperature=0.0)
    own = [sample for _, sample in SlotGenerator(target).generate(asked, greedy, stop_ids=())]
    assert strange_text(own, target, greedy) is None
    few = [replace(sample, response_ids=(*sample.response_ids[:-4], 9, 9, 9, 9)) for sample in own]
    assert strange_text(few, target, greedy) is None, "an engine's pass rounds otherwise"
    drawn = [sample for _, sample in SlotGenerator(target).generate(asked, SamplingPolicy(4.0), stop_ids=())]
    assert f"{target.name} would never write" in str(strange_text(drawn, target, greedy))
    assert strange_text([replace(drawn[0], response_ids=drawn[0].response_ids[:63])], target, greedy) is None
