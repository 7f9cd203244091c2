"""Strategies that spread a module over processes: a single one, replicas (DDP), shards (FSDP), ZeRO (DeepSpeed)."""

from distillspec.training.strategies.base import Holdings, StepStrategy, Strategy
from distillspec.training.strategies.choice import make_accelerator, make_strategy
from distillspec.training.strategies.replicated import ReplicatedStrategy
from distillspec.training.strategies.single import SingleProcessStrategy

__all__ = [
    "Holdings",
    "ReplicatedStrategy",
    "SingleProcessStrategy",
    "StepStrategy",
    "Strategy",
    "make_accelerator",
    "make_strategy",
]
