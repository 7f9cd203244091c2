"""Two models share a tokenizer when every id means the same token, and only then."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.tiny import tiny_tokenizer
from distillspec.models.tokenizers import (
    first_difference,
    identify,
    require_same_tokenizer,
    tokenizer_hash,
    tokenizer_size,
)


def with_added(*tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(token) for token in tokens])
    return tokenizer


def test_the_hash_ignores_settings_and_survives_saving(tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == before


def test_the_hash_sees_added_tokens_and_their_order() -> None:
    hashes = {tokenizer_hash(t) for t in (tiny_tokenizer(), with_added("<a>", "<b>"), with_added("<b>", "<a>"))}
    assert len(hashes) == 3


def test_a_refusal_is_one_line_with_the_first_difference_and_both_names() -> None:
    with pytest.raises(ConfigError) as refused:
        require_same_tokenizer(with_added("<b>", "<a>"), with_added("<a>", "<b>"), "my-draft", "my-target")
    line = str(refused.value)
    assert "\n" not in line
    assert "id 259 is '<b>' in the draft and '<a>' in the target" in line
    assert "my-draft" in line
    assert "my-target" in line


def test_a_longer_vocabulary_is_a_difference_at_its_first_extra_id() -> None:
    assert (
        first_difference(with_added("<a>"), tiny_tokenizer()) == "id 259 is '<a>' in the draft and None in the target"
    )


def test_the_same_tokenizer_passes() -> None:
    assert tokenizer_hash(with_added("<a>")) == tokenizer_hash(with_added("<a>")) != tokenizer_hash(with_added("<b>"))
    require_same_tokenizer(with_added("<a>"), with_added("<a>"), "draft", "target")


def test_a_head_wider_than_the_tokenizer_is_cut_to_it(target: LanguageModel) -> None:
    size = tokenizer_size(target.tokenizer)
    raw = target.model.get_output_embeddings().weight
    assert raw.shape[0] == size + 5
    assert target.identity.vocab_size == target.width == target.head.weight.shape[0] == size
    ids = torch.tensor([[1, 40, 50]])
    logits = target.logits(ids)
    assert logits.shape == (1, 3, size)
    torch.testing.assert_close(logits, target.model(ids).logits[..., :size])


def test_a_head_narrower_than_the_tokenizer_bounds_the_vocabulary() -> None:
    tokenizer = with_added("<a>", "<b>")
    config = LlamaConfig(vocab_size=259, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    rows = LlamaForCausalLM(config).get_output_embeddings().weight.shape[0]
    assert tokenizer_size(tokenizer) == 261
    assert identify(tokenizer, rows, "").vocab_size == 259
