"""A row whose target logits are NaN ends alone, whatever was drafted, and where device reads are not free too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, RequestOutput, SamplingParams
from distillspec.serving.base.tree import ROOT, DraftProbs, SiblingGroup, TokenTree
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.decoding.verdict import Judgement, TreeVerdict
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.proposers.base import ProposalRequest

from .conftest import MakeEngine, prompts
from .decoding.test_sampling import CPU, row
from .oracle import GREEDY, PROMPT
from .test_engine_trees import Gardener

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "filtered": {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "temperature": 0.7},
    "seeded": {"seed": 3},
}
VOCAB = 259  # the tiny target's
EVERY_BYTE = list(range(3, 250))  # a lookup finds whatever token comes next
REPEATABLE = ("greedy", "seeded")  # their tokens do not depend on who runs beside them


def forked(request: ProposalRequest) -> TokenTree:
    """Two tokens that nobody drew, and one below each."""
    tree = TokenTree.of_parents((65, 66, 67, 68), (ROOT, ROOT, 0, 1))
    return tree.shortened(request.speculation_length)


def drawn_fork(request: ProposalRequest) -> TokenTree:
    """Two tokens drawn from an even distribution."""
    even = torch.full((1, VOCAB), 1 / VOCAB)
    return TokenTree((65, 66), (SiblingGroup(ROOT, (0, 1), drawn_from=DraftProbs(even)),))


PATHS = ("nothing", "prompt", "draft", "lookup", "lookup else draft", "wide", "wide and drawn")


def engine_of(
    path: str, kind: str, reads_are_free: bool, target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> Engine:
    sampler = TokenSampler(target.identity.vocab_size, target.device, reads_are_free=reads_are_free)
    settings: dict[str, Any] = {
        "max_slots": 3,
        "max_model_len": 300,
        "speculation_length": 2,
        "sampler_object": sampler,
        "compile": False,
    }
    if path in ("draft", "lookup else draft"):
        proposer = "draft_model" if path == "draft" else "lookup_else_model"
        return make_engine(draft, proposer=proposer, **settings)
    if path == "lookup":
        return make_engine(None, proposer="prompt_lookup", proposer_options={"shortest": 1}, **settings)
    if path.startswith("wide"):
        return make_engine(proposer_object=Gardener(forked if path == "wide" else drawn_fork), **settings)
    return make_engine(**settings)


def spoil(
    engine: Engine, name: str, begins: Callable[[VerificationWindow], bool], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Put NaN into every row of one request's windows, from the first that `begins` holds for. Return their nodes."""
    verify, spoilt = engine.sampler.verify, list[int]()

    def spoiling(logits: Tensor, windows: list[VerificationWindow]) -> list[Judgement]:
        logits, first = logits.clone(), 0
        for window in windows:
            rows = 1 + len(window.tree)
            if window.sequence.request.id == name and (spoilt or begins(window)):
                logits[first : first + rows] = torch.nan
                spoilt.append(len(window.tree))
            first += rows
        return verify(logits, windows)

    monkeypatch.setattr(engine.sampler, "verify", spoiling)
    return spoilt


def run(engine: Engine, params: SamplingParams) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    for i, name in enumerate(("sound", "sick", "later")):
        engine.submit(Request(name, tuple(EVERY_BYTE[i:]), params))
    for _ in range(80):  # none takes more: an engine that repeats what failed must not hang the suite
        done.update({output.request_id: output for output in engine.step().finished})
        engine.check_integrity()
        if not engine.has_work:
            break
    return done


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reads_are_free", [True, False], ids=["reads are free", "reads cost time"])
def test_a_nan_row_ends_alone(
    reads_are_free: bool,
    path: str,
    kind: str,
    target: LanguageModel,
    draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, **KINDS[kind])
    engine = engine_of(path, kind, reads_are_free, target, draft, make_engine)
    wanted = run(engine, params)
    drafted = path not in ("nothing", "prompt")
    begins = {
        "prompt": lambda window: True,
        "nothing": lambda window: window.sequence.output_length == 2,
    }.get(path, lambda window: len(window.tree) > 0)
    spoilt = spoil(engine, "sick", begins, monkeypatch)
    done = run(engine, params)
    assert done["sick"].finish_reason == "error"
    assert "not finite" in str(done["sick"].completions[0].error)
    assert len(done["sick"].token_ids) < 12
    for name in ("sound", "later"):
        assert (done[name].finish_reason, len(done[name].token_ids)) == ("length", 12)
        if kind in REPEATABLE:
            assert done[name].token_ids == wanted[name].token_ids
    # A row with drafted tokens is read again without them before it is given up.
    assert [nodes > 0 for nodes in spoilt] == ([True, False] if drafted else [False])


