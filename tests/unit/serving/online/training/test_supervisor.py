"""The embedded trainer is a process only when there is something to learn, and out of the way from its first import."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distillspec.models import LanguageModel, save_draft
from distillspec.serving.commands.online_serving import AdaptationControl
from distillspec.serving.online.adaptation import Adaptation, first_draft
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import LOG_BYTES, OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.state.lock import held
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.trainer_link import URGENT_S
from distillspec.serving.online.training.patience import fewest_answers
from distillspec.serving.online.training.process import OCCUPIED, read_settings
from distillspec.serving.online.training.supervisor import BUSY_S, LONGEST_WAIT_S, TOO_OFTEN, Supervisor
from distillspec.serving.online.training.trainer import OnlineTrainer

from ...conftest import MakeEngine
from ..conftest import Answer
from ..test_adaptation import Traffic, engine_with
from .conftest import changed, fill

ENDLESS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def embedded(settings: OnlineSettings, small_draft: LanguageModel, target: LanguageModel) -> OnlineSettings:
    """With online=on, a first draft, and nothing held out, so that every answer counts."""
    settings = replace(
        settings,
        online=replace(settings.online, mode="on"),
        replay=settings.replay,
        adapt=replace(settings.adapt, every_requests=6, min_requests=4),
    )
    given = settings.layout.root.parent / "given"
    save_draft(small_draft, given, target)
    first_draft(settings, target, given)
    return settings


class House:
    """An adaptation polled by the test, with a trainer that waits for its end."""

    def __init__(self, settings: OnlineSettings, target: LanguageModel, make_engine: MakeEngine) -> None:
        self.engine = engine_with(first_draft(settings, target), target, make_engine)
        self.adaptation = Adaptation(self.engine, settings)
        assert self.adaptation.supervisor is not None
        self.supervisor = self.adaptation.supervisor
        self.supervisor.command = ENDLESS
        self.adaptation.writer.start()
        self.engine.observer = self.adaptation.observe
        self.traffic = Traffic(self.engine, self.adaptation)

    def serve(self, requests: int) -> None:
        self.traffic.serve(requests)
        self.adaptation.writer.flush()

    def keep(self) -> int:
        """Poll the trainer once, with no request running. Return the number of starts so far."""
        self.adaptation.trainer.poll(idle=True)
        return self.supervisor.starts

    @property
    def stage(self) -> str:
        figures = AdaptationControl(self.adaptation).figures()
        assert self.adaptation.stats()["trainer"]["stage"] == figures.stage
        return figures.stage

    def end(self) -> None:
        self.adaptation.stop()
        self.engine.close()


def test_no_trainer_exists_until_half_of_its_first_updates_text_is_there(
    embedded: OnlineSettings, target: LanguageModel, make_engine: MakeEngine
) -> None:
    house = House(embedded, target, make_engine)
    assert (house.keep(), house.supervisor.pid, house.stage) == (0, None, "waiting_for_text")
    house.serve(2)
    assert (house.keep(), house.supervisor.pid, house.stage) == (0, None, "waiting_for_text")
    house.serve(1)
    assert house.keep() == 1
    assert house.supervisor.pid is not None
    assert house.stage == "starting"
    house.end()
    assert house.supervisor.pid is None
    # What is on disk is enough for the next start.
    again = House(embedded, target, make_engine)
    assert again.keep() == 1
    again.end()
    # Once an update has considered it, the next start waits for new text.
    newest = ReplayLog(embedded.layout.replay).newest_number()
    TrainerState(cursor=newest).write(embedded.layout.state)
    later = House(embedded, target, make_engine)
    assert (later.keep(), later.stage) == (0, "waiting_for_text")
    later.end()


def test_a_suspicion_is_urgent_for_a_while(
    embedded: OnlineSettings, target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, told, now_s = House(embedded, target, make_engine), list[bool](), [1000.0]
    monkeypatch.setattr(house.supervisor.brake, "set_urgent", told.append)
    monkeypatch.setattr(house.adaptation.replay, "clock", lambda: now_s[0])

    def starts(*suspects: str) -> int:
        house.adaptation.trainer.poll(idle=False, suspects=suspects)
        return house.supervisor.starts

    def control() -> TrainerControl:
        return TrainerControl.read(embedded.layout.control)

    assert [starts(), starts("v2")] == [0, 1], "it starts beside requests"
    assert (control().suspected, control().urgent_until_s) == (True, 1000.0 + URGENT_S)
    now_s[0] += URGENT_S
    starts("v2")
    starts()
    assert not control().suspected
    starts("v2")
    assert told == [False, True, False, False, False], "a suspicion that comes and goes has one such while"
    starts("v2", "v3")
    assert told[-1], "another version has its own"
    house.end()


def test_an_update_asked_for_by_hand_starts_it_with_any_text(
    embedded: OnlineSettings, target: LanguageModel, make_engine: MakeEngine
) -> None:
    house = House(embedded, target, make_engine)
    house.adaptation.trigger()
    assert house.keep() == 0  # nothing to learn from
    house.serve(1)
    assert house.keep() == 1
    house.end()
    # The trainer that was started for it knows that it was asked, and answers once.
    trainer = OnlineTrainer(embedded)
    assert trainer.due() == "asked"
    trainer.update("asked")
    fill_one(embedded)
    assert OnlineTrainer(embedded).due() is None


def fill_one(settings: OnlineSettings) -> None:
    """Copy the log's only answer, as if it had come again."""
    log = ReplayLog(settings.layout.replay)
    log.append(log.load(log.entries()))


