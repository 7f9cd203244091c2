"""Inputs of the losses at N positions, and the form of their results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses.pairs import (
    BucketedPair,
    check_temperature,
    columns_of,
    full_pair,
    kept_pair,
    topk_pair,
    truncated_pair,
)
from distillspec.sampling import NonFiniteLogits, bad_row
from distillspec.signals import TeacherSignal


@dataclass(frozen=True)
class PerTokenLoss:
    """A loss at N positions.

    Where `valid` is False the loss is undefined and its value is 0.
    """

    values: Tensor  # [N] nats
    valid: Tensor  # [N] bool
    outside: Tensor  # [N] target probability on tokens that the draft's vocabulary lacks


@dataclass(frozen=True)
class LossInputs:
    """N positions: the draft's logits, the target's view of the same positions, and the tokens sampled there.

    At most one of `target_logits` (a live target) and `signal` (a recorded one) is given. Every loss but `ce` needs
    one. Widths may differ only through `kept_ids`.

    Raises:
        ValueError: shapes do not fit.
        ConfigError: `temperature` is not 1 with a recorded signal, which holds temperature 1 alone.
    """

    draft_logits: Tensor  # [N, Vd]
    target_logits: Tensor | None = None  # [N, V], or [N, Vd] with their log-sum-exp over V
    target_log_z: Tensor | None = None  # [N] float32
    signal: TeacherSignal | None = None  # N rows
    kept_ids: Tensor | None = None  # [Vd] int64, absolute id of each draft column
    labels: Tensor | None = None  # [N] int64, absolute ids, negative for none
    from_draft: Tensor | None = None  # [N] bool, the label was sampled from the draft
    advantage: Tensor | None = None  # [N] float32, for tvdpp. None computes it from these N
    writer_logprobs: Tensor | None = None  # [N] float32, of the labels when they were drawn, NaN where unknown
    temperature: float = 1.0
    first_position: int = 0  # of row 0 within the batch, for error messages

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.target_logits is not None and self.signal is not None:
            raise ValueError("give target_logits or a recorded signal, not both")
        if (self.signal is not None or self.target_log_z is not None) and self.temperature != 1.0:
            raise ConfigError(
                f"loss temperature={self.temperature} needs a live teacher: recorded signals hold "
                "temperature 1; set temperature=1 or drop the recorded signal"
            )
        self._check_widths()
        self._check_rows()

    @cached_property
    def pair(self) -> BucketedPair:
        """Return both distributions over common buckets, built once for all losses of a mix."""
        if self.target_logits is not None and self.target_log_z is not None:
            return kept_pair(self.draft_logits, self.target_logits, self.target_log_z[:, None])
        if self.target_logits is not None and self.kept_ids is not None:
            return truncated_pair(self.draft_logits, self.target_logits, self.kept_ids, self.temperature)
        if self.target_logits is not None:
            return full_pair(self.draft_logits, self.target_logits, self.temperature)
        assert self.signal is not None, "callers use has_pair first"
        return topk_pair(self.draft_logits, self.signal, self.kept_ids)

    @cached_property
    def bucket_pair(self) -> BucketedPair:
        """Return `pair` with a recorded tail as one bucket, even if tokens were drawn from it."""
        if self.signal is None or self.signal.tail_ids is None:
            return self.pair
        return topk_pair(self.draft_logits, replace(self.signal, tail_ids=None, tail_logprobs=None), self.kept_ids)

    @property
    def has_pair(self) -> bool:
        """True with a live target or a `topk` signal: whole distributions can be compared."""
        return self.target_logits is not None or (self.signal is not None and self.signal.kind == "topk")

    @cached_property
    def label_columns(self) -> Tensor:
        """Return the draft column of each label, `[N]` int64, −1 where there is none."""
        if self.labels is None:
            raise ConfigError("the losses ce and tvdpp need labels: the next token at each position")
        return columns_of(self.labels, self.kept_ids, self.draft_logits.shape[-1])

    def require_finite(self, owner: str) -> None:
        """Raise `NonFiniteLogits`, naming the loss `owner` and the position, for NaN or +inf logits."""
        if self._problem is not None:
            raise NonFiniteLogits(f"{owner}: {self._problem}")

    @cached_property
    def _problem(self) -> str | None:
        recorded = None if self.signal is None else self.signal.logprobs
        owners = {"draft logits": self.draft_logits, "target logits": self.target_logits, "signal": recorded}
        for owner, values in owners.items():
            problem = None if values is None else bad_row(values, self.first_position)
            if problem is not None:
                return f"{owner}: {problem}"
        return None

    def _check_widths(self) -> None:
        width = self.draft_logits.shape[-1]
        if self.kept_ids is not None and self.kept_ids.shape != (width,):
            raise ValueError(f"kept_ids {tuple(self.kept_ids.shape)} must name each of the {width} draft columns")
        whole = self.kept_ids is None or self.target_log_z is not None
        if self.target_logits is not None and whole and self.target_logits.shape[-1] != width:
            raise ValueError(
                f"draft logits have {width} columns, target logits {self.target_logits.shape[-1]}; "
                "slice padded columns off, or pass kept_ids for a truncated draft vocabulary"
            )

    def _check_rows(self) -> None:
        rows = self.draft_logits.shape[0]
        for name in ("target_logits", "target_log_z", "signal", "labels", "from_draft", "advantage", "writer_logprobs"):
            value = getattr(self, name)
            if value is not None and len(value) != rows:
                raise ValueError(f"{name} has {len(value)} rows, draft_logits {rows}")
