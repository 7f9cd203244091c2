"""The reference speculative decoder (Leviathan et al. 2023, Algorithm 1), batch 1, and plain decoding.

Written to be read: the engine's tests take it as their oracle. One turn of the loop is one run of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillspec.evaluation.cached import CachedModel
from distillspec.evaluation.verification import ChainVerdict, verify_chain, verify_greedy
from distillspec.models.language_model import LanguageModel
from distillspec.sampling import bad_row, check_logits, draw, policy_probs
from distillspec.types import SamplingPolicy


@dataclass(frozen=True)
class ReferenceOutput:
    """Decoded tokens. Entry s of the two lists belongs to run s of the target."""

    token_ids: tuple[int, ...]  # the response, its stop token included
    finished: bool  # ended by a stop token, not at the length limit
    speculation_length: int
    proposed_per_step: tuple[int, ...]
    accepted_per_step: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Return the runs of the target, the one that reads the prompt included."""
        return len(self.accepted_per_step)

    @property
    def proposed(self) -> int:
        return sum(self.proposed_per_step)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_step)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Return the number of steps in which proposal 1, 2, … γ was accepted."""
        return tuple(sum(n > i for n in self.accepted_per_step) for i in range(self.speculation_length))

    @property
    def block_efficiency(self) -> float:
        """Return τ: tokens a run of the target."""
        return len(self.token_ids) / max(self.steps, 1)


@dataclass(frozen=True)
class Streams:
    """Independent random numbers for proposals, acceptance, and residual or bonus draws.

    The residual draw must not depend on what decided acceptance. Streams of their own also keep each kind of
    draw the same when another kind takes more or fewer numbers.
    """

    propose: torch.Generator
    accept: torch.Generator
    residual: torch.Generator

    @classmethod
    def from_seed(cls, seed: int) -> Streams:
        return cls(*(torch.Generator().manual_seed(3 * seed + i) for i in range(3)))


@dataclass
class Proposal:
    """Drafted tokens (absolute ids) and, unless greedy, the distributions they were drawn from, `[V]` each."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)


def speculative_generate(
    draft: LanguageModel,
    target: LanguageModel,
    prompt_ids: Sequence[int],
    policy: SamplingPolicy,
    speculation_length: int,
    max_new_tokens: int,
    stop_ids: Sequence[int] | None = None,
    seed: int = 0,
) -> ReferenceOutput:
    """Decode with up to `speculation_length` proposals a step, distributed as `plain_generate` (greedy: equal to it).

    `stop_ids=None` means the target's own. Proposals never run past `max_new_tokens` or a stop token.

    Raises:
        NonFiniteLogits: the target's logits are NaN or +inf. The draft's only end its proposal.
    """
    stops = set(target.stop_ids if stop_ids is None else stop_ids)
    streams = Streams.from_seed(seed)
    reader, drafter = CachedModel(target), CachedModel(draft)
    tokens, end = list(prompt_ids), len(prompt_ids) + max_new_tokens
    proposed, accepted, finished = [], [], False
    while len(tokens) < end and not finished:
        # The step adds one token of the target's own, so one fewer than remain may be proposed.
        proposal = _propose(drafter, tokens, min(speculation_length, end - len(tokens) - 1), policy, stops, streams)
        logits = _read(reader, tokens + proposal.tokens, last=len(proposal.tokens) + 1)
        verdict = _verify(logits, proposal, policy, streams)
        standing = int(verdict.accepted)
        emitted = proposal.tokens[:standing]
        if not stops.intersection(emitted):
            emitted.append(int(verdict.next_token))
        tokens += emitted
        proposed.append(len(proposal.tokens))
        accepted.append(standing)
        finished = emitted[-1] in stops
        # Rejected tokens leave both caches. The newest token was not read by either yet.
        reader.crop(len(tokens) - 1)
        drafter.crop(len(tokens) - 1)
    response = tuple(tokens[len(prompt_ids) :])
    return ReferenceOutput(response, finished, speculation_length, tuple(proposed), tuple(accepted))


def plain_generate(
    target: LanguageModel,
    prompt_ids: Sequence[int],
    policy: SamplingPolicy,
    max_new_tokens: int,
    stop_ids: Sequence[int] | None = None,
    seed: int = 0,
) -> ReferenceOutput:
    """Decode one token a step with a key/value cache: the baseline."""
    stops = set(target.stop_ids if stop_ids is None else stop_ids)
    streams = Streams.from_seed(seed)
    reader = CachedModel(target)
    tokens, finished, steps = list(prompt_ids), False, 0
    while steps < max_new_tokens and not finished:
        logits = _read(reader, tokens, last=1)
        tokens.append(int(_verify(logits, Proposal(), policy, streams).next_token))
        finished = tokens[-1] in stops
        steps += 1
    nothing = (0,) * steps
    return ReferenceOutput(tuple(tokens[len(prompt_ids) :]), finished, 0, nothing, nothing)


def _propose(
    drafter: CachedModel,
    tokens: list[int],
    count: int,
    policy: SamplingPolicy,
    stops: set[int],
    streams: Streams,
) -> Proposal:
    """Draft up to `count` tokens after `tokens`, fewer after a stop token or logits that are NaN or infinite."""
    proposal, draft = Proposal(), drafter.model
    for _ in range(count):
        logits = _read(drafter, tokens + proposal.tokens, last=1)[0]
        if bad_row(logits) is not None:
            break
        if policy.is_greedy:
            column = logits.argmax(-1)
        else:
            probs = policy_probs(logits, policy)
            column = draw(probs, _uniforms(streams.propose, (), probs))
            proposal.probs.append(_full_width(draft, probs))
        proposal.tokens.append(int(draft.absolute_ids(column)))
        if proposal.tokens[-1] in stops:
            break
    return proposal


def _verify(logits: Tensor, proposal: Proposal, policy: SamplingPolicy, streams: Streams) -> ChainVerdict:
    """Accept or reject k proposals by the target's `logits [k + 1, V]`."""
    check_logits(logits, "target")
    drafted = torch.tensor(proposal.tokens, dtype=torch.int64, device=logits.device)
    if policy.is_greedy:
        return verify_greedy(logits.argmax(-1), drafted)
    target_probs = policy_probs(logits, policy)
    draft_probs = torch.stack(proposal.probs) if proposal.probs else target_probs[:0]
    accept_uniforms = _uniforms(streams.accept, drafted.shape, logits)
    next_uniforms = _uniforms(streams.residual, (), logits)
    return verify_chain(target_probs, draft_probs, drafted, accept_uniforms, next_uniforms)


def _read(cached: CachedModel, tokens: list[int], last: int) -> Tensor:
    """Read those of `tokens` that the cache does not hold yet. Return logits `[last, width]`."""
    unread = torch.tensor([tokens[cached.length :]], device=cached.model.device)
    return cached.extend(unread, last)[0]


def _full_width(draft: LanguageModel, probs: Tensor) -> Tensor:
    """Return `probs [width]` as `[V]`, zero for ids the draft does not keep."""
    if draft.kept_ids is None:
        return probs
    full = probs.new_zeros(draft.identity.vocab_size)
    return full.index_copy_(0, draft.kept_ids.to(probs.device), probs)


def _uniforms(generator: torch.Generator, shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float64).to(like.device)
