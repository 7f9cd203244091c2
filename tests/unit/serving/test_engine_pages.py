"""An engine whose caches are pages writes what it writes with slots, in any circumstances, and shares prefixes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.models.paged_cache import PagedCache
from distillspec.models.pages import Pages
from distillspec.serving import Engine, Request, RequestOutput, SamplingParams
from distillspec.serving.proposers.draft_model import DraftModel

from ..models.state_drafts import state_draft
from .conftest import INTERPRETED, MakeEngine, hf_greedy, prompts
from .test_engine_trees import Gardener, right_one_last

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
HEAD = [(7 * place) % 200 + 3 for place in range(60)]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def pages_of(engine: Engine) -> Pages:
    """The pages of an engine's caches, which are the same for target and draft."""
    caches = [engine.runner.cache]
    if isinstance(engine.proposer, DraftModel):
        caches += engine.proposer.caches
    assert all(isinstance(cache, PagedCache) for cache in caches)
    (pages,) = {id(cache.pages): cache.pages for cache in caches}.values()  # type: ignore[attr-defined]
    assert isinstance(pages, Pages)
    return pages


@needs_triton
@pytest.mark.usefixtures("no_kernel_trial")
def test_the_kernel_over_pages_writes_the_same_text(
    shallow_target: LanguageModel, shallow_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    """On CPUs under the interpreter: prompts in chunks, more requests than slots, one after another in used pages."""
    asked = [prompt[:36] for prompt in prompts(4)]
    wanted = [hf_greedy(shallow_target, prompt, 6) for prompt in asked]
    engine = make_engine(
        shallow_draft,
        model=shallow_target,
        page_tokens=16,
        max_slots=2,
        prefill_chunk=20,
        speculation_length=2,
        max_model_len=230,
        **INTERPRETED,
    )
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=6))
    engine.check_integrity()
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(output.stats.accepted for output in outputs) > 0


@needs_triton
@pytest.mark.usefixtures("no_kernel_trial")
def test_trees_in_the_kernel_over_pages(shallow_target: LanguageModel, make_engine: MakeEngine) -> None:
    asked = [prompt[:20] for prompt in prompts(3)]
    expected = [hf_greedy(shallow_target, prompt, 8) for prompt in asked]
    grown = Gardener(right_one_last({tuple(one): tokens for one, tokens in zip(asked, expected, strict=True)}))
    own = {"page_tokens": 4, "prefill_chunk": 12, **INTERPRETED}
    engine = make_engine(model=shallow_target, proposer_object=grown, speculation_length=3, max_slots=3, **own)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=8))
    assert [list(output.token_ids) for output in outputs] == expected
    assert sum(output.stats.accepted for output in outputs) > 10


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "room for all": {"max_slots": 8},
    "preempted": {"max_slots": 8, "max_cache_tokens": 120, "page_tokens": 4},
    "few slots": {"max_slots": 2, "prefill_chunk": 9},
    "a page does not divide the context": {"max_slots": 3, "page_tokens": 7, "max_model_len": 230},
    "nothing is reused": {"max_slots": 3, "prefix_reuse": False},
}


@pytest.fixture(scope="module")
def answers(target: LanguageModel) -> list[tuple[list[int], list[int]]]:
    """Prompts, some of which begin alike, and what transformers answers."""
    asked = [*prompts(8), [*prompts(8)[4], 9, 8, 7], prompts(8)[4][:40]]
    return [(prompt, hf_greedy(target, prompt, 14)) for prompt in asked]


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
@pytest.mark.parametrize("kind", ["plain", "draft", "a draft that reads states", "trees"])
def test_the_same_text_in_all_circumstances(
    target: LanguageModel,
    draft: LanguageModel,
    make_engine: MakeEngine,
    answers: list[tuple[list[int], list[int]]],
    kind: str,
    circumstance: str,
) -> None:
    settings: dict[str, Any] = {"page_tokens": 16, "speculation_length": 3, **CIRCUMSTANCES[circumstance]}
    drafts = {"draft": draft}
    if kind == "a draft that reads states":
        drafts[kind] = state_draft("eagle", target)
    if kind == "trees":
        grown = right_one_last({tuple(prompt): answer for prompt, answer in answers})
        settings["proposer_object"] = Gardener(grown)
    engine = make_engine(drafts.get(kind), **settings)
    params = SamplingParams(temperature=0.0, max_tokens=14)
    for number, (prompt, _) in enumerate(answers):
        engine.submit(Request(str(number), tuple(prompt), params))
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done.update({output.request_id: output for output in engine.step().finished})
        engine.check_integrity()
    outputs = [done[str(number)] for number in range(len(answers))]
    assert [list(output.token_ids) for output in outputs] == [answer for _, answer in answers]
    assert any(output.stats.preemptions for output in outputs) == (circumstance == "preempted")


