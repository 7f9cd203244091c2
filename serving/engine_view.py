"""Parts and state of an engine, for servers, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.features import states_of_text
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.threads import settle
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.engine_drafts import EngineDrafts
from distillspec.serving.execution.draft_room import DraftRoom
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.proposers.base import Proposer, forget_answers, health_of, keeps_answers, versions_of
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.sequences.scheduler import Limits
from distillspec.serving.step.commit import Committer, Observer
from distillspec.serving.step.core import EngineCore
from distillspec.serving.step.model_executor import ModelExecutor


class EngineView:
    """Parts and state of an engine. Read and change them between steps, from the stepping thread.

    Only `clock`, `observer` and `before_step` may be assigned.
    """

    def __init__(self, core: EngineCore, executor: ModelExecutor, drafts: EngineDrafts) -> None:
        self._core, self._executor, self._drafts = core, executor, drafts

    @property
    def controller(self) -> LengthController:
        """The length controller in use."""
        return self._core.controller

    @property
    def proposer(self) -> Proposer | None:
        """The proposer in use, None without speculation."""
        return self._executor.proposer

    @property
    def runner(self) -> ModelRunner:
        """Forward passes of the target over its slot cache."""
        return self._executor.runner

    @property
    def sampler(self) -> TokenSampler:
        """Verification and sampling of tokens."""
        return self._executor.sampler

    @property
    def committer(self) -> Committer:
        """Writes verdicts into sequences, texts and the cache."""
        return self._executor.committer

    @property
    def sequences(self) -> SequenceManager:
        """All unfinished sequences and the slots they hold."""
        return self._core.sequences

    @property
    def limits(self) -> Limits:
        """Slots, tokens and lookahead that steps are planned within."""
        return self._core.limits

    @property
    def last_result(self) -> StepResult | None:
        """The last step that ran anything, None before."""
        return self._core.last_result

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds that deadlines and statistics are measured in. Assign another for simulated time."""
        return self._core.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self._core.clock = clock

    @property
    def observer(self) -> Observer | None:
        """Sees the target's raw logits at every emitted token. None (the default) observes nothing."""
        return self._executor.committer.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._executor.committer.observer = observer

    @property
    def before_step(self) -> Callable[[], None] | None:
        """Called in the stepping thread before each step that has requests. None (the default): nothing is."""
        return self._core.before_step

    @before_step.setter
    def before_step(self, call: Callable[[], None] | None) -> None:
        self._core.before_step = call

    @property
    def drafts(self) -> Mapping[str, LanguageModel]:
        """The drafts in use: `draft` is an engine's only one, those of a pool have names."""
        return self._drafts.loaded

    @property
    def draft(self) -> LanguageModel | None:
        """The only draft, or the pool's first. None without one."""
        return self._drafts.first

    def room_for(self, like: LanguageModel, name: str) -> DraftRoom:
        """Return the memory's room for one more draft of this name, as large as `like`."""
        return self._drafts.room_for(like, name)

    @property
    def draft_version(self) -> str:
        """The version of the draft in use, of several the first's. "" without one."""
        return "" if self.proposer is None else self.proposer.version

    @property
    def draft_versions(self) -> Mapping[str, str]:
        """The versions of the drafts in use, by source."""
        return versions_of(self.proposer)

    @property
    def draft_health(self) -> Mapping[str, bool]:
        """Drafts of a pool by source: False for those that raised, gave NaN or collapsed lately. Any thread may ask."""
        return health_of(self.proposer)

    @property
    def keeps_answers(self) -> bool:
        """True if the proposer looks up earlier answers."""
        return keeps_answers(self.proposer)

    def forget_prompts(self) -> None:
        """Drop the prefixes that idle slots remember, between steps: the next prompts are read whole."""
        self.sequences.forget_free()

    def forget_tenant(self, tenant: str) -> Future[None]:
        """Delete a tenant's answers that the proposer keeps, and the prefixes of idle slots, before the next step.

        Any thread may call it. The future ends then, with the `OSError` of files that stay.
        """
        done: Future[None] = Future()

        def forget() -> None:
            self.forget_prompts()
            forget_answers(self.proposer, tenant)

        self._core.at_next_step(lambda: settle(done, forget))
        return done

    def features(self, sequence_id: str) -> Tensor:
        """Return the states `feature_ids` of the tokens that the target has read of a running sequence.

        Returns:
            `[n, len(feature_ids) · D]` in the target's dtype, see `FeatureTap`. Later steps may overwrite it.

        Raises:
            KeyError: the sequence (a request's id, a slash, and the answer's number) is not unfinished.
            ConfigError: the engine keeps none, or the sequence holds no slot.
        """
        sequence, cache = self.sequences.unfinished[sequence_id], self.runner.cache
        states = None if sequence.slot is None else states_of_text(cache, sequence.slot, sequence.computed)
        if states is None:
            raise ConfigError(
                f"no features of {sequence_id}: it needs feature_ids=[…], and a step that read its prompt"
            )
        return states

    def explain_last_plan(self) -> Any:
        """Return the controller's reasons for the last plan, None before any plan and where it gives none."""
        return None if self.last_result is None else self.last_result.plan.why

    def check_integrity(self) -> None:
        """Raise AssertionError where slots, sequences and caches disagree."""
        self.sequences.check_integrity()
