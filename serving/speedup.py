"""The engine as the decoder of `distillspec.evaluation.measured`: the speed-up that serving will see."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from distillspec.config.engine import EngineConfig
from distillspec.evaluation.measured import Decoders, Run
from distillspec.models import LanguageModel
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.engine import Engine
from distillspec.types import SamplingPolicy


@contextmanager
def engine_decoders(
    draft: LanguageModel, target: LanguageModel, policy: SamplingPolicy, gamma: int, max_new_tokens: int, seed: int
) -> Iterator[Decoders]:
    """Yield one engine that decodes with no drafted tokens, or with `gamma` in every step.

    Nothing is compiled: that would begin in mid-measurement. Prompts are read again at each use.
    """
    settings = EngineConfig(
        controller="fixed", speculation_length=gamma, max_slots=1, compile=False, prefix_reuse=False, seed=seed
    )
    engine = Engine(target, draft, settings)
    params = SamplingParams(
        temperature=policy.temperature,
        top_k=policy.top_k,
        top_p=policy.top_p,
        min_p=policy.min_p,
        max_tokens=max_new_tokens,
    )

    def decode(ids: Sequence[int], length: int) -> Run:
        engine.use_controller(FixedLength(length))
        before, started = engine.runner.passes, time.perf_counter()
        (answer,) = engine.generate([list(ids)], params)
        seconds = time.perf_counter() - started
        return Run(seconds, len(answer.token_ids), engine.runner.passes - before)

    try:
        yield Decoders(lambda ids: decode(ids, 0), lambda ids: decode(ids, gamma))
    finally:
        engine.close()
