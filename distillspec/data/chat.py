"""Chat template of the target, for generation, training and evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_MARK = "\u241edistillspec-user-turn\u241e"
_REPLY = "\u241edistillspec-assistant-turn\u241e"


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[dict[str, str]]) -> tuple[int, ...]:
    """Return the token ids of a user turn (or a list of messages) up to the start of the assistant's turn.

    A tokenizer without a template gets the bare text.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if tokenizer.chat_template is None:
        return tuple(tokenizer("\n".join(m["content"] for m in messages)).input_ids)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def render_response(tokenizer: PreTrainedTokenizerBase, response: str) -> tuple[int, ...]:
    """Return the token ids of an assistant turn, closed as the template closes it."""
    return (*tokenizer(response, add_special_tokens=False).input_ids, turn_end(tokenizer))


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the special token that the template puts after an assistant's text, or end of sequence.

    Gemma's turns end with <end_of_turn>, which is not its end-of-sequence token.
    """
    if tokenizer.chat_template is None:
        return tokenizer.eos_token_id
    messages = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _REPLY}]
    _, _, closing = tokenizer.apply_chat_template(messages, tokenize=False).partition(_REPLY)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = tokenizer(closing, add_special_tokens=False).input_ids
    return next((i for i in ids if i in special), tokenizer.eos_token_id)


def user_turn_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that the template puts before a user's text. A model that reads them writes a user turn."""
    if tokenizer.chat_template is None:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return (start,)
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return tuple(tokenizer(text.split(_MARK)[0], add_special_tokens=False).input_ids)
