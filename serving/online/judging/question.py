"""Questions to judge: is one version better than another, by answers that neither has learnt from?"""

from __future__ import annotations

from dataclasses import dataclass

from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version

# In a verdict: answers up to this number say nothing about a suspicion, how many suspicions there were, and the
# promotion and the newest answer when the last one ended in vain.
SUSPECTED_AFTER, SUSPICIONS, ACQUITTED = "suspected_after", "suspicions", "acquitted"


@dataclass(frozen=True)
class Question:
    """Is `version` better than `against`?"""

    version: Version
    against: Version
    since_s: float = 0.0  # answers logged before do not count
    start: int = 0  # nor do those up to this number

    @property
    def after(self) -> int:
        """Return the last logged answer that either of them may have learnt from."""
        return max(self.version.last_request or 0, self.against.last_request or 0)

    def unseen(self, replay: ReplayLog, most: int) -> list[LogEntry]:
        """Return the first answers of conversations that neither has seen any of, of at most `most` conversations."""
        unseen, conversations = [], set[int]()
        for entry in replay.entries(after=max(self.after, self.start)):
            if entry.conversation <= self.after or entry.time_s <= self.since_s:
                continue
            if entry.conversation not in conversations and len(conversations) == most:
                continue
            conversations.add(entry.conversation)
            unseen.append(entry)
        return unseen


def candidate_question(registry: VersionRegistry) -> Question | None:
    """Ask about the newest candidate. None: there is none, or nothing serves yet."""
    candidates, current = registry.versions("candidate"), registry.current()
    return Question(candidates[-1], current) if candidates and current is not None else None


def suspicion_question(registry: VersionRegistry) -> Question | None:
    """Ask about the version in service, by answers since its promotion, without those long before a suspicion.

    None: there is nothing to go back to.
    """
    current, back = registry.current(), registry.predecessor()
    if current is None or back is None:
        return None
    start = current.verdict.get(SUSPECTED_AFTER, 0)
    return Question(current, back, since_s=registry.promotions()[-1]["time_s"], start=start)


def open_questions(registry: VersionRegistry, suspected: bool) -> list[Question]:
    """Return what is to be judged now, the most urgent first."""
    asked = [suspicion_question(registry) if suspected else None, candidate_question(registry)]
    return [question for question in asked if question is not None]
