"""Linear layers with weights packed ahead for few rows, for float32 on CPUs with MKL.

Between a matrix-vector and a large matrix product MKL repacks the weights at every call: measured, 4 to 8 rows cost
twice as much as one although they read the same bytes, and verification is exactly that product. Packed ahead for a
fixed number of rows, 8 rows cost 1.2 times one. Fewer rows are padded to that number.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from distillspec.models import LanguageModel
from distillspec.models.memory import free_bytes

SMALLEST = 1 << 16  # weights with fewer elements stay in the CPU's caches: nothing to gain
SHARE = 0.25  # of the free memory, at most, for packed copies
WASTE = 2.0  # padding to more than so many times the rows is left to the plain product


class PackedLinears:
    """Packed copies of a model's weights, one for each number of rows in `row_counts`, ascending.

    Used by `attach` for the model's linear layers and by `linear` for the head. One row, and more than the largest
    count, take the plain product. Weights must not change while this is in use.
    """

    def __init__(self, model: LanguageModel, row_counts: Seq[int]) -> None:
        self.model = model
        head = model.head.weight
        self._layers = [m for m in model.decoder.modules() if isinstance(m, nn.Linear) and m.weight.numel() >= SMALLEST]
        weights = [layer.weight for layer in self._layers] + ([head] if head.numel() >= SMALLEST else [])
        self.row_counts = tuple(row_counts)[: _affordable(weights, model.device)]
        self._packed = {
            (weight.data_ptr(), rows): torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), rows)
            for weight in weights
            for rows in self.row_counts
        }

    @staticmethod
    def helps(model: LanguageModel) -> bool:
        """Whether this machine and number format have packed products."""
        return (
            model.device.type == "cpu"
            and model.dtype == torch.float32
            and torch.backends.mkl.is_available()
            and hasattr(torch.ops.mkl, "_mkl_linear")
        )

    def attach(self) -> None:
        """Let the model's linear layers use the packed weights."""
        for layer in self._layers:
            layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give the layers their own product back."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return self.linear(x, layer.weight, layer.bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x [..., in]` → `[..., out]`."""
        rows = x.numel() // x.shape[-1]
        size = next((count for count in self.row_counts if rows <= count <= WASTE * max(rows, 4)), None)
        packed = None if rows <= 1 or size is None else self._packed.get((weight.data_ptr(), size))
        if packed is None or size is None:
            return linear(x, weight, bias)
        flat = x.reshape(rows, -1)
        flat = pad(flat, (0, 0, 0, size - rows)) if rows < size else flat
        out = torch.ops.mkl._mkl_linear(flat, packed, weight, bias, size)
        return out[:rows].reshape(*x.shape[:-1], -1)


def row_counts(slots: int, longest: int) -> tuple[int, ...]:
    """Rows to pack for: up to 8, a plain step of all slots, a step of all slots with `longest` drafted tokens each."""
    wanted = {8, _rounded(slots), _rounded(slots * (longest + 1))}
    return tuple(sorted(count for count in wanted if count <= 128))


def _rounded(rows: int) -> int:
    return -(-rows // 8) * 8


def _affordable(weights: Seq[Tensor], device: torch.device) -> int:
    """How many packed copies fit the free memory's share."""
    free = free_bytes(device)
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    return 0 if not size else len(weights) if free is None else int(SHARE * free // size)
