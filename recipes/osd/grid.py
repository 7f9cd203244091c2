"""Grid over loss, positions and interval: OSD's flush mode on one segment after a shift."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from distillspec.config import AdaptConfig, LossConfig
from distillspec.files import write_json
from distillspec.recipes.osd.arms import Arm, common, run_arm
from distillspec.recipes.osd.stream import Stream
from distillspec.recipes.osd.study import Study

POSITIONS = ("all", "rejected")


def fill_grid(study: Study, stream: Stream, tail_share: float) -> None:
    """Fill `grid.json`, cell by cell. Finished cells are kept."""
    file = study.part("grid")
    finished = study.finished("grid")
    part = replace(stream, answers=tuple(stream.of(study.grid_segment)))
    for loss, positions, every in cells(study):
        name = f"{loss}-{positions}-{every}"
        if name in finished:
            continue
        config = AdaptConfig(**common(study), mode="flush", on_drift=False, positions=positions, every_requests=every)
        finished[name] = run_arm(study, Arm(name, config, LossConfig(name=loss)), part, tail_share)
        write_json(file, finished)
        print(f"grid, {name}: {finished[name]['seconds']:.0f} s", flush=True)


def cells(study: Study) -> Iterator[tuple[str, str, int]]:
    """Yield (loss, positions, requests between updates), losses fastest, so that a cut grid compares losses."""
    for every, positions, loss in itertools.product(study.grid_intervals, POSITIONS, study.grid_losses):
        yield loss, positions, every
