"""`distill train-stop` from the command line: a draft that tells what will be accepted, and its server's gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, read_metadata, save_draft
from distillspec.serving import Engine, SamplingParams

from .conftest import FAST, Distill

WORDS = ("target=tiny", "stop.epochs=2", "stop.width=8", "hydra.run.dir=run")


@pytest.mark.parametrize("reads", ["probs", "state"])
def test_a_draft_learns_what_will_be_accepted(
    distill: Distill, tmp_path: Path, given: Path, data_folder: Path, reads: str
) -> None:
    outcome = distill("train-stop", *WORDS, f"draft.path={given}", f"stop.text={data_folder}", f"stop.reads={reads}")
    assert outcome.code == 0, outcome.err
    assert "acceptance is 0." in outcome.out
    assert f"distill serve draft.path={tmp_path / 'run'} engine.draft_confidence=" in outcome.out
    found = json.loads((tmp_path / "run/summary.json").read_text())["quality"]
    assert found["places"] > 10
    assert 0 <= found["error"] <= 1
    record = json.loads((tmp_path / "run/draft/distillspec.json").read_text())
    assert record["stop"]["reads"] == reads
    weights = [(folder / "model.safetensors").read_bytes() for folder in (given, tmp_path / "run/draft")]
    assert weights[0] == weights[1], "the draft itself is as it was"
    engine = Engine.from_pretrained("tiny", str(tmp_path / "run"), dtype="float32", draft_confidence=0.01, max_slots=1)
    (output,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=1.0, max_tokens=8))
    engine.close()
    assert len(output.token_ids) > 0


def test_without_a_run_text_must_be_named(distill: Distill, tmp_path: Path, given: Path) -> None:
    outcome = distill("train-stop", *WORDS, f"draft.path={given}")
    assert outcome.code == 2
    assert "has no training run beside it; name a run with text, or an online.folder: stop.text=RUN" in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["draft.path=nowhere"], "nowhere is not a draft"),
        ([], "name the draft to teach: draft.path=FOLDER"),
        (["draft.path=d", "stop.reads=mind"], "stop.reads=mind is not known; use one of probs, state"),
        (["draft.path=d", "stop.answers=1"], "stop.answers=1 must be at least 2"),
        (["draft.path=given", "stop.text=nowhere"], "stop.text=nowhere is not a data folder"),
    ],
)
def test_bad_settings_are_one_line(
    distill: Distill, tmp_path: Path, given: Path, words: list[str], message: str
) -> None:
    (tmp_path / "given").symlink_to(given)
    outcome = distill("train-stop", *WORDS, *words)
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1


def test_blocks_and_heads_are_refused(distill: Distill, tmp_path: Path) -> None:
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    for kind, reason in (("block", "train it with draft.confidence=true"), ("medusa", "writes all in one pass")):
        save_draft(initialise_draft(DraftConfig(kind=kind), target), tmp_path / kind, target)
        outcome = distill("train-stop", *WORDS, f"draft.path={kind}")
        assert outcome.code == 2
        assert reason in outcome.err


def test_training_leaves_out_what_was_taught_of_the_weights_before(
    distill: Distill, tmp_path: Path, given: Path, data_folder: Path
) -> None:
    assert distill("train-stop", *WORDS, f"draft.path={given}", f"stop.text={data_folder}").code == 0
    goes_on = ("draft=pretrained", "draft.layers=null", "draft.path=run", f"data.cache={data_folder}")
    outcome = distill("train", *FAST, *goes_on, "train.max_steps=1", "hydra.run.dir=further")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("left out what train-stop taught the draft") == 1
    assert "stop" in read_metadata(tmp_path / "run/draft")
    assert "stop" not in read_metadata(tmp_path / "further/draft")
