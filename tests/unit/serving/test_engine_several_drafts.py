"""Several drafts of a pool in one tree: text is the target's, and each draft's state and tokens are its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, save_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.requests import RequestOutput
from distillspec.serving.base.tree import ROOT, TokenTree, merged
from distillspec.serving.proposers import side_by_side
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.by_name import draft_models
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.selection.selecting import selecting
from distillspec.serving.step.commit import Emission

from ..models.state_drafts import drafted_logits, state_draft
from .conftest import TIGHT, MakeEngine, plain_answers, prompts
from .test_engine_grown_trees import MIXED, tree_draft
from .test_engine_tree_circumstances import ASKED, stopping
from .whole_sequences import CAUGHT, LENGTH, LIKELY, counted, law, p_value

NAMES = ["tokens", "eagle", "truncated"]
SHAPES: list[dict[str, Any]] = [
    {"tree": "off"},
    {"tree": "sampled", "widths": [2, 2]},
    {"tree": "dynamic", "nodes": 5},
]


def pool(target: LanguageModel, names: Sequence[str] = NAMES) -> dict[str, LanguageModel]:
    return {name: tree_draft(name, target) for name in names}


def watched(engine: Engine) -> Counter[str]:
    """Count the accepted tokens of each source, and as `most` the most sources of a tree."""
    found = Counter[str]()

    def note(emissions: Sequence[Emission], logits: Tensor) -> None:
        for emission in emissions:
            found.update(trial.source for trial in emission.trials if trial.accepted)
            found["most"] = max(found["most"], len({group.source for group in emission.tree.groups}))

    engine.observer = note
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["tree"])
def test_greedy_and_seeded_answers_do_not_change(
    random_model: Callable[..., LanguageModel], shape: dict[str, Any]
) -> None:
    """In float64, preempted, prompts read in chunks: drafts of tokens, one of states, and n-grams."""
    target = random_model("llama", torch.float64)
    asked, named = [prompt[:60] for prompt in prompts(6)], ["ngram", *NAMES]
    params = [replace(own, max_tokens=16) for own in MIXED[:6]]
    settings = EngineSettings(
        **TIGHT,
        **{"nodes": 40, **shape},
        max_cache_tokens=150,
        controller="fixed",
        proposer=named,
        speculation_length=3,
    )
    engine = Engine(target, pool(target), settings)
    found = watched(engine)
    outputs = engine.generate(asked, params)
    engine.check_integrity()
    engine.close()
    assert [output.token_ids for output in outputs] == plain_answers(target, asked, params)
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert found.pop("most") == len(named)
    assert min(found[name] for name in NAMES) > 0
    earned = sum((Counter(output.stats.accepted_by_source) for output in outputs), Counter[str]())
    assert earned == found
    assert all(sum(o.stats.accepted_by_source.values()) == o.stats.accepted for o in outputs)


def test_drafts_that_change_leave_and_come_back_change_no_answer(
    random_model: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    """Answers end inside branches, share prefixes, are preempted and aborted."""
    target = random_model("llama", torch.float64)
    drafts, asked, params = pool(target), ASKED[:9], stopping(target)[:9]
    others = cycle([("tokens", tree_draft("truncated", target)), ("tokens", drafts["tokens"])])
    save_draft(drafts["eagle"], tmp_path / "eagle", target)
    settings = EngineSettings(
        **TIGHT, tree="sampled", widths=[2, 1], max_cache_tokens=130, controller="fixed", proposer=NAMES
    )
    engine = Engine(target, drafts, settings)
    found = watched(engine)
    for number, (prompt, own) in enumerate(zip(asked, params, strict=True)):
        engine.submit(Request(str(number), tuple(prompt), own))
    done, steps = dict[str, RequestOutput](), 0
    while engine.has_work:
        steps += 1
        if steps % 7 == 3:
            name, draft = next(others)
            engine.use_draft(draft, name=name)
        if steps % 20 == 5:
            engine.unload_draft("eagle")
            engine.submit(Request(f"aborted {steps}", tuple(asked[0]), SamplingParams(max_tokens=60)))
        if steps % 20 == 11:
            engine.load_draft(tmp_path / "eagle")
            engine.abort(f"aborted {steps - 6}")
        done |= {output.request_id: output for output in engine.step().finished}
        engine.check_integrity()
    engine.close()
    assert [done[str(number)].token_ids for number in range(len(asked))] == plain_answers(target, asked, params)
    assert min(found[name] for name in NAMES) > 0
    assert sum(output.stats.preemptions for output in done.values()) > 0
    assert sum(output.stats.prefix_tokens for output in done.values()) > 0
    assert {"stop", "abort"} <= {output.finish_reason for output in done.values()}


def test_each_draft_goes_on_from_the_text_whoever_wrote_it(random_model: Callable[..., LanguageModel]) -> None:
    """Greedy: what a draft proposes is what it finds most probable behind the text and its own tokens."""
    target = random_model("llama", torch.float64)
    drafts = pool(target)
    settings = EngineSettings(
        max_slots=2, max_model_len=128, compile=False, controller="fixed", proposer=NAMES, speculation_length=3
    )
    engine = Engine(target, drafts, settings)
    seen: dict[str, list[tuple[list[int], TokenTree]]] = {name: [] for name in NAMES}
    for model in draft_models(engine.proposer):
        model.propose = noting(model, seen[model.source])  # type: ignore[method-assign]
    found = watched(engine)
    engine.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    engine.close()
    assert min(found[name] for name in NAMES) > 0
    for name, own in seen.items():
        whole = [(text, tree) for text, tree in own if len(tree) == 3]
        assert len(whole) > 6
        for text, tree in whole[:: len(whole) // 6]:
            for node, token in enumerate(tree.tokens):
                assert token == int(behind(drafts[name], target, text, list(tree.tokens[:node])).argmax())


def noting(
    model: DraftModel, seen: list[tuple[list[int], TokenTree]]
) -> Callable[[Sequence[ProposalRequest]], list[TokenTree]]:
    plain = model.propose

    def propose(requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        trees = plain(requests)
        seen.extend((list(r.sequence.tokens), tree) for r, tree in zip(requests, trees, strict=True))
        return trees

    return propose


@torch.no_grad()
def behind(draft: LanguageModel, target: LanguageModel, text: list[int], drafted: list[int]) -> Tensor:
    """Return a draft's logits over the whole vocabulary."""
    if draft.state_input is not None:
        return drafted_logits(draft, target, text, [*drafted, 0])[-1]
    logits = draft.logits(torch.tensor([[*text, *drafted]]))[0, -1]
    if draft.kept_ids is None or len(logits) == draft.identity.vocab_size:
        return logits
    return torch.full((draft.identity.vocab_size,), -torch.inf).to(logits).index_copy_(0, draft.kept_ids, logits)


