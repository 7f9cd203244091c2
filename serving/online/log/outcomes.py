"""Outcomes of a window for the draft model: its token at each emitted position, and how many were accepted."""

from __future__ import annotations

from distillspec.serving.base.acceptance import count_trials
from distillspec.serving.online.log.records import ACCEPTED, BONUS, PLAIN, REJECTED
from distillspec.serving.online.log.signal import LoggedDraft
from distillspec.serving.step.commit import Emission


def drafted_at(emission: Emission, place: int) -> LoggedDraft:
    """Return the draft model's token at the position of the emission's token `place`. Lookup tokens do not count."""
    tree, path = emission.tree, emission.path
    if len(tree) == 0 or tree.source == "lookup":
        return LoggedDraft(PLAIN)
    parent = path[place - 1] if place else -1
    row = None if tree.rows is None else tree.rows.get(parent)
    if place < len(path):
        return LoggedDraft(ACCEPTED, tree.tokens[path[place]], row)
    children = tree.children.get(parent)
    return LoggedDraft(REJECTED, tree.tokens[children[0]], row) if children else LoggedDraft(BONUS)


def acceptance_in(emission: Emission) -> tuple[int, int]:
    """Count the draft model's tried and accepted tokens in one window. Lookup tokens do not count."""
    tree, path = emission.tree, emission.path
    if len(tree) == 0 or tree.source == "lookup":
        return 0, 0
    return count_trials(len(path), tree.depth_along(path)), len(path)
