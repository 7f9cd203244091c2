"""Builds the parts of an engine: checks, memory, attention, recorder, controller, proposers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.memory import keep_freed_memory
from distillspec.models.paged_cache import PagedCache
from distillspec.models.pages import Pages
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.ladder import UNRECORDED, Recorded
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.checked_models import CheckedModels, check_models, hold_models
from distillspec.serving.control.by_name import ControllerParts, make_controller
from distillspec.serving.costs.hardware_profile import Profile
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.draft_loading import evaluated, version_of
from distillspec.serving.execution.graphs import CudaRecorder, Recorder
from distillspec.serving.execution.memory import CachePlan
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.execution.slot_pool import SlotPool
from distillspec.serving.held_models import HeldModels
from distillspec.serving.pass_recording import choose_recorder, describe_passes, recorded_tokens
from distillspec.serving.proposers.base import Proposer
from distillspec.serving.proposers.by_name import (
    ProposerParts,
    drafting_alone,
    free_sources,
    make_draft_model,
    make_pool,
    make_proposer,
    uses_draft,
)
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.selection.by_name import with_selection
from distillspec.serving.step.core import EngineCore
from distillspec.serving.step.model_executor import ModelExecutor
from distillspec.serving.step.prefill_pace import PrefillPace
from distillspec.serving.usable_drafts import is_pool

log = logging.getLogger(__name__)

LOSSY = "verification=%s is lossy: answers at a temperature above 0 without a seed are not distributed as the target's"
NEAR = 8  # slots that a few requests share where passes are recorded


@dataclass(frozen=True)
class ProposerBuilder:
    """Builds proposers by the settings of an engine, at its start and at each draft swap."""

    settings: EngineConfig
    models: HeldModels
    sampler: TokenSampler
    recorder: Recorder | None
    target_cache: SlotCache
    # True: by default no other source drafts beside the draft. A caller's controller may know one source only, and
    # recorded passes know chains only.
    alone: bool = False
    kept: dict[str, Any] = field(default_factory=dict)  # what outlives a proposer

    @cached_property
    def _recorder(self) -> Recorder | None:
        """Recorder of drafts' passes. Those that run beside the target's may share no memory with them."""
        apart = self.settings.micro_batches != 1 and isinstance(self.recorder, CudaRecorder)
        return CudaRecorder() if apart else self.recorder

    def build(self, draft: LanguageModel | None, version: str) -> Proposer | None:
        """Return a new proposer, None where the settings name none.

        Args:
            draft: a model that `models` hold already.
            version: reported by the proposer.
        """
        return make_proposer(self._parts(draft, version, DRAFT))

    def build_first(self, drafts: Mapping[str, LanguageModel]) -> Proposer | None:
        """Return the proposer of an engine that starts with these drafts, by source, None where settings name none."""
        if is_pool(drafts):
            return self.build_pool(drafts)
        only = drafts.get(DRAFT)
        return self.build(only, version_of(only))

    def build_pool(self, drafts: Mapping[str, LanguageModel]) -> SideBySide:
        """Return a new proposer of several drafts, by source."""
        return make_pool([self._parts(draft, version_of(draft), source) for source, draft in drafts.items()])

    def build_member(self, draft: LanguageModel, version: str, source: str) -> DraftModel:
        """Return a new proposer for one of several drafts."""
        return make_draft_model(self._parts(draft, version, source))

    def _parts(self, draft: LanguageModel | None, version: str, source: str) -> ProposerParts:
        prepared = None if draft is None else self.models.prepared(draft)
        settings = drafting_alone(self.settings) if self.alone and draft is not None else self.settings
        return ProposerParts(
            settings, draft, version, self.sampler, prepared, self._recorder, self.target_cache, self.kept, source
        )


@dataclass(frozen=True)
class EngineParts:
    """The parts that an `Engine` works with."""

    core: EngineCore
    executor: ModelExecutor
    models: HeldModels
    proposers: ProposerBuilder
    cache: CachePlan
    drafts: dict[str, LanguageModel]  # those that can be used
    costs: LatencyModel | None  # a profile's
    recorded: Recorded  # numbers of tokens that its passes are recorded in


def build_parts(
    target: LanguageModel,
    drafts: Mapping[str, LanguageModel],
    settings: EngineConfig,
    *,
    controller: LengthController | None = None,
    proposer: Proposer | None = None,
    recorder: Recorder | None = None,
    sampler: TokenSampler | None = None,
) -> EngineParts:
    """Check models and settings, then build the parts. The objects given replace those that settings name.

    Args:
        drafts: by source. `DRAFT` alone names an engine's only draft, other names those of a pool.

    Raises:
        ConfigError: the models, the settings or the machine do not fit together. The models are then as before.
            Drafts of a pool that do not fit are left out, and the log says why.
    """
    keep_freed_memory()
    settings = fitted(settings, target.device)
    checked = check_models(target, drafts, settings)
    recorder = recorder or choose_recorder(settings, target)
    recorded = recorded_tokens(settings, recorder, controller)
    # The profile of another machine is refused here. Models are held after all such checks.
    costs = profiled_costs(settings, target, checked.drafts)
    costs = None if costs is None else costs.recorded_in(recorded)
    planner = controller or choose_controller(settings, costs, checked.drafts)
    held = HeldModels(pack_weights=settings.pack_weights, compile=settings.compile)
    with held.released_on_failure():  # a proposer may refuse its settings
        models = hold_models(checked, held, settings)
        cache = models.plan_cache(settings, list(models.drafts.values()))
        sampler = sampler or _make_sampler(settings, target)
        pages = cache.pages()
        target_cache = _make_cache(models, cache, pages)
        runner = ModelRunner(target, target_cache, held.prepared(target), recorder, models.feature_ids)
        alone = controller is not None or recorder is not None
        proposers = ProposerBuilder(settings, held, sampler, recorder, target_cache, alone)
        if proposer is None:
            proposer = proposers.build_first(models.drafts)
        executor = ModelExecutor(target, runner, sampler, proposer, settings.micro_batches)
        executor.record_ahead(planner.speculation_length)
        near = None if recorder is None else NEAR
        pool = SlotPool(cache.slots, models.max_model_len, cache.tokens, cache.block, near, pages)
        core = _make_core(executor, pool, planner, target, settings)
    if not settings.is_exact:
        log.warning(LOSSY, settings.verification)
    _log_models(models, cache, describe_passes(models.attention, held.prepared(target), recorder))
    recorded = recorded if executor.records else UNRECORDED
    return EngineParts(core, executor, held, proposers, cache, models.drafts, costs, recorded)


def _make_cache(models: CheckedModels, plan: CachePlan, pages: Pages | None) -> SlotCache:
    """Return the target's cache, in pages if there are any."""
    slots = SlotCache(plan.slots, models.max_model_len, models.attend)
    return slots if pages is None else PagedCache.of(slots, pages, models.target.device)