def test_a_pause_outlives_a_restart_and_starts_no_trainer(
    embedded: OnlineSettings, target: LanguageModel, make_engine: MakeEngine
) -> None:
    house = House(embedded, target, make_engine)
    house.serve(6)
    house.adaptation.pause()
    assert (house.keep(), house.stage) == (0, "paused")
    house.end()
    again = House(embedded, target, make_engine)
    assert again.adaptation.paused
    again.serve(2)
    assert (again.keep(), again.stage) == (0, "paused")
    assert len(again.adaptation.replay.entries()) == 6
    again.adaptation.resume()
    again.serve(1)
    assert len(again.adaptation.replay.entries()) == 7
    assert again.keep() == 1
    again.end()


def test_where_another_trains_ours_is_said_to_be_elsewhere(
    embedded: OnlineSettings, target: LanguageModel, make_engine: MakeEngine
) -> None:
    house = House(embedded, target, make_engine)
    with held(embedded.layout.trainer / "trainer.lock"):
        assert (house.keep(), house.stage) == (0, "elsewhere")
    assert house.stage == "waiting_for_text"
    house.end()


def test_a_start_waits_for_running_requests_but_not_for_ever(settings: OnlineSettings) -> None:
    now, needed = [100.0], [False]
    supervisor = Supervisor(settings, needed=lambda: needed[0], command=ENDLESS, clock=lambda: now[0])
    supervisor.poll(idle=False)
    now[0] += 10 * BUSY_S
    supervisor.poll(idle=False)
    assert (supervisor.starts, supervisor.absent) == (0, "waiting_for_text")
    needed[0] = True
    supervisor.poll(idle=False)
    now[0] += BUSY_S / 2
    supervisor.poll(idle=False)
    assert (supervisor.starts, supervisor.absent) == (0, "starting")
    now[0] += BUSY_S / 2
    supervisor.poll(idle=False)
    assert supervisor.starts == 1
    supervisor.stop()
    calm = Supervisor(settings, command=ENDLESS)
    calm.poll(idle=True)
    assert calm.starts == 1
    calm.stop()
    settings.adapt.busy_share = 1.0  # it has cores of its own, and whose requests should it wait for?
    apart = Supervisor(settings, command=ENDLESS)
    apart.poll(idle=False)
    assert apart.starts == 1
    apart.stop()


def test_it_imports_at_low_priority_too(settings: OnlineSettings) -> None:
    supervisor = Supervisor(changed(settings, niceness=3), command=ENDLESS)
    supervisor.poll()
    assert supervisor.pid is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, supervisor.pid) == min(19, own + 3)
    group = Path(f"/proc/{supervisor.pid}/autogroup")
    if group.is_file():  # Linux schedules sessions as groups
        assert group.read_text().split()[-1] == str(min(19, own + 3))
    supervisor.stop()


def test_what_it_says_starts_a_new_file_where_there_is_much(settings: OnlineSettings) -> None:
    told = settings.layout.trainer / "trainer.log"
    told.parent.mkdir(parents=True)
    told.touch()
    os.truncate(told, LOG_BYTES)
    supervisor = Supervisor(settings, command=ENDLESS)
    supervisor.poll()
    assert told.stat().st_size < LOG_BYTES == told.with_name("trainer.1.log").stat().st_size
    assert told.stat().st_mode & 0o777 == 0o600
    supervisor.stop()


def _printed(settings: OnlineSettings, expression: str) -> str:
    """Start a process in the trainer's place. Return what it prints."""
    command = [sys.executable, "-c", f"import os, sys; print({expression}, flush=True); sys.stdin.read()"]
    supervisor = Supervisor(settings, command=command)
    supervisor.poll()
    try:
        output = settings.layout.trainer / "trainer.log"
        deadline = time.monotonic() + 20
        while not output.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        return output.read_text().strip()
    finally:
        supervisor.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="nothing stops a trainer elsewhere")
