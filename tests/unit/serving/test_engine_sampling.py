"""Sampled output follows the target at every emitted position. Seeded output is the same in any company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, cycle, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.sampling import policy_probs
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.decoding import windows

from ..models.state_drafts import state_draft
from .conftest import MakeEngine, prompts

PROMPT = prompts()[1][:9]
POLICIES = {
    "plain": SamplingParams(temperature=1.0),
    "warm": SamplingParams(temperature=0.7, top_k=30, top_p=0.9, min_p=0.01),
    "penalised": SamplingParams(
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.4,
        frequency_penalty=1.5,
        presence_penalty=-0.8,
        logit_bias={40: 2.0, 41: -3.0},
    ),
}


def excess(
    engine: Engine,
    target: LanguageModel,
    params: SamplingParams,
    requests: int = 1500,
    between_steps: Callable[[int], object] = lambda step: None,
) -> Tensor:
    """(χ² − df) / √(2 df) of each of the first four emitted positions, by the probability integral transform.

    Given its own prefix, token x of distribution p lands at u = F(x − 1) + v · p(x), v uniform: uniform if and only
    if x was drawn from p. Twenty equal bins.
    """
    (found,) = side_by_side(engine, target, [params], requests, between_steps)
    return found


def side_by_side(
    engine: Engine,
    target: LanguageModel,
    policies: list[SamplingParams],
    requests: int = 1500,
    between_steps: Callable[[int], object] = lambda step: None,
) -> list[Tensor]:
    """`excess` of several policies that take turns in one queue, `requests` of each."""
    for number in range(requests * len(policies)):
        params = replace(policies[number % len(policies)], max_tokens=4, ignore_eos=True)
        engine.submit(Request(str(number), tuple(PROMPT), params))
    written: list[list[tuple[int, ...]]] = [[] for _ in policies]
    for step in count():
        between_steps(step)
        for output in engine.step().finished:
            written[int(output.request_id) % len(policies)].append(output.token_ids)
        if sum(map(len, written)) == requests * len(policies):
            break
    engine.close()
    return [_excess_of(torch.tensor(own), target, params) for own, params in zip(written, policies, strict=True)]


def _excess_of(written: Tensor, target: LanguageModel, params: SamplingParams) -> Tensor:
    requests = len(written)
    texts = torch.cat([torch.tensor([PROMPT]).expand(requests, -1), written], 1)
    with torch.no_grad():
        logits = penalised(target.logits(texts)[:, len(PROMPT) - 1 : -1].float(), texts, params)
    probs = policy_probs(logits, params.policy).double()
    chosen = probs.gather(-1, written[..., None])[..., 0]
    assert bool((chosen > 0).all()), "a token that the policy excludes was written"
    below = probs.cumsum(-1).gather(-1, written[..., None])[..., 0] - chosen
    places = below + torch.rand(below.shape, dtype=torch.float64) * chosen
    counts = torch.stack([torch.histc(column, 20, 0, 1) for column in places.T])
    wanted = requests / 20
    return (((counts - wanted) ** 2 / wanted).sum(-1) - 19) / 38**0.5


def penalised(logits: Tensor, texts: Tensor, params: SamplingParams) -> Tensor:
    """`logits [N, places, V]` with bias and vLLM's penalties, from the whole texts before each place."""
    logits = logits.clone()
    for token, bias in params.logit_bias.items():
        logits[..., token] += bias
    for place in range(logits.shape[1]):
        here = logits[:, place]
        before = texts[:, : len(PROMPT) + place]
        seen = torch.zeros(here.shape, dtype=torch.bool).scatter_(1, before, True)
        harder = torch.where(here > 0, here / params.repetition_penalty, here * params.repetition_penalty)
        output = before[:, len(PROMPT) :]
        written = torch.zeros_like(here).scatter_add_(1, output, torch.ones(output.shape))
        here = torch.where(seen, harder, here) - params.frequency_penalty * written
        logits[:, place] = here - params.presence_penalty * (written > 0)
    return logits


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *product(["draft", "lookup"], POLICIES),
        *product(["none"], ["plain", "warm"]),
        ("truncated", "plain"),  # the others side by side below
        ("confident", "plain"),  # a block that is cut before it is verified
        *product(["long"], ["plain", "penalised"]),  # chains that are verified as a whole
        *product(["eagle", "hydra"], ["plain", "penalised"]),
        *product(["features", "medusa"], ["plain"]),
    ],
)
def test_every_emitted_position_follows_the_target(
    target: LanguageModel,
    draft: LanguageModel,
    truncated_draft: LanguageModel,
    make_engine: MakeEngine,
    kind: str,
    policy: str,
) -> None:
    readers = {"confident": "confident block"} | {name: name for name in ("eagle", "features", "medusa", "hydra")}
    chosen = {"draft": draft, "truncated": truncated_draft, "long": truncated_draft}.get(kind)
    chosen = state_draft(readers[kind], target, noise=0.3) if kind in readers else chosen
    proposer = {"lookup": "prompt_lookup", "none": "none"}.get(kind, "draft_model")
    settings = (
        {"proposer_options": {"shortest": 1}} if kind == "lookup" else {"draft_confidence": 0.5 * (kind == "confident")}
    )
    length = 4 if kind == "long" else 2
    engine = make_engine(chosen, proposer=proposer, speculation_length=length, max_slots=64, **settings)
    assert float(excess(engine, target, POLICIES[policy]).max()) < 5


