"""Chunks and blocks bound what exists at one time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from distillspec.losses import (
    LOSS_NAMES,
    chunks,
    default_chunk_tokens,
)

from .chunked_cases import TEACHERS, D, T, V, make, reference, supported


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation's result had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize(
    ("name", "teacher"),
    [(name, teacher) for name in LOSS_NAMES for teacher in TEACHERS if supported(name, teacher)],
)
def test_no_tensor_is_ever_as_large_as_tokens_times_vocabulary(name: str, teacher: str) -> None:
    case = make(teacher)
    with LargestTensor() as largest:
        case.chunked(name, chunk_tokens=2).loss.backward()
    head_elements = V * (D + 2)
    assert 2 * V <= largest.elements <= head_elements < T * V


def test_the_memory_watch_sees_whole_logits() -> None:
    case = make("dense")
    with LargestTensor() as largest:
        reference(case, "fkl").backward()
    assert largest.elements >= T * V


def test_default_sizes_keep_temporaries_small_and_chunks_large() -> None:
    cpu = torch.device("cpu")
    assert 64 <= default_chunk_tokens(49_152, 49_152, cpu) < default_chunk_tokens(8_192, 49_152, cpu)
    assert chunks.block_tokens(49_152, 49_152, cpu) * 49_152 * 12 * 4 <= 2**25
    assert chunks.block_tokens(8_192, 0, cpu) > chunks.block_tokens(8_192, 49_152, cpu) > 16
