"""Settings that are constants now: refused with what holds in their place, and absent from help."""

from __future__ import annotations

import pytest

from distillspec.cli import main
from distillspec.composition import compose
from distillspec.config import COMMANDS
from distillspec.config.removed import FIXED, LEARNING, RENAMED, removed
from distillspec.errors import ConfigError
from distillspec.helptext import settings, settings_of

MOST_SETTINGS = 120  # of distill serve, a few above today's: a new one should take another one's place


@pytest.mark.parametrize("command", LEARNING)
@pytest.mark.parametrize("key", FIXED)
def test_a_constant_is_refused_with_what_holds(command: str, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(command, ["online=on", f"{key}=1"])
    assert str(error.value) == f"{key} is no longer a setting of distill {command}: {FIXED[key]}"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("command", "key"), [("train", "evaluation.max_gamma"), ("serve", "gate.max_gamma"), ("export", "gamma")]
)
def test_a_renamed_setting_is_refused_with_its_new_name(command: str, key: str) -> None:
    given = {"serve": ["online=on"], "export": ["draft.path=d"]}.get(command, [])
    with pytest.raises(ConfigError) as error:
        compose(command, [*given, f"{key}=3"])
    assert str(error.value) == f"{key} is called {RENAMED[command][key]} now"
    assert compose(command, [*given, f"{RENAMED[command][key]}=3"])


def test_no_command_is_told_of_a_name_that_it_does_not_have() -> None:
    for command, names in RENAMED.items():
        assert set(names.values()) <= {setting.name for setting in settings(COMMANDS[command])}
    assert removed("train", "gamma") is None


@pytest.mark.parametrize("key", ["gate.window", "loss.temperature"])
def test_help_leaves_constants_out(capsys: pytest.CaptureFixture[str], key: str) -> None:
    assert main(["serve", "--help=all"]) == 0
    shown = [line.split("=")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert "gate.requests" in shown
    assert key not in shown


def test_a_misspelt_setting_is_not_led_to_a_constant() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting gate\.windows") as error:
        compose("serve", ["gate.windows=1"])
    assert "gate.window?" not in str(error.value)


def test_training_keeps_what_only_online_learning_fixes() -> None:
    assert compose("train", ["loss.temperature=2", "data.signal=none"]).loss.temperature == 2
    assert removed("train", "loss.temperature") is None


def test_the_server_has_no_more_settings_than_it_needs() -> None:
    assert len(list(settings_of("serve"))) <= MOST_SETTINGS


def test_every_constant_is_named_as_it_was() -> None:
    """A misspelt key in the table would refuse nothing."""
    gone = {"gate.draft_cost", "gate.verify_cost", "server.max_header_kib", "engine.max_wait_s"}
    gone |= {"engine.lookup_longest", "engine.lookup_shortest", "adapt.anchor", "adapt.lora_by", "adapt.idle_only"}
    gone |= {"gate.offline_samples", "gate.busy_share", "gate.canary_requests", "gate.max_domain_loss"}
    gone |= {"replay.held_out", "replay.tail_samples", "adapt.lora_rank"}
    assert FIXED.keys() - {setting.name for setting in settings(COMMANDS["serve"])} == gone
