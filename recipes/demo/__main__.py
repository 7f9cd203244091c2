"""`./scripts/demo`: SmolLM2 writes prompts and answers, a small draft learns from them, and a page shows the gain."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

from distillspec.cli import main as distill

SERVE = ". .venv/bin/activate && pip install -e '.[serve,demo]' -c constraints.txt && distill serve"


def main() -> int:
    options = _options()
    run = Path("runs") / "demo" / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
    print(f"A demo of about {options.minutes:g} minutes; everything goes to {run}", flush=True)
    code = distill(["train", *overrides(options.minutes, options.target), f"hydra.run.dir={run}"])
    if code == 0:
        code = distill(["report", f"runs=[{run}]", f"hydra.run.dir={run / 'report'}", "title=A draft for SmolLM2"])
    if code == 0:
        print(f"\nOpen {run / 'report' / 'report.html'} in a browser. Serve the draft:\n{SERVE} draft.path={run}")
    return code


def overrides(minutes: float, target: str) -> list[str]:
    """Return the preset `ten-minutes` with amounts that fill about `minutes` on 2 cores.

    A quarter of the time goes to sampling, two fifths to training.
    """
    large = minutes >= 15
    small_vocabulary = ["draft.vocabulary=128"] if target == "tiny" else []
    return [
        "experiment=ten-minutes",
        f"target={target}",
        *small_vocabulary,
        f"data.num_prompts={max(24, int(40 * minutes))}",
        f"data.eval_prompts={36 if large else 18}",  # a third of them choose the best checkpoint
        f"data.max_new_tokens={192 if large else 96}",
        f"data.max_minutes={0.25 * minutes:g}",
        f"train.max_minutes={0.4 * minutes:g}",
        f"train.eval_max_prompts={12 if large else 6}",
        "evaluation.measure_speedup=true",
        f"evaluation.speedup_prompts={8 if large else 6}",  # with fewer than 6 the speed-up is not decided
        f"evaluation.speedup_tokens={96 if large else 48}",
        f"evaluation.cost_batches={'[1,8]' if large else '[1]'}",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--minutes", type=float, default=22.0, help="about how long it may take (default 22)")
    parser.add_argument("--target", default="smollm2", help="smollm2 (default) or tiny")
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g} must be above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
