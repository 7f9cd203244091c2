"""Parts and state of an engine, for servers, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

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
from distillspec.serving.proposers.base import Proposer, versions_of
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.sequences.scheduler import Limits
from distillspec.serving.step.commit import Committer, Observer
from distillspec.serving.step.core import EngineCore
from distillspec.serving.step.model_executor import ModelExecutor


class EngineView:
    """Parts and state of an engine. Read and change them between steps, from the stepping thread.

    Only `clock`, `observer`, `before_step`, `meanwhile` and `may_keep` may be assigned.
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
    def overlaps(self) -> bool:
        """True if the host is free while the target's pass runs: on devices of their own, not on CPUs."""
        return self._executor.overlaps

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """Called in the stepping thread while a device runs the target's pass, before its answer is waited for.

        None (the default): nothing is. Never called where nothing `overlaps`, nor in steps that wait for no answer. It
        may call `submit`, `abort` and `at_next_step`, and change nothing else of the engine. What it raises ends the
        step. Where it is called, outputs of steps may lack text until `StepOutput.written`, which is for this time.
        """
        return self._core.meanwhile

    @meanwhile.setter
    def meanwhile(self, call: Callable[[], None] | None) -> None:
        self._core.meanwhile = call

    @property
    def may_keep(self) -> Callable[[str], bool] | None:
        """Called with a request's tenant when it is submitted, in any thread: False makes it one with `log=False`."""
        return self._core.may_keep

    @may_keep.setter
    def may_keep(self, call: Callable[[str], bool] | None) -> None:
        self._core.may_keep = call

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
        proposer = self.proposer  # read once: the engine's thread may replace it
        return "" if proposer is None else proposer.version

    @property
    def draft_versions(self) -> Mapping[str, str]:
        """The versions of the drafts in use, by source."""
        return versions_of(self.proposer)

    @property
    def draft_health(self) -> Mapping[str, bool]:
        """Drafts of a pool by source: False for those that raised, gave NaN or collapsed lately. Any thread may ask."""
        proposer = self.proposer  # read once: the engine's thread may replace it
        return {} if proposer is None else proposer.healthy

    @property
    def keeps_answers(self) -> bool:
        """True if the proposer looks up earlier answers."""
        proposer = self.proposer  # read once: the engine's thread may replace it
        return proposer is not None and proposer.keeps_answers

    def forget_prompts(self) -> None:
        """Drop the prefixes that idle slots remember, between steps: the next prompts are read whole."""
        self.sequences.forget_free()

    def keep_answers_in(self, folder: Path) -> Future[None]:
        """Let the proposer keep on disk what it learns from answers, where it can and has no folder yet.

        Any thread may call it. The future ends before the next step, with a `RunError` if the folder cannot be made.
        """
        width = self.sampler.columns.width

        def keep() -> None:
            if self.proposer is not None:
                self.proposer.keep_in(folder, width)

        return self._between_steps(keep)

    def forget_tenant(self, tenant: str) -> Future[None]:
        """Delete a tenant's text before the next step: answers that the proposer keeps, and what idle slots hold.

        Nothing is kept of its requests that run, when they end. Idle prefixes of other tenants go too, and the words
        that the tokenizer remembers.

        Any thread may call it. The future ends then, with the `OSError` of files that stay.
        """

        def forget() -> None:
            self.sequences.forget_tenant(tenant)
            self._core.wipe()
            _forget_words(self.sequences.tokenizer)
            if self.proposer is not None:
                self.proposer.forget_tenant(tenant)

        return self._between_steps(forget)

    def changes_made(self) -> Future[None]:
        """Return a future that ends when the changes that were queued before, drafts above all, have been made."""
        return self._between_steps(lambda: None)

    def _between_steps(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` in the stepping thread before the next step. The future ends as it does."""
        done: Future[None] = Future()
        self._core.at_next_step(lambda: settle(done, work))
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
        slot = None if sequence.slot in cache.lacking else sequence.slot
        states = None if slot is None else states_of_text(cache, slot, sequence.computed)
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


def _forget_words(tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Empty the cache in which a tokenizer written in Rust keeps words and their tokens. It fills again."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if (clear := getattr(model, "_clear_cache", None)) is not None:
        clear()
