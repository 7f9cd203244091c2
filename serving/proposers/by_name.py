"""Proposers by the names of `engine.proposer`, which are in `distillspec.config.registry.PROPOSERS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distillspec.config.engine import ONE_HOT, EngineConfig, proposer_choice
from distillspec.config.registry import DRAFT_ALONE, PROPOSERS, WITHOUT_DRAFT, check_options
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.tree import DRAFT, LOOKUP, SUFFIX, TARGET
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.execution.graphs import Recorder
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.proposers.base import Proposer
from distillspec.serving.proposers.continue_rule import ConfidenceThreshold, ContinueRule, PredictedAcceptance
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.growth import TreePolicy
from distillspec.serving.proposers.ngram import Ngram
from distillspec.serving.proposers.prompt_lookup import PromptLookup
from distillspec.serving.proposers.recycling import TokenRecycling
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.proposers.staged import Staged
from distillspec.serving.proposers.suffix import SuffixLookup
from distillspec.serving.proposers.suffix_store import SuffixStore

KEPT_TOKENS = 400_000  # of a tenant's answers
LEARNS_COLLAPSES = ("goodput",)  # selections that leave a draft by themselves whose acceptance collapses
SOURCES = {TARGET, *(choice.source or name for name, choice in PROPOSERS.items() if choice.source != DRAFT)}


@dataclass(frozen=True)
class ProposerParts:
    """Parts that a new proposer is made from. Proposers without a draft read the settings alone."""

    settings: EngineConfig
    draft: LanguageModel | None
    version: str  # of the draft, reported by the proposer, "" without one
    sampler: TokenSampler
    prepared: PreparedModel | None  # the draft
    recorder: Recorder | None
    target_cache: SlotCache  # drafts have the same slots, and some read the target's states
    kept: dict[str, Any] = field(default_factory=dict)  # what outlives the proposer: the engine's later ones get it too
    source: str = DRAFT  # what trees call the draft


def make_proposer(parts: ProposerParts) -> Proposer | None:
    """Build what the settings name, None for no speculation."""
    names = proposer_names(parts.settings, with_draft=parts.draft is not None)
    chosen = _with_options(names, parts.settings)
    if len(chosen) == 1:
        return _make(chosen[0][0], parts, chosen[0][1])
    by_source = {PROPOSERS[name].source or name: _make(name, parts, options) for name, options in chosen}
    return SideBySide({source: proposer for source, proposer in by_source.items() if proposer is not None})


def make_pool(members: Sequence[ProposerParts]) -> SideBySide:
    """Build one proposer of several drafts. Those that settings name are in the settings' order, others at the end.

    Args:
        members: the same parts, but for each draft its own `draft`, `version`, `prepared` and `source`.
    """
    first, drafts = members[0], {parts.source: parts for parts in members}
    settings, named = first.settings, dict[str, Proposer | None]()
    for name, options in _with_options(settings.proposers or (DRAFT_ALONE,), settings):
        if name in drafts:
            named[name] = make_draft_model(drafts.pop(name))
            continue
        if (free := _without_model(name)) is not None:
            named[PROPOSERS[free].source or free] = _make(free, first, options)
    evaluated = {
        parts.source: parts.draft.evaluated
        for parts in members
        if parts.draft is not None and parts.draft.evaluated is not None
    }
    return SideBySide(
        {source: proposer for source, proposer in named.items() if proposer is not None}
        | {source: make_draft_model(parts) for source, parts in drafts.items()},
        evaluated,
        rest_collapsed=settings.selection not in LEARNS_COLLAPSES,
    )


def free_sources(settings: EngineConfig) -> tuple[str, ...]:
    """Return the sources without a model that stand beside the drafts of a pool, and are members of it too."""
    named = map(_without_model, settings.proposers or (DRAFT_ALONE,))
    return tuple(dict.fromkeys([PROPOSERS[free].source or free for free in named if free is not None]))


def _without_model(name: str) -> str | None:
    """Return what a proposer is beside the drafts of a pool, None where that is nothing but drafts."""
    choice = proposer_choice(name)
    free = choice.without_draft if "draft" in choice.needs else name
    return None if free == WITHOUT_DRAFT else free


def _with_options(names: Sequence[str], settings: EngineConfig) -> list[tuple[str, Mapping[str, Any]]]:
    """Return proposers with the options of each."""
    options = settings.proposer_options
    return [(name, options if len(names) == 1 else options.get(name, {})) for name in names]


def _make(name: str, parts: ProposerParts, options: Mapping[str, Any]) -> Proposer | None:
    proposer: object = PROPOSERS[name].load()(parts, **options)
    if proposer is None or isinstance(proposer, Proposer):
        return proposer
    raise ConfigError(
        f"proposer={name} is of the class {type(proposer).__name__}, which is no Proposer; derive it from "
        "distillspec.serving.proposers.base.Proposer"
    )


def proposer_names(settings: EngineConfig, *, with_draft: bool) -> tuple[str, ...]:
    """Return the chosen names, or the default ones."""
    return settings.proposers_with_draft if with_draft else settings.proposers or (WITHOUT_DRAFT,)


def drafting_alone(settings: EngineConfig) -> EngineConfig:
    """Return settings whose default is the draft alone."""
    return settings if settings.proposers else replace(settings, proposer=DRAFT_ALONE)


def uses_draft(settings: EngineConfig, *, with_draft: bool) -> bool:
    """Return True if any of the chosen proposers runs a draft."""
    return any("draft" in proposer_choice(name).needs for name in proposer_names(settings, with_draft=with_draft))


def without_draft(settings: EngineConfig) -> list[str]:
    """Return the proposers to use in place of the chosen ones while there is no draft."""
    choices = [proposer_choice(name) for name in proposer_names(settings, with_draft=False)]
    named = [choice.without_draft for choice in choices if choice.without_draft != WITHOUT_DRAFT]
    return named or [WITHOUT_DRAFT]


def make_none(parts: ProposerParts) -> None:
    """Propose nothing."""


def make_prompt_lookup(parts: ProposerParts, longest: int = 4, shortest: int = 2) -> PromptLookup:
    """Look up the text's last n tokens in itself. For the options see `PromptLookup`."""
    return PromptLookup(longest, shortest)


