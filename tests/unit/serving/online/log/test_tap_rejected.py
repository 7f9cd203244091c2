"""What the log keeps behind rejected tokens is the target's distribution there, in chains and in trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillspec.config import ReplayConfig
from distillspec.models import LanguageModel
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.tree import DRAFT, NGRAM, SiblingGroup, TokenTree
from distillspec.serving.online.log.outcomes import rejected_in
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.serving.online.log.rejected_nodes import ENTRIES
from distillspec.serving.online.log.tap import ReplayTap
from distillspec.serving.step.commit import Emission

from ...conftest import MakeEngine, prompts
from .test_tap import serve, tapped


def emission(tree: TokenTree, path: tuple[int, ...], text: list[int], emitted: int, first: int = 0) -> Emission:
    """A step of a sequence whose prompt is one token. `text` holds the response, with what was emitted."""
    request = Request("r", (1,), SamplingParams())
    sequence = SequenceState("r/0", request, 0, 0, [1, *text], frozenset(), 50)
    rows = tuple([first, *(first + 1 + node for node in path)][:emitted])
    return Emission(sequence, tree, path, rows, (), {}, None)  # type: ignore[arg-type]


def test_nodes_off_the_path_are_found_with_the_place_where_they_leave_the_text() -> None:
    """The text so far is 7. Of the tree 2, 3 and 4 behind it: 2 is right, 5 follows, then the target's own 9."""
    tree = TokenTree.of_parents([2, 3, 5, 6, 4], [-1, -1, 0, 0, 3])
    found = rejected_in(emission(tree, (0, 2), [7, 2, 5, 9], 3, first=10))
    assert [tuple(node) for node in found] == [(1, -1, 3, 12), (2, -1, 6, 14), (2, 1, 4, 15)]
    whole = TokenTree.chain([2, 5])
    assert rejected_in(emission(whole, (0, 1), [7, 2, 5, 9], 3)) == []


def test_a_token_that_two_sources_name_is_text_in_both() -> None:
    groups = (
        SiblingGroup(-1, (0,), NGRAM),
        SiblingGroup(-1, (1,), DRAFT),
        SiblingGroup(1, (2,), DRAFT),
    )
    tree = TokenTree((2, 2, 8), groups)
    found = rejected_in(emission(tree, (0,), [7, 2, 9], 2))
    assert [tuple(node) for node in found] == [(2, -1, 8, 3)]


def test_a_path_that_goes_on_behind_the_end_leaves_nothing_without_a_prefix() -> None:
    tree = TokenTree.of_parents([2, 3, 4, 5], [-1, 0, 1, 1])
    found = rejected_in(emission(tree, (0, 1, 2), [2], 1))
    assert found == []


@pytest.mark.parametrize("widths", [[], [2, 2]])
def test_the_distribution_behind_every_rejected_node_is_the_plain_forward_pass(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, widths: list[int]
) -> None:
    logged: list[LoggedAnswer] = []
    tap = ReplayTap(
        ReplayConfig(share=1.0, entries=32), lambda a: logged.append(a) or True, lambda: 1.0, keeps_rejected=True
    )
    shape: dict[str, Any] = {"widths": widths, "speculation_length": 2} if widths else {"speculation_length": 3}
    engine = make_engine(draft, **shape)
    params = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True)
    serve(engine, tap, [Request(f"r{i}", tuple(p), params) for i, p in enumerate(prompts(3))])

    engine.close()

    kept = [answer for answer in logged if answer.nodes is not None]
    assert sum(len(answer.nodes or ()) for answer in kept) > 20
    for answer in kept:
        assert answer.nodes is not None
        assert answer.nodes.signal.ids.shape[1] == ENTRIES
        for branch in answer.nodes.branches():
            tokens = answer.nodes.tokens[branch.nodes].tolist()
            ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids[: branch.text_tokens], *tokens]])
            logprobs = torch.log_softmax(target.logits(ids)[0, -len(tokens) :].float(), -1)
            signal = answer.nodes.signal.at(torch.tensor(branch.nodes))
            torch.testing.assert_close(
                signal.logprobs.float(), logprobs.gather(-1, signal.ids.long()), atol=5e-3, rtol=0
            )
            torch.testing.assert_close(signal.tail, 1 - logprobs.topk(ENTRIES).values.exp().sum(-1), atol=2e-3, rtol=0)
            if branch.text_tokens < len(answer):
                assert tokens[0] != answer.response_ids[branch.text_tokens]


def test_by_default_nothing_is_kept_of_them(draft: LanguageModel, make_engine: MakeEngine) -> None:
    tap, logged = tapped()
    engine = make_engine(draft, speculation_length=3)
    serve(engine, tap, [Request("r", tuple(prompts(1)[0]), SamplingParams(max_tokens=12, ignore_eos=True))])
    assert [answer.nodes for answer in logged] == [None]
