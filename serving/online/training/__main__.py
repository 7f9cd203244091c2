"""Trainer process: `python -m distillspec.serving.online.training FOLDER`. It ends with the process that started it."""

import sys
from pathlib import Path

from distillspec.training.lifeline import allow_stops, end_with_parent

if __name__ == "__main__":
    end_with_parent()
    allow_stops()  # before the imports: they take seconds of CPU, from requests too
    from distillspec.serving.online.training.process import run_embedded

    sys.exit(run_embedded(Path(sys.argv[1])))
