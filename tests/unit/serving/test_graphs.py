"""Recorded passes give what plain passes give; the recorder is a fake that replays by running again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, SamplingParams

from .conftest import hf_greedy, prompts


class FakeRecorder:
    """Counts what it records; a replay runs the computation on the buffers as they are then."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        run()

        def replay() -> Tensor:
            self.replayed += 1
            return run()

        return replay


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
def test_replayed_passes_write_the_same_text(random_model: Callable[[str], LanguageModel], kind: str) -> None:
    model = random_model(kind)
    asked = prompts(6)
    wanted = [hf_greedy(model, prompt, 20) for prompt in asked]
    recorder = FakeRecorder()
    draft = initialise_draft(DraftConfig(layers=2), model)
    settings = EngineSettings(max_slots=3, max_model_len=256, speculation_length=3)
    engine = Engine(model, draft, settings, recorder=recorder)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=20))
    engine.close()
    assert [list(output.token_ids) for output in outputs] == wanted
    assert recorder.replayed > 3 * recorder.recorded
    # Rows in powers of two up to the slots, widths in powers of two, lengths in buckets: few shapes.
    assert recorder.recorded <= 2 * 3 * 3 * 4
    assert engine.core.runner.graphs is not None
    assert engine.core.runner.graphs.shapes > 0
