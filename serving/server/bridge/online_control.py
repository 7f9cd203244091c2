"""Interface through which the server shows and controls online adaptation."""

from __future__ import annotations

from typing import Any, Protocol

from distillspec.serving.server.bridge.online_figures import OnlineFigures
from distillspec.serving.step.output import StepOutput


class OnlineControl(Protocol):
    """Online adaptation as the server and its operators use it. Results are plain JSON values.

    The engine's thread calls `on_step`. The other methods may block for a moment and are called in other threads.
    """

    @property
    def place(self) -> str:
        """Folder of the log and the versions."""
        ...

    def on_step(self, output: StepOutput) -> None:
        """Take the output of a step. Never raises, never blocks."""
        ...

    def figures(self) -> OnlineFigures:
        """Measure all figures. Cheap: called every few seconds."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the body of GET /admin/online: state, served acceptance with intervals, trainer."""
        ...

    def pause(self) -> None:
        """Log and train nothing new until `resume`."""
        ...

    def resume(self) -> None:
        """Go on after `pause` or a quarantine."""
        ...

    def trigger(self) -> None:
        """Train a new version as soon as possible."""
        ...

    def verdicts(self) -> list[dict[str, Any]]:
        """Return the gate's decisions, oldest first."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return the body of GET /admin/replay: answers, bytes, tenants and dropped answers of the log."""
        ...

    def exclude_tenant(self, tenant: str, excluded: bool) -> None:
        """Log nothing of a tenant from now on, or log it again."""
        ...

    def delete_tenant(self, tenant: str) -> int:
        """Delete all logged answers of a tenant. Return how many there were."""
        ...