def test_reservations_that_shrink_make_room_before_others_grow(target: LanguageModel, make_engine: MakeEngine) -> None:
    """Trees reserve many places. In the step after they are gone, requests that waited for those get them."""
    asked = [[20 + number] * 40 for number in range(8)]
    wanted = [hf_greedy(target, prompt, 24) for prompt in asked]
    grown = right_one_last({tuple(prompt): answer for prompt, answer in zip(asked, wanted, strict=True)})
    engine = make_engine(
        proposer_object=Gardener(grown), speculation_length=8, page_tokens=4, max_slots=8, max_cache_tokens=320
    )
    for number, prompt in enumerate(asked):
        engine.submit(Request(str(number), tuple(prompt), SamplingParams(temperature=0.0, max_tokens=24)))
    running = []
    done: dict[str, list[int]] = {}
    for step in range(100):
        if step in (2, 4):
            engine.use_proposer(Gardener(grown) if step == 4 else None)
        for output in engine.step().finished:
            done[output.request_id] = list(output.token_ids)
        running.append(len(engine.sequences.running))
        engine.check_integrity()
    assert running[2] > running[1]
    assert [done[str(number)] for number in range(8)] == wanted


def test_a_common_prefix_is_held_once_by_target_and_draft(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    wanted, longer = hf_greedy(target, HEAD, 8), hf_greedy(target, [*HEAD, 12], 8)
    engine = make_engine(draft, page_tokens=16, max_slots=4, speculation_length=2)
    pages = pages_of(engine)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, n=4)
    engine.submit(Request("a", tuple(HEAD), params))
    while len(engine.sequences.decoding) < 4:
        engine.step()
    engine.check_integrity()
    shared = [page for page in pages.tables[0] if all(page in table for table in pages.tables)]
    assert len(shared) == 3  # 48 of the 60 tokens; the fourth page is written to
    assert pages.used == 3 + sum(len(table) - 3 for table in pages.tables)
    output = engine.run_until_done({"a"})["a"]
    assert [list(answer.token_ids) for answer in output.completions] == [wanted] * 4
    (again,) = engine.generate([[*HEAD, 12]], GREEDY)
    assert list(again.token_ids) == longer
    engine.check_integrity()


