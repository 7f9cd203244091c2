"""One thread computes with all cores; those beside it with one, or they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.threads import compute_alone, in_own_thread
from distillspec.serving.server.bridge.engine_thread import EngineThread

from ..conftest import MakeEngine


@pytest.fixture(autouse=True)
def two_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def alive() -> set[int]:
    """The process's threads, those of libraries included."""
    return {thread.id for thread in psutil.Process().threads()}


def pool_of_this_thread() -> set[int]:
    """The threads that a product makes."""
    before = alive()
    multiply()
    return alive() - before


def multiply() -> None:
    (torch.ones(512, 512) @ torch.ones(512, 512)).exp_()


def test_a_thread_that_ends_takes_its_pool_along() -> None:
    assert in_own_thread(lambda: threading.current_thread() is threading.main_thread()) is False
    assert in_own_thread(torch.get_num_threads) == 2
    pool = in_own_thread(pool_of_this_thread)
    assert len(pool) == 1
    until = time.monotonic() + 60
    while pool & alive():  # workers end a moment later
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0)


def test_who_computes_alone_leaves_the_others_their_cores() -> None:
    def beside() -> set[int]:
        compute_alone()
        return pool_of_this_thread()

    assert in_own_thread(beside) == set()
    assert torch.get_num_threads() == 2


def test_who_computes_alone_stays_alone_whatever_others_set_before_its_first_operation() -> None:
    """The log's writer waits for text. The engine's thread takes all cores meanwhile."""
    limited, others = threading.Event(), threading.Event()
    seen: list[set[int]] = []

    def beside() -> None:
        compute_alone()
        limited.set()
        others.wait(60)
        seen.append(pool_of_this_thread())

    thread = threading.Thread(target=beside)
    thread.start()
    assert limited.wait(60)
    torch.set_num_threads(2)
    others.set()
    thread.join(60)
    assert seen == [set()]


def test_the_thread_that_steps_has_all_cores_whoever_computes_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        seen.append(torch.get_num_threads())
        done.set()

    engine.at_next_step(look)
    engine.submit(Request("a", (5, 6), SamplingParams(max_tokens=2)))
    thread = EngineThread(engine, lambda report: None, lambda reason: None)
    in_own_thread(compute_alone)
    thread.start()
    assert done.wait(60)
    assert thread.stop()
    assert seen == [2]
