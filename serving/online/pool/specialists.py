"""Specialists: drafts cloned for a domain at which the pool's best draft stays poor, however much it learns."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from distillspec.serving.online.log.manifest import DraftedText
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.pool.domains import RECENT, owners
from distillspec.serving.online.state.events import Report
from distillspec.serving.online.state.layout import OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.state.pool import Member
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.selection.losses import share_lost
from distillspec.serving.selection.selecting import SelectionFigures

log = logging.getLogger(__name__)

ENOUGH = 64  # answers of a domain, and tokens tried on it, from which its acceptance is taken
LEARNT = 2  # judged versions of a draft before its domains may get specialists
ENOUGH_TOKENS = 10_000  # written, from which the cost of trials is taken
IN_VAIN = 4  # judged versions of a specialist after which it is withdrawn
COST_OF_A_DRAFT = 0.01  # share of tokens a second that one more draft costs, while nothing is known of a pool's trials
NAME = re.compile(r"[^A-Za-z0-9._+-]+")


class Specialists:
    """Clones and withdraws specialists, one at a time on trial.

    A clone learns from its domain in place of the draft that it was cloned from. The gate lets it serve once it gains
    more than another draft costs the pool.

    Args:
        registry: of the folder.
        report: takes every clone and withdrawal.
        problem: returns why one more draft, given the name of the one that it is cloned from and its own, does not fit
            into memory. None: it fits.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        replay: ReplayLog,
        registry: VersionRegistry,
        report: Report,
        problem: Callable[[str, str], str | None] = lambda owner, name: None,
    ) -> None:
        self.config, self.layout = settings.adapt, settings.layout
        self.replay = replay
        self.registry = registry
        self._report = report
        self._problem = problem
        self._refused: set[str] = set()  # specialists whose refusal is in the log

    def fruitless(self) -> list[tuple[str, str]]:
        """Return the specialists on trial that have learnt in vain, each with the reason to withdraw it."""
        trials = [member for member in self.registry.pool.members() if member.status == "on trial"]
        counts = [(member.name, self.registry.of(member.name).judged_in_vain()) for member in trials]
        return [(name, f"{count} versions were not better") for name, count in counts if count >= IN_VAIN]

    def clone(self) -> Member | None:
        """Clone a draft for the domain that needs it most.

        None: no domain does, its draft has not learnt enough, a specialist is on trial, one more draft does not fit, or
        there are to be none.
        """
        pool = self.registry.pool
        members = pool.members()
        below = self.config.specialist_below
        if below is None or not members or any(member.status == "on trial" for member in members):
            return None
        domain = poor_domain(members, self.replay.by_draft(RECENT), pool.served_by(), below)
        if domain is None or not self._has_learnt(owner := domain.draft):
            return None
        return None if self._does_not_fit(owner, name_for(domain.domain)) else self._clone(owner, domain)

    def _does_not_fit(self, owner: str, name: str) -> bool:
        problem = self._problem(owner, name)
        if problem is not None and name not in self._refused:
            self._refused.add(name)
            log.warning("no specialist %s is cloned: %s", name, problem)
        return problem is not None

    def _has_learnt(self, owner: str) -> bool:
        judged = [version for version in self.registry.of(owner).versions() if version.verdict]
        return len(judged) >= LEARNT

    def _clone(self, owner: str, poor: DraftedText) -> Member | None:
        """Register a copy of the owner's version in service, then list the specialist. A crash between is repaired."""
        current, name = self.registry.of(owner).current(), name_for(poor.domain)
        if current is None or any(member.name == name for member in self.registry.pool.members()):
            return None
        specialist = self.registry.of(name)
        if specialist.current() is None:
            learnt = None if current.last_request is None else (current.first_request or 0, current.last_request)
            base = specialist.add(partial(shutil.copytree, current.path), parent=current.name, requests=learnt)
            specialist.promote(base.name, f"cloned from {current.name}")
        # Updates that were asked for earlier are not for it.
        TrainerState(asked=TrainerControl.read(self.layout.control).asked).write(self.layout.of(name).state)
        reason = f"{owner} accepts {poor.accepted / poor.tried:.2f} of its tokens there"
        member = Member(name, "on trial", poor.domain, owner, reason)
        self.registry.pool.add(member)
        self._report({"event": "specialist", "draft": name, "domain": poor.domain, "from": owner, "reason": reason})
        return member


def name_for(domain: str) -> str:
    """Return the name of a domain's specialist. Domains that would share one have a hash in it."""
    plain = NAME.sub("-", domain)[:60]
    mark = "" if plain == domain else f"-{hashlib.sha256(domain.encode()).hexdigest()[:8]}"
    return f"{plain}{mark}-specialist"


def poor_domain(
    members: Sequence[Member], texts: Sequence[DraftedText], served_by: Mapping[str, str], below: float
) -> DraftedText | None:
    """Return the domain to clone a specialist for. Its `draft` is the draft that serves it, not a version.

    Its acceptance is below `below` times that of the same draft's other domains. Of several the one with the most
    tokens. No domain gets a second specialist.
    """
    served = owners(members, texts, dict(served_by))
    had = {member.domain for member in members}
    whole: dict[str, DraftedText] = {}  # by domain, of the draft that serves it
    for text in texts:
        if (name := served_by.get(text.draft)) is not None and served.get(text.domain) == name:
            before = whole.get(text.domain, DraftedText(text.domain, name, 0, 0, 0, 0))
            whole[text.domain] = DraftedText(text.domain, name, *map(sum, zip(before[2:], text[2:], strict=True)))
    known = [text for text in whole.values() if text.answers >= ENOUGH and text.tried >= ENOUGH]
    poor = [text for text in known if text.domain not in had and _is_poor(text, known, below)]
    return max(poor, key=lambda text: text.tokens, default=None)


def _is_poor(text: DraftedText, known: Sequence[DraftedText], below: float) -> bool:
    others = [other for other in known if other.draft == text.draft and other.domain != text.domain]
    tried, accepted = (sum([getattr(other, name) for other in others]) for name in ("tried", "accepted"))
    return bool(tried) and text.accepted / text.tried < below * accepted / tried


def share_of(member: Member, replay: ReplayLog) -> float:
    """Return the share of the newest tokens that a specialist's domain has, 0 to 1."""
    texts = replay.by_draft(RECENT)
    in_domain = sum([text.tokens for text in texts if text.domain == member.domain])
    whole = sum([text.tokens for text in texts])
    return in_domain / whole if whole else 0.0


def cost_of_a_draft(figures: SelectionFigures, drafts: int) -> float:
    """Return the share of tokens a second that trials of one draft have cost. Some selections do not estimate it."""
    tokens, lost = sum(figures.tokens.values()), figures.losses.trials
    if drafts < 2 or tokens < ENOUGH_TOKENS or lost is None:
        return COST_OF_A_DRAFT
    return share_lost(lost, tokens) / (drafts - 1)
