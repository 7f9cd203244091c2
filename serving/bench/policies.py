"""Who chooses lengths on a side of `distill bench`, by name."""

from __future__ import annotations

import re

from distillspec.errors import ConfigError
from distillspec.serving.control.base import LengthController
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.latency import LatencyModel

POLICY_NAMES = {
    "none": "no speculation",
    "fixed-K": "K tokens a row, as in fixed-3",
    "goodput": "a length for each row and step, by goodput",
    "goodput-step": "one length for all rows of a step, by goodput",
}


def make_policy(name: str, longest: int, latency: LatencyModel | None, *, drafts_with_model: bool) -> LengthController:
    """A new controller; policies learn.

    Args:
        longest: the most tokens a row may draft.
        latency: a profile's costs; None: learnt live.

    Raises:
        ConfigError: an unknown name, or a fixed length above `longest`.
    """
    if name == "none":
        return FixedLength(0)
    if match := re.fullmatch(r"fixed-(\d+)", name):
        length = int(match[1])
        if length > longest:
            raise ConfigError(f"policy {name} drafts more than engine.speculation_length={longest}; raise that")
        return FixedLength(length)
    if name == "goodput":
        return GoodputController(longest, latency, drafts_with_model=drafts_with_model)
    if name == "goodput-step":
        return GoodputController(longest, latency, lengths="step", drafts_with_model=drafts_with_model)
    known = ", ".join(POLICY_NAMES)
    raise ConfigError(f"policy {name} is not known; use one of {known}")
