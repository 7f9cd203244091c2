"""DeepSpeed ZeRO: stage 2 spreads gradients and optimizer state over the processes, stage 3 the weights too."""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from distillspec.config import TrainConfig
from distillspec.errors import RunError
from distillspec.models import LanguageModel
from distillspec.training.module import DistillModule
from distillspec.training.strategies.base import (
    MOMENTS,
    Holdings,
    MakeOptimizer,
    Unwrapped,
    named_trainable,
    numel,
    wrap_forward,
)


def zero_settings(stage: int, config: TrainConfig, hidden_size: int) -> dict[str, Any]:
    """Return DeepSpeed's own configuration: float32 weights (autocast narrows inside the forward)."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Norms and biases stay gathered: fetching each costs more than it saves.
        zero["stage3_param_persistence_threshold"] = 10 * hidden_size
    return {
        "train_micro_batch_size_per_gpu": 1,  # has no effect: the feed counts batches in tokens
        "gradient_accumulation_steps": config.accumulate,
        "gradient_clipping": config.clip_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }


def quieten() -> None:
    """Keep DeepSpeed from compiling and from printing. Call it before the processes meet.

    Its shared-memory collectives for CPUs need a compiler and a minute or two, and a compilation that is
    killed leaves a lock behind on which the next one waits for ever. Without them gloo does the work.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # we report bad steps ourselves
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # at every collective


class ZeroStrategy:
    """A DeepSpeed engine, prepared by Accelerate.

    The engine clips, and drops a step whose gradient norm is not finite, within one call. `clip` makes that
    call, so `update` and `skip` do nothing. The main process keeps a whole copy of the draft at
    stage 3, as `ShardedStrategy` does.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: DistillModule,
        make_optimizer: MakeOptimizer,
        dtype: torch.dtype | None,
    ) -> None:
        self.accelerator = accelerator
        self.stage = int(accelerator.state.deepspeed_plugin.zero_stage)
        self._plain = copy.deepcopy(module.model) if self.stage == 3 and accelerator.is_main_process else None
        self.spread: Any = module
        wrap_forward(module, accelerator.device, dtype)
        self.engine, _ = accelerator.prepare(module, make_optimizer(module))
        self.optimizer = self.engine.optimizer
        self.module: Callable[..., Any] = Unwrapped(self.engine)
        self._require_spread()
        self._create_moments()

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            self.engine.step()  # counts the micro-batch (`clip` takes the step after the last one)

    def backward(self, loss: Tensor) -> None:
        # The loss is divided already.
        self.engine.backward(loss, scale_wrt_gas=False)

    def clip(self, norm: float) -> float:
        """Clip to the configured norm and update, or drop the step when its norm is not finite."""
        self.engine.step()
        return float("inf") if self.optimizer.overflow else float(self.engine.get_global_grad_norm())

    def update(self) -> None:
        """Do nothing: `clip` took the step."""

    def skip(self) -> None:
        """Do nothing: `clip` dropped the step."""

    @torch.no_grad()
    def refresh_plain(self, draft: LanguageModel) -> LanguageModel:
        if self.stage < 3:
            return draft
        copies = {} if self._plain is None else dict(self._plain.named_parameters())
        for name, p in self.spread.model.named_parameters():
            with self._gathered(p):
                if copies:
                    copies[name].copy_(p)
        return draft if self._plain is None else dataclasses.replace(draft, model=self._plain)

    def state(self) -> dict[str, Any]:
        plain = self.refresh_plain(self.spread.draft).model
        optimizer = self._moments()
        return {"model": plain.state_dict(), "optimizer": optimizer} if self.accelerator.is_main_process else {}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for name, p in self.spread.model.named_parameters():
            with self._gathered(p, changes=True):
                p.copy_(state["model"][name])
        for name, p in named_trainable(self.spread):
            safe_set_full_fp32_param(p, state["model"][name].to(p.device))
            if name in state["optimizer"]:
                saved = state["optimizer"][name]
                self._set_step(saved["step"])
                for key in MOMENTS:
                    safe_set_full_optimizer_state(p, saved[key].to(p.device), key)

    def holdings(self) -> Holdings:
        weights = list(self.spread.model.parameters())
        return Holdings(
            f"{type(weights[0]).__name__}{' with ds_id' if hasattr(weights[0], 'ds_id') else ''}",
            numel(getattr(p, "ds_tensor", p) for p in weights),
            sum(getattr(p, "ds_numel", p.numel()) for p in weights),
            numel(self._flat()),
            sum(getattr(p, "ds_numel", p.numel()) for p in weights if p.requires_grad),
        )

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """Return AdamW's state by parameter name."""
        from deepspeed.utils import safe_get_full_optimizer_state

        step = next(iter(self.optimizer.optimizer.state.values()))["step"].cpu()
        return {
            name: {"step": step} | {key: safe_get_full_optimizer_state(p, key).cpu() for key in MOMENTS}
            for name, p in named_trainable(self.spread)
        }

    def _create_moments(self) -> None:
        """Create the state that AdamW's first step would create, to save from and restore into.

        Stage 2 links moments to parameters after the first group's step, when the second group has none yet,
        and never again: they are then missing from the state.
        """
        for flat in self._flat():
            self.optimizer.optimizer.state[flat] = {"step": torch.zeros((), device=flat.device)} | {
                key: torch.zeros_like(flat) for key in MOMENTS
            }
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _set_step(self, step: Tensor) -> None:
        for flat in self._flat():
            self.optimizer.optimizer.state[flat]["step"].copy_(step)

    def _flat(self) -> list[Tensor]:
        """Return the float32 slices that this process updates."""
        name = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(getattr(self.optimizer, name))

    def _gathered(self, parameter: Tensor, changes: bool = False) -> Any:
        if self.stage < 3:
            return nullcontext()
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters([parameter], modifier_rank=0 if changes else None)

    def _require_spread(self) -> None:
        """Raise RunError if DeepSpeed runs over fewer processes than there are."""
        world = self.engine.dp_world_size
        whole = [n for n, p in self.spread.named_parameters() if self.stage == 3 and not hasattr(p, "ds_id")]
        if world != self.accelerator.num_processes or whole:
            raise RunError(
                f"DeepSpeed ZeRO-{self.stage} runs over {world} of {self.accelerator.num_processes} processes"
                f"{f', with {whole[0]} whole' if whole else ''}; use launcher=ddp"
            )
