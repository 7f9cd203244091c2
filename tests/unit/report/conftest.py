"""Synthetic run folders with plausible figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Json = dict[str, Any]
PROVENANCE = {
    "argv": ["/opt/venv/bin/distill", "train", "loss=fkl", "train.max_minutes=10"],
    "seed": 3,
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "git_dirty": False,
    "packages": {"torch": "2.13.0", "transformers": "5.23.0"},
    "python": "3.11.7",
    "os": "Linux 6.1 x86_64",
    "hardware": {"cpu": "A processor", "cores": 2, "memory_bytes": 16 * 2**30, "gpus": []},
    "started": "2026-01-02T03:04:05+00:00",
    "distillspec": "0.1.0",
}


def interval(mean: float, half: float = 0.02) -> Json:
    return {"mean": mean, "low": max(mean - half, 0.0), "high": mean + half}


def result(alpha: float, draft: str = "draft", *, cost: bool = True, measured: bool = True, max_gamma: int = 8) -> Json:
    """Return an evaluation whose τ follows the chain formula at `alpha`."""
    taus = [sum(alpha**i for i in range(gamma + 1)) for gamma in range(1, max_gamma + 1)]
    costs = {str(b): _cost(b, max_gamma) for b in (1, 8)}
    predicted = {b: [t / (g * c["c"] + c["beta"][g]) for g, t in enumerate(taus, 1)] for b, c in costs.items()}
    return {
        "draft": draft,
        "policy": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        "prompts": 64,
        "positions": 4321,
        "alpha": interval(alpha),
        "alpha_by_domain": {"maths": interval(1.1 * alpha, 0.03), "writing": interval(0.8 * alpha, 0.04)},
        "greedy_agreement": interval(0.98 * alpha),
        "p_of_draft_argmax": interval(0.9 * alpha),
        "ceiling": interval(0.962, 0.001),
        "tau": [interval(t, 0.05) for t in taus],
        "cost": costs if cost else None,
        "speedup": {b: _advice(p) for b, p in predicted.items()} if cost else None,
        "measured": _measured(predicted["1"][3]) if measured else None,
        "cut": 0.73,
    }


def _cost(batch: int, max_gamma: int) -> Json:
    beta = [1.0] + [1.0 + 0.02 * k * batch for k in range(1, max_gamma + 1)]
    measured = [interval(0.12, 0.01), *(interval(b, 0.03) for b in beta[1:])]
    seconds = {"target_step_s": 0.03 * batch**0.3, "draft_step_s": 0.0036 * batch**0.3}
    return {"c": 0.12, "beta": beta, **seconds, "plain_share": 1.0, "measured": measured}


def _advice(predicted: list[float]) -> Json:
    best = max(range(len(predicted)), key=predicted.__getitem__) + 1
    pays = predicted[best - 1] > 1
    sentence = f"Speculation pays: best at gamma {best}." if pays else "Speculation does not pay at this batch."
    return {
        "predicted": predicted,
        "intervals": [interval(value, 0.05) for value in predicted],
        "best_gamma_range": [1, 3],
        "call": "faster" if pays else "slower",
        "best_gamma": best if pays else 0,
        "breaks_even": pays,
        "verdict": sentence,
    }


def _measured(ratio: float) -> Json:
    return {
        "gamma": 4,
        "plain_tokens_per_s": 22.0,
        "speculative_tokens_per_s": 22.0 * ratio,
        "ratio": interval(ratio, 0.06),
        "tau": 2.0,
    }


def metrics(steps: int = 60) -> list[Json]:
    rows: list[Json] = []
    for step in range(1, steps + 1):
        alpha = 0.5 * (1 - 0.95**step)
        row: Json = {"step": step, "tokens": 900 * step, "seconds": 10.0 * step}
        rows.append({**row, "train/loss": 5 - 6 * alpha, "train/alpha": alpha + 0.02, "train/lr": 1e-3})
        if step % 10 == 0:
            rows.append({**row, "eval/alpha": alpha, "eval/alpha_low": alpha - 0.02, "eval/alpha_high": alpha + 0.02})
    return rows


def train_summary(before: Json | None, after: Json) -> Json:
    return {
        "command": "train",
        "before": before,
        "after": after,
        "best": {"step": 60, "alpha": 0.474},
        "steps": 60,
        "tokens": 54_000,
        "minutes": 10.0,
        "tokens_per_s": 905.0,
        "stopped_by": "minutes",
        "draft": "outputs/train/best",
        "bad_steps": 0,
    }


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(name, summary, rows=..., config=..., provenance=...)` makes a folder. None leaves a file out."""

    def make(
        name: str,
        summary: Json | None,
        *,
        rows: list[Json] | None = None,
        config: str | None = "target:\n  path: smollm2\n",
        provenance: Json | None = PROVENANCE,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(summary))
        if rows is not None:
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if config is not None:
            (folder / "config.yaml").write_text(config)
        if provenance is not None:
            (folder / "provenance.json").write_text(json.dumps(provenance))
        return folder

    return make
