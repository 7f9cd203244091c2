"""Length controller: plans before each step, observes after it. The same view gives the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView


@dataclass(frozen=True)
class WaitingView:
    """One sequence that waits for a slot."""

    sequence_id: str
    tokens: int  # of its text, to be read before it decodes
    waited_s: float


@dataclass(frozen=True)
class AdmissionView:
    """Running and waiting sequences, the most urgent first."""

    running: tuple[int, ...]  # tokens of each running row
    waiting: tuple[WaitingView, ...]
    slots: int
    cache_tokens: int  # over all rows


@runtime_checkable
class PlansTrees(Protocol):
    """A controller whose trees may have more nodes than levels."""

    @property
    def most_nodes(self) -> int:
        """The most tokens that it may plan for a row. As many places are reserved."""
        ...


class LengthController(Protocol):
    """Chooses speculation lengths."""

    speculation_length: int  # the largest length it may plan. As many tokens a row are reserved

    def plan(self, view: BatchView) -> Plan:
        """Plan lengths within each row's limit, by the view and the steps observed: no clock, no model."""
        ...

    def observe(self, result: StepResult) -> None:
        """Learn from a step. By default nothing."""
        return

    def draft_changed(self, change: DraftChange) -> None:
        """Forget what was learnt of a draft that is another from now on, new, or gone. By default nothing."""
        return


@runtime_checkable
class AdmissionController(Protocol):
    """A length controller that also decides how many waiting sequences are admitted."""

    def admit(self, view: AdmissionView) -> int:
        """Return how many of the first in `view.waiting` may start. The scheduler admits those that fit. Pure."""
        ...
