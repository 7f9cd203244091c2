"""The drafts of a server that has several, as its registry lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distillspec.serving.online.state.database import Database
from distillspec.serving.online.state.version import ONLY

Status = Literal["serving", "on trial", "withdrawn"]


@dataclass(frozen=True)
class Member:
    """One draft of a pool, by the name that the engine knows it by.

    A specialist was cloned from another draft, to learn one domain. It is on trial until a version of it is promoted.
    It is withdrawn if it learns nothing that pays.
    """

    name: str
    status: Status = "serving"
    domain: str | None = None  # a specialist's
    cloned_from: str | None = None
    reason: str = ""

    @property
    def learns(self) -> bool:
        return self.status != "withdrawn"


class Pool:
    """Table of the drafts of a pool. Empty for a server with one draft."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def members(self) -> list[Member]:
        """Return all drafts, in the order in which they came."""
        rows = self._database.rows("SELECT name, status, domain, cloned_from, reason FROM members ORDER BY id")
        return [Member(*row) for row in rows]

    def serving(self) -> list[str]:
        """Return the drafts that serve. A specialist on trial does once a version of it is promoted."""
        rows = self._database.rows("SELECT member, COUNT(*) n FROM promotions GROUP BY member")
        promotions = {row["member"]: row["n"] for row in rows}
        learning = [member for member in self.members() if member.learns]
        return [member.name for member in learning if member.status == "serving" or promotions.get(member.name, 0) > 1]

    def learning(self) -> list[Member]:
        """Return the drafts that learn: those of the pool that are not withdrawn, or a server's only one."""
        members = self.members() or [Member(ONLY)]
        return [member for member in members if member.learns]

    def learners(self) -> list[str]:
        """Return the names of `learning`."""
        return [member.name for member in self.learning()]

    def add(self, member: Member) -> None:
        """List a draft. One of this name stays as it is."""
        with self._database.transaction() as rows:
            rows.execute(
                "INSERT OR IGNORE INTO members (name, status, domain, cloned_from, reason) VALUES (?, ?, ?, ?, ?)",
                (member.name, member.status, member.domain, member.cloned_from, member.reason),
            )

    def set_status(self, name: str, status: Status, reason: str) -> None:
        """Change a draft's status."""
        with self._database.transaction() as rows:
            rows.execute("UPDATE members SET status = ?, reason = ? WHERE name = ?", (status, reason, name))

    def served_by(self) -> dict[str, str]:
        """Return the draft that each version is of, by `Version.served_as`. Clones' versions are their owner's."""
        rows = self._database.rows(
            "SELECT substr(v.weights_hash, 1, 12) version, v.member FROM versions v JOIN members m ON m.name = v.member"
            " WHERE m.status = 'serving' ORDER BY v.id DESC"  # the first draft that had these weights wins
        )
        return {row["version"]: row["member"] for row in rows}
