"""Runner of a draft, by its kind and by where it runs."""

from __future__ import annotations

import torch

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache, masked_attention
from distillspec.serving.execution.block_runner import BlockRunner
from distillspec.serving.execution.graphs import Recorder
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.execution.state_runner import StateRunner


def draft_runner(
    model: LanguageModel,
    target_cache: SlotCache,
    target_device: torch.device,
    prepared: PreparedModel | None = None,
    recorder: Recorder | None = None,
    *,
    on_own_stream: bool = False,
) -> ModelRunner:
    """Return the runner of a draft with a cache of its own, of the target's slots, on the draft's device.

    Args:
        target_device: of the target and its cache. Passes of a draft on another device are not recorded.
        on_own_stream: it may run while the target does, on another stream.
    """
    elsewhere = model.device != target_device
    cache = target_cache.another(model.device if elsewhere or on_own_stream else None)
    if model.state_input is None:
        return ModelRunner(model, cache, prepared, None if elsewhere else recorder)
    if model.sees_both_ways:
        cache.attend = masked_attention
    kind = BlockRunner if model.drafts_block else StateRunner
    return kind(model, cache, target_cache, prepared, target_device)