def _make_core(
    executor: ModelExecutor, pool: SlotPool, planner: LengthController, target: LanguageModel, settings: EngineConfig
) -> EngineCore:
    return EngineCore(
        executor,
        pool,
        planner,
        target,
        prefill_chunk=settings.prefill_chunk,
        prefix_reuse=settings.prefix_reuse,
        prefill_pace=_choose_pace(settings),
        verification=settings.verification,
    )


def _log_models(models: CheckedModels, cache: CachePlan, passes: str) -> None:
    target = models.target
    log.info(
        "engine: %s on %s in %s, %s, %s",
        target.name,
        target.device,
        str(target.dtype).removeprefix("torch."),
        cache.describe([target, *models.drafts.values()], models.feature_ids),
        passes,
    )


def fitted(settings: EngineConfig, device: torch.device) -> EngineConfig:
    """Return the settings without what does not work on a device, or beside other settings.

    Raises:
        ConfigError: micro-batches on a device that is neither a CPU nor CUDA.
    """
    if settings.tree is None and not settings.widths and device.type == "cuda" and settings.cuda_graphs:
        settings = replace(settings, tree="off")  # passes over trees are not recorded
    if settings.micro_batches == 1:
        return settings
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"micro_batches={settings.micro_batches} needs a CPU or CUDA, not {device}; leave it out")
    if device.type == "cuda":
        return settings
    return replace(settings, compile=False)  # code is compiled for a number of threads, which changes in a step


def profiled_costs(
    settings: EngineConfig, target: LanguageModel, drafts: Mapping[str, LanguageModel]
) -> LatencyModel | None:
    """Read the costs of the profile that settings name, None without one.

    Raises:
        ConfigError: it cannot be read, or was measured with other models or on another machine.
    """
    if settings.profile is None:
        return None
    profiled = drafts if uses_draft(settings, with_draft=True) else {}
    return Profile.load(Path(settings.profile), target, profiled, settings).latency


def choose_controller(
    settings: EngineConfig, costs: LatencyModel | None, drafts: Mapping[str, LanguageModel]
) -> LengthController:
    """Build the length controller that settings name. Of several drafts it selects each request's, or joins all."""
    with_model = uses_draft(settings, with_draft=True)  # a draft may be loaded later
    chances = _rank_chances(drafts) if settings.tree == "medusa" else ()
    parts = ControllerParts(settings.speculation_length, costs, with_model, settings, chances)
    controller = make_controller(settings.controller, parts, settings.controller_options)
    if not is_pool(drafts) or settings.joins_drafts:
        return controller
    return with_selection(
        controller,
        settings.selection,
        list(drafts),
        settings.selection_options,
        seed=settings.seed,
        expected=evaluated(drafts),
        free=free_sources(settings),
    )


def _rank_chances(drafts: Mapping[str, LanguageModel]) -> tuple[tuple[float, ...], ...]:
    """Return what the first draft with a record of it accepted by head and rank, empty without one."""
    chances = next((draft.rank_acceptance for draft in drafts.values() if draft.rank_acceptance), ())
    if drafts and not chances:
        names = ", ".join(draft.name for draft in drafts.values())
        log.warning(
            "tree=medusa: %s records no acceptance by rank (distill train measures it); typical figures order the tree",
            names,
        )
    return chances


def _choose_pace(settings: EngineConfig) -> PrefillPace | None:
    share = settings.prefill_slowdown
    return None if share is None else PrefillPace(settings.prefill_chunk, share)


def _make_sampler(settings: EngineConfig, target: LanguageModel) -> TokenSampler:
    return TokenSampler(
        target.identity.vocab_size,
        target.device,
        settings.seed,
        verification=settings.verification,
        roots=settings.roots,
    )
