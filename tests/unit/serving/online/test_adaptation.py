"""Everything together in one process, the trainer's part done by the test: acceptance rises, requests never fail."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distillspec.cli import main
from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.commands.online_serving import AdaptationControl
from distillspec.serving.online import trainer_link
from distillspec.serving.online.adaptation import Adaptation, first_draft
from distillspec.serving.online.bootstrap import NothingIntact
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.trainer_link import TrainerLink
from distillspec.serving.online.training.process import run_trainer
from distillspec.serving.online.training.trainer import OnlineTrainer
from distillspec.serving.server.observability.online_metrics import OnlineMetrics

from ..conftest import MakeEngine, prompts
from .log.conftest import Quota, traces

PATIENCE_S = 120.0
DEEPER = DraftConfig(layers=3)


class Traffic:
    """Serves requests in lots. All of them must end well."""

    def __init__(self, engine: Engine, adaptation: Adaptation | None = None) -> None:
        self.engine, self.adaptation, self.count = engine, adaptation, 0
        self.tokens: dict[str, tuple[int, ...]] = {}

    def serve(self, requests: int, **extra: object) -> None:
        for _ in range(requests):
            params = SamplingParams(max_tokens=24, ignore_eos=True, seed=self.count)
            prompt = (3 + self.count % 240, *prompts()[self.count % 3])  # a conversation of its own
            self.engine.submit(Request(f"r{self.count}", prompt, params, **extra))  # type: ignore[arg-type]
            self.count += 1
        self.finish()

    def finish(self) -> None:
        while self.engine.has_work:
            output = self.engine.step()
            if self.adaptation is not None:
                self.adaptation.on_step(output)
            for finished in output.finished:
                assert finished.finish_reason == "length"
                self.tokens[finished.request_id] = finished.token_ids

    def serve_until(self, holds: Callable[[], bool]) -> None:
        """Serve on, so that the gate finds steps to work between."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "nothing happened"
            self.serve(1)


@pytest.fixture
def given(small_draft: LanguageModel, target: LanguageModel, tmp_path: Path) -> Path:
    save_draft(small_draft, tmp_path / "given", target)
    return tmp_path / "given"


def engine_with(path: Path, target: LanguageModel, make_engine: MakeEngine) -> Engine:
    draft = load_pretrained(str(path), target, target.dtype)
    return make_engine(draft, speculation_length=2, compile=False, max_slots=8)


def test_the_draft_learns_from_what_it_serves(
    settings: OnlineSettings, given: Path, target: LanguageModel, make_engine: MakeEngine
) -> None:
    settings = replace(settings, adapt=replace(settings.adapt, max_steps=60, epochs=12))
    engine = engine_with(first_draft(settings, target, given), target, make_engine)
    with Adaptation(engine, settings) as adaptation:
        traffic = Traffic(engine, adaptation)
        traffic.serve(40)
        adaptation.writer.flush()
        assert adaptation.stats()["log"]["answers"] == 40
        first = adaptation.registry.current()
        (candidate,) = run_trainer(settings, lambda: False, once=True)
        trainer = OnlineTrainer(settings)  # it is elsewhere: online=decoupled
        traffic.serve_until(
            lambda: not trainer.judge() and adaptation.registry.get(candidate.name).status != "candidate"
        )
        assert adaptation.registry.get(candidate.name).status == "promoted", adaptation.verdicts()
        traffic.serve(40)
        stats = adaptation.stats()
        shown = stats["served"]["versions"]
        assert first is not None
        assert shown[candidate.served_as]["alpha"] > shown[first.served_as]["alpha"] + 0.02
        assert stats["serving"] == candidate.name
        assert stats["gained_tokens"] > 0
        assert stats["cpu_s_per_gained_token"] > 0
        seconds = TrainerState.read(settings.layout.state).seconds
        assert stats["device_s_per_gained_token"] == pytest.approx(seconds / stats["gained_tokens"])
    lines = [json.loads(line) for line in (settings.layout.root / "metrics.jsonl").read_text().splitlines()]
    assert {"swap", "verdict", "figures"} <= {line["event"] for line in lines}
    # Seeded requests get the same tokens across the swap as without any draft.
    plain = Traffic(make_engine(None, compile=False, max_slots=8))
    plain.serve(len(traffic.tokens))
    assert plain.tokens == traffic.tokens
    # The next start takes up what was promoted.
    assert first_draft(settings, target) == candidate.path
    assert first_draft(settings, target, given) == candidate.path  # the given one is known, and older


