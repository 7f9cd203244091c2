"""Training samples: deadlines, collections that were interrupted, and text of a target that scores it too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distillspec.commands import samples
from distillspec.config import DataConfig, DraftConfig
from distillspec.data import shards
from distillspec.data.collect import score
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.data.scoring import ScoringWriter
from distillspec.errors import ConfigError
from distillspec.generation import GENERATORS
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import EngineSettings
from distillspec.serving.generator import EngineGenerator
from distillspec.signals import HiddenSignal, SignalRequest
from distillspec.types import Prompt, Sample


def test_scoring_ends_at_its_limit_and_is_not_taken_up_again(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    plain = samples.score

    def slow(*args):
        now[0] += 40.0
        return plain(*args)

    monkeypatch.setattr(samples, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(samples, "score", slow)
    folder = DataFolder(tmp_path)
    folder.write_prompts(PromptSet(tuple(Prompt(str(i), (1, 30 + i), response="ab") for i in range(100)), ()))
    config = DataConfig(source="fixed", prompts="f.jsonl", max_minutes=1.0, signal_entries=4)
    made = samples.prepare_samples(config, target, folder, 0)
    assert len(made) == 2 * samples.SCORED_TOGETHER
    assert "left out 36 responses: data.max_minutes=1 were over" in capsys.readouterr().out
    assert len(samples.prepare_samples(config, target, folder, 0)) == len(made)
    assert now == [80.0]


def test_an_interruption_does_not_begin_the_minutes_anew(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, plain, lots = [0.0], samples.score, list[int]()

    def slow(*args):
        if len(lots) == 1:
            lots.append(0)
            raise KeyboardInterrupt
        lots.append(len(args[0]))
        now[0] += 40.0
        return plain(*args)

    for module in (samples, shards):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(samples, "score", slow)
    folder = DataFolder(tmp_path)
    folder.write_prompts(PromptSet(tuple(Prompt(str(i), (1, 30 + i), response="ab") for i in range(200)), ()))
    lot = samples.SCORED_TOGETHER
    config = DataConfig(source="fixed", prompts="f.jsonl", max_minutes=1.0, signal_entries=4, shard_sequences=lot)
    with pytest.raises(KeyboardInterrupt):
        samples.prepare_samples(config, target, folder, 0)
    assert len(samples.prepare_samples(config, target, folder, 0)) == 2 * lot
    assert now == [80.0]


@pytest.mark.parametrize("source", ["draft", "mixed"])
def test_an_interrupted_collection_draws_what_a_whole_one_draws(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    draft = initialise_draft(DraftConfig(layers=1), target)
    config = DataConfig(source=source, max_new_tokens=6, signal_entries=4, tail_draws=3)
    prompts = PromptSet(tuple(Prompt(str(i), (1, 30 + i)) for i in range(12)), ())
    whole, parts = DataFolder(tmp_path / "whole"), DataFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.write_prompts(prompts)
    with monkeypatch.context() as patched:
        patched.setattr(ScoringWriter, "add", stopped_after(3))
        with pytest.raises(KeyboardInterrupt):
            samples.prepare_samples(config, target, parts, 0, draft=draft)
    ours, theirs = (
        {sample.prompt_id: sample for sample in samples.prepare_samples(config, target, folder, 0, draft=draft)}
        for folder in (whole, parts)
    )
    assert ours.keys() == theirs.keys() == {p.id for p in prompts.train}
    for key, sample in ours.items():
        assert sample.response_ids == theirs[key].response_ids
        assert drawn(sample) == drawn(theirs[key])


def stopped_after(count: int) -> Callable[[ScoringWriter, Sample], None]:
    """`ScoringWriter.add`, interrupted once it has taken `count` samples."""

    def add(writer: ScoringWriter, sample: Sample) -> None:
        if len(writer.waiting) == count:
            raise KeyboardInterrupt
        writer.waiting.append(sample)

    return add


def drawn(sample: Sample) -> list[list[int]]:
    assert sample.signal is not None
    assert sample.signal.tail_ids is not None
    return sample.signal.tail_ids.tolist()


def folder_of(count: int, root: Path) -> DataFolder:
    folder = DataFolder(root)
    prompts = tuple(Prompt(str(i), (1, 30 + i), response="ab") for i in range(count))
    folder.write_prompts(PromptSet(prompts, ()))
    return folder


def test_a_time_limit_leaves_something_of_each_part_of_a_mixture(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(samples, "time", SimpleNamespace(monotonic=lambda: 0.0))  # to a generator all that is long over
    draft = initialise_draft(DraftConfig(layers=1), target)
    config = DataConfig(source="mixed", max_new_tokens=6, signal_entries=4, batch_slots=2, max_minutes=0.001)
    made = samples.prepare_samples(config, target, folder_of(40, tmp_path), 0, draft=draft)
    assert {sample.source for sample in made} == {"draft", "teacher"}
    assert len(made) < 40
    assert f"left out {40 - len(made)} responses: data.max_minutes=0.001 were over" in capsys.readouterr().out


def test_the_parts_of_a_mixture_have_time_by_their_prompts_and_the_last_one_all_that_is_left(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, given = [0.0], list[tuple[str, int, float]]()
    plain = samples.sample_responses

    def quick(prompts: Any, generator: Any, writer: Any, *, deadline: float, **settings: Any) -> int:
        given.append((generator.source, len(prompts), deadline))
        now[0] += 5.0
        return plain(prompts, generator, writer, deadline=None, **settings)

    monkeypatch.setattr(samples, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(samples, "sample_responses", quick)
    draft = initialise_draft(DraftConfig(layers=1), target)
    config = DataConfig(source="mixed", max_new_tokens=2, signal_entries=4, mixed_lambda=0.3, max_minutes=1.0)
    assert len(samples.prepare_samples(config, target, folder_of(20, tmp_path), 0, draft=draft)) == 20
    (first, own, until), (second, rest, end) = given
    assert (first, second, own + rest) == ("draft", "teacher", 20)
    assert until == pytest.approx(60 * own / 20)
    assert end == pytest.approx(60)
    assert "left out" not in capsys.readouterr().out


def test_a_draft_whose_time_is_over_leaves_the_files_responses_theirs(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]

    def slow(*args: Any) -> list[Sample]:
        now[0] += 80.0
        return score(*args)

    monkeypatch.setattr(samples, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(samples, "score", slow)
    draft = initialise_draft(DraftConfig(layers=1), target)
    config = DataConfig(
        source="mixed",
        mixed_with="fixed",
        prompts="f.jsonl",
        mixed_lambda=0.2,
        max_new_tokens=6,
        max_minutes=1e-3,
        signal_entries=4,
    )
    made = samples.prepare_samples(config, target, folder_of(100, tmp_path), 0, draft=draft)
    written = [sample.source for sample in made]
    assert written.count("fixed") == samples.SCORED_TOGETHER
    assert written.count("draft") > 0
    assert f"left out {100 - len(made)} responses" in capsys.readouterr().out


@pytest.mark.parametrize("signal", ["topk", "hidden"])
def test_a_draft_that_reads_states_writes_with_the_target_and_its_signal(
    target: LanguageModel, tmp_path: Path, signal: str
) -> None:
    draft = initialise_draft(DraftConfig(kind="eagle"), target)
    config = DataConfig(source="draft", signal=signal, signal_entries=4, tail_draws=0, max_new_tokens=3, batch_slots=4)
    made = samples.prepare_samples(config, target, folder_of(12, tmp_path), 0, draft=draft)
    assert [sample.source for sample in made] == ["draft"] * 12
    request = SignalRequest(signal, 4 if signal == "topk" else 0)
    again = score([replace(sample, signal=None) for sample in made], target, request, 0)
    for found, wanted in zip(made, again, strict=True):
        assert found.signal is not None
        assert wanted.signal is not None
        name = "logprobs" if signal == "topk" else "hidden"
        values = [getattr(each.signal, name).float() for each in (found, wanted)]
        torch.testing.assert_close(*values, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(("source", "generator"), [("teacher", "slots"), ("teacher", "engine"), ("mixed", "slots")])
def test_a_target_scores_its_own_text_when_it_is_not_writing(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, generator: str
) -> None:
    """More answers than are scored together, in two lots. Its pass over them is not the one that it writes with."""
    settings = EngineSettings(max_slots=4, controller="fixed", speculation_length=0, compile=False)
    monkeypatch.setitem(GENERATORS, "engine", lambda writer, *others: EngineGenerator(writer, settings))
    config = DataConfig(
        source=source,
        generator=generator,
        mixed_by="token",
        signal="hidden",
        max_new_tokens=3,
        batch_slots=4,
        shard_sequences=40,
    )
    draft = initialise_draft(DraftConfig(layers=1), target) if source == "mixed" else None
    made = samples.prepare_samples(config, target, folder_of(48, tmp_path), 0, draft=draft)
    assert len(made) == 48
    signals = [sample.signal for sample in made]
    again = score([replace(sample, signal=None) for sample in made], target, SignalRequest("hidden"), 0)
    for found, wanted in zip(signals, [sample.signal for sample in again], strict=True):
        assert isinstance(found, HiddenSignal)
        assert isinstance(wanted, HiddenSignal)
        torch.testing.assert_close(found.hidden, wanted.hidden, atol=2e-3, rtol=2e-3)


def test_a_part_of_the_file_without_responses_is_left_out(target: LanguageModel, tmp_path: Path) -> None:
    """Also where an interrupted collection goes on, and those with responses are done."""
    prompts = tuple(Prompt(str(i), (1, 30 + i), response="ab" if i < 2 else None) for i in range(20))
    folder = DataFolder(tmp_path)
    folder.write_prompts(PromptSet(prompts, ()))
    config = DataConfig(
        source="mixed", mixed_with="fixed", prompts="f.jsonl", mixed_lambda=0.5, max_new_tokens=2, signal_entries=4
    )
    draft = initialise_draft(DraftConfig(layers=1), target)
    made = samples.prepare_samples(config, target, folder, 0, draft=draft)
    assert {sample.source for sample in made} == {"draft", "fixed"}
    manifest = folder.samples / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    again = samples.prepare_samples(config, target, folder, 0, draft=draft)
    assert [sample.prompt_id for sample in again] == [sample.prompt_id for sample in made]
    folder.write_prompts(PromptSet(tuple(replace(p, response=None) for p in prompts), ()))
    manifest.unlink()
    with pytest.raises(ConfigError, match=r"data\.mixed_with=fixed found no responses"):
        samples.prepare_samples(config, target, folder, 0, draft=draft)
