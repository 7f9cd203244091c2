"""`python -m distillspec.recipes.smartspec`: every figure as PNG and CSV, and its agreement with the paper.

Run it again after an interruption: finished figures are kept. With `--live` Figs. 15 and 16 are measured instead, on a
target and a draft: `--live --prompts FILE --draft RUN`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from distillspec.errors import ConfigError, RunError
from distillspec.files import read_object, write_json, write_text
from distillspec.recipes.arguments import check_prompts
from distillspec.recipes.smartspec.claims import claims
from distillspec.recipes.smartspec.latency_figures import sweeps
from distillspec.recipes.smartspec.live import FIXED, LiveLoads
from distillspec.recipes.smartspec.surface import write_surface
from distillspec.recipes.smartspec.sweeps import run_sweep
from distillspec.recipes.smartspec.tree_lengths import write_lengths
from distillspec.serving.simulation.figures import RunFigures, plot_latency, write_figures

FORMULAS = {"fig05": write_surface, "eq10": write_lengths}  # figures that need no simulation


def main() -> int:
    options = _options()
    try:
        return _live(options) if options.live else _study(options)
    except ConfigError as error:
        print(f"smartspec: {error}", file=sys.stderr)
        return 2
    except RunError as error:  # a full disk, say
        print(f"smartspec: {error}", file=sys.stderr)
        return 1


def _study(options: argparse.Namespace) -> int:
    options.output.mkdir(parents=True, exist_ok=True)
    results = _finished(options)
    for name in options.figures:
        if name in results["figures"]:
            continue
        started_s = time.monotonic()
        results["figures"][name] = _formula(name, options) if name in FORMULAS else _figure(name, options)
        print(f"{name}: {time.monotonic() - started_s:.0f} s", flush=True)
        write_json(options.output / "results.json", results)
        write_text(options.output / "agreement.md", _table(results))
    print(_table(results))
    print(f"results: {options.output}")
    return 0


def _live(options: argparse.Namespace) -> int:
    names = [field.name for field in fields(LiveLoads)]
    print(LiveLoads(**{name: getattr(options, name) for name in names}).run(options.output))
    print(f"results: {options.output}")
    return 0


def _finished(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of an earlier run with the same scale and seed."""
    file, settings = options.output / "results.json", {"scale": options.scale, "seed": options.seed}
    earlier = read_object(file)
    same = all(earlier.get(name) == value for name, value in settings.items())
    return {**settings, "figures": earlier["figures"] if earlier and same else {}}


def _formula(name: str, options: argparse.Namespace) -> dict[str, Any]:
    return {"claims": [asdict(claim) for claim in FORMULAS[name](options.output)]}


def _figure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    sweep = sweeps()[name]
    runs = run_sweep(sweep, options.scale, options.seed)
    write_figures(runs, options.output / f"{name}.csv")
    plot_latency(runs, options.output / f"{name}.png", sweep.title)
    return {"claims": [asdict(claim) for claim in claims(name, runs)], "mean_latency_s": _key_figures(runs)}


def _key_figures(runs: list[RunFigures]) -> dict[str, dict[str, float]]:
    """Return the mean latency by rate and policy, to four digits."""
    by_rate: dict[str, dict[str, float]] = {}
    for run in runs:
        by_rate.setdefault(f"{run.rate:g}", {})[run.policy] = float(f"{run.mean_latency_s:.4g}")
    return by_rate


def _table(results: dict[str, Any]) -> str:
    lines = ["| figure | the paper | here | agrees |", "|---|---|---|---|"]
    for figure in results["figures"].values():
        for claim in figure["claims"]:
            agrees = "yes" if claim["holds"] else "no"
            lines.append(f"| {claim['figure']} | {claim['claim']} | {claim['seen']} | {agrees} |")
    return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    known = [*FORMULAS, *sweeps()]
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.smartspec", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/study/smartspec"), help="where everything goes")
    parser.add_argument("--figures", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--scale", type=float, default=1.0, help="requests of every run, relative")
    parser.add_argument("--seed", type=int, default=0)
    _add_live(parser)
    options = parser.parse_args()
    if not 0 < options.scale <= 100:
        parser.error(f"--scale {options.scale} must be above 0 and at most 100")
    if options.seed < 0:
        parser.error(f"--seed {options.seed} must be at least 0")
    if options.live:
        _check_live(parser, options)
    return options


def _add_live(parser: argparse.ArgumentParser) -> None:
    live = parser.add_argument_group("--live")
    live.add_argument("--live", action="store_true", help="measure Figs. 15 and 16 on the engine")
    live.add_argument("--prompts", default="", help="JSON, JSONL, CSV or Parquet with a prompt column")
    live.add_argument("--draft", default="", help="a run or folder with a draft")
    live.add_argument("--target", default=LiveLoads.target)
    live.add_argument("--tree", default=LiveLoads.tree, help="as engine.tree")
    live.add_argument("--fixed", nargs="+", default=FIXED, help="shapes to choose the best of")
    live.add_argument("--loads", type=float, nargs="+", default=LiveLoads.loads, help="shares of capacity")
    for name in ("rounds", "slots", "count", "tokens"):
        live.add_argument(f"--{name}", type=int, default=getattr(LiveLoads, name))
    live.add_argument("--seconds", type=float, default=LiveLoads.seconds, help="of arrivals a round")
    live.add_argument("--temperature", type=float, default=LiveLoads.temperature)


def _check_live(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not (options.prompts and options.draft):
        parser.error("--live needs --prompts and --draft")
    check_prompts(parser, options.prompts)
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: an odd and an even one are needed, so at least 2")
    for name in ("slots", "count", "tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be at least 1")


if __name__ == "__main__":
    sys.exit(main())
