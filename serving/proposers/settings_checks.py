"""Checks of the proposers that settings name, against the drafts that there are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from distillspec.config.engine import EngineConfig, check_named_drafts, proposer_choice
from distillspec.config.registry import DRAFT_ALONE, check_options
from distillspec.errors import ConfigError
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.proposers.by_name import drafting_alone, proposer_names, uses_draft

OF_POOLS = (DRAFT_ALONE, "lookup_else_model", "suffix_else_model")  # proposers that take several drafts


def check_proposer(settings: EngineConfig, *, drafts: Collection[str]) -> None:
    """Refuse, before models are held, a proposer that could not be built.

    Args:
        drafts: by source.

    Raises:
        ConfigError: it needs a draft and there is none, or takes one and there are several, or names one that there is
            not, or not all, or it lacks one of the options.
    """
    with_draft = bool(drafts)
    check_named(settings, drafts)
    settings = drafting_alone(settings) if len(drafts) > 1 else settings
    names, options = proposer_names(settings, with_draft=with_draft), settings.proposer_options
    if len(drafts) > 1 and not any(name in OF_POOLS or name in drafts for name in names):
        count = "one draft" if uses_draft(settings, with_draft=True) else "no draft"
        raise ConfigError(
            f"proposer={settings.proposer} runs {count}, and {len(drafts)} are given; use one of {', '.join(OF_POOLS)}"
        )
    if settings.tree == "medusa" and not with_draft:
        raise ConfigError("tree=medusa needs a draft of kind medusa; give draft.path=RUN, or use tree=topk")
    settings.check_options_by_name(names)
    for name in names:
        choice = proposer_choice(name)
        if not with_draft and "draft" in choice.needs:
            raise ConfigError(f"proposer={name} needs a draft; give draft.path=RUN (draft= in Python), or use ngram")
        its_options, key = (options, "") if len(names) == 1 else (options.get(name, {}), f".{name}")
        if not isinstance(its_options, Mapping):
            raise ConfigError(f"proposer_options{key}={its_options} must have options by name")
        check_options(f"proposer_options{key}", name, choice.load(), its_options)


def check_named(settings: EngineConfig, drafts: Collection[str]) -> None:
    """Refuse names of drafts that there are not, and drafts that nothing would use beside those that are named.

    Args:
        drafts: by source.

    Raises:
        ConfigError: names the first such draft.
    """
    pool = [name for name in drafts if name != DRAFT or len(drafts) > 1]  # alone it has no name
    check_named_drafts(settings, pool)
    unused = [name for name in pool if name not in settings.named_drafts]
    if settings.named_drafts and unused:
        raise ConfigError(
            f"proposer={list(settings.proposers)} does not name the draft {unused[0]}, which would draft nothing; name "
            "it there, or leave it out of drafts=[…]"
        )
