"""The study's figures: α by arm and half segment, the goals and whether they are met, tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from distillspec.evaluation.bootstrap import interval, relative_gain
from distillspec.files import write_json, write_text
from distillspec.recipes.osd.arms import ARMS
from distillspec.recipes.osd.exams import alpha_of
from distillspec.recipes.osd.figures import plot_acceptance, plot_offline
from distillspec.recipes.osd.grid import cells
from distillspec.recipes.osd.study import Study
from distillspec.types import Interval

SAMPLES = 1000
GAIN, SHARE = 0.10, 0.95  # the goals: absolute over static, and of the rival's or the earlier α

Row = dict[str, Any]


def write_results(study: Study) -> str:
    """Write `results.json`, `results.md` and plots of whatever parts are there; returns the tables."""
    found, offline, grid, recorded = (_read(study, part) for part in ("arms", "offline", "grid", "stream"))
    arms = {name: found[name] for name in ARMS if name in found}
    results = {
        "settings": study.settings(),
        "recording": recorded,
        "arms": {name: _arm_figures(arm, arms["static"], study) for name, arm in arms.items()} if arms else {},
        "offline": {name: _exam(cell["exam"], study) | _cost(cell) for name, cell in offline.items()},
        "bias": _bias(arms, offline),
        "check": _check(arms.get("static")),
        "goals": goals(arms, offline, study) if arms else {},
        "grid": {name: _grid_figures(cell, arms["static"], study) for name, cell in grid.items()} if arms else {},
    }
    write_json(study.part("results"), results)
    text = "\n".join([_arms_table(results, study), _offline_table(results, study), _goals_table(results, study)])
    text = "\n".join([text, _grid_table(results, study)])
    write_text(study.root / "results.md", text)
    if arms:
        plot_acceptance(arms, study, study.root / "acceptance.png")
    if arms and offline:
        plot_offline(arms, offline, study, study.root / "offline.png")
    return text


def goals(arms: dict[str, Any], offline: dict[str, Any], study: Study) -> dict[str, Any]:
    """By arm and goal, the figure for each segment it is about; the goals are the issue's."""
    last, found = len(study.segments) - 1, {}
    for name, arm in arms.items():
        if name == "static":
            continue
        exams = arm["exams"]
        found[name] = {
            "gain": {
                segment: asdict(
                    _gain(_late(arm["requests"], segment), _late(arms["static"]["requests"], segment), study)
                )
                for segment in range(1, last + 1)
            },
            "of_offline": {
                segment: asdict(_ratio(offline[f"{segment}/1"]["exam"], exams[str(segment)][str(segment)], study))
                for segment in range(last + 1)
                if f"{segment}/1" in offline
            },
            "kept": asdict(_ratio(exams["0"]["0"], exams[str(last - 1)]["0"], study)),
            "returned": _alpha(_of(arm["requests"], last)) / _alpha(_of(arm["requests"], 0)),
        }
    return found


def _gain(rows: Sequence[Row], static: Sequence[Row], study: Study) -> Interval:
    """Σ of differences by request / tokens: what one request has easy or hard for both cancels."""
    differences = [row["upper"] - other["upper"] for row, other in zip(rows, static, strict=True)]
    return interval(differences, [row["tokens"] for row in rows], SAMPLES, study.seed)


def _ratio(before: Sequence[Row], after: Sequence[Row], study: Study) -> Interval:
    """α of one sheet as a share of another's, on the same answers."""
    parts = [([row["alpha"] for row in sheet], [row["positions"] for row in sheet]) for sheet in (before, after)]
    gain = relative_gain(parts[0], parts[1], SAMPLES, study.seed)
    return Interval(1 + gain.mean, 1 + gain.low, 1 + gain.high)


def _of(rows: Sequence[Row], segment: int) -> list[Row]:
    return [row for row in rows if row["segment"] == segment]


