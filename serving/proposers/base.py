"""Proposer: drafts a tree of tokens for each row that requests one."""

# ruff: noqa: B027  a proposer overrides what it needs of the methods that do nothing

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import Option
from distillspec.serving.base.shape import PlannedTree
from distillspec.serving.base.tree import DRAFT, TokenTree
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.execution.slot_pool import Prefix

EMPTY = TokenTree()


@dataclass(frozen=True)
class ProposalRequest:
    """A row that may get drafted trees, of one source each.

    guess: tokens that are expected to follow. A draft model reads them in one pass with its text, and saves the passes
        behind those that it chooses itself. They change nothing that it proposes.
    """

    sequence: SequenceState
    trees: tuple[PlannedTree, ...]
    guess: tuple[int, ...] = ()

    @property
    def speculation_length(self) -> int:
        """Levels of the deepest tree."""
        return max([tree.shape.depth for tree in self.trees], default=0)

    def of_source(self, source: str) -> ProposalRequest:
        """Return the same without the trees of other sources."""
        return ProposalRequest(self.sequence, tuple([tree for tree in self.trees if tree.source == source]))


class Proposer(ABC):
    """Drafts tokens. It never changes the output, only its speed. Its state of a sequence is its own.

    `propose` is all that it must have. Every other method does nothing unless it is overridden.

    Attributes:
        version: of the draft model, for statistics. "" without one.
        not_finite: sequences of the last proposals that it has given up, for their logits were NaN or infinite.
        keeps_answers: it may keep finished answers.
    """

    version: str = ""
    not_finite: Collection[str] = ()
    keeps_answers: bool = False

    @abstractmethod
    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        """Return a tree for each request in order, within the shapes that it names, maybe narrower or empty.

        All speculation lengths are at least 1. May run a draft model, never the target.
        """

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of its draft models by source, without those that have none."""
        return {DRAFT: self.version} if self.version else {}

    @property
    def healthy(self) -> Mapping[str, bool]:
        """Draft models of a pool by source: False for those that raised, gave NaN or collapsed lately.

        Any thread may ask.
        """
        return {}

    def most_nodes(self, depth: int) -> int:
        """Return the most nodes of a tree of `depth` levels, at least `depth`. As many places a row are reserved."""
        return depth

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...] | None:
        """Return what it could draft for the row's next step, one option for each source, never none.

        It goes by the row's text alone, and may update caches, but no results. None: it cannot tell in advance.
        """
        return None

    def begin_step(self) -> None:
        """Learn that a step begins."""

    def read_on(self, texts: Sequence[tuple[SequenceState, int]]) -> None:
        """Read on in sequences' texts before it drafts for them, at most so many tokens of each. It may read less."""

    def see(self, windows: Sequence[VerificationWindow], logits: Tensor) -> None:
        """Learn from the target's logits of a step, before its tokens become text.

        Args:
            windows: the sequences as they were read, and their drafted trees.
            logits: `[Σ (1 + nodes), V]` raw, of any float dtype, window by window. Not to be changed.
        """

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn that the nodes `path` became text, followed by one token of the target's own.

        Where the target's logits were NaN, nothing became text: the path is empty, and no token follows.
        """

    def leave_slot(self, sequence: SequenceState) -> None:
        """Learn that a sequence is about to lose its slot, or ends without one.

        With a finish reason it does not come back.
        """

    def forget_tenant(self, tenant: str) -> None:
        """Delete what is kept of a tenant's answers, in memory and on disk. Raises OSError where a file stays."""

    def keep_in(self, folder: Path, vocabulary: int) -> None:
        """Keep what it learns in a folder too from now on, by tenant, if there is none yet. Ids are below `vocabulary`.

        Raises RunError if the folder cannot be made.
        """

    def flush(self) -> None:
        """Write what is not written yet. Waits for the disk, and never raises."""

    def release(self) -> None:
        """Free caches and recordings. It drafts nothing afterwards."""


@runtime_checkable
class HasMembers(Protocol):
    """Several proposers in one, by source, whose seconds on `clock` are known."""

    clock: Callable[[], float]

    @property
    def proposers(self) -> Mapping[str, Proposer]: ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """By source, of the last proposals."""
        ...

    def read_ahead(self, texts: Sequence[tuple[str, SequenceState, int]]) -> None:
        """Let sources read on in sequences' texts, at most so many tokens of each."""
        ...


@runtime_checkable
class ReadsTexts(Protocol):
    """A proposer with caches of the sequences' texts, which it reads before it drafts."""

    @property
    def caches(self) -> Sequence[SlotCache]:
        """Caches of the slots of the pool. Prefixes are copied in them as in the target's."""
        ...

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        """Learn that a sequence has a slot, and that a prefix of another's text is copied into it."""
        ...

    def distrust(self, sequence: SequenceState) -> None:
        """Clear the cache of a sequence in a slot, so that its text is read again from the start."""
        ...

    def skip(self, sequence: SequenceState) -> None:
        """Never read a sequence that is not begun yet."""
        ...

    def assume_read(self, sequence: SequenceState, tokens: int) -> None:
        """Take the slot's first `tokens` places for the sequence's text."""
        ...


def readers(proposer: object) -> tuple[ReadsTexts, ...]:
    """Return the proposer if it reads texts, nothing else."""
    return (proposer,) if isinstance(proposer, ReadsTexts) else ()


def caches_of(proposer: object) -> Sequence[SlotCache]:
    """Return the caches that a proposer keeps."""
    return [cache for reader in readers(proposer) for cache in reader.caches]


def versions_of(proposer: Proposer | None) -> Mapping[str, str]:
    """Return the versions of a proposer's draft models by source, nothing without a proposer."""
    return {} if proposer is None else proposer.versions
