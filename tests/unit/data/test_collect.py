"""Making samples: sampled once however often interrupted, scored as the target sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.config import DataConfig
from distillspec.data.collect import fixed_samples, held_out_samples, sample_responses, score
from distillspec.data.packing import collate
from distillspec.data.selfprompt import usable, write_prompts
from distillspec.data.shards import ShardWriter, read_samples
from distillspec.errors import ConfigError, RunError
from distillspec.generation import SlotGenerator
from distillspec.losses import HiddenTeacher
from distillspec.models import LanguageModel
from distillspec.signals import HiddenSignal, SignalRequest
from distillspec.types import Prompt, Sample, SamplingPolicy

POLICY = SamplingPolicy()
PROMPTS = [Prompt(f"p{i}", tuple(range(20 + i, 26 + 2 * i))) for i in range(9)]


class Stopping:
    """A generator that is interrupted after some answers."""

    def __init__(self, inner: SlotGenerator, after: int) -> None:
        self.inner, self.left = inner, after

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[tuple[int, Sample]]:
        for item in self.inner.generate(*args, **kwargs):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield item


def collect(target: LanguageModel, folder: Path, generator: Any = None, **extra: Any) -> bool:
    return sample_responses(
        PROMPTS,
        generator or SlotGenerator(target, slots=4),
        ShardWriter(folder, {}, shard_sequences=2),
        policy=POLICY,
        stop_ids=target.stop_ids,
        max_new_tokens=8,
        signal=SignalRequest("topk", 4),
        seed=0,
        **extra,
    )


def tokens(folder: Path) -> dict[str, tuple[int, ...]]:
    return {s.prompt_id: s.response_ids for s in read_samples(folder)}


def test_an_interrupted_collection_ends_up_the_same(target: LanguageModel, tmp_path: Path) -> None:
    assert collect(target, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        collect(target, tmp_path / "parts", Stopping(SlotGenerator(target, slots=3), after=5))
    assert len(tokens(tmp_path / "parts")) == 5
    assert collect(target, tmp_path / "parts")
    assert tokens(tmp_path / "parts") == tokens(tmp_path / "whole")
    assert len(tokens(tmp_path / "whole")) == len(PROMPTS)


def test_a_deadline_keeps_answers_in_the_making_as_they_stand(target: LanguageModel, tmp_path: Path) -> None:
    assert collect(target, tmp_path / "whole")
    assert not collect(target, tmp_path / "cut", deadline=time.monotonic())
    whole, cut = tokens(tmp_path / "whole"), tokens(tmp_path / "cut")
    assert len(cut) == 4  # the first of four slots
    assert all(answer == whole[name][: len(answer)] for name, answer in cut.items())
    assert not any(sample.finished for sample in read_samples(tmp_path / "cut") if len(sample.response_ids) < 8)


def test_scores_are_the_plain_forward_pass(target: LanguageModel) -> None:
    samples = [
        Sample("a", "d", (1, 30, 31), (40, 41, 42, 2)),
        Sample("b", "d", (1, 50), (60,)),
    ]
    for one in score(samples, target, SignalRequest("topk", 6), seed=0):
        ids = torch.tensor([one.prompt_ids + one.response_ids])
        logprobs = torch.log_softmax(target.logits(ids)[0, len(one.prompt_ids) - 1 : -1], -1)
        assert one.signal is not None
        top = logprobs.topk(6)
        assert torch.equal(one.signal.ids, top.indices.to(torch.int32))
        torch.testing.assert_close(one.signal.logprobs.float(), top.values, atol=5e-3, rtol=1e-3)
        whole = one.signal.logprobs.float().exp().sum(-1) + one.signal.tail
        torch.testing.assert_close(whole, torch.ones(len(one.response_ids)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kept", [None, torch.tensor([2, 30, 41, 60, 7])], ids=["full", "truncated"])
def test_recorded_hidden_states_are_the_targets_distribution(target: LanguageModel, kept: Tensor | None) -> None:
    samples = [Sample("a", "d", (1, 30, 31), (40, 41, 42, 2)), Sample("b", "d", (1, 50), (60,))]
    scored = score(samples, target, SignalRequest("hidden"), seed=0)
    for sample, one in zip(samples, scored, strict=True):
        ids = torch.tensor([one.prompt_ids + one.response_ids])
        logprobs = torch.log_softmax(target.logits(ids)[0, len(one.prompt_ids) - 1 : -1], -1)
        assert isinstance(one.signal, HiddenSignal)
        assert replace(one, signal=None) == sample
        logits, _, log_z = HiddenTeacher.of(one.signal, target.head, kept).chunk(0, len(one.response_ids))
        assert logits is not None
        found = logits - (torch.logsumexp(logits, -1) if log_z is None else log_z)[:, None]
        wanted = logprobs if kept is None else logprobs[:, kept]
        torch.testing.assert_close(found, wanted, atol=5e-3, rtol=1e-3)  # states are rounded to float16
    batch = collate([scored], 32, 0)
    assert isinstance(batch.signal, HiddenSignal)
    assert len(batch.signal) == batch.response_tokens


def test_scoring_pads_little(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long and short answers in turn: in their order, every lot would be as wide as the longest."""
    samples = [Sample(str(i), "d", (1, 30), tuple(range(40, 42 + (i % 2) * 30))) for i in range(16)]
    read: list[int] = []
    hidden = target.hidden
    monkeypatch.setattr(type(target), "hidden", lambda self, ids, *rest: read.append(ids.numel()) or hidden(ids, *rest))
    scored = score(samples, target, SignalRequest("topk", 4), seed=0)
    assert sum(read) == sum(len(sample) for sample in samples)
    assert [s.prompt_id for s in scored] == [s.prompt_id for s in samples]
    assert all(s.signal is not None and len(s.signal) == len(s.response_ids) for s in scored)


