"""Online adaptation as the server runs it, steers it and shows it."""

from __future__ import annotations

from typing import Any

from distillspec.serving.core import StepOutput
from distillspec.serving.online.adaptation import Adaptation
from distillspec.serving.online.layout import TrainerState
from distillspec.serving.server.online_control import DECISIONS, Judged, OnlineFigures

JUDGED = 8  # verdicts on the page
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
"""The server's word for why an answer is not in the log → the counter of tap or writer."""


class Steering:
    """The server's `OnlineControl` over an `Adaptation`."""

    def __init__(self, adaptation: Adaptation) -> None:
        self.adaptation = adaptation

    @property
    def place(self) -> str:
        return str(self.adaptation.layout.root)

    def on_step(self, output: StepOutput) -> None:
        self.adaptation.on_step(output)

    def figures(self) -> OnlineFigures:
        adaptation, keeper = self.adaptation, self.adaptation.gatekeeper
        log, trainer = adaptation.log_figures(), TrainerState.read(adaptation.layout.state)
        supervisor, happened = adaptation.supervisor, adaptation.happened
        return OnlineFigures(
            mode=adaptation.settings.online.mode,
            serving=None if keeper.serving is None else keeper.serving.name,
            waiting_for=keeper.waiting_for,
            paused=adaptation.paused,
            collapsed=adaptation.served.collapsed,
            suspected=keeper.suspicion is not None,
            answers=log["answers"],
            tokens=log["tokens"],
            bytes=log["bytes"],
            waiting_tokens=log["waiting_tokens"],
            logged=log.get("logged", 0),
            dropped={reason: log.get(counter, 0) for reason, counter in DROPPED.items()},
            refused_shards=log["refused_shards"],
            verdicts={decision: happened[decision] for decision in DECISIONS},
            promotions=happened["promoted"] + happened["promotion"],
            rollbacks=happened["rollback"],
            alarms=happened["alarm"],
            stage=adaptation.trainer_stage(trainer),
            problem=trainer.quarantined if supervisor is None else supervisor.problem,
            starts=0 if supervisor is None else supervisor.starts,
            updates=trainer.updates,
            trainer_cpu_s=trainer.cpu_s,
            trainer_s=trainer.seconds,
            lag=max(0, adaptation.replay.newest_number() - trainer.cursor),
            skipped=trainer.skipped,
            judged=self._judged(),
        )

    def status(self) -> dict[str, Any]:
        return {"mode": self.adaptation.settings.online.mode, **self.adaptation.stats()}

    def pause(self) -> None:
        self.adaptation.pause()

    def resume(self) -> None:
        self.adaptation.resume()

    def trigger(self) -> None:
        self.adaptation.trigger()

    def verdicts(self) -> list[dict[str, Any]]:
        return self.adaptation.verdicts()

    def stats(self) -> dict[str, Any]:
        return {**self.adaptation.log_figures(), "tenants": self.adaptation.replay.tenants()}

    def delete_tenant(self, tenant: str) -> int:
        return self.adaptation.delete_tenant(tenant)

    def _judged(self) -> tuple[Judged, ...]:
        newest = self.adaptation.registry.newest(JUDGED)
        return tuple(Judged(v.name, v.status, v.reason) for v in newest if v.status != "candidate")
