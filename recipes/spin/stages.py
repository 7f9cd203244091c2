"""Stages of a study: each simulates one figure, named by its keys in the study's JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from distillspec.progress import progress

Figures = MutableMapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """One figure.

    Attributes:
        keys: those that lead to it.
        simulate: returns it, in another process too.
    """

    keys: tuple[str, ...]
    simulate: Callable[[], Any]

    def is_in(self, figures: Figures) -> bool:
        """Return True if the figure is known."""
        return self.keys[-1] in self._around(figures)

    def put(self, figures: Figures, figure: Any) -> None:
        """Set the figure."""
        self._around(figures)[self.keys[-1]] = figure

    def _around(self, figures: Figures) -> Figures:
        for key in self.keys[:-1]:
            figures = figures.setdefault(key, {})
        return figures


def fill(figures: Figures, stages: Sequence[Stage], jobs: int, after_each: Callable[[], None]) -> None:
    """Simulate the figures that are missing, in order, and set each as soon as it is known.

    Args:
        jobs: processes. With 1 all is simulated in this one. Figures do not depend on it.
    """
    missing = [stage for stage in stages if not stage.is_in(figures)]
    with progress("simulating") as line:
        for done, (stage, figure) in enumerate(_simulated(missing, jobs), start=1):
            stage.put(figures, figure)
            after_each()
            line.update(done / len(missing), " ".join(stage.keys))


def _simulated(stages: Sequence[Stage], jobs: int) -> Iterator[tuple[Stage, Any]]:
    """Yield each stage with its figure, when it is known."""
    if jobs == 1 or len(stages) < 2:
        yield from ((stage, stage.simulate()) for stage in stages)
        return
    # Not forked: the live part may have run in this process, with threads.
    with ProcessPoolExecutor(min(jobs, len(stages)), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(stage.simulate): stage for stage in stages}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
