"""Packed products are the plain ones, for any number of rows, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model, tiny_tokenizer
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.execution.graphs import CompiledRecorder
from distillspec.serving.execution.packed_linear import PackedLinears, row_counts

from ..conftest import hf_greedy, prompts

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def wide() -> LanguageModel:
    """Wide enough that its layers are worth packing."""
    model = tiny_model(264, layers=2, hidden=256)
    return wrap(model.requires_grad_(False), tiny_tokenizer(), "wide")


needs_mkl = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")), reason="needs MKL"
)


def test_rows_are_packed_for_plain_and_drafted_steps() -> None:
    assert row_counts(1, 4) == (5,)
    assert row_counts(1, 0) == ()
    assert row_counts(8, 4) == (8, 24, 40)
    assert row_counts(64, 4) == (64,)


@needs_mkl
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 20, 39, 40, 41, 100])
def test_products_are_the_plain_ones(wide: LanguageModel, rows: int) -> None:
    packs = PackedLinears(wide, (8, 40))
    assert packs.row_counts == (8, 40)
    layer = wide.layers[0].mlp.gate_proj
    x = torch.randn(rows, 256)
    torch.testing.assert_close(packs.linear(x, layer.weight), x @ layer.weight.T, atol=1e-4, rtol=1e-5)
    nested = x[None]
    assert packs.linear(nested, layer.weight).shape == (1, rows, layer.out_features)


@needs_mkl
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # the compiler's own affair
@pytest.mark.skipif(not CompiledRecorder.works(), reason="needs a C++ compiler")
def test_rows_that_are_padded_can_be_compiled(wide: LanguageModel) -> None:
    """Inductor's own lowering of the packed product asserts that its input is not an expression, and padding is one."""
    asked = [[5, 6, 7, 8] * 5] * 4  # too long prompts to be compiled: one shape
    engine = Engine(wide, None, EngineSettings(max_slots=6, max_model_len=64, compile=True, prefix_reuse=False))
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.shapes == 1
    engine.close()
    assert [list(output.token_ids) for output in outputs] == [hf_greedy(wide, asked[0], 6)] * 4


@needs_mkl
def test_an_engine_uses_them_and_gives_the_model_back(wide: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(4)
    wanted = [hf_greedy(wide, prompt, 10) for prompt in asked]
    used: list[int] = []
    plain = PackedLinears._product

    def counted(self: PackedLinears, packed: Any, weight: Any, bias: Any, x: torch.Tensor) -> torch.Tensor:
        used.append(x.numel() // x.shape[-1])
        return plain(self, packed, weight, bias, x)

    monkeypatch.setattr(PackedLinears, "_product", counted)
    engine = Engine(wide, None, EngineSettings(max_slots=4, max_model_len=300, proposer="prompt_lookup"))
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=10))
    assert [list(output.token_ids) for output in outputs] == wanted
    assert used
    engine.close()
    assert all("forward" not in module.__dict__ for module in wide.model.modules())


def test_other_formats_are_left_alone() -> None:
    model = wrap(tiny_model(264, layers=1, hidden=64).bfloat16(), tiny_tokenizer(), "half")
    assert not PackedLinears.helps(model)
