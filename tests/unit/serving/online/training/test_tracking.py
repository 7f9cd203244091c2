"""Figures of trainer and server in one run of a tracker, which a later trainer continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distillspec.config import TrackerConfig
from distillspec.serving.online.state.layout import OnlineSettings, Tracked
from distillspec.serving.online.training.tracking import OnlineTracking, curves, open_tracking

FIGURES = {
    "event": "figures",
    "seconds": 3.0,
    "serving": "v2",
    "served": {"versions": {"abc": {"alpha": 0.5, "low": None, "domains": {"maths": 0.4}}}},
    "log": {"bytes": 1000},
    "trainer": {"share": 0.2, "drift": {"all": [0.4, 0.5]}},
    "cpu_s_per_gained_token": 0.1,
}
VERDICT = {"event": "verdict", "decision": "promoted", "gain": {"mean": 0.1, "low": 0.05, "high": 0.2}}


def test_the_numbers_of_a_record_become_curves() -> None:
    assert curves(FIGURES) == {
        "figures.seconds": 3.0,
        "figures.served.versions.abc.alpha": 0.5,
        "figures.served.versions.abc.domains.maths": 0.4,
        "figures.log.bytes": 1000.0,
        "figures.trainer.share": 0.2,
        "figures.trainer.drift.all.0": 0.4,
        "figures.trainer.drift.all.1": 0.5,
        "figures.cpu_s_per_gained_token": 0.1,
    }
    assert curves(VERDICT)["verdict.promoted"] == 1.0
    assert curves({"event": "update", "loss": float("nan"), "step": 4}) == {}


def serve(settings: OnlineSettings, *lines: str) -> None:
    """Append lines as a server does to its metrics.jsonl."""
    settings.layout.root.mkdir(parents=True, exist_ok=True)
    with (settings.layout.root / "metrics.jsonl").open("a") as stream:
        stream.write("".join(lines))


def test_a_trainer_and_its_successors_are_one_run_that_holds_the_servers_figures(
    settings: OnlineSettings, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = replace(settings, tracker=TrackerConfig(kind="tensorboard"))
    serve(settings, json.dumps(FIGURES) + "\n", json.dumps(VERDICT)[:20])
    with open_tracking(settings, tmp_path) as tracking:
        tracking.report({"event": "update", "loss": 2.0, "step": 1})
        tracking.follow()
        tracking.follow()
    serve(settings, json.dumps(VERDICT)[20:] + "\n")
    with open_tracking(settings, tmp_path) as tracking:  # the trainer was started again
        tracking.report({"event": "update", "loss": 1.0, "step": 2})
    events = EventAccumulator(str(tmp_path / settings.tracker.project))
    events.Reload()
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert curves["update.loss"] == [(1, 2.0), (3, 1.0)]
    assert curves["figures.trainer.share"] == [(2, pytest.approx(0.2))]
    assert curves["verdict.gain.low"] == [(4, pytest.approx(0.05))]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.0, 1.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_continues_its_run(settings: OnlineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = replace(settings, tracker=TrackerConfig(kind="wandb", name="short"))
    for _ in range(2):
        with open_tracking(settings, tmp_path) as tracking:
            tracking.report({"event": "update", "loss": 2.0, "step": 1})
    name = (tmp_path / "wandb_run_id").read_text().strip()
    kept = {path.name for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")}
    assert kept == {f"run-{name}.wandb"}
    assert Tracked.read(tmp_path / "tracked.json").step == 2


def test_a_tracker_that_fails_ends_no_training(settings: OnlineSettings, tmp_path: Path) -> None:
    class Broken:
        """A tracker of which nothing is left."""

        def __getattr__(self, name: str) -> object:
            raise OSError("no connection")

    tracking = OnlineTracking(settings, tmp_path, Broken())  # type: ignore[arg-type]
    tracking.report({"event": "update", "loss": 2.0})
    assert (tmp_path / "metrics.jsonl").is_file()
