"""The engine as the decoder of `distillspec.evaluation.measured`, and its costs: the speed-up that serving will see."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import torch

from distillspec.config.engine import EngineConfig
from distillspec.evaluation.cost import CONTEXT_TOKENS, DRAFT, LOOP, VERIFY, StepCost, paired_cost
from distillspec.evaluation.measured import Decoders, Decoding, Prompt, Run
from distillspec.models import LanguageModel
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.engine import Engine


@contextmanager
def engine_decoders(draft: LanguageModel, target: LanguageModel, how: Decoding) -> Iterator[Decoders]:
    """Yield an engine that drafts nothing, or `how.speculation_length` tokens in every step, and one with the defaults.

    Nothing is compiled: that would begin in mid-measurement. Prompts are read again at each use.
    """
    policy, gamma = how.policy, how.speculation_length
    defaults = EngineConfig(max_slots=how.batch, compile=False, prefix_reuse=False, seed=how.seed)
    params = SamplingParams(
        temperature=policy.temperature,
        top_k=policy.top_k,
        top_p=policy.top_p,
        min_p=policy.min_p,
        max_tokens=how.max_new_tokens,
    )

    def decode(by: Engine, prompts: Sequence[Prompt]) -> Run:
        before, started = by.runner.passes, time.perf_counter()
        answers = by.generate([list(ids) for ids in prompts], params)
        seconds = time.perf_counter() - started
        return Run(seconds, sum(len(answer.token_ids) for answer in answers), by.runner.passes - before)

    def drafting(length: int, prompts: Sequence[Prompt]) -> Run:
        engine.use_controller(FixedLength(length))
        return decode(engine, prompts)

    with (
        closing(Engine(target, draft, replace(defaults, controller="fixed", speculation_length=gamma))) as engine,
        closing(Engine(target, draft, defaults)) as server,
    ):
        yield Decoders(partial(drafting, 0), partial(drafting, gamma), partial(decode, server))


def engine_costs(
    draft: LanguageModel, target: LanguageModel, batches: Sequence[int], longest: int
) -> dict[int, StepCost]:
    """Time the engine's passes at every batch size, with `CONTEXT_TOKENS` tokens a row, verdicts included."""
    return {batch: _engine_cost(draft, target, batch, longest) for batch in batches}


@torch.inference_mode()
def _engine_cost(draft: LanguageModel, target: LanguageModel, batch: int, longest: int) -> StepCost:
    limit = target.longest_text or CONTEXT_TOKENS * 2
    length = min(CONTEXT_TOKENS + 2 * longest + 2, limit)
    context = length - 2 * longest - 2
    settings = EngineConfig(
        controller="fixed",
        speculation_length=longest,
        max_slots=batch,
        max_model_len=length,
        compile=False,
        prefix_reuse=False,
    )
    engine = Engine(target, draft, settings)
    try:
        passes = engine.timed_passes()
        drafting = {k: passes.drafting(batch, k, context) for k in range(1, longest + 1)}
        verifying = {k: passes.verification(batch, k, context) for k in range(longest + 1)}
        passes.warm_up([*verifying.values(), *drafting.values()])

        def seconds(side: str, k: int) -> float:
            if side in (DRAFT, LOOP):
                return passes.seconds(drafting[k if side == LOOP else 1])
            return passes.seconds(verifying[k if side == VERIFY else 0])

        return paired_cost(batch, seconds, longest, loops=True)
    finally:
        engine.close()
