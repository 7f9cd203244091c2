"""Builds the parts of an engine: checks, memory, attention, recorder, controller, proposers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from distillspec.config.engine import EngineConfig
from distillspec.config.registry import PROPOSERS
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.features import check_feature_ids
from distillspec.models.memory import keep_freed_memory
from distillspec.models.paged_cache import PagedCache
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.control.named import ControllerParts, make_controller
from distillspec.serving.costs.hardware_profile import Profile
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.draft_loading import evaluated, version_of
from distillspec.serving.execution.attention import choose_attention, page_tokens, reads_pages
from distillspec.serving.execution.graphs import CudaRecorder, Recorder
from distillspec.serving.execution.kv_cache import SlotPool
from distillspec.serving.execution.memory import CachePlan, choose_model_len, plan_cache
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.execution.servable import check_servable
from distillspec.serving.held_models import HeldModels
from distillspec.serving.proposers.base import Proposer
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.named import (
    SOURCES,
    ProposerParts,
    drafting_alone,
    make_draft_model,
    make_pool,
    make_proposer,
    uses_draft,
)
from distillspec.serving.proposers.named_checks import check_named, check_proposer
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.selection.named import check_selection, with_selection
from distillspec.serving.step.core import EngineCore
from distillspec.serving.step.model_executor import ModelExecutor
from distillspec.serving.step.prefill_pace import PrefillPace
from distillspec.serving.usable_drafts import hold_fitting, is_pool, servable_drafts

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
    # True: by default the draft is alone. A caller's controller may know one source, recorded passes know one chain.
    alone: bool = False
    kept: dict[str, Any] = field(default_factory=dict)  # what outlives a proposer

    def build(self, draft: LanguageModel | None, version: str) -> Proposer | None:
        """Return a new proposer, None where the settings name none.

        Args:
            draft: a model that `models` hold already.
            version: reported by the proposer.
        """
        return make_proposer(self._parts(draft, version, DRAFT))

    def build_pool(self, drafts: Mapping[str, LanguageModel]) -> SideBySide:
        """Return a new proposer of several drafts, by source."""
        return make_pool([self._parts(draft, version_of(draft), source) for source, draft in drafts.items()])

    def build_member(self, draft: LanguageModel, version: str, source: str) -> DraftModel:
        """Return a new proposer for one of several drafts."""
        return make_draft_model(self._parts(draft, version, source))

    def _parts(self, draft: LanguageModel | None, version: str, source: str) -> ProposerParts:
        prepared = None if draft is None else self.models.prepared(draft)
        parts = (draft, version, self.sampler, prepared, self.recorder, self.target_cache, self.kept, source)
        settings = drafting_alone(self.settings) if self.alone and draft is not None else self.settings
        return ProposerParts(settings, *parts)


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
    check_pool(settings, drafts)
    check_proposer(settings, drafts=drafts)
    max_model_len = choose_model_len(settings, target)
    check_servable(target, max_model_len)
    usable = servable_drafts(drafts, target, max_model_len)
    feature_ids = kept_states(settings, usable.values())
    check_feature_ids(target, feature_ids)
    page = page_tokens(settings.page_tokens, target.device)
    attend, attention = choose_attention(settings.attention, [target, *usable.values()], page)
    if settings.page_tokens is None and not reads_pages(attend):
        page = 0
    # These may refuse too (another machine's profile, a kernel that does not run), so models are held after them.
    costs = profiled_costs(settings, target, usable)
    planner = controller or choose_controller(settings, costs, usable)
    held = HeldModels(pack_weights=settings.pack_weights, compile=settings.compile)
    with held.released_on_failure():  # a proposer may refuse its settings
        held.hold(target, feature_ids)

        def plan(beside: list[LanguageModel]) -> CachePlan:
            """Plan caches after the packed weights, which take memory too."""
            return plan_cache(settings, [target, *beside], max_model_len, feature_ids, page)

        fitting = hold_fitting(usable, held, plan)
        check_named(settings, fitting)
        if len(fitting) < len(usable):
            feature_ids = kept_states(settings, fitting.values())
            held.prepared(target).hand_out(feature_ids)
        models = [target, *fitting.values()]
        cache = plan(models[1:])
        recorder = recorder or _choose_recorder(settings, target)
        sampler = sampler or _make_sampler(settings, target)
        pages, slots = cache.pages(), SlotCache(cache.slots, max_model_len, attend)
        target_cache = slots if pages is None else PagedCache.of(slots, pages, target.device)
        runner = ModelRunner(target, target_cache, held.prepared(target), recorder, feature_ids)
        alone = controller is not None or recorder is not None
        proposers = ProposerBuilder(settings, held, sampler, recorder, target_cache, alone)
        if proposer is None:
            only = fitting.get(DRAFT)
            proposer = proposers.build_pool(fitting) if is_pool(fitting) else proposers.build(only, version_of(only))
        executor = ModelExecutor(target, runner, sampler, proposer, settings.micro_batches)
        executor.record_ahead(planner.speculation_length)
        core = EngineCore(
            executor,
            SlotPool(cache.slots, max_model_len, cache.tokens, cache.block, None if recorder is None else NEAR, pages),
            planner,
            target,
            prefill_chunk=settings.prefill_chunk,
            prefix_reuse=settings.prefix_reuse,
            prefill_pace=_choose_pace(settings),
            verification=settings.verification,
        )
    if not settings.is_exact:
        log.warning(LOSSY, settings.verification)
    log.info(
        "engine: %s on %s in %s, %s, %s",
        target.name,
        target.device,
        str(target.dtype).removeprefix("torch."),
        cache.describe(models, feature_ids),
        _describe_passes(attention, held.prepared(target), recorder),
    )
    return EngineParts(core, executor, held, proposers, cache, fitting, costs)


def fitted(settings: EngineConfig, device: torch.device) -> EngineConfig:
    """Return the settings without what does not work on a device, or beside other settings.

    Raises:
        ConfigError: micro-batches on another device than a CPU.
    """
    if settings.tree is None and not settings.widths and device.type == "cuda" and settings.cuda_graphs:
        settings = replace(settings, tree="off")  # passes over trees are not recorded
    if settings.micro_batches == 1:
        return settings
    if device.type != "cpu":
        raise ConfigError(f"micro_batches={settings.micro_batches} needs a CPU, not {device}; leave it out")
    return replace(settings, compile=False)  # code is compiled for a number of threads, which changes in a step


def check_pool(settings: EngineConfig, drafts: Mapping[str, LanguageModel]) -> None:
    """Refuse names of drafts that other sources have, and selections that there are not.

    Raises:
        ConfigError: names the draft or the setting.
    """
    for name in drafts:
        if name in SOURCES or name in PROPOSERS or (name == DRAFT and len(drafts) > 1):
            raise ConfigError(f"a draft cannot be called {name}, as a proposer is; rename its folder")
    check_selection(settings.selection, settings.selection_options)


def kept_states(settings: EngineConfig, drafts: Iterable[LanguageModel]) -> tuple[int, ...]:
    """Return the states of the target to keep: those that settings name, and those that drafts read."""
    return tuple(dict.fromkeys([*settings.feature_ids, *(state for draft in drafts for state in draft.state_ids)]))


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
    own = settings.selection, list(drafts), settings.selection_options
    return with_selection(controller, *own, seed=settings.seed, expected=evaluated(drafts))


def _rank_chances(drafts: Mapping[str, LanguageModel]) -> tuple[tuple[float, ...], ...]:
    """Return what the first draft with a record of it accepted by head and rank, empty without one."""
    found = next((draft.rank_acceptance for draft in drafts.values() if draft.rank_acceptance), ())
    if drafts and not found:
        names = ", ".join(draft.name for draft in drafts.values())
        log.warning(
            "tree=medusa: %s records no acceptance by rank (distill train measures it); typical figures order the tree",
            names,
        )
    return found


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


def _choose_recorder(settings: EngineConfig, target: LanguageModel) -> Recorder | None:
    return CudaRecorder() if target.device.type == "cuda" and settings.cuda_graphs else None


def _describe_passes(attention: str, target: PreparedModel, recorder: Recorder | None) -> str:
    """Describe for the log how forward passes run."""
    words = [f"attention by {attention}"]
    if target.packs is not None and target.packs.packing is not None:
        words.append(f"weights packed by {target.packs.packing.name}")
    if recorder is not None:
        words.append("graphs")
    if target.compiled is not None:
        words.append("passes compiled" if target.compiled.ready else "passes to be compiled")
    elif recorder is None:
        words.append("passes run as they are")
    return ", ".join(words)
