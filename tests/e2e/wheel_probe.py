"""Run by test_wheel.py inside the installed wheel, far from the repository; prints what it found as JSON."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
from importlib.resources import files
from typing import Any


def import_every_module() -> dict[str, dict[str, Any]]:
    """Module name → the file it came from, or the error and the name of the missing module if one was."""
    import distillspec

    results: dict[str, dict[str, Any]] = {"distillspec": {"file": distillspec.__file__}}
    for info in pkgutil.walk_packages(distillspec.__path__, "distillspec.", onerror=lambda name: None):
        if info.name.endswith(".__main__"):
            continue
        try:
            results[info.name] = {"file": importlib.import_module(info.name).__file__}
        except ImportError as error:
            results[info.name] = {"error": repr(error), "missing": error.name}
        except Exception as error:
            results[info.name] = {"error": repr(error), "missing": None}
    return results


def compose_every_config() -> dict[str, str | None]:
    """Each `conf/COMMAND.yaml`, and each `conf/GROUP/OPTION.yaml` in a command that has it, → None or the error."""
    from hydra import compose, initialize_config_module

    from distillspec.composition import register_schema
    from distillspec.config import COMMANDS

    root = files("distillspec.conf")
    groups = [folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("_")]
    words = [[name] for name in _yaml_names(root)]
    words += [[command_with(group.name), f"{group.name}={option}"] for group in groups for option in _yaml_names(group)]
    results: dict[str, str | None] = {}
    with initialize_config_module("distillspec.conf", version_base=None):
        for name, *overrides in words:
            said = " ".join([name, *overrides])
            register_schema(name if name in COMMANDS else "train")
            try:
                compose(name, overrides, return_hydra_config=True)
                results[said] = None
            except Exception as error:  # Hydra often keeps the reason in the cause
                results[said] = f"{error!r} from {error.__cause__!r}"
    return results


def command_with(group: str) -> str:
    """Return a command whose YAML names the group; `train` where it does, or where none does (`experiment`)."""
    from omegaconf import OmegaConf

    from distillspec.config import COMMANDS

    root = files("distillspec.conf")
    having = [
        name
        for name in COMMANDS
        for entry in OmegaConf.create((root / f"{name}.yaml").read_text()).get("defaults", [])
        if not isinstance(entry, str) and group in entry
    ]
    return "train" if "train" in having or not having else having[0]


def _yaml_names(folder: Any) -> list[str]:
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


if __name__ == "__main__":
    gc.disable()  # imports make a million objects that stay
    print(json.dumps({"modules": import_every_module(), "configs": compose_every_config()}), flush=True)
    os._exit(0)  # the interpreter's shutdown would take them apart
