"""States of the trainer, one a draft, read together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from distillspec.serving.online.state.layout import Layout, TrainerState


def read_states(layout: Layout, members: Iterable[str]) -> TrainerState:
    """Return the state of the trainer of these drafts together."""
    return TrainerState.sum_of([TrainerState.read(layout.of(member).state) for member in members])


def quarantine_of(layout: Layout) -> str | None:
    """Return why the trainer must not be restarted. None: at least one draft may be trained."""
    return TrainerState.sum_of([TrainerState.read(path) for path in _files(layout)]).quarantined


def lift_quarantine(layout: Layout) -> None:
    """Let every draft be trained again. The operator has looked into it."""
    for path in _files(layout):
        state = TrainerState.read(path)
        if state.quarantined:
            state.with_(quarantined=None, bad_updates=0, working=None).write(path)


def updates_in(layout: Layout) -> int:
    """Count the updates that were made of all drafts."""
    return sum([TrainerState.read(path).updates for path in _files(layout)])


def _files(layout: Layout) -> list[Path]:
    return sorted(layout.trainer.glob("drafts/*/state.json")) or [layout.state]
