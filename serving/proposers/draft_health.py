"""Failures of a proposer: it rests, and the cause is logged once."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from distillspec.errors import RunError
from distillspec.serving.base.backoff import Backoff
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import NOTHING, Option
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.proposers.base import (
    EMPTY,
    Foresees,
    ProposalRequest,
    Proposer,
    ReadsOn,
    SeesLogits,
    readers,
)

log = logging.getLogger(__name__)


class DraftHealth:
    """One proposer, and its failures. One never ends a request or a step: it only pauses what the proposer drafts.

    Args:
        name: of the proposer, for the log.
        sources: whose tokens it proposes, and that have failed for a row where it does.
    """

    def __init__(self, proposer: Proposer | None, name: str, sources: Iterable[str]) -> None:
        self.proposer, self.name, self.sources = proposer, name, tuple(sources)
        # Asking protocols takes microseconds, too many for every row of every step.
        self._foresees: Foresees | None = proposer if isinstance(proposer, Foresees) else None
        self._sees: SeesLogits | None = proposer if isinstance(proposer, SeesLogits) else None
        self._reads: ReadsOn | None = proposer if isinstance(proposer, ReadsOn) else None
        self._backoff = Backoff()
        self._rest = 0  # steps that a failure in this step costs, 0 without one: what rows share fails for each of them
        self._logged: set[tuple[object, ...]] = set()  # kinds of failure

    @property
    def paused(self) -> bool:
        """True while the proposer is not asked."""
        return self._backoff.waits

    def step(self) -> None:
        """Count a step."""
        self._rest = 0
        self._backoff.step()

    def ask(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        """Return what the proposer proposes, empty trees where it raises."""
        assert self.proposer is not None
        try:
            proposals = self.proposer.propose(requests)
            if len(proposals) != len(requests):
                raise RunError(f"{len(proposals)} trees for {len(requests)} rows")
        except Exception as error:  # a failing draft must never end a request
            self._failed([request.sequence for request in requests], error)
            return [EMPTY] * len(requests)
        self._backoff.succeeded()
        return proposals

    def foreseen(self, sequence: SequenceState, otherwise: tuple[Option, ...]) -> tuple[Option, ...]:
        """Return what the proposer foresees for a row, nothing while it rests or where it raises.

        Args:
            otherwise: returned for a proposer that cannot foresee.
        """
        if self.paused:
            sequence.failed_sources.update(self.sources)
            return NOTHING
        if self._foresees is None:
            return otherwise
        try:
            return self._foresees.foreseen(sequence)
        except Exception as error:
            self._failed([sequence], error)
            return NOTHING

    def read_on(self, texts: Sequence[tuple[SequenceState, int]]) -> None:
        """Let a proposer that can read on in texts."""
        if (reads := self._reads) is not None and not self.paused:
            self._tell([sequence for sequence, _ in texts], lambda: reads.read_on(texts))

    def see(self, windows: Sequence[VerificationWindow], logits: Tensor) -> None:
        """Show a step's logits to a proposer that learns from them."""
        if (sees := self._sees) is not None:
            self._tell([window.sequence for window in windows], lambda: sees.see(windows, logits))

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Tell the proposer which nodes of a row's tree were accepted."""
        if (proposer := self.proposer) is not None:
            self._tell([sequence], lambda: proposer.committed(sequence, tree, path))

    def leave_slot(self, sequence: SequenceState) -> None:
        """Tell the proposer that a sequence has left its slot."""
        if (proposer := self.proposer) is not None:
            self._tell([sequence], lambda: proposer.leave_slot(sequence))

    def _tell(self, sequences: Sequence[SequenceState], call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failed(sequences, error)

    def _failed(self, sequences: Sequence[SequenceState], error: Exception) -> None:
        """Pause, longer after each step with a failure, and reset the proposer's state of these rows.

        Each place in the code that raises is logged once.
        """
        self._rest = self._rest or self._backoff.failed()
        for sequence in sequences:
            for reader in readers(self.proposer):
                reader.distrust(sequence)
            sequence.failed_sources.update(self.sources)
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = (type(error), place.filename, place.lineno)
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(
                "no speculation for %d steps: %s failed (%s: %s); it is tried again, and failures of this kind are not "
                "logged again",
                self._rest,
                self.name,
                type(error).__name__,
                error,
            )