def make_draft_model(parts: ProposerParts) -> DraftModel:
    """Run the draft, gated by `draft_confidence` where that is above 0: by its confidence head, or by a rule."""
    assert parts.draft is not None, "the engine checks that there is a draft"
    threshold, has_head = parts.settings.draft_confidence, parts.draft.has_confidence_head
    return DraftModel(
        parts.draft,
        parts.sampler,
        parts.target_cache,
        version=parts.version,
        source=parts.source,
        rule=_rule(parts.draft, threshold) if threshold > 0 and not has_head else None,
        least_acceptance=threshold if has_head else 0.0,
        trees=_tree_policy(parts.settings, parts.draft),
        prepared=parts.prepared,
        recorder=parts.recorder,
        on_own_stream=parts.settings.micro_batches != 1,
    )


def _tree_policy(settings: EngineConfig, draft: LanguageModel) -> TreePolicy:
    """Return what the trees that settings name are made of."""
    if settings.tree == "medusa" and not draft.kind.startswith("medusa"):
        raise ConfigError(f"tree=medusa needs a draft of kind medusa, not {draft.kind}; use tree=topk or dynamic")
    return TreePolicy(settings.chosen_tree in ONE_HOT, settings.widest if settings.tree == "dynamic" else None)


def draft_models(proposer: Proposer | None) -> list[DraftModel]:
    """Return the draft models that a proposer is made of."""
    members = proposer.proposers.values() if isinstance(proposer, SideBySide) else [proposer]
    return [member for member in members if isinstance(member, DraftModel)]


def use_trees(proposer: Proposer | None, settings: EngineConfig) -> None:
    """Let all draft models draft the trees that settings name, from the next proposal on.

    Raises:
        ConfigError: tree=medusa, and a draft without heads. Nothing is changed.
    """
    models = draft_models(proposer)
    policies = [_tree_policy(settings, model.runner.model) for model in models]
    for model, policy in zip(models, policies, strict=True):
        model.trees = policy


