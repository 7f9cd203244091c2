"""Stores that learn from answers without a gradient, as arms: the product's own proposers, read token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from distillspec.recipes.osd.beside import NOTHING
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.base.shape import chain_of
from distillspec.serving.base.tree import NGRAM, SUFFIX
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.ngram import Ngram
from distillspec.serving.proposers.suffix import SuffixLookup
from distillspec.serving.proposers.suffix_store import SuffixStore

TOKENS = 1_000_000  # of the suffix store: more than a study writes

STORES: dict[str, Callable[[int], Ngram | SuffixLookup]] = {
    NGRAM: lambda vocabulary: Ngram(),
    SUFFIX: lambda vocabulary: SuffixLookup(SuffixStore(TOKENS, vocabulary)),
}
"""By name, a proposer for ids below a number."""


class Store:
    """A proposer with all answers that it has learnt from.

    Args:
        name: of `STORES`.
        vocabulary: ids are below it.
    """

    def __init__(self, name: str, vocabulary: int) -> None:
        self._source, self._proposer = name, STORES[name](vocabulary)

    def named(self, answer: LoggedAnswer) -> Tensor:
        """Return the token that it would have named at each of the answer's R tokens `[R]`, `NOTHING` for none.

        A copy of the proposer reads the answer as it goes on, as in service. The store itself learns nothing.
        """
        proposer, sequence = deepcopy(self._proposer), _sequence(answer)
        tokens = []
        for token in answer.response_ids:
            (tree,) = proposer.propose([ProposalRequest(sequence, chain_of(1, self._source))])
            tokens.append(tree.tokens[0] if tree.tokens else NOTHING)
            sequence.tokens.append(token)
        return torch.tensor(tokens)

    def learn(self, answers: Sequence[LoggedAnswer]) -> None:
        """Learn from whole answers, as when they end in service."""
        for answer in answers:
            sequence = _sequence(answer)
            self._proposer.foreseen(sequence)  # it reads the prompt when a request starts
            sequence.tokens += answer.response_ids
            sequence.finish_reason = "stop"
            self._proposer.leave_slot(sequence)


def _sequence(answer: LoggedAnswer) -> SequenceState:
    """Return the answer as a running sequence without output."""
    params = SamplingParams(max_tokens=len(answer))
    request = Request(answer.request_id, answer.prompt_ids, params, tenant=answer.tenant, domain=answer.domain)
    return SequenceState(
        answer.request_id, request, 0, 0, list(answer.prompt_ids), frozenset(), max_output=len(answer), slot=0
    )
