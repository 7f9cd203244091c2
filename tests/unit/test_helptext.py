"""The help of the command line: every command, the common settings, every setting."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from subprocess import run as run_process

import pytest

from distillspec.cli import main
from distillspec.composition import compose
from distillspec.config import COMMANDS
from distillspec.config.everyday import EVERYDAY
from distillspec.config.registry import LOSSES, LossChoice
from distillspec.helptext import settings, settings_of

Capture = pytest.CaptureFixture[str]


def told(capsys: Capture, *words: str) -> str:
    """Return the output of `distill`, which must exit with 0 and leave stderr empty."""
    code = main(list(words))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_names_every_command(capsys: Capture, words: tuple[str, ...]) -> None:
    out = told(capsys, *words)
    assert all(f"  {command} " in out for command in COMMANDS)
    assert "Exit codes" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_all_of_the_help_shows_every_setting(capsys: Capture, command: str) -> None:
    out = told(capsys, command, "--help=all")
    lines = [line.strip() for line in out.splitlines()]
    for setting in settings_of(command):
        assert any(line.startswith(f"{setting.name}=") for line in lines), setting.name
    assert f"Example: distill {command}" in out
    assert "more settings" not in out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_shows_the_common_settings(capsys: Capture, command: str) -> None:
    known = [setting.name for setting in settings_of(command)]
    common = EVERYDAY[command]
    assert len(set(common)) == len(common)
    assert set(common) <= set(known)
    assert len(common) <= 32
    out = told(capsys, command, "--help")
    lines = [line.strip() for line in out.splitlines()]
    shown = [name for name in known if any(line.startswith(f"{name}=") for line in lines)]
    assert shown == [name for name in known if name in common]
    left = len(known) - len(common)
    assert (f"{left} more settings: distill {command} --help=all" in out) == (left > 0)


@pytest.mark.parametrize("flag", ["--help", "--help=all"])
def test_help_goes_with_settings_on_the_line(capsys: Capture, flag: str) -> None:
    assert told(capsys, "train", "loss=tvd", flag, "-m") == told(capsys, "train", flag)


def test_choices_and_their_lines_come_from_the_table(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "toy", LossChoice("nowhere:toy", "a toy"))
    assert "ce | tvdpp | toy" in told(capsys, "train", "--help")
    assert "      toy                a toy\n" in told(capsys, "train", "--help=all")
    assert "experiment=null  (a preset: smoke | ten-minutes)" in told(capsys, "train", "--help")


@dataclass
class Wrapped:
    """A group of a test."""

    plain: int = 1  # said on one line
    wrapped: int = 2  # a comment that is too long for its line
    # goes on below it,
    # twice
    spread: list[int] = field(
        default_factory=list,
    )  # beside the end of a field that takes more lines
    silent: int = 3

    # of the method below, not of the field
    def method(self) -> None: ...


@dataclass
class Heir(Wrapped):
    """A command of a test."""

    silent: int = 4  # said by the heir


def test_a_wrapped_comment_is_shown_whole(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "report", Heir)
    lines = told(capsys, "report", "--help=all").splitlines()
    assert lines[-4:] == [
        "plain=1  (said on one line)",
        "wrapped=2  (a comment that is too long for its line goes on below it, twice)",
        "spread=[]  (beside the end of a field that takes more lines)",
        "silent=4  (said by the heir)",
    ]
    assert {setting.name: setting.comment for setting in settings(Wrapped)}["silent"] == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_the_help_composes(capsys: Capture, command: str) -> None:
    line = next(line for line in told(capsys, command, "--help").splitlines() if line.startswith("Example: "))
    words = line.removeprefix("Example: ").split()
    assert words[:2] == ["distill", command]
    compose(command, words[2:])


def test_help_and_mistakes_load_neither_torch_nor_transformers() -> None:
    """They take seconds."""
    code = "import sys; from distillspec.cli import main; main(['train', '--help']); main(['train', 'loss=nope'])"
    code += "; print({'torch', 'transformers'} & set(sys.modules), file=sys.stderr)"
    done = run_process([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines()[-1] == "set()"
