"""Learning again without a tenant: what deletion from the log does not reach is in the weights."""

from __future__ import annotations

import logging

from distillspec.errors import ConfigError
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings, TrainerState
from distillspec.serving.online.state.pool import Member
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import ONLY

log = logging.getLogger(__name__)


def unlearn(settings: OnlineSettings, tenant: str) -> list[str]:
    """Let the given drafts serve again, and the next update learn from all that is left in the log.

    Specialists are withdrawn.

    The tenant's answers are deleted, and so are all versions that have learnt from any answer, with the optimizer's
    moments: the log does not say whose answers taught which version. A running server follows. Call it under the
    trainer's lock.

    Returns:
        Names of the versions that are gone.

    Raises:
        ConfigError: a draft that was given is not kept, and nothing is changed.
    """
    registry, replay = VersionRegistry(settings.layout.versions), ReplayLog(settings.layout.replay)
    members = registry.pool.members() or [Member(ONLY)]
    given = {
        member.name: _given(registry.of(member.name))
        for member in members
        if member.cloned_from is None and member.learns
    }
    replay.delete_tenant(tenant)
    reason = "a tenant was deleted, and it may have learnt from its answers"
    gone: list[str] = []
    for member in members:
        draft_registry = registry.of(member.name)
        if member.name in given:
            draft_registry.promote(given[member.name], "to learn again without a tenant")
        else:  # a specialist began with what another draft had learnt
            registry.pool.set_status(member.name, "withdrawn", reason)
        gone += draft_registry.disown(reason)
        layout = settings.layout.of(draft_registry.member)
        TrainerState.read(layout.state).with_(cursor=0, working=None).write(layout.state)
        layout.memory.unlink(missing_ok=True)
    log.info("%d versions are gone; learning again without %s", len(gone), tenant)
    replay.close()
    registry.close()
    return gone


def _given(registry: VersionRegistry) -> str:
    """Return the version of a draft that has learnt from no answer."""
    given = [version for version in registry.versions() if version.last_request is None]
    intact = [version for version in given if registry.problem_of(version) is None]
    if not intact:
        raise ConfigError(
            f"no version in {registry.folder} is as it was given, so nothing can be learnt again from it; start the "
            "server once with draft.path=FOLDER, a draft of distill train"
        )
    return intact[-1].name
