"""Fresh text of which the file writes a part."""

from __future__ import annotations

import pytest

from distillspec.config import DataConfig, DraftConfig
from distillspec.data.on_policy import fresh_samples
from distillspec.models import LanguageModel, initialise_draft
from distillspec.types import Prompt

ANSWERED = {f"p{i}" for i in range(12)}
PROMPTS = [Prompt(f"p{i}", (1, 30 + i), response="ab" if f"p{i}" in ANSWERED else None) for i in range(40)]


@pytest.fixture(scope="module")
def draft(target: LanguageModel) -> LanguageModel:
    return initialise_draft(DraftConfig(layers=1), target)


@pytest.mark.parametrize(("share", "writers"), [(0.0, {"fixed"}), (0.5, {"draft", "fixed"}), (1.0, {"draft"})])
def test_prompts_that_the_file_should_answer_and_does_not_are_passed_over(
    target: LanguageModel, draft: LanguageModel, share: float, writers: set[str]
) -> None:
    config = DataConfig(
        source="mixed",
        mixed_with="fixed",
        mixed_lambda=share,
        prompts="f.jsonl",
        refresh_prompts=2,
        max_new_tokens=3,
        signal="none",
    )
    seen: set[str] = set()
    for step in range(12):
        samples = fresh_samples(config, target, draft, PROMPTS, 0, step)
        assert len(samples) == 2, "as many as are asked for, and never none"
        assert {s.prompt_id for s in samples if s.source == "fixed"} <= ANSWERED
        seen |= {s.source for s in samples}
    assert seen == writers
