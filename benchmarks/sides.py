"""Sides of a benchmark that take turns: engines, transformers, prompts, and ratios of paired rounds."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any

import numpy
import torch

from distillspec.config import DataConfig
from distillspec.data.chat import render_prompt
from distillspec.data.prompts import prompt_key, read_rows
from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, Request, RequestOutput, SamplingParams

NEW_TOKENS = 128


def make_engine(
    options: argparse.Namespace, target: LanguageModel, draft: LanguageModel | None, batch: int, **settings: Any
) -> Engine:
    """Return an engine of `batch` slots without prefix reuse, with the given settings. By default a draft is alone."""
    defaults: dict[str, Any] = {"max_slots": batch, "max_model_len": 1024, "prefix_reuse": False, "controller": "fixed"}
    if draft is not None:
        defaults["proposer"] = "draft_model"
    return Engine(target, draft, EngineSettings(**{**defaults, "compile": options.compile, **settings}))


def greedy(tokens: int = NEW_TOKENS) -> SamplingParams:
    """Return greedy parameters for exactly so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def answers(
    engine: Engine, texts: Sequence[Sequence[int]], params: SamplingParams, tenant: str = "default"
) -> list[RequestOutput]:
    """Answer all texts, in order, for a tenant: n-grams and suffixes know what was written for the same one alone."""
    requests = [Request(str(row), tuple(text), params, tenant=tenant) for row, text in enumerate(texts)]
    for request in requests:
        engine.submit(request)
    done = engine.run_until_done([request.id for request in requests])
    return [done[request.id] for request in requests]


def generate(engine: Engine, texts: Sequence[Sequence[int]], params: SamplingParams, tenant: str = "default") -> int:
    """Answer all texts and return the number of tokens written."""
    return sum(len(output.token_ids) for output in answers(engine, texts, params, tenant))


def left_padded(texts: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask `[texts, longest]` of texts that are padded on the left, for transformers."""
    longest = max(len(text) for text in texts)
    ids = torch.tensor([[pad] * (longest - len(text)) + list(text) for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    return ids, mask


def hf_generate(target: LanguageModel, texts: Sequence[Sequence[int]]) -> int:
    """Run transformers' greedy generation of a left-padded batch and return the number of tokens written."""
    ids, mask = left_padded(texts, target.stop_ids[0])
    out = target.model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=target.stop_ids[0],
    )
    return len(texts) * (out.shape[1] - ids.shape[1])


def paired(sides: dict[str, Callable[[], int]], rounds: int, against: str | None = None) -> dict[str, Any]:
    """Run all sides by turns. The first round warms up.

    Returns:
        Tokens/s by side, and median ratios to the side `against` (default: the last).
    """
    against = against or list(sides)[-1]
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        order = list(sides) if round_ % 2 else list(sides)[::-1]
        for name in order:
            rate = rate_of(sides[name])
            if round_ > 0:
                rates[name].append(rate)
    ratios = {
        name: statistics.median(rate / other for rate, other in zip(side_rates, rates[against], strict=True))
        for name, side_rates in rates.items()
    }
    shown = {
        name: {"tokens_per_s": statistics.median(side_rates), "rounds": [round(rate, 2) for rate in side_rates]}
        for name, side_rates in rates.items()
    }
    return {"sides": shown, "ratios": ratios, "ratio": ratios[next(iter(sides))]}


def alternating_seconds(sides: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call, the sides by turns, without two warm-up rounds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 2):
        for name, call in sides.items():
            started = time.perf_counter()
            call()
            if round_ >= 2:
                times[name].append(time.perf_counter() - started)
    return times


def read_prompts(
    path: str, target: LanguageModel, count: int, longest: int = 256, without: Collection[str] = ()
) -> list[list[int]]:
    """Return the first `count` prompts of a JSONL file that are short enough, in the target's chat template.

    Args:
        without: keys (`prompt_key`) of prompts to leave out, such as those that a draft was trained on.
    """
    prompts = []
    for row in read_rows(DataConfig(prompts=path)):  # not by lines of text: some are broken inside a prompt
        ids = list(render_prompt(target.tokenizer, row["prompt"]))
        if len(ids) <= longest and prompt_key(ids) not in without:
            prompts.append(ids)
        if len(prompts) == count:
            break
    return prompts


def ragged(path: str, target: LanguageModel, count: int, shortest: int = 16, longest: int = 1024) -> list[list[int]]:
    """Return `count` texts of rising length, cut from the file's prompts one after another."""
    words = [token for prompt in read_prompts(path, target, 400) for token in prompt]
    lengths = numpy.geomspace(shortest, longest, count).round().astype(int).tolist()
    starts = [0, *accumulate(lengths)]
    return [words[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def rate_of(call: Callable[[], int]) -> float:
    """Return the tokens a second of a call that returns a number of tokens."""
    started = time.perf_counter()
    tokens = call()
    return tokens / (time.perf_counter() - started)
