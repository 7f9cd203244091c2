"""Goals of the live comparison, and which of them its figures meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Times as fast as another side after the shift, but windows are of all turns.
GOALS = {
    "median": 1.06,  # over static, in the median of the turns
    "low": 1.0,  # over static, at the lower end of the interval over requests
    "over_none": 1.0,  # over no speculation, in the median of the turns
    "window": 0.97,  # over static, at the upper end of the interval of every window in which no update ran
    "window_with_update": 0.90,  # the same for windows with an update
    "first_promotion_s": 300.0,  # seconds from the shift
    "judging": 0.01,  # share of the processor time of server and trainer
    "logging": 0.02,  # the same
}


def met(record: dict[str, Any]) -> dict[str, bool | None]:
    """Return whether each goal is met by the figures of `turns.figures`. None: they do not say."""
    static, without = record.get("online_over_static"), record.get("online_over_none")
    shifted, beside_none = (None if comparison is None else comparison["shifted"] for comparison in (static, without))
    windows = [] if static is None else [window for window in static["windows"] if window is not None]
    shares = record["cpu"].get("online", {}).get("shares", {})
    return {
        "median": None if shifted is None else shifted["median"] >= GOALS["median"],
        "low": None if shifted is None else shifted["over_requests"]["low"] > GOALS["low"],
        "over_none": None if beside_none is None else beside_none["median"] >= GOALS["over_none"],
        "window": _reach([window for window in windows if not window["updates"]], GOALS["window"]),
        "window_with_update": _reach([window for window in windows if window["updates"]], GOALS["window_with_update"]),
        "first_promotion_s": _promoted_by(record["events"].get("online", []), GOALS["first_promotion_s"]),
        **{work: shares[work] <= GOALS[work] if work in shares else None for work in ("judging", "logging")},
    }


def _reach(windows: Sequence[dict[str, Any]], goal: float) -> bool | None:
    """Return True if no window's interval lies wholly below the goal."""
    return all(window["over_requests"]["high"] >= goal for window in windows) if windows else None


def _promoted_by(events: Sequence[dict[str, Any]], goal_s: float) -> bool | None:
    """Return True if the first promotion after the shift came in time. None: nothing was promoted since."""
    since = [event["since_shift_s"] for event in events if event.get("decision") == "promoted"]
    return next((seconds <= goal_s for seconds in since if seconds is not None), None)
