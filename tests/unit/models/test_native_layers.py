"""Layers in one call of C++: what torch computes, for chains, trees, ragged rows and drafts that read states."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models import native_layers as module
from distillspec.models.features import FeatureTap
from distillspec.models.few_queries import why_not
from distillspec.models.native_layers import NativeLayers
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.native.library import FLAGS, cpp_compiler
from distillspec.native.vector_kernel import LARGEST, SOURCE, SOURCES, ZERO, Kind, coded, vector_kernel
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.row_input import RowInput

from .middle_llama import llama
from .state_drafts import state_draft

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for CPUs"),
]
# Of the largest number. These layers amplify: torch's own bfloat16 is 6 % off its float32.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 0.1}
DTYPES = [torch.float32, torch.bfloat16]
HALF, CODED = Kind(torch.float32, torch.float16), Kind(torch.float32, torch.int8)
PAIRS, CODED_PAIRS = Kind(torch.bfloat16, torch.bfloat16), Kind(torch.bfloat16, torch.uint8)
TREE = TokenTree.of_parents([9, 8, 7, 6], [-1, -1, 0, 1])


def make_of_codes(draft: LanguageModel, held: torch.dtype) -> None:
    for layer in draft.layers:
        for part in layer.modules():
            if isinstance(part, torch.nn.Linear):
                part.weight.copy_(of_codes(part.weight, held))


def of_codes(weight: Tensor, held: torch.dtype) -> Tensor:
    """Return a weight near the given one that codes and a scale a row hold, and 16 bits too."""
    codes, scales = coded(weight, held)
    # Powers of two, so that their products are numbers of 16 bits.
    return ((codes.float() - ZERO[held]) * scales.log2().round().exp2()[:, None]).to(weight.dtype)


def run(
    model: LanguageModel, rows: Sequence[RowInput], cache: SlotCache, native: NativeLayers | None, seed: int = 1
) -> Tensor:
    """Read rows with torch's layers, or in one call."""
    batch = FlatBatch.of(cache, rows, model.device)
    fed = None
    if model.state_input is not None:
        width = model.model.config.get_text_config().hidden_size
        chance = torch.Generator().manual_seed(seed)
        fed = torch.randn(batch.tokens.shape[1], width, generator=chance).to(model.dtype)
    if native is None:
        return batch.view.hidden(model, batch.tokens, fed)
    assert native.takes(batch.view)
    return native.hidden(batch.view, batch.tokens, fed)


STEPS = {
    "a prompt's end": [RowInput(0, 0, list(range(5, 25)))],
    "ragged rows": [RowInput(0, 20, [3]), RowInput(1, 0, [4, 5, 6]), RowInput(3, 0, [1, 2])],
    "a tree beside a chain": [RowInput(0, 21, [30, 9, 8, 7, 6], tree=TREE), RowInput(1, 3, [9, 9, 9, 4])],
    "a tree's nodes alone": [RowInput(0, 26, [9, 8, 7, 6], tree=TREE, rooted=False)],
    "one token each": [RowInput(0, 22, [9]), RowInput(1, 7, [8]), RowInput(2, 0, [8]), RowInput(3, 2, [1])],
}


@torch.inference_mode()
def worst(model: LanguageModel, exact: bool = True) -> float:
    """Take all steps both ways, each over a cache of its own. Return how far outputs, keys and values are off at most.

    NaN if any is.
    """
    native = NativeLayers.of(model, exact=exact)
    assert native is not None
    with slot_attention_in(model.model):
        caches, far = (SlotCache(4, 64), SlotCache(4, 64)), [0.0]
        for rows in STEPS.values():
            wanted, found = run(model, rows, caches[0], None), run(model, rows, caches[1], native)
            assert found.shape == wanted.shape
            assert found.dtype == model.dtype
            far.append(off(found, wanted))
        for index in range(len(model.layers)):
            for theirs, ours in zip(caches[0].layers[index], caches[1].layers[index], strict=True):
                far.append(off(ours, theirs))
    return float(torch.tensor(far).max())


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_layers_give_what_torch_gives(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert worst(llama(dtype)) < CLOSE[dtype]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1000.0,
        },
    ],
)
def test_angles_are_the_models_own(rope: dict[str, object]) -> None:
    assert worst(llama(rope_parameters=rope)) < CLOSE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["eagle", "two layers of eagle", "features", "block"])
def test_drafts_that_read_states(kind: str, dtype: torch.dtype) -> None:
    draft = state_draft(kind, llama(dtype), noise=0.02)
    if dtype == torch.bfloat16:
        assert worst(draft, exact=False) < CLOSE[dtype]
    else:
        assert 0 < rounded(draft) < 5e-3


