"""The version in service: engine, registry and acceptance counts are changed together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from distillspec.errors import RunError
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.online.state.database import DatabaseFailed
from distillspec.serving.online.state.events import Report
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version

log = logging.getLogger(__name__)

Swap = Callable[[Version, float | None], None]
"""Makes the engine draft with a version from its next step on, given the version's acceptance over that of the one
before, None: not known. Raises ConfigError if the engine refuses it."""


@dataclass(frozen=True)
class Suspicion:
    """Doubt about a version in service: it accepts less than its predecessor did, or no verdict promoted it.

    It proves nothing. Answers since its promotion, scored under both drafts, do (`SuspicionCheck.check`).
    """

    version: Version
    reason: str


class ServingVersion:
    """The version that the engine drafts with. Every change goes through here, one at a time (`one_at_a_time`).

    The gate's thread and operators change what serves. Engine and registry must agree afterwards.

    Args:
        swap: None: there is no engine (judging by hand), so promotion is enough.
        drafting: `Version.served_as` of what the engine drafts with, None: the version in service. It may be an earlier
            one: another process may have promoted while this one loaded its models.
    """

    def __init__(
        self,
        registry: VersionRegistry,
        swap: Swap | None,
        served: ServedAcceptance | None,
        report: Report,
        drafting: str | None = None,
    ) -> None:
        self.registry = registry
        self._swap = swap
        self.served = served
        self.report = report
        current = registry.current()
        known = current is not None and drafting in (None, current.served_as)
        self.version: Version | None = current if known else None  # None: to be loaded
        self.tried: Version | None = None  # drafts in place of `version`, until the next one is brought
        self.suspicion: Suspicion | None = None  # about `version`
        self.lock = threading.RLock()
        self._checked = 0

    def intact(self, name: str) -> Version:
        """Return a version that can serve.

        Raises:
            ConfigError: there is no such version. RunError: its folder is damaged.
        """
        version = self.registry.get(name)
        if problem := self.registry.problem_of(version):
            raise RunError(f"{name} cannot serve: {problem}")
        return version

    def try_out(self, version: Version) -> None:
        """Load a version into the engine, until `bring` ends its trial. Nothing is recorded."""
        self._load(version, None)
        self.tried = version if self._replaces(version) else None

    def bring(self, version: Version, acceptance: float | None = None) -> None:
        """Load a version into the engine and count acceptance for it from now on.

        If it is in service already while another version is tried out, its count goes on.

        Args:
            acceptance: of the version over that of the one before, None: not known.

        Raises:
            ConfigError: the engine refuses it. The old one stays.
        """
        self._load(version, acceptance)
        is_new = self._replaces(version)
        self.tried = None
        self._set(version)
        if is_new and self.served is not None:
            self.served.begin_service(version.served_as)

    def promote(self, version: Version, reason: str, expected: str | None, acceptance: float | None) -> None:
        """Load a version, then promote it. A crash in between boots the old one.

        Raises:
            ConfigError: the engine refuses it. RunError: `expected` does not serve any more.
        """
        self.bring(version, acceptance)
        self.registry.promote(version.name, reason, expected=expected)

    def roll_back(self, failed: Version, reason: str) -> None:
        """Go back from `failed` to its predecessor. Without one, `failed` stays."""
        try:
            back = self.registry.rollback(reason, expected=failed.name)
        except DatabaseFailed:  # says nothing of the versions: it is tried again
            raise
        except RunError as error:
            log.error("no rollback: %s", error)
            self._set(failed)  # so that the rollback is not tried again
            return
        self.bring(back)
        self.report({"event": "rollback", "version": failed.name, "to": back.name, "reason": reason})

    def is_check_due(self) -> bool:
        """Return True if acceptance in service is due for a check."""
        return self.served is not None and self.served.checks_due != self._checked

    def mark_checked(self) -> None:
        assert self.served is not None, "only called where served acceptance is counted"
        self._checked = self.served.checks_due

    def _load(self, version: Version, acceptance: float | None) -> None:
        if self._swap is not None:
            self._swap(version, acceptance)

    def _replaces(self, version: Version) -> bool:
        """Return True if another version is in service, or none."""
        return self.version is None or self.version.name != version.name

    def _set(self, version: Version) -> None:
        self.version = version
        if self.suspicion is not None and self.suspicion.version.name != version.name:
            self.suspicion = None
