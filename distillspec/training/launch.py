"""Launch of the processes of a run: start them, watch them, report their end."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from distillspec.config import LauncherConfig
from distillspec.errors import ConfigError, Interrupted, RunError
from distillspec.files import write_json
from distillspec.provenance import usable_cores
from distillspec.training.interrupts import StopRequest, listen_for_stop
from distillspec.training.outcome import RankOutcome
from distillspec.training.strategies import Strategy

HOST = "127.0.0.1"
POLL_S = 0.1
GRACE_S = 2.0  # for the others to report their errors after one failed, before they are killed
LINGER_S = 15.0  # for the others to exit after the first one, which saves last, ended well. Then they are killed
INTERRUPTED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def check_launcher(config: LauncherConfig, device: str) -> None:
    """Raise ConfigError for a launcher that cannot start on this machine.

    Raises:
        ConfigError: DeepSpeed is not installed, there are too few GPUs, or `target.device` names one of them.
    """
    if config.kind == "local":
        return
    kind = torch.device("cuda" if torch.cuda.is_available() else "cpu").type if device == "auto" else device
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"target.device={device} does not go with launcher={config.kind}; use auto, cuda or cpu")
    if kind == "cuda" and config.num_processes > torch.cuda.device_count():
        raise ConfigError(
            f"launcher.num_processes={config.num_processes} needs as many GPUs; this machine has "
            f"{torch.cuda.device_count()}: lower it, or set target.device=cpu"
        )
    if config.kind.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"launcher={config.kind} needs DeepSpeed: pip install 'distillspec[deepspeed]', or use launcher=fsdp"
        )


def launch(config: LauncherConfig, device: str, command: Sequence[str], folder: Path) -> None:
    """Run `command` in `config.num_processes` processes of this machine, until all have ended.

    They find each other by torchrun's environment variables. The first one writes to this process's output, the
    others to `folder/ranks/rank-N.log`. Errors of all go there too. SIGINT and SIGTERM are passed on. None
    of them survives this call, nor this process.

    Raises:
        ConfigError, RunError: the error that a process raised, or that one of them died.
        Interrupted: they stopped at a signal.
    """
    shutil.rmtree(folder / "ranks", ignore_errors=True)
    (folder / "ranks").mkdir(parents=True)
    # The store lives here and picks its own port, so no other program can take the port in between.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    processes: list[_Process] = []
    try:
        with listen_for_stop() as stop:
            for rank in range(config.num_processes):
                environment = _environment(config, device, rank, store.port)
                processes.append(_Process(rank, command, environment, folder))
            _watch(processes, stop)
        _raise_failure(processes, stop, folder)
    finally:
        for process in processes:
            process.kill()


def record_holdings(folder: Path, strategy: Strategy) -> None:
    """Write `folder/ranks/rank-N.json`: this process's rank, device and share of the state."""
    accelerator = strategy.accelerator
    record = {
        "rank": accelerator.process_index,
        "world": accelerator.num_processes,
        "backend": torch.distributed.get_backend(),
        "device": str(accelerator.device),
    }
    path = folder / "ranks" / f"rank-{accelerator.process_index}.json"
    write_json(path, record | asdict(strategy.holdings()))


class _Process:
    """One process of the launch, in a session of its own. A terminal's Ctrl-C then reaches it once, through us."""

    def __init__(self, rank: int, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.rank = rank
        self.log = folder / "ranks" / f"rank-{rank}.log"
        with self.log.open("w") as log:
            self._popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,  # closes with this process, however it ends: see `end_with_parent`
                stdout=None if rank == 0 else log,
                stderr=log,
                start_new_session=True,
            )
        self._folder = folder

    @property
    def code(self) -> int | None:
        return self._popen.poll()

    @property
    def has_ended_well(self) -> bool:
        return self.code in (0, *INTERRUPTED_CODES)

    @property
    def has_failed(self) -> bool:
        return self.code is not None and not self.has_ended_well

    def pass_on(self, number: int) -> None:
        if self.code is None:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the process and its children. A process that waits for the others handles no SIGTERM."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def outcome(self) -> RankOutcome | None:
        return RankOutcome.read(self._folder, self.rank)


def _watch(processes: Sequence[_Process], stop: StopRequest) -> None:
    """Wait until all have ended, or `GRACE_S` after the first failure, or `LINGER_S` after the first one's good end."""
    passed_on = False
    failed_at: float | None = None
    ended_at: float | None = None
    while any(process.code is None for process in processes):
        if stop.signal_number is not None and not passed_on:
            passed_on = True
            for process in processes:
                process.pass_on(stop.signal_number)
        if failed_at is None and any(process.has_failed for process in processes):
            failed_at = time.monotonic()
        if ended_at is None and processes[0].has_ended_well:
            ended_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            return
        if ended_at is not None and time.monotonic() - ended_at > LINGER_S:
            return
        time.sleep(POLL_S)


def _raise_failure(processes: Sequence[_Process], stop: StopRequest, folder: Path) -> None:
    """Raise the error that ended the launch early. The others fail in turn when one does, so the earliest counts."""
    outcomes = [outcome for process in processes if (outcome := process.outcome()) is not None]
    for outcome in sorted(outcomes, key=lambda outcome: outcome.time):
        if outcome.error in ("ConfigError", "RunError"):
            raise (ConfigError if outcome.error == "ConfigError" else RunError)(outcome.message)
    resume = f"distill train resume={shlex.quote(str(folder))}"
    interrupted = [process.code for process in processes if process.code in INTERRUPTED_CODES]
    if stop.signal_number is not None or interrupted:
        raise Interrupted(stop.signal_number or (interrupted[0] or 0) - 128, resume)
    failed = sorted((process for process in processes if process.has_failed), key=_time_of_failure)
    if failed:
        raise RunError(f"{_describe(failed[0], len(processes))}; then continue with: {resume}")


def _time_of_failure(process: _Process) -> float:
    """Return the time of its error, or 0 if it was killed without one: that comes before the others' errors."""
    outcome = process.outcome()
    return 0.0 if outcome is None else outcome.time


def _describe(process: _Process, count: int) -> str:
    name, outcome, code = f"process {process.rank} of {count}", process.outcome(), process.code
    if outcome is not None:
        return f"{name} failed: {outcome.error}: {outcome.message}; see {process.log}"
    if code is not None and code < 0:
        hint = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return f"{name} was ended by {signal.Signals(-code).name}{hint}; see {process.log}"
    return f"{name} ended with exit code {code}; see {process.log}"


def _environment(config: LauncherConfig, device: str, rank: int, port: int) -> dict[str, str]:
    """Return torchrun's variables, with this process as the agent that keeps the store."""
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    world = str(config.num_processes)
    required = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "DS_ACCELERATOR": "cpu" if on_cpu else "cuda",
    }
    if on_cpu:
        required["CUDA_VISIBLE_DEVICES"] = ""
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // config.num_processes))}
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve would stop gloo
    return {**defaults, **os.environ, **required}
