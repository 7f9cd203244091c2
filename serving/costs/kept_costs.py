"""Costs that live steps have corrected, kept in a file for the next start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.files import write_json
from distillspec.models import LanguageModel
from distillspec.serving.costs.hardware_profile import ModelKey, PassKey, machine, size_of
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

VERSION = 3

Key = dict[str, Any]


def cost_key(
    target: LanguageModel,
    drafts: Mapping[str, LanguageModel],
    settings: EngineConfig,
    machine_here: Mapping[str, Any] | None = None,
) -> Key:
    """Return what costs depend on: the machine, the way passes run, the target, and the size of each draft.

    Versions of a draft cost the same while they are of one size.

    Args:
        machine_here: None: as this thread sees it. Its number of threads may not be the engine's.
    """
    return {
        "version": VERSION,
        "machine": dict(machine_here or machine(target.device)),
        "passes": asdict(PassKey.of(settings)),
        "target": asdict(ModelKey.of(target)),
        "drafts": {source: size_of(draft) for source, draft in dict(drafts).items()},
    }


def keep_costs(path: Path, key: Key, latency: LatencyModel) -> None:
    """Write the costs, for `kept_costs` with the same key."""
    write_json(path, {"of": key, "latency": latency.as_json()})


def kept_costs(path: Path, key: Key) -> LatencyModel | None:
    """Read the costs. None where there are none of this key, or they cannot be read: they are measured then."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return _latency(stored["latency"]) if stored["of"] == key else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return None


def _latency(stored: Mapping[str, Any]) -> LatencyModel:
    draft, members = stored["draft"], stored["members"]
    return LatencyModel(
        CostTable.from_json(stored["target"]),
        None if draft is None else CostTable.from_json(draft),
        float(stored["draft_free_s"]),
        bool(stored["at_once"]),
        {source: CostTable.from_json(table) for source, table in members.items()},
    )
