"""Log-probabilities in OpenAI's bodies name tokens by the text that they have in the answer."""

from __future__ import annotations

from distillspec.serving.base.requests import TokenLogprob
from distillspec.serving.sequences.detokenize import Detokenizer
from distillspec.serving.server.answers.replies import ChatReplies, CompletionReplies, Head
from distillspec.serving.server.answers.text import TextCodec
from distillspec.serving.server.bridge.request_stream import Delta

from .spaced_tokenizer import llama_decoder, spaced_tokenizer

TOKENIZER = spaced_tokenizer(llama_decoder())
CODEC = TextCodec(TOKENIZER, 100)
HEAD = Head("id", 0, "llama")
SPACED, PLAIN = TOKENIZER.convert_tokens_to_ids(["▁the", "the"])
IDS = CODEC.encode("the theme the.", special=False)


def answer() -> Delta:
    """Return an answer to the prompt "me", each of whose tokens could have been "▁the" or "the"."""
    written = Detokenizer(TOKENIZER, CODEC.encode("me"))
    text = "".join(written.add(token) for token in IDS) + written.flush()
    entries = tuple(TokenLogprob(token, -1.0, {SPACED: -1.0, PLAIN: -2.0}) for token in IDS)
    return Delta(0, IDS, ("plain",) * len(IDS), text, entries, "stop", None)


def test_completions_place_each_token_in_the_text() -> None:
    choice = CompletionReplies(HEAD, CODEC, 1, True).choice(answer())
    found = choice["logprobs"]
    assert choice["text"] == "".join(found["tokens"]) == " the theme the."
    placed = zip(found["tokens"], found["text_offset"], strict=True)
    assert all(choice["text"].startswith(token, place) for token, place in placed)
    assert found["top_logprobs"] == [{" the": -1.0, "the": -2.0}] * len(IDS)


def test_chats_show_spaces_in_tokens_and_bytes() -> None:
    choice = ChatReplies(HEAD, CODEC, 1, True).choice(answer())
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"] == " the theme the."
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == " the theme the."
    assert [best["token"] for best in content[0]["top_logprobs"]] == [" the", "the"]
