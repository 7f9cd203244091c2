"""The trainer's throttle, on clocks of its own, and on a real module."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn

from distillspec.serving.online.state.busy_mark import BusyMark
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.training import throttle as module
from distillspec.serving.online.training.throttle import Throttle, throttled


class World:
    """A machine on which only work and sleep take time."""

    def __init__(self) -> None:
        self.now = self.cpu = self.slept = 0.0
        self.busy_until = self.stopped_at = float("inf")

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def throttle(self, share: float) -> Throttle:
        return Throttle(
            lambda: self.now < self.busy_until,
            share,
            lambda: self.now >= self.stopped_at,
            used=lambda: self.cpu,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_work_beside_requests_is_a_share_of_the_time(share: float) -> None:
    world = World()
    throttle = world.throttle(share)
    for _ in range(50):
        world.work(0.04)
        throttle()
    assert world.cpu / world.now == pytest.approx(share, rel=0.02)
    assert throttle.waited_s == pytest.approx(world.slept)


def test_work_is_free_while_no_request_runs() -> None:
    world = World()
    world.busy_until = 0.0
    throttle = world.throttle(0.1)
    world.work(5.0)
    throttle()
    assert world.slept == 0
    world.busy_until = world.now + 100
    world.work(0.1)  # what was free is not owed later
    throttle()
    assert world.slept == pytest.approx(0.9, abs=0.011)


def test_the_last_request_ends_the_wait_and_so_does_the_end() -> None:
    world = World()
    throttle = world.throttle(0.0)
    world.busy_until = 3.0
    world.work(1.0)
    throttle()
    assert world.now == pytest.approx(3.0, abs=0.02)
    world.busy_until, world.stopped_at = float("inf"), 7.0
    world.work(1.0)
    throttle()
    assert world.now == pytest.approx(7.0, abs=0.02)
    throttle()
    assert world.now == pytest.approx(7.0, abs=0.02), "a trainer that is to end waits no more"


def test_every_module_waits_forward_and_backward(settings: OnlineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.layout.trainer.mkdir(parents=True, exist_ok=True)
    calls: list[str] = []
    monkeypatch.setattr(module.Throttle, "__call__", lambda self: calls.append("looked"))
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with throttled(settings, lambda: False):
        loss = layers(torch.ones(1, 3)).sum()
        forward = len(calls)
        assert forward == 3  # both layers and what holds them
        loss.backward()
        assert len(calls) > forward + 1
        before = len(calls)
        with torch.no_grad():
            layers(torch.ones(1, 3))
        assert len(calls) == before + 3
    layers(torch.ones(1, 3))
    assert len(calls) == before + 3, "the hooks are gone"


def test_gradients_stay_what_they_are(settings: OnlineSettings) -> None:
    settings.layout.trainer.mkdir(parents=True, exist_ok=True)
    layer, given = nn.Linear(3, 2), torch.ones(1, 3)
    layer(given).square().sum().backward()
    assert layer.weight.grad is not None
    alone = layer.weight.grad.clone()
    layer.zero_grad()
    with closing(BusyMark(settings.layout.busy)) as mark, throttled(settings, lambda: False) as throttle:
        mark.set(True)
        layer(given).square().sum().backward()
    assert torch.equal(layer.weight.grad, alone)
    assert throttle is not None
    assert throttle.waited_s > 0


def test_a_share_of_one_hooks_nothing(settings: OnlineSettings) -> None:
    settings.adapt.busy_share = 1.0
    with throttled(settings, lambda: False) as throttle:
        assert throttle is None
