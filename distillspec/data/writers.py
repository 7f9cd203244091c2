"""Writers of training text: the target, the draft, both in turn, or the prompts' file."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.config import DataConfig
from distillspec.data.prompts import stable_seed
from distillspec.generation import SlotGenerator, make_generator
from distillspec.models import LanguageModel
from distillspec.types import Generator, Prompt, StateRequest


def share_prompts(
    config: DataConfig, target: LanguageModel, draft: LanguageModel | None, prompts: Sequence[Prompt], seed: int
) -> list[tuple[Generator | None, list[Prompt]]]:
    """Give each prompt a writer, None for the file's own response.

    With `data.mixed_by=sequence` the draft writes a share `data.mixed_lambda` of the answers. A prompt's id and the
    seed decide who answers it.
    """
    if draft is None or config.source != "mixed" or config.mixed_by == "token":
        return [(choose_writer(config, target, draft), list(prompts))]
    other_writer = None if config.mixed_with == "fixed" else _teacher(config, target, draft)
    return [
        (_draft_writer(config, target, draft), [p for p in prompts if _by_draft(config, p, seed)]),
        (other_writer, [p for p in prompts if not _by_draft(config, p, seed)]),
    ]


def answerable(config: DataConfig, prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Return the prompts whose writer by `share_prompts` has an answer: a file may lack some."""
    by_file = config.source == "mixed" and config.mixed_by == "sequence" and config.mixed_with == "fixed"
    return [p for p in prompts if not by_file or p.response or _by_draft(config, p, seed)]


def choose_writer(config: DataConfig, target: LanguageModel, draft: LanguageModel | None) -> Generator:
    """Return the writer of all answers: the target, the draft, or (mixed by token) both in turn."""
    if draft is None or config.source == "teacher":
        return _teacher(config, target, draft)
    if config.source == "draft":
        return _draft_writer(config, target, draft)
    return SlotGenerator(target, slots=config.batch_slots, source="mixed", other=draft, other_share=config.mixed_lambda)


def _by_draft(config: DataConfig, prompt: Prompt, seed: int) -> bool:
    return stable_seed(seed, "mixed", prompt.id) < config.mixed_lambda * 2**63


def _teacher(config: DataConfig, target: LanguageModel, draft: LanguageModel | None) -> Generator:
    states = StateRequest(tuple(config.state_ids or ()), config.state_precision)
    return make_generator(config.generator, target, slots=config.batch_slots, draft=draft, states=states)


def _draft_writer(config: DataConfig, target: LanguageModel, draft: LanguageModel) -> Generator:
    """Return the draft alone. If it reads the target's states, the target reads each token that it writes."""
    if not draft.state_ids:
        return make_generator(config.generator, draft, slots=config.batch_slots, source="draft")
    return SlotGenerator(target, slots=config.batch_slots, source="draft", other=draft, other_share=1.0)
