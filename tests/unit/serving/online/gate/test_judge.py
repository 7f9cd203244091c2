"""Candidates that cannot be judged are refused, judgements that are overtaken are dropped."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distillspec.evaluation import TargetStates
from distillspec.models import LanguageModel, save_draft
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import CandidateJudge
from distillspec.serving.online.gate.shadow import Score, Shadow
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry

from ...test_engine_draft_swap import rewrite
from .conftest import candidate, keeper_of, nearly_the_target


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _not_a_number(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][:] = torch.nan
    rewrite(folder, lambda: save_file(state, folder / "model.safetensors", metadata={"format": "pt"}))


def _other_shape(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("mlp.up_proj.weight"))
    state[name] = state[name][:-1].clone()
    rewrite(folder, lambda: save_file(state, folder / "model.safetensors", metadata={"format": "pt"}))


def _other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    words = json.loads(file.read_text())
    words["added_tokens"][0]["content"] = "<|another|>"
    rewrite(folder, lambda: file.write_text(json.dumps(words)))


@pytest.mark.parametrize("damage", [_truncate, _not_a_number, _other_shape, _other_tokenizer])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bad_candidate_is_refused_and_the_old_one_serves(
    settings: OnlineSettings,
    registry: VersionRegistry,
    held_out: ReplayLog,
    target: LanguageModel,
    damage: Callable[[Path], None],
    when: str,
) -> None:
    """Damaged by the trainer itself (sealed with good digests), or on disk after it was registered."""
    serving = registry.current()

    def write(folder: Path) -> None:
        save_draft(nearly_the_target(target), folder, target)
        if when == "before" and damage is not _truncate:
            damage(folder)

    bad = registry.add(write)
    if when == "after" or damage is _truncate:
        damage(bad.path)
    keeper = keeper_of(settings, registry, held_out, target, swap=lambda version: pytest.fail("swapped in"))
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert verdict.decision == "refused"
    assert "cannot be judged" in verdict.reason
    assert registry.current() == serving


def keeper_running(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    target: LanguageModel,
    when_it_reads: Callable[[Shadow], object],
) -> Gatekeeper:
    """Its shadow calls `when_it_reads` in mid-judgement, after the fifth answer."""
    reads = itertools.count(1)

    def run(work: Callable[[], Score]) -> Score:
        if next(reads) == 5:
            when_it_reads(shadow)
        return work()

    shadow = Shadow(target, TargetStates(target), settings.gate.max_gamma, run)
    return Gatekeeper(settings, registry, CandidateJudge(settings, registry, replay, shadow))


def test_what_is_promoted_elsewhere_does_not_wait_for_a_judgement(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    chosen = candidate(registry, nearly_the_target(target), target)
    registry.judged(chosen.name, "inconclusive", {}, "")
    judged = candidate(registry, nearly_the_target(target), target)
    keeper = keeper_running(
        settings, registry, held_out, target, lambda shadow: registry.promote(chosen.name, "by hand, elsewhere")
    )
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert (verdict.decision, verdict.requests) == ("inconclusive", 0)
    assert f"{chosen.name} came into service while it was judged" in verdict.reason
    assert keeper.serving == registry.current() == registry.get(chosen.name)
    assert registry.get(judged.name).status == "inconclusive"


def test_texts_deleted_in_mid_judgement_are_not_judged_on(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    candidate(registry, nearly_the_target(target), target)
    shadows: list[Shadow] = []

    def delete(shadow: Shadow) -> None:
        shadows.append(shadow)
        shadow.forget()

    verdict = keeper_running(settings, registry, held_out, target, delete).judge_newest()
    assert verdict is not None
    assert verdict.decision == "inconclusive"
    assert "deleted" in verdict.reason
    assert shadows[0].kept == (0, 0)


def test_whatever_keeps_a_candidate_from_being_judged_refuses_it(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    def no_memory(shadow: Shadow) -> None:
        raise torch.OutOfMemoryError("tried to allocate\n20 GiB")

    made = candidate(registry, nearly_the_target(target), target)
    verdict = keeper_running(settings, registry, held_out, target, no_memory).judge_newest()
    assert verdict is not None
    assert verdict.reason == "it cannot be judged: tried to allocate 20 GiB"
    assert registry.get(made.name).status == "refused"


def test_an_offline_set_that_cannot_be_read_keeps_everyone_out(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel, tmp_path: Path
) -> None:
    (tmp_path / "data" / "held_out" / "key").mkdir(parents=True)
    (tmp_path / "data" / "prompts.jsonl").write_text("")
    (tmp_path / "data" / "held_out" / "key" / "shard-00000.safetensors").write_bytes(b"no shard")
    offline = replace(settings, adapt=replace(settings.adapt, offline=str(tmp_path / "data")))
    keeper = keeper_of(offline, registry, held_out, target)
    for _ in range(2):
        candidate(registry, nearly_the_target(target), target)
        verdict = keeper.judge_newest()
        assert verdict is not None
        assert verdict.decision == "refused"
        assert "cannot be judged" in verdict.reason


def test_what_was_made_from_a_version_that_was_rolled_back_is_refused(
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> None:
    bad = candidate(registry, nearly_the_target(target), target)
    registry.promote(bad.name, "slipped through")
    child = candidate(registry, nearly_the_target(target), target)
    registry.rollback("worse in service")
    verdict = keeper_of(settings, registry, held_out, target).judge_newest()
    assert verdict is not None
    assert verdict.candidate == child.name
    assert verdict.decision == "refused"
    assert f"made from {bad.name}, which was rolled back" in verdict.reason
