"""What the server asks of online adaptation, which is another part's work."""

from __future__ import annotations

from typing import Any, Protocol


class OnlineControl(Protocol):
    """Online adaptation as operators steer it. Results are plain JSON values.

    Methods may take a moment and are called in a thread of their own; `exclude` is called on the event loop.
    """

    def exclude(self, request_id: str) -> None:
        """Never record this engine request; called before it is submitted."""
        ...

    def status(self) -> dict[str, Any]:
        """Whether it runs, what it waits for, what it did last."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def trigger(self) -> None:
        """Train a new version as soon as may be."""
        ...

    def verdicts(self) -> list[dict[str, Any]]:
        """What the gate decided, the newest last."""
        ...

    def stats(self) -> dict[str, Any]:
        """The replay log: records, bytes, tenants, ages."""
        ...

    def delete_tenant(self, tenant: str) -> int:
        """Delete all records of a tenant; how many there were."""
        ...