def _rule(draft: LanguageModel, threshold: float) -> ContinueRule:
    if draft.stop_head is None:
        return ConfidenceThreshold(threshold)
    return PredictedAcceptance(draft, draft.stop_head, threshold)


def make_lookup_else_model(parts: ProposerParts, longest: int = 4, shortest: int = 2) -> SideBySide:
    """Look up or run the draft, as the controller chooses. By default the draft runs where nothing is found."""
    return SideBySide({LOOKUP: make_prompt_lookup(parts, longest, shortest), DRAFT: make_draft_model(parts)})


def make_suffix(
    parts: ProposerParts,
    tokens: int = KEPT_TOKENS,
    shared: bool = False,
    folder: str | None = None,
    exclude: Sequence[str] = (),
    least: float = 0.1,
    expected: float = 0.0,
    merge: Sequence[str] = (),
) -> SuffixLookup:
    """Look up the text's end in itself and in earlier answers. For the options see `SuffixStore`, `SuffixLookup`."""
    if "suffix" not in parts.kept:
        settings = parts.settings
        parts.kept["suffix"] = SuffixLookup(
            SuffixStore(
                tokens, parts.sampler.columns.width, shared=shared, folder=folder, exclude=exclude, merge=merge
            ),
            least=least,
            expected=expected,
            depth=settings.speculation_length,
            nodes=settings.nodes,
            wide=settings.chosen_tree != "off",
        )
    return parts.kept["suffix"]


def make_recycling(parts: ProposerParts, best: int = 8) -> TokenRecycling:
    """Propose from earlier logits. For the option see `TokenRecycling`."""
    if "recycling" not in parts.kept:
        parts.kept["recycling"] = TokenRecycling(parts.sampler.columns.width, best)
    return parts.kept["recycling"]


def make_ngram(
    parts: ProposerParts,
    longest: int = 3,
    contexts: int = 100_000,
    least: float = 0.05,
    folder: str | None = None,
) -> Ngram:
    """Propose what followed the last tokens in the tenant's texts so far. For the options see `Ngram`.

    Args:
        folder: keeps what is learnt. None: memory alone.
    """
    if "ngram" not in parts.kept:
        settings = parts.settings
        depth, wide = settings.speculation_length, settings.chosen_tree != "off"
        found = Ngram(longest, contexts, least, depth=depth, nodes=settings.nodes, wide=wide)
        if folder is not None:
            found.keep_in(Path(folder), parts.sampler.columns.width)
        parts.kept["ngram"] = found
    return parts.kept["ngram"]


def make_staged(
    parts: ProposerParts, helper: str = "suffix", helper_options: Mapping[str, Any] | None = None
) -> Staged:
    """Run the draft on the guesses of a proposer without a model. For the options see `Staged`.

    Raises:
        ConfigError: the draft reads the target's states, or `helper` is no proposer without a model.
    """
    draft, options = make_draft_model(parts), helper_options or {}
    helpers = [name for name, choice in PROPOSERS.items() if not choice.alone and "draft" not in choice.needs]
    if draft.reads_states:
        raise ConfigError(
            f"proposer=staged needs a draft that reads tokens alone, not kind {parts.draft and parts.draft.kind}: what "
            "it carries from token to token cannot be computed in one pass; use proposer=draft_model"
        )
    if helper not in helpers:
        raise ConfigError(f"proposer_options.helper={helper} must be one of {', '.join(helpers)}")
    check_options("proposer_options.helper_options", helper, PROPOSERS[helper].load(), options)
    guessing = _make(helper, parts, options)
    assert guessing is not None
    return Staged(draft, guessing, PROPOSERS[helper].source or helper)


def make_suffix_else_model(
    parts: ProposerParts,
    tokens: int = KEPT_TOKENS,
    shared: bool = False,
    folder: str | None = None,
    exclude: Sequence[str] = (),
    least: float = 0.1,
    expected: float = 0.5,
    merge: Sequence[str] = (),
) -> SideBySide:
    """Look up, and run the draft where it is expected to earn more, or at most `expected` tokens would be right."""
    lookup = make_suffix(parts, tokens, shared, folder, exclude, least, expected, merge)
    return SideBySide({SUFFIX: lookup, DRAFT: make_draft_model(parts)})
