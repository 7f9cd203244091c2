"""Prompts without a dataset: the target writes the user's turns itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from distillspec.config import DataConfig
from distillspec.data.chat import render_prompt, user_turn_prefix
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import stable_seed
from distillspec.data.turn_journal import Turn, TurnJournal
from distillspec.errors import RunError
from distillspec.models.language_model import LanguageModel
from distillspec.types import GenerationRequest, Generator, Prompt, SamplingPolicy

POLICY = SamplingPolicy(temperature=1.0, top_p=0.95)
DEFAULT_PROMPTS = 512
USER_TURN_TOKENS = 96
MIN_WORDS = 3
MIN_CHARACTERS = 24  # for scripts without spaces
ATTEMPTS = 6


def write_prompts(
    target: LanguageModel,
    generator: Generator,
    config: DataConfig,
    seed: int,
    folder: DataFolder,
    on_turn: Callable[[int], None] | None = None,
) -> list[Prompt]:
    """Return different, finished user turns for `data.num_prompts` plus `data.eval_prompts`.

    Turns are kept in the folder as they are written, so that an interrupted run goes on from them, until
    `DataFolder.write_prompts` has written the prompts.

    Args:
        on_turn: called after each turn with the number of usable ones so far.

    Raises:
        ConfigError: nothing tells how a turn begins.
        RunError: the target writes too few usable turns (it has no chat training, say).
    """
    needed = (config.num_prompts or DEFAULT_PROMPTS) + config.eval_prompts
    prefix = user_turn_prefix(target.text_tokenizer, target.stop_ids)
    opening = Prompt("selfprompt", prefix, "selfprompt")
    limit = min(USER_TURN_TOKENS, config.max_prompt_tokens)
    key = {"target": asdict(target.identity), "seed": seed, "limit": limit, "policy": asdict(POLICY)}
    journal = TurnJournal(folder.turns, key)
    texts: dict[str, None] = {}  # a dict keeps their order
    may_be_cut = False
    for attempt in range(ATTEMPTS):
        turns, missing = journal.turns(attempt), needed - len(texts)
        requests = {
            index: GenerationRequest(opening, limit, stable_seed(seed, "selfprompt", attempt, index))
            for index in range(missing + missing // 4 + 8)
            if index not in turns
        }
        seen = texts | _usable_texts(turns, may_be_cut)
        for index, turn in _written(requests, target, generator):
            journal.add(attempt, index, turn)
            seen |= _usable_texts({index: turn}, may_be_cut)
            if on_turn is not None:
                on_turn(min(needed, len(seen)))
        # A target without chat training hardly ever ends a turn. Its cut turns are then accepted.
        may_be_cut = may_be_cut or sum(turn.finished for turn in turns.values()) < len(turns) // 4
        texts |= _usable_texts(turns, may_be_cut)
        if len(texts) >= needed:
            return [
                Prompt(f"self-{number:06d}", render_prompt(target.text_tokenizer, text), "selfprompt")
                for number, text in enumerate(list(texts)[:needed])
            ]
    raise RunError(
        f"{target.name} wrote only {len(texts)} usable prompts of {needed}; give a prompt file with data.prompts=FILE"
    )


def usable(text: str, finished: bool) -> bool:
    """Return True for a self-written user turn that is complete and not trivial."""
    return finished and (len(text.split()) >= MIN_WORDS or len(text) >= MIN_CHARACTERS)


def _written(
    requests: Mapping[int, GenerationRequest], target: LanguageModel, generator: Generator
) -> Iterator[tuple[int, Turn]]:
    """Yield the turns of some requests, each with its index, as they end."""
    indices = list(requests)
    for index, sample in generator.generate(list(requests.values()), POLICY, stop_ids=target.stop_ids):
        text = target.text_tokenizer.decode(list(sample.response_ids), skip_special_tokens=True)
        yield indices[index], Turn(text.strip(), sample.finished)


def _usable_texts(turns: Mapping[int, Turn], may_be_cut: bool) -> dict[str, None]:
    """Return the different usable texts in the order of their turns' indices."""
    kept = [turns[index] for index in sorted(turns)]
    return {turn.text: None for turn in kept if usable(turn.text, turn.finished or may_be_cut)}
