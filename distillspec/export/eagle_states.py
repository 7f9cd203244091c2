"""States of the target that other engines hand to an EAGLE-3 draft: three or more, from the lowest to the highest.

Their numbers are ours: state i is the hidden state after i layers. SGLang writes the layer before it, i − 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distillspec.errors import ConfigError

COUNT = 3


def engine_states(form: str, state_ids: Sequence[int], layers: int) -> list[int]:
    """Return the states, ascending, among which are the draft's own. Others fill up the number to three.

    Args:
        form: `vllm`, `sglang` (exactly three, and between two layers only) or `speculators`.
        state_ids: those that the draft reads, in its order.
        layers: of the target.

    Raises:
        ConfigError: the engine cannot hand over these states.
    """
    possible = range(1, layers) if form == "sglang" else range(layers + 1)
    if form == "sglang" and len(state_ids) > COUNT:
        raise ConfigError(
            f"format=sglang holds drafts of {COUNT} states, and this one reads {list(state_ids)}; use "
            f"format=vllm or speculators, or train one with {COUNT} draft.feature_ids"
        )
    if wrong := [state for state in state_ids if state not in possible]:
        raise ConfigError(
            f"format={form} cannot hand over state {wrong[0]} of {layers} layers; use vllm or speculators, or train a "
            f"draft with draft.feature_ids in {possible.start}..{possible.stop - 1}"
        )
    spare = [state for state in (*range(1, layers), 0, layers) if state in possible and state not in state_ids]
    filled = sorted([*state_ids, *spare[: max(0, COUNT - len(state_ids))]])
    if len(filled) < COUNT:
        raise ConfigError(f"format={form} needs {COUNT} states, and a target of {layers} layers has {len(possible)}")
    return filled


def fusion(weight: Tensor, state_ids: Sequence[int], handed_over: Sequence[int]) -> Tensor:
    """Return the fusion's weight `[D, m · F]` on `handed_over` that equals `weight [D, n · F]` on `state_ids`.

    Columns follow their states. Those of states that only fill up are zero.
    """
    width = weight.shape[1] // len(state_ids)
    moved = weight.new_zeros(weight.shape[0], len(handed_over) * width)
    for index, state in enumerate(state_ids):
        column = handed_over.index(state) * width
        moved[:, column : column + width] = weight[:, index * width : (index + 1) * width]
    return moved
