"""Requests come, wait, leave and fail at any moment. Others are unaffected, and no slot is lost."""

from __future__ import annotations

import gc
import re
import weakref
from threading import Event, Thread
from typing import Any

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.serving import Request, RequestRefused, SamplingParams
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.step.output import StepOutput

from .conftest import MakeEngine, hf_greedy, prompts

PROMPT = prompts()[1]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def test_aborting_at_any_moment_frees_everything(draft: LanguageModel, make_engine: MakeEngine) -> None:
    for moment in range(4):
        engine = make_engine(draft, max_slots=1, prefill_chunk=8)
        engine.submit(Request("a", tuple(PROMPT), GREEDY))
        engine.submit(Request("b", tuple(PROMPT), GREEDY))
        for _ in range(moment):
            engine.step()
        engine.abort("a")
        engine.abort("b")
        engine.abort("nobody")
        finished = engine.step().finished
        assert {output.request_id: output.finish_reason for output in finished} == {"a": "abort", "b": "abort"}
        assert not engine.has_work
        engine.check_integrity()


def test_a_deadline_ends_a_request_as_it_stands(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft)
    now = 0.0
    engine.clock = lambda: now
    engine.submit(Request("a", tuple(PROMPT), GREEDY, deadline_s=5.0))
    engine.step()
    now = 6.0
    (output,) = engine.step().finished
    assert output.finish_reason == "abort"
    assert len(output.token_ids) >= 1


def test_a_finished_answer_is_not_held_until_its_deadline(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft)
    engine.submit(Request("a", tuple(PROMPT), GREEDY, deadline_s=600.0))
    engine.step()
    held = weakref.ref(engine.sequences.unfinished["a/0"])
    engine.run_until_done({"a"})
    engine.step()
    gc.collect()
    assert held() is None


def test_a_deadline_counts_for_its_own_request_alone(make_engine: MakeEngine) -> None:
    """The same id comes again, before the first one's deadline."""
    engine, now = make_engine(), 0.0
    engine.clock = lambda: now
    engine.submit(Request("a", tuple(PROMPT), SamplingParams(max_tokens=1), deadline_s=5.0))
    engine.run_until_done({"a"})
    engine.submit(Request("a", tuple(PROMPT), GREEDY, deadline_s=100.0))
    engine.step()
    now = 6.0
    assert engine.step().finished == ()
    now = 101.0
    assert [output.finish_reason for output in engine.step().finished] == ["abort"]


def test_a_deadline_that_is_none_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(RequestRefused, match="deadline_s=nan must be at least 0"):
        make_engine().submit(Request("a", (5,), GREEDY, deadline_s=float("nan")))


def test_ten_thousand_wait_in_order_and_leave_by_every_door(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=2)
    now = 0.0
    engine.clock = lambda: now
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for i in range(10_000):
        deadline = 1.0 if i % 10 == 3 and i > 100 else None
        engine.submit(Request(str(i), (5, 6), params, priority=i % 3, deadline_s=deadline))
    for i in range(5_000, 10_000):
        engine.abort(str(i))
    first = [engine.step() for _ in range(6)]
    now = 2.0
    finished = [output for step in [*first, engine.step()] for output in step.finished]
    ended = {output.request_id for output in finished if output.finish_reason == "abort"}
    assert ended == {str(i) for i in range(10_000) if i >= 5_000 or (i % 10 == 3 and i > 100)}
    served = [int(output.request_id) for output in finished if output.finish_reason != "abort"]
    assert served == list(range(0, 3 * len(served), 3)), "most urgent first, then first come"
    engine.check_integrity()
    for i in range(5_000):
        engine.abort(str(i))
    engine.step()
    assert not engine.has_work


