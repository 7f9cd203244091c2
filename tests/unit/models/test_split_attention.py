"""Long rows cut into pieces: the same attention, with less padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.ancestors import ancestor_words
from distillspec.models.slot_cache import SlotCache, SlotView, masked_attention
from distillspec.models.split_attention import piece_length, pieces_cost, split_attention
from distillspec.serving import Engine, EngineSettings, SamplingParams

MAX_LEN = 300
RAGGED = ([0, 250, 3, 40], [2, 1, 3, 2])
Case = tuple[list[int], list[int], int | None, float | None, bool]


def view_of(starts: list[int], counts: list[int], *, tree: bool = False) -> SlotView:
    view = SlotView.append(
        SlotCache(len(starts), MAX_LEN), [*range(len(starts))], torch.tensor(starts), torch.tensor(counts)
    )
    if not tree:
        return view
    width = view.places.shape[1]
    words = ancestor_words([[-1, -1, 0][:width]] * len(starts), width)
    depths = torch.tensor([0, 0, 1][:width])
    base = view.places[:, 0].contiguous()
    return replace(view, base=base, positions=base[:, None] + depths, ancestors=torch.from_numpy(words))


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("starts", "counts", "window", "softcap", "tree"),
    [
        (*RAGGED, None, None, False),
        (*RAGGED, 32, None, False),
        (*RAGGED, None, 5.0, False),
        ([200, 5, 5, 5, 5, 5, 5, 5], [3] * 8, None, None, False),
        ([290, 1], [1, 1], None, None, False),
        ([120, 4, 60], [3, 3, 3], None, None, True),
        ([120, 4, 60], [3, 3, 3], 16, None, True),
        ([7], [1], None, None, False),
    ],
)
def test_it_is_masked_attention(
    starts: list[int], counts: list[int], window: int | None, softcap: float | None, tree: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    view = view_of(starts, counts, tree=tree)
    batch, width = view.places.shape
    held = (batch, 2, MAX_LEN + 1, 8)
    query = torch.randn(batch, 6, width, 8, generator=generator, dtype=torch.float64)
    keys, values = (torch.randn(held, generator=generator, dtype=torch.float64) for _ in range(2))
    own = {"window": window, "softcap": softcap}
    wanted = masked_attention(query, keys, values, view, **own)  # type: ignore[arg-type]
    found = split_attention(query, keys, values, view_of(starts, counts, tree=tree), **own)  # type: ignore[arg-type]
    real = view.places < MAX_LEN
    torch.testing.assert_close(found[real], wanted[real], rtol=1e-12, atol=1e-13)
    assert bool(found.isfinite().all())


def every_cut(lengths: list[int]) -> Iterator[list[int]]:
    """Yield the pieces of every way to cut all rows."""
    if not lengths:
        yield []
        return

    def cuts(length: int, most: int) -> Iterator[list[int]]:
        if not length:
            yield []
        for piece in range(min(length, most), 0, -1):
            for rest in cuts(length - piece, piece):
                yield [piece, *rest]

    for own in cuts(lengths[0], lengths[0]):
        for rest in every_cut(lengths[1:]):
            yield own + rest


@pytest.mark.parametrize("copied", [0, 1, 3, 8])
def test_no_other_cut_costs_less(copied: int) -> None:
    """Against all ways to cut small rows, each piece taking as much as the longest."""
    draws = Random(copied)
    for _ in range(12):
        lengths = [draws.randint(1, 9) for _ in range(draws.randint(1, 3))]
        best = min(len(pieces) * (max(pieces) + copied) for pieces in every_cut(lengths))
        assert pieces_cost(lengths, piece_length(lengths, copied), copied) == best, (lengths, copied)


def test_unlike_rows_read_less_and_like_rows_stay_whole() -> None:
    unlike = [2000, *[100] * 7]
    assert pieces_cost(unlike, piece_length(unlike, 15), 15) < 0.25 * pieces_cost(unlike, 2000, 15)
    assert piece_length([500] * 8, 15) == 500


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_serves_with_it(target: LanguageModel, temperature: float) -> None:
    asked = [[3 + i * 7 % 200 for i in range(length)] for length in (3, 90, 11)]
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=20, ignore_eos=True)
    found = []
    for attention in ("masked", "split"):
        settings = EngineSettings(max_slots=3, max_model_len=128, attention=attention, compile=False)
        engine = Engine(target, None, settings)
        found.append([output.token_ids for output in engine.generate(asked, params)])
        engine.close()
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match="attention=pieces is not known"):
        EngineSettings(attention="pieces")
