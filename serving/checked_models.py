"""Models that fit together: a target, the drafts that it can verify, and what their caches and passes are made by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distillspec.config.engine import EngineConfig
from distillspec.models import LanguageModel
from distillspec.models.features import check_feature_ids
from distillspec.models.ragged_attention import is_ragged
from distillspec.models.slot_cache import Attend
from distillspec.serving.execution.attention import choose_attention, page_tokens
from distillspec.serving.execution.memory import CachePlan, check_elsewhere, choose_model_len, plan_cache
from distillspec.serving.execution.servable import check_servable
from distillspec.serving.held_models import HeldModels
from distillspec.serving.proposers.settings_checks import check_named, check_proposer
from distillspec.serving.usable_drafts import check_pool, hold_fitting, kept_states, servable_drafts


@dataclass(frozen=True)
class CheckedModels:
    """A target and the drafts that it can verify."""

    target: LanguageModel
    drafts: dict[str, LanguageModel]  # by source
    max_model_len: int
    feature_ids: tuple[int, ...]  # states of the target that its cache keeps
    page: int  # tokens of a page of the caches, 0 without pages
    attend: Attend
    attention: str  # its description for the log

    def plan_cache(self, settings: EngineConfig, drafts: Sequence[LanguageModel]) -> CachePlan:
        """Plan the caches of the target and of `drafts`, beside packed weights, which take memory too.

        Each device has its own caches.

        Raises:
            ConfigError: they do not fit.
        """
        near = [draft for draft in drafts if draft.device == self.target.device]
        plan = plan_cache(settings, [self.target, *near], self.max_model_len, self.feature_ids, self.page)
        check_elsewhere(plan, [draft for draft in drafts if draft.device != self.target.device])
        return plan


def check_models(target: LanguageModel, drafts: Mapping[str, LanguageModel], settings: EngineConfig) -> CheckedModels:
    """Check models and settings, and change nothing.

    Args:
        drafts: by source. Those of a pool that cannot draft for the target are left out, and the log says why.

    Raises:
        ConfigError: the models, the settings or the machine do not fit together.
    """
    check_pool(settings, drafts)
    check_proposer(settings, drafts=drafts)
    max_model_len = choose_model_len(settings, target)
    check_servable(target, max_model_len)
    usable = servable_drafts(drafts, target, max_model_len)
    feature_ids = kept_states(settings, usable.values())
    check_feature_ids(target, feature_ids)
    page = page_tokens(settings.page_tokens, target.device)
    attend, attention = choose_attention(settings.attention, [target, *usable.values()], page)
    if settings.page_tokens is None and not is_ragged(attend):
        page = 0
    return CheckedModels(target, usable, max_model_len, feature_ids, page, attend, attention)


def hold_models(models: CheckedModels, held: HeldModels, settings: EngineConfig) -> CheckedModels:
    """Prepare the target, and the drafts whose weights and caches fit beside it. Return these.

    Raises:
        ConfigError: not even the target fits, or the only draft, or none of a pool.
    """
    held.hold(models.target, models.feature_ids)
    fitting = hold_fitting(models.drafts, held, lambda drafts: models.plan_cache(settings, drafts))
    check_named(settings, fitting)
    if len(fitting) == len(models.drafts):
        return replace(models, drafts=fitting)
    feature_ids = kept_states(settings, fitting.values())
    held.prepared(models.target).hand_out(feature_ids)
    return replace(models, drafts=fitting, feature_ids=feature_ids)
