"""Proposer: drafts a tree of tokens for each row that requests one."""

from __future__ import annotations

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


@runtime_checkable
class Foresees(Protocol):
    """A proposer that knows its possible tokens in advance, from the row's text alone."""

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        """Return what it could draft for the row's next step, one option for each source, never none.

        May update caches, but no results.
        """
        ...


class Proposer(Protocol):
    """Drafts tokens. It never changes the output, only its speed. Its state of a sequence is its own."""

    @property
    def version(self) -> str:
        """Version of the draft model, for statistics. "" without one."""
        ...

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        """Return a tree for each request in order, within the shapes that it names, maybe narrower or empty.

        All speculation lengths are at least 1. May run a draft model, never the target.
        """
        ...

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn that the nodes `path` became text, followed by one token of the target's own.

        Where the target's logits were NaN, nothing became text: the path is empty, and no token follows.
        """
        ...

    def leave_slot(self, sequence: SequenceState) -> None:
        """Learn that a sequence is about to lose its slot, or ends without one.

        With a finish reason it does not come back.
        """
        ...


@runtime_checkable
class HasMembers(Protocol):
    """Several proposers in one, by source."""

    @property
    def proposers(self) -> Mapping[str, Proposer]: ...


@runtime_checkable
class TellsNotFinite(Protocol):
    """A proposer that tells for which rows its logits were NaN or infinite."""

    @property
    def not_finite(self) -> Collection[str]:
        """Sequences of the last proposals that it has given up."""
        ...


@runtime_checkable
class TellsHealth(Protocol):
    """Several proposers in one, which may fail apart."""

    @property
    def healthy(self) -> Mapping[str, bool]:
        """Draft models by source: False for those that raised, gave NaN or collapsed lately. Any thread may ask."""
        ...


@runtime_checkable
class ReadsOn(Protocol):
    """A proposer that can read a text before it drafts for it."""

    def read_on(self, texts: Sequence[tuple[SequenceState, int]]) -> None:
        """Read on in sequences' texts, at most so many tokens of each. It may read less."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """Several proposers in one, each of which can read texts before it drafts for them."""

    def read_ahead(self, texts: Sequence[tuple[str, SequenceState, int]]) -> None:
        """Let sources read on in sequences' texts, at most so many tokens of each."""
        ...


@runtime_checkable
class CountsSteps(Protocol):
    """A proposer that does something at the start of each step."""

    def begin_step(self) -> None: ...


@runtime_checkable
class TimesMembers(Protocol):
    """Several proposers in one, whose seconds on `clock` are known."""

    clock: Callable[[], float]

    @property
    def seconds(self) -> Mapping[str, float]:
        """By source, of the last proposals."""
        ...


def versions_of(proposer: Proposer | None) -> dict[str, str]:
    """Return the versions of a proposer's draft models by source, without those that have none."""
    members = proposer.proposers if isinstance(proposer, HasMembers) else {} if proposer is None else {DRAFT: proposer}
    return {source: member.version for source, member in members.items() if member.version}


def health_of(proposer: Proposer | None) -> Mapping[str, bool]:
    """Return the health of a pool's drafts by source (see `TellsHealth`). Nothing for other proposers."""
    return proposer.healthy if isinstance(proposer, TellsHealth) else {}


@runtime_checkable
class GrowsWide(Protocol):
    """A proposer whose trees may have more nodes than levels."""

    def most_nodes(self, depth: int) -> int:
        """Return the most nodes of a tree of `depth` levels. As many places a row are reserved."""
        ...


def most_nodes(proposer: Proposer | None, depth: int) -> int:
    """Return the most nodes of a row's tree of `depth` levels."""
    return max(depth, proposer.most_nodes(depth)) if isinstance(proposer, GrowsWide) else depth


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


@runtime_checkable
class SeesLogits(Protocol):
    """A proposer that learns from the target's logits."""

    def see(self, windows: Sequence[VerificationWindow], logits: Tensor) -> None:
        """Learn from a step, before its tokens become text.

        Args:
            windows: the sequences as they were read, and their drafted trees.
            logits: `[Σ (1 + nodes), V]` raw, of any float dtype, window by window. Not to be changed.
        """
        ...


@runtime_checkable
class KeepsAnswers(Protocol):
    """A proposer that may keep finished answers."""

    @property
    def keeps_answers(self) -> bool:
        """True if it does."""
        ...

    def forget_tenant(self, tenant: str) -> None:
        """Delete what is kept of a tenant's answers, in memory and on disk. Raises OSError where a file stays."""
        ...


def keeps_answers(proposer: object) -> bool:
    """Return True if a proposer keeps finished answers."""
    return isinstance(proposer, KeepsAnswers) and proposer.keeps_answers


def forget_answers(proposer: object, tenant: str) -> None:
    """Delete what a proposer keeps of a tenant's answers."""
    if isinstance(proposer, KeepsAnswers):
        proposer.forget_tenant(tenant)


@runtime_checkable
class KeepsOnDisk(Protocol):
    """A proposer that can keep on disk what it has learnt from answers."""

    def keep_in(self, folder: Path, vocabulary: int) -> None:
        """Keep it in a folder too from now on, by tenant, if there is none yet. Ids are below `vocabulary`.

        Raises RunError if the folder cannot be made.
        """
        ...

    def flush(self) -> None:
        """Write what is not written yet. Waits for the disk, and never raises."""
        ...


def keep_answers(proposer: object, folder: Path, vocabulary: int) -> None:
    """Let a proposer keep on disk what it has learnt. See `KeepsOnDisk.keep_in`."""
    if isinstance(proposer, KeepsOnDisk):
        proposer.keep_in(folder, vocabulary)


def flush_answers(proposer: object) -> None:
    """Write what a proposer keeps and has not written yet."""
    if isinstance(proposer, KeepsOnDisk):
        proposer.flush()


@runtime_checkable
class HoldsMemory(Protocol):
    """A proposer with caches or recordings of its own."""

    def release(self) -> None:
        """Free them. It drafts nothing afterwards."""
        ...


def release_memory(proposer: object) -> None:
    """Free the memory of a proposer that is no longer used."""
    if isinstance(proposer, HoldsMemory):
        proposer.release()
