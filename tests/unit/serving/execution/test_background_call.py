"""Passes give way to a call beside them, and take everything back when it ends."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.execution.background_call import SWITCH_S, BackgroundCall
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner


@pytest.mark.parametrize(("cores", "meanwhile"), [(1, 1), (2, 1), (3, 2)])
def test_threads_and_turns_while_calls_run(
    two_cores: None, monkeypatch: pytest.MonkeyPatch, cores: int, meanwhile: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    usual, ends = sys.getswitchinterval(), [threading.Event(), threading.Event()]
    begun, seen = threading.Semaphore(0), []

    def call(end: threading.Event) -> None:
        seen.append(torch.get_num_threads())
        begun.release()
        assert end.wait(60)

    calls = []
    for end in ends:
        calls.append(BackgroundCall(lambda end=end: call(end)))  # type: ignore[misc]
        assert begun.acquire(timeout=60)
        calls[-1].give_way()
        assert torch.get_num_threads() == meanwhile
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert seen == [2, 2], "code is made for the threads that passes have without it"
    ends[0].set()
    calls[0].join()
    assert torch.get_num_threads() == meanwhile, "another call is running"
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    ends[1].set()
    calls[1].join()
    assert torch.get_num_threads() == 2
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_a_call_that_raises_leaves_nothing_behind(two_cores: None) -> None:
    usual, raised = sys.getswitchinterval(), []
    hook, threading.excepthook = threading.excepthook, lambda args: raised.append(args.exc_value)
    try:
        call = BackgroundCall(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        call.join()
    finally:
        threading.excepthook = hook
    assert isinstance(raised[0], ZeroDivisionError)
    assert (sys.getswitchinterval(), torch.get_num_threads()) == (pytest.approx(usual), 2)


def test_any_pass_takes_the_threads_back(
    two_cores: None, draft: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of few tokens run no compiled code, and are all that follows a short compilation."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    end = threading.Event()
    BackgroundCall(lambda: end.wait(60) and None)
    runner = ModelRunner(draft, SlotCache(1, 64))
    with torch.no_grad(), slot_attention_in(draft.model):
        runner.read([RowInput(0, 0, [3, 4])])
        assert torch.get_num_threads() == 1
        end.set()
        for place in range(2, 60):
            runner.read([RowInput(0, place, [5])])
            if torch.get_num_threads() == 2:
                break
            time.sleep(0.05)
    assert torch.get_num_threads() == 2
