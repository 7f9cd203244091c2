"""Brake on wrong keys: when it begins, how it grows and ends, and that its table is bounded."""

from __future__ import annotations

import pytest

from distillspec.serving.server.http.errors import ApiError
from distillspec.serving.server.http.wrong_keys import ADDRESSES, LONGEST_PAUSE_S, MOST, WrongKeys

ANN, BOB = "192.0.2.1", "2001:db8::2"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def wait_of(keys: WrongKeys, address: str = ANN, *, given: bool = True) -> int:
    """Refuse a key of this address. Return the seconds that it is told to wait, 0 for none."""
    try:
        keys.check(address, given=given)
    except ApiError as error:
        refusal = error
    else:
        return 0
    assert (refusal.status, refusal.code) == (429, "too_many_wrong_keys")
    return int(refusal.headers["Retry-After"])


def slow_down(keys: WrongKeys, address: str = ANN) -> None:
    """Send the wrong keys that are answered before the brake begins."""
    assert [wait_of(keys, address) for _ in range(int(MOST))] == [0] * int(MOST)


def test_the_brake_begins_after_several_wrong_keys_of_one_address(clock: Clock) -> None:
    keys = WrongKeys(clock)
    slow_down(keys)
    assert wait_of(keys) == 1
    assert wait_of(keys, given=False) == 1, "a missing key is refused alike"
    assert wait_of(keys, BOB) == 0


def test_pauses_double_up_to_a_bound(clock: Clock) -> None:
    keys, pauses = WrongKeys(clock), []
    slow_down(keys)
    for _ in range(9):
        pauses.append(wait_of(keys))
        while wait_of(keys):  # keys within a pause do not prolong it
            clock.now_s += pauses[-1] / 8
    assert pauses == [1, 2, 4, 8, 16, 32, *[LONGEST_PAUSE_S] * 3]


def test_wrong_keys_are_forgotten_however_many_there_were(clock: Clock) -> None:
    keys = WrongKeys(clock)
    for _ in range(1000):
        wait_of(keys)
    clock.now_s += 120  # twice the half-life of at most 20
    assert [wait_of(keys) for _ in range(6)] == [0, 0, 0, 0, 0, 1], "it begins anew, with the first pause"


def test_few_wrong_keys_a_minute_and_missing_ones_begin_none(clock: Clock) -> None:
    keys = WrongKeys(clock)
    for _ in range(200):
        assert wait_of(keys) == 0
        assert wait_of(keys, BOB, given=False) == 0
        clock.now_s += 10
    assert len(keys) == 1


def test_the_table_is_bounded_and_drops_the_oldest(clock: Clock) -> None:
    keys = WrongKeys(clock)
    slow_down(keys, "oldest")
    slow_down(keys)
    for number in range(ADDRESSES - 1):
        wait_of(keys, f"address {number}")
    assert len(keys) == ADDRESSES
    assert wait_of(keys) == 1
    assert wait_of(keys, "oldest") == 0


def test_one_line_is_logged_when_a_brake_begins(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    keys = WrongKeys(clock)
    for _ in range(50):
        wait_of(keys)
        clock.now_s += 0.5
    assert [record.__dict__["fields"] for record in caplog.records] == [{"address": ANN}]
