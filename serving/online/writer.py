"""From finished answers to shards: a bounded queue, and the one thread that redacts and writes them."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable

from distillspec.errors import RunError
from distillspec.serving.online.records import LoggedAnswer
from distillspec.serving.online.redaction import BadRedaction, Redaction, redacted
from distillspec.serving.online.replay_log import ReplayLog
from distillspec.serving.threads import compute_alone

log = logging.getLogger(__name__)

STOP_S = 30.0  # that a redaction may take at the end; what it has not seen by then is not logged


class LogWriter:
    """Takes answers from any thread without waiting; what does not fit, or cannot be written, is dropped and counted.

    `counters`: written, redacted (nothing was left), errors (the redaction failed), dropped_disk (the disk refused),
    dropped_deleted.

    Args:
        redact: called in the writer's own thread; an answer that it fails on is dropped.
    """

    def __init__(
        self, replay: ReplayLog, redact: Redaction | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.replay, self.config, self._redact, self._clock = replay, replay.config, redact, clock
        self.counters: Counter[str] = Counter()
        self._queue: deque[LoggedAnswer] = deque()
        self._tokens = 0
        self._oldest_s: float | None = None
        self._news = threading.Condition()
        self._stopping = self._flushing = self._abandoned = False
        self._forgotten: set[str] = set()  # tenants deleted while their answers are redacted
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.replay.reconcile()
        self._thread = threading.Thread(target=self._run, name="replay-writer", daemon=True)
        self._thread.start()

    def put(self, answer: LoggedAnswer) -> bool:
        """Queue an answer; False where `replay.max_waiting` tokens wait already."""
        with self._news:
            if self._stopping or self._tokens + len(answer) > self.config.max_waiting:
                return False
            self._queue.append(answer)
            self._tokens += len(answer)
            if self._oldest_s is None:
                self._oldest_s = self._clock()
            if self._tokens >= self.config.shard_positions:
                self._news.notify_all()
            return True

    def flush(self, timeout_s: float = 60.0) -> None:
        """Return when all that was queued is on disk, or dropped."""
        with self._news:
            self._flushing = True
            self._news.notify_all()
            self._news.wait_for(lambda: not self._queue and not self._flushing, timeout_s)

    def forget_tenant(self, tenant: str) -> None:
        """Drop what waits of a tenant."""
        with self._news:
            self._forgotten.add(tenant)
            kept = [answer for answer in self._queue if answer.tenant != tenant]
            self.counters["dropped_deleted"] += len(self._queue) - len(kept)
            self._queue = deque(kept)
            self._tokens = sum(map(len, kept))

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    def stop(self, patience_s: float = STOP_S) -> None:
        """Write what waits, then end the thread. A redaction that does not return in time is left alone."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(None if self._redact is None else patience_s)
            self._abandoned = self._thread.is_alive()
            if self._abandoned:
                log.error("replay.redaction does not return: %d waiting tokens are not logged", self._tokens)
            self._thread = None

    def _run(self) -> None:
        compute_alone()
        while not self._abandoned:
            with self._news:
                self._news.wait_for(self._is_due, self._patience())
                answers = self._take() if self._is_due() else []
                if not answers and not self._queue:
                    self._flushing = False
                    self._news.notify_all()
                    if self._stopping:
                        return
            if answers:
                self._write(self._redacted(answers))

    def _is_due(self) -> bool:
        if self._stopping or self._flushing or self._tokens >= self.config.shard_positions:
            return True
        return self._oldest_s is not None and self._clock() - self._oldest_s >= self.config.flush_s

    def _patience(self) -> float:
        """Seconds until the oldest answer has waited long enough."""
        if self._oldest_s is None:
            return self.config.flush_s
        return max(0.01, self.config.flush_s - (self._clock() - self._oldest_s))

    def _take(self) -> list[LoggedAnswer]:
        """About a shard's worth, in order."""
        taken, tokens = [], 0
        self._forgotten.clear()
        while self._queue and tokens < self.config.shard_positions:
            taken.append(self._queue.popleft())
            tokens += len(taken[-1])
        self._oldest_s = self._clock() if self._queue else None
        return taken

    def _redacted(self, answers: list[LoggedAnswer]) -> list[LoggedAnswer]:
        """What may be written of them. A hook may be slow or hang: nobody waits for it but this thread."""
        if self._redact is None:
            return answers
        kept = []
        for answer in answers:
            try:
                found = redacted(answer, self._redact, self.replay.key.vocab_size)
            except (Exception, SystemExit) as error:
                log.error("an answer is not logged, replay.redaction failed: %s", _without_text(error))
                self.counters["errors"] += 1
                continue
            with self._news:
                deleted = answer.tenant in self._forgotten
            if deleted or found is None:
                self.counters["dropped_deleted" if deleted else "redacted"] += 1
            else:
                kept.append(found)
        return kept

    def _write(self, answers: list[LoggedAnswer]) -> None:
        if self._abandoned:
            return
        try:
            written = self.replay.append(answers)
            self.counters["written"] += written
            self.counters["dropped_deleted"] += len(answers) - written
        except Exception as error:  # a full disk, above all; whatever it is, serving goes on
            if not self.counters["dropped_disk"]:
                log.error("the replay log cannot be written, answers are dropped: %s", error)
            self.counters["dropped_disk"] += len(answers)
            if not isinstance(error, RunError):
                log.debug("while writing a shard", exc_info=True)
        finally:
            with self._news:  # they counted as waiting until here
                self._tokens = sum(map(len, self._queue))


def _without_text(error: BaseException) -> str:
    """An operator's exception by kind and place: its message may quote the text."""
    if isinstance(error, BadRedaction):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {place.filename}:{place.lineno}"
