"""One chat template for generation, training and evaluation: the target's own."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_MARK = "\u241edistillspec-user-turn\u241e"


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[dict[str, str]]) -> tuple[int, ...]:
    """Token ids of a user turn (or a list of messages) up to where the assistant speaks.

    A tokenizer without a template gets the text as it is.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if tokenizer.chat_template is None:
        return tuple(tokenizer("\n".join(m["content"] for m in messages)).input_ids)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def render_response(tokenizer: PreTrainedTokenizerBase, response: str) -> tuple[int, ...]:
    """Token ids of an assistant turn, closed by the end-of-sequence token."""
    return (*tokenizer(response, add_special_tokens=False).input_ids, tokenizer.eos_token_id)


def user_turn_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Everything the template puts before a user's words: fed to a model, it writes a user turn."""
    if tokenizer.chat_template is None:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return (start,)
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return tuple(tokenizer(text.split(_MARK)[0], add_special_tokens=False).input_ids)
