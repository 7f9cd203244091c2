"""Hidden states of the target at chosen depths, kept for every token of a slot cache.

A pass hands them out while it runs, prompt chunks included. A draft that reads them (EAGLE, Li et al. 2024) costs the
target no further pass. State `i` is the hidden state after `i` layers: 0 the embeddings, the number of layers the last
state before the final norm. transformers' `hidden_states[i]` is the same, except that its last one is behind the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distillspec.errors import ConfigError
from distillspec.models.language_model import LanguageModel
from distillspec.models.slot_attention import CacheView, passed_view


class FeatureTap:
    """Copies the states `ids` of every token that a pass reads over a cache of these `state_ids`, until `detach`.

    The cache's `features` are `[slots, 1, places, len(ids) · D]` in the model's dtype, states side by side in the order
    of `ids`. The cache copies and clears them with keys and values. Compiled and recorded passes hand them out too, if
    the tap is there before.

    Raises:
        ConfigError: an id is no state of the model, or occurs twice.
    """

    def __init__(self, model: LanguageModel, ids: Sequence[int]) -> None:
        check_feature_ids(model, ids)
        self.ids = tuple(ids)
        layers = list(model.layers)
        self._handles = [
            layers[-1].register_forward_hook(self._after(place), with_kwargs=True)
            if state == len(layers)
            else layers[state].register_forward_pre_hook(self._before(place), with_kwargs=True)
            for place, state in enumerate(self.ids)
        ]

    def detach(self) -> None:
        """Copy nothing from now on."""
        for handle in self._handles:
            handle.remove()

    def _before(self, place: int) -> Any:
        def keep(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            _hand_over(named.get("slot_view"), inputs[0] if inputs else named["hidden_states"], place, self.ids)

        return keep

    def _after(self, place: int) -> Any:
        def keep(_: nn.Module, __: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            _hand_over(named.get("slot_view"), output[0] if isinstance(output, tuple) else output, place, self.ids)

        return keep


def _hand_over(view: CacheView | None, states: Tensor, place: int, ids: tuple[int, ...]) -> None:
    if torch.compiler.is_dynamo_compiling():
        torch.ops.distillspec.keep_states(states, place, list(ids))
    elif view is not None:
        _keep(view, states, place, ids)


def _keep(view: Any, states: Tensor, place: int, ids: Sequence[int]) -> None:
    """Write `states [1, N, D]`, of `ids` those at `place`, of a pass over a cache that keeps `ids`."""
    cache = view.cache
    if cache.state_ids != tuple(ids):
        return
    width = states.shape[-1]
    if cache.features is None:
        cache.features = cache.zeros(states, 1, len(ids) * width)
    cache.features[view.slots, 0, view.places, place * width : (place + 1) * width] = states[0]


def _keep_compiled(states: Tensor, place: int, ids: Sequence[int]) -> None:
    _keep(passed_view(), states, place, ids)


# Compiled code sees one operator. It is said to change the states, so that no compiler leaves it out.
_library = torch.library.Library("distillspec", "FRAGMENT")
_library.define("keep_states(Tensor(a!) states, int place, int[] ids) -> ()")
_library.impl("keep_states", _keep_compiled, "CompositeExplicitAutograd")
torch.library.register_fake("distillspec::keep_states", lambda states, place, ids: None, lib=_library)


def check_feature_ids(model: LanguageModel, ids: Sequence[int]) -> None:
    """Raise ConfigError unless `ids` are different states of the model."""
    layers = len(model.layers)
    wrong = [state for state in ids if not 0 <= state <= layers]
    if wrong:
        raise ConfigError(f"feature_ids={list(ids)}: {model.name} has states 0 to {layers}, not {wrong[0]}")
    if len(set(ids)) < len(ids):
        raise ConfigError(f"feature_ids={list(ids)} names a state twice; name each once")


def feature_bytes_per_token(model: LanguageModel, ids: Sequence[int]) -> int:
    """Return the bytes that the states `ids` of one token take."""
    width = int(model.model.config.get_text_config().hidden_size)
    return len(ids) * width * torch.finfo(model.dtype).bits // 8
