"""What the training loop asks of any strategy, and the form in which all of them keep their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from distillspec.losses import ChunkedLoss
from distillspec.models import LanguageModel

MakeOptimizer = Callable[[nn.Module], Optimizer]
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, besides its step count


@dataclass(frozen=True)
class Holdings:
    """What one process keeps between steps, in numbers (elements), of how much there is altogether."""

    weights: str  # type of a weight: Parameter, DTensor, or Parameter with ds_id
    weights_held: int
    weights_whole: int
    optimizer_held: int  # first moments
    optimizer_whole: int


class Strategy(Protocol):
    """Owns the wrapped module and its optimizer. Every method is called by all processes together.

    `module` is called like `DistillModule` and gives what that gives. `optimizer.param_groups` carry the
    learning rate.
    """

    accelerator: Accelerator
    module: Callable[..., Any]
    optimizer: Optimizer

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """A context for one micro-batch; gradients are exchanged only in the last one."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients, which are averaged over processes."""
        ...

    def clip(self, norm: float) -> float:
        """Clip the gradients to `norm`; gives their global norm before, not finite when any of them is not."""
        ...

    def update(self) -> None:
        """Optimizer step, then forget the gradients."""
        ...

    def skip(self) -> None:
        """Forget the gradients without a step."""
        ...

    def refresh_plain(self, draft: LanguageModel) -> LanguageModel:
        """The draft with whole, current weights, for evaluation, sampling and saving; on the main process only."""
        ...

    def state(self) -> dict[str, Any]:
        """`{"model": weights, "optimizer": {parameter name: AdamW's step and moments}}` on the main process.

        Whole tensors whatever the strategy and the number of processes, so either may change at a resume.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state()`, which every process has read."""
        ...

    def holdings(self) -> Holdings:
        """This process's share of weights and optimizer; proof that sharding is no pretence."""
        ...


def named_trainable(module: Any) -> list[tuple[str, Any]]:
    """A `DistillModule`'s learning parameters under the draft's own names."""
    return [(name, p) for name, p in module.model.named_parameters() if p.requires_grad]


def adam_state(state: dict[str, Any], whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """One parameter's step count and moments, the moments made whole."""
    return {"step": whole(state["step"])} | {key: whole(state[key]) for key in MOMENTS}


def numel(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def wrap_forward(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Make `module.forward` compute in `dtype` (None: as it is) and give tuples.

    FSDP and ZeRO look for tensors in a module's output to know when its backward begins, and look only into
    plain containers. Weights and gradients stay float32: autocast narrows inside the forward alone.
    """
    forward = module.forward

    def contained(*args: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            result = forward(*args)
        return (result.loss, result.metrics) if isinstance(result, ChunkedLoss) else result

    module.forward = contained


class Unwrapped:
    """Calls a wrapped module and gives its tuple back as the `ChunkedLoss` it was."""

    def __init__(self, wrapped: nn.Module) -> None:
        self.wrapped = wrapped

    def __call__(self, *args: Any) -> Any:
        result = self.wrapped(*args)
        return ChunkedLoss(*result) if isinstance(result, tuple) else result
