"""Deletion of a tenant's answers from the replay log, finished after a crash."""

from __future__ import annotations

import logging
from collections.abc import Callable

from distillspec.serving.online.log.exports import Exports
from distillspec.serving.online.log.manifest import Manifest
from distillspec.serving.online.log.shard_files import ShardFiles

log = logging.getLogger(__name__)


class Deletions:
    """Deletes tenants' answers and keeps out what was recorded before a deletion.

    Args:
        clock: seconds since the epoch in this process. Other processes delete by their own clocks.
    """

    def __init__(self, manifest: Manifest, files: ShardFiles, exports: Exports, clock: Callable[[], float]) -> None:
        self._manifest = manifest
        self._files = files
        self._exports = exports
        self._clock = clock
        # Tenant → the recorded time of its deletion, and that time by this process's clock.
        self._known = {tenant: (time_s, min(time_s, clock())) for tenant, time_s in manifest.deleted_at().items()}

    def cutoffs(self) -> dict[str, float]:
        """Return tenant → the time, by this process's clock, up to which its answers stay out.

        Another process's clock may have been set since it began. A deletion not seen before happened at some time until
        now, so now is its cutoff.
        """
        for tenant, time_s in self._manifest.deleted_at().items():
            if self._known.get(tenant, (None, 0.0))[0] != time_s:
                self._known[tenant] = (time_s, self._clock())
        return {tenant: here for tenant, (_, here) in self._known.items()}

    def delete(self, tenant: str) -> int:
        """Delete a tenant's answers from manifest, files and exports. Return how many were listed.

        Raises:
            RunError: bytes are left for now. The next `finish` removes them.
        """
        count, time_s = self._manifest.delete(tenant, self._clock())
        self._known[tenant] = (time_s, time_s)
        self._files.sweep()
        self.finish()
        return count

    def finish(self) -> None:
        """Remove from files, database and exports the answers that are off the list."""
        for shard in self._manifest.rewrites():
            self._files.rewrite(shard)
        self._manifest.finish_rewrites()
        self._exports.clean()

    def resume(self) -> None:
        """Finish deletions that a crash cut short.

        A full disk must not keep a server from starting: an answer that is off the list is never read.
        """
        if not (self._manifest.rewrites() or self._manifest.exports_to_clean()):
            return
        try:
            self.finish()
        except Exception as error:
            folder = self._files.folder
            log.error("a tenant's deletion in %s is not finished, the next start tries again: %s", folder, error)