@pytest.mark.parametrize("where", ["waiting", "reading its prompt"])
def test_a_deadline_holds_before_the_first_token_too(draft: LanguageModel, make_engine: MakeEngine, where: str) -> None:
    engine = make_engine(draft, max_slots=1, prefill_chunk=4)
    now = 0.0
    engine.clock = lambda: now
    if where == "waiting":
        engine.submit(Request("first", tuple(PROMPT), GREEDY))
    engine.submit(Request("late", tuple(PROMPT), GREEDY, deadline_s=5.0))
    engine.step()
    now = 6.0
    (output,) = engine.step().finished
    assert (output.request_id, output.finish_reason, output.token_ids) == ("late", "abort", ())
    engine.check_integrity()


def test_threads_submit_and_abort_while_one_steps(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, max_slots=3)
    names = [f"{thread}-{i}" for thread in range(4) for i in range(15)]

    def client(thread: int) -> None:
        for name in names[15 * thread : 15 * (thread + 1)]:
            engine.submit(Request(name, tuple(PROMPT), SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True)))
            if name.endswith(("3", "7")):
                engine.abort(name)

    clients = [Thread(target=client, args=(thread,)) for thread in range(4)]
    for thread in clients:
        thread.start()
    reasons: dict[str, str] = {}
    while len(reasons) < len(names):
        reasons.update({output.request_id: output.finish_reason for output in engine.step().finished})
        engine.check_integrity()
    for thread in clients:
        thread.join()
    assert not engine.has_work
    assert all(reasons[name] == "length" for name in names if not name.endswith(("3", "7")))
    assert "abort" in reasons.values()


