"""Log writer: a bounded queue of finished answers, and the thread that redacts them and writes shards."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from distillspec.errors import RunError
from distillspec.serving.base.threads import compute_alone
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.serving.online.log.redaction import BadRedaction, Redaction, redacted
from distillspec.serving.online.log.replay_log import ReplayLog

log = logging.getLogger(__name__)

MOST_STATES = 256 << 20  # bytes of states that wait. Further answers are logged without theirs
STOP_S = 30.0  # that a redaction may take at the end. What is not redacted by then is not logged.


class LogWriter:
    """Takes answers from any thread without waiting. Answers that cannot be queued or written are dropped and counted.

    `counters`: written, redacted (nothing was left), errors (the redaction failed), dropped_disk (the write failed),
    dropped_deleted, without_states.

    Args:
        redact: called in the writer's thread. An answer that it raises on is dropped.
    """

    def __init__(
        self, replay: ReplayLog, redact: Redaction | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.replay = replay
        self.config = replay.config
        self._redact = redact
        self._clock = clock
        self.counters: Counter[str] = Counter()
        self.cpu_s = 0.0  # processor time of its thread
        self._queue: deque[LoggedAnswer] = deque()
        self._tokens = self._state_bytes = 0
        self._oldest_s: float | None = None
        self._changed = threading.Condition()
        self._stopping = self._flushing = self._abandoned = False
        self._forgotten: set[str] = set()  # tenants deleted while answers are redacted
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.replay.reconcile()
        self._thread = threading.Thread(target=self._run, name="replay-writer", daemon=True)
        self._thread.start()

    def put(self, answer: LoggedAnswer) -> bool:
        """Queue an answer. Return False if `replay.max_waiting` tokens wait already."""
        with self._changed:
            if self._stopping or self._tokens + len(answer) > self.config.max_waiting:
                return False
            if self._state_bytes + answer.state_bytes > MOST_STATES:
                self.counters["without_states"] += 1
                answer = replace(answer, states=None)
            self._queue.append(answer)
            self._tokens += len(answer)
            self._state_bytes += answer.state_bytes
            if self._oldest_s is None:
                self._oldest_s = self._clock()
            if self._tokens >= self.config.shard_positions:
                self._changed.notify_all()
            return True

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until everything queued is on disk or dropped."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue and not self._flushing, timeout_s)

    def forget_tenant(self, tenant: str) -> None:
        """Drop a tenant's queued answers."""
        with self._changed:
            self._forgotten.add(tenant)
            kept = [answer for answer in self._queue if answer.tenant != tenant]
            self.counters["dropped_deleted"] += len(self._queue) - len(kept)
            self._queue = deque(kept)
            self._count()

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    def stop(self, patience_s: float = STOP_S) -> None:
        """Write what is queued, then end the thread. A redaction that does not return in time is abandoned."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(None if self._redact is None else patience_s)
            self._abandoned = self._thread.is_alive()
            if self._abandoned:
                log.error("replay.redaction does not return: %d waiting tokens are not logged", self._tokens)
            self._thread = None

    def _run(self) -> None:
        compute_alone()
        while not self._abandoned:
            with self._changed:
                self._changed.wait_for(self._is_due, self._patience())
                answers = self._take() if self._is_due() else []
                if not answers and not self._queue:
                    self._flushing = False
                    self._changed.notify_all()
                    if self._stopping:
                        return
            if answers:
                self._write(self._redacted(answers))
                answers.clear()  # else they stay in memory until the next ones come
                self.cpu_s = time.thread_time()

    def _count(self) -> None:
        """Count what waits. The caller holds the lock."""
        self._tokens = sum(map(len, self._queue))
        self._state_bytes = sum(answer.state_bytes for answer in self._queue)

    def _is_due(self) -> bool:
        if self._stopping or self._flushing or self._tokens >= self.config.shard_positions:
            return True
        return self._oldest_s is not None and self._clock() - self._oldest_s >= self.config.flush_s

    def _patience(self) -> float:
        """Return the seconds until the oldest answer has waited `replay.flush_s`."""
        if self._oldest_s is None:
            return self.config.flush_s
        return max(0.01, self.config.flush_s - (self._clock() - self._oldest_s))

    def _take(self) -> list[LoggedAnswer]:
        """Take about a shard's worth from the queue, in order."""
        taken, tokens = [], 0
        self._forgotten.clear()
        while self._queue and tokens < self.config.shard_positions:
            taken.append(self._queue.popleft())
            tokens += len(taken[-1])
        self._oldest_s = self._clock() if self._queue else None
        return taken

    def _redacted(self, answers: list[LoggedAnswer]) -> list[LoggedAnswer]:
        """Redact answers. A hook may be slow or hang, so only this thread waits for it."""
        if self._redact is None:
            return answers
        kept = []
        for answer in answers:
            try:
                cleared = redacted(answer, self._redact, self.replay.key.vocab_size)
            except (Exception, SystemExit) as error:
                log.error("an answer is not logged, replay.redaction failed: %s", _without_text(error))
                self.counters["errors"] += 1
                continue
            with self._changed:
                deleted = answer.tenant in self._forgotten
            if deleted or cleared is None:
                self.counters["dropped_deleted" if deleted else "redacted"] += 1
            else:
                kept.append(cleared)
        return kept

    def _write(self, answers: list[LoggedAnswer]) -> None:
        if self._abandoned:
            return
        try:
            written = self.replay.append(answers)
            self.counters["written"] += written
            self.counters["dropped_deleted"] += len(answers) - written
        except Exception as error:  # a full disk, above all. Serving goes on in any case.
            if not self.counters["dropped_disk"]:
                log.error("the replay log cannot be written, answers are dropped: %s", error)
            self.counters["dropped_disk"] += len(answers)
            if not isinstance(error, RunError):
                log.debug("while writing a shard", exc_info=True)
        finally:
            with self._changed:  # these answers counted as waiting until here
                self._count()


def _without_text(error: BaseException) -> str:
    """Describe a hook's exception by type and place. Its message may quote the text."""
    if isinstance(error, BadRedaction):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