def test_pause_trigger_and_deletion(
    settings: OnlineSettings, given: Path, target: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = engine_with(first_draft(settings, target, given), target, make_engine)
    with Adaptation(engine, settings) as adaptation:
        traffic = Traffic(engine, adaptation)
        traffic.serve(3, tenant="a")
        adaptation.pause()
        assert TrainerControl.read(settings.layout.control).paused
        traffic.serve(3, tenant="a")
        adaptation.resume()
        traffic.serve(3, tenant="b")
        adaptation.trigger()
        control = TrainerControl.read(settings.layout.control)
        assert (control.paused, control.asked) == (False, 1)
        assert adaptation.replay.tenants() == {"a": 3, "b": 3}
        assert adaptation.delete_tenant("a") == 3
        assert adaptation.replay.tenants() == {"b": 3}
    assert engine.observer is None
    traffic.adaptation = None
    traffic.serve(2)  # the engine serves on


def test_the_trainer_is_told_of_requests_before_their_first_pass(
    settings: OnlineSettings,
    given: Path,
    target: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt beside a running trainer took ten times as long, and every answer begins with one."""
    told, told_at_tokens = list[bool](), list[list[bool]]()
    monkeypatch.setattr(TrainerLink, "set_busy", lambda self, busy: told.append(busy))
    engine = engine_with(first_draft(settings, target, given), target, make_engine)
    with Adaptation(engine, settings) as adaptation:
        engine.observer = lambda emissions, logits: told_at_tokens.append(list(told))
        Traffic(engine, adaptation).serve(1)
        assert told_at_tokens[0] == [True]
        assert told[-1] is False
        adaptation.on_step(engine.step())  # without a request
        assert told[-1] is False
    assert engine.before_step is None


def test_no_byte_of_who_opts_out_or_is_deleted_is_in_the_folder(
    settings: OnlineSettings, given: Path, target: LanguageModel, make_engine: MakeEngine
) -> None:
    settings = replace(settings, replay=replace(settings.replay, exclude_tenants=["shy-tenant"]))
    engine = engine_with(first_draft(settings, target, given), target, make_engine)
    whose: dict[str, dict] = {
        "open": {"tenant": "open-tenant"},
        "silent": {"tenant": "silent-tenant", "log": False},
        "shy": {"tenant": "shy-tenant"},
        "gone": {"tenant": "gone-tenant"},
    }
    texts = {who: tuple(range(20 * i, 20 * i + 12)) for i, who in enumerate(whose, 1)}
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=1)

    def found(who: str) -> set[str]:
        return traces(settings.layout.root, f"{who}-request", texts[who], traffic.tokens[f"{who}-request"])

    with Adaptation(engine, settings) as adaptation:
        traffic = Traffic(engine, adaptation)
        for who, extra in whose.items():
            engine.submit(Request(f"{who}-request", texts[who], params, **extra))
        traffic.finish()
        adaptation.writer.flush()
        for who in ("open", "gone"):
            assert {name.split("-")[0] for name in found(who)} >= {"shard", "manifest.sqlite"}, who
        assert "manifest.sqlite-wal" in found("gone")
        assert sum(map(len, engine.sequences.pool.contents)) > 0
        assert adaptation.delete_tenant("gone-tenant") == 1
        engine.step()
        assert sum(map(len, engine.sequences.pool.contents)) == 0  # what idle slots remembered
        assert {who for who in whose if found(who)} == {"open"}
    assert {who for who in whose if found(who)} == {"open"}
    named = {who: traces(settings.layout.root, f"{who}-tenant") for who in whose}
    assert named["silent"] == named["shy"] == set()
    assert named["gone"] == {"manifest.sqlite"}  # of the name, that and when it was deleted


def test_a_damaged_shard_is_shown_whoever_met_it(
    settings: OnlineSettings, given: Path, target: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = engine_with(first_draft(settings, target, given), target, make_engine)
    with Adaptation(engine, settings) as adaptation:
        Traffic(engine, adaptation).serve(2)
        adaptation.writer.flush()
        (shard, *_) = settings.layout.replay.glob("shard-*")
        shard.write_bytes(b"damaged")
        trainer = ReplayLog(settings.layout.replay)
        trainer.load(trainer.entries())
        assert adaptation.log_figures()["refused_shards"] == 1
        metrics = OnlineMetrics("distillspec:", "tiny")
        metrics.figures = AdaptationControl(adaptation).figures()
        series = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
        assert series["distillspec:replay_refused_shards_total"] == 1


def test_a_full_disk_fails_no_request(
    settings: OnlineSettings, given: Path, target: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = engine_with(first_draft(settings, target, given), target, make_engine)
    with Adaptation(engine, settings) as adaptation:
        quota = adaptation.replay.files.write = Quota(0)
        traffic = Traffic(engine, adaptation)
        traffic.serve(20)
        adaptation.writer.flush()
        shown = adaptation.stats()["log"]
        assert (shown["dropped_disk"], shown["answers"]) == (20, 0)
        quota.room = 1 << 20
        traffic.serve(5)
        adaptation.writer.flush()
        assert adaptation.stats()["log"]["answers"] == 5
    assert len(traffic.tokens) == 25


def test_served_acceptance_survives_a_restart(
    settings: OnlineSettings, given: Path, target: LanguageModel, make_engine: MakeEngine
) -> None:
    requests = []
    for _ in range(2):
        engine = engine_with(first_draft(settings, target, given), target, make_engine)
        with Adaptation(engine, settings) as adaptation:
            Traffic(engine, adaptation).serve(6)
            (figures,) = adaptation.stats()["served"]["versions"].values()
            requests.append(figures["requests"])
        engine.close()
    assert requests == [6, 12]


def test_a_start_without_a_draft_or_with_another_targets_log_is_one_line(
    settings: OnlineSettings, given: Path, target: LanguageModel, make_engine: MakeEngine
) -> None:
    with pytest.raises(ConfigError, match="there is no draft in"):
        first_draft(settings, target)
    first_draft(settings, target, given)
    other = replace(settings, replay=replace(settings.replay, entries=8))
    engine = engine_with(given, target, make_engine)
    Adaptation(engine, settings).stop()
    with pytest.raises(ConfigError, match="another entries"):
        Adaptation(engine, other)


def test_where_the_only_version_is_damaged_the_given_draft_serves(
    settings: OnlineSettings, given: Path, target: LanguageModel, make_engine: MakeEngine
) -> None:
    only = first_draft(settings, target, given)
    weights = only / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(NothingIntact, match=r"no version .* is intact: v00001-.* draft.path=FOLDER"):
        first_draft(settings, target)
    path = first_draft(settings, target, given)
    assert path != only
    engine = engine_with(path, target, make_engine)
    with Adaptation(engine, settings) as adaptation:
        assert adaptation.stats()["serving"] == path.name
        assert [version.status for version in adaptation.registry.versions()] == ["retired", "promoted"]
        Traffic(engine, adaptation).serve(2)
    assert first_draft(settings, target) == path  # later starts need no draft again


def test_the_commands(
    settings: OnlineSettings,
    given: Path,
    target: LanguageModel,
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Train once over a recorded log, judge, inspect. Nothing of a deleted tenant is exported."""
    engine = engine_with(first_draft(settings, target, given), target, make_engine)
    with Adaptation(engine, settings) as adaptation:
        Traffic(engine, adaptation).serve(60, tenant="acme")
    engine.close()
    monkeypatch.chdir(tmp_path)
    where = f"online.folder={settings.online.folder}"
    quick = ["adapt.max_steps=60", "adapt.epochs=12", "adapt.learning_rate=2e-3", "gate.min_requests=4"]
    assert main(["adapt", "target=tiny", "target.dtype=float32", where, "once=true", "judge=true", *quick]) == 0
    assert "promoted: gain" in capsys.readouterr().out
    assert main(["versions", where]) == 0
    assert [line.split()[1] for line in _lines(capsys, "v0")] == ["retired", "promoted"]
    assert main(["versions", "action=rollback", where]) == 0
    assert main(["versions", where]) == 0
    assert [line.split()[1] for line in _lines(capsys, "v0")] == ["promoted", "promoted", "rolled_back"]
    assert main(["replay", where]) == 0
    assert "bytes_per_token" in capsys.readouterr().out
    for run in ("kept", "moved"):
        assert main(["replay", "action=export", where, f"hydra.run.dir={run}"]) == 0
        assert "60 answers in" in capsys.readouterr().out
    Path("moved", "replay.safetensors").rename("elsewhere")
    assert main(["replay", "action=delete", "tenant=acme", where]) == 0
    said = capsys.readouterr()
    assert "60 answers of acme are deleted" in said.out
    assert not Path("kept", "replay.safetensors").exists()
    assert f"{tmp_path}/moved/replay.safetensors was moved or removed" in said.out
    assert main(["replay", "action=export", where]) == 0
    assert "nothing is written" in capsys.readouterr().out
    assert main(["versions", "action=show", where]) == 2
    assert main(["versions", "action=promote", "version=v9", where]) == 2
    assert main(["replay", "online.folder=nowhere"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distill:")]
    assert len(errors) == 3
    for line, words in zip(
        errors, ("name the version to show", "version=v9 is not in", "there is no log"), strict=True
    ):
        assert words in line


def _lines(capsys: pytest.CaptureFixture[str], start: str) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(start)]


def test_answers_and_promotions_are_dated_by_one_clock(
    settings: OnlineSettings,
    given: Path,
    target: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version promoted after the machine's clock was set forward had no answers since, for as long."""
    engine = engine_with(first_draft(settings, target, given), target, make_engine)
    with Adaptation(engine, settings) as adaptation:
        true = time.time
        monkeypatch.setattr(time, "time", lambda: true() + 8 * 3600.0)
        better = adaptation.registry.add(lambda folder: save_draft(initialise_draft(DEEPER, target), folder, target))
        adaptation.pool.first.gatekeeper.promote_by_hand(better.name)
        Traffic(engine, adaptation).serve(1)
        adaptation.writer.flush()
        (entry,) = adaptation.replay.entries()
        assert adaptation.registry.promotions()[-1]["time_s"] < entry.time_s


@pytest.mark.parametrize(("share", "servers", "warns"), [(1.0, 2, True), (1.0, 1, False), (0.1, 2, False)])
def test_a_trainer_that_nothing_stops_needs_cores_of_its_own(
    settings: OnlineSettings,
    given: Path,
    target: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    share: float,
    servers: int,
    warns: bool,
) -> None:
    settings = replace(settings, online=replace(settings.online, mode="on"))
    settings.adapt.busy_share = share
    engine = engine_with(first_draft(settings, target, given), target, make_engine)
    monkeypatch.setattr(trainer_link, "usable_cores", lambda: 2)
    monkeypatch.setattr(trainer_link.torch, "get_num_threads", lambda: servers)
    with Adaptation(engine, settings):
        pass
    assert ("more than the 2 cores" in caplog.text) == warns