@torch.inference_mode()
def rounded(draft: LanguageModel, *, eight: bool = False) -> float:
    """Return how far a float32 draft is off, whose weights are rounded to float16, or to 8 bits."""
    native = NativeLayers.of(draft, exact=False, eight=eight)
    assert native is not None
    with slot_attention_in(draft.model):
        wanted, found = (run(draft, STEPS["ragged rows"], SlotCache(4, 64), own) for own in (None, native))
    return off(found, wanted)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle", "features"])
def test_weights_of_eight_bits(kind: str) -> None:
    """A draft in float32 whose weights 8 bits hold gives what it gives in torch. Others are a little off."""
    draft = state_draft(kind, llama(), noise=0.02)
    off_at_first = rounded(draft, eight=True)
    assert 5e-4 < off_at_first < 0.05
    assert NativeLayers.of(draft, exact=False, eight=True).kind.weights == torch.int8  # type: ignore[union-attr]
    make_of_codes(draft, torch.int8)
    assert rounded(draft, eight=True) < CLOSE[torch.float32]


@pytest.mark.skipif(why_not() is not None or not vector_kernel().by_pairs, reason="bfloat16 is not multiplied in pairs")
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle", "features"])
def test_weights_of_seven_bits(kind: str) -> None:
    """A draft in bfloat16 whose weights 7 bits hold gives what its own bits give. Others are a little off."""
    draft = state_draft(kind, llama(torch.bfloat16), noise=0.02)

    def off_by_codes() -> float:
        found = []
        for eight in (False, True):
            native = NativeLayers.of(draft, exact=False, eight=eight)
            assert native is not None
            assert native.kind.weights == (torch.uint8 if eight else torch.bfloat16)
            with slot_attention_in(draft.model):
                found.append(run(draft, STEPS["ragged rows"], SlotCache(4, 64), native))
        return off(found[1], found[0])

    assert 0.01 < off_by_codes() < 0.3
    make_of_codes(draft, torch.uint8)
    assert off_by_codes() < 0.01


