"""Calibration: how much of what a source expects to be accepted is accepted, by sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.tree import ROOT, TokenTree

PRIOR_SHARE, PRIOR_TOKENS = 0.7, 5.0  # the share before anything was seen, and the expected tokens that it is worth
LEAST_SHARE = 0.1  # share over all sequences: what is taken for hopeless is never tried, and stays hopeless
STRENGTH = 10.0  # expected tokens that the share over all sequences is worth beside a sequence's own
MEMORY = 500.0  # expected tokens after which evidence over all sequences has half its weight


class Calibration:
    """Accepted tokens over expected ones: those of a sequence, with those of its group as a prior.

    Groups are sequences whose shares are alike, such as those with one temperature.
    """

    def __init__(self) -> None:
        self._by_group: dict[Hashable, tuple[float, float]] = {}  # tokens expected, tokens accepted
        self._by_sequence: dict[str, tuple[float, float]] = {}

    def share(self, sequence_id: str, group: Hashable) -> float:
        """Return the share of expected tokens that is accepted."""
        expected, accepted = self._by_group.get(group, (0.0, 0.0))
        pooled = max(LEAST_SHARE, (accepted + PRIOR_TOKENS * PRIOR_SHARE) / (expected + PRIOR_TOKENS))
        expected, accepted = self._by_sequence.get(sequence_id, (0.0, 0.0))
        return (accepted + STRENGTH * pooled) / (expected + STRENGTH)

    def saw(self, sequence_id: str, group: Hashable, expected: float, accepted: int) -> None:
        """Count a node whose children were tried: P(one of them is accepted) as expected, and how many were."""
        expected_before, accepted_before = self._by_sequence.get(sequence_id, (0.0, 0.0))
        self._by_sequence[sequence_id] = (expected_before + expected, accepted_before + accepted)
        expected_before, accepted_before = self._by_group.get(group, (0.0, 0.0))
        fading = 0.5 ** (expected / MEMORY)
        self._by_group[group] = (expected_before * fading + expected, accepted_before * fading + accepted)

    def forget(self, sequence_id: str) -> None:
        """Drop a sequence that is finished."""
        self._by_sequence.pop(sequence_id, None)


def repeats_itself(sequence: SequenceState) -> bool:
    """Return True for greedy text, which repeats itself more: a group of its own."""
    return sequence.request.params.temperature == 0


def tried(
    tree: TokenTree, path: Sequence[int], source: str, shares: Callable[[tuple[int, ...]], Mapping[int, float] | None]
) -> Iterator[tuple[float, bool]]:
    """Yield, for each node whose children of a source were tried, what was expected of them and whether one was
    accepted.

    Args:
        path: the accepted nodes.
        shares: returns what the source named behind drafted tokens, None where it was not asked.
    """
    node, behind = ROOT, tuple[int, ...]()
    for accepted in (*path, None):
        children = [child for group in tree.groups_at(node) if group.source == source for child in group.nodes]
        named = shares(behind)
        if not children or named is None:
            return
        yield sum([named.get(tree.tokens[child], 0.0) for child in children]), accepted in children
        if accepted is None or accepted not in children:
            return
        node, behind = accepted, (*behind, tree.tokens[accepted])