@pytest.mark.parametrize("reads_are_free", [True, False], ids=["reads are free", "reads cost time"])
@pytest.mark.parametrize("kind", ["drawn", "filtered"])
def test_nan_after_a_rejected_branch_costs_nothing(reads_are_free: bool, kind: str) -> None:
    """A wide tree: the branch that is not taken is NaN, the verdict holds, and the slot is cleared."""
    logits = torch.full((5, VOCAB), -torch.inf)
    logits[:, 7] = 0.0  # p is one-hot: neither drafted token is accepted
    logits[2] = torch.nan
    window = VerificationWindow(
        row("a", SamplingParams(**KINDS[kind])), TokenTree.of_parents((65, 66, 67, 68), (ROOT, ROOT, 0, 1))
    )
    (judgement,) = TokenSampler(VOCAB, CPU, reads_are_free=reads_are_free).verify(logits, [window])
    assert judgement.verdict == TreeVerdict((), 7)
    assert not judgement.sound


def test_nan_in_one_row_end_that_request_alone(
    continuation: list[int], target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, max_slots=3, speculation_length=2)
    for name in ("sound", "sick", "later"):
        engine.submit(Request(name, tuple(PROMPT), GREEDY))
    engine.step()
    cache = engine.runner.cache
    slot = next(s.slot for s in engine.sequences.running if s.request.id == "sick")
    with torch.inference_mode():
        cache.layers[0][1][slot, :, :4] = torch.nan
    done = {}
    while engine.has_work:
        done.update({output.request_id: output for output in engine.step().finished})
        engine.check_integrity()
    assert done["sick"].finish_reason == "error"
    assert "not finite" in str(done["sick"].completions[0].error)
    assert list(done["sound"].token_ids) == list(done["later"].token_ids) == continuation[:30]
    # The slot that held NaN serves others as before.
    again = engine.generate([PROMPT] * 3, GREEDY)
    assert all(list(output.token_ids) == continuation[:30] for output in again)


def test_nan_of_the_draft_only_end_speculation(
    continuation: list[int], draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, speculation_length=3)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight.mul_(torch.nan)
    (output,) = engine.generate([PROMPT], GREEDY)
    assert list(output.token_ids) == continuation[:30]
    assert output.stats.proposed == 0


def test_a_draft_without_any_allowed_token_harms_no_neighbour(
    target: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    """Its head holds none of the tokens that the first request may write, so its distribution is none."""
    engine = make_engine(truncated_draft, speculation_length=3, max_slots=3)
    drawn = {"max_tokens": 30, "ignore_eos": True}
    engine.submit(Request("a", tuple(prompts()[0]), SamplingParams(allowed_token_ids=[65, 66], **drawn)))
    engine.submit(Request("b", tuple(prompts()[1]), SamplingParams(speculate=False, **drawn)))
    engine.submit(Request("c", tuple(prompts()[2]), SamplingParams(**drawn)))
    done = engine.run_until_done({"a", "b", "c"})
    assert set(done["a"].token_ids) <= {65, 66}
    assert all(0 <= token < target.identity.vocab_size for output in done.values() for token in output.token_ids)
    assert [len(done[name].token_ids) for name in "abc"] == [30] * 3
    assert done["c"].stats.proposed > 0
