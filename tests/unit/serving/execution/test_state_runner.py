"""Runner of drafts that read states: of text that nobody wants the states of, one layer keeps keys and values alone."""

from __future__ import annotations

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.proposers.draft_model import DraftModel

from ...models.state_drafts import state_draft

LONG = 90  # tokens: more than passes of few tokens take
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "page_tokens", "alone"),
    [("eagle", 0, True), ("eagle", 16, True), ("block", 0, True), ("two layers of eagle", 0, False)],
)
def test_a_token_reads_the_same_behind_text_whose_states_nobody_wanted(
    target: LanguageModel, kind: str, page_tokens: int, alone: bool
) -> None:
    settings = EngineSettings(
        max_slots=2, max_model_len=128, compile=False, page_tokens=page_tokens, proposer="draft_model"
    )
    engine = Engine(target, state_draft(kind, target), settings)
    assert isinstance(engine.proposer, DraftModel)
    runner = engine.proposer.runner
    texts = torch.randint(3, 250, (2, LONG), generator=torch.Generator().manual_seed(3)).tolist()
    for row, text in enumerate(texts):
        engine.submit(Request(str(row), tuple(text), PARAMS))
    while len(engine.sequences.decoding) < 2:
        engine.step()
    slots = [sequence.held_slot for sequence in engine.sequences.decoding]
    computed: list[int] = []
    hook = runner.model.layers[-1].mlp.register_forward_hook(lambda *_: computed.append(1))
    found = []
    with torch.inference_mode():
        for wanted in (0, 1):
            for slot in slots:
                runner.cache.clear(slot)
            computed.clear()
            read = runner.read([RowInput(s, 0, text[:-1], wanted) for s, text in zip(slots, texts, strict=True)])
            assert len(read) == 2 * wanted
            assert bool(computed) == (not alone or bool(wanted))
            found.append(runner.read([RowInput(s, LONG - 1, text[-1:]) for s, text in zip(slots, texts, strict=True)]))
    hook.remove()
    assert torch.allclose(found[0], found[1], atol=1e-5)
    engine.close()
