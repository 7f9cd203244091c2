"""Records of the log: one answer with its token ids, the target's signal and the draft's verdict at every token."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.serving.base.owner_files import hashed
from distillspec.serving.online.log.rejected_nodes import RejectedNodes
from distillspec.signals import TeacherSignal
from distillspec.types import ModelIdentity, RecordedStates, Sample, SamplingPolicy

ACCEPTED, REJECTED, BONUS, PLAIN = range(4)
"""Origin of a token. ACCEPTED: drafted and accepted. REJECTED: the draft proposed another one, `draft_tokens`. BONUS:
after a draft accepted in whole. PLAIN: the draft model drafted nothing (length 0, or a prompt lookup proposed)."""


@dataclass(frozen=True)
class LogKey:
    """Target whose signal is logged. Records of another target, tokenizer or size are refused."""

    weights_hash: str
    tokenizer_hash: str
    vocab_size: int
    entries: int

    @classmethod
    def of(cls, target: ModelIdentity, entries: int) -> LogKey:
        return cls(target.weights_hash, target.tokenizer_hash, target.vocab_size, min(entries, target.vocab_size))


@dataclass(frozen=True)
class LoggedAnswer:
    """One answer of R tokens. Row t belongs to token t."""

    request_id: str
    index: int
    tenant: str
    domain: str
    policy: SamplingPolicy
    time_s: float
    finished: bool  # ended by a stop token
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    signal: TeacherSignal  # topk, [R, K]: raw, before the request's transforms
    policy_logprobs: Tensor  # [R] float16: log p of the token at the policy's temperature, NaN where it judges no draft
    policy_log_z: Tensor  # [R] float16: log Σ exp(raw log-probability / temperature) over all tokens
    outcomes: Tensor  # [R] uint8: ACCEPTED, REJECTED, BONUS, PLAIN
    draft_tokens: Tensor  # [R] int32, −1 where nothing was drafted
    draft_probs: Tensor  # [R] float16: q of the drafted token, NaN where nothing was drafted
    draft_entropies: Tensor  # [R] float16, nats: 0 for deterministic proposals, NaN for none
    draft_versions: tuple[str, ...]  # distinct, in order of use. "": no draft, or a prompt lookup.
    version_of: Tensor  # [R] uint8: index into `draft_versions`
    states: RecordedStates | None = None  # of the target, for drafts that read some
    nodes: RejectedNodes | None = None  # drafted tokens that were not accepted, with adapt.positions=verified

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def tried(self) -> int:
        """Drafted tokens that were accepted or rejected: α = accepted / tried."""
        return int((self.outcomes <= REJECTED).sum())

    @property
    def accepted(self) -> int:
        return int((self.outcomes == ACCEPTED).sum())

    @property
    def draft(self) -> str:
        """The draft version in use for most of its tokens, "" where no draft was."""
        counts = torch.bincount(self.version_of.long(), minlength=len(self.draft_versions)).tolist()
        tokens = {name: count for name, count in zip(self.draft_versions, counts, strict=False) if name}
        return max(tokens, key=lambda name: tokens[name]) if tokens else ""

    @property
    def state_bytes(self) -> int:
        return 0 if self.states is None else self.states.nbytes

    def sample(self) -> Sample:
        """Return the answer as a sample for training and evaluation."""
        return Sample(
            prompt_id=f"{self.request_id}/{self.index}",
            domain=self.domain,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            signal=self.signal,
            source="teacher",
            finished=self.finished,
            states=self.states,
        )


@dataclass(frozen=True)
class LogEntry:
    """Manifest row of one answer. `number` grows in the order of arrival and is never used again."""

    number: int
    shard: int
    place: int
    request_id: str
    tenant: str
    domain: str
    conversation: int  # number of its first answer: repeated prompts, and further turns, are no evidence of their own
    tokens: int
    tried: int
    accepted: int
    time_s: float
    draft: str = ""  # `LoggedAnswer.draft`

    @property
    def tenant_hash(self) -> str:
        """Name that stands for the tenant in files which its deletion does not reach."""
        return hashed(self.tenant)

    def is_of(self, answer: LoggedAnswer) -> bool:
        """Return True if `answer` is the one this row describes."""
        known = (self.request_id, self.tenant, self.time_s, self.tokens)
        return known == (answer.request_id, answer.tenant, answer.time_s, len(answer))


def share_of(request_id: str, purpose: str) -> float:
    """Hash a request and a purpose to a number in [0, 1), the same in every process."""
    digest = hashlib.sha256(f"{purpose}\x1f{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
