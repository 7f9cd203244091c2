"""Specialists: cloned for domains that stay poor, and withdrawn if they learn in vain."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace

import pytest
import torch

from distillspec.files import private_folder
from distillspec.models import LanguageModel, load_draft
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.pool.domains import owners_now
from distillspec.serving.online.pool.specialists import (
    COST_OF_A_DRAFT,
    ENOUGH_TOKENS,
    IN_VAIN,
    LEARNT,
    Specialists,
    cost_of_a_draft,
    name_for,
    share_of,
)
from distillspec.serving.online.state.layout import OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.state.pool import Member
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.selection.losses import Losses
from distillspec.serving.selection.selecting import SelectionFigures

from .conftest import Drafted


def judge_in_vain(registry: VersionRegistry, count: int) -> None:
    """Let versions of a draft be judged inconclusive."""
    current = registry.current()
    assert current is not None
    for _ in range(count):
        version = registry.add(lambda folder: shutil.copytree(current.path, folder), parent=current.name)
        registry.judged(version.name, "inconclusive", {"gain": 0.0}, "not better")


@pytest.fixture
def specialists(settings: OnlineSettings, replay: ReplayLog, pooled: VersionRegistry, drafted: Drafted) -> Specialists:
    """Return specialists over a log in which `general` is good at chat and poor at code."""
    replay.append([*drafted("general", "chat", 80, accepted=0.6), *drafted("general", "code", 80, accepted=0.3)])
    replay.append(drafted("maths", "sums", 80, accepted=0.1))
    judge_in_vain(pooled.of("general"), LEARNT)
    told: list[dict[str, object]] = []
    return Specialists(settings, replay, pooled, told.append)


def test_a_domain_that_stays_poor_gets_a_clone_that_learns_it(
    specialists: Specialists, replay: ReplayLog, pooled: VersionRegistry, target: LanguageModel
) -> None:
    made = specialists.clone()
    assert made is not None
    assert (made.name, made.status, made.domain, made.cloned_from) == ("code-specialist", "on trial", "code", "general")
    own, owner = pooled.of(made.name).current(), pooled.of("general").current()
    assert own is not None
    assert owner is not None
    assert pooled.problem_of(own) is None
    assert own.weights_hash == owner.weights_hash
    first, second = (load_draft(version.path, target).model.state_dict() for version in (own, owner))
    assert all(torch.equal(first[name], second[name]) for name in second)
    assert owners_now(replay, pooled.pool) == {"chat": "general", "code": made.name, "sums": "maths"}
    assert pooled.pool.serving() == ["general", "maths"]  # on trial it does not serve
    assert specialists.clone() is None  # one at a time


def test_updates_that_were_asked_for_before_are_not_a_clones_own(
    specialists: Specialists, settings: OnlineSettings
) -> None:
    private_folder(settings.layout.trainer)
    TrainerControl(asked=3).write(settings.layout.control)
    made = specialists.clone()
    assert made is not None
    assert TrainerState.read(settings.layout.of(made.name).state).asked == 3


def test_no_clone_before_the_owner_has_learnt(
    settings: OnlineSettings, replay: ReplayLog, pooled: VersionRegistry, drafted: Drafted
) -> None:
    replay.append([*drafted("general", "chat", 80, accepted=0.6), *drafted("general", "code", 80, accepted=0.3)])
    found = Specialists(settings, replay, pooled, lambda record: None)
    judge_in_vain(pooled.of("general"), LEARNT - 1)
    assert found.clone() is None
    judge_in_vain(pooled.of("general"), 1)
    assert found.clone() is not None


@pytest.mark.parametrize(("below", "cloned"), [(0.4, False), (0.6, True), (None, False)])
def test_the_share_of_acceptance_is_the_settings(specialists: Specialists, below: float | None, cloned: bool) -> None:
    specialists.config = replace(specialists.config, specialist_below=below)
    assert (specialists.clone() is not None) == cloned


def test_a_specialist_that_learns_in_vain_is_named_and_its_domain_gets_no_second(
    specialists: Specialists, replay: ReplayLog, pooled: VersionRegistry
) -> None:
    made = specialists.clone()
    assert made is not None
    assert specialists.fruitless() == []
    judge_in_vain(pooled.of(made.name), IN_VAIN)
    ((name, reason),) = specialists.fruitless()
    assert name == made.name
    pooled.pool.set_status(name, "withdrawn", reason)
    assert specialists.clone() is None
    assert owners_now(replay, pooled.pool)["code"] == "general"


def test_names_of_domains_are_made_folder_names(
    settings: OnlineSettings, replay: ReplayLog, pooled: VersionRegistry, drafted: Drafted
) -> None:
    replay.append([*drafted("general", "chat", 80), *drafted("general", "../code & more", 80, accepted=0.1)])
    judge_in_vain(pooled.of("general"), LEARNT)
    made = Specialists(settings, replay, pooled, lambda record: None).clone()
    assert made is not None
    assert (made.name, made.domain) == (name_for("../code & more"), "../code & more")
    assert made.name.startswith("..-code-more-")
    assert len({name_for(domain) for domain in ("a b", "a:b", "a/b", "a-b", "ä", "ö")}) == 6


def test_a_specialists_share_is_that_of_its_domains_tokens(replay: ReplayLog, drafted: Drafted) -> None:
    member = Member("code-specialist", "on trial", "code", "general")
    assert share_of(member, replay) == 0.0
    replay.append([*drafted("general", "chat", 9), *drafted("general", "code", 3)])
    assert share_of(member, replay) == pytest.approx(1 / 4)
    assert share_of(replace(member, domain="unseen"), replay) == 0.0


def test_no_clone_is_made_that_does_not_fit(
    specialists: Specialists,
    settings: OnlineSettings,
    replay: ReplayLog,
    pooled: VersionRegistry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def problem(owner: str, name: str) -> str:
        assert owner == "general"
        return f"the draft {name} needs 3.00 GiB of cache, and 1.00 are left"

    full = Specialists(settings, replay, pooled, lambda record: None, problem)
    with caplog.at_level(logging.WARNING):
        assert [full.clone(), full.clone()] == [None, None]
    (told,) = [record.getMessage() for record in caplog.records if "is cloned" in record.getMessage()]
    needs = "the draft code-specialist needs 3.00 GiB of cache, and 1.00 are left"
    assert told == f"no specialist code-specialist is cloned: {needs}"
    assert specialists.clone() is not None, "as soon as there is room"


def test_the_cost_of_a_draft_is_what_trials_have_lost() -> None:
    figures = SelectionFigures()
    figures.tokens.update(a=ENOUGH_TOKENS, b=ENOUGH_TOKENS)
    figures.losses.add(trials=0.25 * 2 * ENOUGH_TOKENS)
    assert cost_of_a_draft(figures, 3) == pytest.approx(0.1), "a fifth of what would have been written, for two drafts"
    assert cost_of_a_draft(figures, 1) == COST_OF_A_DRAFT
    assert cost_of_a_draft(replace(figures, losses=Losses(0.0)), 3) == 0.0
    assert cost_of_a_draft(replace(figures, losses=Losses()), 3) == COST_OF_A_DRAFT, "the selection estimates none"
    assert cost_of_a_draft(SelectionFigures(), 3) == COST_OF_A_DRAFT
