"""Lengths by row and step, trimming, continue rules, long prompts, and steps that break off."""

from __future__ import annotations

import pytest

from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView

from .conftest import MakeEngine, hf_greedy, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = [SamplingParams(temperature=0.9, seed=i, max_tokens=24) for i in range(8)]


class Restless:
    """Plans another length for every row and step, 0 among them. `trims`: verifies fewer tokens than were drafted."""

    speculation_length = 5

    def __init__(self, trims: bool = False) -> None:
        self.trims = trims
        self.results: list[StepResult] = []

    def plan(self, view: BatchView) -> Plan:
        turn = len(self.results)
        lengths = [(turn + 2 * place) % 6 for place in range(len(view.rows))]
        plans = [RowPlan.chain(row, k) for row, k in zip(view.rows, lengths, strict=True)]
        if self.trims:
            kept = [max(0, plan.speculation_length - 1 - place % 2) for place, plan in enumerate(plans)]
            plans = [plan._replace(verified=k) for plan, k in zip(plans, kept, strict=True)]
        return Plan(tuple(plans))

    def observe(self, result: StepResult) -> None:
        self.results.append(result)


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("seeded", [False, True])
def test_any_lengths_and_any_trimming_change_no_token(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, trims: bool, seeded: bool
) -> None:
    asked = prompts()
    params = SEEDED if seeded else [GREEDY] * len(asked)
    plain = make_engine(None)
    wanted = [output.token_ids for output in plain.generate(asked, params)]
    plain.close()
    if not seeded:
        assert [list(ids) for ids in wanted] == [hf_greedy(target, prompt, 24) for prompt in asked]
    controller = Restless(trims)
    engine = make_engine(draft, controller_object=controller, max_slots=3)
    outputs = engine.generate(asked, params)
    assert [output.token_ids for output in outputs] == wanted
    rows = [row for result in controller.results for row in result.rows]
    assert sum(row.emitted for row in rows) == sum(len(ids) for ids in wanted)
    assert sum(row.nodes for row in rows) == sum(output.stats.proposed for output in outputs) > 0
    assert all(row.accepted <= row.nodes for row in rows)
    assert all(0 <= result.draft_s + result.target_s <= result.total_s for result in controller.results)


def test_a_continue_rule_stops_rows_one_by_one_and_changes_no_token(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    asked = prompts()
    free = make_engine(draft, speculation_length=5, max_slots=4)
    drafted_freely = sum(output.stats.proposed for output in free.generate(asked, GREEDY))
    free.close()
    engine = make_engine(draft, speculation_length=5, max_slots=4, draft_confidence=0.4)
    outputs = engine.generate(asked, GREEDY)
    assert [list(output.token_ids) for output in outputs] == [list(o) for o in _plain(make_engine, asked, engine)]
    drafted = [output.stats.proposed for output in outputs]
    assert 0 < sum(drafted) < drafted_freely
    assert len(set(drafted)) > 1


def _plain(make_engine: MakeEngine, asked: list[list[int]], other: object) -> list[tuple[int, ...]]:
    other.close()  # type: ignore[attr-defined]
    engine = make_engine(None)
    written = [output.token_ids for output in engine.generate(asked, GREEDY)]
    engine.close()
    return written


def test_a_long_prompt_does_not_stall_the_others(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, prefill_chunk=16, prefix_reuse=False, speculation_length=2)
    engine.submit(Request("quick", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)))
    engine.step()
    engine.submit(Request("long", tuple(3 + i % 200 for i in range(150)), GREEDY))
    chunks = 0
    while True:
        gains = {delta.request_id: len(delta.token_ids) for delta in engine.step().deltas}
        assert gains.get("quick", 0) >= 1
        if "long" in gains:
            break
        chunks += 1
    assert chunks == 9  # 150 tokens in chunks of 16: the tenth step writes


