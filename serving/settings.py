"""How an engine is set up: the commands' `engine` group is the same class, so that defaults and checks stand once."""

from distillspec.config.engine import EngineConfig as EngineSettings

__all__ = ["EngineSettings"]
