"""The target's states of samples as columns of a shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from distillspec.data.shard_schema import Columns
from distillspec.types import RecordedStates


def state_columns(states: Sequence[RecordedStates | None]) -> tuple[list[Columns], dict[str, Any]]:
    """Return the columns of every sample, and what they have in common.

    All of a shard are of one kind: the same ids in the same precision. Samples with others count as without.
    """
    kinds = Counter(_kind(each) for each in states if each is not None)
    if not kinds:
        return [{} for _ in states], {}
    kind = kinds.most_common(1)[0][0]
    example = next(each for each in states if each is not None and _kind(each) == kind)
    columns: list[Columns] = []
    for each in states:
        kept, rows = (example, 0) if each is None or _kind(each) != kind else (each, len(each.values))
        columns.append({"features": kept.values[:rows]})
        if kept.scales is not None:
            columns[-1]["feature_scales"] = kept.scales[:rows]
    return columns, {"state_ids": list(example.ids)}


def states_of(columns: Columns, common: dict[str, Any]) -> RecordedStates | None:
    """Return the states in a sample's columns, None for a sample without."""
    if "features" not in columns or not len(columns["features"]):
        return None
    values, scales = columns["features"], columns.get("feature_scales")
    # Clones, for parts would keep the whole shard in memory.
    return RecordedStates(tuple(common["state_ids"]), values.clone(), None if scales is None else scales.clone())


def _kind(states: RecordedStates) -> tuple[Any, ...]:
    return states.ids, states.values.dtype, states.values.shape[1]
