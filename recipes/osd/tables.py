"""Tables of the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distillspec.recipes.osd.goals import GAIN, RETURN, SHARE
from distillspec.recipes.osd.grid import cells
from distillspec.recipes.osd.study import Study

Figures = dict[str, Any]


def tables(results: Figures, study: Study) -> str:
    """Return the results as Markdown tables. Without arms, one line says so."""
    if "arms" not in results:
        return "nothing but the stream yet\n"
    parts = [_halves(results, study), _held_out(results, study), _goals(results, study)]
    if results["grid"]:
        parts.append(_grid(results, study))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _halves(results: Figures, study: Study) -> Iterator[str]:
    yield f"| α, first → second half | {' | '.join(_titles(study))} | all | updates | tokens learnt from |"
    yield f"|---|{'---|' * len(study.segments)}---|---|---|"
    for name, arm in results["arms"].items():
        halves = zip(arm["first_half"], arm["second_half"], strict=True)
        by_segment = " | ".join(f"{early:.3f} → {late:.3f}" for early, late in halves)
        yield f"| {name} | {by_segment} | {arm['alpha']:.3f} | {arm['updates']} | {arm['training_tokens']:,} |"


def _held_out(results: Figures, study: Study) -> Iterator[str]:
    yield f"| α on held-out answers | {' | '.join(_titles(study))} |"
    yield f"|---|{'---|' * len(study.segments)}"
    for name, arm in results["arms"].items():
        yield f"| {name}, at the segment's end | {' | '.join(f'{alpha:.3f}' for alpha in arm['exam_at_end'])} |"
    for fraction in study.fractions:
        distilled = [results["offline"].get(f"{segment}/{fraction:g}") for segment in range(len(study.segments))]
        alphas = " | ".join("–" if cell is None else f"{cell['alpha']['mean']:.3f}" for cell in distilled)
        yield f"| offline on {fraction:.0%} of the segment | {alphas} |"


def _goals(results: Figures, study: Study) -> Iterator[str]:
    *shifted, last = _titles(study)[1:]
    yield (
        f"| arm | gain over static, second half: {', '.join(shifted)} (goal +{GAIN:.2f}) "
        f"| as a share of the rival's (goal {SHARE}) | {last} again (goal {RETURN}) | α there / α at first |"
    )
    yield "|---|---|---|---|---|"
    for name, figures in results["goals"].items():
        *gains, at_return = (cell["mean"] for cell in figures["gain"].values())
        shares = [figures["of_rival"].get(segment) for segment in range(1, len(study.segments) - 1)]
        yield (
            f"| {name} | {', '.join(_marked(gain, GAIN, '+.3f') for gain in gains)} "
            f"| {', '.join('–' if share is None else _marked(share, SHARE, '.2f') for share in shares)} "
            f"| {_marked(at_return, RETURN, '+.3f')} | {figures['returned']:.3f} |"
        )
    any_arm: Figures = next(iter(results["goals"].values()), {})
    rivals: dict[int, Figures] = any_arm.get("rival_gain", {})
    rival_gains = [f"{study.segments[segment].domain} {cell['mean']:+.3f}" for segment, cell in rivals.items()]
    yield f"| offline on 100 %, held-out answers | {', '.join(rival_gains)} | | | |"
    yield ""
    yield "Bold: the goal is met."


def _grid(results: Figures, study: Study) -> Iterator[str]:
    yield "| loss | positions | every | α, second half | over static | updates | tokens learnt from |"
    yield "|---|---|---|---|---|---|---|"
    for loss, positions, every in cells(study):
        cell = results["grid"].get(f"{loss}-{positions}-{every}")
        if cell is not None:
            gain = cell["gain"]
            over_static = f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
            work = f"{cell['updates']} | {cell['training_tokens']:,}"
            yield f"| {loss} | {positions} | {every} | {cell['second_half']:.3f} | {over_static} | {work} |"


def _marked(value: float, goal: float, form: str) -> str:
    text = format(value, form)
    return f"**{text}**" if value >= goal else text


def _titles(study: Study) -> list[str]:
    return [segment.domain for segment in study.segments]
