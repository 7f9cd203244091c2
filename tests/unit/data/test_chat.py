"""One template for generation, training and evaluation."""

from __future__ import annotations

import pytest

from distillspec.data.chat import render_prompt, render_response, turn_end, user_turn_prefix
from distillspec.errors import ConfigError
from distillspec.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"  # a template that marks none


def test_prompt_and_response_are_the_conversation_as_the_template_writes_it() -> None:
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    whole = tuple(TOKENIZER(TOKENIZER.apply_chat_template(messages, tokenize=False)).input_ids)
    ours = render_prompt(TOKENIZER, "What is 2 + 2?") + render_response(TOKENIZER, "It is 4.")
    assert whole[: len(ours)] == ours
    assert TOKENIZER.decode(whole[len(ours) :]) == "\n"  # the template's own closing, after the stop token


def test_messages_carry_their_roles() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert TOKENIZER.decode(render_prompt(TOKENIZER, messages)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_user_turn_prefix_is_the_template_before_the_users_words() -> None:
    prefix = user_turn_prefix(TOKENIZER)
    assert TOKENIZER.decode(prefix) == "<|im_start|>user\n"
    assert render_prompt(TOKENIZER, "Tell me")[: len(prefix)] == prefix


def test_messages_that_the_template_refuses_are_one_clear_error() -> None:
    strict = tiny_tokenizer()
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}hi"
    with pytest.raises(ConfigError, match="do not fit the target's chat template: no system role"):
        render_prompt(strict, [{"role": "system", "content": "Be brief."}])


def test_a_tokenizer_without_a_template_gets_the_text_alone() -> None:
    plain = tiny_tokenizer()
    plain.chat_template = None
    assert plain.decode(render_prompt(plain, "Once upon")) == "Once upon"
    assert user_turn_prefix(plain) == (plain.bos_token_id,)


def test_a_response_ends_with_the_end_of_sequence_and_gets_no_special_start() -> None:
    assert render_response(TOKENIZER, "") == (TOKENIZER.eos_token_id,)
    assert TOKENIZER.decode(render_response(TOKENIZER, "Yes.")) == "Yes.<|im_end|>"


def test_a_response_ends_as_the_template_ends_a_turn() -> None:
    """Gemma closes turns with <end_of_turn>, never with its end-of-sequence token."""
    gemma = tiny_tokenizer()
    gemma.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    gemma.chat_template = (
        "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start>model\n{% endif %}"
    )
    assert gemma.decode(render_response(gemma, "Yes.")) == "Yes.<end_of_turn>"
    assert turn_end(TOKENIZER) == TOKENIZER.eos_token_id


def test_a_template_that_marks_no_end_leaves_the_end_of_sequence() -> None:
    plain = tiny_tokenizer()
    plain.chat_template = NO_END
    assert render_response(plain, "Yes.")[-1] == plain.eos_token_id
    plain.chat_template = None
    assert render_response(plain, "Yes.")[-1] == plain.eos_token_id


@pytest.mark.parametrize("template", [None, NO_END])
def test_without_an_end_of_sequence_the_targets_stop_ids_stand_in(template: str | None) -> None:
    bare = tiny_tokenizer()
    bare.eos_token, bare.chat_template = None, template
    assert render_response(bare, "Yes.", stop_ids=(0, 5))[-1] == 0
    with pytest.raises(ConfigError, match="no end-of-sequence token, and its generation config no stop ids; set eos"):
        turn_end(bare)


def test_a_template_that_marks_the_end_needs_no_end_of_sequence() -> None:
    bare = tiny_tokenizer()
    bare.eos_token = None
    assert render_response(bare, "Yes.")[-1] == TOKENIZER.eos_token_id


def test_a_text_that_nothing_begins_is_refused() -> None:
    bare = tiny_tokenizer()
    bare.bos_token = bare.eos_token = bare.chat_template = None
    assert user_turn_prefix(bare, stop_ids=(2,)) == (2,)
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        user_turn_prefix(bare)