def test_submit_and_abort_never_wait_for_a_step(
    continuation: list[int], draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is held up inside the target's pass. One lock around everything would hold up the others too."""
    engine = make_engine(draft, max_slots=2)
    engine.submit(Request("first", tuple(PROMPT), GREEDY))
    engine.step()
    inside, go_on = Event(), Event()
    read, outputs = engine.runner.read, list[StepOutput]()

    def held_up(rows: list[RowInput]) -> torch.Tensor:
        inside.set()
        assert go_on.wait(60)
        return read(rows)

    def visit() -> None:
        engine.submit(Request("second", tuple(PROMPT), GREEDY))
        engine.abort("first")

    monkeypatch.setattr(engine.runner, "read", held_up)
    stepping, visitor = Thread(target=lambda: outputs.append(engine.step())), Thread(target=visit)
    stepping.start()
    assert inside.wait(60)
    visitor.start()
    visitor.join(20)
    came_back = not visitor.is_alive()
    go_on.set()
    for thread in (stepping, visitor):
        thread.join()
    assert came_back
    assert [delta.request_id for delta in outputs[0].deltas] == ["first"]
    assert outputs[0].finished == ()
    after = engine.step()
    assert [(output.request_id, output.finish_reason) for output in after.finished] == [("first", "abort")]
    assert [delta.request_id for delta in after.deltas if delta.token_ids] == ["second"]
    engine.check_integrity()


@pytest.mark.parametrize("where", ["read", "propose"])
def test_aborting_from_inside_a_step_takes_effect_at_the_next(
    continuation: list[int],
    draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    engine = make_engine(draft, max_slots=2, speculation_length=3)
    for name in ("unwanted", "wanted"):
        engine.submit(Request(name, tuple(PROMPT), GREEDY))
    engine.step()
    part: Any = engine.runner if where == "read" else engine.proposer
    original = getattr(part, where)

    def aborting(asked: Any) -> Any:
        engine.abort("unwanted")
        return original(asked)

    monkeypatch.setattr(part, where, aborting)
    during, after = engine.step(), engine.step()
    assert [delta.request_id for delta in during.deltas if delta.token_ids] == ["unwanted", "wanted"]
    assert during.finished == ()
    (output,) = after.finished
    assert (output.request_id, output.finish_reason) == ("unwanted", "abort")
    assert list(output.token_ids) == continuation[: len(output.token_ids)]
    engine.check_integrity()
    finished = {output.request_id: output for _ in range(30) for output in engine.step().finished}
    assert list(finished["wanted"].token_ids) == continuation[:30]
    assert not engine.sequences.unfinished


def test_a_bar_shows_how_far_a_list_is(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.generate([PROMPT] * 3, params)
    assert capsys.readouterr().err == ""
    engine.generate([PROMPT] * 3, params, progress=True)
    line = capsys.readouterr().err.split("\r")[-1]
    assert "3/3" in line
    assert "request" in line
    assert re.search(r"[1-9]\d* tokens/s", line)


def test_a_thousand_requests_go_through_four_slots(target: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(None, proposer="prompt_lookup", max_slots=4)
    asked = [[3 + i % 200, 4 + i % 100, 7] for i in range(1000)]
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=2))
    assert len(outputs) == 1000
    engine.close()
    assert [list(o.token_ids) for o in outputs[:5]] == [hf_greedy(target, p, 2) for p in asked[:5]]


def test_the_same_id_twice_is_refused(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft)
    engine.submit(Request("a", (5, 6)))
    with pytest.raises(RequestRefused, match="this id is running already"):
        engine.submit(Request("a", (5, 6)))


def test_times_and_deadlines_count_from_submission(make_engine: MakeEngine) -> None:
    """Not from the end of the step that was running when a request came."""
    engine = make_engine(max_slots=1)
    now = 100.0
    engine.clock = lambda: now
    engine.submit(Request("late", (5, 6), SamplingParams(temperature=0.0, max_tokens=4), deadline_s=3.0))
    now = 104.0
    (output,) = engine.step().finished
    assert output.finish_reason == "abort"
    engine.submit(Request("timely", (5, 6), SamplingParams(temperature=0.0, max_tokens=1)))
    now = 106.0
    (output,) = engine.step().finished
    assert output.stats.queue_s == pytest.approx(2.0)


def test_what_is_submitted_during_a_step_waits_for_the_next(make_engine: MakeEngine) -> None:
    """However fast requests come, a step begins."""
    engine = make_engine()
    seen = []

    def again() -> None:
        seen.append(len(seen))
        engine.at_next_step(again)

    engine.at_next_step(again)
    engine.step()
    engine.step()
    assert len(seen) == 2


def test_a_step_that_fails_while_slots_change_trusts_no_slot(make_engine: MakeEngine, target: LanguageModel) -> None:
    """A copy that was announced but not made must not be reused as a prompt's prefix."""
    engine = make_engine(max_slots=2)
    head, params = list(range(10, 50)), SamplingParams(temperature=0.0, max_tokens=4)
    engine.generate([[*head, *range(100, 160)]], params)  # longer than twice the prefix, so that it is copied
    copy = engine.runner.cache.copy

    def fails(*move: object) -> None:
        raise MemoryError("no room for the copy")

    engine.runner.cache.copy = fails  # type: ignore[method-assign]
    engine.submit(Request("a", (*head, 60), params))
    with pytest.raises(MemoryError):
        engine.step()
    engine.runner.cache.copy = copy  # type: ignore[method-assign]
    engine.check_integrity()
    done = engine.run_until_done({"a"}, progress=False)
    assert done["a"].stats.prefix_tokens == 0
    engine.close()
    assert list(done["a"].token_ids) == hf_greedy(target, [*head, 60], 4)


def test_tenants_do_not_share_cached_beginnings(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=12)
    prompt, params = tuple(range(10, 60)), SamplingParams(temperature=0.0, max_tokens=2, n=2)
    taken = []
    for place, (tenant, salt) in enumerate([("a", ""), ("b", ""), ("a", ""), ("a", "x"), ("b", "x"), ("b", "")]):
        engine.submit(Request(str(place), prompt, params, tenant=tenant, cache_salt=salt))
        done = engine.run_until_done({str(place)}, progress=False)[str(place)]
        taken.append([answer.stats.prefix_tokens > 0 for answer in done.completions])
        engine.check_integrity()
    new, known = [False, True], [True, True]  # the second answer shares the first one's prompt
    assert taken == [new, new, known, new, new, known]
