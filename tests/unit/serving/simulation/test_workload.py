"""Workloads: distributions, seeds, trace files, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from distillspec.config import WorkloadConfig
from distillspec.errors import ConfigError
from distillspec.serving.simulation import make_workload, read_trace
from distillspec.serving.simulation.acceptance_trace import AcceptanceTrace, draw_acceptance_trace

RANDOM = numpy.random.default_rng(11)


def test_runs_count_what_stands_in_a_row() -> None:
    ranks = RANDOM.integers(1, 3, 200)
    trace = AcceptanceTrace(ranks, RANDOM.random(200))
    for place in range(201):
        expected = 0
        while place + expected < 200 and ranks[place + expected] == 1:
            expected += 1
        assert trace.runs[place] == expected
    gates = trace.confident_runs(0.5)
    for place in range(200):
        assert all(trace.confidence[place : place + gates[place] - 1] > 0.5)
        assert place + gates[place] > 200 or trace.confidence[place + gates[place] - 1] <= 0.5


def test_ranks_are_independent_tries_and_rank_one_is_acceptance() -> None:
    for sibling, wanted in ((None, [0.6, 0.24, 0.096]), (0.3, [0.6, 0.12, 0.084]), (0.0, [0.6, 0.0, 0.0])):
        workload = WorkloadConfig(sibling_alpha=sibling)
        ranks = numpy.array(draw_acceptance_trace(workload, 0.6, 200_000, numpy.random.default_rng(1)).ranks)
        assert [float((ranks == rank).mean()) for rank in (1, 2, 3)] == pytest.approx(wanted, abs=0.005)
    certain, never = (
        draw_acceptance_trace(WorkloadConfig(), alpha, 50, numpy.random.default_rng(1)) for alpha in (1.0, 0.0)
    )
    assert certain.runs[0] == 50
    assert max(never.runs) == 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"request_spread": 0.2}, {"token_spread": 0.3}, {"burst_tokens": 8, "burst_depth": 0.2}, {"drift": 0.4}],
)
def test_the_mean_acceptance_is_alpha_whatever_varies(settings: dict[str, float]) -> None:
    config = WorkloadConfig(requests=600, output_tokens=60, alpha=0.6, **settings)
    shares = [numpy.mean(numpy.array(r.trace.ranks) == 1) for r in make_workload(config, 1.0, seed=2)]
    assert numpy.mean(shares) == pytest.approx(0.6, abs=0.03)
    if "request_spread" in settings:
        assert numpy.std(shares) > 0.15
    if "drift" in settings:
        assert numpy.mean(shares[-200:]) - numpy.mean(shares[:200]) > 0.2


def test_confidence_tells_acceptance_where_tokens_vary() -> None:
    trace = draw_acceptance_trace(WorkloadConfig(token_spread=0.3), 0.6, 20_000, numpy.random.default_rng(4))
    accepted = numpy.array(trace.ranks) == 1
    sure = trace.confidence > 0.8
    assert accepted[sure].mean() == pytest.approx(trace.confidence[sure].mean(), abs=0.02)
    assert accepted[sure].mean() > accepted[~sure].mean() + 0.3


def test_every_rate_brings_the_same_requests_sooner() -> None:
    config = WorkloadConfig(requests=50, prompt_spread=0.5, output_spread=0.5)
    slow, fast = (make_workload(config, rate, seed=9) for rate in (1.0, 4.0))
    assert [r.trace.ranks for r in slow] == [r.trace.ranks for r in fast]
    assert [r.prompt_tokens for r in slow] == [r.prompt_tokens for r in fast]
    assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast])
    assert [r.trace.ranks for r in make_workload(config, 1.0, seed=10)] != [r.trace.ranks for r in slow]


def test_lengths_and_gaps_have_their_means() -> None:
    config = WorkloadConfig(requests=4000, prompt_tokens=200, prompt_spread=0.6, output_tokens=20, output_spread=0.3)
    requests = make_workload(config, 5.0)
    assert numpy.mean([r.prompt_tokens for r in requests]) == pytest.approx(200, rel=0.05)
    assert numpy.mean([r.output_tokens for r in requests]) == pytest.approx(20, rel=0.05)
    assert requests[-1].arrival_s == pytest.approx(800, rel=0.06)


def test_a_trace_is_served_as_recorded(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 2.0, "prompt_tokens": 7, "output_tokens": 3, "alpha": 1.0},
        {"arrival_s": 0.5, "prompt_tokens": 5, "output_tokens": 9, "alpha": 0.0},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    early, late = make_workload(WorkloadConfig(trace=str(path)))
    assert (early.arrival_s, early.prompt_tokens, early.output_tokens, early.trace.runs[0]) == (0.5, 5, 9, 0)
    assert (late.arrival_s, late.trace.runs[0]) == (2.0, 3)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "no object"),
        ('{"arrival_s": -1, "prompt_tokens": 3, "output_tokens": 3}', "arrival_s=-1"),
        ('{"arrival_s": 1, "prompt_tokens": "3", "output_tokens": 3}', "prompt_tokens=3"),
        ('{"arrival_s": 1, "prompt_tokens": 3}', "output_tokens=None"),
        ('{"arrival_s": NaN, "prompt_tokens": 3, "output_tokens": 3}', "arrival_s=nan"),
        ('{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 3, "alpha": 1.5}', "alpha=1.5"),
    ],
)
def test_a_malformed_line_is_named_with_its_file_and_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 3}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: ") as problem:
        read_trace(path)
    assert words in str(problem.value)


def test_bad_workloads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match=r"rate=-1\.0"):
        make_workload(WorkloadConfig(), -1.0)
    with pytest.raises(ConfigError, match="requests=0: the workload is empty"):
        WorkloadConfig(requests=0)
    with pytest.raises(ConfigError, match="rates: -2"):
        WorkloadConfig(rates=[-2.0])
    with pytest.raises(ConfigError, match=r"token_spread=0\.6"):
        WorkloadConfig(token_spread=0.6)
