"""Sources without a model beside the drafts: the share of the steps in which they draft and no draft does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from distillspec.serving.base.acceptance import Trial
from distillspec.serving.base.rows import RowView
from distillspec.serving.selection.accepting import domain_index

STRENGTH = 30.0  # steps that the share of an answer's domain counts for, beside the answer's own
MEMORY = 2000.0  # steps of a domain after which evidence has half its weight
SHARE = 0.2  # that is assumed while nothing is known of a domain


class FreeShare:
    """Learns, for each domain, how often one of these sources drafts for a row, and which of them is accepted most.

    In such a step a draft brings the row nothing. So a draft is worth less the more often the text repeats itself.

    Args:
        sources: without a model.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self.sources = tuple(sources)
        self._steps: dict[int, tuple[float, float]] = {}  # by domain: all, and those of these sources
        self._accepted = Counter[str]()  # tokens

    def saw(self, row: RowView, trials: Iterable[Trial]) -> bool:
        """Count a step of a row. Return True if one of these sources drafted in it, and no draft."""
        if not self.sources:
            return False
        by_source = list(trials)
        self._accepted.update([trial.source for trial in by_source if trial.accepted and trial.source in self.sources])
        free = bool(by_source) and all(trial.source in self.sources for trial in by_source)
        steps, free_steps = self._steps.get(domain_index(row), (0.0, 0.0))
        kept = 0.5 ** (1 / MEMORY)
        self._steps[domain_index(row)] = kept * steps + 1, kept * free_steps + free
        return free

    def of(self, row: RowView, steps: int, free: int) -> float:
        """Return the share of an answer's further steps, 0 without such sources.

        Args:
            steps: of the answer so far.
            free: those in which one of these sources drafted.
        """
        if not self.sources:
            return 0.0
        domain_steps, free_steps = self._steps.get(domain_index(row), (0.0, 0.0))
        usual = (free_steps + SHARE * STRENGTH) / (domain_steps + STRENGTH)
        return (free + usual * STRENGTH) / (steps + STRENGTH)

    @property
    def best(self) -> str:
        """The source of which the most tokens were accepted, the first one before any."""
        return max(self.sources, key=lambda source: self._accepted[source])
