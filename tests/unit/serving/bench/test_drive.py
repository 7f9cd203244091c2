"""`serving/bench`: a load is the same for every side, everything sent is answered once, and figures follow from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.bench.compare import speed_ratio
from distillspec.serving.bench.drive import drive
from distillspec.serving.bench.load import poisson_load
from distillspec.serving.bench.plot import plot_load
from distillspec.serving.bench.records import LoadRecord, RequestRecord
from distillspec.serving.bench.step_record import StepRecord
from distillspec.serving.bench.summary import summarise
from distillspec.types import Prompt

PROMPTS = [Prompt(f"p{i}", tuple(range(3 + i, 11 + i)), domain=("code", "chat")[i % 2]) for i in range(5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_a_poisson_load_has_its_rate_and_uses_every_prompt_before_any_twice() -> None:
    load = poisson_load(PROMPTS, GREEDY, rate=20.0, seconds=200.0, seed=1)
    gaps = numpy.diff([0.0, *(arrival.at_s for arrival in load)])
    assert (gaps > 0).all()
    assert load[-1].at_s < 200
    assert abs(len(load) - 4000) < 4 * 4000**0.5
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1), "gaps of a Poisson process are exponential"
    for start in range(0, 50, 5):
        assert {arrival.prompt.id for arrival in load[start : start + 5]} == {p.id for p in PROMPTS}
    assert load == poisson_load(PROMPTS, GREEDY, rate=20.0, seconds=200.0, seed=1)
    assert load != poisson_load(PROMPTS, GREEDY, rate=20.0, seconds=200.0, seed=2)


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (float("inf"), 1.0)])
def test_impossible_loads_are_refused(rate: float, seconds: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        poisson_load(PROMPTS, GREEDY, rate, seconds, seed=0)


def test_no_prompts_no_load() -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        poisson_load([], GREEDY, 1.0, 1.0, seed=0)


def test_everything_sent_is_answered_once_and_as_without_load(target: LanguageModel, draft: LanguageModel) -> None:
    settings = EngineSettings(max_slots=2, max_model_len=64, compile=False, controller="fixed", speculation_length=3)
    engine = Engine(target, draft, settings)
    try:
        load = poisson_load(PROMPTS, GREEDY, rate=500.0, seconds=0.02, seed=3)
        seen: list[int] = []
        record = drive(engine, load, on_progress=seen.append)
        alone = engine.generate([arrival.prompt.token_ids for arrival in load], GREEDY)
    finally:
        engine.close()
    assert len(record.requests) == len(load) == seen[-1] >= 5
    assert record.failed == 0
    by_id = {request.id: request for request in record.requests}
    for place, (arrival, output) in enumerate(zip(load, alone, strict=True)):
        request = by_id[f"load-{place}"]
        assert request.domain == arrival.prompt.domain
        assert request.output_tokens == len(output.token_ids) == 12
        assert request.arrived_s == arrival.at_s <= request.first_token_s <= request.finished_s <= record.seconds
    first_tokens = len(load)  # come from reading the prompts, not from decoding steps
    assert sum(step.emitted for step in record.steps) == 12 * len(load) - first_tokens
    assert max(step.rows for step in record.steps) == 2


def test_idle_times_are_slept_through(target: LanguageModel) -> None:
    engine = Engine(target, None, EngineSettings(max_slots=2, max_model_len=64, compile=False))
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    engine.clock = lambda: now[0]
    try:
        record = drive(engine, [replace(a, at_s=50.0 * i) for i, a in enumerate(_some_arrivals(2), 1)], sleep=sleep)
    finally:
        engine.close()
    assert slept == [50.0, 50.0]
    assert [request.latency_s for request in record.requests] == [0.0, 0.0]


def test_figures_of_a_record_worked_by_hand() -> None:
    requests = (
        RequestRecord("a", "chat", 0.0, 1.0, 3.0, 8, 5, proposed=6, accepted=3),
        RequestRecord("b", "chat", 1.0, 2.0, 2.0, 8, 1, proposed=0, accepted=0),
    )
    steps = (
        StepRecord(0.0, 1.0, 0, 0, 0, 0, 0, 16, 20, None, None),
        StepRecord(1.0, 1.0, 1, 0, 3, 3, 3, 0, 20, 1.5, 2.0),
        StepRecord(2.0, 0.5, 1, 0, 3, 3, 1, 0, 20, 0.5, 2.0),
    )
    summary = summarise(LoadRecord(requests, steps, 4.0))
    assert (summary.output_tokens, summary.tokens_per_s, summary.goodput) == (6, 1.5, 6 / 2.5)
    assert (summary.latency_s.mean, summary.latency_s.p50) == (2.0, 2.0)
    assert summary.time_to_first_token_s.mean == 1.0
    assert summary.time_per_token_s.mean == 0.5, "an answer of one token has no later ones"
    assert (summary.block_efficiency, summary.mean_length, summary.acceptance) == (2.0, 3.0, 0.5)
    assert summary.step_time_error == 0.25
    assert summary.tokens_error == 0.0


def test_an_empty_record_has_no_figures_but_is_no_error() -> None:
    summary = summarise(LoadRecord((), (), 0.0))
    assert summary.latency_s.mean is None
    assert summary.goodput is None


def test_the_ratio_pairs_requests() -> None:
    slow = LoadRecord(tuple(_request(i, latency=2.0 * (1 + i)) for i in range(20)), (), 1.0)
    fast = LoadRecord(tuple(_request(i, latency=1.0 * (1 + i)) for i in range(20)), (), 1.0)
    ratio = speed_ratio({"slow": [slow], "fast": [fast]}, of="fast", against="slow").value
    assert (ratio.low, ratio.mean, ratio.high) == pytest.approx((2.0, 2.0, 2.0)), "pairs share what they asked"
    with pytest.raises(ValueError, match="no request in common"):
        speed_ratio({"slow": [LoadRecord((), (), 1.0)], "fast": [fast]}, of="fast", against="slow")


def test_the_picture_is_written(tmp_path: Path) -> None:
    step = StepRecord(0.5, 0.1, 2, 0, 6, 3, 4, 0, 20, 0.1, 4.0)
    record = LoadRecord((_request(0, 1.0),), (step,), 1.0)
    plot_load({"fixed-3": {1.0: summarise(record)}}, {"fixed-3": record}, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def _some_arrivals(count: int) -> list:
    return poisson_load(PROMPTS, GREEDY, rate=1000.0, seconds=1.0, seed=0)[:count]


def _request(place: int, latency: float) -> RequestRecord:
    return RequestRecord(f"load-{place}", "chat", 0.0, 0.5, latency, 8, 4)
