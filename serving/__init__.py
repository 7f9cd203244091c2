"""The serving engine, installed as `distillspec.serving`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distillspec.config.engine import EngineConfig as EngineSettings
    from distillspec.serving.base.params import SamplingParams
    from distillspec.serving.base.requests import Request, RequestOutput, RequestRefused
    from distillspec.serving.engine import Engine

__all__ = ["Engine", "EngineSettings", "Request", "RequestOutput", "RequestRefused", "SamplingParams"]

# Public name → its module and its name there.
_HOMES = {
    "Engine": ("distillspec.serving.engine", "Engine"),
    "EngineSettings": ("distillspec.config.engine", "EngineConfig"),
    "Request": ("distillspec.serving.base.requests", "Request"),
    "RequestOutput": ("distillspec.serving.base.requests", "RequestOutput"),
    "RequestRefused": ("distillspec.serving.base.requests", "RequestRefused"),
    "SamplingParams": ("distillspec.serving.base.params", "SamplingParams"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: the online trainer is in this package and needs no engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    globals()[name] = value = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
