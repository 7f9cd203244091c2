"""What proposers learn outlives a restart in the online folder, but for those who opted out of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.online.adaptation import Adaptation
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry

from ..conftest import TIGHT, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, Any] = {**TIGHT, "controller": "fixed", "speculation_length": 4}


class Server:
    """An engine with its adaptation, from start to end."""

    def __init__(self, target: LanguageModel, settings: OnlineSettings, proposer: str, **own: Any) -> None:
        self.engine = Engine(target, None, EngineSettings(**SETTINGS, proposer=proposer))
        self.adaptation = Adaptation(self.engine, settings, **own)

    def __enter__(self) -> Server:
        self.adaptation.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.adaptation.stop()
        self.engine.close()

    def steps(self, name: str, tenant: str = "alice", **more: Any) -> int:
        """Serve one prompt, and return the target's passes that it took."""
        self.engine.submit(Request(name, tuple(prompts(2)[1]), GREEDY, tenant=tenant, **more))
        while self.engine.has_work:
            output = self.engine.step()
            self.adaptation.on_step(output)
            for finished in output.finished:
                return finished.stats.steps
        raise AssertionError(name)

    def idle(self) -> None:
        while self.engine.has_work:
            self.engine.step()


def kept(settings: OnlineSettings) -> list[Path]:
    return sorted(settings.layout.answers.iterdir()) if settings.layout.answers.is_dir() else []


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_what_was_learnt_before_a_restart_is_known_after_it(
    target: LanguageModel, settings: OnlineSettings, registry: VersionRegistry, proposer: str
) -> None:
    with Server(target, settings, proposer) as server:
        first = server.steps("0")
        plain = server.steps("not logged", "carol", log=False)
    assert len(kept(settings)) == 1
    assert {file.stat().st_mode & 0o777 for file in kept(settings)} == {0o600}
    with Server(target, settings, proposer) as server:
        assert server.steps("1") < first
        assert server.steps("2", "bob") == first
        assert server.steps("3", "carol", log=False) == plain >= first, "nothing was learnt of what is not logged"
        assert len(kept(settings)) >= 1
        server.adaptation.delete_tenant("alice")
        server.idle()
        assert server.steps("4") == first
        server.adaptation.delete_tenant("alice")
        server.idle()
    with Server(target, settings, proposer) as server:
        assert server.steps("5") == first
        assert server.steps("6", "bob") < first, "another tenant's stay"


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_an_excluded_tenant_is_neither_learnt_from_nor_kept(
    target: LanguageModel, settings: OnlineSettings, registry: VersionRegistry, proposer: str
) -> None:
    with Server(target, settings, proposer) as server:
        plain, first = server.steps("not logged", log=False), server.steps("0")
        server.adaptation.exclude_tenant("alice")
        server.idle()
        assert server.steps("1") == server.steps("2") == plain
        assert kept(settings) == []
        server.adaptation.exclude_tenant("alice", False)
        server.steps("3")
        assert server.steps("4") < first
    assert len(kept(settings)) == 1
    by_name = replace(settings, replay=replace(settings.replay, exclude_tenants=["alice"]))
    with Server(target, by_name, proposer) as server:
        assert kept(settings) == [], "files from before it was excluded are removed"
        assert server.steps("5") == server.steps("6") == plain
    assert kept(settings) == []


def test_nothing_is_learnt_in_a_pause(
    target: LanguageModel, settings: OnlineSettings, registry: VersionRegistry
) -> None:
    with Server(target, settings, "ngram") as server:
        server.adaptation.pause()
        first = server.steps("0")
        assert server.steps("1") == first
        server.adaptation.resume()
        server.steps("2")
        assert server.steps("3") < first


def test_what_a_hook_would_redact_stays_in_memory(
    target: LanguageModel, settings: OnlineSettings, registry: VersionRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), Server(target, settings, "ngram", redact=lambda answer: answer) as server:
        first = server.steps("0")
        assert server.steps("1") < first
    assert kept(settings) == []
    assert "kept in memory alone: replay.redaction does not reach them" in caplog.text


def test_a_folder_that_cannot_be_made_costs_no_request(
    target: LanguageModel, settings: OnlineSettings, registry: VersionRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    settings.layout.answers.parent.mkdir(parents=True, exist_ok=True)
    settings.layout.answers.write_text("a file")
    with Server(target, settings, "ngram") as server:
        first = server.steps("0")
        assert server.steps("1") < first
    assert "kept in memory alone" in caplog.text
    assert "it is no folder" in caplog.text


def test_a_deletion_by_command_reaches_the_files_too(
    target: LanguageModel, settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog
) -> None:
    with Server(target, settings, "ngram") as server:
        server.steps("0")
        server.steps("1", "bob")
    assert len(kept(settings)) == 2
    replay.exclude_tenant("alice")
    assert len(kept(settings)) == 1
    replay.delete_tenant("bob")
    assert kept(settings) == []
