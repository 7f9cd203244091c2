"""Several servers tell one trainer what to do, and a trainer that has given up asks for no text."""

from __future__ import annotations

import pytest

from distillspec.errors import RunError
from distillspec.models import LanguageModel, save_draft
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.reporting import Reporter
from distillspec.serving.online.state.layout import OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.trainer_link import TrainerLink


@pytest.fixture
def links(settings: OnlineSettings, replay: ReplayLog, registry: VersionRegistry) -> list[TrainerLink]:
    """Two servers' links to one folder."""
    found = [TrainerLink(settings, replay, registry, Reporter(lambda record: None, lambda: 0.0)) for _ in range(2)]
    for link in found:
        link.start()
    return found


def test_what_one_server_tells_the_trainer_stands_when_another_tells_more(
    settings: OnlineSettings, links: list[TrainerLink]
) -> None:
    one, other = links

    def told() -> TrainerControl:
        return TrainerControl.read(settings.layout.control)

    one.pause()
    other.poll(idle=True, suspects=["v00002"])
    assert (told().paused, told().suspected) == (True, True)
    one.poll(idle=True)
    assert told().suspected, "the other server's suspicion"
    one.request_update()
    other.request_update()
    assert told().asked == 2
    other.poll(idle=True)
    assert (told().paused, told().suspected, told().urgent_until_s) == (True, False, 0.0)


def test_a_suspicion_of_an_earlier_server_ends_with_it(settings: OnlineSettings, links: list[TrainerLink]) -> None:
    links[0].poll(idle=True, suspects=["v00002"])
    links[1].start()
    assert not TrainerControl.read(settings.layout.control).suspected


def test_a_suspicion_outlives_what_other_servers_say(settings: OnlineSettings, links: list[TrainerLink]) -> None:
    """One that starts, or whose own suspicion ends, knows nothing of it."""
    links[0].poll(idle=True, suspects=["v00002"])
    links[1].start()
    links[0].poll(idle=True, suspects=["v00002"])
    assert TrainerControl.read(settings.layout.control).suspected


def test_what_could_not_be_written_is_told_again(
    settings: OnlineSettings, links: list[TrainerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(TrainerControl, "write", full)
        links[0].poll(idle=True, suspects=["v00002"])
    assert not TrainerControl.read(settings.layout.control).suspected
    links[0].poll(idle=True, suspects=["v00002"])
    assert TrainerControl.read(settings.layout.control).suspected


def test_a_trainer_that_has_given_up_wants_no_text(
    settings: OnlineSettings,
    links: list[TrainerLink],
    registry: VersionRegistry,
    small_draft: LanguageModel,
    target: LanguageModel,
) -> None:
    """Its open candidate would have every request logged for ever."""
    registry.add(lambda folder: save_draft(small_draft, folder, target))
    assert links[0].wants_text()
    TrainerState(quarantined="five ends within a minute").write(settings.layout.state)
    assert not links[0].wants_text()
