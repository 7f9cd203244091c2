"""Training samples: deadlines, and collections that were interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from distillspec.commands import samples
from distillspec.config import DataConfig, DraftConfig
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.data.scoring import ScoringWriter
from distillspec.models import LanguageModel, initialise_draft
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
