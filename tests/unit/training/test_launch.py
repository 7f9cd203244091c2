"""Starting and watching processes, with programs of one line instead of training."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distillspec.composition import compose
from distillspec.config import LauncherConfig
from distillspec.errors import ConfigError, Interrupted, RunError
from distillspec.training.launch import check_launcher, launch

pytestmark = pytest.mark.dist

TWO = LauncherConfig("ddp", 2)
# Writes its process id, in one go. The tests wait for that instead of some seconds.
HERE = (
    "import os, pathlib, sys, time; rank = os.environ['RANK'];"
    "pathlib.Path(f'new-{rank}').write_text(str(os.getpid())); os.rename(f'new-{rank}', f'pid-{rank}');"
)
SAY = "from distillspec.training.outcome import RankOutcome; from distillspec.errors import *;"


def command(program: str) -> list[str]:
    return [sys.executable, "-c", HERE + program]


def wait_for_file(name: str) -> str:
    """Return a program that waits for a file: processes may start seconds apart."""
    return f"[time.sleep(0.01) for _ in iter(pathlib.Path('{name}').exists, True)]"


def pid(rank: int) -> int:
    return int(Path(f"pid-{rank}").read_text())


def is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_processes_get_torchruns_variables_and_the_first_ones_output_is_ours(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    launch(TWO, "cpu", command(f"print(*[os.environ[n] for n in {names}], flush=True)"), folder)
    assert capfd.readouterr().out == "0 0 2 2 127.0.0.1\n"
    assert (folder / "ranks" / "rank-1.log").read_text() == "1 1 2 2 127.0.0.1\n"


def test_processes_meet_at_the_store(folder: Path) -> None:
    meet = (
        "import torch; torch.distributed.init_process_group('gloo'); mine = torch.tensor([int(rank) + 1]);"
        "torch.distributed.all_reduce(mine); pathlib.Path(f'sum-{rank}').write_text(str(mine.item()));"
        "torch.distributed.destroy_process_group()"
    )
    launch(TWO, "cpu", command(meet), folder)
    assert [Path(f"sum-{rank}").read_text() for rank in (0, 1)] == ["3", "3"]


def test_a_process_that_is_killed_takes_the_others_along_and_is_named(folder: Path) -> None:
    program = (
        f"rank == '1' and ({wait_for_file('pid-0')}, os.kill(os.getpid(), 9));"
        "time.sleep(300); pathlib.Path('ended-by-itself').touch()"
    )
    with pytest.raises(RunError, match=r"process 1 of 2 was ended by SIGKILL, perhaps for want of memory") as failed:
        launch(TWO, "cpu", command(program), folder)
    assert not (folder / "ended-by-itself").exists()
    assert f"see {folder / 'ranks' / 'rank-1.log'}" in str(failed.value)
    assert f"distill train resume={folder}" in str(failed.value)
    assert not is_alive(pid(0))


@pytest.mark.parametrize("kind", [ConfigError, RunError])
def test_what_a_process_says_reaches_the_user_before_what_others_make_of_it(
    folder: Path, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distillspec.training.launch.GRACE_S", 120.0)  # both report, however late one starts
    program = (
        f"{SAY} late = rank == '0'; late and {wait_for_file('ranks/rank-1.error.json')};"
        "RankOutcome.write(pathlib.Path('.'), int(rank), RuntimeError('connection closed') if late"
        f" else {kind.__name__}('train.x=1 is bad; use 2')); sys.exit(1)"
    )
    with pytest.raises(kind, match=r"^train\.x=1 is bad; use 2$"):
        launch(TWO, "cpu", command(program), folder)


def test_of_several_errors_the_first_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distillspec.training.launch.GRACE_S", 120.0)  # both report, however late one starts
    program = (
        f"{SAY} late = rank == '0'; late and {wait_for_file('ranks/rank-1.error.json')};"
        "RankOutcome.write(pathlib.Path('.'), int(rank), RuntimeError('connection closed') if late"
        " else KeyError('cause')); sys.exit(1)"
    )
    with pytest.raises(RunError, match="process 1 of 2 failed: KeyError: 'cause'; see"):
        launch(TWO, "cpu", command(program), folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_waited_for(folder: Path, number: signal.Signals) -> None:
    """Every process saves, which takes its time, and ends with the signal's code."""
    program = (
        "import signal;"
        f"signal.signal({int(number)}, lambda *a: (time.sleep(0.4), pathlib.Path(f'saved-{{rank}}').touch(),"
        f" os._exit({128 + number})));"
        "pathlib.Path(f'ready-{rank}').touch();"
        "[time.sleep(0.01) for _ in iter(lambda: all(pathlib.Path(f'ready-{r}').exists() for r in '01'), True)];"
        f"rank == '0' and os.kill(int(sys.argv[1]), {int(number)}); time.sleep(300)"
    )
    with pytest.raises(Interrupted) as stopped:
        launch(TWO, "cpu", [*command(program), str(os.getpid())], folder)
    assert stopped.value.signal_number == number
    assert all(Path(f"saved-{rank}").exists() for rank in (0, 1))


def test_a_process_that_hangs_after_the_work_is_done_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distillspec.training.launch.LINGER_S", 0.3)
    launch(TWO, "cpu", command(f"rank == '1' and time.sleep(300); {wait_for_file('pid-1')}"), folder)
    assert not is_alive(pid(1))


def test_nothing_outlives_a_launching_process_that_is_killed(folder: Path) -> None:
    program = "from distillspec.training.lifeline import end_with_parent; end_with_parent(); time.sleep(300)"
    parent = (
        "import pathlib, sys, json; from distillspec.config import LauncherConfig;"
        "from distillspec.training.launch import launch;"
        "launch(LauncherConfig('ddp', 2), 'cpu', json.loads(sys.argv[1]), pathlib.Path('.'))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, json.dumps(command(program))])
    wait_until(lambda: all(Path(f"pid-{rank}").exists() for rank in (0, 1)))
    process.kill()
    process.wait()
    wait_until(lambda: not is_alive(pid(0)) and not is_alive(pid(1)))
    assert not any(is_alive(pid(rank)) for rank in (0, 1))


def test_errors_of_an_earlier_launch_are_forgotten(folder: Path) -> None:
    with pytest.raises(RunError):
        launch(TWO, "cpu", command("sys.exit(3)"), folder)
    launch(TWO, "cpu", command("pass"), folder)


def test_deepspeed_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else real(name))
    with pytest.raises(ConfigError, match=r"launcher=deepspeed_zero3 needs .*distillspec\[deepspeed\]"):
        check_launcher(LauncherConfig("deepspeed_zero3", 2), "cpu")
    check_launcher(LauncherConfig("fsdp", 2), "cpu")


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_launcher(TWO, "auto")
    with pytest.raises(ConfigError, match=r"launcher\.num_processes=3 needs as many GPUs; this machine has 2"):
        check_launcher(LauncherConfig("fsdp", 3), "auto")
    check_launcher(LauncherConfig("fsdp", 3), "cpu")


def test_one_device_for_several_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"target\.device=cuda:1 does not go with launcher=ddp"):
        check_launcher(TWO, "cuda:1")
    check_launcher(LauncherConfig("local", 1), "cuda:1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launcher.num_processes=2"], r"launcher=local runs one process, not 2; use launcher=ddp"),
        (["launcher=ddp", "launcher.num_processes=0"], r"launcher\.num_processes=0 must be at least 1"),
        (["launcher=horovod"], r"launcher=horovod is not known; use one of ddp, deepspeed_zero2, .*fsdp, local"),
    ],
)
def test_impossible_launchers_are_refused_in_one_line(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose("train", words)
