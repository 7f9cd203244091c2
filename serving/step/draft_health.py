"""Failures of the proposer: speculation pauses, and the cause is logged once."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

from distillspec.serving.proposers.base import ProposalRequest, Proposer, readers
from distillspec.serving.step.backoff import Backoff

log = logging.getLogger(__name__)


class DraftHealth:
    """Failures of one proposer. A failure never ends a request: it only pauses speculation."""

    def __init__(self) -> None:
        self._backoff = Backoff()
        self._logged: set[tuple[object, ...]] = set()  # kinds of failure

    @property
    def paused(self) -> bool:
        """True while the proposer is not asked."""
        return self._backoff.waits

    def step(self) -> None:
        """Count a step."""
        self._backoff.step()

    def succeeded(self) -> None:
        """Count a proposal that raised nothing."""
        self._backoff.succeeded()

    def failed(self, proposer: Proposer, requests: Sequence[ProposalRequest], error: Exception) -> None:
        """Pause speculation, longer after each failure in a row, and reset the proposer's state of these rows.

        Each place in the code that raises is logged once.
        """
        steps = self._backoff.failed()
        for request in requests:
            for reader in readers(proposer):
                reader.distrust(request.sequence)
            request.sequence.speculation_failed = True
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = (type(error), place.filename, place.lineno)
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(
                "no speculation for %d steps: the proposer failed (%s: %s); it is tried again, and failures of this "
                "kind are not logged again",
                steps,
                type(error).__name__,
                error,
            )
