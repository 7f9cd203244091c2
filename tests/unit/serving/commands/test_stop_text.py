"""Answers of a server's log teach the stop network of its draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distillspec.config import DraftPathConfig, StopConfig, TargetConfig, TrainStopCommand
from distillspec.data.trained_prompts import with_trained_prompts
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, load_draft, read_metadata
from distillspec.serving.commands import train_stop
from distillspec.serving.commands.stop_text import find_text
from distillspec.serving.online.log.replay_log import ReplayLog

from .conftest import Learning, StartLearning


@pytest.fixture
def served(learn: StartLearning) -> Learning:
    """A server that has answered 12 prompts, of which one came three times."""
    running = learn("decoupled")
    running.ask(10)
    for _ in range(2):
        running.ask(1)  # the first prompt again
    running.adaptation.writer.flush()
    return running


def folder_of(running: Learning) -> Path:
    return running.adaptation.settings.layout.root


def test_a_draft_is_taught_by_the_log_of_the_server_that_it_serves(
    served: Learning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = TrainStopCommand(
        draft=DraftPathConfig(str(tmp_path / "given")),
        target=TargetConfig(path="tiny", dtype="float32", device="cpu"),
        stop=StopConfig(width=8, epochs=1, text=str(folder_of(served))),
    )
    train_stop.run(command, tmp_path / "stop")
    assert "stop" in read_metadata(tmp_path / "stop" / "draft")
    assert "they taught the draft" not in capsys.readouterr().out
    served.ask(2)  # the log goes on


def test_a_conversation_that_teaches_does_not_judge(served: Learning, target: LanguageModel, tmp_path: Path) -> None:
    draft = load_draft(tmp_path / "given", target)
    text = find_text(StopConfig(text=str(folder_of(served))), target, draft, tmp_path / "given")
    assert len(text.learning) + len(text.judging) == 12
    learnt, judged = ({sample.prompt_ids for sample in part} for part in (text.learning, text.judging))
    assert not learnt & judged
    assert (len(judged), len(learnt)) == (2, 8)
    assert not text.taught_draft
    taught = with_trained_prompts(draft, list(judged)[:1])
    assert find_text(StopConfig(text=str(folder_of(served))), target, taught, tmp_path / "given").taught_draft
    newest = find_text(StopConfig(text=str(folder_of(served)), answers=5), target, draft, tmp_path / "given")
    of_learnt = with_trained_prompts(draft, list(learnt))
    assert not find_text(StopConfig(text=str(folder_of(served))), target, of_learnt, tmp_path / "given").taught_draft
    replay = ReplayLog(served.adaptation.settings.layout.replay)
    logged = [answer.sample().prompt_id for answer in replay.load(replay.entries())]
    replay.close()
    assert sorted(s.prompt_id for s in (*newest.learning, *newest.judging)) == sorted(logged[-5:])


def test_a_log_of_another_target_or_without_text_is_refused(
    served: Learning, target: LanguageModel, tmp_path: Path
) -> None:
    draft, config = load_draft(tmp_path / "given", target), StopConfig(text=str(folder_of(served)))
    other = replace(target, identity=replace(target.identity, weights_hash="other"))
    with pytest.raises(ConfigError, match="was recorded with another weights_hash"):
        find_text(config, other, draft, tmp_path / "given")
    served.adaptation.replay.delete_tenant("alice")
    with pytest.raises(ConfigError, match="has 0 answers of the target in 0 conversations, and two of these"):
        find_text(config, target, draft, tmp_path / "given")
