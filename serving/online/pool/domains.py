"""Domains of the drafts of a pool: each draft learns from the domains that it serves."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.online.log.manifest import DraftedText
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.pool import Member, Pool
from distillspec.serving.online.state.registry import VersionRegistry

RECENT = 400  # newest answers that say which draft serves a domain


def owners(members: Sequence[Member], texts: Sequence[DraftedText], served_by: dict[str, str]) -> dict[str, str]:
    """Return the draft that learns from each domain.

    That is the one that drafted most of its tokens. A specialist on trial learns from its own domain in its place. The
    pool's first draft learns from domains that none drafts for.

    Args:
        served_by: see `Pool.served_by`.
    """
    serving = [member.name for member in members if member.status == "serving"]
    tokens: dict[str, dict[str, int]] = {}
    for text in texts:
        by_draft = tokens.setdefault(text.domain, dict.fromkeys(serving, 0))
        if (name := served_by.get(text.draft)) in by_draft:
            by_draft[name] += text.tokens
    owner_of = {
        domain: max(by_draft, key=lambda name: by_draft[name]) for domain, by_draft in tokens.items() if by_draft
    }
    on_trial = {member.domain: member.name for member in members if member.status == "on trial" and member.domain}
    return owner_of | on_trial


def owners_now(replay: ReplayLog, pool: Pool) -> dict[str, str]:
    """Return the draft that learns from each domain of the newest answers."""
    return owners(pool.members(), replay.by_draft(RECENT), pool.served_by())


def log_of(member: str, replay: ReplayLog, registry: VersionRegistry) -> ReplayLog:
    """Return the log as one draft learns from it: all of it for a server's only draft."""
    if not member:
        return replay
    return replay.of(lambda: [domain for domain, name in owners_now(replay, registry.pool).items() if name == member])
