"""Results of the study, from the parts that are finished."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from distillspec.evaluation.bootstrap import interval
from distillspec.files import read_object, write_json, write_text
from distillspec.provenance import provenance
from distillspec.recipes.osd.arms import ARMS
from distillspec.recipes.osd.bias import bias_by_arm, estimate, tail_shares
from distillspec.recipes.osd.figures import plot_acceptance, plot_offline
from distillspec.recipes.osd.goals import SAMPLES, Row, alpha, gain, goals, half
from distillspec.recipes.osd.held_out import alpha_of
from distillspec.recipes.osd.study import Study
from distillspec.recipes.osd.tables import tables


def write_results(study: Study) -> str:
    """Write `results.json`, `results.md` and the plots. Return the tables.

    Recording, arms and cells have the provenance of the run that made them, None where an old run did not write it. The
    results as a whole have that of the tables.
    """
    finished = {name: read_object(study.arm(name)) for name in ARMS if study.arm(name).is_file()}
    offline, grid = (study.finished(part) for part in ("offline", "grid"))
    segments = len(study.segments)
    shares = tail_shares(finished, offline, segments)
    arms = {name: _estimated(arm, shares) for name, arm in finished.items()}
    results: dict[str, Any] = {"settings": study.settings(), "recording": study.finished("stream")}
    if "static" in arms:
        static = arms["static"]["requests"]
        results |= {
            "tail_shares": shares,
            "bias": bias_by_arm(arms, shares),
            "check": _check(static),
            "arms": {name: _arm_figures(arm, static, study) for name, arm in arms.items()},
            "offline": {name: _offline_figures(cell, study) for name, cell in offline.items()},
            "goals": goals(arms, offline, segments, study.seed),
            "grid": {name: _grid_figures(_estimated(cell, shares), static, study) for name, cell in grid.items()},
        }
        plot_acceptance(arms, study, study.root / "acceptance.png")
        plot_offline(arms, offline, study, study.root / "offline.png")
    write_json(study.part("results"), {**results, "provenance": provenance([], study.seed)})
    text = tables(results, study)
    write_text(study.root / "results.md", text)
    return text


def _estimated(arm: dict[str, Any], shares: list[float]) -> dict[str, Any]:
    return {**arm, "requests": estimate(arm["requests"], shares)}


def _arm_figures(arm: dict[str, Any], static: list[Row], study: Study) -> dict[str, Any]:
    rows, segments = arm["requests"], range(len(study.segments))
    return {
        "alpha": alpha(rows),
        "gain": asdict(gain(rows, static, study.seed)),
        "first_half": [alpha(half(rows, segment, 0)) for segment in segments],
        "second_half": [alpha(half(rows, segment, 1)) for segment in segments],
        "exam_at_end": [alpha_of(arm["exams"][str(segment)][str(segment)]) for segment in segments],
        "first_exam_at_end": [alpha_of(arm["exams"][str(segment)]["0"]) for segment in segments],
        "requests": [[row["segment"], row["tokens"], round(row["alpha"], 3)] for row in rows],
        "updates_after": [[update["after"], update["reason"]] for update in arm["updates"]],
        **_work(arm),
    }


def _offline_figures(cell: dict[str, Any], study: Study) -> dict[str, Any]:
    sums, positions = ([row[field] for row in cell["exam"]] for field in ("alpha", "positions"))
    training = {name: cell["learnt"][name] for name in ("tokens", "seconds", "cpu_s")}
    alpha = asdict(interval(sums, positions, SAMPLES, study.seed))
    return {"alpha": alpha, "requests": cell["requests"], **training, "provenance": cell.get("provenance")}


def _grid_figures(cell: dict[str, Any], static: list[Row], study: Study) -> dict[str, Any]:
    rows = half(cell["requests"], study.grid_segment, 1)
    difference = gain(rows, half(static, study.grid_segment, 1), study.seed)
    return {"second_half": alpha(rows), "gain": asdict(difference), **_work(cell)}


def _work(arm: dict[str, Any]) -> dict[str, Any]:
    """Sum the costs of the updates, and pass the provenance on."""
    updates = arm["updates"]
    sums = {name: sum(update[name] for update in updates) for name in ("tokens", "steps", "seconds")}
    training = {f"training_{name}": value for name, value in sums.items()}
    return {"updates": len(updates), **training, "provenance": arm.get("provenance")}


def _check(rows: list[Row]) -> dict[str, Any]:
    """Compare α = accepted / tried of the draft that served, as served and as redrawn."""
    tried, accepted = (sum(row[name] for row in rows) for name in ("tried", "accepted"))
    served_tried, served = (sum(row[name] for row in rows) for name in ("served_tried", "served_accepted"))
    return {"drawn": accepted / tried, "served": served / served_tried, "served_tried": served_tried}
