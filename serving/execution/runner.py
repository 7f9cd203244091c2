"""Model runner: one model over its slot cache, reading tokens of many rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import Attend, SlotCache, SlotView, masked_attention
from distillspec.serving.base.transfer import to_device
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.execution.graphs import GraphedPasses, Recorder
from distillspec.serving.execution.kv_cache import Move
from distillspec.serving.execution.packed_linear import PackedLinears

PADDING = 1.5  # so many times the tokens themselves a pass over prompts may compute


@dataclass(frozen=True)
class RowInput:
    """Tokens to read into one slot after its first `start`, and for how many of the last ones logits are wanted.

    With a `tree`, `tokens` are one committed token (the root) and then the tree's nodes.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    wanted: int = 1
    tree: TokenTree | None = None


class ModelRunner:
    """Runs `model` on rows of a slot cache. Call inside `slot_attention_in(model.model)` and `inference_mode`.

    `passes` counts forward passes.
    """

    def __init__(
        self,
        model: LanguageModel,
        slots: int,
        max_len: int,
        packs: PackedLinears | None = None,
        recorder: Recorder | None = None,
        attend: Attend = masked_attention,
    ) -> None:
        self.model = model
        self.packs = packs
        self.cache = SlotCache(slots, max_len, attend)
        self.graphs = GraphedPasses(model, self.cache, recorder) if recorder is not None else None
        self.passes = 0

    def read(self, rows: Sequence[RowInput]) -> Tensor:
        """Read all rows in one pass. Return final hidden states `[Σ wanted, D]`, row by row."""
        tokens, view = self.prepare(rows)
        wanted = _wanted(rows, tokens.shape[1], self.model.device)
        hidden = self.hidden(tokens, view)
        return hidden.reshape(-1, hidden.shape[-1])[wanted]

    def prepare(self, rows: Sequence[RowInput]) -> tuple[Tensor, SlotView]:
        """One pass's tokens `[B, q]` int64, shorter rows padded, and where they go."""
        width = max(len(row.tokens) for row in rows)
        padded = [[*row.tokens, *[0] * (width - len(row.tokens))] for row in rows]
        return to_device(padded, self.model.device), self._view(rows, width)

    def hidden(self, tokens: Tensor, view: SlotView) -> Tensor:
        """Run one pass. Return final hidden states `[B, q, D]`, valid until the next call."""
        self.passes += 1
        if self.graphs is not None:
            return self.graphs.hidden(tokens, view)
        return self.model.hidden(tokens, view.positions, slot_view=view)

    def read_uneven(self, rows: Sequence[RowInput]) -> Tensor:
        """As `read`, for rows of any lengths: those that would pad each other too much take a pass of their own."""
        pieces: dict[int, Tensor] = {}
        for lot in _alike([len(row.tokens) for row in rows]):
            hidden = self.read([rows[i] for i in lot])
            pieces.update(zip(lot, hidden.split([rows[i].wanted for i in lot]), strict=True))
        return torch.cat([pieces[i] for i in range(len(rows))])

    def no_hidden(self) -> Tensor:
        """Hidden states of no token, `[0, D]`."""
        return torch.empty(0, self.model.head.weight.shape[1], dtype=self.model.dtype, device=self.model.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[n, width]` of hidden states `[n, D]` in the model's dtype, columns as in `model.kept_ids`."""
        return self.model.head.logits(hidden, linear if self.packs is None else self.packs.linear)

    def move(self, moves: Sequence[Move]) -> None:
        """Carry out the pool's moves."""
        for move in moves:
            self.cache.move(*move)

    def release(self) -> None:
        """Free the cache and recorded passes. Nothing can be read afterwards."""
        self.cache.layers.clear()
        self.graphs = None

    def _view(self, rows: Sequence[RowInput], width: int) -> SlotView:
        device = self.model.device
        starts, counts = to_device([[row.start for row in rows], [len(row.tokens) for row in rows]], device)
        longest = max(row.start + len(row.tokens) for row in rows)
        view = SlotView.append(self.cache, [row.slot for row in rows], starts, counts, longest, width)
        if all(row.tree is None or row.tree.is_chain for row in rows):
            return view
        return _tree_view(view, rows, starts, width)


def _tree_view(view: SlotView, rows: Sequence[RowInput], starts: Tensor, width: int) -> SlotView:
    """Return `view` with depths for positions and ancestors for the mask. Chains among the rows are trees too."""
    depths = torch.arange(width).repeat(len(rows), 1)
    ancestors = torch.ones(width, width, dtype=torch.bool).tril().repeat(len(rows), 1, 1)
    for r, row in enumerate(rows):
        if row.tree is None or row.tree.is_chain:
            continue
        for node, depth in enumerate(row.tree.depths):
            depths[r, 1 + node] = depth
            ancestors[r, 1 + node] = False
            ancestors[r, 1 + node, [0, *(1 + n for n in row.tree.path(node))]] = True
    device = starts.device
    positions = (starts[:, None] + depths.to(device)).clamp(max=view.cache.max_len - 1)
    return replace(view, positions=positions, base=starts, ancestors=ancestors.to(device), _masks={})


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Group the places of `lengths` so that padding is at most `PADDING` times a group's tokens. Keeps their order."""
    lots: list[list[int]] = []
    total = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        total += lengths[place]
        if lots and lengths[place] * (len(lots[-1]) + 1) <= PADDING * total:
            lots[-1].append(place)
        else:
            lots.append([place])
            total = lengths[place]
    return [sorted(lot) for lot in lots]


def _wanted(rows: Sequence[RowInput], width: int, device: torch.device) -> Tensor:
    """Flat places of the wanted hidden states in `[B · width]`."""
    places = [
        r * width + place
        for r, row in enumerate(rows)
        for place in range(len(row.tokens) - row.wanted, len(row.tokens))
    ]
    return to_device(places, device)
