"""The states that are logged with an answer are those of its text, and nobody can read from them what was removed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from distillspec.config import ReplayConfig
from distillspec.models import LanguageModel
from distillspec.models.features import read_states
from distillspec.serving import Request, SamplingParams
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.serving.online.log.redaction import mask, redacted
from distillspec.types import StateRequest

from ...conftest import MakeEngine, prompts
from ..conftest import Answer
from .test_tap import PARAMS, requests, serve, tapped

IDS = (1, 3)
STEP = {"bf16": 2**-8, "fp8": 2**-4}  # half a unit of the last place, of the largest state of a token


def assert_are_of_the_text(answer: LoggedAnswer, target: LanguageModel, precision: str) -> None:
    assert answer.states is not None
    found = answer.states.of(IDS)
    text = torch.tensor([[*answer.prompt_ids, *answer.response_ids[:-1]]])
    places = torch.arange(text.shape[1])[None]
    wanted = read_states(target, text, places, IDS)[0]
    assert found is not None
    assert found.shape == wanted.shape
    largest = wanted.unflatten(1, (len(IDS), -1)).abs().amax(-1).repeat_interleave(wanted.shape[1] // len(IDS), 1)
    assert bool(((found.float() - wanted).abs() <= STEP[precision] * largest + 1e-4).all())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"tree": "sampled", "widths": [2, 2]}, {"max_cache_tokens": 150}, {"speculation_length": 0}],
    ids=["chains", "trees", "preempted", "none"],
)
def test_an_answers_states_are_those_of_its_text(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, precision: str, shape: dict[str, Any]
) -> None:
    tap, logged = tapped(states=precision)
    engine = make_engine(draft, **{"speculation_length": 3, "feature_ids": list(IDS), **shape})
    shared = tuple(prompts(1)[0]) * 4
    texts = [Request(f"s{i}", (*shared, 5 + i), replace(PARAMS, max_tokens=30)) for i in range(4)]
    stopped = SamplingParams(temperature=1.0, max_tokens=40, stop_token_ids=tuple(range(60, 120)))
    serve(engine, tap, [*texts, *requests(), *(replace(r, id=f"t{r.id}") for r in requests(stopped))])
    engine.close()
    assert len(logged) == 16
    assert any(answer.finished for answer in logged), "some ended within a window"
    for answer in logged:
        assert_are_of_the_text(answer, target, precision)


@pytest.mark.parametrize(("states", "ids"), [("off", list(IDS)), ("fp8", [])])
def test_no_states_are_logged_where_none_are_wanted_or_kept(
    draft: LanguageModel, make_engine: MakeEngine, states: str, ids: list[int]
) -> None:
    tap, logged = tapped(states=states)
    serve(make_engine(draft, feature_ids=ids), tap, requests())
    assert len(logged) == 6
    assert all(answer.states is None and answer.state_bytes == 0 for answer in logged)


@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp8"), ("cuda", None)])
def test_by_default_they_are_logged_where_a_pass_of_the_target_is_dear(device: str, precision: str | None) -> None:
    assert ReplayConfig().state_precision(device) == precision


def with_states(answer: LoggedAnswer) -> LoggedAnswer:
    values = torch.randn(len(answer.prompt_ids) + len(answer) - 1, 8)
    return replace(answer, states=StateRequest(IDS).record(values))


def test_a_changed_text_has_no_states(answer: Answer) -> None:
    """Those of later tokens tell what the removed ones were."""
    whole = with_states(answer("a"))
    unchanged = redacted(whole, lambda a: a, 259)
    assert unchanged is not None
    assert unchanged.states is whole.states
    for change in (
        lambda a: mask(a, [3], by=1),
        lambda a: mask(a, [], by=1, prompt=[0]),
        lambda a: replace(a, response_ids=a.response_ids[:-2]),
        lambda a: replace(a, states=None),
    ):
        kept = redacted(whole, change, 259)
        assert kept is not None
        assert kept.states is None
