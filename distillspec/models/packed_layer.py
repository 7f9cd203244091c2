"""Weights of a layer as the C++ kernel reads them (`Layer` of `layers.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distillspec.models.half_weights import half_scale
from distillspec.models.language_model import LanguageModel
from distillspec.models.large_pages import LargePages
from distillspec.native.library import NotBuilt
from distillspec.native.vector_kernel import WEIGHTS, Kind, vector_kernel


class PackedLayer(NamedTuple):
    """One layer, or one head of a draft. What it lacks is None."""

    weights: tuple[Tensor | None, ...]  # of queries, keys and values, of the output, of gate and up, and down
    norms: tuple[Tensor | None, ...]  # before attention, of states beside the tokens, before the MLP
    scales: Tensor  # [4] float32, of the weights' sums

    @staticmethod
    def of(
        weights: Sequence[Tensor | None], norms: Sequence[nn.Module | None], kind: Kind, pages: LargePages
    ) -> PackedLayer:
        """Pack the four weights. Those in float16 are scaled by powers of two."""
        kernel, halves = vector_kernel(), kind.weights == torch.float16
        packed, scales = list[Tensor | None](), list[float]()
        for weight in weights:
            scale = half_scale(weight) if halves and weight is not None else 1.0
            scales.append(1.0 / scale)
            scaled = weight if weight is None or scale == 1.0 else weight * scale
            packed.append(None if scaled is None else pages.keep(kernel.packed(scaled, kind.weights)))
        wide = tuple(None if norm is None else norm.weight.detach().float().contiguous() for norm in norms)  # type: ignore[operator]
        return PackedLayer(tuple(packed), wide, torch.tensor(scales))

    @property
    def pointers(self) -> list[int]:
        return [0 if tensor is None else tensor.data_ptr() for tensor in (*self.weights, *self.norms, self.scales)]


def kind_of(model: LanguageModel, *, eight: bool) -> Kind:
    """Return the kind of kernel for a model.

    Args:
        eight: weights are codes of at most 8 bits (`VectorKernel.codes`) where the kernel has any. Else they have 16.
    """
    return Kind(model.dtype, vector_kernel().codes(model.dtype) if eight else WEIGHTS[model.dtype])


def is_built(kind: Kind) -> bool:
    """Return True if the kernel of a kind can be built here. It is built if need be."""
    try:
        vector_kernel().build(kind)
    except NotBuilt:
        return False
    return True
