"""A request (`Request`), its answers in the making (`SequenceState`), and its results (`RequestOutput`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from distillspec.errors import RunError
from distillspec.serving.base.acceptance import AcceptanceCounter, Trial, accepted_by_source
from distillspec.serving.base.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestRefused(RunError, ValueError):
    """The engine cannot serve this request. The message gives the reason."""


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Args:
        id: chosen by the caller, unique among unfinished requests.
        prompt_ids: at least one token.
        params: see `SamplingParams`.
        priority: lower goes first, as in vLLM; among equal ones tenants take turns, each in order of arrival.
        deadline_s: seconds after submission at which the request ends unfinished, reason `abort`.
        tenant: owner of the request, for logs and limits. Cached prompts are never shared between tenants.
        cache_salt: shares cached prompts only with the tenant's requests of the same salt (vLLM's `cache_salt`).
        domain: kind of text, in the caller's words. Acceptance is counted by domain.
        log: False keeps it out of the logs that online adaptation learns from.
        max_time_per_token_s: bound on the expected time per output token, for controller=goodput. None: the engine's.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = "default"
    cache_salt: str = ""
    domain: str = "default"
    log: bool = True
    max_time_per_token_s: float | None = None

    @property
    def cache_key(self) -> tuple[str, str]:
        """Requests with an equal key may reuse each other's cached prefixes."""
        return self.tenant, self.cache_salt


class Status(Enum):
    WAITING = "waiting"  # for a slot, first or again after preemption
    PREFILL = "prefill"  # in a slot, its text not read whole
    DECODE = "decode"  # in a slot, everything but its newest token read
    FINISHED = "finished"


@dataclass
class RequestStats:
    """Statistics of one answer. Times are seconds on the engine's clock."""

    submitted_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    steps: int = 0  # passes of the target that emitted tokens of this request
    proposed: int = 0  # drafted tokens that were verified
    acceptance: AcceptanceCounter = field(default_factory=AcceptanceCounter)
    draft_versions: list[str] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)  # windows in which tokens of each source were tried
    accepted_by_source: dict[str, int] = field(default_factory=dict)  # its tokens that were emitted, for each of these
    preemptions: int = 0
    prefix_tokens: int = 0  # prompt tokens taken from the prefix cache

    @property
    def queue_s(self) -> float | None:
        return None if self.admitted_s is None else self.admitted_s - self.submitted_s

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.submitted_s

    @property
    def total_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.submitted_s

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted."""
        return self.acceptance.accepted

    @property
    def tried_per_position(self) -> list[int]:
        """Windows in which a drafted token was tried at each position."""
        return self.acceptance.tried_at

    @property
    def accepted_per_position(self) -> list[int]:
        """Windows in which one was accepted there."""
        return self.acceptance.accepted_at

    @property
    def acceptance_rate(self) -> float | None:
        """α per trial. None before any trial."""
        return self.acceptance.rate

    def record_verification(self, nodes: int, depth: int, trials: Iterable[Trial], emitted: int) -> None:
        """Count one verified window.

        Args:
            nodes: drafted tokens that were verified.
            depth: levels of their tree.
            trials: what was tried.
            emitted: tokens that became text.
        """
        found = tuple(trials)
        self.proposed += nodes
        self.acceptance.add(found, emitted, depth)
        for source, accepted in accepted_by_source(found).items():
            self.sources[source] = self.sources.get(source, 0) + 1
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + accepted


@dataclass
class SequenceState:
    """One answer in the making, one of the `params.n` of a request. Only the engine changes it."""

    id: str
    request: Request
    index: int  # which of the request's n answers
    arrival: int  # order of submission
    tokens: list[int]  # prompt and output
    stop_ids: frozenset[int]
    max_output: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    status: Status = Status.WAITING
    slot: int | None = None
    computed: int = 0  # leading tokens whose keys and values the target's cache holds
    turn: int = 0  # among waiting answers of all tenants, see `TenantTurns`
    speculates: bool = True  # False after NaN in the target's logits at drafted tokens
    failed_sources: set[str] = field(default_factory=set)  # whose tokens gave NaN, or that raised or rest after it
    candidates: tuple[int, ...] = ()  # what the target drew for its next token, one of which will be it
    text: str | None = ""  # None where the engine has no tokenizer
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    forgotten: bool = False  # its tenant was deleted: nothing of it is kept when it ends
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    prompt_length: int = field(init=False)  # stored, since the scheduler reads it several times a step

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt_ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def room(self) -> int:
        """Tokens it may still write."""
        return self.max_output - self.output_length

    @property
    def held_slot(self) -> int:
        """The slot of a sequence that has one."""
        assert self.slot is not None, f"{self.id} holds no slot"
        return self.slot

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True)
class TokenLogprob:
    """The target's raw log-probability (nats, before any transform) of a token, and of the best alternatives."""

    token: int
    logprob: float
    best: dict[int, float]


@dataclass(frozen=True)
class SequenceDelta:
    """New tokens and text of one answer in one step.

    `text` never splits a character and never holds a stop string. It is empty where the engine has no tokenizer.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One finished answer. `text` is None where the engine has no tokenizer."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    stats: RequestStats


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `token_ids`, `text`, `finish_reason` and `stats` are those of its first answer."""

    request_id: str
    prompt_ids: tuple[int, ...]
    completions: tuple[CompletionOutput, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def text(self) -> str | None:
        return self.completions[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def stats(self) -> RequestStats:
        return self.completions[0].stats