def test_a_draft_reads_a_long_text_in_parts_and_then_drafts(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [5 + i % 200 for i in range(1200)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (wanted,) = make_engine(max_model_len=1500).generate([prompt], params)
    engine = make_engine(draft, max_model_len=1500, speculation_length=2)
    runner = engine.proposer.runner  # type: ignore[union-attr]
    read, sizes = runner.read, []
    monkeypatch.setattr(runner, "read", lambda rows: sizes.append(sum(len(r.tokens) for r in rows)) or read(rows))
    (output,) = engine.generate([prompt], params)
    assert output.token_ids == wanted.token_ids
    assert sizes[:2] == [512, 512]
    assert max(sizes) == 512
    assert output.stats.proposed > 0


def test_a_model_with_recurrent_state_is_refused(target: LanguageModel, make_engine: MakeEngine) -> None:
    target.model._is_stateful = True
    try:
        with pytest.raises(ConfigError, match="keeps recurrent state"):
            make_engine(None)
    finally:
        del target.model._is_stateful


def test_an_engine_that_cannot_be_made_leaves_the_target_as_it_was(
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    before = target.model.config._attn_implementation
    with pytest.raises(ConfigError, match="proposer=draft_model needs a draft"):
        make_engine(None, proposer="draft_model")
    assert target.model.config._attn_implementation == before


def test_a_closed_engine_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine(None)
    engine.close()
    with pytest.raises(RunError, match="this engine is closed"):
        engine.generate([[5]])


def test_a_step_that_breaks_off_loses_no_request_and_trusts_nothing_it_wrote(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts()
    wanted = [hf_greedy(target, prompt, 24) for prompt in asked]
    engine = make_engine(draft, max_slots=3)
    read, calls = engine.runner.read, 0

    def now_and_then(rows: list) -> object:  # type: ignore[type-arg]
        nonlocal calls
        calls += 1
        if calls % 7 == 0:
            raise MemoryError
        return read(rows)

    monkeypatch.setattr(engine.runner, "read", now_and_then)
    for i, prompt in enumerate(asked):
        engine.submit(Request(str(i), tuple(prompt), GREEDY))
    found: dict[str, list[int]] = {}
    broken = 0
    while engine.has_work:
        try:
            output = engine.step()
        except MemoryError:
            broken += 1
            engine.check_integrity()
            continue
        found.update({done.request_id: list(done.token_ids) for done in output.finished})
    assert broken > 3
    assert [found[str(i)] for i in range(len(asked))] == wanted


def test_a_proposer_that_fails_ends_speculation_not_requests(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(draft)

    def fails(rows: object) -> object:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.proposer.runner, "read", fails)  # type: ignore[union-attr]
    outputs = engine.generate(prompts(3), GREEDY)
    assert [list(output.token_ids) for output in outputs] == [_greedy(target, engine, p) for p in prompts(3)]
    assert sum(output.stats.proposed for output in outputs) == 0


def _greedy(target: LanguageModel, engine: Engine, prompt: list[int]) -> list[int]:
    engine.close()
    return hf_greedy(target, prompt, 24)


def test_a_draft_nobody_would_use_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(None, proposer="prompt_lookup")
    with pytest.raises(ConfigError, match="proposer=prompt_lookup uses no draft"):
        engine.load_draft("anywhere")


def test_outputs_of_a_step_that_fails_at_its_end_are_delivered(make_engine: MakeEngine) -> None:
    """The last answer has its reason to finish, and nothing else is to do."""
    engine = make_engine(None)

    def fail(*_: object) -> None:
        raise RuntimeError("an observer failed")

    engine.observer = fail
    engine.submit(Request("a", tuple(prompts()[0]), SamplingParams(temperature=0.0, max_tokens=1)))
    with pytest.raises(RuntimeError, match="an observer failed"):
        engine.step()
    assert engine.has_work
    (output,) = engine.step().finished
    assert len(output.token_ids) == 1
    assert not engine.has_work
