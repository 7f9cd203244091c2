"""A proposer of known acceptance, and the prompt that it drafts for."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving import SamplingParams
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.proposers.base import ProposalRequest, Proposer

from .conftest import prompts

PROMPT = prompts()[1]


GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


class Oracle(Proposer):
    """Proposes what greedy decoding will write (`always`), never that, or that in every second position."""

    version = "oracle"

    def __init__(self, continuation: list[int], mode: str = "always") -> None:
        self.continuation, self.mode = continuation, mode

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: ProposalRequest) -> TokenTree:
        done = request.sequence.output_length
        tokens = self.continuation[done : done + request.speculation_length]
        wrong = [(token + 1) % 250 for token in tokens]
        chosen = {"always": tokens, "never": wrong, "sometimes": tokens[:1] + wrong[1:]}[self.mode]
        return TokenTree.chain(chosen)
