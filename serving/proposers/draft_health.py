"""Failures of a proposer: it rests, and the cause is logged once."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Sequence

from distillspec.errors import RunError
from distillspec.serving.base.backoff import Backoff
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import NOTHING, Option
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.proposers.base import EMPTY, Foresees, ProposalRequest, Proposer, ReadsOn, readers

log = logging.getLogger(__name__)


class DraftHealth:
    """Failures of one proposer. A failure never ends a request: it only pauses what the proposer drafts.

    Args:
        name: of the proposer, for the log.
        sources: whose tokens it proposes, and that have failed for a row where it does.
    """

    def __init__(self, name: str, sources: Iterable[str]) -> None:
        self.name, self.sources = name, tuple(sources)
        self._backoff = Backoff()
        self._logged: set[tuple[object, ...]] = set()  # kinds of failure

    @property
    def paused(self) -> bool:
        """True while the proposer is not asked."""
        return self._backoff.waits

    def step(self) -> None:
        """Count a step."""
        self._backoff.step()

    def ask(self, proposer: Proposer, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        """Return what the proposer proposes, empty trees where it raises."""
        try:
            proposals = proposer.propose(requests)
            if len(proposals) != len(requests):
                raise RunError(f"{len(proposals)} trees for {len(requests)} rows")
        except Exception as error:  # a failing draft must never end a request
            self._failed(proposer, [request.sequence for request in requests], error)
            return [EMPTY] * len(requests)
        self._backoff.succeeded()
        return proposals

    def foresee(self, proposer: Foresees, sequence: SequenceState) -> tuple[Option, ...]:
        """Return what the proposer foresees for a row, nothing where it raises."""
        try:
            return proposer.foreseen(sequence)
        except Exception as error:
            self._failed(proposer, [sequence], error)
            return NOTHING

    def read(self, proposer: ReadsOn, texts: Sequence[tuple[SequenceState, int]]) -> None:
        """Let the proposer read on in texts."""
        try:
            proposer.read_on(texts)
        except Exception as error:
            self._failed(proposer, [sequence for sequence, _ in texts], error)

    def _failed(self, proposer: object, sequences: Sequence[SequenceState], error: Exception) -> None:
        """Pause, longer after each failure in a row, and reset the proposer's state of these rows.

        Each place in the code that raises is logged once.
        """
        steps = self._backoff.failed()
        for sequence in sequences:
            for reader in readers(proposer):
                reader.distrust(sequence)
            sequence.failed_sources.update(self.sources)
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = (type(error), place.filename, place.lineno)
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(
                "no speculation for %d steps: %s failed (%s: %s); it is tried again, and failures of this kind are not "
                "logged again",
                steps,
                self.name,
                type(error).__name__,
                error,
            )