def exchanged(trees: Sequence[TokenTree]) -> TokenTree:
    """Join trees as the engine does, but let each source be judged with the next one's distributions."""
    tables = [next((group.drawn_from for group in tree.groups), None) for tree in trees]
    swapped = [
        TokenTree(tree.tokens, tuple([group._replace(drawn_from=table) for group in tree.groups]))
        for tree, table in zip(trees, [*tables[1:], tables[0]], strict=True)
    ]
    return merged(swapped)


@pytest.mark.parametrize("mistaken", [False, True])
def test_whole_sequences_follow_the_target(
    target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, mistaken: bool
) -> None:
    """All 81 sequences are counted. A sibling that is judged with the other draft's q is found out."""
    prompt, requests, letters = prompts()[1][:9], 600, target.text_tokenizer("abc")["input_ids"]
    drafts = {"one": state_draft("features", target, noise=0.05), "two": tree_draft("tokens", target)}
    if mistaken:
        monkeypatch.setattr(side_by_side, "merged", exchanged)
    engine = make_engine(drafts, proposer=["one", "two"], speculation_length=2, max_slots=64)
    found = watched(engine)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, allowed_token_ids=letters)
    counts = counted([output.token_ids for output in engine.generate([prompt] * requests, params)], letters)
    engine.close()
    assert mistaken or min(found["one"], found["two"]) > 100
    found_p = p_value(counts, law(target, prompt, letters))
    assert found_p < CAUGHT if mistaken else found_p > LIKELY