@pytest.mark.parametrize(("held", "cut"), [(torch.int8, False), (torch.uint8, True)])
def test_codes_have_the_scale_of_the_least_error(held: torch.dtype, cut: bool) -> None:
    """One number far from the others is cut if that serves the rest, which codes of 8 bits need less."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4096, generator=generator).clamp(-2, 2)
    weight[1, 7], weight[2] = 2.8, torch.linspace(-1, 1, 4096)
    codes, scales = coded(weight, held)
    widest = weight.abs().amax(1) / LARGEST[held]
    assert (scales[1] < 0.95 * widest[1]) == cut
    assert torch.allclose(scales[2], widest[2])
    errors = ((codes.float() - ZERO[held]) * scales[:, None] - weight).abs()
    assert float(errors[2].max()) <= float(scales[2]) / 2 * 1.001


def test_exact_weights_keep_their_bits() -> None:
    model = llama()
    assert NativeLayers.of(model, eight=True).kind.weights == torch.float16  # type: ignore[union-attr]
    if torch.bfloat16 in DTYPES:
        assert NativeLayers.of(llama(torch.bfloat16), eight=True).kind.weights == torch.bfloat16  # type: ignore[union-attr]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    """Bit for bit, however many tokens are read together."""
    model = llama(dtype)
    native = NativeLayers.of(model)
    assert native is not None
    rows = [RowInput(slot, 0, [5 + slot, *range(20, 20 + 3 * slot)]) for slot in range(4)]
    together = run(model, rows, SlotCache(4, 64), native).split([len(row.tokens) for row in rows])
    for row, wanted in zip(rows, together, strict=True):
        assert torch.equal(run(model, [row], SlotCache(4, 64), native), wanted)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [[1] * 38, [16, 17, 5], [33, 5]])
def test_a_token_does_not_depend_on_how_many_are_read_together(parts: list[int], dtype: torch.dtype) -> None:
    model, tokens = llama(dtype), list(range(20, 58))
    native = NativeLayers.of(model)
    assert native is not None
    together, cache, start, read = (
        run(model, [RowInput(0, 0, tokens)], SlotCache(1, 64), native),
        SlotCache(1, 64),
        0,
        [],
    )
    for count in parts:
        read.append(run(model, [RowInput(0, start, tokens[start : start + count])], cache, native))
        start += count
    assert torch.equal(torch.cat(read), together)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_are_handed_out(dtype: torch.dtype) -> None:
    model, ids = llama(dtype), (0, 2, 3)
    native = NativeLayers.of(model)
    assert native is not None
    caches = [SlotCache(4, 64, state_ids=ids) for _ in range(2)]
    with slot_attention_in(model.model):
        tap = FeatureTap(model, ids)
        for rows in list(STEPS.values())[:2]:
            run(model, rows, caches[0], None)
        tap.detach()
    for rows in list(STEPS.values())[:2]:
        run(model, rows, caches[1], native)
    theirs, ours = (cache.features for cache in caches)
    assert theirs is not None
    assert ours is not None
    assert off(ours, theirs) < CLOSE[dtype]
    assert torch.equal(ours[0, 0, :20, :128], theirs[0, 0, :20, :128]), "the embeddings"


@torch.inference_mode()
def test_rows_at_the_contexts_end_write_to_the_spare_place() -> None:
    model = llama()
    native = NativeLayers.of(model)
    assert native is not None
    cache = SlotCache(2, 24)
    rows = [RowInput(0, 3, [5]), RowInput(1, 23, [6])]
    batch = FlatBatch.of(cache, rows, model.device)
    wanted = native.hidden(batch.view, batch.tokens)[0]
    following = batch.view.following(torch.tensor([3, 24]), 24)
    found = native.hidden(following, batch.tokens)
    assert found.isfinite().all()
    assert torch.equal(found[0], wanted)


@torch.inference_mode()
def test_nan_stays_in_its_row() -> None:
    model = llama()
    native = NativeLayers.of(model)
    assert native is not None
    wanted = run(model, [RowInput(0, 0, [5, 6]), RowInput(1, 0, [7])], SlotCache(2, 24), native)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[7] = torch.nan
    found = run(model, [RowInput(0, 0, [5, 6]), RowInput(1, 0, [7])], SlotCache(2, 24), native)
    assert torch.equal(found[:2], wanted[:2])
    assert found[2].isnan().all()


def test_large_passes_and_long_trees_are_left_to_torch() -> None:
    model = llama()
    native = NativeLayers.of(model)
    assert native is not None
    nodes = [7] * module.MOST_NODES
    long = [RowInput(0, 0, [5, *nodes], tree=TokenTree.of_parents(nodes, [-1] * len(nodes)))]
    many = [RowInput(slot, 0, [5] * 8) for slot in range(1 + native.most // 8)]
    assert not native.takes_chains(SlotCache(80, 64), [len(row.tokens) for row in many])
    for rows in (long, many):
        assert not native.takes(FlatBatch.of(SlotCache(80, 64), rows, model.device).view)


def test_other_models_are_left_to_torch(random_model: object) -> None:
    assert NativeLayers.of(llama()) is not None
    assert NativeLayers.of(llama(torch.float64)) is None
    assert NativeLayers.of(llama(intermediate_size=128)) is None, "too small to gain"
    assert NativeLayers.of(llama(head_dim=24)) is None, "heads that fill no vector"
    assert NativeLayers.of(llama(attention_bias=True)) is None
    assert NativeLayers.of(llama(hidden_act="gelu")) is None
    for kind in ("gemma3_text", "qwen3", "gpt2"):
        assert NativeLayers.of(random_model(kind)) is None  # type: ignore[operator]


def test_weights_that_16_bits_do_not_hold_are_for_drafts_alone() -> None:
    model = llama()
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight[3, 5] += 1e-5  # type: ignore[union-attr, index, operator]
    assert NativeLayers.of(model) is None
    assert NativeLayers.of(model, exact=False) is not None


def test_small_numbers_of_a_checkpoint_in_bfloat16_are_kept() -> None:
    """Float16 has no number as small as some of them. So the weights of a product are scaled together."""
    model = llama()
    small = torch.tensor([3.01e-6, -7.3e-7, 1.9e-6, 5.3e-8]).bfloat16().float()
    assert not torch.equal(small.half().float(), small)
    with torch.no_grad():
        for layer in model.layers:
            for part in (part for part in layer.modules() if isinstance(part, nn.Linear)):
                part.weight[:4] *= 2.0**-13  # outputs of small weights alone would show what is lost
                part.weight[4, :4] = small
    assert NativeLayers.of(model) is not None
    assert worst(model) < CLOSE[torch.float32]


def test_a_plain_draft_may_be_rounded() -> None:
    target = llama()
    draft = initialise_draft(DraftConfig(layers=2), target)
    assert worst(draft, exact=False) < CLOSE[torch.float32]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this kind")
@pytest.mark.parametrize(
    ("processor", "kind"),
    [
        ("x86-64", HALF),
        *product(("haswell", "skylake-avx512"), (HALF, CODED, PAIRS)),
        *product(("cooperlake", "sapphirerapids"), (CODED, PAIRS, CODED_PAIRS)),
        *product(("haswell", "skylake-avx512", "cooperlake", "sapphirerapids"), (None,)),
    ],
    ids=str,
)
def test_every_processor_with_avx2_gets_a_kernel(processor: str, kind: Kind | None) -> None:
    """`kind`: None: single products."""
    compiler, flags = cpp_compiler(), [flag for flag in FLAGS if not flag.startswith("-march")]
    assert compiler is not None
    given = [str(SOURCES / "products.cpp")] if kind is None else [*(f"-D{m}" for m in kind.macros), str(SOURCE)]
    command = [compiler, *flags, f"-march={processor}", "-fsyntax-only", *given]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == (processor != "x86-64"), done.stderr
    assert done.returncode == 0 or "a processor with AVX2 is needed" in done.stderr
