"""Run by test_wheel.py inside the installed wheel, far from the repository; prints what it found as JSON."""

from __future__ import annotations

import importlib
import json
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
    """Name of each `conf/*.yaml` → None, or the error that composing it gave."""
    from hydra import compose, initialize_config_module

    from distillspec.composition import register_schemas

    register_schemas()

    names = sorted(
        item.name.removesuffix(".yaml") for item in files("distillspec.conf").iterdir() if item.name.endswith(".yaml")
    )
    results: dict[str, str | None] = {}
    with initialize_config_module("distillspec.conf", version_base=None):
        for name in names:
            try:
                compose(name, return_hydra_config=True)
                results[name] = None
            except Exception as error:  # Hydra often keeps the reason in the cause
                results[name] = f"{error!r} from {error.__cause__!r}"
    return results


if __name__ == "__main__":
    print(json.dumps({"modules": import_every_module(), "configs": compose_every_config()}))
