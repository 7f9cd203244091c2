"""Replicas: every process holds the whole module (DDP), or there is only one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.training.module import DistillModule
from distillspec.training.strategies.base import MOMENTS, Holdings, MakeOptimizer, adam_state, named_trainable, numel
from distillspec.training.strategies.single import SingleProcessStrategy


class ReplicatedStrategy(SingleProcessStrategy):
    """Accelerate's own preparation: the bare module in one process, DDP around it in several."""

    accelerator: Accelerator

    def __init__(self, accelerator: Accelerator, module: DistillModule, make_optimizer: MakeOptimizer) -> None:
        prepared = accelerator.prepare_model(module)  # first: it may move the weights that the optimizer holds
        super().__init__(module, make_optimizer)
        self.accelerator = accelerator
        self.module = prepared

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        if last:
            yield
        else:
            with self.accelerator.no_sync(self.module):
                yield

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def refresh_plain(self, draft: LanguageModel) -> LanguageModel:
        return draft

    def state(self) -> dict[str, Any]:
        known = self.optimizer.state
        optimizer = {
            name: adam_state(known[p], lambda tensor: tensor.detach().cpu())
            for name, p in named_trainable(self.plain)
            if p in known
        }
        return {"model": self.plain.model.state_dict(), "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        self.plain.model.load_state_dict(state["model"])
        for name, p in named_trainable(self.plain):
            if name in state["optimizer"]:
                # A fused AdamW keeps its step count on the weights' device too.
                self.optimizer.state[p] = {key: value.to(p.device) for key, value in state["optimizer"][name].items()}

    def holdings(self) -> Holdings:
        weights = [p for _, p in self.plain.model.named_parameters()]
        moments = numel(s[MOMENTS[0]] for s in self.optimizer.state.values())
        trainable = numel(p for p in weights if p.requires_grad)
        return Holdings(type(weights[0]).__name__, numel(weights), numel(weights), moments, trainable)
