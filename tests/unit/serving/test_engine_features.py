"""Features that an engine keeps are those of the text, through rejection, trees, moves, preemption and reuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams

from .conftest import prompts
from .execution.test_graphs import FakeRecorder

IDS = [1, 3, 4]
PARAMS = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)


def own_states(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    last: list[torch.Tensor] = []
    handle = model.layers[-1].register_forward_hook(lambda layer, inputs, output: last.append(output))
    with torch.inference_mode():
        states = model.decoder(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    handle.remove()
    return torch.cat([states[1][0], states[3][0], last[0][0]], -1)


@pytest.mark.numerics
@pytest.mark.parametrize("recorded", [False, True], ids=["passes as they are", "recorded passes"])
@pytest.mark.parametrize("cache_tokens", [None, 150], ids=["room", "preempted"])
def test_an_engine_keeps_the_features_of_every_token_it_has_read(
    random_model: Callable[..., LanguageModel], recorded: bool, cache_tokens: int | None
) -> None:
    model = random_model("llama", torch.float64)
    draft = initialise_draft(DraftConfig(layers=2), model)
    settings = EngineSettings(
        max_slots=3,
        max_model_len=128,
        controller="fixed",
        speculation_length=3,
        prefill_chunk=16,
        max_cache_tokens=cache_tokens,
        feature_ids=IDS,
        compile=False,
    )
    engine = Engine(model, draft, settings, recorder=FakeRecorder() if recorded else None)
    shared = [(7 * place) % 200 + 3 for place in range(64)]
    asked = [[*shared, 5 + number] for number in range(4)] + [prompt[:30] for prompt in prompts(3)]
    for number, prompt in enumerate(asked):
        engine.submit(Request(str(number), tuple(prompt), PARAMS))
    seen, stats = [], []
    while engine.has_work:
        stats += [answer.stats for finished in engine.step().finished for answer in finished.completions]
        for sequence in engine.sequences.running:
            if sequence.computed:
                seen.append((list(sequence.tokens[: sequence.computed]), engine.features(sequence.id).clone()))
    with pytest.raises(KeyError):
        engine.features("0/0")
    engine.close()
    for tokens, features in seen[:: max(1, len(seen) // 60)]:
        torch.testing.assert_close(features, own_states(model, tokens), atol=1e-9, rtol=1e-9)
    assert sum(s.accepted for s in stats) > 0
    assert sum(s.proposed - s.accepted for s in stats) > 0, "and rejected"
    assert sum(s.prefix_tokens for s in stats) > 0, "prefixes were reused"
    assert (sum(s.preemptions for s in stats) > 0) == (cache_tokens is not None)


def test_an_engine_without_them_says_how_to_keep_some(random_model: Callable[..., LanguageModel]) -> None:
    engine = Engine(random_model("llama"), None, EngineSettings(max_slots=1, max_model_len=64))
    engine.submit(Request("a", (5, 6, 7), SamplingParams(max_tokens=4, ignore_eos=True)))
    engine.step()
    with pytest.raises(ConfigError, match=r"no features of a/0: it needs feature_ids="):
        engine.features("a/0")
    engine.close()