@pytest.mark.parametrize("policy", ["plain", "penalised"])
def test_looked_up_and_drafted_chains_side_by_side_follow_the_target(
    target: LanguageModel,
    truncated_draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    """One-hot proposals and sampled ones are judged together."""
    judged: list[tuple[bool, bool]] = []

    def noted(step: windows.StepLogits) -> None:
        plain(step)
        kinds = {group.kind for tree in step.trees for group in tree.groups}
        judged.append(("deterministic" in kinds, "drawn" in kinds))

    plain = windows.StepLogits.__post_init__
    monkeypatch.setattr(windows.StepLogits, "__post_init__", noted)
    engine = make_engine(
        truncated_draft,
        proposer="lookup_else_model",
        speculation_length=2,
        max_slots=64,
        proposer_options={"shortest": 1},
    )
    assert float(excess(engine, target, POLICIES[policy], requests=1000).max()) < 5
    assert judged.count((True, True)) > len(judged) / 4


def test_policies_side_by_side_each_follow_the_target(
    target: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(truncated_draft, speculation_length=2, max_slots=64)
    names = ["warm", "penalised"]
    found = side_by_side(engine, target, [POLICIES[name] for name in names])
    assert [float(own.max()) < 5 for own in found] == [True, True]


def test_drafts_that_take_turns_leave_the_distribution_alone(
    target: LanguageModel,
    draft: LanguageModel,
    truncated_draft: LanguageModel,
    make_engine: MakeEngine,
    tmp_path: Path,
) -> None:
    for name, model in (("one", draft), ("two", truncated_draft)):
        save_draft(model, tmp_path / name, target)
    engine = make_engine(draft, speculation_length=3, max_slots=64)
    folders = cycle((tmp_path / "two", tmp_path / "one"))
    versions: set[str] = set()

    def swap(step: int) -> None:
        if step % 7 == 6:
            versions.add(engine.load_draft(next(folders)))

    assert float(excess(engine, target, POLICIES["plain"], between_steps=swap).max()) < 5
    assert len(versions) == 2


SEEDED = [SamplingParams(temperature=0.9, max_tokens=20, seed=i, top_p=0.95 if i % 2 else 1.0) for i in range(8)]


@pytest.fixture(scope="module")
def seeded_alone(target: LanguageModel) -> list[tuple[int, ...]]:
    """Return the outputs of seeded requests one at a time, without speculation."""
    from distillspec.serving import EngineSettings

    engine = Engine(target, None, EngineSettings(max_slots=1, max_model_len=256))
    written = [engine.generate([p], own)[0].token_ids for p, own in zip(prompts(), SEEDED, strict=True)]
    engine.close()
    assert len(set(written)) == len(written)
    return written


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("proposer", ["draft_model", "lookup_else_model"])
def test_a_seed_fixes_the_output_whatever_the_batch_length_and_draft(
    seeded_alone: list[tuple[int, ...]],
    truncated_draft: LanguageModel,
    make_engine: MakeEngine,
    proposer: str,
    length: int,
) -> None:
    engine = make_engine(truncated_draft, proposer=proposer, speculation_length=length, max_slots=5, seed=length)
    outputs = engine.generate(prompts(), SEEDED)
    assert [output.token_ids for output in outputs] == seeded_alone
    if length:
        assert sum(output.stats.accepted for output in outputs) > 0


def test_a_seed_survives_preemption(
    seeded_alone: list[tuple[int, ...]], draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, max_cache_tokens=130)
    outputs = engine.generate(prompts(), SEEDED)
    assert [output.token_ids for output in outputs] == seeded_alone
    assert sum(output.stats.preemptions for output in outputs) > 0


@pytest.mark.parametrize("seeded", [True, False])
def test_zeroing_the_drafts_head_changes_no_fixed_output_but_its_acceptance(
    target: LanguageModel, make_engine: MakeEngine, seeded: bool
) -> None:
    params = SEEDED if seeded else [SamplingParams(temperature=0.0, max_tokens=20)] * len(SEEDED)
    alone = [output.token_ids for output in make_engine(None).generate(prompts(), params)]
    draft = initialise_draft(DraftConfig(layers=4), target)  # all of the target's layers: always right
    engine = make_engine(draft, speculation_length=4)
    usual = engine.generate(prompts(), params)
    with torch.no_grad():
        saved = draft.model.get_output_embeddings().weight.clone()
        draft.model.get_output_embeddings().weight.zero_()
    zeroed = engine.generate(prompts(), params)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight.copy_(saved)
    restored = engine.generate(prompts(), params)
    for outputs in (usual, zeroed, restored):
        assert [output.token_ids for output in outputs] == alone
    accepted = [sum(output.stats.accepted for output in outputs) for outputs in (usual, zeroed, restored)]
    assert accepted[1] < accepted[0] / 3
    assert accepted[2] == accepted[0]


def test_the_noise_coupling_accepts_as_a_good_draft_should(target: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(target, speculation_length=4)  # the target as its own draft
    (output,) = engine.generate([PROMPT], SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True))
    assert output.stats.acceptance_rate == 1.0
    (output,) = engine.generate([PROMPT], SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True))
    assert output.stats.acceptance_rate == 1.0


def test_several_answers_differ_and_are_reproducible(draft: LanguageModel, make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=12)
    engine = make_engine(draft)
    (one,), (two,) = engine.generate([PROMPT], params), engine.generate([PROMPT], params)
    assert [c.index for c in one.completions] == [0, 1, 2]
    assert len({c.token_ids for c in one.completions}) == 3
    assert [c.token_ids for c in one.completions] == [c.token_ids for c in two.completions]
