"""A draft that reads states takes over in mid-request: rows decode on, and draft again within eight steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.proposers.draft_model import DraftModel

from ...models.state_drafts import drafted_logits, state_draft
from ..conftest import hf_greedy

LENGTH, NOISE = 200, 0.02
ROOM: dict[str, Any] = {
    "max_slots": 8, "max_model_len": 256, "compile": False, "measure_costs_s": 0, "controller": "fixed",
    "speculation_length": 2,
}  # fmt: skip
Seen = list[tuple[int, str, list[int], list[int]]]  # step, request, text, drafted tokens


def texts(count: int, length: int = LENGTH) -> list[list[int]]:
    return [[1, *((7 * place * (row + 1) + row) % 200 + 3 for place in range(length - 1))] for row in range(count)]


def watched(engine: Engine, seen: Seen, now: list[int]) -> None:
    """Note what the draft in use proposes from now on."""
    assert isinstance(engine.proposer, DraftModel)
    plain = engine.proposer.propose

    def propose(requests: Any) -> Any:
        trees = plain(requests)
        pairs = zip(requests, trees, strict=True)
        seen.extend((now[0], r.sequence.request.id, list(r.sequence.tokens), list(t.tokens)) for r, t in pairs if t)
        return trees

    engine.proposer.propose = propose  # type: ignore[method-assign]


def assert_own_recursion(seen: Seen, draft: LanguageModel, target: LanguageModel) -> None:
    """Drafted behind the target's own states of the whole text."""
    for _, _, text, tokens in seen:
        logits = drafted_logits(draft, target, text, tokens)
        assert [int(each.argmax()) for each in logits] == tokens


@pytest.mark.numerics
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eight_long_rows_draft_again_within_eight_steps(
    random_model: Callable[..., LanguageModel], tmp_path: Path, temperature: float
) -> None:
    target = random_model("llama", torch.float64)
    draft = state_draft("eagle", target, noise=NOISE)
    save_draft(draft, tmp_path / "eagle", target)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
    settings, asked = EngineSettings(**ROOM), texts(8)
    plain = Engine(target, None, settings)
    expected = [list(answer.token_ids) for answer in plain.generate(asked, params)]
    plain.close()
    engine = Engine(target, initialise_draft(DraftConfig(layers=1), target), settings)
    for row, prompt in enumerate(asked):
        engine.submit(Request(str(row), tuple(prompt), params))
    while len(engine.sequences.decoding) < 8:
        engine.step()
    engine.load_draft(tmp_path / "eagle")
    seen, now, passes, found = Seen(), [0], list[int](), dict[str, list[int]]()
    read = engine.runner.read
    engine.runner.read = lambda rows: (passes.append(sum(len(r.tokens) for r in rows)), read(rows))[1]  # type: ignore[method-assign]
    while engine.has_work:
        before = {s.id: len(s.tokens) for s in engine.sequences.decoding}
        now[0] += 1
        output = engine.step()
        engine.check_integrity()
        if now[0] == 1:
            watched(engine, seen, now)
            assert engine.runner.cache.lacking, "not all is read again at once"
            with pytest.raises(ConfigError, match="no features of"):
                engine.features("7/0")
        grown = {s.id: len(s.tokens) for s in engine.sequences.decoding}
        assert all(length > before[name] for name, length in grown.items()), "rows decode on"
        found |= {answer.request_id: list(answer.token_ids) for answer in output.finished}
        assert all(answer.completions[0].stats.preemptions == 0 for answer in output.finished)
    first = {row: min(step for step, name, *_ in seen if name == row) for row in {name for _, name, *_ in seen}}
    assert sorted(first) == [str(row) for row in range(8)]
    assert max(first.values()) <= 8
    assert max(passes) <= settings.prefill_chunk + 8 * 3
    assert [found[str(row)] for row in range(8)] == expected
    engine.close()
    if not temperature:
        assert_own_recursion(seen[::15], draft, target)


@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["features", "block"])
def test_texts_that_come_and_go_meanwhile_have_their_states(
    random_model: Callable[..., LanguageModel], tmp_path: Path, kind: str
) -> None:
    """A row ends before its turn, and one begins with the text of a row whose states are missing."""
    target = random_model("llama", torch.float64)
    draft = state_draft(kind, target, noise=NOISE)
    save_draft(draft, tmp_path / "reading", target)
    settings = EngineSettings(**{**ROOM, "max_slots": 3, "prefill_chunk": 10})
    engine = Engine(target, initialise_draft(DraftConfig(layers=1), target), settings)
    asked, limits = {str(row): prompt for row, prompt in enumerate(texts(3, 24))}, {"0": 60, "1": 70, "2": 36}

    def submit(name: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=limits[name], ignore_eos=True)
        engine.submit(Request(name, tuple(asked[name]), params))

    for name in asked:
        submit(name)
    rows = engine.sequences.unfinished
    while not rows or len(rows["2/0"].tokens) < 24 + 30:
        engine.step()
    asked["late"], limits["late"] = [*rows["1/0"].tokens[:40], 9, 8, 7], 30
    submit("late")
    engine.load_draft(tmp_path / "reading")
    seen, now, found, lacked = Seen(), [0], dict[str, list[int]](), set[str]()
    while engine.has_work:
        output = engine.step()
        engine.check_integrity()
        if not now[0]:
            watched(engine, seen, now)
        now[0] += 1
        lacked |= {engine.sequences.pool.owners.get(slot, "") for slot in engine.runner.cache.lacking}
        found |= {answer.request_id: list(answer.token_ids) for answer in output.finished}
    assert lacked >= {"1/0", "2/0", "late/0"}
    assert {name for _, name, *_ in seen} == {"0", "1", "late"}
    engine.close()
    assert_own_recursion(seen[::3], draft, target)
    for name, prompt in asked.items():
        assert found[name] == hf_greedy(target, prompt, limits[name])
