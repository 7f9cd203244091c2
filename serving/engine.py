"""`Engine`: target and draft in one process, continuous batching, exact speculative decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from distillspec.config import TargetConfig
from distillspec.config.engine import EngineConfig
from distillspec.config.pool import with_members
from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel, load_target
from distillspec.models.memory import return_freed_memory
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request, RequestOutput
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.draft_loading import device_of_drafts, load_drafts
from distillspec.serving.engine_builder import build_parts
from distillspec.serving.engine_drafts import EngineDrafts, by_source
from distillspec.serving.engine_view import EngineView
from distillspec.serving.execution.graphs import Recorder
from distillspec.serving.proposers.base import Proposer
from distillspec.serving.proposers.by_name import uses_draft
from distillspec.serving.start_costs import give_costs, measure_at_start, takes_costs
from distillspec.serving.step.output import StepOutput
from distillspec.serving.timed_passes import TimedPasses


class Engine(EngineView):
    """Serves one target, with a draft if there is one.

        engine = Engine.from_pretrained("smollm2", draft="runs/my-draft")
        outputs = engine.generate(["Why is the sky blue?"], SamplingParams(max_tokens=64))

    `generate` answers a list and returns. A server calls `submit` and `abort` from any thread and `step` in a loop on
    one. The engine holds the models until `close`. `costs` are the costs of steps by the profile, measured at the
    start, or given to `use_costs`; None without.

    Args:
        target, draft: loaded models. A draft is needed where `settings.proposer` names one that drafts with a model.
            Several are given by name.
        settings: see `EngineConfig`.
        controller, proposer, recorder, sampler: replace those that the settings name.

    Raises:
        ConfigError: models, settings and machine do not fit together. The models are then as before.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | Mapping[str, LanguageModel] | None = None,
        settings: EngineConfig | None = None,
        *,
        controller: LengthController | None = None,
        proposer: Proposer | None = None,
        recorder: Recorder | None = None,
        sampler: TokenSampler | None = None,
    ) -> None:
        self.settings = settings or EngineConfig()
        self.target = target
        parts = build_parts(
            target,
            by_source(draft),
            self.settings,
            controller=controller,
            proposer=proposer,
            recorder=recorder,
            sampler=sampler,
        )
        self._cache = parts.cache
        self.slots, self.max_model_len = parts.cache.slots, parts.cache.max_len
        self._models = parts.models
        own = parts.models, parts.proposers, parts.core, parts.executor, parts.cache
        super().__init__(parts.core, parts.executor, EngineDrafts(parts.drafts, target, self.settings, *own))
        self._ids = count()
        self.costs, self._recorded = parts.costs, parts.recorded
        if self.costs is None:
            self._measure_costs()

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: str | Path | Sequence[str | Path] | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        draft_device: str | None = None,
        **settings: Any,
    ) -> Engine:
        """Load models and build an engine.

        Args:
            target: `smollm2`, `tiny`, a Hub id, a folder or a .gguf file.
            draft: a distillspec draft folder, or any causal language model with the target's tokenizer. Several make a
                pool: each request gets the one that `selection` finds best for it. Proposers without a model may be
                named among them: `[A, B, "suffix"]`.
            dtype: auto (bfloat16 where the hardware multiplies it, else float32), float32, bfloat16, float16, float64.
            device: auto, cpu, cuda, cuda:1, …
            draft_device: of the draft, or all drafts, of the target's kind (cuda:1). None: the target's.
            settings: see `EngineConfig`.

        Raises:
            ConfigError: a setting, a model or their combination is impossible. The message names it.
        """
        known = EngineConfig.__dataclass_fields__
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(f"{unknown[0]} is not an engine setting; there are {', '.join(known)}")
        chosen = EngineConfig(**settings)
        if draft is not None and not isinstance(draft, str | Path):
            draft, chosen = with_members(draft, chosen)
        model = load_target(TargetConfig(path=target, dtype=dtype, device=device))
        return cls(model, load_drafts(draft, model, device_of_drafts(draft_device, model)), chosen)

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

    def load_draft(self, path: str | Path, acceptance: float | None = None, *, name: str | None = None) -> str:
        """Draft with another draft from the next step on, while requests run. Return its version.

        All loading and checking happens first, in the caller's thread. Both drafts' weights are in memory until the
        switch. Greedy and seeded outputs do not change, others keep their distribution.

        Args:
            acceptance: of the new draft over that of the old one. None: not known, the controller finds out.
            name: of a pool's draft: the one that it replaces, or a new one. Default: the folder's name.

        Raises:
            ConfigError: the draft is refused, and the old one stays.
        """
        self._check_open()
        return self._drafts.load(path, name, acceptance)

    def unload_draft(self, name: str) -> None:
        """Drop a draft of the pool from the next step on, while requests run.

        Raises:
            ConfigError: the pool has no such draft.
        """
        self._check_open()
        self._drafts.unload(name)

    def use_draft(
        self,
        draft: LanguageModel,
        version: str | None = None,
        *,
        acceptance: float | None = None,
        name: str = DRAFT,
    ) -> str:
        """Draft with a loaded model, unchecked, from the next step on. Return its version (default: weights' hash)."""
        return self._drafts.use(draft, version, name, acceptance)

    def use_proposer(self, proposer: Proposer | None) -> None:
        """Draft with another proposer from the next step on, None: do not speculate. The draft model stays held."""

        def switch() -> None:
            self._executor.use_proposer(proposer)
            self._core.draft_changed(DraftChange())

        self.at_next_step(switch)

    def use_controller(self, controller: LengthController) -> None:
        """See `EngineCore.use_controller`. Call between steps, from the thread that steps."""
        self._core.use_controller(controller)

    def close(self) -> None:
        """Give the models back as they were, and free caches and packed weights. More calls do nothing."""
        if self.proposer is not None:
            self.proposer.flush()
        self._models.release_all()
        self._executor.release()
        return_freed_memory()

    def timed_passes(self, clock: Callable[[], float] = time.perf_counter) -> TimedPasses:
        """Return passes of target and draft to be timed, for an idle engine."""
        return TimedPasses(self.target, self.runner, self.sampler, self.proposer, clock, self._recorded)

    def use_costs(self, costs: LatencyModel) -> None:
        """Go on from known costs of steps. Call between steps, from the thread that steps."""
        self.costs = costs.recorded_in(self._recorded)
        give_costs(self.controller, self.costs)

    def _measure_costs(self) -> None:
        """Measure what steps cost for a controller that would else have to learn it."""
        budget_s, longest = self.settings.measure_costs_s, self.limits.lookahead
        if not takes_costs(self.controller) or not budget_s or not longest or self.proposer is None:
            return
        with_draft = uses_draft(self.settings, with_draft=self.draft is not None)
        costs = measure_at_start(self.timed_passes(), self.limits, longest, budget_s, with_draft=with_draft)
        self.forget_prompts()  # and give back the memory that was timed
        if costs is not None:
            self.use_costs(costs)

    def _check_open(self) -> None:
        if not self._models:
            raise RunError("this engine is closed, and its models are given back; make another")