def _late(rows: Sequence[Row], segment: int) -> list[Row]:
    """The second half of a segment."""
    own = _of(rows, segment)
    return own[len(own) // 2 :]


def _early(rows: Sequence[Row], segment: int) -> list[Row]:
    own = _of(rows, segment)
    return own[: len(own) // 2]


def _alpha(rows: Sequence[Row], field: str = "upper") -> float:
    return sum(row[field] for row in rows) / sum(row["tokens"] for row in rows)


def _arm_figures(arm: dict[str, Any], static: dict[str, Any], study: Study) -> dict[str, Any]:
    rows, places = arm["requests"], range(len(study.segments))
    return {
        "alpha": _alpha(rows),
        "gain": asdict(_gain(rows, static["requests"], study)),
        "first_half": [_alpha(_early(rows, place)) for place in places],
        "second_half": [_alpha(_late(rows, place)) for place in places],
        "exam_at_end": [alpha_of(arm["exams"][str(place)][str(place)]) for place in places],
        "first_exam_at_end": [alpha_of(arm["exams"][str(place)]["0"]) for place in places],
        "updates": len(arm["updates"]),
        "trained_tokens": sum(update["tokens"] for update in arm["updates"]),
        "training_s": sum(update["seconds"] for update in arm["updates"]),
        "requests": [[row["segment"], row["tokens"], row["upper"]] for row in rows],
        "updates_after": [[update["after"], update["reason"]] for update in arm["updates"]],
    }


def _exam(sheet: Sequence[Row], study: Study) -> dict[str, Any]:
    sums, positions = [row["alpha"] for row in sheet], [row["positions"] for row in sheet]
    return {"alpha": asdict(interval(sums, positions, SAMPLES, study.seed))}


def _cost(cell: dict[str, Any]) -> dict[str, Any]:
    return {"requests": cell["requests"], "tokens": cell["learnt"]["tokens"], "seconds": cell["learnt"]["seconds"]}


def _bias(arms: dict[str, Any], offline: dict[str, Any]) -> dict[str, Any]:
    """What the log's best tokens say against whole distributions, over every exam of the study."""
    sheets = [sheet for arm in arms.values() for by_segment in arm["exams"].values() for sheet in by_segment.values()]
    rows = [row for sheet in [*sheets, *(cell["exam"] for cell in offline.values())] for row in sheet]
    return {field: alpha_of(rows, field) for field in ("alpha", "upper", "lower")} if rows else {}


def _check(static: dict[str, Any] | None) -> dict[str, Any]:
    """Outcomes drawn anew for the draft that really served, against those that were served."""
    if static is None:
        return {}
    rows = static["requests"]
    drawn, served = (
        sum(row[f"{kind}accepted"] for row in rows) / sum(row[f"{kind}tried"] for row in rows)
        for kind in ("", "served_")
    )
    return {"drawn": drawn, "served": served, "tried": sum(row["served_tried"] for row in rows)}


def _grid_figures(cell: dict[str, Any], static: dict[str, Any], study: Study) -> dict[str, Any]:
    rows = _late(cell["requests"], study.grid_segment)
    return {
        "second_half": _alpha(rows),
        "gain": asdict(_gain(rows, _late(static["requests"], study.grid_segment), study)),
        "updates": len(cell["updates"]),
        "trained_tokens": sum(update["tokens"] for update in cell["updates"]),
        "training_s": sum(update["seconds"] for update in cell["updates"]),
    }


def _arms_table(results: dict[str, Any], study: Study) -> str:
    lines = [
        f"| α, first → second half | {' | '.join(_titles(study))} | all | updates | training |",
        f"|---|{'---|' * len(study.segments)}---|---|---|",
    ]
    for name, arm in results["arms"].items():
        halves = zip(arm["first_half"], arm["second_half"], strict=True)
        cells_ = " | ".join(f"{early:.3f} → {late:.3f}" for early, late in halves)
        lines.append(f"| {name} | {cells_} | {arm['alpha']:.3f} | {arm['updates']} | {arm['training_s']:.0f} s |")
    return "\n".join(lines) + "\n"


def _offline_table(results: dict[str, Any], study: Study) -> str:
    lines = [
        f"| α on held-out answers | {' | '.join(_titles(study))} |",
        f"|---|{'---|' * len(study.segments)}",
    ]
    for name, arm in results["arms"].items():
        lines.append(f"| {name}, at the segment's end | {' | '.join(f'{a:.3f}' for a in arm['exam_at_end'])} |")
    for fraction in study.fractions:
        found = [results["offline"].get(f"{place}/{fraction:g}") for place in range(len(study.segments))]
        shown = " | ".join("–" if cell is None else f"{cell['alpha']['mean']:.3f}" for cell in found)
        lines.append(f"| offline on {fraction:.0%} of the segment | {shown} |")
    return "\n".join(lines) + "\n"


def _goals_table(results: dict[str, Any], study: Study) -> str:
    titles = _titles(study)
    lines = [
        f"| arm | gain over static, second half: {', '.join(titles[1:])} (goal +{GAIN:.2f}) "
        f"| of offline on 100 %: {', '.join(titles)} (goal {SHARE}) | {titles[0]} kept at the return (goal {SHARE}) "
        "| α on return / α at first |",
        "|---|---|---|---|---|",
    ]
    for name, found in results["goals"].items():
        gains = ", ".join(_marked(g["mean"], GAIN, "+.3f") for g in found["gain"].values())
        shares = ", ".join(_marked(s["mean"], SHARE, ".3f") for s in found["of_offline"].values())
        kept, returned = _marked(found["kept"]["mean"], SHARE, ".3f"), _marked(found["returned"], SHARE, ".3f")
        lines.append(f"| {name} | {gains} | {shares} | {kept} | {returned} |")
    return "\n".join(lines) + "\nBold: the goal is met.\n"


def _grid_table(results: dict[str, Any], study: Study) -> str:
    lines = [
        "| loss | positions | every | α, second half | over static | updates | tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for loss, positions, every in cells(study):
        found = results["grid"].get(f"{loss}-{positions}-{every}")
        if found is not None:
            gain = found["gain"]
            shown = f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
            figures = f"{found['second_half']:.3f} | {shown} | {found['updates']} | {found['trained_tokens']:,}"
            lines.append(f"| {loss} | {positions} | {every} | {figures} |")
    return "\n".join(lines) + "\n"


def _marked(value: float, goal: float, form: str) -> str:
    shown = format(value, form)
    return f"**{shown}**" if value >= goal else shown


def _titles(study: Study) -> list[str]:
    return [segment.domain for segment in study.segments]


def _read(study: Study, part: str) -> dict[str, Any]:
    file = study.part(part)
    return json.loads(file.read_text()) if file.is_file() else {}
