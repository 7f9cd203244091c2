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

from ..conftest import MakeEngine, prompts, ticks


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
    make_engine: MakeEngine, model: LanguageModel, draft: LanguageModel, reads_are_free: bool
) -> tuple[Engine, list[str]]:
    """Return an engine past its prompt, and the list of what its steps do from now on."""
    events: list[str] = []
    sampler = TokenSampler(model.identity.vocab_size, model.device, reads_are_free=reads_are_free)
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
    ("reads_are_free", "step"),
    [(True, ["plan", "logits", "verify", "observe"]), (False, ["plan", "logits", "observe", "verify"])],
    ids=["cpu", "device"],
)
def test_the_host_learns_while_a_device_computes(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, reads_are_free: bool, step: list[str]
) -> None:
    engine, events = watched(make_engine, target, draft, reads_are_free)
    for _ in range(3):
        engine.step()
    assert events == 3 * step


def test_every_step_is_learnt_from_once(target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine) -> None:
    """A controller that leaves has seen all its steps, and the next one sees none of them."""
    engine, events = watched(make_engine, target, draft, reads_are_free=False)
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
    engine, events = watched(make_engine, target, draft, reads_are_free=False)
    engine.step()
    engine.controller.draft_changed = lambda change: events.append("changed")  # type: ignore[method-assign]
    events.clear()
    engine.use_draft(draft, "again")
    engine.step()
    assert events[:3] == ["observe", "changed", "plan"]


@pytest.mark.parametrize(
    ("reads_are_free", "step"),
    [(True, ["plan", "logits", "verify", "observe"]), (False, ["plan", "logits", "deliver", "observe", "verify"])],
    ids=["cpu", "device"],
)
def test_outputs_can_be_delivered_while_a_device_computes(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, reads_are_free: bool, step: list[str]
) -> None:
    engine, events = watched(make_engine, target, draft, reads_are_free)
    engine.meanwhile = lambda: events.append("deliver")
    assert engine.overlaps != reads_are_free
    for _ in range(3):
        engine.step()
    assert events == 3 * step
    engine.meanwhile = None
    engine.step()
    assert events.count("deliver") == (0 if reads_are_free else 3)


@pytest.mark.parametrize("reads_are_free", [True, False], ids=["cpu", "device"])
def test_new_requests_are_taken_in_while_a_device_computes_in_the_order_of_messages(
    target: LanguageModel, make_engine: MakeEngine, reads_are_free: bool
) -> None:
    """Not beyond an abort: it is for between two steps, and what was asked for later stays behind it."""
    sampler = TokenSampler(target.identity.vocab_size, target.device, reads_are_free=reads_are_free)
    engine = make_engine(sampler_object=sampler, compile=False)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.submit(Request("a", tuple(prompts()[1]), params))
    engine.step()

    def others(name: str) -> None:
        """Send messages in the middle of a step, in its target's pass."""
        engine.submit(Request(name, tuple(prompts()[2]), params))
        engine.abort(name)
        engine.submit(Request(f"{name} again", tuple(prompts()[3]), params))

    plain, asked = engine.runner.logits, iter(["b"])

    def launched(*args: Any, **kwargs: Any) -> Any:
        for name in asked:
            others(name)
        return plain(*args, **kwargs)

    engine.runner.logits = launched  # type: ignore[method-assign]
    engine.step()
    assert list(engine.sequences.unfinished) == (["a/0"] if reads_are_free else ["a/0", "b/0"])
    engine.check_integrity()
    done = {}
    while engine.has_work:
        done.update({output.request_id: output for output in engine.step().finished})
    assert {name: output.completions[0].finish_reason for name, output in done.items()} == {
        "a": "length",
        "b": "abort",
        "b again": "length",
    }


def test_the_hosts_work_beside_the_device_is_timed(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    for reads_are_free in (True, False):
        engine, _ = watched(make_engine, target, draft, reads_are_free)
        engine.clock = ticks()
        result = engine.step().result
        assert result is not None
        assert (result.overlapped_s > 0) != reads_are_free
        assert result.overlapped_s < result.target_s
        engine.close()