def test_by_goodput_each_request_gets_one_of_the_drafts(target: LanguageModel, make_engine: MakeEngine) -> None:
    asked, params = prompts(4), SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    engine = make_engine(pool(target), proposer=NAMES, controller="goodput")
    found = watched(engine)
    assert [output.token_ids for output in engine.generate(asked, params)] == plain_answers(target, asked, [params] * 4)
    assert selecting(engine.controller) is not None
    assert found["most"] <= 1
    assert selecting(make_engine(pool(target), proposer=NAMES).controller) is None


def test_trees_may_have_more_nodes_than_a_word_has_bits(target: LanguageModel, make_engine: MakeEngine) -> None:
    asked, params = prompts(2), SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    engine = make_engine(pool(target), proposer=NAMES, widths=[3, 3, 2], speculation_length=3)
    sizes: list[int] = []
    engine.observer = lambda emissions, logits: sizes.extend(len(emission.tree) for emission in emissions)
    assert [output.token_ids for output in engine.generate(asked, params)] == plain_answers(target, asked, [params] * 2)
    assert max(sizes) == 3 * (3 + 9 + 18)


def test_tokens_of_the_first_draft_are_tried_first(target: LanguageModel, make_engine: MakeEngine) -> None:
    options = {"prompt_lookup": {"shortest": 1}}
    engine = make_engine(
        pool(target), proposer=["truncated", "prompt_lookup", "tokens", "eagle"], proposer_options=options
    )
    orders = set[tuple[str, ...]]()

    def note(emissions: Sequence[Emission], logits: Tensor) -> None:
        orders.update(tuple(group.source for group in emission.tree.groups_at(ROOT)) for emission in emissions)

    engine.observer = note
    engine.generate(prompts(2), SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    assert ("truncated", "lookup", "tokens", "eagle") in orders


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"proposer": ["a", "c"]}, "proposer=c is not known; use one of none, .*, or a draft: a, b$"),
    ({"proposer": ["ngram", "a"]}, r"proposer=\['ngram', 'a'\] does not name the draft b, which would draft nothing"),
    ({"proposer": ["a", "a"]}, r"proposer=\['a', 'a'\] names one twice"),
    ({"proposer": ["draft_model", "a"]}, "draft_model is the one draft that engine.selection chooses"),
    ({"proposer": ["staged", "a"]}, "staged stands alone"),
    ({"proposer": ["a", "b"], "tree": "medusa"}, "tree=medusa needs a draft of kind medusa, not "),
    ({"proposer": ["a", "b"], "proposer_options": {"a": {"x": 1}}}, "proposer_options.a: a has no option 'x'"),
]


@pytest.mark.parametrize(("settings", "told"), REFUSED)
def test_impossible_lists_are_refused(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, settings: dict[str, Any], told: str
) -> None:
    drafts = {"a": draft, "b": tree_draft("eagle", target)}
    with pytest.raises(ConfigError, match=told):
        make_engine(drafts, **settings)


def test_names_are_of_drafts_that_are_there(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"proposer=magic is not known; use one of none, .*drafts=\[A,B\]$"):
        make_engine(None, proposer=["suffix", "magic"])
    with pytest.raises(ConfigError, match="proposer=a is not known"):
        make_engine(draft, proposer=["a", "b"])
    with pytest.raises(ConfigError, match="a draft cannot be called draft_model"):
        make_engine({"draft_model": draft})
    engine = make_engine({"a": draft}, proposer=["ngram", "a"])
    save_draft(draft, tmp_path / "c", target)
    with pytest.raises(ConfigError, match=r"does not name c; load it in the place of one of a$"):
        engine.load_draft(tmp_path / "c")
    engine.load_draft(tmp_path / "c", name="a")
