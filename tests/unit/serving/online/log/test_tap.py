"""The tap records the target's distribution at every token, and nothing of requests that are not logged."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from distillspec.config import ReplayConfig
from distillspec.models import LanguageModel
from distillspec.recording import top_of_blocks, top_signal
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.tree import DraftProbs
from distillspec.serving.online.log import tap as tap_module
from distillspec.serving.online.log.records import ACCEPTED, BONUS, PLAIN, REJECTED, LoggedAnswer
from distillspec.serving.online.log.tap import ReplayTap

from ...conftest import MakeEngine, prompts

PARAMS = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True)


def serve(
    engine: Engine,
    tap: ReplayTap,
    requests: list[Request],
    abort_after: int | None = None,
    stop_after: int | None = None,
) -> None:
    engine.observer = tap
    for request in requests:
        engine.submit(request)
    step = 0
    while engine.has_work and step != stop_after:
        if step == abort_after:
            engine.abort(requests[0].id)
        tap.finish(engine.step().finished)
        step += 1


def tapped(**config: Any) -> tuple[ReplayTap, list[LoggedAnswer]]:
    logged: list[LoggedAnswer] = []

    def queue(answer: LoggedAnswer) -> bool:
        logged.append(answer)
        return True

    settings = ReplayConfig(**{"share": 1.0, "entries": 8, **config})
    return ReplayTap(settings, queue, lambda: 1000.0), logged


def requests(params: SamplingParams = PARAMS, **extra: Any) -> list[Request]:
    return [Request(f"r{i}", tuple(p), params, **extra) for i, p in enumerate(prompts(6))]


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_emitted_position_has_the_plain_forward_pass(
    target: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine, length: int, temperature: float
) -> None:
    tap, logged = tapped()
    params = replace(PARAMS, temperature=temperature, top_k=40, repetition_penalty=1.2)
    engine = make_engine(truncated_draft, speculation_length=length)
    serve(engine, tap, requests(params))
    engine.close()  # the target is its own again
    assert len(logged) == 6
    for answer in logged:
        assert len(answer) == len(answer.signal) == 14
        ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
        logprobs = torch.log_softmax(target.logits(ids)[0, len(answer.prompt_ids) - 1 : -1].float(), -1)
        best = logprobs.topk(8, -1)
        torch.testing.assert_close(answer.signal.logprobs.float(), best.values, atol=5e-3, rtol=0)
        expected = logprobs.gather(-1, answer.signal.ids.long())
        torch.testing.assert_close(answer.signal.logprobs.float(), expected, atol=5e-3, rtol=0)
        torch.testing.assert_close(answer.signal.tail, 1 - best.values.exp().sum(-1), atol=2e-3, rtol=0)


def test_outcomes_tell_what_became_of_the_draft(draft: LanguageModel, make_engine: MakeEngine) -> None:
    tap, logged = tapped()
    engine = make_engine(draft, speculation_length=3)
    serve(engine, tap, requests())
    assert {int(o) for answer in logged for o in answer.outcomes} == {ACCEPTED, REJECTED, BONUS, PLAIN}
    for answer in logged:
        emitted = torch.tensor(answer.response_ids)
        drafted = answer.outcomes <= REJECTED
        assert torch.equal(answer.draft_tokens >= 0, drafted)
        assert torch.equal((answer.draft_tokens == emitted)[drafted], (answer.outcomes == ACCEPTED)[drafted])
        assert torch.equal(answer.draft_probs.isnan(), ~drafted)
        assert bool((answer.draft_probs[drafted] > 0).all())
        assert bool((answer.draft_entropies[drafted] > 0).all())
        assert int(answer.outcomes[0]) == PLAIN  # the prompt's own step drafts nothing
        assert answer.draft_versions == (draft.identity.weights_hash[:12],)


def test_the_drafts_opinion_is_what_it_drew_from(draft: LanguageModel, make_engine: MakeEngine) -> None:
    tap, logged = tapped()
    engine = make_engine(draft, speculation_length=2)
    serve(engine, tap, requests())
    engine.close()
    (answer, *_) = logged
    # A rejected first token of a window follows the emitted text, so that the draft can be asked again.
    at = next(i for i in range(1, len(answer)) if answer.outcomes[i] == REJECTED and answer.outcomes[i - 1] != ACCEPTED)
    with torch.no_grad():
        read = torch.tensor([[*answer.prompt_ids, *answer.response_ids[:at]]])
        q = torch.softmax(draft.logits(read)[0, -1], -1)
    assert float(answer.draft_probs[at]) == pytest.approx(float(q[answer.draft_tokens[at]]), rel=0.02)
    assert float(answer.draft_entropies[at]) == pytest.approx(float(torch.special.entr(q).sum()), rel=0.02)


def test_its_processor_time_counts_all_cores_that_compute(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap, _ = tapped()
    engine, reads = make_engine(draft), count()
    monkeypatch.setattr(tap_module.time, "thread_time", lambda: float(next(reads)))
    monkeypatch.setattr(tap_module.torch, "get_num_threads", lambda: 3)
    serve(engine, tap, requests()[:1])
    assert tap.cpu_s == 3 * next(reads) / 2, "each time is read before and after, a second apart"
    assert tap.cpu_s > 0


def test_who_opts_out_leaves_nothing(draft: LanguageModel, make_engine: MakeEngine) -> None:
    tap, logged = tapped(exclude_tenants=["private"])
    out = [
        Request("no", tuple(prompts()[0]), PARAMS, log=False),
        Request("private", tuple(prompts()[1]), PARAMS, tenant="private"),
        Request("yes", tuple(prompts()[2]), PARAMS),
    ]
    serve(make_engine(draft), tap, out)
    assert [answer.request_id for answer in logged] == ["yes"]
    assert tap.counters == {"logged": 1}
    assert tap.tracked == 0


@pytest.mark.parametrize("moment", ["record", "read"])
def test_a_tenant_deleted_in_the_middle_of_a_step_leaves_nothing(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """While a step is recorded, and while an answer that ended is put together."""
    tap, logged = tapped()
    work = getattr(tap_module, moment)

    def delete() -> None:
        tap.forget_tenant("default")
        logged.clear()  # as the writer then empties its queue of the tenant

    deletion = threading.Thread(target=delete)

    def interrupted(*given: Any) -> Any:
        if deletion.ident is None:
            deletion.start()
            deletion.join(0.3)  # it ends here if nothing holds it off
        return work(*given)

    monkeypatch.setattr(tap_module, moment, interrupted)
    serve(make_engine(draft), tap, requests()[:1])
    deletion.join()
    assert logged == []
    assert tap.tracked == 0
    assert tap.waiting_tokens == 0


def test_a_share_of_requests_is_chosen_by_their_ids(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft)
    chosen = []
    for _ in range(2):
        tap, logged = tapped(share=0.5)
        serve(engine, tap, requests())
        chosen.append([answer.request_id for answer in logged])
    assert sorted(chosen[0]) == sorted(chosen[1])
    assert 0 < len(chosen[0]) < 6


def test_an_aborted_answer_is_logged_as_far_as_it_went(draft: LanguageModel, make_engine: MakeEngine) -> None:
    tap, logged = tapped()
    serve(make_engine(draft, speculation_length=1), tap, requests(), abort_after=4)
    (cut,) = (answer for answer in logged if answer.request_id == "r0")
    assert 0 < len(cut) < 14
    assert len(cut.signal) == len(cut)
    assert not cut.finished


def test_memory_is_bounded_and_nothing_is_logged_in_part(draft: LanguageModel, make_engine: MakeEngine) -> None:
    tap, logged = tapped(max_waiting=30)
    serve(make_engine(draft), tap, requests())
    assert tap.counters["dropped_memory"] > 0
    assert all(len(answer) == 14 for answer in logged)
    assert tap.waiting_tokens == 0


def test_an_error_in_the_tap_costs_no_request(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap, logged = tapped()
    monkeypatch.setattr(tap_module, "record", lambda *_: 1 / 0)
    engine = make_engine(draft)
    engine.observer = tap
    outputs = engine.generate(prompts(2), PARAMS)
    assert all(len(output.token_ids) == 14 for output in outputs)
    assert not logged
    assert tap.counters["errors"] > 0


def test_nobody_is_left_out_before_the_log_is_full(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine, full = make_engine(draft), [False]
    tap, logged = tapped(tenant_share=0.2)
    tap.is_full = lambda: full[0]
    several = [Request(f"{t}{i}", tuple(prompts()[i % 6]), PARAMS, tenant=t) for i in range(6) for t in ("a", "b", "c")]
    serve(engine, tap, [*several, *(replace(r, id=f"more{r.id}", tenant="a") for r in several)])
    assert len(logged) == 36
    assert tap.counters["capped"] == 0
    full[0] = True
    serve(engine, tap, [replace(r, id=f"late{r.id}", tenant="a") for r in several])
    assert tap.counters["capped"] > 0
    assert any(answer.request_id.startswith("late") for answer in logged)


@pytest.mark.parametrize("width", [100, 49_152, 50_001])
def test_the_best_of_blocks_are_the_best_of_all(width: int) -> None:
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    values, places = top_of_blocks(logits, 64)
    assert torch.equal(values, logits.topk(64, -1).values)
    assert torch.equal(logits.gather(-1, places), values)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_log_has_what_the_policy_gave_each_token(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, temperature: float
) -> None:
    """At the request's temperature, whoever proposed the token, with a seed too."""
    tap, logged = tapped(entries=7)  # odd: parts of single rows are not aligned
    engine = make_engine(draft, speculation_length=3)
    params = replace(PARAMS, temperature=temperature)
    serve(engine, tap, [*requests(params), Request("seeded", tuple(prompts()[0]), replace(params, seed=3))])
    engine.close()
    for answer in logged:
        ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
        raw = torch.log_softmax(target.logits(ids)[0, len(answer.prompt_ids) - 1 : -1].double(), -1)
        if not temperature:
            assert torch.equal(answer.policy_logprobs, torch.zeros(14).half())
            continue
        log_z = torch.logsumexp(raw / temperature, -1)
        own = raw.gather(-1, torch.tensor(answer.response_ids)[:, None])[:, 0] / temperature - log_z
        torch.testing.assert_close(answer.policy_logprobs.double(), own, atol=2e-2, rtol=5e-3)
        torch.testing.assert_close(answer.policy_log_z.double(), log_z, atol=2e-2, rtol=5e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.2},
        {"logit_bias": {7: 2.0}},
        {"bad_word_ids": ((5, 6),)},
        {"allowed_token_ids": tuple(range(3, 200))},
        {"min_tokens": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_text_that_is_not_the_policys_own_judges_no_draft(
    draft: LanguageModel, make_engine: MakeEngine, change: dict[str, Any]
) -> None:
    tap, logged = tapped()
    serve(make_engine(draft, speculation_length=2), tap, requests(replace(PARAMS, **change)))
    assert len(logged) == 6
    assert all(bool(answer.policy_logprobs.isnan().all()) for answer in logged)


def test_text_of_a_lossy_engine_judges_no_draft(draft: LanguageModel, make_engine: MakeEngine) -> None:
    tap, logged = tapped()
    lossy = ReplayTap(tap.config, tap.queue, lambda: 1000.0, verification="typical")
    engine = make_engine(draft, speculation_length=2, verification="typical")
    seeded = Request("seeded", tuple(prompts()[0]), replace(PARAMS, seed=1))  # verified exactly
    serve(engine, lossy, [*requests(), seeded])
    known = {answer.request_id for answer in logged if not bool(answer.policy_logprobs.isnan().any())}
    assert known == {"seeded"}


def test_while_text_is_waited_for_every_request_is_logged(draft: LanguageModel, make_engine: MakeEngine) -> None:
    tap, logged = tapped(share=0.2)
    engine = make_engine(draft, speculation_length=2, max_slots=8)
    several = [Request(f"r{i}", tuple(prompts()[i % 6]), PARAMS) for i in range(24)]
    serve(engine, tap, several)
    assert 0 < len(logged) < 12
    tap.wanting = True
    logged.clear()
    serve(engine, tap, [replace(request, id=f"all{request.id}") for request in several])
    assert len(logged) == 24


def test_where_nothing_is_left_nothing_is_drawn() -> None:
    logits = torch.tensor([[3.0, 2.0, -torch.inf, -torch.inf], [1.0, 1.0, 1.0, 1.0]])
    signal = top_signal(logits, 2, torch.rand(2, 5))
    assert bool((signal.tail_ids[0] == -1).all())
    assert bool((signal.tail_ids[1] >= 0).all())
    assert set(signal.tail_ids[1].tolist()).isdisjoint(signal.ids[1].tolist())


def test_what_a_draft_drew_from_is_not_kept_until_an_answer_ends(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the distributions of all rows of a step."""
    tap, _ = tapped()
    drawn: list[weakref.ref[DraftProbs]] = []
    found_at = tap_module.drafted_at

    def watched(*given: Any) -> Any:
        found = found_at(*given)
        drawn.extend([] if found.drawn_from is None else [weakref.ref(found.drawn_from)])
        return found

    monkeypatch.setattr(tap_module, "drafted_at", watched)
    engine = make_engine(draft, speculation_length=2)
    serve(engine, tap, requests()[:1], stop_after=5)
    assert tap.tracked == 1, "it still runs"
    gc.collect()
    assert len({id(ref) for ref in drawn}) >= 4
    assert sum(ref() is not None for ref in drawn) <= 3, "the last step's"


def test_a_request_that_was_deleted_before_its_first_token_is_not_logged(
    draft: LanguageModel, make_engine: MakeEngine
) -> None:
    tap, logged = tapped()
    engine = make_engine(draft)
    engine.submit(requests()[0])
    tap.forget_tenant("default", engine.clock())
    tap.forget_tenant("default")
    serve(engine, tap, requests()[1:2])
    assert [answer.request_id for answer in logged] == ["r1"]
