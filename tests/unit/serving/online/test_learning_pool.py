"""A pool of drafts that learns while it serves: each its own domains, with its own versions and gate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from distillspec.config import EngineConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.draft_loading import load_named
from distillspec.serving.online.adaptation import Adaptation
from distillspec.serving.online.bootstrap import NothingIntact, first_draft, first_drafts, has_pool
from distillspec.serving.online.log.manifest import DraftedText
from distillspec.serving.online.pool.specialists import Specialists
from distillspec.serving.online.state.layout import OnlineSettings, TrainerState, lift_quarantine
from distillspec.serving.online.state.pool import Member
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.patience import enough_answers
from distillspec.serving.online.training.process import run_trainer
from distillspec.serving.online.training.trainers import Trainers
from distillspec.serving.online.training.unlearning import unlearn

from ..conftest import prompts
from .conftest import NAMES

LIMITS = EngineConfig(
    max_slots=8,
    max_model_len=256,
    compile=False,
    measure_costs_s=0,
    controller="fixed",
    speculation_length=2,
    selection="fixed",
)


class Server:
    """An engine with a pool, its adaptation, and the requests that it has answered."""

    def __init__(self, settings: OnlineSettings, target: LanguageModel, folders: dict[str, Path], chosen: str) -> None:
        limits = replace(LIMITS, selection_options={"draft": chosen})
        self.engine = Engine(target, load_named(first_drafts(settings, target, folders), target), limits)
        self.adaptation = Adaptation(self.engine, settings)
        self.count = 0
        self.tokens: list[tuple[int, ...]] = []

    def serve(self, requests: int, domain: str) -> None:
        for _ in range(requests):
            params = SamplingParams(max_tokens=24, ignore_eos=True, seed=self.count)
            prompt = (3 + self.count % 240, *prompts()[self.count % 3])
            self.engine.submit(Request(f"r{self.count}", prompt, params, domain=domain))
            self.count += 1
        while self.engine.has_work:
            output = self.engine.step()
            self.adaptation.on_step(output)
            self.tokens += [finished.token_ids for finished in output.finished]

    def serve_until_judged(self, version: str, trainers: Trainers, domain: str) -> None:
        """Serve until a candidate is promoted. The trainer's scores are the test's own work."""
        adaptation = self.adaptation
        while not adaptation.registry.get(version).verdict:  # written last
            assert self.count < 300, adaptation.pool.figures()
            self.serve(16, domain)
            adaptation.writer.flush()
            while trainers.judge():
                pass
            adaptation.pool.judge()
        assert adaptation.registry.get(version).status == "promoted", adaptation.verdicts()

    def serving(self) -> dict[str, str]:
        """Return the versions that the engine drafts with."""
        return {name: draft.identity.version for name, draft in self.engine.drafts.items()}


@pytest.fixture
def eager(settings: OnlineSettings) -> OnlineSettings:
    gate = replace(settings.gate, requests=200)
    return replace(settings, adapt=replace(settings.adapt, max_steps=60, epochs=12), gate=gate)


@pytest.fixture
def server(eager: OnlineSettings, target: LanguageModel, folders: dict[str, Path]) -> Iterator[Server]:
    """A server that lets `maths` draft for everything."""
    made = Server(eager, target, folders, "maths")
    with made.adaptation:
        yield made
    made.engine.close()


def test_the_draft_that_served_a_domain_learns_it_and_is_promoted_alone(server: Server, eager: OnlineSettings) -> None:
    adaptation = server.adaptation
    server.serve(40, "sums")
    adaptation.writer.flush()
    before = server.serving()
    (candidate,) = run_trainer(eager, lambda: False, once=True)
    assert candidate.member == "maths"
    server.serve_until_judged(candidate.name, Trainers(eager), "sums")
    server.serve(8, "sums")
    assert server.serving() == {"general": before["general"], "maths": candidate.served_as}
    figures = adaptation.stats()["drafts"]
    assert (figures["maths"]["serving"], figures["maths"]["status"]) == (candidate.name, "serving")
    assert figures["maths"]["served"]["versions"][candidate.served_as]["tried"] > 0
    assert figures["general"]["served"]["versions"] == {}
    assert {verdict["draft"] for verdict in adaptation.verdicts()} == {"maths"}
    # A rollback is of one draft.
    adaptation.pool.named("maths").gatekeeper.roll_back_by_hand()
    server.serve(1, "sums")
    assert server.serving() == before
    with pytest.raises(ConfigError, match="no draft 'nobody' learns here; there are general, maths"):
        adaptation.pool.named("nobody")


def test_text_is_that_of_no_draft_while_drafts_learn(server: Server, target: LanguageModel) -> None:
    server.serve(6, "sums")
    plain = Engine(target, None, replace(LIMITS, selection="goodput"))
    asked = [(3 + number, *prompts()[number % 3]) for number in range(6)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=number) for number in range(6)]
    assert sorted(output.token_ids for output in plain.generate(asked, params)) == sorted(server.tokens)
    plain.close()


def test_a_specialist_serves_once_it_is_better_and_leaves_when_it_is_rolled_back(
    server: Server, eager: OnlineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptation, pool = server.adaptation, server.adaptation.pool
    server.serve(40, "code")
    adaptation.writer.flush()
    monkeypatch.setattr("distillspec.serving.online.pool.specialists.LEARNT", 0)
    monkeypatch.setattr(
        "distillspec.serving.online.pool.specialists.poor_domain",
        lambda members, texts, *rest: None if len(members) > 2 else texts[0]._replace(draft="maths", accepted=1),
    )
    pool.keep_specialists()
    pool.follow()
    (made,) = [draft for draft in pool.drafts() if draft.on_trial]
    assert (made.name, list(server.engine.drafts)) == ("code-specialist", list(NAMES))
    (candidate,) = run_trainer(eager, lambda: False, once=True)
    assert candidate.member == made.name
    made.gatekeeper.try_out(candidate.name)
    server.serve(1, "code")
    assert server.serving()[made.name] == candidate.served_as
    assert made.gatekeeper.roll_back_by_hand() == made.registry.current()
    server.serve(2, "code")
    assert list(server.engine.drafts) == list(NAMES), "what was tried left again"
    assert made.on_trial, "only a promotion ends a trial"
    server.serve_until_judged(candidate.name, Trainers(eager), "code")
    server.serve(1, "code")
    assert server.serving()[made.name] == candidate.served_as
    assert [member.status for member in adaptation.registry.pool.members()] == ["serving"] * 3
    verdict = next(line for line in adaptation.verdicts() if line["version"] == candidate.name)
    assert verdict["gain"]["low"] > eager.gate.margin + 0.01  # the cost of one more draft, all text being its domain's
    # Going back to the clone's first version is to have no specialist.
    made.gatekeeper.roll_back_by_hand()
    pool.follow()
    server.serve(1, "code")
    assert list(server.engine.drafts) == list(NAMES)
    assert adaptation.registry.pool.members()[2].status == "withdrawn"


def all_on_trial(specialists: Specialists) -> list[tuple[str, str]]:
    """Stand in for `fruitless`. The watching thread may have withdrawn a specialist before the test does."""
    trials = [member for member in specialists.registry.pool.members() if member.status == "on trial"]
    return [(member.name, "4 versions were not better") for member in trials]


def test_a_fruitless_specialist_is_withdrawn(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = server.adaptation.registry
    current = registry.of("maths").current()
    assert current is not None
    monkeypatch.setattr(Specialists, "fruitless", all_on_trial)
    monkeypatch.setattr(Specialists, "clone", lambda self: None)
    own = registry.of("code-specialist")
    own.promote(own.add(lambda folder: shutil.copytree(current.path, folder)).name, "cloned")
    registry.pool.add(Member("code-specialist", "on trial", "code", "maths"))
    server.adaptation.pool.follow()
    server.adaptation.pool.keep_specialists()
    server.adaptation.pool.follow()
    assert [draft.name for draft in server.adaptation.pool.drafts()] == list(NAMES)
    lines = (server.adaptation.layout.root / "metrics.jsonl").read_text().splitlines()
    assert "withdrawal" in {json.loads(line)["event"] for line in lines}


def test_a_start_takes_up_the_pool_and_refuses_another_kind_of_folder(
    settings: OnlineSettings,
    target: LanguageModel,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    assert not has_pool(settings)
    started = first_drafts(settings, target, folders)
    assert list(started) == list(NAMES)
    assert has_pool(settings)
    assert first_drafts(settings, target, {}) == started
    assert first_drafts(settings, target, {"general": folders["general"]}) == started
    with closing(VersionRegistry(settings.layout.versions)) as registry:
        registry.pool.set_status("maths", "withdrawn", "by hand")
    assert list(first_drafts(settings, target, {})) == ["general"]
    assert first_drafts(settings, target, {"maths": folders["maths"]}) == started  # given again, it comes back
    with pytest.raises(ConfigError, match="has the versions of several drafts"):
        first_draft(settings, target, folders["general"])
    single = replace(settings, online=replace(settings.online, folder=str(tmp_path / "single")))
    first_draft(single, target, folders["general"])
    with pytest.raises(ConfigError, match="has the versions of one draft"):
        first_drafts(single, target, folders)


def test_a_quarantined_draft_does_not_stop_the_others(
    settings: OnlineSettings,
    target: LanguageModel,
    folders: dict[str, Path],
    server: Server,
) -> None:
    server.serve(8, "sums")
    server.adaptation.writer.flush()
    layout = settings.layout
    TrainerState(quarantined="bad updates").write(layout.of("maths").state)
    trainers = Trainers(settings)
    assert [trainer.member for trainer in trainers.all()] == ["general"]
    assert server.adaptation.stats()["drafts"]["maths"]["quarantined"] == "bad updates"
    assert server.adaptation.trainer.state().quarantined is None  # another draft may be trained
    server.adaptation.resume()
    lift_quarantine(layout, ["maths"])
    assert [trainer.member for trainer in trainers.all()] == ["general", "maths"]


def test_a_damaged_draft_is_left_out_and_the_others_serve(
    settings: OnlineSettings, target: LanguageModel, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    started = first_drafts(settings, target, folders)
    (started["maths"] / "model.safetensors").write_bytes(b"damaged")
    assert list(first_drafts(settings, target, {})) == ["general"]
    assert "the draft maths is left out, and the others serve" in caplog.text
    (started["general"] / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(NothingIntact, match="maths: no version"):
        first_drafts(settings, target, {})
    assert list(first_drafts(settings, target, {"maths": folders["maths"]})) == ["maths"]


def test_a_tenant_is_unlearnt_by_specialists_too(
    server: Server, eager: OnlineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve(12, "code")
    server.adaptation.writer.flush()
    (learnt,) = run_trainer(eager, lambda: False, once=True)
    registry = server.adaptation.registry
    registry.of("maths").promote(learnt.name, "by hand")
    monkeypatch.setattr("distillspec.serving.online.pool.specialists.LEARNT", 0)
    poor = DraftedText("code", "maths", 99, 99, 99, 1)
    monkeypatch.setattr("distillspec.serving.online.pool.specialists.poor_domain", lambda *rest: poor)
    server.adaptation.pool.keep_specialists()  # by its lock: the watching thread may have cloned one already
    (made,) = [member for member in registry.pool.members() if member.status == "on trial"]
    clone = registry.of(made.name).current()
    assert clone is not None
    assert clone.last_request == learnt.last_request
    assert sorted(unlearn(eager, "default")) == sorted([learnt.name, clone.name])
    assert not clone.path.exists()
    assert registry.pool.serving() == list(NAMES)
    assert [registry.of(name).versions()[0].status for name in NAMES] == ["promoted", "promoted"]


def test_a_draft_without_a_domain_asks_for_no_text(server: Server, eager: OnlineSettings) -> None:
    """Else everything would be logged for good: nobody writes text for it."""
    adaptation = server.adaptation
    assert adaptation.trainer.wants_text(), "nothing is logged yet"
    enough = enough_answers(eager.adapt, 0)
    assert enough is not None
    server.serve(enough, "code")
    adaptation.writer.flush()
    assert not adaptation.trainer.wants_text()
