"""`Engine`: target and draft in one process, continuous batching, exact speculative decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from distillspec.config import TargetConfig
from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel, load_target
from distillspec.models.checkpoint import check_target
from distillspec.models.features import check_feature_ids
from distillspec.models.memory import return_freed_memory
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request, RequestOutput
from distillspec.serving.control.base import LengthController, TakesCosts
from distillspec.serving.control.wrapped import innermost
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.draft_loading import check_finite, load_draft, version_of
from distillspec.serving.engine_builder import build_parts, kept_states
from distillspec.serving.engine_view import EngineView
from distillspec.serving.execution.graphs import Recorder
from distillspec.serving.execution.memory import check_draft_fits, check_reads
from distillspec.serving.execution.servable import check_servable
from distillspec.serving.proposers.base import Proposer
from distillspec.serving.proposers.named import uses_draft
from distillspec.serving.start_costs import measure_at_start
from distillspec.serving.step.output import StepOutput
from distillspec.serving.timed_passes import TimedPasses


class Engine(EngineView):
    """Serves one target, with a draft if there is one.

        engine = Engine.from_pretrained("smollm2", draft="runs/my-draft")
        outputs = engine.generate(["Why is the sky blue?"], SamplingParams(max_tokens=64))

    `generate` answers a list and returns. A server calls `submit` and `abort` from any thread and `step` in a loop on
    one. The engine holds the models until `close`. `costs` are the costs of steps by the profile, or measured at the
    start; None if neither was.

    Args:
        target, draft: loaded models. A draft is needed where `settings.proposer` names one that drafts with a model.
        settings: see `EngineConfig`.
        controller, proposer, recorder, sampler: replace those that the settings name.

    Raises:
        ConfigError: models, settings and machine do not fit together. The models are then as before.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None = None,
        settings: EngineConfig | None = None,
        *,
        controller: LengthController | None = None,
        proposer: Proposer | None = None,
        recorder: Recorder | None = None,
        sampler: TokenSampler | None = None,
    ) -> None:
        self.settings = settings or EngineConfig()
        self.target, self.draft = target, draft
        parts = build_parts(
            target,
            draft,
            self.settings,
            controller=controller,
            proposer=proposer,
            recorder=recorder,
            sampler=sampler,
        )
        self._cache = parts.cache
        self.slots, self.max_model_len = parts.cache.slots, parts.cache.max_len
        super().__init__(parts.core, parts.executor)
        self._models, self._proposers = parts.models, parts.proposers
        self._ids = count()
        self.costs = parts.costs or self._measured_costs()

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        **settings: Any,
    ) -> Engine:
        """Load models and build an engine.

        Args:
            target: `smollm2`, `tiny`, a Hub id, a folder or a .gguf file.
            draft: a distillspec draft folder, or any causal language model with the target's tokenizer.
            dtype: auto (bfloat16 where the hardware multiplies it, else float32), float32, bfloat16, float16, float64.
            device: auto, cpu, cuda, cuda:1, …
            settings: see `EngineConfig`.

        Raises:
            ConfigError: a setting, a model or their combination is impossible. The message names it.
        """
        known = EngineConfig.__dataclass_fields__
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(f"{unknown[0]} is not an engine setting; there are {', '.join(known)}")
        chosen = EngineConfig(**settings)
        model = load_target(TargetConfig(path=target, dtype=dtype, device=device))
        if draft is not None:
            check_target(draft, model)
        return cls(model, None if draft is None else load_draft(draft, model), chosen)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts (raw text or token ids), in order.

        Args:
            params: one for all, or one each.
            progress: show a bar with tokens a second.

        Raises:
            RequestRefused: a prompt that could never run. Nothing is answered then.
            ConfigError: the number of params differs from the number of prompts.
        """
        chosen = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(chosen) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(chosen)} sampling parameters; give one, or one each")
        requests = [
            Request(f"generate-{next(self._ids)}", self.encode(prompt), own)
            for prompt, own in zip(prompts, chosen, strict=True)
        ]
        for request in requests:
            self.check(request)
        try:
            for request in requests:
                self.submit(request)
            done = self.run_until_done([request.id for request in requests], progress=progress)
        except BaseException:
            for request in requests:
                self.abort(request.id)
            raise
        return [done[request.id] for request in requests]

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of raw text. Token ids are returned unchanged.

        Raises:
            ConfigError: text, and the target has no tokenizer.
        """
        ids = self.target.text_tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        return tuple(int(i) for i in ids)

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences that `params` bans, from any thread. See `SequenceManager.bad_words`."""
        return self._core.sequences.bad_words(params)

    def check(self, request: Request) -> None:
        """Raise what `submit` would raise, submit nothing."""
        self._core.check(request)

    def submit(self, request: Request) -> None:
        """Queue a request for the next step, from any thread, without waiting. See `EngineCore.submit`."""
        self._check_open()
        self._core.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request at the next step, from any thread, without waiting. See `EngineCore.abort`."""
        self._core.abort(request_id)

    @property
    def has_work(self) -> bool:
        """True while requests are unfinished or changes are queued."""
        return self._core.has_work

    def step(self) -> StepOutput:
        """Advance every running request once. See `EngineCore.step`."""
        self._check_open()
        return self._core.step()

    def at_next_step(self, change: Callable[[], None]) -> None:
        """Queue `change` to run in the stepping thread before the next step, from any thread."""
        self._core.at_next_step(change)

    def run_until_done(self, request_ids: Collection[str], *, progress: bool = False) -> dict[str, RequestOutput]:
        """Step until all these submitted requests are finished. Return their outputs by id."""
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(request_ids), disable=not progress, unit="request") as bar:
            tokens = 0
            while len(done) < len(request_ids):
                output = self.step()
                tokens += sum(len(delta.token_ids) for delta in output.deltas)
                new = {o.request_id: o for o in output.finished if o.request_id in request_ids}
                done.update(new)
                bar.update(len(new))
                if progress:
                    bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
        return done

    def load_draft(self, path: str | Path, acceptance: float | None = None) -> str:
        """Draft with another draft from the next step on, while requests run. Return its version.

        All loading and checking happens first, in the caller's thread. Both drafts' weights are in memory until the
        switch. Greedy and seeded outputs do not change, others keep their distribution.

        Args:
            acceptance: of the new draft over that of the old one. None: not known, the controller finds out.

        Raises:
            ConfigError: the draft is refused, and the old one stays.
        """
        self._check_open()
        if not uses_draft(self.settings, with_draft=True):
            raise ConfigError(f"proposer={self.settings.proposer} uses no draft; {path} is not loaded")
        draft = load_draft(path, self.target)
        check_target(path, self.target)
        check_finite(draft)
        check_reads(draft, self.max_model_len)
        check_servable(draft, self.max_model_len)
        check_feature_ids(self.target, draft.state_ids)
        check_draft_fits(self.settings, self.target, self.draft, draft, self._cache, kept_states(self.settings, draft))
        return self.use_draft(draft, acceptance=acceptance)

    def use_draft(self, draft: LanguageModel, version: str | None = None, *, acceptance: float | None = None) -> str:
        """Draft with a loaded model, unchecked, from the next step on. Return its version (default: weights' hash)."""
        version = version_of(draft) if version is None else version
        self._models.hold(draft, exact=False)
        try:
            proposer = self._proposers.build(draft, version)
        except ConfigError:
            self._models.release(draft)
            raise

        def switch() -> None:
            old, self.draft = self.draft, draft
            self._keep_states(draft)
            self._replace_proposer(proposer, acceptance)
            if old is not None:
                self._models.release(old)
                return_freed_memory()

        self.at_next_step(switch)
        return version

    def _keep_states(self, draft: LanguageModel) -> None:
        """Keep the target's states that a draft reads. Running sequences are read again, if some were not kept."""
        if set(draft.state_ids) <= set(self.runner.cache.state_ids):
            return
        self._models.prepared(self.target).hand_out(ids := kept_states(self.settings, draft))
        self.runner.keep_states(ids)
        self._core.read_again()

    def use_proposer(self, proposer: Proposer | None) -> None:
        """Draft with another proposer from the next step on, None: do not speculate. The draft model stays held."""
        self.at_next_step(lambda: self._replace_proposer(proposer))

    def _replace_proposer(self, proposer: Proposer | None, acceptance: float | None = None) -> None:
        self._executor.use_proposer(proposer)
        self._core.draft_changed(acceptance)

    def use_controller(self, controller: LengthController) -> None:
        """See `EngineCore.use_controller`. Call between steps, from the thread that steps."""
        self._core.use_controller(controller)

    def close(self) -> None:
        """Give the models back as they were, and free caches and packed weights. More calls do nothing."""
        self._models.release_all()
        self._executor.release()
        return_freed_memory()

    def timed_passes(self, clock: Callable[[], float] = time.perf_counter) -> TimedPasses:
        """Return passes of target and draft to be timed, for an idle engine."""
        return TimedPasses(self.target, self.runner, self.sampler, self.proposer, clock)

    def _measured_costs(self) -> LatencyModel | None:
        """Measure what steps cost for a controller that would else have to learn it. None: it has."""
        controller, budget_s, longest = innermost(self.controller), self.settings.measure_costs_s, self.limits.lookahead
        if not isinstance(controller, TakesCosts) or not budget_s or not longest or self.proposer is None:
            return None
        with_draft = uses_draft(self.settings, with_draft=self.draft is not None)
        costs = measure_at_start(self.timed_passes(), self.limits, longest, budget_s, with_draft=with_draft)
        self.forget_prompts()  # and give back the memory that was timed
        if costs is not None:
            controller.use_costs(costs)
        return costs

    def _check_open(self) -> None:
        if not self._models:
            raise RunError("this engine is closed, and its models are given back; make another")