def test_fixed_responses_are_cut_and_say_so(target: LanguageModel) -> None:
    prompts = [Prompt("a", (1, 2), response="abcdef"), Prompt("b", (1, 2)), Prompt("c", (1,), response="ab")]
    samples = fixed_samples(prompts, target, max_new_tokens=4)
    assert [s.prompt_id for s in samples] == ["a", "c"]
    assert target.tokenizer.decode(samples[0].response_ids) == "abcd"
    assert target.tokenizer.decode(samples[1].response_ids) == "ab<|im_end|>"
    assert [s.finished for s in samples] == [False, True]


def test_no_response_at_all_names_the_setting(target: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"name their column with data\.response_field"):
        fixed_samples([Prompt("a", (1,))], target, 4)


def test_held_out_answers_are_made_once_and_come_in_order(target: LanguageModel, tmp_path: Path) -> None:
    def answers(prompts: list[Prompt], seed: int = 0) -> list[Sample]:
        return held_out_samples(
            prompts,
            target,
            SlotGenerator(target, slots=4),
            tmp_path,
            policy=POLICY,
            max_new_tokens=6,
            seed=seed,
        )

    first = answers(PROMPTS[:5])
    assert [s.prompt_id for s in first] == [p.id for p in PROMPTS[:5]]
    files = sorted(tmp_path.glob("shard-*"))
    assert answers(PROMPTS[:5]) == first
    assert sorted(tmp_path.glob("shard-*")) == files
    more = answers(PROMPTS)
    assert more[:5] == first
    assert len(more) == len(PROMPTS)
    assert answers(PROMPTS[:3]) == first[:3]
    assert answers(PROMPTS, seed=1) == more  # another run on the same data is judged by the same answers


def test_self_written_prompts_are_distinct_and_templated(target: LanguageModel) -> None:
    config = DataConfig(num_prompts=10, eval_prompts=2, max_prompt_tokens=64)
    counted: list[int] = []
    prompts = write_prompts(target, SlotGenerator(target, slots=16), config, 0, counted.append)
    assert len(prompts) == len({p.token_ids for p in prompts}) == len({p.id for p in prompts}) == 12
    assert sum(counted) == 12
    for prompt in prompts:
        text = target.tokenizer.decode(prompt.token_ids)
        assert text.startswith("<|im_start|>user\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    again = write_prompts(target, SlotGenerator(target, slots=5), config, 0)
    assert again == prompts


def test_a_target_that_writes_nothing_usable_is_reported(target: LanguageModel) -> None:
    class Mute:
        def generate(self, requests: Any, policy: Any, **kwargs: Any) -> Iterator[tuple[int, Sample]]:
            for i, request in enumerate(requests):
                yield i, Sample("x", "d", request.prompt.token_ids, (2,))

    with pytest.raises(RunError, match="wrote only 0 usable prompts of 3; give a prompt file"):
        write_prompts(target, Mute(), DataConfig(num_prompts=2, eval_prompts=1), 0)


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
