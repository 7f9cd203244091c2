"""Patience: learning that brings nothing comes less often."""

from __future__ import annotations

MOST_DOUBLINGS = 4


def every_requests(requests: int, in_vain: int) -> int:
    """Return the new answers that an update waits for.

    Args:
        requests: `adapt.every_requests`.
        in_vain: candidates judged and not promoted since the last promotion. Each doubles the wait, up to 16 times it.
    """
    return requests << min(in_vain, MOST_DOUBLINGS)
