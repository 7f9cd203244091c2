"""Log-probabilities in OpenAI's bodies name tokens by the text that they have in the answer."""

from __future__ import annotations

from dataclasses import replace

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
    assert found["top_logprobs"] == [{" the": -1.0, "the": -2.0, text: -1.0} for text in found["tokens"]]


def test_completions_name_the_written_token_beside_the_best_ones() -> None:
    """OpenAI returns up to `logprobs` + 1 of them. A token with a penalty, or by chance, is none of the best."""
    entries = (TokenLogprob(PLAIN, -7.0, {SPACED: -0.5}), TokenLogprob(SPACED, -0.5, {SPACED: -0.5}))
    delta = Delta(0, (PLAIN, SPACED), ("plain",) * 2, "the the", entries, "stop", None)
    found = CompletionReplies(HEAD, CODEC, 1, True).choice(delta)["logprobs"]
    assert found["top_logprobs"] == [{" the": -0.5, "the": -7.0}, {" the": -0.5}]
    bare = replace(delta, logprobs=tuple(replace(entry, best={}) for entry in entries))  # of logprobs=0
    assert CompletionReplies(HEAD, CODEC, 1, True).choice(bare)["logprobs"]["top_logprobs"] is None


def test_chats_show_spaces_in_tokens_and_bytes() -> None:
    choice = ChatReplies(HEAD, CODEC, 1, True).choice(answer())
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"] == " the theme the."
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == " the theme the."
    assert [best["token"] for best in content[0]["top_logprobs"]] == [" the", "the"]