@pytest.mark.parametrize(
    ("threads", "busy_share", "cores", "expected"),
    [(None, 0.1, 4, 4), (None, 0.1, 64, 8), (None, 1.0, 4, 1), (3, 0.1, 4, 3)],
)
def test_it_has_all_cores_where_it_stands_still_beside_requests(
    settings: OnlineSettings,
    monkeypatch: pytest.MonkeyPatch,
    threads: int | None,
    busy_share: float,
    cores: int,
    expected: int,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    settings = replace(settings, adapt=replace(settings.adapt, threads=threads, busy_share=busy_share))
    assert _printed(settings, "os.environ['OMP_NUM_THREADS']") == str(expected)
    assert read_settings(settings.layout.root).adapt.threads == expected


@pytest.mark.parametrize(("operators", "expected"), [(None, "5000"), ("7", "7")])
def test_its_threads_sleep_at_a_barrier_soon(
    settings: OnlineSettings, monkeypatch: pytest.MonkeyPatch, operators: str | None, expected: str
) -> None:
    """Spinning, they keep a core from the engine's threads, and these one from them. An operator's number counts."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if operators is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", operators)
    assert _printed(settings, "os.environ['GOMP_SPINCOUNT']") == expected


def test_text_that_waited_for_the_trainer_has_waited(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    """The process starts only when there is text: `every_s` counts from that text, not from the start."""
    now = [0.0]
    newest_s = 1e11  # in the far future: a log's clock starts at its newest record
    fill(replay, answer, 1, time_s=newest_s - 40.0)
    fill(replay, answer, 3, 1, time_s=newest_s)
    trainer = OnlineTrainer(changed(settings, every_requests=None, every_s=60.0), clock=lambda: now[0])
    assert trainer.due() is None
    now[0] = 30.0
    assert trainer.due() == "time"


def test_no_update_is_due_below_the_fewest(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer, tmp_path: Path
) -> None:
    """The process would have nothing to do."""
    config = changed(settings, every_requests=8, on_drift=True, every_s=None)
    fewest = fewest_answers(config.adapt, 0)
    assert fewest == 8
    fill(replay, answer, fewest - 1)
    assert OnlineTrainer(config).due() is None
    fill(replay, answer, 1, fewest)
    assert OnlineTrainer(config).due() == "requests"


def test_a_servers_trainer_waits_for_one_that_somebody_started_by_hand(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 5)
    now = [0.0]
    real = Supervisor(changed(settings))
    with held(settings.layout.trainer / "trainer.lock"):
        real.poll()
        assert real.process is not None
        assert real.process.wait(250) == OCCUPIED  # it imports torch, perhaps beside others that do
        real.poll()
    assert real.occupied
    said = (settings.layout.trainer / "trainer.log").read_text()
    assert f"another trainer works on {settings.online.folder}" in said

    command = [sys.executable, "-c", f"raise SystemExit({OCCUPIED})"]
    supervisor = Supervisor(changed(settings), command=command, clock=lambda: now[0])
    for _ in range(TOO_OFTEN + 1):
        supervisor.poll()
        assert supervisor.process is not None
        supervisor.process.wait()
        supervisor.poll()
        assert supervisor.next_start_s > now[0]
        now[0] = supervisor.next_start_s
    assert supervisor.occupied
    assert supervisor.problem is None
    assert supervisor.starts == TOO_OFTEN + 1


@pytest.mark.parametrize("code", [0, 1])
def test_a_trainer_that_keeps_ending_is_started_again_after_growing_pauses(settings: OnlineSettings, code: int) -> None:
    now = [0.0]
    ending = [sys.executable, "-c", f"raise SystemExit({code})"]
    supervisor = Supervisor(settings, command=ending, clock=lambda: now[0])

    def pause_s() -> float:
        supervisor.poll()
        assert supervisor.process is not None
        supervisor.process.wait()
        supervisor.poll()
        found, now[0] = supervisor.next_start_s - now[0], supervisor.next_start_s
        return found

    assert [pause_s() for _ in range(TOO_OFTEN - 1)] == [1.0, 2.0, 4.0, 8.0]
    assert supervisor.failing is None
    assert [pause_s() for _ in range(9)] == [*(2.0**i for i in range(4, 12)), LONGEST_WAIT_S]
    assert f"13 times in a row without an update (code {code})" in str(supervisor.failing)
    assert supervisor.problem is None
    supervisor.command = ENDLESS
    supervisor.poll()
    assert supervisor.pid is not None
    TrainerState(updates=1).write(settings.layout.state)
    supervisor.poll()
    assert supervisor.failing is None
    supervisor.stop()
    supervisor.command = ending
    assert pause_s() == 1.0


def test_a_trainer_that_keeps_ending_is_an_alarm_until_somebody_resumes_it(
    embedded: OnlineSettings, target: LanguageModel, make_engine: MakeEngine
) -> None:
    house = House(embedded, target, make_engine)
    house.serve(3)
    house.supervisor.command = [sys.executable, "-c", "raise SystemExit(1)"]
    alarms = []
    for _ in range(TOO_OFTEN + 1):
        house.supervisor.next_start_s = 0.0
        house.keep()
        assert house.supervisor.process is not None
        house.supervisor.process.wait()
        house.keep()
        alarms.append(house.adaptation.reporter.events["alarm"])
    assert alarms == [0] * (TOO_OFTEN - 1) + [1, 1]
    assert house.stage == "failing"
    figures = AdaptationControl(house.adaptation).figures()
    assert figures.failing == house.supervisor.failing
    assert figures.problem is None
    assert not house.adaptation.trainer.wants_text()
    house.adaptation.pause()
    assert (house.keep(), house.stage) == (TOO_OFTEN + 1, "paused")
    house.supervisor.command = ENDLESS
    house.adaptation.resume()
    assert (house.keep(), house.stage) == (TOO_OFTEN + 2, "starting")
    house.end()
