"""Prompts that the target writes for itself: different, templated, and kept by an interrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distillspec.config import DataConfig
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.data.selfprompt import usable, write_prompts
from distillspec.errors import RunError
from distillspec.generation import SlotGenerator
from distillspec.models import LanguageModel
from distillspec.types import Sample

CONFIG = DataConfig(num_prompts=10, eval_prompts=2, max_prompt_tokens=64)


class Stopping:
    """A generator that counts its turns and is interrupted after some of them."""

    def __init__(self, inner: SlotGenerator, after: int = -1) -> None:
        self.inner = inner
        self.left = after
        self.written = 0

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[tuple[int, Sample]]:
        for item in self.inner.generate(*args, **kwargs):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            self.written += 1
            yield item


def test_self_written_prompts_are_distinct_and_templated(target: LanguageModel, tmp_path: Path) -> None:
    usable_so_far: list[int] = []
    prompts = write_prompts(
        target, SlotGenerator(target, slots=16), CONFIG, 0, DataFolder(tmp_path / "a"), usable_so_far.append
    )
    assert len(prompts) == len({p.token_ids for p in prompts}) == len({p.id for p in prompts}) == 12
    assert usable_so_far == sorted(usable_so_far)
    assert usable_so_far[-1] <= 12
    for prompt in prompts:
        text = target.tokenizer.decode(prompt.token_ids)
        assert text.startswith("<|im_start|>user\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    again = write_prompts(target, SlotGenerator(target, slots=5), CONFIG, 0, DataFolder(tmp_path / "b"))
    assert again == prompts


def test_an_interrupted_run_keeps_its_turns(target: LanguageModel, tmp_path: Path) -> None:
    whole = Stopping(SlotGenerator(target, slots=4))
    expected = write_prompts(target, whole, CONFIG, 0, DataFolder(tmp_path / "whole"))
    folder = DataFolder(tmp_path / "data")
    with pytest.raises(KeyboardInterrupt):
        write_prompts(target, Stopping(SlotGenerator(target, slots=4), after=9), CONFIG, 0, folder)
    with folder.turns.open("a") as stream:
        stream.write('{"attempt": 0, "ind')  # killed while it wrote
    rest = Stopping(SlotGenerator(target, slots=4))
    assert write_prompts(target, rest, CONFIG, 0, folder) == expected
    assert rest.written == whole.written - 9
    folder.write_prompts(PromptSet(tuple(expected), ()))
    assert not folder.turns.exists()


def test_turns_of_another_seed_are_not_used(target: LanguageModel, tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    first = write_prompts(target, SlotGenerator(target, slots=4), CONFIG, 0, folder)
    other = Stopping(SlotGenerator(target, slots=4))
    assert write_prompts(target, other, CONFIG, 1, folder) != first
    assert other.written >= 12


def test_a_target_that_writes_nothing_usable_is_reported(target: LanguageModel, tmp_path: Path) -> None:
    class Mute:
        def generate(self, requests: Any, policy: Any, **kwargs: Any) -> Iterator[tuple[int, Sample]]:
            for i, request in enumerate(requests):
                yield i, Sample("x", "d", request.prompt.token_ids, (2,))

    with pytest.raises(RunError, match="wrote only 0 usable prompts of 3; give a prompt file"):
        write_prompts(target, Mute(), DataConfig(num_prompts=2, eval_prompts=1), 0, DataFolder(tmp_path))


@pytest.mark.parametrize(
    ("text", "finished", "kept"),
    [
        ("What is it?", True, True),
        ("What is it?", False, False),
        ("Hi there", True, False),
        ("東京の天気はどうですか教えてくださいお願いします", True, True),
    ],
)
def test_usable_turns(text: str, finished: bool, kept: bool) -> None:
    assert usable(text, finished) is kept
