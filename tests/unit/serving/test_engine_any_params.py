"""Any mix of parameters, in any circumstances, writes what an engine of one slot without speculation writes.

Greedy and seeded requests, whose output is a function of the request: tokens, text, reasons, log-probabilities.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, Request, RequestOutput, SamplingParams
from distillspec.serving.base.requests import CompletionOutput
from distillspec.serving.decoding.sampling import TokenSampler

from ..models.state_drafts import state_draft

STOPS = ("a", "e", "ab", "\ufffd", " ", "\x05", "é")


def any_params(chance: random.Random, vocab: int) -> SamplingParams:
    """Return parameters of all kinds, many of them hard to meet together."""
    chosen: dict[str, Any] = {"temperature": 0.0}
    some = [chance.randrange(vocab) for _ in range(30)]
    if chance.random() < 0.5:
        chosen = {"seed": chance.randrange(5), "temperature": chance.choice([0.5, 1.0, 1.5])}
        chosen |= chance.choice([{}, {"top_p": 0.5}, {"top_p": 0.99}, {"top_k": 3}, {"min_p": 0.05, "top_k": 50}])
    chosen["max_tokens"] = chance.choice([1, 2, 3, 10, 20, None])
    chosen["ignore_eos"] = chance.random() < 0.5
    rare: list[dict[str, Any]] = [
        {"n": chance.choice([2, 3])},
        {"min_tokens": chance.randint(0, chosen["max_tokens"] or 5)},
        {"repetition_penalty": chance.choice([0.5, 1.3, 2.0])},
        {"presence_penalty": chance.choice([-2.0, 0.7]), "frequency_penalty": chance.choice([-0.5, 0.3, 2.0])},
        {"logit_bias": {token: chance.choice([-100.0, 100.0, 3.0, -torch.inf]) for token in some[:3]}},
        {"bad_word_ids": [some[i : i + 1 + i % 3] for i in range(20)], "bad_words": ["e", "the", " a"]},
        {"allowed_token_ids": some[: chance.choice([1, 2, 20])]},
        {"stop_token_ids": some[:15]},
        {"stop": chance.sample(STOPS, 3)},
        {"logprobs": chance.choice([0, 1, 5])},
        {"speculate": False},
        {"speculation_length": chance.randint(0, 3)},
    ]
    for each in rare:
        if chance.random() < 0.25:
            chosen |= each
    return SamplingParams(**chosen)


def any_requests(chance: random.Random, vocab: int, longest: int) -> list[Request]:
    made = []
    for i in range(6):
        length = chance.choice([1, 2, 5, 17, 30, longest - 1, longest - 2])
        base = [chance.randrange(3, 250) for _ in range(chance.choice([3, length]))]
        prompt = (base * length)[:length]
        made.append(Request(str(i), tuple(prompt), any_params(chance, vocab), priority=chance.choice([0, 0, 1, -1])))
    return made


def any_settings(chance: random.Random, longest: int) -> EngineSettings:
    proposer = chance.choice(["draft_model", "prompt_lookup", "lookup_else_model"])
    return EngineSettings(
        max_slots=chance.choice([1, 2, 4, 8]),
        max_model_len=longest,
        max_cache_tokens=chance.choice([None, longest, 2 * longest]),
        prefix_reuse=chance.random() < 0.5,
        prefill_chunk=chance.choice([3, 8, 512]),
        speculation_length=chance.randint(1, 8),
        proposer=proposer,
        controller=chance.choice(["fixed", "goodput"]),
        draft_confidence=chance.choice([0.0, 0.2]),
        proposer_options={} if proposer == "draft_model" else {"shortest": 1},
        compile=False,
        measure_costs_s=0,
    )


def run(
    engine: Engine, requests: list[Request], chance: random.Random | None = None, drafts: Any = ()
) -> tuple[dict[str, RequestOutput], set[str]]:
    """Return all outputs and the aborted ids. With `chance`, requests trickle in, drafts change, some are aborted."""
    coming, done = list(requests), dict[str, RequestOutput]()
    texts: dict[tuple[str, int], str] = {}
    aborted: set[str] = set()
    while coming or engine.has_work:
        for _ in range(len(coming) if chance is None else chance.randint(0, 2)):
            if coming:
                engine.submit(coming.pop(0))
        if chance is not None and drafts and chance.random() < 0.1:
            swap(engine, chance.choice(drafts))
        if chance is not None and chance.random() < 0.02:
            aborted.add(str(chance.randrange(6)))
            engine.abort(max(aborted))
        output = engine.step()
        engine.check_integrity()
        for delta in output.deltas:
            key = delta.request_id, delta.index
            texts[key] = texts.get(key, "") + delta.text
        done.update({finished.request_id: finished for finished in output.finished})
    for name, finished in done.items():
        assert [texts[name, c.index] for c in finished.completions] == [c.text for c in finished.completions]
    return done, aborted


def swap(engine: Engine, draft: LanguageModel) -> None:
    """Draft with another model from the next step on."""
    if draft is not engine.draft:
        engine.use_draft(draft, draft.name)


def seen(answer: CompletionOutput) -> tuple[Any, ...]:
    likely = [(entry.token, *entry.best) for entry in answer.logprobs or ()]
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, likely


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(i, marks=pytest.mark.soak) for i in range(4, 100))])
def test_any_mix_of_params(
    target: LanguageModel, draft: LanguageModel, truncated_draft: LanguageModel, seed: int
) -> None:
    chance, vocab = random.Random(seed), target.identity.vocab_size
    longest = chance.choice([40, 70])
    requests = any_requests(chance, vocab, longest)
    least = EngineSettings(max_slots=1, max_model_len=longest, compile=False, prefix_reuse=False, measure_costs_s=0)
    alone = Engine(target, None, least)
    wanted, _ = run(alone, requests)
    alone.close()
    settings = any_settings(chance, longest)
    reader = state_draft(("eagle", "features", "hydra", "block")[seed % 4], target, noise=0.02)
    drafts = [draft, truncated_draft, initialise_draft(DraftConfig(layers=1), target), reader]
    sampler = TokenSampler(vocab, target.device, reads_are_free=chance.random() < 0.5)
    engine = Engine(target, reader if seed % 2 else chance.choice(drafts), settings, sampler=sampler)
    found, aborted = run(engine, requests, chance, drafts if settings.proposer != "prompt_lookup" else ())
    engine.close()
    for name, output in found.items():
        for here, there in zip(output.completions, wanted[name].completions, strict=True):
            stats = here.stats
            assert sum(stats.accepted_per_position) == stats.accepted <= min(stats.proposed, len(here.token_ids))
            if name in aborted and here.finish_reason == "abort":
                assert here.token_ids == there.token_ids[: len(here.token_ids)]
            else:
                assert seen(here) == seen(there), (name, settings)
