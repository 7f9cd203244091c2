"""Guarded calls of a proposer: one that raises, gives NaN or collapses rests, and the cause is logged once."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence

from torch import Tensor

from distillspec.errors import RunError
from distillspec.serving.base.backoff import Backoff
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import NOTHING, Option
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.proposers.base import EMPTY, ProposalRequest, Proposer, readers
from distillspec.serving.proposers.draft_collapse import DraftCollapse

log = logging.getLogger(__name__)

NAN_ANSWERS = 3  # in a row that end with NaN, after which it is the draft that fails and not the answers
# Steps that a draft rests that has collapsed: it costs many tokens to see that again.
ASIDE_STEPS, MOST_ASIDE_STEPS = 4096, 65536


class GuardedProposer:
    """Calls a proposer. Its failures end no request and no step: they only pause what it drafts.

    Args:
        name: of the proposer, for the log.
        sources: whose tokens it proposes, and that have failed for a row where it does.
        collapse: watches the acceptance of its tokens, None: nothing does.
        rests: after a collapse. False: what chooses among drafts leaves it by itself, and it is unhealthy.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        name: str,
        sources: Iterable[str],
        collapse: DraftCollapse | None = None,
        *,
        rests: bool = True,
    ) -> None:
        self.proposer = proposer
        self.name, self.sources = name, tuple(sources)
        self._backoff, self._aside = Backoff(), Backoff(ASIDE_STEPS, MOST_ASIDE_STEPS)
        self._collapse, self._rests = collapse, rests
        self._collapsed = False
        self._nan = 0  # answers that ended with NaN since the last sound one
        self._rest = 0  # steps that a failure in this step costs, 0 without one: what rows share fails for each of them
        self._logged: set[Hashable] = set()  # kinds of failure

    @property
    def paused(self) -> bool:
        """True while the proposer is not asked."""
        return self._backoff.waits or self._aside.waits

    @property
    def is_draft(self) -> bool:
        """True for a draft model."""
        return self.proposer is not None and bool(self.proposer.version)

    @property
    def healthy(self) -> bool:
        """False while it rests, and until it has drafted as long as it rested, or is accepted again."""
        return not self._backoff.fails and not self._collapsed

    def step(self) -> None:
        """Count a step."""
        self._rest = 0
        self._backoff.step()
        self._aside.step()

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        """Return what the proposer proposes, empty trees where it raises."""
        assert self.proposer is not None
        try:
            proposals = self.proposer.propose(requests)
            if len(proposals) != len(requests):
                raise RunError(f"{len(proposals)} trees for {len(requests)} rows")
        except Exception as error:  # a failing draft must never end a request
            self._failed([request.sequence for request in requests], error)
            return [EMPTY] * len(requests)
        broken = self.proposer.not_finite
        if any(tree and request.sequence.id not in broken for tree, request in zip(proposals, requests, strict=True)):
            self._nan = 0
        else:
            self._nan += len(broken)
        if not broken:
            self._backoff.succeeded()
        elif self._nan >= NAN_ANSWERS:
            self._rest = self._rest or self._backoff.failed()
            self._tell_once("NaN", f"its logits were NaN or infinite for {self._nan} answers in a row")
        return proposals

    def foreseen(self, sequence: SequenceState, otherwise: tuple[Option, ...]) -> tuple[Option, ...]:
        """Return what the proposer foresees for a row, nothing while it rests or where it raises.

        Args:
            otherwise: returned for a proposer that cannot foresee.
        """
        if self.paused:
            sequence.failed_sources.update(self.sources)
            return NOTHING
        try:
            options = None if self.proposer is None else self.proposer.foreseen(sequence)
        except Exception as error:
            self._failed([sequence], error)
            return NOTHING
        return otherwise if options is None else options

    def read_on(self, texts: Sequence[tuple[SequenceState, int]]) -> None:
        """Let the proposer read on in texts."""
        if (proposer := self.proposer) is not None and not self.paused:
            self._tell([sequence for sequence, _ in texts], lambda: proposer.read_on(texts))

    def see(self, windows: Sequence[VerificationWindow], logits: Tensor) -> None:
        """Show the proposer a step's logits."""
        if (proposer := self.proposer) is not None:
            self._tell([window.sequence for window in windows], lambda: proposer.see(windows, logits))

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Tell the proposer which nodes of a row's tree were accepted."""
        if (proposer := self.proposer) is not None:
            self._tell([sequence], lambda: proposer.committed(sequence, tree, path))

    def judge(self, is_accepted: bool) -> None:
        """Count a first token of the draft that was tried. If its acceptance has collapsed, it is unhealthy.

        It may rest then. It is sound once enough is accepted again.
        """
        collapse = self._collapse
        if collapse is None or self._aside.waits:
            return
        has_collapsed = collapse.saw(is_accepted)
        if has_collapsed:
            self._collapsed = True
            self._rest = self._aside.failed() if self._rests else 0
            self._tell_once("collapse", f"{collapse.rate:.1%} of its tokens were accepted, {collapse.usual:.0%} before")
            collapse.begin_anew()
        elif self._collapsed and has_collapsed is not None:
            self._collapsed, self._aside = False, Backoff(ASIDE_STEPS, MOST_ASIDE_STEPS)

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
        self._tell_once((type(error), place.filename, place.lineno), f"{type(error).__name__}: {error}")

    def _tell_once(self, kind: Hashable, cause: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(
                "%s: %s failed (%s); it is tried again, and failures of this kind are not logged again",
                f"no speculation for {self._rest} steps" if self._rest else "left to the selection",
                self.name,
                cause,
            )
