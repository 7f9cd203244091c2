"""FSDP2: every process keeps a slice of each weight and of its optimizer state, and gathers weights to use them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from distillspec.errors import RunError
from distillspec.models import LanguageModel
from distillspec.training.module import DistillModule
from distillspec.training.strategies.base import (
    MOMENTS,
    Holdings,
    MakeOptimizer,
    Unwrapped,
    adam_state,
    named_trainable,
    numel,
    wrap_forward,
)


class ShardedStrategy:
    """torch's `fully_shard` on each layer and on the rest together.

    The rest (embeddings, norm, head) is gathered for the whole of the root's forward, in which the chunked loss
    reads the head's weight. The main process also keeps one whole copy of the draft for evaluation and
    saving: small next to the target, which every process holds whole.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: DistillModule,
        make_optimizer: MakeOptimizer,
        dtype: torch.dtype | None,
    ) -> None:
        self.accelerator = accelerator
        self.sharded: Any = module
        self._plain = copy.deepcopy(module.model) if accelerator.is_main_process else None
        wrap_forward(module, accelerator.device, dtype)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for layer in module.draft.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        self._require_sharded(mesh.size())
        self.module: Callable[..., Any] = Unwrapped(module)
        self.optimizer = make_optimizer(module)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        self.sharded.set_requires_gradient_sync(last)
        yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self, norm: float) -> float:
        parameters = [p for p in self.sharded.parameters() if p.requires_grad]
        return float(_whole(torch.nn.utils.clip_grad_norm_(parameters, norm)))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def skip(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def refresh_plain(self, draft: LanguageModel) -> LanguageModel:
        copies = {} if self._plain is None else dict(self._plain.named_parameters())
        for name, p in self.sharded.model.named_parameters():
            whole = _whole(p)  # all processes take part in the gathering
            if copies:
                copies[name].copy_(whole)
        return draft if self._plain is None else dataclasses.replace(draft, model=self._plain)

    def state(self) -> dict[str, Any]:
        self.refresh_plain(self.sharded.draft)
        known = self.optimizer.state
        optimizer = {
            name: adam_state(known[p], lambda tensor: _whole(tensor).cpu())
            for name, p in named_trainable(self.sharded)
            if p in known
        }
        return {} if self._plain is None else {"model": self._plain.state_dict(), "optimizer": optimizer}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        for name, p in self.sharded.model.named_parameters():
            p.copy_(_slice(state["model"][name], p))
        for name, p in named_trainable(self.sharded):
            if name in state["optimizer"]:
                saved = state["optimizer"][name]
                self.optimizer.state[p] = {"step": saved["step"].to(p.device)} | {
                    key: _slice(saved[key], p) for key in MOMENTS
                }

    def holdings(self) -> Holdings:
        weights = list(self.sharded.model.parameters())
        moments = [s[MOMENTS[0]] for s in self.optimizer.state.values()]
        return Holdings(
            type(weights[0]).__name__,
            numel(p.to_local() for p in weights),
            numel(weights),
            numel(m.to_local() for m in moments),
            numel(p for p in weights if p.requires_grad),
        )

    def _require_sharded(self, shards: int) -> None:
        """Raise RunError if sharding silently did nothing."""
        whole = [name for name, p in self.sharded.named_parameters() if not isinstance(p, DTensor)]
        if whole or shards != self.accelerator.num_processes:
            raise RunError(
                f"launcher=fsdp could not shard {whole[0] if whole else 'the draft'} over "
                f"{self.accelerator.num_processes} processes; use launcher=ddp"
            )


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that processes share. All of them take part.

    On CPUs slices are gathered by `all_gather`. `full_tensor` gathers them by an operator whose long name two of gloo's
    threads write into one string (torch 2.13): that corrupts memory, and a process died of it in one of some hundred
    launches.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != "cpu" or not tensor.placements[0].is_shard(0):
        return tensor.full_tensor()
    local, mesh = tensor.to_local(), tensor.device_mesh
    padded = local.new_zeros(-(-len(tensor) // mesh.size()), *tensor.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in range(mesh.size())]
    torch.distributed.all_gather(parts, padded, group=mesh.get_group())
    return torch.cat(parts)[: len(tensor)]


def _slice(whole: Tensor, like: DTensor) -> DTensor:
    """Return this process's slice of a tensor that all of them hold. Nothing is sent."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
