"""Trees of a draft on CPUs, in one call of C++ (`draft_steps.h`): texts are read, and tokens are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from distillspec.models.block import BlockInput
from distillspec.models.language_model import LanguageModel
from distillspec.models.large_pages import LargePages
from distillspec.models.native_heads import NativeHeads
from distillspec.models.native_layers import NativeLayers
from distillspec.models.native_rows import NativeRows
from distillspec.models.slot_cache import SlotCache
from distillspec.models.state_input import EPS, DeferredNorm, StateInput
from distillspec.native.vector_kernel import Kind, numbers, vector_kernel
from distillspec.types import Ints


class Readers(NamedTuple):
    """Tokens behind which the draft chooses others: the newest token of each of R texts, and chosen tokens.

    The draft reads each of them before it chooses. A block draft reads masks in their place.

    levels: `[levels + 1]` int64, the first reader of each level.
    numbers: `[S, 7]` int64, level by level and row by row: row, index among the chosen tokens, the reader before it (−1
        and −1 for a text's newest token), index of the first token chosen behind it, the number of those, its number
        among the readers of its row (0 for the text's), and a bit i for each reader i + 1 of its row that it sees.
    nodes: tokens to choose.
    """

    levels: Ints
    numbers: Ints
    nodes: int


class DrawParameters(NamedTuple):
    """Numbers that draws of R rows follow.

    policies: `[R, 4]` float64: temperature (0: greedy), top-k, top-p, min-p (0, 1 and 0 switch filters off).
    uniforms: `[R, readers of a row, siblings]` float64 in [0, 1), at least as many as there are.
    keys: `[R, levels, 2]` int32, of the noise by which rows with a seed choose, None if no row has one.
    seeded: `[R]` bool, with keys.
    """

    policies: Tensor
    uniforms: Tensor
    keys: Tensor | None = None
    seeded: Tensor | None = None


class StatesBefore(NamedTuple):
    """The target's states of the token before each of N.

    addresses: `[N]` int64, 0 where there is none.
    columns: where each state that the draft reads begins among those that the target keeps of a token.
    """

    addresses: Ints
    columns: Sequence[int]


class Unread(NamedTuple):
    """N tokens of R texts that a draft has not read, those of a row up to its newest one.

    tokens: `[N]` int64. Masks of a block are −1, −2, …
    before: for drafts that read states.
    """

    tokens: Ints
    rows: NativeRows
    before: StatesBefore | None


class Chosen(NamedTuple):
    """Chosen tokens."""

    ids: Tensor  # [nodes] int64, absolute, −1 where there is no further one
    finite: Tensor  # [S] bool: False where logits were NaN, or left nothing
    probs: Tensor | None  # [S, width] float32 that tokens were drawn from. Undefined for greedy rows, None if all are


class Packed(Protocol):
    """Layers or heads of a draft, as the kernel reads them: `NativeLayers` or `NativeHeads`."""

    kind: Kind
    pages: LargePages
    eps: float
    scale: float

    def over(self, cache: SlotCache) -> tuple[Any, int, Any]: ...

    def takes_chains(self, cache: SlotCache, counts: Sequence[int]) -> bool: ...

    def takes_level(self, tokens: int) -> bool: ...


class DraftSteps:
    """The trees of one draft.

    Drafts of a block read its masks as the last tokens of each text, one fewer than there are levels. Nothing is read
    behind them.
    """

    def __init__(self, model: LanguageModel, native: Packed) -> None:
        self.model, self.native = model, native
        final = model.decoder.norm
        norm = final.norm if isinstance(final, DeferredNorm) else final
        self._norm = norm.weight.detach().float().contiguous()  # type: ignore[union-attr, operator]
        kernel, head, joins = vector_kernel(), model.head.weight, model.state_input
        self._head, self._padded = self._packed(head), kernel.rows(len(head))
        self._fusion = None if joins is None or not joins.fuses else self._packed(joins.fusion())
        self._projection, self._markov = (
            None if part is None else self._packed(part.weight)
            for part in (getattr(joins, name, None) for name in ("projection", "markov"))
        )
        masks = joins.each_mask.detach() if isinstance(joins, BlockInput) else None
        self._masks = None if masks is None else masks.to(model.dtype).contiguous()
        self._ids = None if model.kept_ids is None else model.kept_ids.long().contiguous()

    @staticmethod
    def of(model: LanguageModel, native: NativeLayers | None, *, eight: bool = False) -> DraftSteps | None:
        """Return the loop of a model, None where the kernel is not made for it.

        Args:
            native: its layers. Heads are packed here.
            eight: of heads. See `NativeLayers`.
        """
        if not _has_plain_ends(model) or model.sees_both_ways:
            return None
        packed = native or NativeHeads.of(model, eight=eight)
        if packed is None or (model.state_input is not None and not _reads(model.state_input, packed.kind.weights)):
            return None
        return DraftSteps(model, packed)

    def _packed(self, weight: Tensor | None) -> Tensor | None:
        kernel, native = vector_kernel(), self.native
        return None if weight is None else native.pages.keep(kernel.packed(weight.detach(), native.kind.weights))

    def run(self, cache: SlotCache, unread: Unread, readers: Readers, draw: DrawParameters | None) -> Chosen:
        """Read what is new, and choose the tokens behind it, level by level.

        Keys and values of readers are written behind their texts, in the order of their numbers, and to the cache's
        spare place beyond the end of the context.

        Args:
            cache: the draft's own.
            draw: None if all rows are greedy.
        """
        count, width = len(readers.numbers), self.model.width
        ids = torch.empty(readers.nodes, dtype=torch.int64)
        finite = torch.empty(count, dtype=torch.bool)
        probs = None if draw is None else torch.empty(count, width)
        draws = (0, 0) if draw is None else draw.uniforms.shape[1:]
        parts = [None] * 4 if draw is None else [None if part is None else part.contiguous() for part in draw]
        columns = numbers([] if unread.before is None else unread.before.columns)
        given = numbers(
            [
                *(len(readers.levels) - 1, count, draws[1], draws[0], cache.max_len),
                *(readers.levels.ctypes.data, readers.numbers.ctypes.data),
                *self._entry(addressof(columns), len(columns)),
                *(self._norm.data_ptr(), _at(self._head), _at(self._markov), _rank(self.model.state_input)),
                *(int(self.model.drafts_block), width, self._padded, _at(self._ids)),
                *(*map(_at, parts), unread.tokens.ctypes.data),
                0 if unread.before is None else unread.before.addresses.ctypes.data,
                *(ids.data_ptr(), finite.data_ptr(), _at(probs)),
            ]
        )
        texts, native = numbers(unread.rows.numbers), self.native
        call = vector_kernel().steps[native.kind]
        call(*native.over(cache), texts, given, native.eps, EPS, native.scale, torch.get_num_threads())
        return Chosen(ids, finite, probs)

    def _entry(self, columns: int, kept: int) -> list[int]:
        """Return `Entry` of `draft_input.h`."""
        embeddings = self.model.model.get_input_embeddings().weight.data_ptr()
        joins = self.model.state_input
        width = 0 if joins is None else joins.target_width
        return [embeddings, _at(self._fusion), _at(self._projection), _at(self._masks), kept, width, columns]


def _has_plain_ends(model: LanguageModel) -> bool:
    """Return True if the kernel can compute what stands before and behind the layers: embeddings and head."""
    head, embeddings = model.head, model.model.get_input_embeddings()
    return head.bias is None and head.scale == 1.0 and head.softcap is None and type(embeddings) is nn.Embedding


def _reads(joins: StateInput, weights: torch.dtype) -> bool:
    """Return True if the kernel can bring in the states that a draft reads, by weights of this dtype."""
    if joins.norms is not None:
        return False
    if joins.scale is not None and weights != torch.bfloat16:  # codes, and float16, round small numbers to nothing
        return False
    lanes = vector_kernel().lanes
    return joins.target_width % lanes == 0 and _rank(joins) % lanes == 0


def _rank(joins: StateInput | None) -> int:
    """Return the width of what the head reads of the token before."""
    return joins.rank if isinstance(joins, BlockInput) else 0


def _at(tensor: Tensor | None) -> int:
    """Return the address of a tensor, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
