"""Costs of a step with a draft, in plain steps of the target, at the load that is served."""

from __future__ import annotations

from distillspec.models import LanguageModel
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.online.judging.evidence import Costs

CONTEXT = 256  # tokens of a typical request, before any was served
VERIFY_COST = 0.05  # of each further verified token, in target steps: an assumption, where no engine has measured it
MEMORY = 500.0  # steps over which the load is averaged


class ServedLoad:
    """Averages over the steps with decoding rows: how many rows, and the tokens of their contexts."""

    def __init__(self) -> None:
        self._rows, self._context = 1.0, float(CONTEXT)

    def add(self, result: StepResult) -> None:
        """Count a step."""
        rows = result.view.rows
        if rows:
            self._rows += (len(rows) - self._rows) / MEMORY
            self._context += (sum([row.context_tokens for row in rows]) / len(rows) - self._context) / MEMORY

    @property
    def rows(self) -> float:
        """Return the rows of a typical step."""
        return self._rows

    def step_s(self, latency: LatencyModel, rows: int) -> float:
        """Return the seconds of a plain step of so many rows with typical contexts."""
        return latency.target_s([round(self._context)] * rows, [0] * rows)

    @property
    def contexts(self) -> list[int]:
        """Return the contexts of a typical step's rows."""
        return [round(self._context)] * max(1, round(self._rows))


def step_costs(
    target: LanguageModel,
    draft: LanguageModel,
    latency: LatencyModel | None = None,
    load: ServedLoad | None = None,
    source: str = DRAFT,
) -> Costs:
    """Estimate costs from measured step times if they are known, otherwise from the weights that a token reads.

    Args:
        source: the draft's name in the engine.
    """
    latency = None if latency is None else latency.of_draft(source, drafts_block=draft.drafts_block)
    if latency is not None and latency.draft is not None:
        contexts = (load or ServedLoad()).contexts
        rows = len(contexts)
        plain = latency.target_s(contexts, [0] * rows)
        if plain > 0:
            verify = (latency.target_s(contexts, [1] * rows) - plain) / plain
            first, second = (latency.draft_s(contexts, [length] * rows) / plain for length in (1, 2))
            return Costs(first, verify, second - first)
    read = _weights_read(target)
    further = draft.head.weight.numel() / read if draft.drafts_block else None
    return Costs(_weights_read(draft) / read, VERIFY_COST, further)


def _weights_read(model: LanguageModel) -> int:
    """Count the parameters that one token reads: all but the input embeddings, of which it reads one row."""
    head = model.head.weight.numel()
    embeddings = model.model.get_input_embeddings().weight
    outputs = model.model.get_output_embeddings().weight
    body = sum(p.numel() for p in model.model.parameters()) - embeddings.numel()
    return body + (0 if outputs is not embeddings else head)
