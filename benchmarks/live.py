"""Shared parts of benchmarks under live load: options, prompts, engine, load and capacity."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import RESULTS

from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.bench.load import Arrival, poisson_load
from distillspec.serving.commands.bench_prompts import read_prompts
from distillspec.types import Prompt


def add_options(parser: argparse.ArgumentParser, *, seconds: float) -> None:
    """Add the options that `prompts_of`, `make_engine`, `load` and `capacity_of` read."""
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--each", type=int, default=60, help="prompts of each file, the last ones")
    parser.add_argument("--longest-prompt", type=int, default=256)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=seconds, help="of arrivals a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)


def prompts_of(options: argparse.Namespace, target: LanguageModel) -> list[Prompt]:
    """Return the last prompts of every file."""
    prompts = read_prompts(options.prompts, options.longest_prompt, target, "--prompts")
    return prompts[-options.each * len(options.prompts) :]


def make_engine(
    options: argparse.Namespace,
    target: LanguageModel,
    draft: LanguageModel,
    speculation_length: int,
    *,
    compiled: bool = False,
    tree: str = "off",
) -> Engine:
    """Make an engine with room for the longest request in every slot. No prompt is reused from the cache."""
    settings = EngineSettings(
        max_slots=options.slots,
        max_model_len=options.longest_prompt + options.max_tokens + 8,
        speculation_length=speculation_length,
        prefix_reuse=False,
        compile=compiled,
        tree=tree,
        proposer="draft_model",
    )
    return Engine(target, draft, settings)


def load(options: argparse.Namespace, prompts: list[Prompt], rate: float, round_: int = 0) -> list[Arrival[Any]]:
    """Return the Poisson arrivals of a round. All answers have full length, so that all policies write as much."""
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True)
    return poisson_load(prompts, params, rate, options.seconds, options.seed + round_)


def capacity_of(engine: Engine, options: argparse.Namespace, prompts: list[Prompt]) -> float:
    """Measure the requests a second that the engine answers without speculation when all slots are busy."""
    engine.use_controller(FixedLength(0))
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    requests = [prompts[i % len(prompts)].token_ids for i in range(2 * options.slots)]
    engine.generate(requests[: options.slots], params)  # warms up
    started_s = engine.clock()
    engine.generate(requests, params)
    return len(requests) / (engine.clock() - started_s)


def setting_of(options: argparse.Namespace, target: LanguageModel, prompts: list[Prompt]) -> dict[str, Any]:
    """Return the settings that a result records."""
    return {
        "slots": options.slots,
        "max_tokens": options.max_tokens,
        "prompts": len(prompts),
        "domains": sorted({prompt.domain for prompt in prompts}),
        "temperature": options.temperature,
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype),
    }
