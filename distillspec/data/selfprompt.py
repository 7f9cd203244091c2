"""Prompts without a dataset: the target writes the user's turns itself."""

from __future__ import annotations

from collections.abc import Callable

from distillspec.config import DataConfig
from distillspec.data.chat import render_prompt, user_turn_prefix
from distillspec.data.prompts import stable_seed
from distillspec.errors import RunError
from distillspec.models.language_model import LanguageModel
from distillspec.types import GenerationRequest, Generator, Prompt, SamplingPolicy

POLICY = SamplingPolicy(temperature=1.0, top_p=0.95)
DEFAULT_PROMPTS = 512
USER_TURN_TOKENS = 96
MIN_WORDS = 3
MIN_CHARACTERS = 24  # for scripts without spaces


def write_prompts(
    target: LanguageModel,
    generator: Generator,
    config: DataConfig,
    seed: int,
    on_prompt: Callable[[int], None] | None = None,
) -> list[Prompt]:
    """Return different, finished user turns for `data.num_prompts` plus `data.eval_prompts`.

    Raises:
        ConfigError: nothing tells how a turn begins.
        RunError: the target writes too few usable turns (it has no chat training, say).
    """
    needed = (config.num_prompts or DEFAULT_PROMPTS) + config.eval_prompts
    prefix = user_turn_prefix(target.text_tokenizer, target.stop_ids)
    opening = Prompt("selfprompt", prefix, "selfprompt")
    limit = min(USER_TURN_TOKENS, config.max_prompt_tokens)
    found: dict[str, Prompt] = {}
    may_be_cut = False
    for attempt in range(6):
        missing = needed - len(found)
        requests = [
            GenerationRequest(opening, limit, stable_seed(seed, "selfprompt", attempt, i))
            for i in range(missing + missing // 4 + 8)
        ]
        written = dict(generator.generate(requests, POLICY, stop_ids=target.stop_ids))
        # A target without chat training hardly ever ends a turn. Its cut turns are then accepted.
        may_be_cut = may_be_cut or sum(s.finished for s in written.values()) < len(written) // 4
        for index in sorted(written):
            text = target.text_tokenizer.decode(list(written[index].response_ids), skip_special_tokens=True).strip()
            if len(found) < needed and text not in found and usable(text, written[index].finished or may_be_cut):
                ids = render_prompt(target.text_tokenizer, text)
                found[text] = Prompt(f"self-{len(found):06d}", ids, "selfprompt")
                if on_prompt is not None:
                    on_prompt(1)
        if len(found) >= needed:
            return list(found.values())
    raise RunError(
        f"{target.name} wrote only {len(found)} usable prompts of {needed}; give a prompt file with data.prompts=FILE"
    )


def usable(text: str, finished: bool) -> bool:
    """Return True for a self-written user turn that is complete and not trivial."""
    return finished and (len(text.split()) >= MIN_WORDS or len(text) >= MIN_CHARACTERS)
