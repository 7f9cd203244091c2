"""Counting of drafted tokens that were tried and accepted. All statistics, metrics and logs count with this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distillspec.serving.base.tree import DRAFT, ROOT, TARGET, TokenTree


class Trial(NamedTuple):
    """One drafted token that verification tried. Tokens behind a rejection, or on other paths, are never tried."""

    depth: int  # 1 for the first token after the text
    rank: int  # its place among its siblings, 0 for the first that is tried
    source: str
    accepted: bool


def trials_of(tree: TokenTree, path: Sequence[int], emitted: int) -> tuple[Trial, ...]:
    """Return the trials of a verified tree, in order. Tokens of the target itself are not tried.

    Args:
        tree: what was drafted.
        path: its accepted nodes.
        emitted: tokens that became text, or were judged. Trials behind the end of an answer do not count.
    """
    found: list[Trial] = []
    for depth, node in enumerate((ROOT, *path)[:emitted], start=1):
        accepted = path[depth - 1] if depth <= len(path) else None
        siblings = [
            (child, group.source) for group in tree.groups_at(node) if group.source != TARGET for child in group.nodes
        ]
        for rank, (child, source) in enumerate(siblings):
            found.append(Trial(depth, rank, source, child == accepted))
            if child == accepted:
                break
    return tuple(found)


def chain_trials(tried: int, accepted: int, source: str) -> tuple[Trial, ...]:
    """Return the trials of a chain: `tried` tokens, of which the first `accepted` were accepted."""
    return tuple(Trial(place + 1, 0, source, place < accepted) for place in range(tried))


def of_source(trials: Iterable[Trial], source: str) -> tuple[Trial, ...]:
    """Return the trials of one source's tokens."""
    return tuple([trial for trial in trials if trial.source == source])


def ranked_of_source(trials: Iterable[Trial], source: str) -> tuple[Trial, ...]:
    """Return the trials of one source's tokens, with their ranks among those of the source."""
    found: list[Trial] = []
    for trial in of_source(trials, source):
        before = found[-1].rank if found and found[-1].depth == trial.depth else -1
        found.append(trial._replace(rank=before + 1))
    return tuple(found)


def accepted_by_source(trials: Iterable[Trial]) -> dict[str, int]:
    """Return how many tokens of each source were accepted, of the sources that were tried."""
    found: dict[str, int] = {}
    for trial in trials:
        found[trial.source] = found.get(trial.source, 0) + trial.accepted
    return found


def by_version(trials: Sequence[Trial], versions: Mapping[str, str]) -> dict[str, tuple[Trial, ...]]:
    """Return trials by the draft version that they count for, "" for tokens of other sources.

    Args:
        versions: of the drafts, by source.
    """
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(versions.get(trial.source, ""), []).append(trial)
    return {version: tuple(its_trials) for version, its_trials in found.items()}


def tried_versions(trials: Sequence[Trial], versions: Mapping[str, str]) -> tuple[str, ...]:
    """Return the distinct versions of drafts whose tokens were tried, in order."""
    return tuple(dict.fromkeys([versions[trial.source] for trial in trials if trial.source in versions]))


def version_in_use(trials: Sequence[Trial], versions: Mapping[str, str]) -> str:
    """Return the version that a step's row says something about, "" for none.

    That is the first one whose tokens were tried. Where nothing was tried, an engine's only draft is meant.
    """
    if trials:
        return next(iter(tried_versions(trials, versions)), "")
    return next(iter(versions.values())) if len(versions) == 1 else ""


def count_trials(accepted: int, depth: int) -> int:
    """Return at how many depths a token was tried: those of the accepted ones, and that of the first rejected one.

    Args:
        accepted: drafted tokens that were accepted.
        depth: the most tokens that could have been accepted.
    """
    return min(accepted + 1, depth)


@dataclass
class AcceptanceCounter:
    """Drafted tokens tried and accepted, by depth, and tokens emitted.

    A depth counts once a window, however many siblings were tried there. α is that of the first ones, with siblings
    and without: the rate that an evaluator of chains measures.
    """

    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    firsts: int = 0  # of the accepted ones, those tried before their siblings
    emitted: int = 0

    def add(self, trials: Iterable[Trial], emitted: int = 0, levels: int = 0) -> None:
        """Count one window. Depths down to `levels` have an entry even if nothing was tried there."""
        self._reach(levels)
        before = 0
        for depth, _, _, accepted in trials:
            self._reach(depth)
            self.tried_at[depth - 1] += depth != before
            self.accepted_at[depth - 1] += accepted
            self.firsts += accepted and depth != before
            before = depth
        self.emitted += emitted

    def merge(self, other: AcceptanceCounter) -> None:
        """Count what another one has counted."""
        self._reach(len(other.tried_at))
        for place, (tried, accepted) in enumerate(zip(other.tried_at, other.accepted_at, strict=True)):
            self.tried_at[place] += tried
            self.accepted_at[place] += accepted
        self.firsts += other.firsts
        self.emitted += other.emitted

    @property
    def by_position(self) -> list[float]:
        """Share accepted at each depth where anything was tried."""
        return [accepted / tried for accepted, tried in zip(self.accepted_at, self.tried_at, strict=True) if tried]

    def _reach(self, depth: int) -> None:
        missing = [0] * (depth - len(self.tried_at))
        self.tried_at += missing
        self.accepted_at += missing

    @property
    def tried(self) -> int:
        return sum(self.tried_at)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def rate(self) -> float | None:
        """α per trial: the first tokens of a depth that were accepted, of those tried. None before any trial."""
        return acceptance_rate(self.firsts, self.tried)


def acceptance_rate(accepted: float, tried: float) -> float | None:
    """Return α per trial, None before any trial."""
    return accepted / tried if tried else None


class RowResult(NamedTuple):
    """Result of verification for one row."""

    sequence_id: str
    depth: int  # levels of the drafted tree that was verified
    nodes: int  # its tokens
    accepted: int
    emitted: int  # fewer than accepted + 1 where the answer ended inside the window
    trials: tuple[Trial, ...] = ()  # what was tried, in order
    domain: str = "default"  # the request's
    parents: tuple[int, ...] = ()  # of the tree's nodes, −1 for the text. Left out for chains
    path: tuple[int, ...] = ()  # accepted nodes of such a tree

    @classmethod
    def chain(
        cls, sequence_id: str, depth: int, accepted: int, emitted: int, source: str = DRAFT, domain: str = "default"
    ) -> RowResult:
        """Return the result of a chain of `depth` tokens."""
        tried = min(count_trials(accepted, depth), emitted)
        return cls(sequence_id, depth, depth, accepted, emitted, chain_trials(tried, accepted, source), domain)

    @property
    def tried(self) -> int:
        """Depths at which a drafted token was tried: those of the accepted ones and the first rejected one."""
        return self.trials[-1].depth if self.trials else 0

    @property
    def rejected(self) -> bool:
        """True if a token was tried after the accepted ones, and all that were tried there were rejected."""
        return bool(self.trials) and not self.trials[-1].accepted

    @property
    def kept(self) -> int:
        """Accepted tokens that were emitted."""
        return min(self.accepted, self.emitted)
