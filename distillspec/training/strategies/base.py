"""Interface between the training loop and the strategies, and the form in which all of them keep their state."""

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
from distillspec.training.module import DistillModule

MakeOptimizer = Callable[[DistillModule], Optimizer]
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, besides its step count


@dataclass(frozen=True)
class Holdings:
    """Elements that one process keeps between steps, beside how many there are in all."""

    weights: str  # type of a weight: Parameter, DTensor, or Parameter with ds_id
    weights_held: int
    weights_whole: int
    optimizer_held: int  # first moments
    optimizer_whole: int


class StepStrategy(Protocol):
    """Owner of the wrapped module and its optimizer. All processes call every method together.

    `module` has the signature and results of `DistillModule`. `optimizer.param_groups` hold the learning rate.
    """

    module: Callable[..., Any]
    optimizer: Optimizer

    @property
    def accelerator(self) -> Accelerator | None:
        """None in a single process without Accelerate."""
        ...

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for one micro-batch. Gradients are exchanged only in the last one."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients, which are averaged over processes."""
        ...

    def clip(self, norm: float) -> float:
        """Clip the gradients to `norm`. Return their global norm before, NaN or infinite if any gradient is."""
        ...

    def update(self) -> None:
        """Take the optimizer step, then drop the gradients."""
        ...

    def skip(self) -> None:
        """Drop the gradients without a step."""
        ...


class Strategy(StepStrategy, Protocol):
    """A strategy of a whole run: it also gives the draft back, and saves and restores its state."""

    @property
    def accelerator(self) -> Accelerator:
        """Processes, devices and mixed precision."""
        ...

    def refresh_plain(self, draft: LanguageModel) -> LanguageModel:
        """Return the draft with whole, current weights, for evaluation, sampling and saving. Main process only."""
        ...

    def state(self) -> dict[str, Any]:
        """Return `{"model": weights, "optimizer": {parameter name: AdamW's step and moments}}` on the main process.

        Tensors are whole, so the strategy and the number of processes may change at a resume.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state()`, which every process has read."""
        ...

    def holdings(self) -> Holdings:
        """Return this process's share of weights and optimizer state: proof that they are sharded."""
        ...


def named_trainable(module: Any) -> list[tuple[str, Any]]:
    """Return a `DistillModule`'s trainable parameters under the draft's own names."""
    return [(name, p) for name, p in module.model.named_parameters() if p.requires_grad]


def adam_state(state: dict[str, Any], whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return one parameter's step count and moments, each passed through `whole`."""
    return {"step": whole(state["step"])} | {key: whole(state[key]) for key in MOMENTS}


def numel(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def wrap_forward(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Make `module.forward` compute in `dtype` (None: unchanged) and return tuples.

    FSDP and ZeRO search a module's output for tensors to know when its backward begins, and search plain containers
    only. Weights and gradients stay float32: autocast applies inside the forward alone.
    """
    forward = module.forward

    def contained(*args: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            result = forward(*args)
        return (result.loss, result.metrics) if isinstance(result, ChunkedLoss) else result

    module.forward = contained


class Unwrapped:
    """Callable around a wrapped module that turns its tuple back into a `ChunkedLoss`."""

    def __init__(self, wrapped: nn.Module) -> None:
        self.wrapped = wrapped

    def __call__(self, *args: Any) -> Any:
        result = self.wrapped(*args)
        return ChunkedLoss(*result) if isinstance(result, tuple) else result
