"""Gain of a training run: figures of the draft before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distillspec.evaluation import EvaluationResult, cut_line, timing_lines
from distillspec.training.trainer import TrainResult


def summary(result: TrainResult, before: dict[str, Any], after: EvaluationResult, folder: Path) -> dict[str, Any]:
    """Return what `summary.json` says of the training and of the draft before and after it."""
    used = result.progress
    return {
        "before": before,
        "after": after.to_json(),
        "best": result.best,
        "steps": used.step,
        "tokens": used.tokens,
        "minutes": used.seconds / 60,
        "tokens_per_s": used.tokens_per_s,
        "stopped_by": result.stopped_by,
        "bad_steps": result.bad_steps,
        "draft": str(folder / "draft"),
    }


def print_gain(before: dict[str, Any], after: EvaluationResult) -> None:
    """Print acceptance and speed-up, before and after."""
    gamma = min(4, len(after.tau))
    print(
        f"acceptance rate α {before['alpha']['mean']:.3f} → {after.alpha.mean:.3f} "
        f"[{after.alpha.low:.3f}, {after.alpha.high:.3f}], block efficiency τ({gamma}) "
        f"{before['tau'][gamma - 1]['mean']:.2f} → {after.tau[gamma - 1].mean:.2f}"
    )
    for line in filter(None, [*timing_lines(after), cut_line(after)]):
        print(line)
