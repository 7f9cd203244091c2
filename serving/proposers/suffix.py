"""Suffix decoding (Oliaro et al. 2024): propose what followed the same words in this text and in earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import Option
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import SUFFIX, TokenTree
from distillspec.serving.proposers.base import ProposalRequest, Proposer
from distillspec.serving.proposers.calibration import Calibration, repeats_itself, tried
from distillspec.serving.proposers.likely_growth import MOST_NODES, Drafted, LikelyGrowth
from distillspec.serving.proposers.suffix_index import LONGEST, Matches, SuffixIndex, find_matches
from distillspec.serving.proposers.suffix_store import SuffixStore
from distillspec.serving.proposers.tree_of_shape import tree_of_shape

MOST_TOKENS = 32  # of a path
MATCH_STEPS = (3, 4, 6, 8, 12, 16, 24, 32, 48, LONGEST)  # lengths of matches whose acceptance is told apart

NO_MATCH = Matches()


class SuffixLookup(Proposer):
    """Proposes without a model, in trees. Deterministic: proposals are one-hot.

    Nodes are named the likeliest first, with chances that follow what was accepted behind matches of their length.

    Args:
        store: answers of earlier requests. Requests with `log=False` are not taken in.
        least: share of the occurrences that the proposed tokens must have followed.
        expected: the fewest tokens that must be expected to be right. Below, other sources may propose.
        depth: the most levels that nodes are named of.
        nodes: the most nodes that are named, at least `depth`.
        wide: False: chains alone.
    """

    keeps_answers = True

    def __init__(
        self,
        store: SuffixStore,
        *,
        least: float = 0.1,
        expected: float = 0.0,
        depth: int = 4,
        nodes: int = MOST_NODES,
        wide: bool = True,
    ) -> None:
        self.store, self.least, self.expected = store, least, expected
        self.growth = LikelyGrowth(SUFFIX, depth, max(depth, min(nodes, MOST_NODES)), wide=wide)
        self._texts: dict[str, tuple[SuffixIndex, int]] = {}  # by sequence: its own text, and the tokens of it read
        self._found: dict[str, tuple[int, Matches]] = {}  # by sequence: for a text of so many tokens
        self._matching: set[str] = set()  # sequences with a match
        self._calibrations = {step: Calibration() for step in MATCH_STEPS}

    def most_nodes(self, depth: int) -> int:
        return max(depth, self.growth.nodes)

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        for request in requests:
            self.growth.follow(request.sequence.id, request.trees[0].shape.nodes)
        return [self._tree(request.sequence, request.trees[0].shape) for request in requests]

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        """Return what may follow the longest match, node by node. `match` is its length."""
        self.growth.follow(sequence.id, 0)
        found = self._matches(sequence)
        continuation = found.continuation(self.growth.depth, self.least)
        if continuation.expected <= self.expected:
            return (Option(0, drafted_by_model=False, source=SUFFIX),)
        likely = self._likely(sequence, found)
        most = max(len(continuation.tokens), max(likely.depths, default=0))
        return (Option(most, False, _step(found), source=SUFFIX, wide=self.growth.wide, likely=likely),)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Compare what was accepted with what was expected."""
        _, found = self._found.get(sequence.id, (0, NO_MATCH))
        if found.match:
            calibration = self._calibrations[_step(found)]
            for expected, is_accepted in tried(tree, path, SUFFIX, lambda behind: self._behind(found, behind)):
                calibration.saw(sequence.id, repeats_itself(sequence), expected, is_accepted)

    def leave_slot(self, sequence: SequenceState) -> None:
        """Forget the sequence. A whole answer goes to the store, which writes it at once."""
        self._texts.pop(sequence.id, None)
        self._found.pop(sequence.id, None)
        self._matching.discard(sequence.id)
        self.growth.forget(sequence.id)
        for calibration in self._calibrations.values() if sequence.finish_reason is not None else ():
            calibration.forget(sequence.id)
        if sequence.finish_reason in ("stop", "length") and sequence.request.log:
            prompt, answer = sequence.tokens[: sequence.prompt_length], sequence.tokens[sequence.prompt_length :]
            self.store.add(sequence.request.cache_key, prompt, answer)

    def keep_in(self, folder: Path, vocabulary: int) -> None:
        """Keep answers in a folder too from now on, if there is none yet. Raises RunError if it cannot be made."""
        self.store.keep_in(folder, vocabulary)

    def forget_tenant(self, tenant: str) -> None:
        """Delete what is kept of a tenant's answers. Those that run are taken in when they end."""
        self.store.forget(tenant)
        self._found.clear()

    def _matches(self, sequence: SequenceState) -> Matches:
        """Return the longest matches in the store and in the sequence's own text. Searched once a step."""
        length, found = self._found.get(sequence.id, (-1, NO_MATCH))
        if length != len(sequence.tokens):
            index, read = self._texts.get(sequence.id, (None, 0))
            own_text = index or SuffixIndex(2 * (sequence.prompt_length + sequence.max_output + 1))
            own_text.extend(sequence.tokens[read:])
            self._texts[sequence.id] = own_text, len(sequence.tokens)
            self.store.serve(len(self._texts))
            self._matching.discard(sequence.id)
            found = find_matches((own_text, self.store.index(sequence.request.cache_key)), sequence.tokens)
            self._found[sequence.id] = len(sequence.tokens), found
            if found.match:
                self._matching.add(sequence.id)
        return found

    def _likely(self, sequence: SequenceState, found: Matches) -> LikelyNodes:
        kept = self._calibrations[_step(found)].share(sequence.id, repeats_itself(sequence))
        return self.growth.grow(sequence, lambda path: self._behind(found, path), kept, len(self._matching))

    def _behind(self, found: Matches, path: Drafted) -> dict[int, float]:
        """Return what may follow drafted tokens, the best first: shares of the places where these followed."""
        if len(path) >= min(MOST_TOKENS, found.match):
            return {}
        so_far = found.behind(path[:-1]).get(path[-1], 0.0) if path else 1.0
        return {token: share / so_far for token, share in found.behind(path).items() if share >= self.least}

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> TokenTree:
        found = self._matches(sequence)
        return tree_of_shape(shape, lambda path: list(self._behind(found, tuple(path))), sequence.stop_ids, SUFFIX)


def _step(found: Matches) -> int:
    return max(step for step in MATCH_STEPS if step <= found.match)
