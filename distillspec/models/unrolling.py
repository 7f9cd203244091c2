"""Passes of a draft that reads states, as serving runs them: true states first, then the draft's own (EAGLE-3's TTT).

Step k at token i is the draft's k-th drafted position: the target's states end k − 1 tokens before, and the draft's own
follow. All starts are computed at once. The query of step k attends to the first step's keys up to the token where the
true states end, and to one key of each later step: its own chain's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from distillspec.models.language_model import LanguageModel
from distillspec.models.state_input import previous

SLIDING = "sliding_attention"  # transformers' name of layers that see a window


def unrolled(draft: LanguageModel, input_ids: Tensor, position_ids: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """Return the hidden states `[B, L, D]` that the head reads, at each of `steps` drafted positions.

    Args:
        input_ids, position_ids: `[B, L]`, packed sequences.
        states: `[B, L, F]` the target's states of these tokens, those that the draft reads.
    """
    assert draft.state_input is not None
    own, sequence = [], (position_ids == 0).cumsum(-1)
    fed = previous(draft.state_input.fuse(states), position_ids)
    cache, seen = DynamicCache(), _Seen(sequence, draft)
    for step in range(steps):
        last = draft.last_states(
            input_ids, position_ids, fed, past_key_values=cache, use_cache=True, attention_mask=seen.masks(step)
        )
        own.append(draft.normed(last))
        fed = previous(last, position_ids)
    return own


class _Seen:
    """Masks of the steps."""

    def __init__(self, sequence: Tensor, draft: LanguageModel) -> None:
        """`sequence [B, L]`: the number of the packed sequence that each token belongs to."""
        place = torch.arange(sequence.shape[1], device=sequence.device)
        self.apart = place[:, None] - place  # [L, L] tokens from key to query
        self.same = sequence[:, :, None] == sequence[:, None]  # [B, L, L]
        self.dtype = draft.dtype
        config = draft.model.config.get_text_config()
        self.window: int | None = getattr(config, "sliding_window", None)
        whole = SLIDING if self.window is not None else "full_attention"
        self.kinds = sorted(set(getattr(config, "layer_types", None) or [whole]))

    def masks(self, step: int) -> Tensor | dict[str, Tensor]:
        """Return the mask of a step, or one for each kind of layer where there are several."""
        masks = {kind: self._mask(step, self.window if kind == SLIDING else None) for kind in self.kinds}
        return masks if len(masks) > 1 else masks[self.kinds[0]]

    def _mask(self, step: int, window: int | None) -> Tensor:
        """Return the term `[B, 1, L, (step + 1) · L]` added to the scores: 0 where a query attends, −inf elsewhere."""
        blocks = [self.apart >= step, *(self.apart == step - own for own in range(1, step + 1))]
        if window is not None:
            blocks = [block & (self.apart < window) for block in blocks]
        seen = torch.cat([block & self.same for block in blocks], -1)[:, None]
        return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
