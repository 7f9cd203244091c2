"""Drafts from the target's own layers: the choice of layers, and the model made of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from distillspec.errors import ConfigError
from distillspec.models.language_model import LanguageModel

# Config lists with one entry a layer: sliding windows, layers without rotary embedding (smollm3), sparse MLPs.
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
_LAYER_KEY = re.compile(r"^(.*\.(?:layers|h|blocks)\.)(\d+)(\..*)$")


def evenly_spaced(total: int, count: int) -> list[int]:
    """Return `count` layer numbers of `total`, first and last among them (a single one is the first)."""
    if not 1 <= count <= total:
        raise ConfigError(f"draft.layers={count} is impossible: the target has {total} layers")
    if count == 1:
        return [0]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]


def select_by_acceptance(
    target: LanguageModel,
    count: int,
    acceptance: Callable[[], float],
    on_step: Callable[[int], None] | None = None,
) -> list[int]:
    """Drop layers one at a time, each time the one without which `acceptance()` is highest.

    `acceptance` measures the target as it is while some of its layers are taken out (on calibration text). The target
    is whole again on return. Cost: about (n² − count²) / 2 measurements.
    """
    total = len(target.layers)
    evenly_spaced(total, count)  # same bounds, same message
    kept = list(range(total))
    while len(kept) > count:
        scores = {}
        for candidate in kept:
            with only_layers(target, [layer for layer in kept if layer != candidate]):
                scores[candidate] = acceptance()
        kept.remove(max(scores, key=lambda layer: scores[layer]))
        if on_step is not None:
            on_step(len(kept))
    return kept


@contextmanager
def only_layers(target: LanguageModel, keep: Sequence[int]) -> Iterator[None]:
    """Leave the target only its layers `keep`, in that order. It is whole again on leaving.

    It computes what `prune` would copy: a pass finds a layer's mask and rotary frequencies at its place in the config's
    lists, so these follow the layers.
    """
    decoder, layers = target.decoder, target.layers
    name = next(name for name, child in decoder.named_children() if child is layers)
    config: Any = decoder.config
    settings = _layer_settings(config, keep)
    before = {key: getattr(config, key) for key in settings}
    try:
        setattr(decoder, name, nn.ModuleList([layers[i] for i in keep]))
        for key, value in settings.items():
            setattr(config, key, value)
        yield
    finally:
        setattr(decoder, name, layers)
        for key, value in before.items():
            setattr(config, key, value)


def prune(target: LanguageModel, keep: Sequence[int]) -> PreTrainedModel:
    """Return a new model with the target's layers `keep`, in that order, and everything else of the target's.

    Weights are float32 copies, in evaluation mode. Per-layer lists in the config follow the layers.
    """
    check_layers(keep, len(target.layers))
    draft = AutoModelForCausalLM.from_config(pruned_config(target.model.config, keep), dtype=torch.float32)
    draft.load_state_dict(_renumbered(target.model.state_dict(), list(keep)), strict=True)
    return draft.eval()


def check_layers(keep: Sequence[int], total: int) -> None:
    """Raise ConfigError for layer numbers past the target's last."""
    if max(keep) >= total:
        raise ConfigError(
            f"draft.keep={list(keep)} names layer {max(keep)}, but the target's layers are 0..{total - 1}"
        )


def pruned_config(config: PretrainedConfig, keep: Sequence[int]) -> PretrainedConfig:
    """Return the target's config for the layers `keep`."""
    pruned = copy.deepcopy(config)
    for name, value in _layer_settings(config, keep).items():
        setattr(pruned, name, value)
    return pruned


def _layer_settings(config: PretrainedConfig, keep: Sequence[int]) -> dict[str, Any]:
    """Return the settings that count or list layers, for the layers `keep`."""
    lists = {name: values for name in _PER_LAYER if (values := getattr(config, name, None)) is not None}
    return {"num_hidden_layers": len(keep), **{name: [values[i] for i in keep] for name, values in lists.items()}}


def _renumbered(state: dict[str, torch.Tensor], keep: list[int]) -> dict[str, torch.Tensor]:
    new_index = {layer: i for i, layer in enumerate(keep)}
    chosen = {}
    for key, value in state.items():
        match = _LAYER_KEY.match(key)
        if match is None:
            chosen[key] = value.float()
        elif int(match[2]) in new_index:
            chosen[f"{match[1]}{new_index[int(match[2])]}{match[3]}"] = value.float()
    return chosen
