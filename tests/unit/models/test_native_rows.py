"""Chains as the native layers read them: of any length, and to the bit as in any other cut of their text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.few_queries import why_not
from distillspec.models.native_layers import NativeLayers
from distillspec.models.native_rows import NativeRows
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner

from .test_native_layers import CLOSE, DTYPES, llama, off, run

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for CPUs"),
]


@torch.inference_mode()
def read(native: NativeLayers, cache: SlotCache, rows: Sequence[RowInput]) -> Tensor:
    """Read chains in one pass. Return last states `[N, D]`."""
    counts = [len(row.tokens) for row in rows]
    assert native.takes_chains(cache, counts)
    shape = NativeRows.chains([row.slot for row in rows], [row.start for row in rows], counts)
    return native.hidden_of(cache, shape, torch.tensor([[token for row in rows for token in row.tokens]]))


def text(tokens: int) -> list[int]:
    return torch.randint(3, 259, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def kernel(model: LanguageModel) -> NativeLayers:
    native = NativeLayers.of(model)
    assert native is not None
    return native


def longest(native: NativeLayers) -> int:
    """Return the tokens of a prompt that this machine's kernel takes whole."""
    return 150 if native.takes_chains(SlotCache(1, 8), [150]) else 32


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_beside_decoding_rows(dtype: torch.dtype) -> None:
    """Rows of a token, of a few, and of more than a word has bits, behind texts of their own.

    In bfloat16 the kernel is about as near to torch's float32 as torch's bfloat16 is: both round, each in its own way.
    """
    model, exact = llama(dtype), llama()
    native = kernel(model)
    ours, theirs, right = (SlotCache(3, 256) for _ in range(3))
    prompt = text(longest(native) - 6)
    steps = [
        [RowInput(0, 0, text(20)), RowInput(1, 0, text(9))],
        [RowInput(0, 20, [7]), RowInput(1, 9, text(5)), RowInput(2, 0, prompt)],
        [RowInput(2, len(prompt), text(longest(native) - 1)[:100]), RowInput(0, 21, [8])],
    ]
    with slot_attention_in(model.model), slot_attention_in(exact.model):
        for rows in steps:
            wanted = run(exact, rows, right, None)
            rounding = off(run(model, rows, theirs, None), wanted)
            assert off(read(native, ours, rows), wanted) < max(2 * rounding, CLOSE[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[33], [1, 32, 33, 40], [64], [65], list(range(1, 48))])
