"""Turns of the sides of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def in_turn(sides: Iterable[T], round_: int) -> list[T]:
    """Return the sides of a round. Each round begins with another one: the machine's speed changes within it."""
    order = list(sides)
    first = round_ % len(order)
    return order[first:] + order[:first]
