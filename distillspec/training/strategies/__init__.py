"""How a module is spread over processes: alone or replicated, sharded (FSDP), or ZeRO (DeepSpeed)."""

from distillspec.training.strategies.base import Holdings, Strategy
from distillspec.training.strategies.choice import make_accelerator, make_strategy
from distillspec.training.strategies.replicated import ReplicatedStrategy

__all__ = ["Holdings", "ReplicatedStrategy", "Strategy", "make_accelerator", "make_strategy"]
