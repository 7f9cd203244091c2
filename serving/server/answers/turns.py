"""Work that few may do at a time: tenants take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantTurns:
    """Places that tenants take by turns, so that a flood of one delays its own work. Used on the event loop alone.

    Args:
        limit: how many work at a time.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    def waiting(self, tenant: str) -> int:
        """Return how many of a tenant wait for a place."""
        return len(self._waiting.get(tenant, ()))

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it within the block."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _turn(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled just as its turn came
                self._pass_on()
            else:
                self._leave(tenant, turn)
            raise

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant, deque())
        if turn in turns:  # else it was left out when its place came
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]

    def _pass_on(self) -> None:
        """Give a place to the next tenant that waits."""
        while self._waiting:
            tenant, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            if turns:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not turn.done():  # cancelled, and its task has not run since
                turn.set_result(None)
                return
        self._free += 1