def test_memory_that_others_were_promised_is_not_taken_by_a_longer_prefix(make_engine: MakeEngine) -> None:
    """Where memory is short, a request that was planned to share a running one's pages does not use a free slot's."""
    generator = torch.Generator().manual_seed(8)
    a, b, c, other = (torch.randint(3, 250, (n,), generator=generator).tolist() for n in (32, 32, 32, 140))
    engine = make_engine(page_tokens=16, max_cache_tokens=320, max_slots=6, max_model_len=128, speculation_length=0)

    def submit(name: str, prompt: list[int], tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.submit(Request(name, tuple(prompt), params))

    done: dict[str, RequestOutput] = {}

    def step() -> None:
        done.update({output.request_id: output for output in engine.step().finished})
        engine.check_integrity()

    submit("first", [*a, 9], 40)
    step()
    submit("free", [*a, *b, *c], 1)
    submit("beside", [*a, *b, 11], 50)
    while "free" not in done:
        step()
    submit("unlike", other[:110], 8)
    step()
    submit("continued", [*a, *b, *c, 12], 8)
    submit("short", other[110:130], 8)
    while engine.has_work:
        step()
    assert {output.finish_reason for output in done.values()} == {"length"}
    assert len(done) == 6


def test_texts_that_share_pages_leave_one_by_one(target: LanguageModel, make_engine: MakeEngine) -> None:
    """Free texts give way while a request reads what they share with it."""
    asked = [[*HEAD, number] for number in range(20, 26)] + [[number] * 100 for number in (30, 31)] + [[*HEAD, 40]]
    wanted = [hf_greedy(target, prompt, 8) for prompt in asked]
    engine = make_engine(page_tokens=16, max_slots=6, max_cache_tokens=240, speculation_length=0)
    for prompt, answer in zip(asked, wanted, strict=True):
        (output,) = engine.generate([prompt], GREEDY)
        engine.check_integrity()
        assert list(output.token_ids) == answer
    engine.forget_prompts()
    assert pages_of(engine).used == 0


@torch.inference_mode()
def test_nan_that_a_text_left_reaches_nobody(make_engine: MakeEngine, target: LanguageModel) -> None:
    """All pages that no slot holds are made NaN again and again, as if failed requests had held them."""
    asked = prompts(8)
    wanted = [hf_greedy(target, prompt, 12) for prompt in asked]
    engine = make_engine(page_tokens=16, max_slots=3, max_cache_tokens=512, speculation_length=0)
    pages, params = pages_of(engine), SamplingParams(temperature=0.0, max_tokens=12)
    done: dict[str, list[int]] = {}
    for number, prompt in enumerate(asked):
        engine.submit(Request(str(number), tuple(prompt), params))
    while engine.has_work:
        held = {page for table in pages.tables for page in table}
        free = torch.tensor([page for page in range(1 + pages.count) if page not in held])
        for tensor in engine.runner.cache.tensors():
            tensor[free] = torch.nan
        for output in engine.step().finished:
            done[output.request_id] = list(output.token_ids)
    assert [done[str(number)] for number in range(len(asked))] == wanted


def test_a_row_whose_page_holds_nan_ends_alone(
    make_engine: MakeEngine, draft: LanguageModel, answers: list[tuple[list[int], list[int]]]
) -> None:
    """Its pages, NaN as they are, serve the next requests."""
    engine = make_engine(draft, page_tokens=16, max_slots=3, speculation_length=2, prefix_reuse=False)
    params = SamplingParams(temperature=0.0, max_tokens=14)
    asked = answers[3:6]
    for number, (prompt, _) in enumerate(asked):
        engine.submit(Request(str(number), tuple(prompt), params))
    while len(engine.sequences.decoding) < 3:
        engine.step()
    sick = engine.sequences.unfinished["1/0"].held_slot
    with torch.inference_mode():
        engine.runner.cache.layers[0][1][pages_of(engine).tables[sick]] = torch.nan
    done = engine.run_until_done({"0", "1", "2"})
    assert [done[str(number)].finish_reason == "error" for number in range(3)] == [False, True, False]
    assert [list(done[name].token_ids) for name in "02"] == [asked[0][1], asked[2][1]]
    again = engine.generate([prompt for prompt, _ in answers], params)
    assert [list(output.token_ids) for output in again] == [answer for _, answer in answers]


def test_features_are_read_out_of_pages(target: LanguageModel, make_engine: MakeEngine) -> None:
    found = []
    for page in (0, 16):
        engine = make_engine(page_tokens=page, feature_ids=[0, 2], speculation_length=0, prefill_chunk=20)
        for number in range(2):
            engine.submit(Request(str(number), (*HEAD, number), SamplingParams(temperature=0.0, max_tokens=30)))
        for _ in range(12):
            engine.step()
        found.append([engine.features(f"{number}/0").clone() for number in range(2)])
        engine.close()
    for slots, paged in zip(*found, strict=True):
        assert len(slots) > 60
        torch.testing.assert_close(slots, paged)
