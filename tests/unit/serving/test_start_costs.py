"""Costs measured at the start: within the budget, on passes that leave no trace, and used by the controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import EngineSettings, SamplingParams
from distillspec.serving.base.rows import ANY, Option
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.fitted import Timed
from distillspec.serving.costs.table import CostTable
from distillspec.serving.sequences.scheduler import Limits
from distillspec.serving.start_costs import measure_at_start
from distillspec.serving.timed_passes import TimedPasses, Work

from .conftest import MakeEngine, hf_greedy, prompts

TARGET = CostTable(((1.0, 0.02), (5.0, 0.021), (40.0, 0.06), (512.0, 0.6)), 1e-6)
FREE = Option(ANY)
DRAFT = CostTable(((1.0, 0.003), (8.0, 0.004)), 1e-7, first=0.002)
LIMITS = Limits(8, 2048, 8 * 2048, 512, 4)
AMPLE_S = 600.0  # for the real passes of `few_runs`, on a machine that pauses too


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each pass twice at most, so that an ample budget is not spent."""
    monkeypatch.setattr("distillspec.serving.start_costs.MOST_RUNS", 2)


class Passes(TimedPasses):
    """Passes that take what two tables say, on a clock of their own."""

    def __init__(self, now: list[float], option: Option = FREE) -> None:
        object.__setattr__(self, "now", now)
        object.__setattr__(self, "proposed", option)

    def drafts(self) -> list[Option]:
        return [self.proposed]  # type: ignore[attr-defined]

    def work(self, kind: str, context: int, tokens: int, passes: int, rows: int) -> Work:
        source = "draft" if kind == "drafting" else ""
        return Work(kind, Timed(context, tokens, passes, 0.0, rows), lambda: None, source=source)

    def verification(self, rows: int, length: int, context: int, plain: int | None = None) -> Work:
        return self.work("verification", rows * context, rows * (1 + length), 1, rows)

    def prefill(self, longest: int, rounds: int) -> Work:
        return self.work("prefill", 0, longest, 1, 1)

    def drafting(self, rows: int, length: int, context: int, source: str = "draft") -> Work:
        assert length <= self.drafts()[0].limit
        passes = 1 if self.drafts()[0].drafts_block else length
        return self.work("drafting", rows * context * passes, rows * length, passes, rows * passes)

    def commit(self, rows: int, context: int) -> None:
        """There is no cache."""

    def seconds(self, work: Work) -> float:
        table, point = DRAFT if work.kind == "drafting" else TARGET, work.point
        took = table.first + point.passes * table.seconds(point.context / point.passes, point.tokens / point.passes)
        self.now[0] += took  # type: ignore[attr-defined]
        return took


def measured(
    monkeypatch: pytest.MonkeyPatch,
    budget_s: float,
    *,
    with_draft: bool = True,
    option: Option = FREE,
    limits: Limits = LIMITS,
) -> tuple[object, float]:
    now = [0.0]
    monkeypatch.setattr("distillspec.serving.start_costs.time.perf_counter", lambda: now[0])
    found = measure_at_start(Passes(now, option), limits, 4, budget_s, with_draft=with_draft)
    return found, now[0]


def first_pass_s(draft: CostTable, tokens: int) -> float:
    """Return the seconds of a loop's first pass. Blocks have one pass alone, so that its parts cannot be told apart."""
    return draft.first + draft.seconds(300, tokens)


@pytest.mark.parametrize("option", [FREE, Option(4, drafts_block=True)], ids=["tokens", "blocks"])
def test_a_single_slot_has_costs_too(monkeypatch: pytest.MonkeyPatch, option: Option) -> None:
    """Its drafts have one size alone."""
    limits = Limits(1, 2048, 2048, 512, 4)
    found, _ = measured(monkeypatch, 2.0, option=option, limits=limits)
    for tokens in (1, 2, 5):
        assert found.target.seconds(300, tokens) == pytest.approx(TARGET.seconds(300, tokens), rel=0.02)  # type: ignore[attr-defined]
    assert first_pass_s(found.draft, 1) == pytest.approx(first_pass_s(DRAFT, 1), rel=0.02)  # type: ignore[attr-defined]
    if not option.drafts_block:
        assert found.draft.seconds(300, 1) == pytest.approx(DRAFT.seconds(300, 1), rel=0.02)  # type: ignore[attr-defined]
    nothing, _ = measured(monkeypatch, 1e-6, option=option, limits=limits)
    assert nothing is None, "a target of one size shows no slope"


