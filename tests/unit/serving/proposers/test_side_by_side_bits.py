"""Drafts that alternate, swap and abort in one engine propose bit for bit what each proposes alone, in float32.

All that a draft is asked and told in the engine is written down. Another draft of the same weights then lives through
it alone: same texts, same states of the target, same uniforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide

from ...models.state_drafts import state_draft
from ..conftest import MakeEngine, prompts
from .test_side_by_side import Alternating

TOLD = ("enter_slot", "propose", "committed", "leave_slot", "skip", "distrust", "assume_read")


class Event(NamedTuple):
    """A call of a draft, as things were then."""

    name: str
    args: tuple[Any, ...]
    states: Tensor | None  # of the target


class Life:
    """A draft with uniforms of its own, and all that happened to it."""

    def __init__(self, source: str, model: LanguageModel, cache: SlotCache) -> None:
        self.source, self.model, self.cache = source, model, cache
        self.events: list[Event] = []
        self.proposed: list[TokenTree] = []
        self.draft = self._born()
        for name in TOLD:
            setattr(self.draft, name, self._noted(name))

    def replayed(self) -> list[TokenTree]:
        """What another draft proposes that lives through the same, alone."""
        draft, proposed = self._born(), list[TokenTree]()
        for event in self.events:
            if event.states is not None and self.cache.features is not None:
                self.cache.features.copy_(event.states)
            result = getattr(draft, event.name)(*event.args)
            proposed += result if event.name == "propose" else []
        draft.release()
        return proposed

    def _born(self) -> DraftModel:
        sampler = TokenSampler(self.model.identity.vocab_size, self.model.device, seed=5)
        return DraftModel(self.model, sampler, self.cache, version=self.source, source=self.source)

    def _noted(self, name: str) -> Any:
        call = getattr(self.draft, name)

        def noting(*args: Any) -> Any:
            states = self.cache.features.clone() if name == "propose" and self.cache.features is not None else None
            self.events.append(Event(name, tuple(map(_as_now, args)), states))
            result = call(*args)
            self.proposed += result if name == "propose" else []
            return result

        return noting


def _as_now(arg: Any) -> Any:
    """The same for ever: the engine changes its sequences."""
    if isinstance(arg, SequenceState):
        return replace(arg, tokens=list(arg.tokens), failed_sources=set(arg.failed_sources))
    if isinstance(arg, ProposalRequest):
        return replace(arg, sequence=_as_now(arg.sequence))
    return list(map(_as_now, arg)) if isinstance(arg, list) else arg


def probabilities(trees: Sequence[TokenTree]) -> list[Tensor]:
    """What each drawn group was drawn from."""
    groups = [group for tree in trees for group in tree.groups]
    return [group.drawn_from.probs[group.row] for group in groups if group.drawn_from is not None]


@pytest.mark.parametrize("kind", ["eagle", "features", "hydra"])
@torch.inference_mode()
def test_proposals_are_bit_equal_to_each_draft_alone(
    target: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine, kind: str
) -> None:
    """`b` reads the target's states, as `c` does, which takes its place."""
    models = {"a": truncated_draft, "b": state_draft(kind, target), "c": state_draft(kind, target, noise=0.2)}
    engine = make_engine(
        max_slots=3,
        controller_object=Alternating(),
        prefix_reuse=False,
        feature_ids=list(models["b"].state_ids),
        compile=False,
    )
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(slot_attention_in(model.model))
        source = {"a": "a", "b": "b", "c": "b"}
        lives = {name: Life(source[name], model, engine.runner.cache) for name, model in models.items()}
        pair = SideBySide({name: lives[name].draft for name in ("a", "b")})
        engine.use_proposer(pair)
        for number, prompt in enumerate(prompts(6)):
            params = SamplingParams(temperature=number % 3 / 2, top_p=0.9, max_tokens=30, ignore_eos=True)
            engine.submit(Request(str(number), tuple(prompt), params))
        for step in range(60):
            if step == 9:
                engine.abort("1")
            if step == 12:
                engine.at_next_step(lambda: engine.sequences.preempt(engine.sequences.running[0]))
            if step == 15:
                engine.at_next_step(lambda: pair.put("b", lives["c"].draft))
            engine.step()
        for life in lives.values():
            alone = life.replayed()
            assert [tree.tokens for tree in alone] == [tree.tokens for tree in life.proposed]
            own, others = probabilities(life.proposed), probabilities(alone)
            assert len(own) > 10
            assert own[0].dtype == torch.float32
            for ours, theirs in zip(own, others, strict=True):
                assert torch.equal(ours, theirs)
