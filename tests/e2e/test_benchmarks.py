"""Benchmarks that no machine of ours runs every day still run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_gpu_benchmark_runs_anywhere_on_a_tiny_shape() -> None:
    words = "--shapes tiny --device cpu --minutes 4 --output="
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), *words.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    for check in ("share of bandwidth", "5 tokens / 1 token", "host ms a step", "speed-up over plain decoding"):
        assert check in done.stdout
    assert not (BENCHMARKS / "results" / ".json").exists()
