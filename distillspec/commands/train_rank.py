"""One process of a multi-process `distill train`: `python -m distillspec.commands.train_rank FOLDER`.

`distill train` starts it on a prepared run folder, whose `config.yaml` holds the resolved config.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import transformers
from omegaconf import OmegaConf

from distillspec.commands.train import prepare, train
from distillspec.config import TrainCommand
from distillspec.errors import Interrupted, Terminated
from distillspec.files import write_json
from distillspec.models import load_target
from distillspec.models.numerics import resolve_device
from distillspec.training.lifeline import end_with_parent
from distillspec.training.outcome import RankOutcome


def main() -> int:
    """Train and return the exit code: 0 done, 1 failed, 130 or 143 stopped by a signal with the state saved."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    faulthandler.enable()  # a crash of native code leaves its Python stack in the log that the error names
    end_with_parent()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run(folder, rank)
    except Interrupted as stop:
        return 128 + stop.signal_number
    except BaseException as error:
        traceback.print_exc()
        RankOutcome.write(folder, rank, error)
        return 1
    return 0


def run(folder: Path, rank: int) -> None:
    """Train this process's share. The main process writes the result to `folder/training.json`."""
    config = read_config(folder)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(config.seed)
    if resolve_device(config.target.device).type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # the launching process has printed it
        target = load_target(config.target)
        prepared = prepare(config, folder, target)
    result = train(config, folder, target, *prepared)
    if rank == 0:
        write_json(folder / "training.json", asdict(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def read_config(folder: Path) -> TrainCommand:
    """Return the config that the launching process resolved."""
    merged = OmegaConf.merge(OmegaConf.structured(TrainCommand), OmegaConf.load(folder / "config.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, TrainCommand)
    return config


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def leave(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown. Everything is on disk.

    Shutdown would wait for processes that may be gone, and gloo's threads abort it now and then (torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
