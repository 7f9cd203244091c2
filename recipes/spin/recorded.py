"""Regret on answers of the live drafts: greedy, with what the target accepted of each draft's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distillspec.errors import RunError
from distillspec.progress import progress
from distillspec.recipes.spin.answers import SeededPrompt
from distillspec.recipes.spin.regret import Regret
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.bench.drive import drive
from distillspec.serving.bench.load import Arrival
from distillspec.serving.bench.records import RequestRecord
from distillspec.serving.selection.by_name import compared_selection
from distillspec.serving.simulation import Hardware
from distillspec.serving.simulation.recorded_trace import AcceptanceRecorder, Trials, recorded_pool
from distillspec.types import Prompt

APART_S = 1e-6  # between two arrivals: all wait from the start, in their order


def recorded_regret(engine: Engine, prompts: Sequence[SeededPrompt], tokens: int, regret: Regret) -> dict[str, Any]:
    """Return the curves of selections on the drafts' own answers, at the costs that the engine has measured.

    Each draft alone answers all prompts. Selections are then simulated with the acceptance recorded for each draft. A
    position has an outcome where the draft's windows reached it, whatever its depth in the window.

    Args:
        engine: an idle one whose drafts have names.
        tokens: of an answer.

    Raises:
        RunError: answers failed, or the costs of a draft are not known.
    """
    machine = machine_of(engine)
    records, by_draft = dict[str, list[RequestRecord]](), dict[str, Trials]()
    with progress("recording answers") as line:
        for index, draft in enumerate(engine.drafts):
            line.update(index / len(engine.drafts), draft)
            records[draft], by_draft[draft] = _answers_of(engine, draft, prompts, tokens)
    first = next(iter(records.values()))
    requests = recorded_pool(first, by_draft)
    lengths = [[record.output_tokens for record in answers] for answers in records.values()]
    alike = sum(len(set(lengths_of_prompt)) == 1 for lengths_of_prompt in zip(*lengths, strict=True))
    tried = {draft: sum(map(len, trials.values())) for draft, trials in by_draft.items()}
    written = sum(record.output_tokens for record in first)
    about = {"alike": alike, "tried": {draft: count / written for draft, count in tried.items()}}
    return {**regret.curves(requests, machine), **about}


def machine_of(engine: Engine) -> Hardware:
    """Return a machine with the costs that an engine has measured, and one slot.

    Raises:
        RunError: the costs of a draft are not known.
    """
    costs, limits = engine.costs, engine.limits
    if costs is None or set(costs.members) != set(engine.drafts):
        known = "" if costs is None else f", only those of {', '.join(costs.members)}"
        raise RunError(f"the costs of the drafts {', '.join(engine.drafts)} have not been measured{known}")
    return Hardware(costs, limits.cache_tokens, 1, limits.max_len, limits.prefill_chunk)


def _answers_of(
    engine: Engine, draft: str, seeded_prompts: Sequence[SeededPrompt], tokens: int
) -> tuple[list[RequestRecord], Trials]:
    """Return greedy answers in the order of the prompts, and what the target accepted of the draft's tokens."""
    longest = FixedLength(engine.settings.speculation_length)  # windows of which few tokens were never tried
    recorder = AcceptanceRecorder(compared_selection(longest, draft, list(engine.drafts), {}))
    engine.use_controller(recorder)
    engine.forget_prompts()
    params = SamplingParams(max_tokens=tokens)
    prompts = [Prompt(str(seeded.seed), seeded.ids, seeded.domain) for seeded in seeded_prompts]
    load = drive(engine, [Arrival(index * APART_S, prompt, params) for index, prompt in enumerate(prompts)])
    if load.failed:
        raise RunError(f"{load.failed} answers of {draft} failed")
    return sorted(load.requests, key=lambda record: record.arrived_s), recorder.trials
