"""With logged states the target reads nothing again, neither to learn nor to judge, and what is learnt is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distillspec.config import DraftConfig
from distillspec.evaluation import states as evaluated
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.models.checkpoint import SERVED
from distillspec.models.features import pass_with_states, read_states
from distillspec.serving.online.judging.question import candidate_question
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.trainer import OnlineTrainer
from distillspec.training import state_store
from distillspec.types import StateRequest

from ....models.state_drafts import KINDS
from ..conftest import Answer
from .conftest import changed

IDS = (1, 3)


@pytest.fixture
def reader(target: LanguageModel) -> LanguageModel:
    return initialise_draft(DraftConfig(kind="eagle", feature_ids=list(IDS)), target)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the purposes of the target's passes so far."""
    made: list[str] = []

    def counted(purpose: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (made.append(purpose), function(*given))[1]

    monkeypatch.setattr(state_store, "read_states", counted("learn", read_states))
    monkeypatch.setattr(evaluated, "pass_with_states", counted("judge", pass_with_states))
    return made


def with_states(answer: LoggedAnswer, target: LanguageModel, precision: str) -> LoggedAnswer:
    text = torch.tensor([[*answer.prompt_ids, *answer.response_ids[:-1]]])
    states = read_states(target, text, torch.arange(text.shape[1])[None], IDS)[0]
    return replace(answer, states=StateRequest(IDS, precision).record(states))


def learnt(
    settings: OnlineSettings, folder: Path, draft: LanguageModel, target: LanguageModel, log: list[LoggedAnswer]
) -> Any:
    """Learn from the first six answers and judge by the others. Return the weights and the scores."""
    own = replace(changed(settings, max_steps=6, epochs=2), online=replace(settings.online, folder=str(folder)))
    registry = VersionRegistry(own.layout.versions)
    first = registry.add(lambda place: save_draft(draft, place, target))
    registry.promote(first.name, "first draft")
    replay = ReplayLog(
        own.layout.replay, LogKey.of(target.identity, own.replay.entries), own.replay, clock=lambda: 2000.0
    )
    replay.append(log[:6])
    trainer = OnlineTrainer(own)
    version = trainer.update("by hand")
    assert version is not None
    replay.append(log[6:])
    question = candidate_question(trainer.registry)
    assert question is not None
    trainer.scorer.finish(question)
    return load_file(version.path / "model.safetensors"), trainer.scorer.table.of(version.name)


@pytest.mark.parametrize(("precision", "atol"), [("bf16", 0.0), ("fp8", 1e-2)])
def test_logged_states_spare_every_pass_of_the_target(
    settings: OnlineSettings,
    reader: LanguageModel,
    answer: Answer,
    target: LanguageModel,
    passes: list[str],
    tmp_path: Path,
    precision: str,
    atol: float,
) -> None:
    plain = [answer(f"r{i}") for i in range(10)]
    read_again = learnt(settings, tmp_path / "again", reader, target, plain)
    assert set(passes) == {"learn", "judge"}
    passes.clear()
    logged = learnt(settings, tmp_path / "logged", reader, target, [with_states(a, target, precision) for a in plain])
    assert passes == []
    assert logged[0].keys() == read_again[0].keys()
    for name, weights in logged[0].items():
        torch.testing.assert_close(weights, read_again[0][name], atol=atol, rtol=0)
    assert logged[1].keys() == read_again[1].keys()
    for number, score in logged[1].items():
        assert score.alpha == pytest.approx(read_again[1][number].alpha, abs=0.02 * score.positions)
        assert score.positions == read_again[1][number].positions > 0


@pytest.mark.parametrize("kind", ["features", "block", "confident block", "medusa", "hydra"])
def test_every_kind_learns_and_is_judged(
    settings: OnlineSettings, answer: Answer, target: LanguageModel, tmp_path: Path, kind: str
) -> None:
    draft = initialise_draft(KINDS[kind], target)
    save_draft(draft, tmp_path / "before", target, dtype=SERVED)
    before = load_file(tmp_path / "before" / "model.safetensors")
    learnt_weights, scores = learnt(settings, tmp_path / "online", draft, target, [answer(f"r{i}") for i in range(10)])
    assert learnt_weights.keys() == before.keys()
    moved = {name for name, weight in learnt_weights.items() if not torch.equal(weight, before[name])}
    assert "lm_head.weight" in moved
    assert (kind == "medusa") != any("state_input" in name for name in moved), "Medusa reads the state itself"
    assert len(scores) > 0
    assert all(0 < score.alpha < 1.01 * score.positions for score in scores.values())  # logged in 16 bits


def test_states_of_other_ids_are_read_again(
    settings: OnlineSettings,
    answer: Answer,
    target: LanguageModel,
    passes: list[str],
    tmp_path: Path,
) -> None:
    other = initialise_draft(DraftConfig(kind="eagle", feature_ids=[2]), target)
    learnt(
        settings, tmp_path / "other", other, target, [with_states(answer(f"r{i}"), target, "bf16") for i in range(10)]
    )
    assert set(passes) == {"learn", "judge"}
