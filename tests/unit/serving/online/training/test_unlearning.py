"""Learning again without a tenant: nothing that may have learnt from it is left."""

from __future__ import annotations

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings, TrainerState
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.process import run_trainer
from distillspec.serving.online.training.unlearning import unlearn

from ..conftest import Answer
from .conftest import changed, fill


def test_what_learnt_from_a_tenant_is_gone_and_the_rest_is_learnt_again(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    settings = changed(settings)
    given = registry.current()
    assert given is not None
    fill(replay, answer, 6, tenant="stays")
    fill(replay, answer, 6, start=6, tenant="leaves")
    (first,) = run_trainer(settings, lambda: False, once=True)
    registry.promote(first.name, "better")
    fill(replay, answer, 2, start=12, tenant="stays")
    (second,) = run_trainer(settings, lambda: False, once=True)
    assert settings.layout.memory.is_file()

    (again,) = run_trainer(settings, lambda: False, once=True, without="leaves")
    assert replay.tenants() == {"stays": 8}
    assert not first.path.exists()
    assert not second.path.exists()
    assert (registry.get(first.name).status, registry.get(second.name).present) == ("refused", False)
    assert (registry.current() or again).name == given.name  # the gate judges the new one as any other
    assert again.parent == given.name
    assert (again.status, again.metrics["reason"]) == ("candidate", "by hand")
    assert (again.first_request, again.last_request) == (1, 14)
    assert TrainerState.read(settings.layout.state).working == again.name


def test_without_a_draft_as_it_was_given_nothing_is_changed(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    settings = changed(settings)
    fill(replay, answer, 6, tenant="leaves")
    (learnt,) = run_trainer(settings, lambda: False, once=True)
    given = registry.current()
    assert given is not None
    (given.path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="is as it was given"):
        unlearn(settings, "leaves")
    assert replay.tenants() == {"leaves": 6}
    assert learnt.path.is_dir()
