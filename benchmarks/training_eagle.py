"""Training of `draft=eagle` with three unrolled positions: response tokens a second, and the memory of a step.

    python benchmarks/training_eagle.py [--seconds 60] [--dtype bfloat16]

SmolLM2, a vocabulary of 8,192, the settings of `distill train`. Steps of all sides take turns in one process, and
medians are quoted: from recorded states and signal, from recorded states and a live teacher, and with both live. `every
chain` goes on to all three positions, where training keeps half of the chains for each further one.

Memory is the peak of a step over what the process held before it, for one position and for three, each in a process of
its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from common import peak_of, resident, write_result
from training import Step, alternate, bare, optimizer_step, written_samples

from distillspec.composition import compose
from distillspec.config import TrainCommand
from distillspec.data.collect import score
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.models.features import default_state_ids, read_states
from distillspec.models.memory import return_freed_memory
from distillspec.models.vocabulary import choose_kept_ids, count_tokens
from distillspec.signals import SignalRequest
from distillspec.training.feed import SampleFeed
from distillspec.training.module import DistillModule
from distillspec.training.optimizer import choose_trainable
from distillspec.training.precision import with_settled_dtype
from distillspec.training.state_store import StateStore
from distillspec.training.unrolling import Unrolling
from distillspec.types import Sample, StateRequest

GOAL = 1200  # response tokens a second from recorded states, on a CPU with bfloat16 units
CHAINS = {"one position": (1, 1.0), "three positions": (3, 0.5), "three positions, every chain": (3, 1.0)}
THREE, EVERY = list(CHAINS)[1:]


def main() -> None:
    options = _options()
    config = _config(options)
    if options.side:
        print(added_bytes(config, options.side))
        return
    target = load_target(config.target)
    samples = with_states(written_samples(target, options.samples), target)
    without_signal = [replace(sample, signal=None) for sample in samples]
    rates = alternate(
        {
            "recorded": _step(config, target, samples, THREE),
            "recorded, every chain": _step(config, target, samples, EVERY),
            "live teacher": _step(config, target, without_signal, THREE),
            "live teacher and states": _step(config, target, [bare(sample) for sample in samples], THREE),
        },
        options.seconds,
    )
    words = ["--target", options.target, "--dtype", config.train.dtype, "--vocabulary", str(options.vocabulary)]
    added = {side: [_in_process(side, words) for _ in range(options.repeats)] for side in CHAINS}
    result = {
        "dtype": config.train.dtype,
        "batch_tokens": config.train.batch_tokens,
        "response_tokens_per_s": rates,
        "added_bytes": added,
        "goals": {"response_tokens_per_s": GOAL},
        "met": {"response_tokens_per_s": rates["recorded"]["median"] >= GOAL},
    }
    write_result(options.name, result)


def with_states(samples: Sequence[Sample], target: LanguageModel) -> list[Sample]:
    """Return samples with the target's states that the draft reads, as `data.generator=slots` records them."""
    request, recorded = StateRequest(default_state_ids(target)), []
    for sample in samples:
        text = torch.tensor([[*sample.prompt_ids, *sample.response_ids[:-1]]])
        states = read_states(target, text, torch.arange(text.shape[1])[None], request.ids)[0]
        recorded.append(replace(sample, states=request.record(states)))
    return recorded


def added_bytes(config: TrainCommand, side: str) -> int:
    """Return what the second step of a process takes at its peak, above what there was before it."""
    target = load_target(config.target)
    generator = torch.Generator().manual_seed(0)
    length = config.train.row_tokens // 3
    texts = torch.randint(3, target.identity.vocab_size, (12, length), generator=generator).tolist()
    plain = [Sample(str(i), "d", tuple(text[:32]), tuple(text[32:])) for i, text in enumerate(texts)]
    step = _step(config, target, with_states(score(plain, target, SignalRequest("topk", 64, 4), seed=0), target), side)
    step()  # the first one makes the optimizer's moments
    return_freed_memory()  # of the first one: taken again, it would not be counted
    before = resident()
    return peak_of(step) - before


def _step(config: TrainCommand, target: LanguageModel, samples: list[Sample], chains: str) -> Step:
    counts = count_tokens((sample.prompt_ids + sample.response_ids for sample in samples), target.identity.vocab_size)
    kept_ids = choose_kept_ids(counts, config.draft.vocabulary or len(counts), target.tokenizer)
    draft = initialise_draft(config.draft, target, kept_ids=kept_ids)
    choose_trainable(draft, train_embeddings=False)
    # No room: states that were not recorded are computed again at each use.
    feed = SampleFeed(samples, config.train, 0, seed=0, states=StateStore(target, draft.state_ids, gib=0.0))
    module = DistillModule(draft, config.loss, Unrolling(*CHAINS[chains]))
    return optimizer_step(module, target, config.train, feed.take)


def _config(options: argparse.Namespace) -> TrainCommand:
    words = [f"target={options.target}", "target.device=cpu", f"train.dtype={options.dtype}", "train.max_steps=1"]
    config = compose("train", ["draft=eagle", f"draft.vocabulary={options.vocabulary}", *words])
    assert isinstance(config, TrainCommand)
    return with_settled_dtype(config, Path("no run yet"))


def _in_process(side: str, words: Sequence[str]) -> int:
    command = [sys.executable, __file__, "--side", side, *words]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="processes for each peak of memory")
    parser.add_argument("--dtype", default="auto", help="train.dtype: auto | float32 | bfloat16")
    parser.add_argument("--target", default="smollm2", help="smollm2 | tiny")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--name", default="training_eagle", help="of the result")
    parser.add_argument("--side", choices=tuple(CHAINS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
