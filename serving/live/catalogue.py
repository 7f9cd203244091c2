"""The registry's versions as the drafts that operators list, load, promote and roll back."""

from __future__ import annotations

from distillspec.serving.online.adaptation import Adaptation
from distillspec.serving.server.catalogue import DraftEntry, NotInCatalogue


class RegistryCatalogue:
    """The server's `DraftCatalogue` over the versions of an `Adaptation`; the gate goes on beside it."""

    def __init__(self, adaptation: Adaptation) -> None:
        self._registry, self._keeper = adaptation.registry, adaptation.gatekeeper
        self._engine = adaptation.engine

    def list(self) -> tuple[DraftEntry, ...]:
        draft = self._engine.draft
        used = None if draft is None else draft.identity.version
        return tuple(
            DraftEntry(version.name, version.served_as, version.served_as == used, version.status)
            for version in self._registry.versions()
            if version.present
        )

    def load(self, name: str) -> str:
        """Until the next promotion, rollback or restart."""
        self._check(name)
        return self._keeper.try_out(name).served_as

    def promote(self, name: str) -> str:
        self._check(name)
        return self._keeper.promote_by_hand(name).served_as

    def rollback(self) -> str:
        return self._keeper.roll_back_by_hand().served_as

    def _check(self, name: str) -> None:
        if all(version.name != name for version in self._registry.versions()):
            raise NotInCatalogue(f"there is no draft {name!r}; see GET /admin/drafts")
