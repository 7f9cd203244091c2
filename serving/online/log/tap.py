"""Replay tap: the engine's side of the log. It records the signal of target and draft in the step that computed it.

One packed read from the device a step, for the rows of logged requests only. An answer is gathered in memory until it
ends, then queued. Serving never waits for it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillspec.config import ReplayConfig
from distillspec.config.engine import EXACT
from distillspec.serving.base.requests import CompletionOutput, Request, RequestOutput
from distillspec.serving.online.log.outcomes import drafted_at, rejected_in
from distillspec.serving.online.log.records import PLAIN, LoggedAnswer, share_of
from distillspec.serving.online.log.rejected_nodes import ENTRIES, RejectedNode, RejectedNodes, collected
from distillspec.serving.online.log.signal import LoggedDraft, Packed, read, record
from distillspec.serving.online.log.tenant_cap import TenantCap
from distillspec.serving.step.commit import Emission
from distillspec.signals import TeacherSignal
from distillspec.types import RecordedStates, StateRequest

log = logging.getLogger(__name__)


@dataclass
class _Running:
    """An answer that is not finished, as gathered so far."""

    request: Request
    pieces: list[tuple[Packed, int, int]] = field(default_factory=list)  # rows first…last of a step's read
    drafted: list[LoggedDraft] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    version_of: list[int] = field(default_factory=list)
    states: RecordedStates | None = None
    nodes: list[RejectedNode] = field(default_factory=list)
    node_pieces: list[tuple[Packed, int, int]] = field(default_factory=list)


class ReplayTap:
    """An engine's `Observer` that logs answers.

    Args:
        queue: takes a finished answer without waiting. Returns False if it is full.
        clock: seconds since the epoch, for the records.
        is_full: returns True if new answers replace others in the log.
        verification: of the engine. The text of a lossy one is not the target's, and judges no draft.
        device: of the target.
        keeps_rejected: also keep what the target gave behind drafted tokens that it did not accept.
    """

    def __init__(
        self,
        config: ReplayConfig,
        queue: Callable[[LoggedAnswer], bool],
        clock: Callable[[], float],
        is_full: Callable[[], bool] = lambda: False,
        verification: str = "exact",
        device: str = "cpu",
        keeps_rejected: bool = False,
    ) -> None:
        self.config = config
        self.queue = queue
        self.clock = clock
        self.is_full = is_full
        self._exact = verification in EXACT
        self._precision, self._keeps_rejected = config.state_precision(device), keeps_rejected
        self.excluded: set[str] = set()  # tenants, beside those of the settings
        self.paused = False
        self.wanting = False  # text is waited for: all requests are logged, not only `replay.share` of them
        self.counters: Counter[str] = Counter()
        self.cpu_s = 0.0  # processor time of recording, an upper bound: all cores of the engine's thread count as busy
        self._running: dict[tuple[str, int], _Running] = {}
        self._skipped: set[tuple[str, int]] = set()  # not to be logged, or dropped
        self.waiting_tokens = 0
        self._cap = TenantCap(config.tenant_share)
        self._forgotten_s: dict[str, float] = {}  # by tenant, see `forget_tenant`
        self._lock = threading.Lock()  # the engine takes it once a step, `forget_tenant` from other threads

    def __call__(self, emissions: Sequence[Emission], logits: Tensor) -> None:
        """Record a step's emitted tokens. See `serving.step.commit.Observer`. Never raises."""
        with self._lock, self._timed():
            try:
                logged = [(e, answer) for e in emissions if e.rows and (answer := self._find(e)) is not None]
                if logged:
                    self._record(logged, logits)
                    if self._keeps_rejected:
                        self._record_rejected(logged, logits)
            except Exception:
                self.counters["errors"] += 1
                self._drop_all([(e.sequence.request.id, e.sequence.index) for e in emissions])
                log.exception("a step is not logged")

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """Queue the answers that a step finished."""
        with self._lock, self._timed():
            for output in outputs:
                for completion in output.completions:
                    try:
                        self._finish(output, completion)
                    except Exception:
                        self.counters["errors"] += 1
                        log.exception("an answer is not logged")

    def forget_tenant(self, tenant: str, submitted_until_s: float = -math.inf) -> None:
        """Drop a tenant's running answers. The rest of them is not logged either.

        Any thread may call it. On return every answer that ended before is queued.

        Args:
            submitted_until_s: on the engine's clock. Requests that were submitted by then and have no token yet are not
                logged either.
        """
        with self._lock:
            self._forgotten_s[tenant] = max(submitted_until_s, self._forgotten_s.get(tenant, -math.inf))
            self._drop_all([key for key, answer in self._running.items() if answer.request.tenant == tenant])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.thread_time()
        yield
        self.cpu_s += (time.thread_time() - began_s) * torch.get_num_threads()

    @property
    def tracked(self) -> int:
        """Number of unfinished answers that are gathered or left out."""
        return len(self._running) + len(self._skipped)

    def _find(self, emission: Emission) -> _Running | None:
        """Return the answer as gathered so far. None: it is not logged."""
        sequence = emission.sequence
        key = (sequence.request.id, sequence.index)
        if key in self._skipped:
            return None
        if key not in self._running:
            # An answer whose first tokens were not recorded (logging began later) cannot be learnt from.
            begun, request = sequence.output_length != len(emission.rows), sequence.request
            deleted = sequence.stats.submitted_s <= self._forgotten_s.get(request.tenant, -math.inf)
            if begun or deleted or not self._is_logged(request):
                self._skipped.add(key)
                return None
            self._running[key] = _Running(request)
        if self.waiting_tokens + len(emission.rows) > self.config.max_waiting:
            self.counters["dropped_memory"] += 1
            self._drop_all([key])
            return None
        return self._running[key]

    @property
    def left_out(self) -> set[str]:
        """Tenants of which nothing is logged, by the settings or by hand."""
        return {*self.config.exclude_tenants, *self.excluded}

    def admits(self, tenant: str) -> bool:
        """Return True if answers of a tenant may be kept now. Any thread may ask."""
        return not self.paused and tenant not in self.left_out

    def _is_logged(self, request: Request) -> bool:
        config = self.config
        if not request.log or not self.admits(request.tenant):
            return False
        if not self.wanting and share_of(request.id, "log") >= config.share:
            return False
        fair = self._cap.admits(request.tenant)
        if not fair and self.is_full():
            self.counters["capped"] += 1
            return False
        return True

    def _record(self, logged: Sequence[tuple[Emission, _Running]], logits: Tensor) -> None:
        rows = [row for emission, _ in logged for row in emission.rows]
        drafted = [drafted_at(emission, index) for emission, _ in logged for index in range(len(emission.rows))]
        tokens = [token for emission, _ in logged for token in emission.sequence.tokens[-len(emission.rows) :]]
        heat = [self._temperature(answer.request) for emission, answer in logged for _ in emission.rows]
        packed = record(logits, rows, tokens, heat, drafted, self.config.entries)
        first = 0
        for emission, answer in logged:
            last = first + len(emission.rows)
            answer.pieces.append((packed, first, last))
            answer.drafted += [each.told for each in drafted[first:last]]
            version = emission.draft_version
            if version not in answer.versions:
                answer.versions.append(version)
            answer.version_of += [answer.versions.index(version)] * len(emission.rows)
            self.waiting_tokens += len(emission.rows)
            first = last
            if emission.sequence.finish_reason is not None:
                answer.states = self._states(emission)

    def _record_rejected(self, logged: Sequence[tuple[Emission, _Running]], logits: Tensor) -> None:
        rejected = [(rejected_in(emission), answer) for emission, answer in logged]
        rows = [node.row for nodes, _ in rejected for node in nodes]
        if not rows:
            return
        count, entries = len(rows), min(ENTRIES, self.config.entries)
        packed = record(logits, rows, [0] * count, [None] * count, [LoggedDraft(PLAIN)] * count, entries)
        first = 0
        for nodes, answer in rejected:
            before, last = len(answer.nodes), first + len(nodes)
            answer.nodes += [node._replace(parent=node.parent + before if node.parent >= 0 else -1) for node in nodes]
            answer.node_pieces.append((packed, first, last))
            first = last

    def _states(self, emission: Emission) -> RecordedStates | None:
        """Return the target's states of an answer that has ended."""
        if self._precision is None or (states := emission.states()) is None:
            return None
        return StateRequest(emission.cache.state_ids, self._precision).record(states)

    def _temperature(self, request: Request) -> float | None:
        """Return a request's temperature, None if its text judges no draft: it is not the policy's own.

        Seeded requests count as if they had no seed: their text is a draw from the policy too.
        """
        exact = self._exact or not request.params.draws
        return request.params.temperature if exact and request.params.only_policy else None

    def _finish(self, output: RequestOutput, completion: CompletionOutput) -> None:
        key = (output.request_id, completion.index)
        answer = self._running.pop(key, None)
        self._skipped.discard(key)
        if answer is None:
            return
        self.waiting_tokens -= len(answer.drafted)
        if completion.error is not None or len(answer.drafted) != len(completion.token_ids):
            self.counters["incomplete"] += 1
            return
        is_queued = self.queue(self._answer(answer, completion))
        self.counters["logged" if is_queued else "dropped_queue"] += 1

    def _answer(self, answer: _Running, completion: CompletionOutput) -> LoggedAnswer:
        request = answer.request
        all_rows = read(answer.pieces)
        return LoggedAnswer(
            request_id=request.id,
            index=completion.index,
            tenant=request.tenant,
            domain=request.domain,
            policy=request.params.policy,
            time_s=self.clock(),
            finished=completion.finish_reason == "stop",
            prompt_ids=request.prompt_ids,
            response_ids=completion.token_ids,
            signal=TeacherSignal("topk", all_rows.ids, all_rows.logprobs, all_rows.tail),
            policy_logprobs=all_rows.policy_logprobs,
            policy_log_z=all_rows.policy_log_z,
            outcomes=torch.tensor([d.outcome for d in answer.drafted], dtype=torch.uint8),
            draft_tokens=torch.tensor([d.token for d in answer.drafted], dtype=torch.int32),
            draft_probs=all_rows.draft_probs,
            draft_entropies=all_rows.draft_entropies,
            draft_versions=tuple(answer.versions),
            version_of=torch.tensor([min(v, 255) for v in answer.version_of], dtype=torch.uint8),
            states=answer.states,
            nodes=_rejected(answer),
        )

    def _drop_all(self, keys: Sequence[tuple[str, int]]) -> None:
        for key in keys:
            answer = self._running.pop(key, None)
            if answer is not None:
                self.waiting_tokens -= len(answer.drafted)
            self._skipped.add(key)


def _rejected(answer: _Running) -> RejectedNodes | None:
    """Return the drafted tokens of an answer that were not accepted, None without any."""
    if not answer.nodes:
        return None
    rows = read(answer.node_pieces)
    return collected(answer.nodes, TeacherSignal("topk", rows.ids, rows.logprobs, rows.tail))
