"""Several proposers side by side: each drafts the trees that a plan gives to its source."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import ANY, NOTHING, Option
from distillspec.serving.base.tree import ROOT, TokenTree, merged
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.execution.slot_pool import Prefix
from distillspec.serving.proposers.base import EMPTY, ProposalRequest, Proposer, readers
from distillspec.serving.proposers.draft_collapse import DraftCollapse
from distillspec.serving.proposers.guarded_proposer import GuardedProposer

log = logging.getLogger(__name__)


class SideBySide(Proposer):
    """Drafts by source. Trees of several sources for one row are merged at the root, in the plan's order.

    The first source with something to propose is the prospect of a row, others follow. Proposers that read texts do
    catch-up prefill when they draft next. One that fails rests, and the others go on.

    Args:
        proposers: by source, those to be tried first first. Trees of another source's name are left out.
        usual: acceptance rates of drafts by their own evaluations, as far as they are known. Drafts whose acceptance
            collapses are unhealthy. None: it is not watched.
        rest_collapsed: such drafts rest. False: what chooses among drafts leaves them by itself.

    Attributes:
        clock: seconds, to time each proposer by.
        seconds: by source, of the last proposals.
    """

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        usual: Mapping[str, float] | None = None,
        *,
        rest_collapsed: bool = True,
    ) -> None:
        self.proposers = dict(proposers)
        self.seconds: dict[str, float] = {}
        self.clock: Callable[[], float] = time.perf_counter
        self._watches, self._rest_collapsed = usual is not None, rest_collapsed
        self._alarmed = False  # the log says that no draft is healthy
        known = usual or {}
        self._guarded = {source: self._guard(source, each, known.get(source)) for source, each in proposers.items()}
        self._resolve()

    def put(self, source: str, proposer: Proposer, usual: float | None = None) -> None:
        """Let another proposer draft for a source, new or not, between steps. The old one's memory is freed.

        Args:
            usual: its acceptance rate by its own evaluation, None: not known.
        """
        if (before := self.proposers.get(source)) is not None:
            before.release()
        self.proposers[source], self._guarded[source] = proposer, self._guard(source, proposer, usual)
        self._resolve()

    def remove(self, source: str) -> None:
        """Drop a source between steps, and free its memory."""
        del self._guarded[source]
        self.proposers.pop(source).release()
        self._resolve()

    @property
    def versions(self) -> Mapping[str, str]:
        return {source: member.version for source, member in self.proposers.items() if member.version}

    def most_nodes(self, depth: int) -> int:
        return sum(max(depth, proposer.most_nodes(depth)) for proposer in self.proposers.values())

    @property
    def healthy(self) -> Mapping[str, bool]:
        return {source: guarded.healthy for source, guarded in dict(self._guarded).items() if guarded.is_draft}

    def begin_step(self) -> None:
        for guarded in self._guarded.values():
            guarded.step()
        healthy = self.healthy
        if any(healthy.values()) or not healthy:
            self._alarmed = False
        elif not self._alarmed:
            self._alarmed = True
            log.error(
                "no healthy draft is left (%s): until one recovers or another is loaded, none drafts but on trial",
                ", ".join(healthy),
            )

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        proposed: dict[tuple[int, str], TokenTree] = {}  # by row and source
        self.seconds = {}
        for source, guarded in self._guarded.items():
            of_source = {row: request.of_source(source) for row, request in enumerate(requests)}
            asked = {row: request for row, request in of_source.items() if request.trees}
            if not asked:
                continue
            started = self.clock()
            trees = guarded.propose(list(asked.values()))
            self.seconds[source] = self.clock() - started
            proposed.update({(row, source): tree for row, tree in zip(asked, trees, strict=True)})
        return [
            merged([proposed.get((row, planned.source), EMPTY) for planned in request.trees])
            for row, request in enumerate(requests)
        ]

    def read_ahead(self, texts: Sequence[tuple[str, SequenceState, int]]) -> None:
        for source, guarded in self._guarded.items():
            if of_source := [(sequence, tokens) for name, sequence, tokens in texts if name == source]:
                guarded.read_on(of_source)

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        able, last = list[Option](), NOTHING
        for source, guarded in self._guarded.items():
            last = guarded.foreseen(sequence, (Option(ANY, source=source),))
            able += [option for option in last if option.limit]
        return tuple(able) or last

    def see(self, windows: Sequence[VerificationWindow], logits: Tensor) -> None:
        """Pass it on to all."""
        for guarded in self._guarded.values():
            guarded.see(windows, logits)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        for guarded in self._guarded.values():
            guarded.committed(sequence, tree, path)
        if self._watches:
            self._judge(tree, path)

    @property
    def caches(self) -> Sequence[SlotCache]:
        return [cache for reader in self._readers for cache in reader.caches]

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        for reader in self._readers:
            reader.enter_slot(sequence, prefix)

    def leave_slot(self, sequence: SequenceState) -> None:
        for guarded in self._guarded.values():
            guarded.leave_slot(sequence)

    def distrust(self, sequence: SequenceState) -> None:
        for reader in self._readers:
            reader.distrust(sequence)

    def skip(self, sequence: SequenceState) -> None:
        for reader in self._readers:
            reader.skip(sequence)

    def assume_read(self, sequence: SequenceState, tokens: int) -> None:
        for reader in self._readers:
            reader.assume_read(sequence, tokens)

    def forget_tenant(self, tenant: str) -> None:
        """Pass it on to all, whether one raises or not."""
        with ExitStack() as calls:
            for proposer in self.proposers.values():
                calls.callback(proposer.forget_tenant, tenant)

    def keep_in(self, folder: Path, vocabulary: int) -> None:
        """Pass it on to all."""
        for proposer in self.proposers.values():
            proposer.keep_in(folder, vocabulary)

    def flush(self) -> None:
        for proposer in self.proposers.values():
            proposer.flush()

    def release(self) -> None:
        for proposer in self.proposers.values():
            proposer.release()

    def _guard(self, source: str, proposer: Proposer, usual: float | None) -> GuardedProposer:
        collapse = DraftCollapse(usual) if self._watches and proposer.version else None
        return GuardedProposer(proposer, source, [source], collapse, rests=self._rest_collapsed)

    def _judge(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Tell each draft of its first tokens that were tried: in order, up to those of which one was accepted."""
        for group in tree.groups_at(ROOT):
            is_accepted = bool(path) and path[0] in group.nodes
            if (guarded := self._guarded.get(group.source)) is not None:
                guarded.judge(is_accepted)
            if is_accepted:
                return

    def _resolve(self) -> None:
        """Keep what follows from the members. Asking for a protocol takes microseconds, too many for every row."""
        self._readers = [reader for proposer in self.proposers.values() for reader in readers(proposer)]
        self.version = next(iter(self.versions.values()), "")  # the first draft model's
        self.keeps_answers = any(proposer.keeps_answers for proposer in self.proposers.values())
