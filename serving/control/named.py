"""Controllers by name, as comparisons want them: the engine's own and plain ones, the same live and simulated."""

from __future__ import annotations

import re

from distillspec.errors import ConfigError
from distillspec.serving.control.base import LengthController
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.latency import LatencyModel
from distillspec.serving.control.smartspec import SmartSpecController

CONTROLLER_NAMES = {
    "none": "no speculation",
    "fixed-K": "K tokens a row, as in fixed-3",
    "goodput": "the engine's controller=goodput: a length for each row and step",
    "goodput-step": "the same with one length for all rows of a step, acceptance by request",
    "goodput-global": "one length for all rows of a step, one acceptance for all requests",
    "smartspec": "the paper's own: one length a step, requests admitted by goodput; needs a profile",
    "smartspec-request": "the same, with the acceptance of each request by itself",
}


def named_controller(
    name: str,
    longest: int,
    latency: LatencyModel | None,
    *,
    drafts_with_model: bool = True,
    guess: LatencyModel | None = None,
) -> LengthController:
    """A new controller of a name in `CONTROLLER_NAMES`; controllers learn.

    Args:
        longest: the most tokens a row drafts where the controller chooses.
        latency: what steps cost, from a profile; None: learnt.
        guess: what goodput begins to learn from; see `guessed`.

    Raises:
        ConfigError: an unknown name, or `smartspec` without costs.
    """
    if name == "none":
        return FixedLength(0)
    if match := re.fullmatch(r"fixed-(\d+)", name):
        return FixedLength(int(match[1]))
    if name in ("goodput", "goodput-step", "goodput-global"):
        return GoodputController(
            longest,
            latency,
            lengths=name.partition("-")[2] or "request",
            drafts_with_model=drafts_with_model,
            guess=guess,
        )
    if name in ("smartspec", "smartspec-request"):
        if latency is None:
            raise ConfigError(f"policy {name} needs costs: measure this machine with distill profile")
        return SmartSpecController(longest, latency, per_request=name == "smartspec-request")
    raise ConfigError(f"policy {name} is not known; use one of {', '.join(CONTROLLER_NAMES)}")
