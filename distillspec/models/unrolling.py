"""Passes of a draft that reads states, as serving runs them: true states first, then the draft's own (EAGLE-3's TTT).

Step k at token i is the draft's k-th drafted position: the target's states end k − 1 tokens before, and the draft's own
follow, or masks (`distillspec.models.block`). The first step reads all tokens. The query of a later step attends to the
first step's keys up to the token where the true states end, and to one key of each later step: its own chain's. So
later steps read only the tokens of chains that somebody asks for. A draft of one layer computes keys and values alone
of the others (prompts, above all) in the first step, too. Heads (`distillspec.models.heads`) attend to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from distillspec.models.both_ways import Keys, anchors_of, masks_behind
from distillspec.models.eagle import keeps_keys_alone
from distillspec.models.language_model import LanguageModel
from distillspec.models.sequence_attention import Counts, attending_by_sequence, can_attend_by_sequence, counts_of
from distillspec.models.state_input import previous

SLIDING = "sliding_attention"  # transformers' name of layers that see a window
BEHIND = 1 << 40  # tokens of padding lie here, behind all others and apart


def unrolled(
    draft: LanguageModel, input_ids: Tensor, position_ids: Tensor, states: Tensor, wanted: Sequence[Tensor]
) -> list[Tensor]:
    """Return what the head reads at each of the first `len(wanted)` drafted positions: `[n_k, D]` at position k.

    Args:
        input_ids, position_ids: `[B, L]`, packed sequences.
        states: `[B, L, F]` the target's states of these tokens, those that the draft reads.
        wanted: `[n_k]` int64 each, tokens in the flattened `[B · L]` grid.
    """
    assert draft.state_input is not None
    passes, needed = _Passes(draft, input_ids, position_ids), _needed(position_ids, wanted)
    fed = last = previous(draft.state_input.fuse(states), position_ids)
    read, inputs = _Tokens.all(input_ids), []
    # In every process alike: parallel wrappers count passes.
    if keeps_keys_alone(draft) and not _is_sharded(draft.layers[0]):
        read, others = _Tokens.of(needed[0]), _Tokens.of(~needed[0])
        passes.read(others, others.states(fed), 0, keys_alone=True)
        fed = read.states(fed)
    if draft.sees_both_ways:
        last = passes.read(read, fed, 0)
        states_at = [read.at(last, wanted[0]), *passes.masks(wanted)]
        return [draft.head_input(each, k, input_ids.flatten()[wanted[k]]) for k, each in enumerate(states_at)]
    for step, tokens in enumerate(wanted):
        if step:
            behind, read = read, _Tokens.of(needed[step])
            fed = behind.states_before(last, read) * (read.pick(position_ids) > 0).unsqueeze(-1)
        last = passes.read(read, fed, step)
        inputs.append(draft.head_input(read.at(last, tokens), step, input_ids.flatten()[tokens]))
    return inputs


def _is_sharded(layer: nn.Module) -> bool:
    """Return True for a layer of FSDP's. In backward its weights are whole only if its output has a gradient."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule  # takes long to import

    return isinstance(layer, FSDPModule)


