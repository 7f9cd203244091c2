"""Deltas of steps: taken once, with the texts that they are still to get."""

from __future__ import annotations

from distillspec.models.tiny import tiny_tokenizer
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.sequences.deltas import Deltas
from distillspec.serving.sequences.detokenize import Detokenizer
from distillspec.serving.step.output import StepOutput

TOKENIZER = tiny_tokenizer()


def answer(name: str, text: str) -> tuple[SequenceState, list[int]]:
    request = Request(name, (5, 6), SamplingParams())
    return SequenceState(f"{name}/0", request, 0, 0, [5, 6], frozenset(), 100), TOKENIZER(text)["input_ids"]


def test_deltas_are_taken_once_and_get_their_text_later() -> None:
    deltas = Deltas()
    (first, ids), (second, others) = answer("a", "later"), answer("b", "now")
    texts = Detokenizer(TOKENIZER, (5, 6)), Detokenizer(TOKENIZER, (5, 6))
    first.tokens += ids
    deltas.add(first, 0, "".join(map(texts[0].later, ids)), texts[0])
    second.tokens += others
    deltas.add(second, 0, "".join(map(texts[1].add, others)), texts[1])
    assert len(deltas) == 2
    made, unwritten = deltas.take()
    assert [own.text for own in made] == ["", "now"]
    assert list(unwritten) == [0]
    output = StepOutput(made, unwritten=unwritten)
    assert [own.text for own in output.written().deltas] == ["later", "now"]
    assert [own.token_ids for own in output.written().deltas] == [tuple(ids), tuple(others)]
    assert (len(deltas), deltas.take()) == (0, ((), {}))
    whole = StepOutput(made)
    assert whole.written() is whole


def test_an_end_brings_the_text_that_was_still_to_come() -> None:
    deltas = Deltas()
    sequence, ids = answer("a", "cut off")
    text = Detokenizer(TOKENIZER, (5, 6))
    sequence.tokens += ids
    deltas.add(sequence, 0, "".join(map(text.later, ids)), text)
    made, unwritten = deltas.take()
    sequence.finish_reason = "abort"
    deltas.end(sequence, text)
    (end,), later = deltas.take()
    assert (end.text, end.token_ids, later) == ("cut off", (), {})
    assert StepOutput(made, unwritten=unwritten).written().deltas[0].text == "", "all text once"
