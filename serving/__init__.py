"""The serving engine, installed as `distillspec.serving`."""

if __name__ != "distillspec.serving":
    # A second copy under another name would have its own classes, registries and metrics.
    raise ImportError(f"import distillspec.serving, not {__name__}: it is one package under one name")

from distillspec.serving.engine import Engine
from distillspec.serving.params import SamplingParams
from distillspec.serving.requests import Request, RequestOutput, RequestRefused
from distillspec.serving.settings import EngineSettings

__all__ = ["Engine", "EngineSettings", "Request", "RequestOutput", "RequestRefused", "SamplingParams"]
