"""Running `distill` inside the test process (fast) or beside it (signals)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from distillspec.cli import main
from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft

FAST = ("experiment=smoke", "train.dtype=float32", "evaluation.measure_cost=false", "evaluation.bootstrap_samples=10")
GENERATE = "target=tiny data.num_prompts=16 data.eval_prompts=4 data.max_new_tokens=24 data.max_prompt_tokens=160"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Distill = Callable[..., Outcome]


@pytest.fixture
def distill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Distill:
    """`distill("train", "loss=tvd")` in an empty folder: exit code and what was printed."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Outcome:
        GlobalHydra.instance().clear()
        capfd.readouterr()
        code = main(list(words))
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one `distill generate` on the tiny target, for runs that need no text of their own."""
    here, folder = os.getcwd(), tmp_path_factory.mktemp("generated")
    os.chdir(folder)
    try:
        code = main(["generate", *GENERATE.split(), "hydra.run.dir=run"])
    finally:
        os.chdir(here)
    assert code == 0
    return folder / "run"


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of the tiny target to begin with."""
    folder = tmp_path_factory.mktemp("given") / "draft"
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    save_draft(initialise_draft(DraftConfig(layers=2), target), folder, target)
    return folder