def _needed(position_ids: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
    """Return the tokens that each step reads, bool `[B, L]`: those wanted, and the chains that lead to later ones."""
    needed: list[Tensor] = []
    later = torch.zeros_like(position_ids, dtype=torch.bool)
    for tokens in reversed(wanted):
        before = torch.zeros_like(later)
        before[:, :-1] = (later & (position_ids > 0))[:, 1:]
        later = before.flatten().index_fill(0, tokens, True).view_as(before)
        needed.insert(0, later)
    return needed


@dataclass(frozen=True)
class _Tokens:
    """Tokens `[B, n]` of the grid `[B, L]` that a step reads. Shorter rows have padding, which nobody sees."""

    column: Tensor  # [B, n] int64, where they are in the row
    there: Tensor  # [B, n] bool, False for padding
    index: Tensor  # [B, L] int64, where each token of the row is among them

    @classmethod
    def all(cls, input_ids: Tensor) -> _Tokens:
        column = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return cls(column, torch.ones_like(column, dtype=torch.bool), column)

    @classmethod
    def of(cls, needed: Tensor) -> _Tokens:
        """Return the tokens where `needed [B, L]` is True, at least one a row: parallel wrappers count passes."""
        count = max(int(needed.sum(-1).max()), 1)
        order = needed.byte().argsort(dim=-1, descending=True, stable=True)
        index = order.argsort(dim=-1)
        column = order[:, :count]
        return cls(column, needed.gather(1, column), index.clamp(max=count - 1))

    def pick(self, grid: Tensor) -> Tensor:
        """Return `grid [B, L]` at these tokens, `[B, n]`."""
        return grid.gather(1, self.column)

    def at(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Return `values [B, n, D]` at `tokens [m]` of the flattened grid: `[m, D]`."""
        width = self.index.shape[1]
        rows = tokens // width
        return values.flatten(0, 1).index_select(0, rows * values.shape[1] + self.index.flatten()[tokens])

    def states(self, grid: Tensor) -> Tensor:
        """Return states of the grid `[B, L, D]` at these tokens, `[B, n, D]`."""
        return grid.gather(1, self.column.unsqueeze(-1).expand(-1, -1, grid.shape[-1]))

    def states_before(self, states: Tensor, following: _Tokens) -> Tensor:
        """Return the `states [B, n, D]` of the token before each of `following`, `[B, m, D]`."""
        before = self.index.gather(1, (following.column - 1).clamp(min=0))
        return states.gather(1, before.unsqueeze(-1).expand(-1, -1, states.shape[-1]))

    def apart(self) -> Tensor:
        """Return the column of each in its row, `[B, n]`, those of padding where no token sees them."""
        spare = BEHIND * (1 + torch.arange(self.column.shape[1], device=self.column.device))
        return torch.where(self.there, self.column, spare)


class _Passes:
    """Passes of a draft over tokens of a grid. Each attends to the keys of those before it."""

    def __init__(self, draft: LanguageModel, input_ids: Tensor, position_ids: Tensor) -> None:
        self.draft = draft
        self.input_ids = input_ids
        self.position_ids = position_ids
        self.cache, self.seen = DynamicCache(), _Seen((position_ids == 0).cumsum(-1), draft)

    def read(self, tokens: _Tokens, fed: Tensor, step: int, **named: Any) -> Tensor:
        """Return the last states `[B, n, D]` of these tokens, read beside the states `fed [B, n, D]`."""
        ids, positions = tokens.pick(self.input_ids), tokens.pick(self.position_ids)
        if not self.draft.attends:
            return self.draft.last_states(ids, positions, fed, drafted=step)
        if self.draft.drafts_block and step:
            ids = torch.full_like(ids, -step)  # masks
        self.seen.add(tokens, step)
        with attending_by_sequence(self.draft.model, self.seen.counts):
            named |= {"past_key_values": self.cache, "use_cache": True, "attention_mask": self.seen.masks()}
            return self.draft.last_states(ids, positions, fed, **named)

    def masks(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Return the last states `[n_k, D]` at the second, third, … position, where masks see each other."""
        if len(wanted) == 1:
            return []
        column = torch.cat([columns for _, columns, _ in self.seen.keys], 1)
        text = Keys(column, torch.cat([whose for *_, whose in self.seen.keys], 1))
        anchors = anchors_of(self.position_ids, wanted)
        return masks_behind(self.draft, self.cache, text, self.seen.sequence, self.position_ids, anchors)


class _Seen:
    """Masks of the steps, or the counts of tokens that a model which attends by sequence needs."""

    def __init__(self, sequence: Tensor, draft: LanguageModel) -> None:
        """`sequence [B, L]`: the number of the packed sequence that each token belongs to."""
        self.sequence = sequence
        self.keys: list[tuple[int, Tensor, Tensor]] = []  # step, columns and sequences of each pass's tokens
        self.counts: list[Counts] | None = [] if can_attend_by_sequence(draft.model) else None  # of each pass
        self.dtype = draft.dtype
        config = draft.model.config.get_text_config()
        self.window: int | None = getattr(config, "sliding_window", None)
        whole = SLIDING if self.window is not None else "full_attention"
        self.kinds = sorted(set(getattr(config, "layer_types", None) or [whole]))

    def add(self, read: _Tokens, step: int) -> None:
        """Add the tokens of the next pass, one of this step."""
        sequence = read.pick(self.sequence)
        self.keys.append((step, read.apart(), sequence))
        if self.counts is not None:
            self.counts.append(counts_of(sequence, read.there, int(self.sequence.max())))

    def masks(self) -> Tensor | dict[str, Tensor] | None:
        """Return the mask of the pass added last, or one for each kind of layer where there are several.

        None: the model attends by sequence, and needs no mask in the first pass.
        """
        if self.counts is not None and len(self.keys) == 1:
            return None
        masks = {kind: self._mask(self.window if kind == SLIDING else None) for kind in self.kinds}
        return masks if len(masks) > 1 else masks[self.kinds[0]]

    def _mask(self, window: int | None) -> Tensor:
        """Return the term added to the scores, 0 where a query attends, −inf elsewhere.

        It is `[B, 1, n, …]`, with the keys of the first pass and of all since.
        """
        step, query, whose = self.keys[-1]
        blocks = []
        for key_step, key, sequence in self.keys:
            apart = query[:, :, None] - key[:, None]
            seen = apart >= step if key_step == 0 else apart == step - key_step
            if window is not None:
                seen = seen & (apart < window)
            blocks.append(seen & (whose[:, :, None] == sequence[:, None]))
        seen = torch.cat(blocks, -1)[:, None]
        return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
