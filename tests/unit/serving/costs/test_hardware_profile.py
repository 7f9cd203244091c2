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
from distillspec.serving.costs.hardware_profile import VERSION, ModelKey, PassKey, Profile, Timed, fit
from distillspec.serving.costs.table import CostTable
from distillspec.serving.profiler import Grid, measure, paired_ratio

from ..conftest import MakeEngine

SMALL = Grid(contexts=[8, 40], rows=[1, 3], lengths=[0, 2, 4], prompts=[8, 24, 60], rounds=1)


def timed(cost: CostTable, noise: float = 0.0) -> list[Timed]:
    """Return a grid of points whose seconds follow `cost`, every fourth held out."""
    generator = numpy.random.default_rng(0)
    works = [(c * r, r * k) for c in (50, 400) for r in (1, 4, 8) for k in (1, 3, 5)]
    return [
        Timed(c, t, 1, cost.seconds(c, t) * float(generator.normal(1, noise)), i % 4 == 0)
        for i, (c, t) in enumerate(works)
    ]


def test_coefficients_are_found_and_judged_on_points_they_never_saw() -> None:
    cost = CostTable.line(1e-5, 1e-3, 2e-2)
    exact = fit(timed(cost))
    assert exact.held_out_error < 1e-6
    assert exact.cost.per_token == pytest.approx(1e-3)
    noisy = fit(timed(cost, noise=0.05))
    assert 0.002 < noisy.held_out_error < 0.1
    spoilt = [replace(p, seconds=2 * p.seconds) if p.held_out else p for p in timed(cost)]
    assert fit(spoilt).held_out_error == pytest.approx(0.5, abs=1e-6)  # the fit did not see them


def test_experts_are_fitted_and_no_coefficient_is_negative() -> None:
    cost = CostTable.line(0, 1e-4, 1e-2, per_expert=5e-3, experts=8, active=2)
    assert fit(timed(cost), 8, 2).cost.per_expert == pytest.approx(5e-3)
    falling = [Timed(100, tokens, 1, 1 / tokens) for tokens in (1, 2, 4)]
    assert fit(falling).cost.per_token == 0


def test_steps_that_no_line_follows_are_fitted_by_the_number_of_tokens(tmp_path: Path) -> None:
    def seconds(tokens: int) -> float:
        return 0.05 if tokens == 1 else 0.07 if tokens <= 8 else 0.1 if tokens <= 24 else 0.13

    counts = (1, 2, 3, 4, 5, 8, 9, 12, 24, 25, 40)
    points = [
        Timed(context, tokens, 1, seconds(tokens) + 1e-5 * context, (i + j) % 5 == 0)
        for i, context in enumerate((50, 400, 1000, 2000))
        for j, tokens in enumerate(counts)
    ]
    line, bent = fit(points), fit(points, may_bump=True)
    assert line.held_out_error > 0.04
    assert bent.held_out_error < 0.001
    assert bent.cost.seconds(0, 30) == pytest.approx(0.13)
    assert not fit(timed(CostTable.line(1e-5, 1e-3, 2e-2)), may_bump=True).cost.bumps  # a line is left one
    key = ModelKey("tiny", "0", "float32")
    profile = Profile({"device": "cpu"}, PassKey(), key, bent, line)
    profile.save(tmp_path / "profile.json")
    assert Profile.read(tmp_path) == profile


def test_no_profile_says_that_more_tokens_cost_less(tmp_path: Path) -> None:
    """Measured on a server with AVX512-BF16: a pass over two tokens took 0.77 of one over one."""
    times = {1: 0.1, 2: 0.077, 3: 0.12, 4: 0.115, 8: 0.2, 16: 0.19}
    points = [Timed(c, tokens, 1, s + 1e-5 * c) for c in (50, 400, 1000) for tokens, s in times.items()]
    bent = fit(points, may_bump=True)
    assert bent.cost.bumps
    seconds = [bent.cost.seconds(0, tokens) for tokens in range(1, 20)]
    assert seconds == pytest.approx(numpy.maximum.accumulate(seconds).tolist())
    assert seconds[0] == pytest.approx(seconds[1])
    assert 0.077 < seconds[0] < 0.1  # as near as one number comes to both

    key = ModelKey("tiny", "0", "float32")
    falling = replace(bent.cost, bumps=tuple((float(n), s - bent.cost.per_token * n) for n, s in times.items()))
    Profile({"device": "cpu"}, PassKey(), key, replace(bent, cost=falling), bent).save(tmp_path / "profile.json")
    latency = Profile.read(tmp_path).latency  # as an earlier version wrote it
    assert latency.target_s([0], [1]) >= latency.target_s([0], [0]) * (1 - 1e-9)
    assert GoodputController(4, latency).latency.target == latency.target


@pytest.mark.parametrize("points", [[], [Timed(1, 1, 1, 0.0)], [Timed(1, 1, 1, -1.0)]])
def test_nothing_to_fit_is_an_error(points: list[Timed]) -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        fit(points)


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
    assert profile.drafting is not None
    assert len(profile.verification.points) == 12
    assert len(profile.drafting.points) == 8
    assert sum(point.held_out for point in profile.verification.points) == 3
    assert profile.latency.step_s([40, 40], [3, 0]) > 0
    controller = make_engine(draft, controller="goodput", profile=str(measured)).controller
    assert isinstance(controller, GoodputController)
    assert controller.latency.target.fixed == pytest.approx(profile.verification.cost.fixed)
    assert controller.latency.prefill == profile.prefill.cost


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
        (lambda s: s.update(version=VERSION + 1), f"version {VERSION + 1}"),
        (lambda s: s["machine"].update(cores=1000), "cores=1000"),
        (lambda s: s["target"].update(dtype="float16"), "float16"),
        (lambda s: s["target"].update(weights_hash="0"), "weights differ"),
        (lambda s: s.update(draft=None, drafting=None), "no draft"),
        (lambda s: s.pop("verification"), "cannot be read"),
        (lambda s: s["verification"]["cost"].update(fixed=-1.0), r"fixed=-1\.0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Profile.load(changed(change), target, draft)
    assert Profile.load(changed(lambda s: s.update(draft=None, drafting=None)), target).latency.draft is None
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
    assert Profile.read(tmp_path / "run").drafting is not None
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["costs"]["verification"]["points"] == 8
    assert main(["profile", "target=tiny", "profile.rows=[1]"]) == 2
    assert "two numbers" in capsys.readouterr().err
