"""Delivery beside the device: a step's outputs go out while the next step computes, and none is lost or doubled.

There is no accelerator here. A sampler for which device reads are not free makes the engine one of an asynchronous
device: its passes are launched, and the sampler's one read waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, RequestOutput, SamplingParams
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.sequences.detokenize import Detokenizer
from distillspec.serving.server.bridge.engine_thread import EngineThread, StepReport

from ...conftest import MakeEngine, prompts

WAIT_S = 60.0


@dataclass
class Watched:
    """An engine that a thread steps, and what happens in order: launch, read, deliver, each with its step's number."""

    engine: Engine
    wanted: int  # requests
    events: list[tuple[str, int]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    done: dict[str, RequestOutput] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    fails_to_deliver: int | None = None  # this report

    def __post_init__(self) -> None:
        self.finished = threading.Event()
        self._note(self.engine.runner, "logits", "launch")
        self._note(self.engine.sampler, "verify", "read")
        self.thread = EngineThread(self.engine, self._take, self._die)

    def count(self, kind: str) -> int:
        return [own for own, _ in self.events].count(kind)

    def run(self) -> None:
        """Step until all requests are finished."""
        self.thread.start()
        assert self.finished.wait(WAIT_S)
        assert self.thread.stop()

    def _note(self, owner: Any, method: str, kind: str) -> None:
        plain: Callable[..., Any] = getattr(owner, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.events.append((kind, self.count(kind)))
            return plain(*args, **kwargs)

        setattr(owner, method, noted)

    def _take(self, report: StepReport) -> None:
        number = self.count("deliver")
        self.events.append(("deliver", number))
        for delta in report.output.deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.texts[delta.request_id] = self.texts.get(delta.request_id, "") + delta.text
        for output in report.output.finished:
            assert output.request_id not in self.done
            self.done[output.request_id] = output
        if len(self.done) == self.wanted:
            self.finished.set()
        if number == self.fails_to_deliver:
            raise RuntimeError("nobody listens")

    def _die(self, reason: str) -> None:
        self.deaths.append(reason)
        self.finished.set()


def watch(
    make_engine: MakeEngine,
    model: LanguageModel,
    asked: dict[str, SamplingParams],
    *,
    reads_are_free: bool,
    **settings: Any,
) -> Watched:
    """Return an engine with a request of each kind, not begun."""
    sampler = TokenSampler(model.identity.vocab_size, model.device, reads_are_free=reads_are_free)
    engine = make_engine(settings.pop("draft", None), sampler_object=sampler, compile=False, **settings)
    for place, (name, params) in enumerate(asked.items()):
        engine.submit(Request(name, tuple(prompts()[place]), params))
    return Watched(engine, len(asked))


ALONE = {"a": SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)}


def test_on_a_device_a_step_is_delivered_between_the_launch_and_the_read_of_the_next(
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    watched = watch(make_engine, target, ALONE, reads_are_free=False)
    watched.run()
    wanted = [("launch", 0), ("read", 0)]
    for step in range(1, 6):
        wanted += [("launch", step), ("deliver", step - 1), ("read", step)]
    assert watched.events == [*wanted, ("deliver", 5)], "the last one at once: no step follows"


def test_on_a_cpu_a_step_is_delivered_at_its_end(target: LanguageModel, make_engine: MakeEngine) -> None:
    watched = watch(make_engine, target, ALONE, reads_are_free=True)
    watched.run()
    assert watched.events == [(kind, step) for step in range(6) for kind in ("launch", "read", "deliver")]


MIXED = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=9),
    "seeded": SamplingParams(seed=5, max_tokens=7),
    "stop": SamplingParams(temperature=0.0, max_tokens=12, stop=("e", "a")),
    "log": SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, ignore_eos=True),
    "top-p": SamplingParams(seed=1, top_p=0.8, max_tokens=8),
}


def results(watched: Watched) -> dict[str, Any]:
    return {name: (own.completions[0].token_ids, own.completions[0].text) for name, own in watched.done.items()}


def check_whole(watched: Watched) -> None:
    """Assert that every token and its text were delivered once, in order."""
    for name, output in watched.done.items():
        assert tuple(watched.tokens[name]) == tuple(output.token_ids)
        assert watched.texts[name] == output.text


