"""What every proposer does: draft a tree of tokens for each row that wants one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from distillspec.serving.kv_cache import Move
from distillspec.serving.requests import Sequence
from distillspec.serving.tree import TokenTree

EMPTY = TokenTree()


@dataclass(frozen=True)
class ProposalRequest:
    """A row that may get up to `length` drafted tokens."""

    sequence: Sequence
    length: int


class Prospect(NamedTuple):
    """What a proposer would have for a row, known before any length is chosen."""

    most: int = 1 << 30  # tokens that it can propose; 0: nothing comes to mind
    by_model: bool = True  # whether a draft model would run for it
    match: int = 0  # tokens of text that a lookup found again


@runtime_checkable
class Foresees(Protocol):
    """A proposer that can say what it would have; it depends on the row's text alone."""

    def prospect(self, sequence: Sequence) -> Prospect:
        """For the row's next step. Changes nothing that matters."""
        ...


class Proposer(Protocol):
    """Drafts tokens; never changes what is emitted, only how fast.

    A proposer that keeps state by slot (a draft's cache) follows the pool through `move`.
    """

    @property
    def version(self) -> str:
        """Which draft this is, for statistics; empty where there is no model."""
        ...

    def propose(self, requests: Seq[ProposalRequest]) -> list[TokenTree]:
        """A tree for each request, in order, of depth at most its `length`; empty where nothing comes to mind.

        Called only with requests of length ≥ 1; may run a draft model, never the target.
        """
        ...

    def committed(self, sequence: Sequence, tree: TokenTree, path: Seq[int]) -> None:
        """The nodes `path` of the tree became text, followed by one token of the target's own."""
        ...

    def move(self, moves: Seq[Move]) -> None:
        """Slots have changed places."""
        ...

    def forget(self, sequence_id: str) -> None:
        """The sequence has ended or lost its slot."""
        ...


@runtime_checkable
class GrowsWide(Protocol):
    """A proposer whose trees may have more nodes than levels; those that only draft chains need not say."""

    def most_nodes(self, depth: int) -> int:
        """The most nodes a tree of so many levels may have; so many places a row are reserved ahead."""
        ...


def most_nodes(proposer: Proposer | None, depth: int) -> int:
    """The most nodes a row's tree of `depth` levels may have."""
    return max(depth, proposer.most_nodes(depth)) if isinstance(proposer, GrowsWide) else depth


@runtime_checkable
class KeepsCache(Protocol):
    """A proposer that has read the sequences' texts into a cache."""

    def distrust(self, sequence: Sequence) -> None:
        """Clear what the cache holds of a sequence in a slot: its text is read again from the beginning."""
        ...


def begin_anew(proposer: Proposer, sequence: Sequence) -> None:
    """Have a proposer drop all that it keeps of a sequence in a slot."""
    if isinstance(proposer, KeepsCache):
        proposer.distrust(sequence)
    proposer.forget(sequence.id)


@runtime_checkable
class HoldsMemory(Protocol):
    """A proposer with caches or recordings of its own."""

    def release(self) -> None:
        """Give them back; it drafts nothing afterwards."""
        ...


def release_memory(proposer: object) -> None:
    """Have a proposer that is done with give its memory back."""
    if isinstance(proposer, HoldsMemory):
        proposer.release()
