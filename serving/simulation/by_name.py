"""Simulated machines and workloads by name, as in `hardware=NAME` and `workload=NAME`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distillspec.config.simulation import HardwareConfig, WorkloadConfig
from distillspec.errors import ConfigError
from distillspec.serving.simulation.hardware import Hardware, derive_hardware

Schema = TypeVar("Schema")


def load_hardware(name: str) -> Hardware:
    """Return the machine of a name. Raise ConfigError with the known names for another."""
    return derive_hardware(hardware_figures(name))


def hardware_figures(name: str) -> HardwareConfig:
    """Return the figures of a machine, as `load_hardware` derives it from."""
    return _read("hardware", name, HardwareConfig, {})


def load_workload(name: str, **changes: float | None) -> WorkloadConfig:
    """Return the workload of a name, with some settings replaced. Raise ConfigError as `load_hardware` does."""
    return _read("workload", name, WorkloadConfig, changes)


def _read(group: str, name: str, schema: type[Schema], changes: dict[str, float | None]) -> Schema:
    folder = Path(next(iter(importlib.import_module("distillspec.conf").__path__))) / group
    file = folder / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ConfigError(f"{group}={name} is not known; use one of {known}")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.load(file), changes))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{group}={name}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, schema)
    return config
