"""How the module is spread over processes: alone, replicated, or sharded, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from distillspec.models import LanguageModel


class Strategy(Protocol):
    """Owns the wrapped module and its optimizer. Methods are called by all processes together."""

    accelerator: Accelerator
    module: nn.Module
    optimizer: Optimizer

    def micro_step(self, last: bool) -> Any:
        """A context for one micro-batch; gradients are exchanged only in the last one."""
        ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def clip(self, norm: float) -> float:
        """Clip gradients to `norm`; their norm before, which is not finite when any gradient is not."""
        ...

    def update(self) -> None:
        """Optimizer step, then forget the gradients."""
        ...

    def skip(self) -> None:
        """Forget the gradients without a step."""
        ...

    def refresh_plain(self, draft: LanguageModel) -> LanguageModel:
        """The draft with whole, current weights, for evaluation and saving."""
        ...

    def state(self) -> dict[str, Any]:
        """Weights and optimizer state, whole, on the CPU."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


class ReplicatedStrategy:
    """One process, or DDP: every process holds the whole module."""

    def __init__(
        self, accelerator: Accelerator, module: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> None:
        self.accelerator = accelerator
        self.plain: Any = module
        self.module = accelerator.prepare_model(module)
        self.optimizer = make_optimizer(module)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        if last:
            yield
        else:
            with self.accelerator.no_sync(self.module):
                yield

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, norm: float) -> float:
        parameters = [p for p in self.plain.parameters() if p.requires_grad]
        return float(torch.nn.utils.clip_grad_norm_(parameters, norm))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def skip(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def refresh_plain(self, draft: LanguageModel) -> LanguageModel:
        return draft

    def state(self) -> dict[str, Any]:
        return {"model": self.plain.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.plain.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
