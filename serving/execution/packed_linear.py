"""Linear layers with weights packed in advance for few rows, for float32 on CPUs with MKL.

Between a matrix-vector and a large matrix product MKL repacks the weights at every call. Measured with SmolLM2 on two
cores, a pass over 4 rows cost 1.8 times one over a single row although it reads the same bytes, and verification is
that product. Packed for a fixed number of rows it costs 1.4 times one, and 40 rows cost half of the plain product.
Fewer rows are padded to that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from distillspec.models import LanguageModel
from distillspec.models.memory import free_bytes

SMALLEST = 1 << 16  # weights with fewer elements stay in the CPU's caches, and packing does not help
SHARE = 0.25  # of the free memory, at most, for packed copies
FEWEST = 4  # rows below which the plain product does not repack
MOST = 3  # packed copies of a model
LARGEST = 128  # rows from which the plain product is as good
WASTE = 4.0  # most that rows are padded, as a factor (9 rows: 97 ms by the plain product, 71 ms padded to 24)


class PackedLinears:
    """Packed copies of a model's weights, one for each number of rows in `row_counts`, ascending.

    `attach` uses them for the model's linear layers, `linear` for the head. One row, and more than the largest count,
    use the plain product. Weights must not change while the copies exist.
    """

    def __init__(self, model: LanguageModel, row_counts: Sequence[int]) -> None:
        self.model = model
        head = model.head.weight
        self._layers = [m for m in model.decoder.modules() if isinstance(m, nn.Linear) and m.weight.numel() >= SMALLEST]
        weights = [layer.weight for layer in self._layers] + ([head] if head.numel() >= SMALLEST else [])
        self.row_counts = tuple(row_counts)[: _affordable(weights, model.device)]
        self._packed = {weight.data_ptr(): self._pack(weight) for weight in weights} if self.row_counts else {}
        self._sizes = dict(padded(self.row_counts))

    @staticmethod
    def helps(model: LanguageModel) -> bool:
        """Return True if this device, dtype and build of torch have packed products."""
        return (
            model.device.type == "cpu"
            and model.dtype == torch.float32
            and torch.backends.mkl.is_available()
            and hasattr(torch.ops.mkl, "_mkl_linear")
        )

    def attach(self) -> None:
        """Let the model's linear layers use the packed weights."""
        for layer in self._layers:
            packed = self._packed.get(layer.weight.data_ptr(), {})
            layer.forward = partial(self._product, packed, layer.weight, layer.bias)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Restore the layers' own product and free the packed copies."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
        self._packed.clear()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of `x [..., in]` and the weight, `[..., out]`."""
        return self._product(self._packed.get(weight.data_ptr(), {}), weight, bias, x)

    def _product(self, packed: dict[int, Tensor], weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        size = self._sizes.get(rows)
        if size not in packed:
            return linear(x, weight, bias)
        flat = x.reshape(rows, -1)
        if rows < size:
            flat = pad(flat, (0, 0, 0, size - rows))
        out = _packed_product(flat, packed[size], weight, bias, size)
        return out[:rows].reshape(*x.shape[:-1], -1)

    def _pack(self, weight: Tensor) -> dict[int, Tensor]:
        plain = weight.detach().contiguous()
        return {rows: torch.ops.mkl._mkl_reorder_linear_weight(plain, rows) for rows in self.row_counts}


def row_counts(slots: int, longest: int) -> tuple[int, ...]:
    """Return the rows to pack for: all slots with 0, with half of `longest`, and with `longest` drafted tokens."""
    counts = {slots, slots * (-(-longest // 2) + 1), slots * (longest + 1)}
    return tuple(sorted(count for count in counts if FEWEST <= count <= LARGEST))


def padded(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return pairs (rows of a pass, rows it is padded to), from one row to the largest of `counts`.

    A pass that uses the plain product is not padded.
    """
    return tuple((rows, _size_for(rows, counts)) for rows in range(1, max(counts, default=0) + 1))


def _size_for(rows: int, counts: Sequence[int]) -> int:
    return next((size for size in counts if FEWEST <= rows <= size <= WASTE * rows), rows)


def _packed_product(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Return `x [rows, in]` times packed weights.

    Compilers see one operator, for inductor's own lowering fails for padded `x`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.distillspec.packed_linear(x, packed, weight, bias, rows)
    return torch.ops.mkl._mkl_linear(x, packed, weight, bias, rows)


_library = torch.library.Library("distillspec", "DEF")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor weight, Tensor? bias, int rows) -> Tensor")


@torch.library.impl(_library, "packed_linear", "MkldnnCPU")  # the dispatch key of packed weights
def _packed_linear(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    return torch.ops.mkl._mkl_linear(x.contiguous(), packed, weight, bias, rows)


@torch.library.register_fake("distillspec::packed_linear", lib=_library)
def _packed_linear_shape(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _affordable(weights: Sequence[Tensor], device: torch.device) -> int:
    """Return how many packed copies fit into the share of the free memory, at most `MOST`."""
    free = free_bytes(device)
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    return 0 if not size else MOST if free is None else min(MOST, int(SHARE * free // size))
