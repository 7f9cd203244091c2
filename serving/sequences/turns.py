"""Turns of tenants in the queue: who sends many requests waits behind himself, not others behind him."""

from __future__ import annotations

from collections import Counter

from distillspec.serving.base.requests import Request

MANY = 256  # tenants that are remembered before those who wait for nothing are forgotten


class TenantTurns:
    """Gives waiting answers the numbers that they go by: first an answer of each tenant, then the next of each.

    A tenant's answer gets the number after the last one's, and never one that has passed (start-time fair queueing with
    answers of equal cost, Goyal et al. 1996). Priorities are queues of their own. The answers of one tenant alone keep
    their order of arrival.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, str], int] = {}  # priority and tenant → the earliest turn of the next answer
        self._now: Counter[int] = Counter()  # priority → the latest turn that has begun

    @property
    def remembered(self) -> int:
        """Number of tenants and priorities whose next turn is kept."""
        return len(self._next)

    def take(self, request: Request) -> int:
        """Return the turn of the next answer of a request's tenant."""
        if len(self._next) > MANY:
            priorities = {priority for priority, _ in self._next}  # answers may wait whose tenants are forgotten
            self._next = {who: turn for who, turn in self._next.items() if turn > self._now[who[0]] + 1}
            self._now = Counter({priority: turn for priority, turn in self._now.items() if priority in priorities})
        who = (request.priority, request.tenant)
        turn = max(self._now[request.priority], self._next.get(who, 0))
        self._next[who] = turn + 1
        return turn

    def begin(self, request: Request, turn: int) -> None:
        """Learn that an answer leaves the queue for a slot."""
        self._now[request.priority] = max(self._now[request.priority], turn)
