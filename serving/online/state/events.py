"""Records of what online adaptation does, for `metrics.jsonl` and other readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]
"""`event` (verdict, rollback, swap, alarm, figures, …), `time_s` and the event's own values."""

Report = Callable[[Record], None]
"""Takes a record."""
