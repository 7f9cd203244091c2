"""Text that vocabulary and layers are chosen by, and choosing layers by acceptance."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.commands.untrained import make_acceptance_probe, prepare_draft, target_texts, texts_of_run
from distillspec.config import DataConfig, DraftConfig
from distillspec.data.collect import score
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.data.shards import ShardWriter
from distillspec.generation import GENERATORS, SlotGenerator
from distillspec.models import LanguageModel
from distillspec.models.features import read_states
from distillspec.signals import SignalRequest
from distillspec.types import GenerationRequest, Prompt, Sample, SamplingPolicy

TEXT = [Sample("a", "d", (1, 20, 30), (40, 50, 60, 70))]
PROMPTS = tuple(Prompt(f"p{i}", (1, 20 + i)) for i in range(9))


class Backwards:
    """A generator whose answers end in the reverse order of their requests."""

    def __init__(self, inner: SlotGenerator) -> None:
        self.inner = inner

    def generate(
        self, requests: Sequence[GenerationRequest], policy: SamplingPolicy, **settings: Any
    ) -> Iterator[tuple[int, Sample]]:
        yield from sorted(self.inner.generate(requests, policy, **settings), key=lambda answer: -answer[0])


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    """A data folder with prompts alone, as an on-policy run leaves it."""
    folder = DataFolder(tmp_path)
    folder.write_prompts(PromptSet(PROMPTS, ()))
    return folder


def test_the_targets_answers_come_in_the_order_of_their_prompts(
    target: LanguageModel, folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short answers end first: the first few would be the shortest."""
    monkeypatch.setitem(GENERATORS, "slots", lambda writer, *settings: Backwards(SlotGenerator(writer)))
    answers = target_texts(DataConfig(max_new_tokens=4, refresh_prompts=6), target, folder, 0)
    assert [(s.prompt_id, s.prompt_ids) for s in answers] == [(p.id, p.token_ids) for p in PROMPTS[:6]]


def test_recorded_samples_come_in_the_order_of_their_prompts(target: LanguageModel, folder: DataFolder) -> None:
    writer = ShardWriter(folder.samples, {"target": asdict(target.identity)}, shard_sequences=4)
    for prompt in reversed(PROMPTS):
        writer.add(Sample(prompt.id, prompt.domain, prompt.token_ids, (40, 2), source="teacher"))
    writer.flush(complete=True)
    recorded = target_texts(DataConfig(cache=str(folder.root)), target, folder, 0)
    assert [s.prompt_id for s in recorded] == [p.id for p in PROMPTS]
    assert {s.response_ids for s in recorded} == {(40, 2)}


@pytest.mark.parametrize("on_policy", [False, True])
def test_text_of_others_chooses_nothing(target: LanguageModel, folder: DataFolder, on_policy: bool) -> None:
    """Unless the target's signal was recorded with it. On-policy runs read the cache for this alone."""
    others = [Sample(p.id, p.domain, p.token_ids, (40, 2), source="draft") for p in PROMPTS]
    (scored,) = score(others[:1], target, SignalRequest("topk", 4), 0)
    own = replace(others[1], source="teacher")
    config = DataConfig(cache=str(folder.root), max_new_tokens=4, refresh_prompts=3)
    for recorded, wanted in (([scored, own, *others[2:]], ["p0", "p1"]), (others, ["p0", "p1", "p2"])):
        shutil.rmtree(folder.samples, ignore_errors=True)
        writer = ShardWriter(folder.samples, {"target": asdict(target.identity)}, shard_sequences=1)
        for sample in recorded:
            writer.add(sample)
        writer.flush(complete=True)
        if on_policy:
            found = texts_of_run(replace(config, source="draft"), target, folder, 0, [])
        else:
            found = texts_of_run(config, target, folder, 0, recorded)
        assert [s.prompt_id for s in found] == wanted
        assert all(s.source == "teacher" or s.signal is not None for s in found)


def test_fixed_text_without_a_signal_is_joined_by_the_targets(target: LanguageModel, folder: DataFolder) -> None:
    fixed = [Sample(p.id, p.domain, p.token_ids, (40, 2)) for p in PROMPTS]
    config = DataConfig(source="fixed", prompts="f.jsonl", signal="none", max_new_tokens=4, refresh_prompts=3)
    found = texts_of_run(config, target, folder, 0, fixed)
    assert [s.source for s in found] == ["fixed"] * len(PROMPTS) + ["teacher"] * 3