def test_the_same_is_written_and_delivered_as_on_a_cpu(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    """More requests than slots, prompts in chunks, a draft, stops and seeds."""
    found = []
    for reads_are_free in (True, False):
        watched = watch(
            make_engine, target, MIXED, reads_are_free=reads_are_free, draft=draft, max_slots=3, prefill_chunk=16
        )
        watched.run()
        check_whole(watched)
        assert not watched.deaths
        found.append(results(watched))
    assert found[0] == found[1]


def test_a_step_that_fails_loses_no_output_of_the_one_before(target: LanguageModel, make_engine: MakeEngine) -> None:
    watched = watch(make_engine, target, ALONE, reads_are_free=False)
    plain, failed = watched.engine.runner.logits, list[int]()

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        hidden = plain(*args, **kwargs)
        if watched.count("launch") == 3 and not failed:
            failed.append(len(watched.tokens.get("a", [])))
            raise RuntimeError("a kernel failed")
        return hidden

    watched.engine.runner.logits = fail_once  # type: ignore[method-assign]
    watched.run()
    assert failed == [1], "the second step's token was not delivered yet"
    assert watched.events[:8] == [
        *(("launch", 0), ("read", 0), ("launch", 1), ("deliver", 0), ("read", 1)),
        *(("launch", 2), ("deliver", 1), ("launch", 3)),
    ]
    check_whole(watched)
    assert len(watched.tokens["a"]) == 6
    assert not watched.deaths


def test_text_is_written_beside_the_device_where_no_stop_string_waits_for_it(
    target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Detokenizer.add
    watched = watch(make_engine, target, {**ALONE, "stop": replace(ALONE["a"], stop=("@@",))}, reads_are_free=False)

    def noted(text: Detokenizer, token: int, may_stop: bool = True) -> str:
        watched.events.append((f"text {text.stop}", watched.count(f"text {text.stop}")))
        return plain(text, token, may_stop)

    monkeypatch.setattr(Detokenizer, "add", noted)
    watched.run()
    check_whole(watched)
    names = [name for name, _ in watched.events]
    later, needed = "text ()", "text ('@@',)"
    assert watched.count(later) == watched.count(needed) == 6
    first = names.index("read")
    assert names[first + 1 : first + 6] == [needed, "launch", later, "deliver", "read"]


@pytest.mark.parametrize("reads_are_free", [True, False], ids=["cpu", "device"])
def test_a_listener_that_fails_costs_no_step(
    target: LanguageModel, make_engine: MakeEngine, reads_are_free: bool
) -> None:
    """The step that computes meanwhile is not read again, and its outputs are delivered."""
    watched = watch(make_engine, target, ALONE, reads_are_free=reads_are_free)
    watched.fails_to_deliver = 2
    watched.run()
    check_whole(watched)
    assert (watched.count("launch"), watched.count("deliver")) == (6, 6)
    assert not watched.deaths


def test_a_device_that_fails_for_good_ends_the_engine_after_all_is_delivered(
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    watched = watch(make_engine, target, ALONE, reads_are_free=False)
    plain = watched.engine.runner.logits

    def fail(*args: Any, **kwargs: Any) -> Any:
        if watched.count("read") == 3:
            raise RuntimeError("the device is gone")
        return plain(*args, **kwargs)

    watched.engine.runner.logits = fail  # type: ignore[method-assign]
    watched.run()
    assert watched.deaths == ["RuntimeError: the device is gone"]
    assert len(watched.tokens["a"]) == 3


def test_a_thread_that_is_stopped_delivers_what_it_has(target: LanguageModel, make_engine: MakeEngine) -> None:
    watched = watch(make_engine, target, {"a": SamplingParams(max_tokens=200, ignore_eos=True)}, reads_are_free=False)
    enough, stopping = threading.Event(), threading.Event()
    plain, wake = watched.engine.sampler.verify, watched.thread.wake

    def verify(*args: Any, **kwargs: Any) -> Any:
        if watched.count("read") == 4:
            enough.set()
            assert stopping.wait(WAIT_S)
        return plain(*args, **kwargs)

    def woken() -> None:
        wake()
        stopping.set()

    watched.engine.sampler.verify = verify  # type: ignore[method-assign]
    watched.thread.wake = woken  # type: ignore[method-assign]
    watched.thread.start()
    assert enough.wait(WAIT_S)
    assert watched.thread.stop()
    assert watched.count("deliver") == watched.count("read") == 5
    assert watched.events[-1][0] == "deliver"
    assert watched.engine.meanwhile is None


def test_an_abort_between_two_steps_comes_after_what_was_written(
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    """The third delivery asks for it, while the fourth step computes, whose token comes first."""
    watched = watch(make_engine, target, {"a": SamplingParams(max_tokens=200, ignore_eos=True)}, reads_are_free=False)
    take = watched.engine.sampler.verify

    def verify(*args: Any, **kwargs: Any) -> Any:
        if watched.count("deliver") == 3:
            watched.engine.abort("a")
        return take(*args, **kwargs)

    watched.engine.sampler.verify = verify  # type: ignore[method-assign]
    watched.run()
    (answer,) = watched.done["a"].completions
    assert answer.finish_reason == "abort"
    check_whole(watched)
    assert len(answer.token_ids) == 4
