"""The length controller: before each step it plans, after it it observes. Planning is pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from distillspec.serving.tree import Source


class RowView(NamedTuple):
    """One decoding row as a controller sees it."""

    sequence_id: str
    context_tokens: int
    limit: int  # the most tokens that may be drafted: parameters, room and cache considered; 0 for rows that opt out
    drafted_by_model: bool = True
    match: int = 0  # tokens of text that a lookup found again; its proposals stand more often the more there are
    max_time_per_token_s: float | None = None  # this request's own bound; None: the engine's
    unread: int = 0  # tokens of its text that the draft model has not read


@dataclass(frozen=True)
class BatchView:
    """The next step's batch: decoding rows, prompt tokens read beside them, requests that wait."""

    rows: tuple[RowView, ...]
    prefill_tokens: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class WaitingView:
    """One request that waits for a slot."""

    sequence_id: str
    tokens: int  # of its text, to be read before it decodes
    waited_s: float


@dataclass(frozen=True)
class AdmissionView:
    """Who runs and who waits, those who go first first."""

    running: tuple[int, ...]  # tokens of each running row
    waiting: tuple[WaitingView, ...]
    slots: int
    cache_tokens: int  # over all rows


class RowPlan(NamedTuple):
    """How many tokens one row drafts; 0 is plain decoding.

    `draft_prefill` False: where the draft model has not read this row's text, it never will; draft-free proposers may
    still serve the row.
    """

    sequence_id: str
    length: int
    draft_prefill: bool = True


@dataclass(frozen=True)
class Plan:
    """A length for every row of the view, in its order; predictions where the controller makes any."""

    rows: tuple[RowPlan, ...]
    predicted_tokens: float | None = None
    predicted_s: float | None = None
    why: Any = None  # the controller's reasons, for people


class RowResult(NamedTuple):
    """What verification did for one row.

    `ranks`, for trees of several heads' candidates alone: the places that the target's tokens had in the heads' lists,
    up to the first that the tree did not hold. `levels`, for trees that are wider than one: how deep they went.
    """

    sequence_id: str
    proposed: int
    accepted: int
    emitted: int
    ranks: tuple[int, ...] = ()
    domain: str = "default"  # the request's
    source: Source = "draft"  # who proposed the tokens
    levels: int | None = None  # None: a chain, of as many levels as tokens

    @property
    def depth(self) -> int:
        """The most tokens that could have been accepted."""
        return self.proposed if self.levels is None else self.levels

    @property
    def tried(self) -> int:
        """Positions whose predecessors all stood: those accepted, and the first rejected one."""
        return min(self.accepted + 1, self.depth)

    def booked_to(self, version: str) -> str:
        """The draft that its acceptance counts for while `version` is in use; "" for a lookup's tokens."""
        return version if self.source == "draft" else ""


@dataclass(frozen=True)
class StepResult:
    """What a step did, for controllers, metrics and logs; times in seconds."""

    rows: tuple[RowResult, ...]
    view: BatchView
    plan: Plan
    prefill_tokens: int
    draft_s: float
    target_s: float
    total_s: float
    reserved_tokens: int = 0  # set aside in the cache, at the step's beginning


def decoding_rows(result: StepResult) -> Seq[RowResult]:
    """The results of rows that were decoding already; the others had their first token from their prompts."""
    if not result.prefill_tokens:
        return result.rows
    decoding = {row.sequence_id for row in result.view.rows}
    return [row for row in result.rows if row.sequence_id in decoding]


class LengthController(Protocol):
    """Chooses speculation lengths."""

    @property
    def longest(self) -> int:
        """The largest length it may ever plan; so many tokens a row are reserved ahead."""
        ...

    def plan(self, view: BatchView) -> Plan:
        """Pure: no clock, no model, no change of state; lengths within each row's limit."""
        ...

    def trim(self, view: BatchView, plan: Plan) -> tuple[int, ...]:
        """How many of each row's drafted tokens to verify at most. Pure.

        It must not depend on what was drawn: to drop a token because of its value (or because a chain ended at it)
        would change the distribution. So it is given what was planned, not what was drafted.
        """
        ...

    def observe(self, result: StepResult) -> None:
        """Learn from a step."""
        ...

    def draft_changed(self) -> None:
        """Another draft is used from now on: what was learnt of the old one is void."""
        ...


@runtime_checkable
class AdmissionController(Protocol):
    """A length controller that also says how many of those who wait are let in."""

    def admit(self, view: AdmissionView) -> int:
        """How many of the first in `view.waiting` may start; the scheduler admits as many of them as fit. Pure."""
        ...
