"""One process that holds the whole module, without Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from distillspec.training.module import DistillModule
from distillspec.training.strategies.base import MakeOptimizer


class SingleProcessStrategy:
    """The bare module. Gradients stay in this process."""

    def __init__(self, module: DistillModule, make_optimizer: MakeOptimizer) -> None:
        self.accelerator: Accelerator | None = None
        self.plain: Any = module
        self.module: Callable[..., Any] = module
        self.optimizer = make_optimizer(module)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self, norm: float) -> float:
        parameters = [p for p in self.plain.parameters() if p.requires_grad]
        return float(torch.nn.utils.clip_grad_norm_(parameters, norm))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def skip(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
