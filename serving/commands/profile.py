"""`distill profile`: measure the costs of target and draft passes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distillspec.commands.drafts import find_drafts
from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import ProfileCommand
from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.files import write_png
from distillspec.models import load_target
from distillspec.progress import progress
from distillspec.serving.costs.fitted import Fitted
from distillspec.serving.costs.hardware_profile import FILE, Profile
from distillspec.serving.draft_loading import device_of_drafts, load_drafts
from distillspec.serving.engine import Engine
from distillspec.serving.profiler import Grid, measure


def run(config: ProfileCommand, folder: Path) -> None:
    """Write `profile.json`, `fit.png` (predicted against measured, as SmartSpec's Fig. 7) and `summary.json`."""
    torch.manual_seed(config.seed)
    target = load_target(config.target)
    device = device_of_drafts(config.draft.device, target)
    drafts = load_drafts(find_drafts(config.drafts) or config.draft.path, target, device)
    chosen = config.profile
    grid = Grid(chosen.contexts, chosen.rows, chosen.lengths, chosen.prompts, chosen.rounds, chosen.held_out)
    settings = EngineConfig(
        max_slots=max(chosen.rows),
        max_model_len=grid.longest_text,
        speculation_length=max(chosen.lengths),
        compile=chosen.compile,
        pack_weights=chosen.pack_weights,
    )
    engine = Engine(target, drafts, settings)
    rows = engine.limits.cache_tokens // engine.max_model_len
    if rows < max(chosen.rows):
        raise ConfigError(f"profile.rows={chosen.rows}: memory is there for {rows} rows; name fewer")
    open_run(folder, config)
    with progress("timing passes") as line:
        profile = measure(
            engine,
            grid,
            seed=config.seed,
            on_pass=lambda done, total: line.update(done / total, f"{done} of {total} passes"),
        )
    engine.close()
    profile.save(folder / FILE)
    plot(profile, folder / "fit.png")
    print(_table(profile))
    print("\n".join(_over_plain(profile)))
    figures = {name: _figures(fitted) for name, fitted in _parts(profile).items()}
    close_run(
        folder,
        "profile",
        {
            "profile": str(folder / FILE),
            "machine": dict(profile.machine),
            "costs": figures,
            "host": profile.host._asdict(),
        },
    )


def plot(profile: Profile, path: Path) -> None:
    """Write a PNG of measured against predicted milliseconds of every point, held-out ones filled."""
    # Imported here: it takes a second. No global backend is touched.
    from matplotlib.figure import Figure

    parts = _parts(profile)
    figure = Figure(figsize=(5 * len(parts), 4.5), dpi=110, layout="constrained")
    for axes, (name, fitted) in zip(figure.subplots(1, len(parts)), parts.items(), strict=True):
        _draw(axes, name, fitted)
    write_png(path, figure)


def _draw(axes: Any, name: str, fitted: Fitted) -> None:
    for held_out, face, label in ((False, "none", "fitted"), (True, "C1", "held out")):
        points = [point for point in fitted.points if point.held_out == held_out]
        measured, predicted = ([1e3 * p.seconds for p in points], [1e3 * fitted.predicted(p) for p in points])
        axes.scatter(measured, predicted, s=18, facecolors=face, edgecolors="C1" if held_out else "C0", label=label)
    longest = 1e3 * max(point.seconds for point in fitted.points)
    axes.plot([0, longest], [0, longest], color="grey", linewidth=1)
    axes.set(title=f"{name}: off by {100 * fitted.held_out_error:.1f} %", xlabel="measured ms", ylabel="predicted ms")
    axes.legend(fontsize="small")


def _parts(profile: Profile) -> dict[str, Fitted]:
    return {"target": profile.target_cost, **{source: draft.cost for source, draft in profile.drafts.items()}}


def _figures(fitted: Fitted) -> dict[str, Any]:
    cost = fitted.cost
    return {
        "seconds_by_tokens": {f"{tokens:g}": seconds for tokens, seconds in cost.knots},
        "per_context_s": cost.per_context,
        "per_row_s": cost.per_row,
        "first_s": cost.first,
        "held_out_error": fitted.held_out_error,
        "points": len(fitted.points),
    }


def _over_plain(profile: Profile) -> list[str]:
    """Describe costs of verification relative to plain passes, shortest contexts first."""
    lines = ["verification over the plain pass beside it, median of rounds [95 % interval]"]
    for point in profile.target_cost.points:
        if point.over_plain is not None:
            mean, low, high = point.over_plain
            note = "; below 1 is noise or a slow plain pass, and counts as 1" if mean < 1 else ""
            tokens = f"{point.tokens:.0f} tokens, {point.context:.0f} cached"
            lines.append(f"  {tokens:<28}{mean:.2f} [{low:.2f}, {high:.2f}]{note}")
    if len(lines) == 1:
        return ["profile.lengths has no 0: verification is not compared with plain passes"]
    return lines


def _table(profile: Profile) -> str:
    parts = _parts(profile)
    wide = max(map(len, parts)) + 2
    names = f"{'per 1,000 context':>18}{'per row':>12}{'first pass':>12}{'held-out error':>16}"
    lines = [f"{'pass':<{wide}}{names}  ms by tokens"]
    for name, fitted in parts.items():
        cost = fitted.cost
        knots = ", ".join(f"{tokens:g}: {1e3 * seconds:.1f}" for tokens, seconds in cost.knots)
        times = f"{1e6 * cost.per_context:>15.3f} ms{1e3 * cost.per_row:>9.3f} ms{1e3 * cost.first:>9.3f} ms"
        lines.append(f"{name:<{wide}}{times}{100 * fitted.held_out_error:>14.1f} %  {knots}")
    lines.append(f"outside passes: {1e3 * profile.host.step_s:.2f} ms a step, {1e3 * profile.host.row_s:.3f} ms a row")
    return "\n".join(lines)
