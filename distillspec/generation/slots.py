"""Hugging Face `Generator` with continuous batching over slots, so that short answers never wait for long ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.generation.decoder import SlotDecoder, StateDecoder
from distillspec.models.features import FeatureTap, states_of_text
from distillspec.models.language_model import LanguageModel
from distillspec.models.memory import slots_that_fit
from distillspec.models.native_layers import NativeLayers
from distillspec.models.packed_linear import PackedLinears
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.recording import SignalRecorder
from distillspec.sampling import draw, policy_probs
from distillspec.signals import SignalRequest
from distillspec.types import NO_STATES, GenerationRequest, RecordedStates, Sample, SamplingPolicy, StateRequest

PACKED_STEPS = 100  # fewer steps do not pay for packing weights
PREFILL_TOKENS = 2048  # padded prompt tokens read in one forward pass

_Packs = tuple[PackedLinears | None, NativeLayers | None]


@dataclass
class _Row:
    """One sequence being written. Its index in the list of rows is its slot."""

    index: int
    request: GenerationRequest
    uniforms: Tensor  # [2, max_new_tokens] float64, drawn beforehand: tokens do not depend on the batch
    tokens: list[int] = field(default_factory=list)
    recorder: SignalRecorder | None = None


class SlotGenerator:
    """Generator that writes with `writer`, or token by token with a mixture of `writer` and `other`.

    Args:
        slots: the most sequences side by side, fewer if their keys and values would take half the free memory.
        other: a second model that writes each token with probability `other_share` (DistillSpec's per-token
            mixed data). Signals are always `writer`'s. A draft that reads `writer`'s states writes as `other`, also
            where it writes alone (a share of 1): each token is the first that it drafts behind the text so far.
        states: hidden states of `writer` to record with its text, for drafts that read them. Not with such an `other`.
    """

    def __init__(
        self,
        writer: LanguageModel,
        *,
        slots: int = 64,
        source: str = "teacher",
        other: LanguageModel | None = None,
        other_share: float = 0.0,
        states: StateRequest = NO_STATES,
    ) -> None:
        self.models = [writer] if other is None else [writer, other]
        self.slots = slots
        self.source = source
        self.other_share = other_share
        self.states = states
        self.read_ids = () if other is None else other.state_ids

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[GenerationRequest],
        policy: SamplingPolicy,
        *,
        stop_ids: Sequence[int],
        signal: SignalRequest | None = None,
        on_tokens: Callable[[int], None] | None = None,
        deadline: float | None = None,
    ) -> Iterator[tuple[int, Sample]]:
        """See `distillspec.types.Generator.generate`."""
        if not requests:
            return
        max_len = max(len(r.prompt.token_ids) + r.max_new_tokens for r in requests)
        self._check_lengths(requests, max_len)
        most = min(self.slots, len(requests))
        with ExitStack() as stack:
            kept = self.read_ids or self.states.ids
            room = partial(slots_that_fit, self.models, most, max_len, feature_ids=kept)
            packs = [_packed(model, max(1, room()), requests, stack) for model in self.models]
            slots = max(1, room())  # packed weights take memory too
            waiting = _neighbours_alike(requests, 2 * slots)
            decoders = self._decoders(slots, max_len, packs)
            decoders[0].cache.state_ids = kept
            for model in self.models:
                was_training = model.model.training
                model.model.eval()
                stack.callback(model.model.train, was_training)
                stack.enter_context(slot_attention_in(model.model))
            stack.callback(FeatureTap(self.models[0], kept).detach)
            rows: list[_Row] = []
            while waiting or rows:
                yield from self._admit(rows, waiting, requests, decoders, policy, stop_ids, signal, on_tokens)
                if deadline is not None and time.monotonic() >= deadline:
                    states = decoders[0].cache
                    yield from ((row.index, self._sample(row, False, slot, states)) for slot, row in enumerate(rows))
                    return
                if rows:
                    last = torch.tensor([row.tokens[-1] for row in rows])
                    logits = [decoder.step(last) for decoder in decoders]
                    self._append(rows, logits, policy, on_tokens)
                    yield from self._retire(rows, decoders, stop_ids)

    def _decoders(self, slots: int, max_len: int, packs: Sequence[_Packs]) -> list[SlotDecoder]:
        """Return the models' decoders, in the order in which they read."""
        decoders: list[SlotDecoder] = []
        for model, own in zip(self.models, packs, strict=True):
            if decoders and model.state_ids:
                decoders.append(StateDecoder(model, slots, max_len, *own, source=decoders[0].cache))
            else:
                decoders.append(SlotDecoder(model, slots, max_len, *own))
        return decoders

    def _admit(
        self,
        rows: list[_Row],
        waiting: list[int],
        requests: Sequence[GenerationRequest],
        decoders: list[SlotDecoder],
        policy: SamplingPolicy,
        stop_ids: Sequence[int],
        signal: SignalRequest | None,
        on_tokens: Callable[[int], None] | None,
    ) -> Iterator[tuple[int, Sample]]:
        """Fill free slots, a batch of prompts at a time. A few free slots wait for more."""
        slots = decoders[0].cache.slots
        while waiting and (not rows or slots - len(rows) >= max(1, slots // 8)):
            chosen = _prefill_batch(waiting, requests, slots - len(rows))
            prompts = [requests[i].prompt.token_ids for i in chosen]
            places = range(len(rows), len(rows) + len(chosen))
            logits = [decoder.prefill(list(places), prompts) for decoder in decoders]
            new = [_start(i, requests[i], signal) for i in chosen]
            self._append(new, logits, policy, on_tokens)
            rows.extend(new)
            yield from self._retire(rows, decoders, stop_ids)

    def _append(
        self,
        rows: list[_Row],
        logits: list[Tensor],
        policy: SamplingPolicy,
        on_tokens: Callable[[int], None] | None,
    ) -> None:
        """Draw the next token of every row and record the writer's signal at it."""
        probs = policy_probs(logits[0], policy)
        if len(logits) > 1:
            coins = torch.stack([row.uniforms[1, len(row.tokens)] for row in rows]).to(probs.device)
            from_other = coins < self.other_share
            probs = torch.where(from_other[:, None], policy_probs(logits[1], policy), probs)
        uniforms = torch.stack([row.uniforms[0, len(row.tokens)] for row in rows]).to(probs.device)
        tokens = draw(probs, uniforms).tolist()
        if rows[0].recorder is not None:
            SignalRecorder.record(logits[0], [row.recorder for row in rows if row.recorder is not None])
        for row, token in zip(rows, tokens, strict=True):
            row.tokens.append(token)
        if on_tokens is not None:
            on_tokens(len(rows))

    def _retire(
        self, rows: list[_Row], decoders: list[SlotDecoder], stop_ids: Sequence[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Yield finished rows. The last row moves into each freed slot so that active slots stay first."""
        for place in range(len(rows) - 1, -1, -1):
            row = rows[place]
            stopped = row.tokens[-1] in stop_ids
            if not stopped and len(row.tokens) < row.request.max_new_tokens:
                continue
            sample = self._sample(row, stopped, place, decoders[0].cache)
            last = rows.pop()
            if place < len(rows):
                rows[place] = last
                for decoder in decoders:
                    decoder.move(len(rows), place)
            yield row.index, sample

    def _sample(self, row: _Row, stopped: bool, slot: int, cache: SlotCache) -> Sample:
        prompt = row.request.prompt
        return Sample(
            prompt_id=prompt.id,
            domain=prompt.domain,
            prompt_ids=prompt.token_ids,
            response_ids=tuple(row.tokens),
            signal=row.recorder.finish() if row.recorder is not None else None,
            source=self.source,
            finished=stopped,
            states=self._states(cache, slot, len(prompt.token_ids) + len(row.tokens) - 1),
        )

    def _states(self, cache: SlotCache, slot: int, count: int) -> RecordedStates | None:
        """Return the states of the first `count` tokens of a slot: all that the writer has read."""
        states = states_of_text(cache, slot, count) if self.states.ids else None
        return None if states is None else self.states.record(states)

    def _check_lengths(self, requests: Sequence[GenerationRequest], max_len: int) -> None:
        if any(len(r.prompt.token_ids) == 0 for r in requests):
            raise ConfigError("an empty prompt cannot be answered; give at least one token")
        for model in self.models:
            limit = model.longest_text
            if limit is not None and max_len > limit:
                raise ConfigError(
                    f"prompt and response need {max_len} tokens, but {model.name} reads at most {limit}; "
                    "lower data.max_new_tokens or data.max_prompt_tokens"
                )


def _packed(model: LanguageModel, slots: int, requests: Sequence[GenerationRequest], stack: ExitStack) -> _Packs:
    """Pack a model's weights until the stack closes, where so many steps follow that it pays."""
    steps = sum(request.max_new_tokens for request in requests) / slots
    if steps < PACKED_STEPS or not PackedLinears.helps(model):
        return None, None
    # All steps or none: those of many and of few rows would round differently, and texts depend on their neighbours.
    native = NativeLayers.of(model, tokens=slots)
    packs = PackedLinears(model, tokens=(slots,))
    packs.attach()
    stack.callback(packs.detach)
    return packs, native


def _neighbours_alike(requests: Sequence[GenerationRequest], block: int) -> list[int]:
    """Return the requests' indices in reverse order of admission: blocks in order, each sorted by length.

    The rows of one prefill then have similar lengths.
    """
    order: list[int] = []
    for start in range(0, len(requests), block):
        members = range(start, min(start + block, len(requests)))
        order += sorted(members, key=lambda i: -len(requests[i].prompt.token_ids))
    return order[::-1]


def _prefill_batch(waiting: list[int], requests: Sequence[GenerationRequest], free: int) -> list[int]:
    """Take from the end of `waiting` the prompts that fit the free slots and one padded forward pass."""
    chosen: list[int] = []
    longest = 0
    while waiting and len(chosen) < free:
        longest = max(longest, len(requests[waiting[-1]].prompt.token_ids))
        if chosen and longest * (len(chosen) + 1) > PREFILL_TOKENS:
            break
        chosen.append(waiting.pop())
    return chosen


def _start(index: int, request: GenerationRequest, signal: SignalRequest | None) -> _Row:
    generator = torch.Generator().manual_seed(request.seed)
    uniforms = torch.rand(2, request.max_new_tokens, generator=generator, dtype=torch.float64)
    recorder = None if signal is None else SignalRecorder(signal, request.seed)
    return _Row(index, request, uniforms, recorder=recorder)
