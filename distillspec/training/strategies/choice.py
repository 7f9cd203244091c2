"""Accelerator and strategy of a run, from `launcher=`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distillspec.config import TrainCommand
from distillspec.errors import RunError
from distillspec.models.numerics import resolve_device, resolve_dtype
from distillspec.training.module import DistillModule
from distillspec.training.optimizer import make_optimizer
from distillspec.training.strategies.base import Strategy
from distillspec.training.strategies.replicated import ReplicatedStrategy

# While the main process evaluates, the others wait for it. The launching process notices one that ended.
PATIENCE = timedelta(hours=12)


def make_accelerator(config: TrainCommand, hidden_size: int) -> Accelerator:
    """Return Accelerate's processes, device and mixed precision.

    Args:
        hidden_size: the draft's.

    Raises:
        RunError: fewer processes found each other than `launcher.num_processes`.
    """
    device = resolve_device(config.target.device)
    kind = config.launcher.kind
    extra: dict[str, Any] = {}
    if kind != "local":
        backend = "nccl" if device.type == "cuda" else "gloo"
        extra["kwargs_handlers"] = [InitProcessGroupKwargs(backend=backend, timeout=PATIENCE)]
    if kind.startswith("deepspeed"):
        from distillspec.training.strategies.zero import quieten, zero_settings

        quieten()
        settings = zero_settings(_stage(kind), config.train, hidden_size)
        extra["gradient_accumulation_steps"] = config.train.accumulate
        extra["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False)
    if kind == "local" and device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Accelerate takes the current GPU, and the target is on this one
    # Accelerate keeps one state a process. The next run of a sweep may need another precision.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        # Accelerate sets DeepSpeed up only if it is not set to use the CPU.
        cpu=device.type == "cpu" and not kind.startswith("deepspeed"),
        mixed_precision="bf16" if _half(config) and kind in ("local", "ddp") else "no",
        **extra,
    )
    # At stage 3 transformers would load every further model in pieces, the reference draft too.
    unset_hf_deepspeed_config()
    if accelerator.num_processes != config.launcher.num_processes:
        raise RunError(
            f"launcher={kind} started {config.launcher.num_processes} processes, "
            f"but {accelerator.num_processes} found each other"
        )
    return accelerator


def make_strategy(config: TrainCommand, accelerator: Accelerator, module: DistillModule) -> Strategy:
    """Return the strategy that `launcher=` names, around `module` on the accelerator's device."""

    def optimizer(wrapped: DistillModule) -> torch.optim.Optimizer:
        return make_optimizer(wrapped, config.train)

    dtype = torch.bfloat16 if _half(config) else None
    if config.launcher.kind == "fsdp":
        from distillspec.training.strategies.sharded import ShardedStrategy

        return ShardedStrategy(accelerator, module, optimizer, dtype)
    if config.launcher.kind.startswith("deepspeed"):
        from distillspec.training.strategies.zero import ZeroStrategy

        return ZeroStrategy(accelerator, module, optimizer, dtype)
    return ReplicatedStrategy(accelerator, module, optimizer)


def _half(config: TrainCommand) -> bool:
    return resolve_dtype(config.train.dtype, resolve_device(config.target.device)) == torch.bfloat16


def _stage(kind: str) -> int:
    return int(kind[-1])
