"""Hidden states of the target at chosen depths, kept for every token of a slot cache.

A pass hands them out while it runs, prompt chunks included. A draft that reads them (EAGLE, Li et al. 2024) costs the
target no further pass. State `i` is the hidden state after `i` layers: 0 the embeddings, the number of layers the last
state before the final norm. transformers' `hidden_states[i]` is the same, except that its last one is behind the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distillspec.errors import ConfigError
from distillspec.models.language_model import LanguageModel
from distillspec.models.sequence_attention import reading_by_sequence
from distillspec.models.slot_attention import passed_view
from distillspec.models.slot_cache import SlotCache


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
        self._handles = _hook_states(model, ids, self._take)

    def detach(self) -> None:
        """Copy nothing from now on."""
        for handle in self._handles:
            handle.remove()

    def _take(self, index: int, states: Tensor, named: dict[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling():
            torch.ops.distillspec.keep_states(states, index, list(self.ids))
        elif (view := named.get("slot_view")) is not None:
            keep_states(view, states, index, self.ids)


def states_of_text(cache: SlotCache, slot: int, count: int) -> Tensor | None:
    """Return the states of the first `count` tokens of a slot, `[count, F]` as in `FeatureTap`. None: none are kept."""
    return None if cache.features is None else cache.text(cache.features, slot, count)[0]


def read_states(model: LanguageModel, input_ids: Tensor, position_ids: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the states `ids` of tokens `[B, L]`, `[B, L, len(ids) · D]` in the model's dtype, without gradient."""
    with torch.no_grad():
        return pass_with_states(model, input_ids, position_ids, ids)[1]


def pass_with_states(
    model: LanguageModel, input_ids: Tensor, position_ids: Tensor, ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return final hidden states `[B, L, D]`, which the head reads, and what `read_states` returns."""
    states_by_index: dict[int, Tensor] = {}
    handles = _hook_states(model, ids, lambda index, states, _: states_by_index.update({index: states}))
    try:
        with reading_by_sequence(model.model, position_ids):
            hidden = model.hidden(input_ids, position_ids)
    finally:
        for handle in handles:
            handle.remove()
    return hidden, torch.cat([states_by_index[index] for index in range(len(ids))], -1)


Take = Callable[[int, Tensor, dict[str, Any]], None]


def _hook_states(model: LanguageModel, ids: Sequence[int], take: Take) -> list[RemovableHandle]:
    """Call `take(index in ids, states [1, N, D] or [B, L, D], named arguments of the layer)` in every pass."""

    def before(index: int) -> Any:
        def hand_over(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            take(index, inputs[0] if inputs else named["hidden_states"], named)

        return hand_over

    def after(index: int) -> Any:
        def hand_over(_: nn.Module, __: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            take(index, output[0] if isinstance(output, tuple) else output, named)

        return hand_over

    layers = list(model.layers)
    return [
        layers[-1].register_forward_hook(after(index), with_kwargs=True)
        if state == len(layers)
        else layers[state].register_forward_pre_hook(before(index), with_kwargs=True)
        for index, state in enumerate(ids)
    ]


def keep_states(view: Any, states: Tensor, index: int, ids: Sequence[int]) -> None:
    """Write `states [B, L, D]`, of `ids` those at `index`, of a pass over a cache that keeps `ids`."""
    cache = view.cache
    if cache.state_ids != tuple(ids):
        return
    width = states.shape[-1]
    slots = view.slots if view.slots.shape == view.places.shape else view.slots[:, None].expand_as(view.places)
    rows, places = cache.located(slots.flatten(), view.places.flatten())
    kept = cache.kept_states(states, width)
    kept[rows, 0, places, index * width : (index + 1) * width] = states.flatten(0, 1)


def _keep_compiled(states: Tensor, index: int, ids: Sequence[int]) -> None:
    keep_states(passed_view(), states, index, ids)


# Compiled code sees one operator. It is said to change the states, so that no compiler leaves it out.
_library = torch.library.Library("distillspec", "FRAGMENT")
_library.define("keep_states(Tensor(a!) states, int index, int[] ids) -> ()")
_library.impl("keep_states", _keep_compiled, "CompositeExplicitAutograd")
torch.library.register_fake("distillspec::keep_states", lambda states, index, ids: None, lib=_library)


def default_state_ids(model: LanguageModel) -> tuple[int, ...]:
    """Return the states that a draft reads by default, in order and each once: 2, L / 2 and L − 1.

    EAGLE-3's last one is L − 3. A draft that begins as the target's last layer wants what that layer reads.
    """
    layers = len(model.layers)
    return tuple(sorted({min(2, layers - 1), layers // 2, layers - 1}))


def check_feature_ids(model: LanguageModel, ids: Sequence[int], name: str = "feature_ids") -> None:
    """Raise ConfigError unless `ids` are different states of the model. `name`: of the setting."""
    layers = len(model.layers)
    wrong = [state for state in ids if not 0 <= state <= layers]
    if wrong:
        raise ConfigError(f"{name}={list(ids)}: {model.name} has states 0 to {layers}, not {wrong[0]}")
    if len(set(ids)) < len(ids):
        raise ConfigError(f"{name}={list(ids)} names a state twice; name each once")


def feature_bytes_per_token(model: LanguageModel, ids: Sequence[int]) -> int:
    """Return the bytes that the states `ids` of one token take."""
    width = int(model.model.config.get_text_config().hidden_size)
    return len(ids) * width * torch.finfo(model.dtype).bits // 8
