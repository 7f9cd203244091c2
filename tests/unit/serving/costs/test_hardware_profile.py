"""Profiles: coefficients from timed passes, files that are refused by name, an engine that starts with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.cli import main
from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.serving import EngineSettings, SamplingParams
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.fitted import Timed, fit
from distillspec.serving.costs.hardware_profile import HostCost, ModelKey, PassKey, Profile, ProfiledDraft
from distillspec.serving.profiler import Grid, measure, paired_ratio

from ..conftest import MakeEngine, hf_greedy

SMALL = Grid(contexts=[8, 40], rows=[1, 3], lengths=[0, 2, 4], prompts=[8, 24, 60], rounds=1)
AS_IT_IS = EngineSettings(compile=False)


def test_a_file_says_again_what_was_saved(tmp_path: Path) -> None:
    points = [Timed(50, tokens, 1, 1e-2 * tokens, 1, over_plain=(1.1, 1.0, 1.2)) for tokens in (1, 2, 4)]
    drafts = {"a": ProfiledDraft("run a", "9 weights in float32", fit(points), drafts_block=True)}
    key = ModelKey("tiny", "0", "float32")
    profile = Profile({"device": "cpu"}, PassKey(), key, fit(points), drafts, HostCost(3e-4, 4e-5))
    profile.save(tmp_path / "profile.json")
    assert Profile.read(tmp_path) == profile
    stored = json.loads((tmp_path / "profile.json").read_text())
    assert stored["drafts"]["a"]["at_once"] is True, "the key of files written before"


def test_what_the_host_takes_is_a_line_over_rows_that_never_falls() -> None:
    assert HostCost.through({1: 3e-4, 8: 10e-4}) == pytest.approx((2e-4, 1e-4))
    assert HostCost.through({1: 3e-4, 8: 2e-4}) == (3e-4, 0.0)
    assert HostCost.through({1: 1e-4, 3: 9e-4}).seconds(3) == pytest.approx(12e-4)
    assert HostCost.through({4: 2e-4}).seconds(100) == 2e-4


def test_a_profile_of_a_block_says_that_one_pass_drafts_it(
    target: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(initialise_draft(DraftConfig(kind="block", positions=3), target), max_slots=3, compile=False)
    measure(engine, SMALL).save(tmp_path / "profile.json")
    profile = Profile.load(tmp_path / "profile.json", target, engine.drafts, engine.settings)
    points = profile.drafts[DRAFT].cost.points
    assert {(point.passes, point.tokens / point.rows) for point in points} == {(1, 2), (1, 3)}, "three at most"
    latency = profile.latency
    assert latency.drafts_block
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
    profile = Profile.load(measured, target, {DRAFT: draft}, AS_IT_IS)
    assert len(profile.target_cost.points) == 12 + 3
    assert len(profile.drafts[DRAFT].cost.points) == 8
    assert sum(point.held_out for point in profile.target_cost.points) == 3 + 1
    assert profile.latency.step_s([40, 40], [3, 0]) > 0
    engine = make_engine(draft, controller="goodput", profile=str(measured))
    assert engine.costs == profile.latency
    assert isinstance(engine.controller, GoodputController)
    assert engine.controller.latency == profile.latency


def test_a_pool_starts_with_its_profile_and_later_versions_of_its_drafts_do_too(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    block = initialise_draft(DraftConfig(kind="block", positions=3), target)
    wanted = hf_greedy(target, [5, 6, 7], 24)
    engine = make_engine({"words": draft, "blocks": block}, max_slots=3, compile=False)
    measure(engine, SMALL).save(tmp_path / "profile.json")
    engine.close()
    profile = Profile.read(tmp_path)
    found = {source: (own.name, own.drafts_block) for source, own in profile.drafts.items()}
    assert found == {"words": (draft.name, False), "blocks": (block.name, True)}
    with torch.no_grad():
        next(draft.model.parameters()).mul_(1.5)  # another version, of other weights
    engine = make_engine({"blocks": block, "words": draft}, profile=str(tmp_path), controller="goodput", compile=False)
    assert engine.costs is not None
    assert engine.costs.members == {source: own.cost.cost for source, own in profile.drafts.items()}
    outputs = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=24))
    assert list(outputs[0].token_ids) == wanted
    engine.close()
    alone = make_engine(block, profile=str(tmp_path), controller="goodput", compile=False)
    assert alone.costs is not None
    assert alone.costs.draft == profile.drafts["blocks"].cost.cost
    assert alone.costs.drafts_block


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
    with pytest.raises(ConfigError, match=r"it measured .* weights in float32\), not .* weights in float32\)"):
        make_engine(other_draft, controller="goodput", profile=str(measured))
    assert target.model.config._attn_implementation == attention  # the models were not kept
    with pytest.raises(ConfigError, match=r"measured with pack_weights=true, and here it is false"):
        make_engine(draft, controller="goodput", profile=str(measured), pack_weights=False)
    with pytest.raises(ConfigError, match=r"measured with compile=false, and here it is true"):
        Profile.load(measured, target, {DRAFT: draft}, EngineSettings(compile=True))
    assert Profile.load(measured, target, {}, EngineSettings(compile="auto")).passes == PassKey()
    for change, reason in (
        (lambda s: s.update(version=4), "version 4, not 6; measure again"),
        (lambda s: s["machine"].update(cores=1000), "cores=1000"),
        (lambda s: s["target"].update(dtype="float16"), "float16"),
        (lambda s: s["target"].update(weights_hash="0"), "weights differ"),
        (lambda s: s.update(drafts={}), "it measured no draft, not "),
        (lambda s: s.pop("target_cost"), "cannot be read"),
        (lambda s: s["target_cost"]["cost"].update(per_row=-1.0), r"per_row=-1\.0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Profile.load(changed(change), target, {DRAFT: draft}, AS_IT_IS)
    assert Profile.load(changed(lambda s: s.update(drafts={})), target, {}, AS_IT_IS).latency.draft is None
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
    assert set(Profile.read(tmp_path / "run").drafts) == {DRAFT}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["costs"]["target"]["points"] == 8 + 2
    assert main(["profile", "target=tiny", "profile.rows=[1]"]) == 2
    assert "two numbers" in capsys.readouterr().err
