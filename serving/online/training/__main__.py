"""Trainer process: `python -m distillspec.serving.online.training FOLDER`. It ends with the process that started it."""

import gc
import sys
from pathlib import Path

from distillspec.training.leaving import leaving_at_once
from distillspec.training.lifeline import allow_stops, end_with_parent


def run() -> int:
    gc.disable()  # imports make a million objects that stay, which the collector would visit again and again
    from distillspec.serving.online.training.process import run_embedded

    gc.freeze()
    gc.enable()
    return run_embedded(Path(sys.argv[1]))


if __name__ == "__main__":
    end_with_parent()
    allow_stops()  # before the imports: they take seconds of CPU, from requests too
    sys.exit(leaving_at_once(run))
