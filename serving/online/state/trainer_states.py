"""States of the trainer, one a draft, read together."""

from __future__ import annotations

from collections.abc import Iterable

from distillspec.serving.online.state.layout import Layout, TrainerState


def read_states(layout: Layout, members: Iterable[str]) -> TrainerState:
    """Return the state of the trainer of these drafts together."""
    return TrainerState.sum_of([TrainerState.read(layout.of(member).state) for member in members])


def lift_quarantine(layout: Layout, members: Iterable[str]) -> None:
    """Let every draft be trained again. The operator has looked into it."""
    for path in [layout.of(member).state for member in members]:
        state = TrainerState.read(path)
        if state.quarantined:
            state.with_(quarantined=None, bad_updates=0, working=None).write(path)
