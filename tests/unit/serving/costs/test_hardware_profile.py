"""Profiles: coefficients from timed passes, files that are refused by name, an engine that starts with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from distillspec.cli import main
from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.serving import EngineSettings
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.hardware_profile import HostCost, ModelKey, PassKey, Profile, Timed, fit
from distillspec.serving.costs.table import CostTable
from distillspec.serving.profiler import Grid, measure, paired_ratio

from ..conftest import MakeEngine

SMALL = Grid(contexts=[8, 40], rows=[1, 3], lengths=[0, 2, 4], prompts=[8, 24, 60], rounds=1)


def timed(cost: CostTable, noise: float = 0.0) -> list[Timed]:
    """Return a grid of points whose seconds follow `cost`, every fourth held out."""
    generator = numpy.random.default_rng(0)
    works = [(c * r, r * k) for c in (50, 400) for r in (1, 4, 8) for k in (1, 3, 5)]
    return [
        Timed(c, t, 1, cost.seconds(c, t) * float(generator.normal(1, noise)), 0, i % 4 == 0)
        for i, (c, t) in enumerate(works)
    ]


def test_costs_are_found_and_judged_on_points_they_never_saw() -> None:
    cost = CostTable.line(1e-5, 1e-3, 2e-2)
    exact = fit(timed(cost))
    assert exact.held_out_error < 1e-6
    assert [exact.cost.seconds(90, n) for n in (1, 11, 40)] == pytest.approx([cost.seconds(90, n) for n in (1, 11, 40)])
    noisy = fit(timed(cost, noise=0.05))
    assert 0.002 < noisy.held_out_error < 0.1
    spoilt = [replace(p, seconds=2 * p.seconds) if p.held_out else p for p in timed(cost)]
    assert fit(spoilt).held_out_error == pytest.approx(0.5, abs=1e-6)  # the fit did not see them


def test_no_cost_is_negative() -> None:
    falling = [Timed(100, tokens, 1, 1 / tokens) for tokens in (1, 2, 4)]
    cost = fit(falling).cost
    assert cost.seconds(0, 1) == pytest.approx(cost.seconds(0, 4))


def test_costs_of_rows_are_fitted_where_they_matter() -> None:
    """The same number of tokens in few rows, and in many."""
    works = [(n, rows) for n in (4, 8, 16, 32) for rows in (1, 2, 4)]

    def points(per_row: float) -> list[Timed]:
        noise = numpy.random.default_rng(0)
        return [
            Timed(100 * rows, n, 1, (2e-2 + 1e-3 * n + per_row * rows) * float(noise.normal(1, 0.01)), rows)
            for n, rows in works
        ]

    assert fit(points(5e-3)).cost.per_row + 100 * fit(points(5e-3)).cost.per_context == pytest.approx(5e-3, rel=0.1)
    assert fit(points(0.0)).cost.per_row < 5e-4


def test_what_a_first_pass_takes_more_is_fitted_where_loops_differ() -> None:
    pass_s, first_s = 1e-3, 3e-3
    loops = [(rows, length) for rows in (1, 4, 8) for length in (1, 4)]
    points = [Timed(0, rows * k, k, first_s + k * pass_s * (1 + rows / 8), rows * k) for rows, k in loops]
    found = fit(points)
    assert found.cost.first == pytest.approx(first_s, rel=0.01)
    assert found.held_out_error < 1e-6
    assert fit([point for point in points if point.passes == 4]).cost.first == 0


def test_passes_that_no_line_follows_are_fitted_by_the_number_of_tokens(tmp_path: Path) -> None:
    def seconds(tokens: int) -> float:
        return 0.05 if tokens == 1 else 0.07 if tokens <= 8 else 0.1 if tokens <= 24 else 0.13

    points = [
        Timed(context, tokens, 1, seconds(tokens) + 1e-5 * context, 1, (i + j) % 5 == 0)
        for i, context in enumerate((50, 400, 1000, 2000))
        for j, tokens in enumerate((1, 2, 3, 4, 5, 8, 9.5, 12, 24, 29, 40))
    ]
    bent = fit(points)  # type: ignore[arg-type]
    assert bent.held_out_error < 0.001
    assert bent.cost.seconds(0, 30) == pytest.approx(0.13)
    key = ModelKey("tiny", "0", "float32")
    profile = Profile({"device": "cpu"}, PassKey(), key, bent, host=HostCost(3e-4, 4e-5))
    profile.save(tmp_path / "profile.json")
    assert Profile.read(tmp_path) == profile


def test_no_profile_says_that_more_tokens_cost_less() -> None:
    """Measured on a server with AVX512-BF16: a pass over two tokens took 0.77 of one over one."""
    times = {1: 0.1, 2: 0.077, 3: 0.12, 4: 0.115, 8: 0.2, 16: 0.19}
    points = [Timed(c, tokens, 1, s + 1e-5 * c) for c in (50, 400, 1000) for tokens, s in times.items()]
    seconds = [fit(points).cost.seconds(0, tokens) for tokens in range(1, 20)]
    assert seconds == pytest.approx(numpy.maximum.accumulate(seconds).tolist())
    assert seconds[0] == pytest.approx(seconds[1])
    assert 0.077 < seconds[0] < 0.1  # as near as one number comes to both


def test_what_the_host_takes_is_a_line_over_rows_that_never_falls() -> None:
    assert HostCost.through({1: 3e-4, 8: 10e-4}) == pytest.approx((2e-4, 1e-4))
    assert HostCost.through({1: 3e-4, 8: 2e-4}) == (3e-4, 0.0)
    assert HostCost.through({1: 1e-4, 3: 9e-4}).seconds(3) == pytest.approx(12e-4)
    assert HostCost.through({4: 2e-4}).seconds(100) == 2e-4


@pytest.mark.parametrize("points", [[], [Timed(1, 1, 1, 0.0)], [Timed(1, 1, 1, -1.0)]])
def test_nothing_to_fit_is_an_error(points: list[Timed]) -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        fit(points)


def test_a_profile_of_a_block_says_that_one_pass_drafts_it(
    target: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(initialise_draft(DraftConfig(kind="block", positions=3), target), max_slots=3, compile=False)
    measure(engine, SMALL).save(tmp_path / "profile.json")
    profile = Profile.load(tmp_path / "profile.json", target, engine.draft)
    assert profile.draft_cost is not None
    points = profile.draft_cost.points
    assert {(point.passes, point.tokens / point.rows) for point in points} == {(1, 2), (1, 3)}, "three at most"
    latency = profile.latency
    assert latency.at_once
    assert profile.host.seconds(1) > 0
    assert latency.draft is not None
    assert latency.draft_s([40, 40], [3, 1]) == pytest.approx(latency.draft.seconds(80, 6, 2))


@pytest.fixture
def measured(target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path) -> Path:
    engine = make_engine(draft, max_slots=3, compile=False)
    profile = measure(engine, SMALL)
    engine.close()
    profile.save(tmp_path / "profile.json")
    assert Profile.read(tmp_path) == profile
    return tmp_path / "profile.json"


def test_an_engine_starts_with_its_profile(
    measured: Path, target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    profile = Profile.load(measured, target, draft)
    assert profile.draft_cost is not None
    assert len(profile.target_cost.points) == 12 + 3
    assert len(profile.draft_cost.points) == 8
    assert sum(point.held_out for point in profile.target_cost.points) == 3 + 1
    assert profile.latency.step_s([40, 40], [3, 0]) > 0
    engine = make_engine(draft, controller="goodput", profile=str(measured))
    assert engine.costs == profile.latency
    assert isinstance(engine.controller, GoodputController)
    assert engine.controller.latency == profile.latency


def test_profiles_of_others_are_refused_with_a_reason(
    measured: Path, target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    def changed(change: Callable[[dict[str, Any]], object]) -> Path:
        stored = json.loads(measured.read_text())
        change(stored)
        other = measured.with_name("other.json")
        other.write_text(json.dumps(stored))
        return other

    attention = target.model.config._attn_implementation
    other_draft = initialise_draft(DraftConfig(layers=1), target)
    with pytest.raises(ConfigError, match=r"profile.*weights differ"):
        make_engine(other_draft, controller="goodput", profile=str(measured))
    assert target.model.config._attn_implementation == attention  # the models were not kept
    with pytest.raises(ConfigError, match=r"measured with pack_weights=true, and here it is false"):
        make_engine(draft, controller="goodput", profile=str(measured), pack_weights=False)
    with pytest.raises(ConfigError, match=r"measured with compile=false, and here it is true"):
        Profile.load(measured, target, draft, EngineSettings(compile=True))
    assert Profile.load(measured, target, draft, EngineSettings(compile="auto")).passes == PassKey()
    for change, reason in (
        (lambda s: s.update(version=3), "version 3, not 4; measure again"),
        (lambda s: s["machine"].update(cores=1000), "cores=1000"),
        (lambda s: s["target"].update(dtype="float16"), "float16"),
        (lambda s: s["target"].update(weights_hash="0"), "weights differ"),
        (lambda s: s.update(draft=None, draft_cost=None), "no draft"),
        (lambda s: s.pop("target_cost"), "cannot be read"),
        (lambda s: s["target_cost"]["cost"].update(per_row=-1.0), r"per_row=-1\.0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Profile.load(changed(change), target, draft)
    assert Profile.load(changed(lambda s: s.update(draft=None, draft_cost=None)), target).latency.draft is None
    measured.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Profile.read(measured)
    with pytest.raises(ConfigError, match="does not exist"):
        Profile.read(measured / "nowhere")


def test_verifications_are_compared_round_by_round_with_the_plain_passes_beside_them() -> None:
    """A machine that gets eight times slower changes nothing."""
    plain = [1.0, 2.0, 8.0, 4.0, 1.0]
    assert paired_ratio([1.25 * seconds for seconds in plain], plain) == (1.25, 1.25, 1.25)
    assert paired_ratio([1.0, 1.0, 2.0, 2.0, 2.0], [1.0] * 5) == (2.0, 1.0, 2.0)


def test_the_command_writes_a_profile_and_a_picture(
    target: LanguageModel,
    draft: LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_draft(draft, tmp_path / "draft", target)
    grid = ["profile.contexts=[8,40]", "profile.rows=[1,2]", "profile.lengths=[0,2]", "profile.prompts=[8,16]"]
    words = ["profile", "target=tiny", "draft.path=draft", *grid, "profile.rounds=1", "hydra.run.dir=run"]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "results: run"
    beside = said[said.index("verification over the plain pass beside it, median of rounds [95 % interval]") + 1 :]
    found = [line.split(" cached")[0].strip() for line in beside if "cached" in line]
    assert found == ["3 tokens, 8", "6 tokens, 16", "3 tokens, 40", "6 tokens, 80"]
    assert (tmp_path / "run" / "fit.png").read_bytes()[:4] == b"\x89PNG"
    assert Profile.read(tmp_path / "run").draft_cost is not None
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["costs"]["target"]["points"] == 8 + 2
    assert main(["profile", "target=tiny", "profile.rows=[1]"]) == 2
    assert "two numbers" in capsys.readouterr().err
