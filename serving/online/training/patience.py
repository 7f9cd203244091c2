"""Patience: how many new answers an update waits for. Learning that brings nothing comes less often."""

from __future__ import annotations

from distillspec.config import AdaptConfig
from distillspec.serving.online.training.drift import SETTLED

MOST_DOUBLINGS = 4


def every_requests(requests: int, in_vain: int) -> int:
    """Return the new answers that an update waits for.

    Args:
        requests: `adapt.every_requests`.
        in_vain: candidates judged and not promoted since the last promotion. Each after the first doubles the wait, up
            to 16 times it: the first may have learnt from traffic that was about to change.
    """
    return requests << min(max(0, in_vain - 1), MOST_DOUBLINGS)


def fewest_answers(config: AdaptConfig, in_vain: int) -> int | None:
    """Return the fewest new answers that can make an update due. None: only updates by hand are due.

    Args:
        in_vain: see `every_requests`.
    """
    return _first(config, [*_sure(config, in_vain), *([SETTLED] if config.on_drift else [])])


def enough_answers(config: AdaptConfig, in_vain: int) -> int | None:
    """Return the new answers after which an update needs no more of them. A drift may make it due before.

    Args:
        in_vain: see `every_requests`.
    """
    return _first(config, _sure(config, in_vain)) or fewest_answers(config, in_vain)


def _sure(config: AdaptConfig, in_vain: int) -> list[int]:
    requests = [] if config.every_requests is None else [every_requests(config.every_requests, in_vain)]
    return requests + ([] if config.every_s is None else [config.min_requests])


def _first(config: AdaptConfig, triggers: list[int]) -> int | None:
    return max(config.min_requests, min(triggers)) if triggers else None
