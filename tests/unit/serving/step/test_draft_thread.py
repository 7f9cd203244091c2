"""The thread that drafts ahead: order, cores, errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from distillspec.serving.step.draft_thread import DraftThread


@pytest.fixture
def thread() -> Iterator[DraftThread]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    made = DraftThread()
    yield made
    made.stop()
    torch.set_num_threads(before)


def test_results_come_in_order_while_those_behind_are_made(thread: DraftThread) -> None:
    second_begun, seen = threading.Event(), []

    def work(item: int) -> tuple[int, int, bool]:
        if item == 1:
            second_begun.set()
        return 10 * item, torch.get_num_threads(), torch.is_inference_mode_enabled()

    for item, (result, cores, inferring) in thread.ahead([0, 1, 2], work):
        if item == 0:
            assert second_begun.wait(10)  # it is drafted while this one would be verified
        assert (cores, torch.get_num_threads(), inferring) == (1, 1, True)
        seen.append((item, result))
    assert seen == [(0, 0), (1, 10), (2, 20)]
    assert torch.get_num_threads() == 2


def test_an_error_waits_for_what_runs_and_gives_the_cores_back(thread: DraftThread) -> None:
    done = []

    def work(item: int) -> int:
        if item == 0:
            raise ValueError("broken")
        done.append(item)
        return item

    with pytest.raises(ValueError, match="broken"):
        list(thread.ahead([0, 1, 2], work))
    assert done == [1, 2]
    assert torch.get_num_threads() == 2


def test_leaving_early_waits_for_the_thread(thread: DraftThread) -> None:
    done = []
    found = thread.ahead([0, 1, 2], done.append)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert done == [0, 1, 2]
    assert torch.get_num_threads() == 2


def test_a_stopped_thread_starts_again(thread: DraftThread) -> None:
    thread.stop()
    assert [result for _, result in thread.ahead([1, 2], lambda item: item + 1)] == [2, 3]
