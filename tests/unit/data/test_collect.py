"""Making samples: sampled once however often interrupted, scored as the target sees them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.config import DataConfig
from distillspec.data.collect import (
    check_responses,
    fixed_samples,
    held_out_samples,
    sample_responses,
    score,
    with_writer_logprobs,
)
from distillspec.data.packing import collate
from distillspec.data.shards import ShardWriter, read_samples
from distillspec.errors import ConfigError
from distillspec.generation import SlotGenerator
from distillspec.losses import HiddenTeacher
from distillspec.models import LanguageModel
from distillspec.models.tiny import tiny_tokenizer
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


class Counting:
    """A generator that counts the requests of each call."""

    def __init__(self, inner: SlotGenerator) -> None:
        self.inner, self.counts = inner, list[int]()

    def generate(self, requests: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[int, Sample]]:
        self.counts.append(len(requests))
        return self.inner.generate(requests, *args, **kwargs)


def collect(target: LanguageModel, folder: Path, generator: Any = None, **extra: Any) -> int:
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
    assert collect(target, tmp_path / "whole") == 0
    with pytest.raises(KeyboardInterrupt):
        collect(target, tmp_path / "parts", Stopping(SlotGenerator(target, slots=3), after=5))
    assert len(tokens(tmp_path / "parts")) == 5
    assert collect(target, tmp_path / "parts") == 0
    assert tokens(tmp_path / "parts") == tokens(tmp_path / "whole")
    assert len(tokens(tmp_path / "whole")) == len(PROMPTS)


def test_a_deadline_keeps_answers_in_the_making_as_they_stand(target: LanguageModel, tmp_path: Path) -> None:
    assert collect(target, tmp_path / "whole") == 0
    assert collect(target, tmp_path / "cut", deadline=time.monotonic()) == 5
    whole, cut = tokens(tmp_path / "whole"), tokens(tmp_path / "cut")
    assert len(cut) == 4  # the first of four slots
    assert all(answer == whole[name][: len(answer)] for name, answer in cut.items())
    assert not any(sample.finished for sample in read_samples(tmp_path / "cut") if len(sample.response_ids) < 8)


def test_lots_hold_the_same_answers_and_none_begins_after_the_deadline(target: LanguageModel, tmp_path: Path) -> None:
    assert collect(target, tmp_path / "whole") == 0
    generator = Counting(SlotGenerator(target, slots=4))
    assert collect(target, tmp_path / "lots", generator, lot=4) == 0
    assert generator.counts == [4, 4, 1]
    assert tokens(tmp_path / "lots") == tokens(tmp_path / "whole")
    assert collect(target, tmp_path / "cut", generator, lot=4, deadline=time.monotonic()) == 5
    assert generator.counts[3:] == [4]


def test_nothing_is_asked_for_where_every_prompt_is_answered(target: LanguageModel, tmp_path: Path) -> None:
    assert collect(target, tmp_path) == 0
    generator = Counting(SlotGenerator(target, slots=4))
    assert collect(target, tmp_path, generator) == 0
    assert generator.counts == []


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


def test_a_writers_log_probabilities_are_without_dropout(random_model: Callable[[str], LanguageModel]) -> None:
    """As it drew the text. Between the steps of a run it is in training mode."""
    plain = random_model("gpt2")
    assert plain.model.config.resid_pdrop > 0
    training = replace(plain, model=copy.deepcopy(plain.model).train())
    ids = (40, 41, 42, 2)
    (drawn,) = with_writer_logprobs([Sample("a", "d", (1, 30, 31), ids, source="draft")], training, POLICY, plain)
    logprobs = torch.log_softmax(plain.logits(torch.tensor([(1, 30, 31, *ids)]))[0, 2:-1], -1)
    assert drawn.writer_logprobs is not None
    torch.testing.assert_close(
        drawn.writer_logprobs.float(), logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0], atol=1e-4, rtol=1e-4
    )
    assert all(module.training for module in training.model.modules())


def test_fixed_responses_are_cut_and_say_so(target: LanguageModel) -> None:
    prompts = [Prompt("a", (1, 2), response="abcdef"), Prompt("b", (1, 2)), Prompt("c", (1,), response="ab")]
    samples = fixed_samples(prompts, target, max_new_tokens=4)
    assert [s.prompt_id for s in samples] == ["a", "c"]
    assert target.tokenizer.decode(samples[0].response_ids) == "abcd"
    assert target.tokenizer.decode(samples[1].response_ids) == "ab<|im_end|>"
    assert [s.finished for s in samples] == [False, True]


def test_fixed_responses_end_where_the_target_can_read_no_further(target: LanguageModel) -> None:
    reads = target.model.config.max_position_embeddings
    long, full = (Prompt(name, (1,) * tokens, response="abcdef") for name, tokens in (("a", reads - 3), ("b", reads)))
    (sample,) = fixed_samples([long, full], target, max_new_tokens=100)
    assert (sample.prompt_id, len(sample.response_ids), sample.finished) == ("a", 3, False)


def test_a_tokenizer_without_an_end_of_sequence_closes_and_pads_all_the_same(target: LanguageModel) -> None:
    bare = tiny_tokenizer()
    bare.eos_token = bare.chat_template = None
    other = replace(target, tokenizer=bare)
    prompts = [Prompt("a", (1, 2), response="abcdef"), Prompt("b", (1, 3), response="ab")]  # one is padded
    samples = fixed_samples(prompts, other, max_new_tokens=9)
    assert [s.response_ids[-1] for s in samples] == [2, 2]  # the target stops there
    request = SignalRequest("topk", 6)
    for one, wanted in zip(score(samples, other, request, 0), score(samples, target, request, 0), strict=True):
        assert one.signal is not None
        assert wanted.signal is not None
        assert torch.equal(one.signal.ids, wanted.signal.ids)
        assert torch.equal(one.signal.logprobs, wanted.signal.logprobs)


def test_no_response_at_all_names_the_setting() -> None:
    without = [Prompt("a", (1,)), Prompt("b", (1,), response="")]
    fixed = DataConfig(source="fixed", prompts="f.jsonl")
    with pytest.raises(
        ConfigError, match=r"^data\.source=fixed found no .* name their column with data\.response_field"
    ):
        check_responses(fixed, without)
    mixed = DataConfig(source="mixed", mixed_with="fixed", prompts="f.jsonl")
    with pytest.raises(ConfigError, match=r"^data\.mixed_with=fixed found no .* with data\.response_field"):
        check_responses(mixed, without)
    with pytest.raises(ConfigError, match=r"^data\.mixed_with=fixed: no training prompt of data\.cache=RUN has"):
        check_responses(replace(mixed, cache="RUN"), without)
    check_responses(mixed, [*without, Prompt("c", (1,), response="0")])
    check_responses(DataConfig(), without)


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
