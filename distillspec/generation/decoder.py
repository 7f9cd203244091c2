"""Batched decoding of models over slot caches: prefill rows, then one token a row and step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from distillspec.models.few_queries import attention_on
from distillspec.models.flat_view import FlatView, RowGroup
from distillspec.models.language_model import LanguageModel
from distillspec.models.native_layers import NativeLayers
from distillspec.models.native_rows import NativeRows
from distillspec.models.packed_linear import PackedLinears
from distillspec.models.slot_cache import SlotCache, SlotView


class SlotDecoder:
    """Sequences in slots 0..active−1 of a cache. Call inside `slot_attention_in(model)` and `no_grad`.

    Logits are float32 `[rows, V]` over the whole vocabulary (−inf where a truncated head has no row).

    Args:
        packs: the model's weights, for the head.
        native: its layers, for steps that they take, and for prompts if they take all.
    """

    def __init__(
        self,
        model: LanguageModel,
        slots: int,
        max_len: int,
        packs: PackedLinears | None = None,
        native: NativeLayers | None = None,
    ) -> None:
        self.model, self.native = model, native
        self.linear = linear if packs is None else packs.linear
        self.cache = SlotCache(slots, max_len, attention_on(model.device))
        self.lengths = torch.zeros(slots, dtype=torch.int64)

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read whole prompts into slots `rows`. Return the logits after each prompt's last token, `[len(rows), V]`."""
        counts = [len(prompt) for prompt in prompts]
        self.lengths[list(rows)] = torch.tensor(counts)
        if self.native is not None and self.native.takes_all_chains:
            return self._logits(self._read_by(self.native, rows, prompts))
        device = self.model.device
        tokens = pad_sequence([torch.tensor(p, dtype=torch.int64) for p in prompts], batch_first=True).to(device)
        count = torch.tensor(counts, device=device)
        view = SlotView.append(self.cache, rows, torch.zeros_like(count), count, longest=tokens.shape[1])
        fed = self._fed(view.slots[:, None], view.places)
        hidden = self.model.hidden(tokens, view.positions, fed, slot_view=view)
        return self._logits(hidden[torch.arange(len(prompts), device=device), count - 1])

    def _read_by(self, native: NativeLayers, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts in passes of as many tokens as `native` takes. Return the last states `[len(rows), D]`."""
        counts = torch.tensor([len(prompt) for prompt in prompts])
        parts = list(NativeRows.slices(native.most, [()] * len(rows), rows, [0] * len(rows), counts.tolist()))
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        sizes, last = [part.total for part in parts], counts.cumsum(0) - 1
        places = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
        fed = self._fed(torch.tensor(rows).repeat_interleave(counts), places)
        beside: Sequence[Tensor | None] = [None] * len(sizes) if fed is None else fed.split(sizes)
        each = zip(parts, tokens.split(sizes), beside, strict=True)
        read = torch.cat([native.hidden_of(self.cache, part, own[None], states) for part, own, states in each])
        return self.model.head_input(read[last], 0, tokens[last])

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each of the first `len(tokens)` slots. Return the next logits, `[n, V]`."""
        count = len(tokens)
        longest = int(self.lengths[:count].max()) + 1
        starts = self.lengths[:count].to(self.model.device, copy=True)  # the lengths change below
        view = SlotView.append(self.cache, range(count), starts, torch.ones_like(starts), longest=longest)
        read = tokens.to(self.model.device)
        self.lengths[:count] += 1
        flat = FlatView(self.cache, view.slots, starts, starts[None], (RowGroup(view, 0, count),))
        fed = self._fed(view.slots, starts)
        if self.native is not None and self.native.takes(flat):
            return self._logits(self.model.head_input(self.native.hidden(flat, read[None], fed), 0, read))
        fed = None if fed is None else fed[:, None]
        return self._logits(self.model.hidden(read[:, None], view.positions, fed, slot_view=view)[:, 0])

    def move(self, source: int, destination: int) -> None:
        """Move the sequence in slot `source` to `destination`."""
        length = int(self.lengths[source])
        self.cache.copy(source, destination, length)
        self.lengths[destination] = length

    def _fed(self, slots: Tensor, places: Tensor) -> Tensor | None:
        """Return the states `[…, D]` that tokens at `places […]` of `slots […]` are read beside, None: tokens alone."""
        return None

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.full_width(self.model.head.logits(hidden, self.linear)).float()


class StateDecoder(SlotDecoder):
    """`SlotDecoder` of a draft that reads the target's states. The target reads the same text first, in the same slots.

    Each token is read beside the target's own state of the token before it, so all are first drafted positions.

    Args:
        source: the target's cache, which keeps the states that the draft reads.
    """

    def __init__(
        self,
        model: LanguageModel,
        slots: int,
        max_len: int,
        packs: PackedLinears | None = None,
        native: NativeLayers | None = None,
        *,
        source: SlotCache,
    ) -> None:
        super().__init__(model, slots, max_len, packs, native)
        self.source = source

    def _fed(self, slots: Tensor, places: Tensor) -> Tensor:
        assert self.source.features is not None, "the target reads first"
        assert self.model.state_input is not None
        fused = self.model.state_input.fuse(self.source.features[slots, 0, (places - 1).clamp(min=0)])
        # No product with a mask: what a slot held before may be NaN, and NaN times 0 is NaN.
        return torch.where((places > 0)[..., None], fused, 0)
