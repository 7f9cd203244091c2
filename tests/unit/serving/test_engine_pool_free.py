"""Sources without a model as members of a pool: a request may have one alone, and text is the target's own."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from distillspec.models import LanguageModel, save_draft
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.selection.selecting import selecting

from .conftest import TIGHT, MakeEngine, plain_answers, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
BESIDE = ["prompt_lookup", "suffix", "draft_model"]


@pytest.fixture
def pair(draft: LanguageModel, truncated_draft: LanguageModel) -> dict[str, LanguageModel]:
    return {"half": draft, "small": truncated_draft}


@pytest.mark.parametrize("member", ["lookup", "suffix"])
def test_a_request_has_such_a_source_alone(
    target: LanguageModel, pair: dict[str, LanguageModel], make_engine: MakeEngine, member: str
) -> None:
    engine = make_engine(pair, proposer=BESIDE, selection="fixed", selection_options={"draft": member}, **TIGHT)
    asked = prompts(6)
    found = engine.generate(asked, GREEDY)
    assert [output.token_ids for output in found] == plain_answers(target, asked, [GREEDY] * 6)
    assert {source for output in found for source in output.stats.sources} == {member}
    chooses = selecting(engine.controller)
    assert chooses is not None
    assert set(chooses.figures.requests) == {member}
    engine.check_integrity()


@pytest.mark.parametrize("selection", ["goodput", "lbss", "random", "epsilon_greedy", "prompt_length"])
def test_each_selection_chooses_among_all_members(
    target: LanguageModel, pair: dict[str, LanguageModel], make_engine: MakeEngine, selection: str
) -> None:
    engine = make_engine(pair, proposer=BESIDE, selection=selection, **TIGHT)
    asked = prompts(8)
    found = engine.generate(asked, GREEDY)
    assert [output.token_ids for output in found] == plain_answers(target, asked, [GREEDY] * 8)
    chooses = selecting(engine.controller)
    assert chooses is not None
    members = {"half", "small", "lookup", "suffix"}
    assert set(chooses.figures.requests) <= members
    if selection == "random":
        assert len(chooses.figures.requests) > 2


def test_drafts_come_and_go_beside_such_sources(
    target: LanguageModel, pair: dict[str, LanguageModel], make_engine: MakeEngine
) -> None:
    engine = make_engine(pair, proposer=BESIDE, selection="random", **TIGHT)
    asked, draws = prompts(3), Random(2)
    wanted = plain_answers(target, asked, [GREEDY] * 3)
    for _ in range(5):
        if "small" in engine.drafts and draws.random() < 0.5:
            engine.unload_draft("small")
        else:
            engine.use_draft(pair["small"], name="small")
        assert [output.token_ids for output in engine.generate(asked, GREEDY)] == wanted
        engine.check_integrity()


def test_they_are_named_among_the_drafts(target: LanguageModel, pair: dict[str, LanguageModel], tmp_path: Path) -> None:
    for name, draft in pair.items():
        save_draft(draft, tmp_path / name, target)
    paths = [tmp_path / "half", "suffix", tmp_path / "small"]
    engine = Engine.from_pretrained("tiny", draft=paths, dtype="float32", max_slots=2, max_model_len=128)
    assert list(engine.drafts) == ["half", "small"]
    assert engine.settings.proposers == ("suffix", "draft_model")
    chooses = selecting(engine.controller)
    assert chooses is not None
    assert chooses.free == ("suffix",)
    engine.close()
