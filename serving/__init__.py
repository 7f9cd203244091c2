"""The serving engine, installed as `distillspec.serving`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "distillspec.serving":
    # A second copy under another name would have its own classes, registries and metrics.
    raise ImportError(f"import distillspec.serving, not {__name__}: it is one package under one name")

if TYPE_CHECKING:
    from distillspec.serving.engine import Engine
    from distillspec.serving.params import SamplingParams
    from distillspec.serving.requests import Request, RequestOutput, RequestRefused
    from distillspec.serving.settings import EngineSettings

__all__ = ["Engine", "EngineSettings", "Request", "RequestOutput", "RequestRefused", "SamplingParams"]

_HOMES = {
    "Engine": "engine",
    "EngineSettings": "settings",
    "Request": "requests",
    "RequestOutput": "requests",
    "RequestRefused": "requests",
    "SamplingParams": "params",
}


def __getattr__(name: str) -> Any:
    """Import a name where it is first asked for: the online trainer lives in this package and needs no engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