def test_the_target_answers_where_a_cache_has_prompts_alone(target: LanguageModel, folder: DataFolder) -> None:
    config = DataConfig(cache=str(folder.root), max_new_tokens=4, refresh_prompts=3)
    answers = target_texts(config, target, folder, 0)
    assert [s.prompt_id for s in answers] == ["p0", "p1", "p2"]
    assert {s.source for s in answers} == {"teacher"}


def test_layers_are_told_apart_where_little_is_accepted(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model is less wrong at every token but one; the mean of α sees that one alone."""
    ids = torch.tensor([[*TEXT[0].prompt_ids, *TEXT[0].response_ids]])
    whole = target.logits(ids).detach()
    probe = make_acceptance_probe(target, TEXT)
    worst = -whole  # what the target likes least comes first
    scores = {}
    for name, likes in (("lucky", 60.0), ("near", 3.0)):
        logits = worst * likes
        if name == "lucky":
            logits[0, 0] = worst[0, 0]
        monkeypatch.setattr(type(target), "logits", lambda self, ids, logits=logits: logits)
        scores[name] = (probe(), _mean_acceptance(logits, whole))
    assert scores["lucky"][1] > scores["near"][1]
    assert scores["near"][0] > scores["lucky"][0]


def test_a_draft_of_random_layers_begins_evenly_and_with_states_of_one_size(random_model) -> None:
    """Gemma's layers are not copied, and its states are hundreds: random layers would add nothing to them."""
    shared = random_model("gemma3_text")
    target = replace(shared, model=copy.deepcopy(shared.model))
    with torch.no_grad():
        target.layers[0].post_feedforward_layernorm.weight += torch.linspace(50, 500, len(target.decoder.norm.weight))
    texts = [Sample(str(i), "d", (1, 20 + i), tuple(range(40 + i, 80 + i))) for i in range(4)]
    draft = prepare_draft(DraftConfig(kind="eagle", vocabulary=64), target, lambda: texts)
    joins = draft.state_input
    assert joins is not None
    assert joins.scale is not None
    assert torch.equal(torch.exp2(joins.scale.log2().round()), joins.scale)
    ids = torch.tensor([[1, 21, *range(41, 81)]])
    places = torch.arange(ids.shape[1])[None]
    states = read_states(target, ids, places, draft.state_ids)[0, 1:]
    size = (states * joins.scale).square().mean(0).sqrt()
    assert states.square().mean().sqrt() > 30
    assert float(size.min()) > 0.5
    assert float(size.max()) < 2
    torch.testing.assert_close(joins.fuse(states), states @ joins.fusion().T)
    assert draft.head.logits(draft.normed(joins.fuse(states))).std() < 3


@torch.no_grad()
def test_norms_of_states_begin_with_their_size(random_model) -> None:
    target = random_model("llama")
    texts = [Sample(str(i), "d", (1, 20 + i), tuple(range(40 + i, 80 + i))) for i in range(4)]
    plain = prepare_draft(DraftConfig(kind="eagle"), target, lambda: pytest.fail("nothing is chosen by text"))
    draft = prepare_draft(DraftConfig(kind="eagle", state_norms=True), target, lambda: texts)
    ids = torch.tensor([[*texts[0].prompt_ids, *texts[0].response_ids]])
    states = read_states(target, ids, torch.arange(ids.shape[1])[None], draft.state_ids)[0, 1:]
    assert plain.state_input is not None
    assert draft.state_input is not None
    wanted, found = (one.state_input.fuse(states).square().mean().sqrt() for one in (plain, draft))  # type: ignore[union-attr]
    assert abs(float(wanted) - 1) > 0.5, "norms of ones would begin elsewhere"
    assert float(found / wanted) == pytest.approx(1, abs=0.1)


def test_a_draft_that_begins_as_the_targets_layer_reads_states_as_they_are(target: LanguageModel) -> None:
    draft = prepare_draft(DraftConfig(kind="eagle"), target, lambda: pytest.fail("nothing is chosen by text"))
    assert draft.state_input is not None
    assert draft.state_input.scale is None


def _mean_acceptance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(torch.minimum(torch.softmax(ours, -1), torch.softmax(theirs, -1)).sum(-1).mean())
