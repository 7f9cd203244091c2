"""Text and bytes of single tokens are those that they have inside a text. What the chat template refuses."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from distillspec.models.tiny import tiny_tokenizer
from distillspec.serving.server.answers.text import TextCodec
from distillspec.serving.server.http.errors import ApiError

from .spaced_tokenizer import llama_decoder, spaced_tokenizer

SPACED = {"llama": llama_decoder(), "gemma": llama_decoder(strip=False), "t5": decoders.Metaspace()}


def texts(tokenizer: PreTrainedTokenizerBase, *pieces: str) -> list[str]:
    codec = TextCodec(tokenizer, 100)
    return [codec.token_text(token) for token in tokenizer.convert_tokens_to_ids(list(pieces))]


@pytest.mark.parametrize("kind", SPACED)
def test_spaces_of_pieces_are_kept(kind: str) -> None:
    found = texts(spaced_tokenizer(SPACED[kind]), "▁the", "the", "▁", "▁▁", ".", "</s>")
    assert found == [" the", "the", " ", "  ", ".", "</s>"]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_texts_of_tokens_make_the_whole_text(kind: str) -> None:
    codec = TextCodec(spaced_tokenizer(SPACED[kind]), 100)
    ids = codec.encode("the  theme the.\n the", special=False)
    assert "".join(map(codec.token_text, ids)) == " the  theme the.\n the"
    assert bytes(byte for token in ids for byte in codec.token_bytes(token)) == b" the  theme the.\n the"


def test_single_bytes_of_a_spaced_tokenizer() -> None:
    tokenizer = spaced_tokenizer(llama_decoder())
    assert texts(tokenizer, "<0x20>", "<0x41>", "<0xC3>", "<0xA9>") == [" ", "A", "\ufffd", "\ufffd"]
    assert TextCodec(tokenizer, 100).token_bytes(tokenizer.convert_tokens_to_ids("<0xC3>")) == [0xC3]


def test_words_of_a_tokenizer_that_marks_continuations() -> None:
    backend = Tokenizer(WordPiece({"[UNK]": 0, "the": 1, "##me": 2, ".": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert texts(tokenizer, "the", "##me", ".") == [" the", "me", "."]


def test_byte_level_tokens_are_their_bytes() -> None:
    codec = TextCodec(tiny_tokenizer(), 100)
    ids = codec.encode(" é<|im_end|>")
    assert [codec.token_text(token) for token in ids] == [" ", "\ufffd", "\ufffd", "<|im_end|>"]
    assert [codec.token_bytes(token) for token in ids[:3]] == [[0x20], [0xC3], [0xA9]]


def test_a_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = spaced_tokenizer(llama_decoder())
    codec, calls = TextCodec(tokenizer, 100), []
    decode: Any = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: calls.append(ids) or decode(ids))
    first = codec.token_text(260)
    made = len(calls)
    assert codec.token_text(260) == first
    assert bytes(codec.token_bytes(260)).decode() == first
    assert len(calls) == made


def test_messages_that_the_template_refuses_are_the_clients_mistake() -> None:
    strict = tiny_tokenizer()
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}hi"
    with pytest.raises(ApiError, match="the model's chat template refuses these messages: no system role") as refusal:
        TextCodec(strict, 100).render([{"role": "system", "content": "Be brief."}])
    assert (refusal.value.status, refusal.value.param) == (400, "messages")
