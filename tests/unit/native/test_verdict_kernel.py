"""Maxima of rows of logits. For verdicts see `tests/unit/serving/decoding/test_kernel_verdicts.py`."""

from __future__ import annotations

import platform
import subprocess

import pytest
import torch

from distillspec.native.library import FLAGS, SOURCES, NotBuilt, cpp_compiler
from distillspec.native.verdict_kernel import VerdictKernel, verdict_kernel


@pytest.fixture(scope="module")
def kernel() -> VerdictKernel:
    try:
        return verdict_kernel()
    except NotBuilt as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 8, 255, 256, 257, 1030])
def test_maxima_are_found_wherever_they_are(kernel: VerdictKernel, width: int, dtype: torch.dtype) -> None:
    logits = torch.randn(width, width, generator=torch.Generator().manual_seed(width)).clamp(max=3.0).to(dtype)
    logits.fill_diagonal_(4.0)
    peaks, ids = kernel.survey(logits)
    assert torch.equal(ids, torch.arange(width))
    assert bool((peaks == 4).all())


def test_the_lowest_of_equal_ids_is_named(kernel: VerdictKernel) -> None:
    logits = torch.zeros(3, 700)
    logits[1, [300, 640]] = 1.0
    logits[2, [698, 699]] = 1.0
    assert kernel.survey(logits)[1].tolist() == [0, 300, 698]


@pytest.mark.parametrize("place", [0, 3, 255, 256, 698, 699])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_no_distribution_show(kernel: VerdictKernel, place: int, value: float) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    logits[1, place] = value
    logits[2] = -torch.inf
    peaks, ids = kernel.survey(logits)
    assert torch.isfinite(peaks).tolist() == [True, False, False]
    torch.testing.assert_close(peaks, logits.amax(-1), equal_nan=True)
    assert ids[0] == logits[0].argmax()


def test_rows_may_lie_apart(kernel: VerdictKernel) -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2))
    peaks, ids = kernel.survey(logits[::2, :300])
    assert torch.equal(peaks, logits[::2, :300].amax(-1))
    assert torch.equal(ids, logits[::2, :300].argmax(-1))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this kind")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "cooperlake"])
def test_every_processor_gets_a_kernel(processor: str) -> None:
    compiler, flags = cpp_compiler(), [flag for flag in FLAGS if not flag.startswith("-march")]
    assert compiler is not None
    command = [compiler, *flags, f"-march={processor}", "-fsyntax-only", str(SOURCES / "verdicts.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
