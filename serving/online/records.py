"""What is logged of one answer: its text as token ids, and what target and draft thought at every token of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from distillspec.types import ModelIdentity, Sample, SamplingPolicy, TeacherSignal

Split = Literal["train", "held_out"]

# How a token came about.
ACCEPTED, REJECTED, BONUS, PLAIN = range(4)
"""ACCEPTED: drafted, and stood. REJECTED: the draft proposed another one, `draft_tokens`. BONUS: after a whole
accepted draft. PLAIN: the draft model drafted nothing (length 0, or a prompt lookup proposed in its place)."""


@dataclass(frozen=True)
class LogKey:
    """Whose signal it is; records of another target, tokenizer or size are refused."""

    weights_hash: str
    tokenizer_hash: str
    vocab_size: int
    entries: int

    @classmethod
    def of(cls, target: ModelIdentity, entries: int) -> LogKey:
        return cls(target.weights_hash, target.tokenizer_hash, target.vocab_size, min(entries, target.vocab_size))


@dataclass(frozen=True)
class LoggedAnswer:
    """One answer of R tokens; row t is about token t."""

    request_id: str
    index: int
    tenant: str
    domain: str
    policy: SamplingPolicy
    time_s: float
    finished: bool  # ended by itself
    split: Split
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    signal: TeacherSignal  # topk, [R, K]: raw, before the request's transforms
    outcomes: Tensor  # [R] uint8: ACCEPTED, REJECTED, BONUS, PLAIN
    draft_tokens: Tensor  # [R] int32, −1 where nothing was drafted
    draft_probs: Tensor  # [R] float16: of the drafted token, as drawn from; NaN where nothing was drafted
    draft_entropies: Tensor  # [R] float16, nats; 0 for deterministic proposals, NaN where nothing was drafted
    draft_versions: tuple[str, ...]  # distinct, in order of use; "": no draft, or a lookup in its place
    version_of: Tensor  # [R] uint8: which of them was in use

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def tried(self) -> int:
        """Drafted tokens that were judged: α = accepted / tried."""
        return int((self.outcomes <= REJECTED).sum())

    @property
    def accepted(self) -> int:
        return int((self.outcomes == ACCEPTED).sum())

    def sample(self) -> Sample:
        """The answer as training and evaluation read it."""
        return Sample(
            prompt_id=f"{self.request_id}/{self.index}",
            domain=self.domain,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            signal=self.signal,
            source="teacher",
            finished=self.finished,
        )


def share_of(request_id: str, purpose: str) -> float:
    """A number in [0, 1) that a request has for a purpose, the same in every process."""
    digest = hashlib.sha256(f"{purpose}\x1f{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of(request_id: str, held_out: float) -> Split:
    """Held-out requests are chosen by their id: no trainer ever sees them, whenever it runs."""
    return "held_out" if share_of(request_id, "held out") < held_out else "train"