def test_a_prompt_in_pieces_is_the_prompt_at_once(dtype: torch.dtype, cuts: list[int]) -> None:
    native = kernel(llama(dtype))
    prompt = text(longest(native))
    ends = [cut for cut in cuts if cut < len(prompt)] + [len(prompt)]
    whole, pieces = SlotCache(1, 256), SlotCache(1, 256)
    wanted = read(native, whole, [RowInput(0, 0, prompt)])
    found = [read(native, pieces, [RowInput(0, a, prompt[a:b])]) for a, b in zip([0, *ends], ends, strict=False)]
    assert torch.equal(torch.cat(found), wanted)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    native = kernel(llama(torch.bfloat16))
    rows = [RowInput(0, 0, text(longest(native) - 2)), RowInput(1, 0, [5]), RowInput(2, 0, [6])]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    wanted = read(native, SlotCache(3, 256), rows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(read(native, SlotCache(3, 256), rows), wanted)


def test_the_newest_tokens_are_not_seen_by_those_before() -> None:
    native = kernel(llama())
    prompt = text(longest(native))
    others = [*prompt[:-1], prompt[-1] - 1]
    one, other = (read(native, SlotCache(1, 256), [RowInput(0, 0, tokens)]) for tokens in (prompt, others))
    assert torch.equal(one[:-1], other[:-1])
    assert not torch.equal(one[-1], other[-1])


def test_chains_as_numbers() -> None:
    rows = NativeRows.chains([4, 2], [10, 0], [70, 2])
    assert rows.rows.tolist() == [[0, 70, 4, 10, 80], [70, 2, 2, 0, 2]]
    slots, places, positions, nodes = rows.tokens.tolist()
    assert [nodes[token] for token in (0, 1, 62, 63, 69, 70, 71)] == [1, 3, 2**63 - 1, -1, -1, 1, 3]
    assert places == positions == [*range(10, 80), 0, 1]
    assert slots == [4] * 70 + [2] * 2


def test_trees_as_numbers() -> None:
    rows = NativeRows.windows([(-1, 0, 0, 2, -1), ()], [4, 2], [10, 5], [5, 2])
    assert rows.tokens.tolist() == [
        [4, 4, 4, 4, 4, 2, 2],
        [10, 11, 12, 13, 14, 5, 6],
        [10, 11, 11, 12, 10, 5, 6],
        [0b1, 0b11, 0b101, 0b1101, 0b10000, 1, 3],
    ]
    assert rows.rows.tolist() == [[0, 5, 4, 10, 15], [5, 2, 2, 5, 7]]


@torch.inference_mode()
@pytest.mark.parametrize("rooted", [True, False])
def test_trees_are_read_without_a_view(rooted: bool) -> None:
    """As by a view of the cache, to the bit."""
    model = llama()
    prepared = PreparedModel(model, pack_weights=True, compile=False)
    tree = TokenTree.of_parents([7, 8, 9, 10], [-1, -1, 0, 1])
    tokens = [6, *tree.tokens] if rooted else list(tree.tokens)
    asked = [RowInput(0, 9, tokens, len(tokens), tree, rooted), RowInput(2, 3, [5], 1)]
    found = []
    for by_view in (False, True):
        runner = ModelRunner(model, SlotCache(3, 64), prepared)
        runner.read([RowInput(0, 0, text(9)), RowInput(2, 0, text(3))])
        batch = runner.prepare(asked)
        found.append(runner.hidden(batch)[batch.wanted] if by_view else runner.read(asked))
    prepared.restore()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("most", [1, 3, 7, 50])
def test_slices_hold_every_token_once(most: int) -> None:
    given = [(0, 5, 3), (2, 0, 9), (1, 40, 1), (3, 7, 7)]
    slices = list(NativeRows.slices(most, [()] * len(given), *zip(*given, strict=True)))
    assert [part.total for part in slices[:-1]] == [most] * (len(slices) - 1)
    places = [pair for part in slices for pair in zip(*part.tokens[:2].tolist(), strict=True)]
    assert places == [(slot, start + i) for slot, start, count in given for i in range(count)]


@pytest.mark.parametrize("most", [4, 5, 9])
def test_slices_cut_no_tree(most: int) -> None:
    tree = (-1, 0, 0, 1)
    slices = list(NativeRows.slices(most, [(), tree, (), tree], [0, 1, 2, 3], [5, 6, 7, 8], [3, 4, 6, 4]))
    found = [tuple(row) for part in slices for row in part.rows[:, 2:4].tolist()]
    assert sum(part.total for part in slices) == 17
    assert max(part.total for part in slices) <= most
    assert found.count((1, 6)) == found.count((3, 8)) == 1
    whole = NativeRows.windows([tree], [3], [8], [4])
    assert slices[-1].tokens[:, -4:].tolist() == whole.tokens.tolist()


@torch.inference_mode()
def test_a_long_prompt_is_read_in_slices_beside_a_tree() -> None:
    """As at once, to the bit, and what is wanted of each row alone."""
    model = llama(torch.bfloat16)
    native = kernel(model)
    if not native.takes_chains(SlotCache(1, 256), [native.most + 1], sliced=True):
        pytest.skip("long passes are left to torch here")
    prepared = PreparedModel(model, pack_weights=True, compile=False)
    tree = TokenTree.of_parents([7, 8, 9, 10], [-1, -1, 0, 1])
    windows = [RowInput(0, 0, [6, *tree.tokens], 5, tree), RowInput(1, 0, [5], 1)]
    rows = [*windows, RowInput(2, 0, text(100), 2), RowInput(3, 0, text(40), 40)]
    found = []
    for most in (native.most, 30):
        assert prepared.native is not None
        prepared.native.most = most
        found.append(ModelRunner(model, SlotCache(4, 256), prepared).read(rows))
    prepared.restore()
    assert len(found[0]) == 48
    assert torch.equal(found[0], found[1])
