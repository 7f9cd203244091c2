"""Steps in micro-batches: the text is that of whole steps, whatever comes between."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams

from .conftest import TIGHT, MakeEngine, prompts

pytestmark = pytest.mark.usefixtures("two_cores")
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=20, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=20, seed=4, ignore_eos=True, repetition_penalty=1.1),
]


def answers(engine: Engine, params: list[SamplingParams] = PARAMS) -> list[tuple[int, ...]]:
    asked = prompts()
    return [output.token_ids for output in engine.generate(asked, [params[i % len(params)] for i in range(len(asked))])]


@pytest.mark.parametrize(("count", "limits"), [(0, {}), (2, TIGHT), (2, {**TIGHT, "page_tokens": 4}), (3, {}), (8, {})])
def test_greedy_and_seeded_answers_are_those_of_whole_steps(
    draft: LanguageModel, make_engine: MakeEngine, count: int, limits: dict[str, Any]
) -> None:
    settings = {"max_slots": 8, "compile": False, **limits}
    whole = answers(make_engine(draft, **settings))
    assert answers(make_engine(draft, micro_batches=count, **settings)) == whole
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_drafts_that_read_states_are_pipelined_too(target: LanguageModel, make_engine: MakeEngine, kind: str) -> None:
    draft = initialise_draft(DraftConfig(kind=kind), target)
    whole = answers(make_engine(draft, max_slots=8, compile=False))
    assert answers(make_engine(draft, max_slots=8, compile=False, micro_batches=2)) == whole


def test_drawn_answers_repeat_and_several_drafts_share_steps(target: LanguageModel) -> None:
    drafts = {name: initialise_draft(DraftConfig(layers=layers), target) for name, layers in (("a", 1), ("b", 2))}
    limits = EngineSettings(
        max_slots=8,
        max_model_len=256,
        compile=False,
        measure_costs_s=0,
        controller="fixed",
        selection="random",
        micro_batches=2,
    )
    drawn = [SamplingParams(max_tokens=20, ignore_eos=True)]
    found = []
    for _ in range(2):
        engine = Engine(target, drafts, limits)
        found.append(answers(engine, drawn))
        engine.close()
    assert found[0] == found[1]


def test_requests_come_go_and_swap_drafts_between_micro_batches(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    plain = answers(make_engine(None, max_slots=8, compile=False))
    engine = make_engine(draft, max_slots=8, compile=False, micro_batches=3)
    other = initialise_draft(DraftConfig(layers=1), target)
    asked = prompts()
    for number, prompt in enumerate(asked):
        engine.submit(Request(str(number), tuple(prompt), PARAMS[number % len(PARAMS)]))
    engine.submit(Request("leaves", tuple(asked[0]), PARAMS[0]))
    found: dict[str, tuple[int, ...]] = {}
    for step in range(200):
        if step == 3:
            engine.abort("leaves")
            engine.use_draft(other)
        found.update({output.request_id: output.token_ids for output in engine.step().finished})
        if not engine.has_work:
            break
    assert [found[str(number)] for number in range(len(asked))] == plain


def test_a_draft_that_raises_in_the_thread_ends_no_request(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = answers(make_engine(None, max_slots=8, compile=False))
    engine = make_engine(draft, max_slots=8, compile=False, micro_batches=2)

    def broken(requests: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.proposer, "propose", broken)
    assert answers(engine) == plain
    assert "no memory" in caplog.text


def test_one_core_drafts_and_verifies_one_after_another(draft: LanguageModel, make_engine: MakeEngine) -> None:
    torch.set_num_threads(1)
    engine = make_engine(draft, max_slots=8, compile=False, micro_batches=2)
    answers(engine)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drafts")]


def test_other_devices_are_refused(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(target), "device", property(lambda self: torch.device("mps")))
    with pytest.raises(ConfigError, match="micro_batches=2 needs a CPU or CUDA, not mps"):
        Engine(target, None, EngineSettings(micro_batches=2))
