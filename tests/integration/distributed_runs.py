"""Small runs that one process or several can train."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, PartialState

from distillspec.commands.run_folder import open_run
from distillspec.commands.train import prepare, train
from distillspec.commands.untrained import prepare_draft
from distillspec.composition import compose
from distillspec.config import LauncherConfig, TrainCommand
from distillspec.errors import RunError
from distillspec.models import LanguageModel, load_target, save_draft
from distillspec.training.launch import launch

WORLD = 2
STEPS = 4
ACCUMULATE = 2  # micro-batches a step in each process (a process alone takes twice as many)
BAD_STEP = 2
WORDS = (
    "experiment=smoke",
    "draft.vocabulary=120",
    "data.num_prompts=40",
    "data.max_new_tokens=12",
    f"train.max_steps={STEPS}",
    "train.eval_every=1",
    f"train.keep_checkpoints={STEPS}",
    "train.batch_tokens=128",
    "train.row_tokens=128",
    "train.dtype=float32",
    "train.schedule=constant",
    "target.device=cpu",
    "evaluation.measure_cost=false",
)


# A process of a launch that trains several runs, the one that is launched first.
RANK = f"""
import gc, os, sys
gc.disable()
from pathlib import Path
from accelerate.state import AcceleratorState, PartialState
from distillspec.commands import train_rank
from distillspec.sampling import NonFiniteLogits
from distillspec.training import module

plain, calls, others = module.chunked_loss, [], sys.argv[1:-1]
sys.argv[1:] = sys.argv[-1:]

def chunked_loss(*args, **kwargs):
    calls.append(1)
    if os.environ["RANK"] == "{WORLD - 1}" and len(calls) == {(BAD_STEP - 1) * ACCUMULATE + 1}:
        raise NonFiniteLogits("draft logits: NaN at position 3")
    return plain(*args, **kwargs)

def run(folder, rank):
    for each in [folder, *map(Path, others)]:
        run_one(each, rank)
        AcceleratorState._reset_state()
        PartialState._reset_state()

module.chunked_loss = chunked_loss
run_one, train_rank.run = train_rank.run, run
train_rank.leave(train_rank.main())
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder with its data and untrained draft, and the config it was made by."""

    folder: Path
    config: TrainCommand
    target: LanguageModel

    def launch(self, command: list[str] | None = None) -> None:
        open_run(self.folder, self.config)
        rank = [sys.executable, "-P", "-m", "distillspec.commands.train_rank"]
        try:
            launch(self.config.launcher, "cpu", [*(command or rank), str(self.folder)], self.folder)
        except RunError:
            for log in sorted((self.folder / "ranks").glob("*.log")):  # pytest shows what a failed test printed
                print(f"--- {log.name}\n{log.read_text()[-8000:]}")
            raise

    def launch_with(self, others: Sequence[Run], script: Path) -> None:
        """Launch this run, and let the same processes train the others after it: each start imports for seconds.

        Step `BAD_STEP` of this run meets NaN in one micro-batch, on the last process only.
        """
        script.write_text(RANK)
        for other in others:
            open_run(other.folder, other.config)
            (other.folder / "ranks").mkdir()
        self.launch([sys.executable, str(script), *(str(other.folder) for other in others)])

    def train_alone(self) -> None:
        open_run(self.folder, self.config)
        AcceleratorState._reset_state()
        PartialState._reset_state()
        train(self.config, self.folder, self.target, *prepare(self.config, self.folder, self.target))

    def spread(self, folder: Path, kind: str, **changes: Any) -> Run:
        """Return the same run from its start, in `WORLD` processes and another folder."""
        folder.mkdir(parents=True)
        for part in ("data", "initial"):
            shutil.copytree(self.folder / part, folder / part)
        settings = dataclasses.replace(self.config.train, accumulate=ACCUMULATE)
        changed = {"train": settings, "launcher": LauncherConfig(kind, WORLD), **changes}
        return Run(folder, dataclasses.replace(self.config, **changed), self.target)

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def steps(self, after: int = 0) -> list[dict[str, Any]]:
        return [line for line in self.metrics() if "train/lr" in line and line["step"] > after]

    def rank_records(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / "ranks" / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]


def make_run(folder: Path, *words: str) -> Run:
    config = compose("train", [*WORDS, f"train.accumulate={WORLD * ACCUMULATE}", *words])
    target = load_target(config.target)
    _, samples, held_out = prepare(config, folder, target)
    save_draft(prepare_draft(config.draft, target, lambda: samples or held_out), folder / "initial", target)
    # One epoch, in which several processes and one meet the same batches.
    assert on_policy(config) or len(samples) >= STEPS * WORLD * ACCUMULATE
    return Run(folder, config, target)


def on_policy(config: TrainCommand) -> bool:
    return config.data.source != "teacher"
