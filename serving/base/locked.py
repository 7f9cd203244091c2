"""Methods that run under the lock of their object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Locked(Protocol):
    """An object with a lock."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...


S = TypeVar("S", bound=Locked)
P = ParamSpec("P")
T = TypeVar("T")


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method under its object's `lock`, so that threads change the object one after the other."""

    @functools.wraps(method)
    def locked(self: S, *args: P.args, **named: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **named)

    return locked
