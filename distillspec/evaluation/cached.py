"""Model with a key/value cache that can drop its last tokens again."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from distillspec.errors import ConfigError
from distillspec.models.language_model import LanguageModel


class CachedModel:
    """A `LanguageModel` with a key/value cache. All rows of the batch have the same length.

    A draft that reads the target's states reads zeros in their place: its time is the same, its tokens mean nothing.
    `length` is the number of tokens a row whose keys and values are held.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.length = 0
        # Without a config all layers grow without bound, sliding-window ones too: those can be rolled back.
        self._cache = DynamicCache()
        self._head = model.head

    @torch.no_grad()
    def extend(self, input_ids: Tensor, last: int = 1) -> Tensor:
        """Read `input_ids [B, n]` and return the logits `[B, last, width]` after the last `last` of them."""
        new = input_ids.shape[1]
        positions = torch.arange(self.length, self.length + new, device=input_ids.device).expand_as(input_ids)
        states = self.model.last_states(input_ids, positions, past_key_values=self._cache, use_cache=True)
        self.length += new
        return self._head.logits(self.model.head_input(states[:, -last:], 0, input_ids[:, -last:].clamp(min=0)))

    def crop(self, length: int) -> None:
        """Drop all tokens after the first `length`.

        Raises:
            ConfigError: the model cannot (recurrent state), so it cannot speculate.
        """
        if length >= self.length or not self.model.attends:
            self.length = min(length, self.length)
            return
        # A negative number means "remove so many" in every supported version. A positive one does not.
        self._cache.crop(length - self.length)
        if self._cache.get_seq_length() != length:
            raise ConfigError(f"{self.model.name} cannot roll its cache back, which speculation needs")
        self.length = length