@pytest.mark.parametrize("budget_s", [1.0, 2.0, 20.0])
def test_tables_are_found_within_the_budget(monkeypatch: pytest.MonkeyPatch, budget_s: float) -> None:
    found, spent_s = measured(monkeypatch, budget_s)
    assert spent_s <= budget_s + TARGET.seconds(32, 1) + 4 * DRAFT.seconds(32, 1), "the first pass, the first loop"
    for tokens in (1, 3, 5, 8, 20, 40):
        assert found.target.seconds(300, tokens) == pytest.approx(TARGET.seconds(300, tokens), rel=0.08)  # type: ignore[attr-defined]
    assert found.target.seconds(0, 500) == pytest.approx(TARGET.seconds(0, 500), rel=0.25), "extrapolated"  # type: ignore[attr-defined]
    assert found.draft.first == pytest.approx(DRAFT.first, rel=0.08)  # type: ignore[attr-defined]
    for rows in (1, 4, 8):
        assert found.draft.seconds(300, rows) == pytest.approx(DRAFT.seconds(300, rows), rel=0.08)  # type: ignore[attr-defined]


def test_blocks_are_timed_by_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of three positions at most, in an engine that may plan four."""
    found, _ = measured(monkeypatch, 20.0, option=Option(3, drafts_block=True))
    for tokens in (1, 3, 8, 24):
        assert first_pass_s(found.draft, tokens) == pytest.approx(first_pass_s(DRAFT, tokens), rel=0.08)  # type: ignore[attr-defined]


def test_a_budget_of_one_pass_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, 0.02)[0] is None
    found, _ = measured(monkeypatch, 0.5, with_draft=False)
    assert found.draft is None  # type: ignore[attr-defined]


@pytest.mark.usefixtures("few_runs")
def test_an_engine_measures_what_its_controller_does_not_know(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, controller="goodput", speculation_length=3, measure_costs_s=AMPLE_S)
    assert engine.costs is not None
    assert engine.costs.draft is not None
    assert isinstance(engine.controller, GoodputController)
    assert engine.controller.latency == engine.costs
    for settings in ({"controller": "fixed"}, {"measure_costs_s": 0}, {"speculation_length": 0}):
        other = make_engine(draft, **{"controller": "goodput", "measure_costs_s": AMPLE_S, **settings})
        assert other.costs is None
        assert other.runner.passes == 0
    with pytest.raises(ConfigError, match="measure_costs_s=-1"):
        EngineSettings(measure_costs_s=-1)


@pytest.mark.usefixtures("few_runs")
@pytest.mark.parametrize("proposer", ["draft_model", "prompt_lookup", "lookup_else_model"])
def test_measuring_leaves_no_trace(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, proposer: str
) -> None:
    """Texts are the same, sampled ones too, and slots are free."""

    wanted = hf_greedy(target, prompts(4)[0], 20)

    def texts(seconds: float) -> list[tuple[int, ...]]:
        with_model = None if proposer == "prompt_lookup" else draft
        engine = make_engine(
            with_model, proposer=proposer, controller="goodput", speculation_length=3, measure_costs_s=seconds
        )
        assert (engine.costs is None) == (seconds == 0)
        engine.check_integrity()
        sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
        outputs = engine.generate(prompts(4), [SamplingParams(temperature=0.0, max_tokens=20), sampled] * 2)
        assert list(outputs[0].token_ids) == wanted
        engine.close()
        return [output.token_ids for output in outputs]

    assert texts(AMPLE_S) == texts(0)


@pytest.mark.usefixtures("few_runs")
def test_limits_of_a_small_engine_are_kept(target: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(
        None, proposer="prompt_lookup", controller="goodput", speculation_length=4, max_slots=1, max_model_len=16
    )
    limits = replace(engine.limits)
    seen: list[Timed] = []
    time_of: Callable[[Work], float] = engine.timed_passes().seconds

    class Seen(TimedPasses):
        def seconds(self, work: Work) -> float:
            seen.append(work.point)
            return time_of(work)

    passes = Seen(engine.target, engine.runner, engine.sampler, engine.proposer)
    assert measure_at_start(passes, limits, 4, AMPLE_S, with_draft=False) is not None
    assert max(point.context + point.tokens for point in seen) <= 16
