"""Text comes in whole characters, stops where it must, and adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillspec.models.tiny import tiny_tokenizer
from distillspec.serving.sequences.detokenize import Detokenizer

TOKENIZER = tiny_tokenizer()


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    """Return the text that each byte of `text` releases, and the end."""
    detokenizer = Detokenizer(TOKENIZER, TOKENIZER("before")["input_ids"], stop)
    found = []
    for token in TOKENIZER(text)["input_ids"]:
        found.append(detokenizer.add(token))
        if detokenizer.stopped_by is not None:
            break
    return [*found, detokenizer.flush()], detokenizer


@given(st.text(max_size=30))
def test_the_pieces_are_whole_characters_and_add_up(text: str) -> None:
    found, detokenizer = pieces(text)
    assert "".join(found) == detokenizer.text == text
    assert not any("\ufffd" in piece for piece in found) or "\ufffd" in text


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("one two STOP three", ("STOP",), "one two "),
        ("one STO two", ("STOP",), "one STO two"),
        ("aaab", ("aab",), "a"),
        ("x END y STOP", ("STOP", "END"), "x "),
        ("é STOP", ("é",), ""),
    ],
)
def test_stop_strings_end_the_text_before_them(text: str, stop: tuple[str, ...], wanted: str) -> None:
    found, detokenizer = pieces(text, stop)
    assert "".join(found) == detokenizer.text == wanted


def test_nothing_of_a_possible_stop_string_is_released_too_early() -> None:
    found, _ = pieces("abSTx", ("STOP",))
    assert found == ["a", "b", "", "", "STx", ""]


def test_stop_strings_are_let_through_before_the_minimum_length() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ("b",))
    assert [detokenizer.add(token, may_stop=False) for token in TOKENIZER("ab")["input_ids"]] == ["a", "b"]
    assert detokenizer.stopped_by is None


def test_an_unfinished_character_at_the_end_becomes_a_replacement() -> None:
    detokenizer = Detokenizer(TOKENIZER, [])
    first = TOKENIZER("é")["input_ids"][0]
    assert detokenizer.add(first) == ""
    assert detokenizer.flush() == "\ufffd"


class Counting:
    """The tokenizer, and the most ids that it was asked to decode at once."""

    def __init__(self) -> None:
        self.most = 0

    def decode(self, ids: list[int], **named: bool) -> str:
        self.most = max(self.most, len(ids))
        return str(TOKENIZER.decode(ids, **named))


@pytest.mark.parametrize("token", [TOKENIZER.eos_token_id, TOKENIZER("é")["input_ids"][0]])
def test_tokens_without_text_are_not_decoded_again_and_again(token: int) -> None:
    counting = Counting()
    detokenizer = Detokenizer(counting, TOKENIZER("before")["input_ids"])  # type: ignore[arg-type]
    for _ in range(500):
        detokenizer.add(token)
    assert counting.most < 200
    for own in TOKENIZER("after")["input_ids"]:
        detokenizer.add(own)
    detokenizer.flush()
    assert detokenizer.text.endswith("after")


@given(st.text(max_size=30), st.data())
def test_tokens_read_later_release_what_they_would_have_at_once(text: str, data: st.DataObject) -> None:
    """Whenever the text catches up, or another token is added, all of it is there, in order."""
    wanted, at_once = pieces(text)
    detokenizer = Detokenizer(TOKENIZER, TOKENIZER("before")["input_ids"])
    found = []
    for token in TOKENIZER(text)["input_ids"]:
        match data.draw(st.sampled_from(["now", "later", "later, and caught up"])):
            case "now":
                found.append(detokenizer.add(token))
                assert not detokenizer.behind
            case how:
                found.append(detokenizer.later(token))
                assert detokenizer.behind
                if how != "later":
                    found.append(detokenizer.catch_up())
    found.append(detokenizer.flush())
    assert not detokenizer.behind
    assert "".join(found) == "".join(wanted)
    assert detokenizer.text == at_once.text
