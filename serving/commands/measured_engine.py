"""Checks of commands that measure an engine with settings of a user: before minutes are spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from distillspec.commands.drafts import find_drafts
from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.serving.draft_loading import draft_names
from distillspec.serving.engine import Engine
from distillspec.serving.proposers.by_name import draft_models, use_trees
from distillspec.serving.proposers.settings_checks import check_named
from distillspec.types import Prompt


def check_no_store(settings: EngineConfig) -> None:
    """Refuse a folder of kept answers: it is a server's, and measuring forgets answers and adds others.

    Raises:
        ConfigError: names the folder.
    """
    options = settings.proposer_options
    for group in (options, *[value for value in options.values() if isinstance(value, Mapping)]):
        if group.get("folder") is not None:
            raise ConfigError(
                f"engine.proposer_options.folder={group['folder']} holds the answers of a server, and this command "
                "would change them; leave it out"
            )


def find_named(settings: EngineConfig, drafts: Sequence[str]) -> list[Path]:
    """Return the folders of drafts. If `engine.proposer` names drafts, it must name these.

    Raises:
        ConfigError: a path has no draft, or names are missing or too many.
    """
    paths = find_drafts(drafts)
    check_named(settings, draft_names(paths))
    return paths


def check_speculates(engine: Engine) -> None:
    """Refuse an engine that drafts nothing: all sides would be plain decoding.

    Raises:
        ConfigError: says what is missing.
    """
    if engine.proposer is None:
        raise ConfigError(
            "nothing drafts here, so there is nothing to compare; give draft.path=RUN or engine.proposer=ngram"
        )


def fitting(prompts: Sequence[Prompt], engine: Engine, key: str) -> list[Prompt]:
    """Return the prompts that leave an engine room for an answer.

    Raises:
        ConfigError: none does.
    """
    short_enough = [prompt for prompt in prompts if len(prompt.token_ids) < engine.max_model_len]
    if not short_enough:
        raise ConfigError(
            f"{key}: no prompt is shorter than engine.max_model_len={engine.max_model_len}; raise it, or give others"
        )
    return short_enough


def check_grows(policy: str, settings: EngineConfig, engine: Engine) -> None:
    """Refuse a policy of trees that an engine's drafts cannot grow.

    Raises:
        ConfigError: names the policy.
    """
    if not draft_models(engine.proposer):
        raise ConfigError(
            f"policy {policy} says how a draft model grows trees, and none drafts here; give draft.path=RUN, or use "
            "tree-W-W and siblings-W-W"
        )
    try:
        use_trees(engine.proposer, settings)
    except ConfigError as error:
        raise ConfigError(f"policy {policy}: {error}") from error
