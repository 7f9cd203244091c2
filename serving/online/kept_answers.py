"""Answers and counts of n-grams that proposers without a model keep in an online folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future

from distillspec.serving.base.owner_files import delete_files
from distillspec.serving.engine import Engine
from distillspec.serving.online.state.layout import Layout

log = logging.getLogger(__name__)

IN_MEMORY = "n-grams and earlier answers are kept in memory alone: %s"


def keep_answers(engine: Engine, layout: Layout, excluded: Iterable[str], *, redacted: bool) -> None:
    """Let an engine's proposers keep what they learn from answers in the folder, but for excluded tenants.

    Call it before requests come. A folder that cannot be used is logged.

    Args:
        excluded: tenants of which nothing is kept. Files of theirs, from before, are removed.
        redacted: a hook redacts the log. It does not reach proposers, so they keep nothing on disk.
    """
    try:
        for tenant in excluded:
            delete_files(layout.answers, tenant)
    except OSError as error:
        log.error("what proposers kept of an excluded tenant stays in %s: %s", error.filename, error.strerror)
    if redacted:
        log.info(IN_MEMORY, "replay.redaction does not reach them")
        return
    engine.keep_answers_in(layout.answers).add_done_callback(_tell_failure)


def _tell_failure(outcome: Future[None]) -> None:
    if (error := outcome.exception()) is not None:
        log.error(IN_MEMORY, error)
