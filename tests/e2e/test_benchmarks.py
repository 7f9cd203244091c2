"""Benchmarks that no machine of ours runs every day still run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft

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


def test_the_fidelity_benchmark_simulates_the_load_that_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(TargetConfig(path="tiny"))
    save_draft(initialise_draft(DraftConfig(layers=2), target), tmp_path / "draft", target)
    asked = [{"prompt": f"Why is {thing} what it is?", "domain": "chat"} for thing in ("water", "fire", "earth", "air")]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, asked)))
    words = f"--target tiny --draft {tmp_path / 'draft'} --prompts {tmp_path / 'chat.jsonl'} --output {tmp_path}"
    small = "--slots 2 --max-tokens 8 --longest-prompt 120 --longest 2 --seconds 0.5 --loads 0.3 --profile-rounds 1"
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["fidelity.py", *words.split(), *small.split(), "--policies", "none", "fixed-2"])
    runpy.run_path(str(BENCHMARKS / "fidelity.py"), run_name="__main__")
    found = json.loads((tmp_path / "fidelity.json").read_text())
    plain, drafted = found["runs"]
    assert plain["requests"] == drafted["requests"] > 0
    for run in found["runs"]:
        assert 0.1 < run["ratio"] < 10
        assert run["live"].keys() == run["simulated"].keys()
    # The same luck and fixed lengths: the same tokens drafted, whatever the steps took.
    assert drafted["live"]["tokens"] == drafted["simulated"]["tokens"]
    assert "speculating" in drafted["simulated"]
    for picture in ("fidelity.png", "fidelity_profile.png"):
        assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"
