"""Adapters between the server and online adaptation, which do not import each other: `distill serve online=on`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distillspec.errors import ConfigError
from distillspec.serving.online.adaptation import Adaptation
from distillspec.serving.online.learning_draft import LearningDraft
from distillspec.serving.server.bridge.catalogue import ONE_DRAFT, DraftEntry, NotOffered, not_there
from distillspec.serving.server.bridge.online_figures import DECISIONS, JudgedVersion, OnlineFigures, set_in_status
from distillspec.serving.step.output import StepOutput

JUDGED = 8  # versions with a verdict on the page
DROPPED = {
    "memory": "dropped_memory",
    "queue": "dropped_queue",
    "disk": "dropped_disk",
    "error": "errors",
    "incomplete": "incomplete",
    "capped": "capped",
    "redacted": "redacted",
    "deleted": "dropped_deleted",
}
"""Reason why an answer is not in the log, as `DROPS` names it → counter of tap or writer."""


class AdaptationControl:
    """The server's `OnlineControl` over an `Adaptation`."""

    def __init__(self, adaptation: Adaptation) -> None:
        self.adaptation = adaptation

    @property
    def place(self) -> str:
        return str(self.adaptation.layout.root)

    def on_step(self, output: StepOutput) -> None:
        self.adaptation.on_step(output)

    def figures(self) -> OnlineFigures:
        adaptation, drafts = self.adaptation, self.adaptation.pool.drafts()
        log, trainer = adaptation.log_figures(), adaptation.trainer.state()
        supervisor, events = adaptation.supervisor, adaptation.reporter.events
        return OnlineFigures(
            mode=adaptation.settings.online.mode,
            serving=_by_draft(drafts, lambda learner: learner.serving),
            waiting_for=_by_draft(drafts, lambda learner: learner.gatekeeper.waiting_for),
            paused=adaptation.paused,
            collapsed=any(draft.served.collapsed for draft in drafts),
            suspected=bool(adaptation.pool.suspects),
            answers=log["answers"],
            tokens=log["tokens"],
            bytes=log["bytes"],
            waiting_tokens=log["waiting_tokens"],
            logged=log.get("logged", 0),
            log_cpu_s=log["cpu_s"],
            dropped={reason: log.get(counter, 0) for reason, counter in DROPPED.items()},
            refused_shards=log["refused_shards"],
            verdicts={decision: events[decision] for decision in DECISIONS},
            promotions=events["promoted"] + events["promotion"],
            rollbacks=events["rollback"],
            alarms=events["alarm"],
            stage=adaptation.trainer.stage(trainer),
            problem=trainer.quarantined if supervisor is None else supervisor.problem,
            failing=None if supervisor is None else supervisor.failing,
            starts=0 if supervisor is None else supervisor.starts,
            updates=trainer.updates,
            trainer_cpu_s=trainer.cpu_s_by_work,
            cpu_s_per_gained_token=trainer.cpu_s_per(sum([draft.gained_tokens for draft in drafts])),
            trainer_s=trainer.seconds,
            skipped=trainer.skipped,
            lag=max(0, adaptation.replay.newest_number() - trainer.cursor),
            judged=self._judged(),
        )

    def status(self) -> dict[str, Any]:
        status = self.adaptation.stats()
        set_in_status(self.figures(), status)
        return status

    def pause(self) -> None:
        self.adaptation.pause()

    def resume(self) -> None:
        self.adaptation.resume()

    def trigger(self) -> None:
        self.adaptation.trigger()

    def verdicts(self) -> list[dict[str, Any]]:
        return self.adaptation.verdicts()

    def stats(self) -> dict[str, Any]:
        return {
            **self.adaptation.log_figures(),
            "tenants": self.adaptation.replay.tenants(),
            "excluded": sorted(self.adaptation.replay.excluded()),
        }

    def exclude_tenant(self, tenant: str, excluded: bool) -> None:
        self.adaptation.exclude_tenant(tenant, excluded)

    def delete_tenant(self, tenant: str) -> int:
        return self.adaptation.delete_tenant(tenant)

    def _judged(self) -> tuple[JudgedVersion, ...]:
        newest = self.adaptation.registry.newest(JUDGED)
        return tuple(JudgedVersion(v.name, v.status, v.reason) for v in newest if v.status != "candidate")


class RegistryCatalogue:
    """The server's `DraftCatalogue` over the versions of an `Adaptation`. The gate keeps working beside it."""

    def __init__(self, adaptation: Adaptation) -> None:
        self._registry = adaptation.registry
        self._pool = adaptation.pool
        self._engine = adaptation.engine

    def list(self) -> tuple[DraftEntry, ...]:
        used = {name: draft.identity.version for name, draft in dict(self._engine.drafts).items()}
        return tuple(
            DraftEntry(
                version.name,
                version.served_as,
                version.served_as == used.get(draft.source),
                version.status,
                draft.name or None,
            )
            for draft in self._pool.drafts()
            for version in draft.registry.versions()
            if version.present
        )

    def load(self, name: str) -> str:
        """Use the version until the next promotion, rollback or restart. Return the version as drafts report it."""
        self._check(name)
        return self._pool.of(name).gatekeeper.try_out(name).served_as

    def promote(self, name: str) -> str:
        self._check(name)
        return self._pool.of(name).gatekeeper.promote_by_hand(name).served_as

    def rollback(self, draft: str | None = None) -> str:
        if draft is None and self._pool.has_several:
            raise ConfigError(f"several drafts serve; say which: rollback?draft={self._pool.first.name}")
        return self._pool.named(draft or "").gatekeeper.roll_back_by_hand().served_as

    def unload(self, name: str) -> None:
        """Drop one of several drafts until the next restart or promotion of a version of it."""
        if not self._pool.has_several:
            raise NotOffered(ONE_DRAFT)
        if name not in self._engine.drafts:
            raise not_there(name)
        self._engine.unload_draft(name)

    def _check(self, name: str) -> None:
        if name not in self._registry.present():
            raise not_there(name)


def _by_draft(drafts: Sequence[LearningDraft], of: Callable[[LearningDraft], str | None]) -> str | None:
    """Return what a server's only draft has to say, or one text of those that several have."""
    texts = {draft.name: text for draft in drafts if (text := of(draft))}
    return ", ".join([f"{name}: {text}" if name else text for name, text in texts.items()]) or None
