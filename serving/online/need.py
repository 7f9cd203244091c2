"""When a trainer has something to do: before that no process of it need exist."""

from __future__ import annotations

from distillspec.config import AdaptConfig
from distillspec.serving.online.drift import SETTLED


def fewest_answers(config: AdaptConfig) -> int | None:
    """New training answers below which no update can be due; None where updates are only asked for by hand."""
    triggers = [] if config.every_requests is None else [config.every_requests]
    triggers += [] if config.every_s is None else [config.min_requests]
    triggers += [SETTLED] if config.on_drift else []
    return max(config.min_requests, min(triggers)) if triggers else None
