"""Outcomes of a window for the draft model: its token at each emitted position."""

from __future__ import annotations

from distillspec.serving.base.tree import ROOT
from distillspec.serving.online.log.records import ACCEPTED, BONUS, PLAIN, REJECTED
from distillspec.serving.online.log.signal import LoggedDraft
from distillspec.serving.step.commit import Emission


def drafted_at(emission: Emission, place: int) -> LoggedDraft:
    """Return a draft model's first token at the position of the emission's token `place`. Others do not count."""
    tree, path, models = emission.tree, emission.path, emission.versions
    if not any(group.source in models for group in tree.groups):
        return LoggedDraft(PLAIN)
    groups = tree.groups_at(path[place - 1] if place else ROOT)
    if place < len(path):
        accepted = path[place]
        group = next(group for group in groups if accepted in group.nodes)
        if group.source not in models:
            return LoggedDraft(PLAIN)
        outcome = ACCEPTED if accepted == group.nodes[0] else REJECTED  # a sibling of the first was right
        return LoggedDraft(outcome, tree.tokens[group.nodes[0]], group.drawn_from, group.row)
    rejected = next((group for group in groups if group.source in models), None)
    if rejected is None:
        return LoggedDraft(PLAIN if groups else BONUS)
    return LoggedDraft(REJECTED, tree.tokens[rejected.nodes[0]], rejected.drawn_from, rejected.row)
