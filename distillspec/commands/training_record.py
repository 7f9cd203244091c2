"""Record of a training in the draft's folder: whose text, drawn how, the loss, and the precision of states."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from distillspec.config import DataConfig, TrainCommand
from distillspec.data.folder import DataFolder
from distillspec.data.shards import recorded_key
from distillspec.models import LanguageModel

POLICY = "policy"


def with_policy(draft: LanguageModel, config: TrainCommand, data: DataFolder) -> LanguageModel:
    """Return the draft with the run's training policy in its lineage.

    A draft that reads states notes their precision too, in place.
    """
    policy: dict[str, Any] = {**_text(config.data, data), "loss": config.loss.terms}
    if draft.state_input is not None:
        live = "bf16" if config.train.dtype == "bfloat16" else config.train.dtype
        draft.state_input.precision = live if config.draft.train_target else config.data.state_precision
        policy["unroll"] = config.train.unroll
    return replace(draft, lineage={**draft.lineage, POLICY: policy})


def _text(config: DataConfig, data: DataFolder) -> dict[str, Any]:
    """Return who wrote the training text and the policy it was drawn under. A file's text has an unknown one."""
    made = {} if config.on_policy else recorded_key(data.samples)  # a cache's text is not as the settings say
    source = made.get("source", config.source)
    return {"source": source, **({} if source == "fixed" else made.get("policy", asdict(config.policy)))}
