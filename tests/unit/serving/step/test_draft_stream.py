"""Order of drafts on a stream beside the target's. A made-up CUDA knows what each launch comes after."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from distillspec.serving.step.draft_stream import DraftStream
from distillspec.serving.step.draft_thread import DraftThread

DEVICE = torch.device("cuda", 0)


class Stream:
    """Launches come after those before them, and after the events that were waited for."""

    def __init__(self) -> None:
        self.before: set[str] = set()

    def record_event(self) -> frozenset[str]:
        return frozenset(self.before)

    def wait_event(self, event: frozenset[str]) -> None:
        self.before |= event

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


class Cuda:
    """`torch.cuda` as far as streams go: each thread has a current one, at first the device's own."""

    def __init__(self) -> None:
        self.own, self.after = Stream(), dict[str, frozenset[str]]()
        self._local = threading.local()

    def Stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        return Stream()

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self._local, "stream", self.own)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._local.stream = stream
        yield
        del self._local.stream

    def launch(self, name: str) -> None:
        """Launch a kernel in the thread's stream."""
        stream = self.current_stream(DEVICE)
        self.after[name] = frozenset(stream.before)
        stream.before.add(name)


@pytest.fixture
def thread() -> Iterator[DraftThread]:
    made = DraftThread(computes=False)
    yield made
    made.stop()


def step(cuda: Cuda, stream: DraftStream, thread: DraftThread, name: str, parts: int = 3) -> None:
    """Run a step of micro-batches: texts are copied, each part is drafted and verified, and the rest is committed."""
    cuda.launch(f"{name} copies")

    def work(part: str) -> str:
        cuda.launch(f"draft {part}")
        return part.upper()

    own = [f"{name}{part}" for part in range(parts)]
    for part, drafted in stream.in_order(partial(thread.ahead, own), work):
        assert drafted == part.upper()
        cuda.launch(f"verify {part}")
    cuda.launch(f"{name} commit")


def test_drafts_come_after_the_step_before_and_each_verification_after_its_drafts(thread: DraftThread) -> None:
    cuda = Cuda()
    stream = DraftStream(DEVICE, cuda)
    for name in ("a", "b"):
        step(cuda, stream, thread, name)
    after = cuda.after
    for part in range(3):
        assert {"a commit", "b copies"} <= after[f"draft b{part}"], "texts and states are whole"
        assert f"draft b{part}" in after[f"verify b{part}"]
        assert {f"draft a{each}" for each in range(3)} <= after["a commit"], "its copies and clears touch their caches"


def test_drafts_run_beside_verifications(thread: DraftThread) -> None:
    cuda = Cuda()
    step(cuda, DraftStream(DEVICE, cuda), thread, "a")
    for earlier in range(3):
        for later in range(3):
            assert f"verify a{earlier}" not in cuda.after[f"draft a{later}"]
            if later > earlier:
                assert f"draft a{later}" not in cuda.after[f"verify a{earlier}"]


def test_after_an_error_the_targets_stream_waits_for_all_that_was_drafted(thread: DraftThread) -> None:
    cuda, launched = Cuda(), threading.Event()

    def work(part: str) -> str:
        cuda.launch(f"draft {part}")
        if part == "2":
            launched.set()
        return part

    found = DraftStream(DEVICE, cuda).in_order(partial(thread.ahead, ["0", "1", "2"]), work)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert launched.is_set()
    cuda.launch("clear")
    assert {"draft 0", "draft 1", "draft 2"} <= cuda.after["clear"]


def test_what_launches_on_other_devices_takes_no_cores(thread: DraftThread) -> None:
    before = torch.get_num_threads()
    seen = [torch.get_num_threads() for _ in thread.ahead([1, 2], str)]
    assert {*seen, torch.get_num_threads()} == {before}
