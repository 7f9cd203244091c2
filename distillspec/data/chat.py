"""Chat template of the target, for generation, training and evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from distillspec.errors import ConfigError

_MARK = "\u241edistillspec-user-turn\u241e"
_REPLY = "\u241edistillspec-assistant-turn\u241e"


class TemplateRefused(ConfigError):
    """The target's chat template does not take some messages.

    Args:
        reason: what the template says.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"a prompt's messages do not fit the target's chat template: {reason}")
        self.reason = reason


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[dict[str, str]]) -> tuple[int, ...]:
    """Return the token ids of a user turn (or a list of messages) up to the start of the assistant's turn.

    A tokenizer without a template gets the bare text.

    Raises:
        TemplateRefused: the template takes no such messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if tokenizer.chat_template is None:
        return tuple(tokenizer("\n".join(m["content"] for m in messages)).input_ids)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise TemplateRefused(str(error)) from error
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def render_response(tokenizer: PreTrainedTokenizerBase, response: str, stop_ids: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the token ids of an assistant turn, closed as the template closes it.

    Args:
        stop_ids: see `turn_end`.

    Raises:
        ConfigError: nothing tells how a turn ends.
    """
    return (*tokenizer(response, add_special_tokens=False).input_ids, turn_end(tokenizer, stop_ids))


def turn_end(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int] = ()) -> int:
    """Return the special token that the template puts after an assistant's text, or end of sequence.

    Gemma's turns end with <end_of_turn>, which is not its end-of-sequence token.

    Args:
        stop_ids: the target's. The first one stands in where the tokenizer has no end of sequence.

    Raises:
        ConfigError: nothing tells how a turn ends.
    """
    if tokenizer.chat_template is None:
        return _end_of_sequence(tokenizer, stop_ids)
    messages = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _REPLY}]
    _, _, closing = tokenizer.apply_chat_template(messages, tokenize=False).partition(_REPLY)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = tokenizer(closing, add_special_tokens=False).input_ids
    marks = [i for i in ids if i in special]
    return marks[0] if marks else _end_of_sequence(tokenizer, stop_ids)


def user_turn_prefix(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the tokens that the template puts before a user's text. A model that reads them writes a user turn.

    Without a template it is the token that begins a text, or the one that ends the text before.

    Args:
        stop_ids: see `turn_end`.

    Raises:
        ConfigError: there is no such token.
    """
    if tokenizer.chat_template is None:
        start = tokenizer.bos_token_id
        return (_end_of_sequence(tokenizer, stop_ids) if start is None else start,)
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return tuple(tokenizer(text.split(_MARK)[0], add_special_tokens=False).input_ids)


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> int:
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    if not stop_ids:
        raise ConfigError(
            "the target's tokenizer has no end-of-sequence token, and its generation config no stop ids; set eos_token "
            "in tokenizer_config.json, or eos_token_id in generation_config.json"
        )
    return stop_ids[0]
