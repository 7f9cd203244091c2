"""Host work beside the device: a controller learns from a step while the next one's pass runs."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.decoding.sampling import TokenSampler

from ..conftest import MakeEngine, prompts


class Noted(FixedLength):
    """Drafts two tokens, and notes in `events` when it plans and learns."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(2)
        self.events = events

    def plan(self, view: BatchView) -> Plan:
        self.events.append("plan")
        return super().plan(view)

    def observe(self, result: StepResult) -> None:
        self.events.append("observe")


def watched(
    make_engine: MakeEngine, model: LanguageModel, draft: LanguageModel, look: bool
) -> tuple[Engine, list[str]]:
    """Return an engine past its prompt, and the list of what its steps do from now on."""
    events: list[str] = []
    sampler = TokenSampler(model.identity.vocab_size, model.device, look=look)
    engine = make_engine(draft, controller_object=Noted(events), sampler_object=sampler, compile=False)
    for owner, method in ((engine.runner, "logits"), (engine.sampler, "verify")):
        note(owner, method, events)
    engine.submit(Request("a", tuple(prompts()[1]), SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.step()
    events.clear()
    return engine, events


def note(owner: Any, method: str, events: list[str]) -> None:
    plain = getattr(owner, method)

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append(method)
        return plain(*args, **kwargs)

    setattr(owner, method, noted)


@pytest.mark.parametrize(
    ("look", "step"),
    [(True, ["plan", "logits", "verify", "observe"]), (False, ["plan", "logits", "observe", "verify"])],
    ids=["cpu", "device"],
)
def test_the_host_learns_while_a_device_computes(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, look: bool, step: list[str]
) -> None:
    engine, events = watched(make_engine, target, draft, look)
    for _ in range(3):
        engine.step()
    assert events == 3 * step


def test_every_step_is_learnt_from_once(target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine) -> None:
    """A controller that leaves has seen all its steps, and the next one sees none of them."""
    engine, events = watched(make_engine, target, draft, look=False)
    engine.step()
    assert events.count("plan") == events.count("observe")  # the first step's result, and not yet its own
    later: list[str] = []
    engine.use_controller(Noted(later))
    assert events[-1] == "observe"
    assert later == []
    engine.step()
    assert later == ["plan"]


def test_a_draft_that_leaves_is_learnt_from_before_the_next_one(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine, events = watched(make_engine, target, draft, look=False)
    engine.step()
    engine.controller.draft_changed = lambda acceptance=None: events.append("changed")  # type: ignore[method-assign]
    events.clear()
    engine.use_draft(draft, "again")
    engine.step()
    assert events[:3] == ["observe", "changed", "plan"]
