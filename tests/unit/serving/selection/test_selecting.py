"""The controller that gives rows their drafts, and reads ahead of switches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.catch_up import READ_WITH_DRAFTING
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.selection.base import Choices, only
from distillspec.serving.selection.goodput import LEARN_EVERY, GoodputSelection
from distillspec.serving.selection.losses import Losses
from distillspec.serving.selection.selecting import LEAST_READ, SelectingController, selecting

from ..conftest import MakeEngine, plain_answers, prompts
from .steps import COSTS, World, parts, row

LONG = [3 + i * 7 % 200 for i in range(100)]


class Coming:
    """Serves with a, and lets b read ahead from the fifth step on. Then serves with b."""

    def __init__(self, ahead: bool = True) -> None:
        self.ahead, self.steps, self.switched = ahead, 0, False
        self.on_trial, self.losses = set[str](), Losses()
        self.coming: dict[str, str] = {}
        self.beliefs: dict[str, float] = {}
        self.collapsed: list[str] = []
        self.unread: list[int] = []

    def choose(self, rows: Sequence[RowView]) -> Choices:
        for own in rows:
            self.unread += [option.unread_tokens for option in own.options if option.source == "b"]
        if self.steps == 20 or (self.steps > 5 and self.unread[-1] <= READ_WITH_DRAFTING):
            self.switched = True
        waits = self.ahead and self.steps >= 5 and not self.switched
        self.coming = {own.sequence_id: "b" for own in rows} if waits else {}
        return {own.sequence_id: "b" if self.switched else "a" for own in rows}

    def observe(self, result: StepResult, chosen: Choices) -> None:
        self.steps += 1

    def draft_changed(self, change: DraftChange) -> None: ...


def test_a_draft_reads_ahead_in_parts_and_then_drafts_without_a_pass_of_its_own(
    target: LanguageModel, draft: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True)
    coming = Coming()
    controller = SelectingController(FixedLength(2), lambda latency: coming)
    controller.costs = COSTS
    engine = make_engine({"a": draft, "b": truncated_draft}, controller_object=controller)
    engine.submit(Request("r", tuple(LONG), params))
    seen: list[StepResult] = []
    while engine.has_work:
        output = engine.step()
        engine.check_integrity()
        if output.result is not None and output.result.view.rows:
            seen.append(output.result)
        done = output.finished
    assert done[0].token_ids == plain_answers(target, [LONG], [params])[0]
    reading = [result for result in seen if result.plan.readings]
    figures = controller.figures
    assert list(figures.reading_s) == [result.total_s for result in reading]
    assert len(figures.switch_s) == 1
    assert len(figures.usual_s) == len(seen) - len(reading) - 1, "and no prompts: they are read before the first step"
    assert 2 <= len(reading) <= 12
    assert all(result.readings_s > 0 for result in reading)
    read = [before - after for before, after in zip(coming.unread, coming.unread[1:], strict=False)]
    most = max(own.tokens for result in reading for own in result.plan.readings)
    assert LEAST_READ - 3 <= max(read) <= most < len(LONG)
    first = next(place for place, result in enumerate(seen) if result.plan.chosen == {"r/0": "b"})
    assert coming.unread[first] <= READ_WITH_DRAFTING
    assert seen[first].rows[0].trials
    assert seen[first].rows[0].trials[0].source == "b"


@pytest.mark.usefixtures("two_cores")
def test_a_draft_reads_ahead_beside_micro_batches(
    target: LanguageModel, draft: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True)
    coming = Coming()
    controller = SelectingController(FixedLength(2), lambda latency: coming)
    engine = make_engine(
        {"a": draft, "b": truncated_draft}, controller_object=controller, micro_batches=2, compile=False
    )
    outputs = engine.generate([LONG, LONG[5:]], params)
    assert [output.token_ids for output in outputs] == plain_answers(target, [LONG, LONG[5:]], [params] * 2)
    assert controller.figures.reading_s, "texts were read ahead"
    assert engine.runner.passes > 1.5 * coming.steps, "two micro-batches a step"
    assert all({"a", "b"} <= output.stats.sources.keys() for output in outputs)


def test_without_reading_ahead_the_switch_reads_all_at_once(
    draft: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    coming = Coming(ahead=False)
    engine = make_engine(
        {"a": draft, "b": truncated_draft},
        controller_object=SelectingController(FixedLength(2), lambda latency: coming),
    )
    engine.generate([LONG], SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True))
    assert max(coming.unread) > len(LONG)
    assert coming.unread[21] <= READ_WITH_DRAFTING


def test_reading_ahead_may_fail_as_drafting_may(
    draft: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = Coming()
    engine: Engine = make_engine(
        {"a": draft, "b": truncated_draft},
        controller_object=SelectingController(FixedLength(2), lambda latency: coming),
    )
    assert isinstance(engine.proposer, SideBySide)
    broken = engine.proposer.proposers["b"]
    assert isinstance(broken, DraftModel)

    def failing(texts: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(broken, "read_on", failing)
    (output,) = engine.generate([LONG], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert len(output.token_ids) == 30
    assert output.stats.sources["a"] > 5


def test_steps_with_a_switch_are_told_apart(
    draft: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    controller = SelectingController(FixedLength(2), lambda latency: Coming(ahead=False))
    engine = make_engine({"a": draft, "b": truncated_draft}, controller_object=controller)
    (output,) = engine.generate([LONG], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    figures = controller.figures
    assert (figures.switches, len(figures.switch_s)) == ({"a": 0, "b": 1}, 1)
    assert len(figures.usual_s) > 20
    assert min(*figures.switch_s, *figures.usual_s) > 0
    assert figures.row_seconds.keys() == {"a", "b"}
    assert sum(figures.row_seconds.values()) >= sum(figures.switch_s) + sum(figures.usual_s)
    assert sum(figures.tokens.values()) >= len(output.token_ids) - 1


class Hears(FixedLength):
    """Notes of which drafts it is told."""

    def __init__(self) -> None:
        super().__init__(2)
        self.heard: list[DraftChange] = []

    def draft_changed(self, change: DraftChange) -> None:
        self.heard.append(change)


def test_the_controller_inside_is_told_once_of_a_draft_that_has_collapsed() -> None:
    coming, lengths = Coming(), Hears()
    controller = SelectingController(lengths, lambda latency: coming)
    view = BatchView((row("1/0"),))
    controller.plan(view)
    assert lengths.heard == []
    coming.collapsed.append("a")
    controller.plan(view)
    controller.plan(view)
    assert lengths.heard == [DraftChange("a", acceptance=1.0, like="a")]


def test_a_running_answer_keeps_its_draft_until_the_new_one_has_read() -> None:
    """It is decided for the other one at a review, and switches when that has read up."""
    selection = GoodputSelection(parts())
    world = World(selection, {"a": {"default": 0.05}, "b": {"default": 0.9}})
    for _ in range(40):
        world.serve("default")
    assert selection.choose([row("new/0", ("a",))]) == {"new/0": "a"}, "b cannot draft for it yet"
    for _ in range(LEARN_EVERY):  # a review is due
        world.step(BatchView((row("other/0"),)), {"other/0": "b"}, "default")
    assert selection.choose([_unread(row("new/0", written=200), "b", 203)]) == {"new/0": "a"}
    assert selection.coming == {"new/0": "b"}
    assert selection.choose([_unread(row("new/0", written=203), "b", 90)]) == {"new/0": "a"}
    assert selection.choose([_unread(row("new/0", written=206), "b", READ_WITH_DRAFTING)]) == {"new/0": "b"}
    assert selection.coming == {}


def _unread(view: RowView, source: str, tokens: int) -> RowView:
    options = [own._replace(unread_tokens=tokens if own.source == source else 1) for own in view.options]
    return view._replace(**options[0]._asdict(), others=tuple(options[1:]))


def test_only_keeps_one_draft_and_all_sources_without_a_model() -> None:
    both = row("1/0", free=("lookup",))
    assert [own.source for own in only(both, "b").options] == ["lookup", "b"]
    assert [own.source for own in only(both, None).options] == ["lookup"]
    assert only(row("1/0"), None).limit == 0


def test_it_is_found_inside_other_wrappers(draft: LanguageModel, make_engine: MakeEngine) -> None:
    from distillspec.serving.server.bridge.adjustable import AdjustableController

    engine = make_engine({"a": draft}, controller="goodput")
    inside = engine.controller
    assert selecting(AdjustableController(inside)) is inside
    assert selecting(FixedLength(1)) is None
    engine.generate(prompts(2), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert isinstance(inside, SelectingController)
    assert inside.figures.requests == {"a": 2}
    assert BatchView(()).rows == ()
