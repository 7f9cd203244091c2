"""The engine's side of the log: what target and draft thought, taken in the step that thought it.

One packed read from the device a step, for the rows of requests that are logged; nothing for the others. An answer is
gathered in memory until it ends, and only then queued; serving never waits for any of it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillspec.config import ReplayConfig
from distillspec.recording import top_signal
from distillspec.serving.commit import Emission
from distillspec.serving.online.records import (
    ACCEPTED,
    BONUS,
    PLAIN,
    REJECTED,
    LoggedAnswer,
    share_of,
    split_of,
)
from distillspec.serving.online.signal import Drafted, Packed, pack, read
from distillspec.serving.requests import CompletionOutput, Request, RequestOutput
from distillspec.serving.transfer import rows_of
from distillspec.types import TeacherSignal

log = logging.getLogger(__name__)

RECENT = 512  # requests that a tenant's part of the log is counted over


@dataclass
class _Growing:
    """An answer in the making."""

    request: Request
    pieces: list[tuple[Packed, int, int]] = field(default_factory=list)  # rows first…last of a step's read
    drafted: list[Drafted] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    version_of: list[int] = field(default_factory=list)


class ReplayTap:
    """An engine's `Observer`, and what is told of finished requests.

    Args:
        queue: takes a whole answer, at once; False where it is full.
        clock: seconds since the epoch, for the records.
        seed: of the draws from the target's tail.
        is_full: whether what is logged now takes the place of something else in the log.
    """

    def __init__(
        self,
        config: ReplayConfig,
        queue: Callable[[LoggedAnswer], bool],
        clock: Callable[[], float],
        seed: int = 0,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.queue, self.clock, self._is_full = config, queue, clock, is_full
        self.paused = False
        self.counters: Counter[str] = Counter()
        self._growing: dict[tuple[str, int], _Growing] = {}
        self._skipped: set[tuple[str, int]] = set()  # decided against, or dropped on the way
        self._waiting_tokens = 0
        self._cap = TenantCap(config.tenant_share)
        self._luck = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()  # the engine takes it once a step; tenants are forgotten by other threads

    def __call__(self, emissions: Sequence[Emission], logits: Tensor) -> None:
        """See `serving.commit.Observer`. Never raises: a log is not worth a request."""
        with self._lock:
            try:
                logged = [(e, growing) for e in emissions if e.rows and (growing := self._of(e)) is not None]
                if logged:
                    self._record(logged, logits)
            except Exception:
                self.counters["errors"] += 1
                self._drop_all([(e.sequence.request.id, e.sequence.index) for e in emissions])
                log.exception("a step is not logged")

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """Queue what ended; called after every step with what it finished."""
        with self._lock:
            for output in outputs:
                for completion in output.completions:
                    try:
                        self._finish(output, completion)
                    except Exception:
                        self.counters["errors"] += 1
                        log.exception("an answer is not logged")

    def forget_tenant(self, tenant: str) -> None:
        """Drop what a tenant's requests have in memory; the rest of them is not logged either.

        From any thread. On return all that ended before is queued, so that whoever empties the queue next has it.
        """
        with self._lock:
            self._drop_all([key for key, growing in self._growing.items() if growing.request.tenant == tenant])

    def _of(self, emission: Emission) -> _Growing | None:
        """The answer as gathered so far; None where it is not logged."""
        sequence = emission.sequence
        key = (sequence.request.id, sequence.index)
        if key in self._skipped:
            return None
        if key not in self._growing:
            # An answer whose beginning was not seen (logging began later) cannot be learnt from.
            if sequence.output_length != len(emission.rows) or not self._wanted(sequence.request):
                self._skipped.add(key)
                return None
            self._growing[key] = _Growing(sequence.request)
        if self._waiting_tokens + len(emission.rows) > self.config.max_waiting:
            self.counters["dropped_memory"] += 1
            self._drop_all([key])
            return None
        return self._growing[key]

    def _wanted(self, request: Request) -> bool:
        config = self.config
        if self.paused or not request.log or request.tenant in config.exclude_tenants:
            return False
        if share_of(request.id, "log") >= config.share:
            return False
        fair = self._cap.admits(request.tenant)
        if not fair and self._is_full():
            self.counters["capped"] += 1
            return False
        return True

    def _record(self, logged: Sequence[tuple[Emission, _Growing]], logits: Tensor) -> None:
        rows = [row for emission, _ in logged for row in emission.rows]
        drafted = [drafted_at(emission, place) for emission, _ in logged for place in range(len(emission.rows))]
        trees = [emission.tree for emission, _ in logged for _ in emission.rows]
        chosen = rows_of(logits, rows)
        packed = pack(top_signal(chosen, self.config.entries, self._uniforms(len(rows), logits)), drafted, trees)
        first = 0
        for emission, growing in logged:
            last = first + len(emission.rows)
            growing.pieces.append((packed, first, last))
            growing.drafted += drafted[first:last]
            version = emission.draft_version
            if version not in growing.versions:
                growing.versions.append(version)
            growing.version_of += [growing.versions.index(version)] * len(emission.rows)
            self._waiting_tokens += len(emission.rows)
            first = last

    def _uniforms(self, rows: int, logits: Tensor) -> Tensor | None:
        """What the tail's draws are made of; from a stream of their own, so that logging changes nobody's tokens."""
        if self.config.tail_samples == 0:
            return None
        return torch.rand(rows, self.config.tail_samples, generator=self._luck).to(logits.device)

    def _finish(self, output: RequestOutput, completion: CompletionOutput) -> None:
        key = (output.request_id, completion.index)
        growing = self._growing.pop(key, None)
        self._skipped.discard(key)
        if growing is None:
            return
        self._waiting_tokens -= len(growing.drafted)
        if completion.error is not None or len(growing.drafted) != len(completion.token_ids):
            self.counters["incomplete"] += 1
            return
        taken = self.queue(self._answer(growing, completion))
        self.counters["logged" if taken else "dropped_queue"] += 1

    def _answer(self, growing: _Growing, completion: CompletionOutput) -> LoggedAnswer:
        request = growing.request
        all_rows = read(growing.pieces)
        draws = (all_rows.tail_ids, all_rows.tail_logprobs) if self.config.tail_samples else ()
        return LoggedAnswer(
            request_id=request.id,
            index=completion.index,
            tenant=request.tenant,
            domain=request.domain,
            policy=request.params.policy,
            time_s=self.clock(),
            finished=completion.finish_reason == "stop",
            split=split_of(request.id, self.config.held_out),
            prompt_ids=request.prompt_ids,
            response_ids=completion.token_ids,
            signal=TeacherSignal("topk", all_rows.ids, all_rows.logprobs, all_rows.tail, *draws),
            outcomes=torch.tensor([d.outcome for d in growing.drafted], dtype=torch.uint8),
            draft_tokens=torch.tensor([d.token for d in growing.drafted], dtype=torch.int32),
            draft_probs=all_rows.draft_probs,
            draft_entropies=all_rows.draft_entropies,
            draft_versions=tuple(growing.versions),
            version_of=torch.tensor([min(v, 255) for v in growing.version_of], dtype=torch.uint8),
        )

    def _drop_all(self, keys: Sequence[tuple[str, int]]) -> None:
        for key in keys:
            growing = self._growing.pop(key, None)
            if growing is not None:
                self._waiting_tokens -= len(growing.drafted)
            self._skipped.add(key)


class TenantCap:
    """Keeps one tenant among several from filling the log: of the newest requests it may have `share`.

    A tenant's limit is `share` of all recent requests, not a multiple of what others sent: one request of another
    tenant must not silence a large one. What the others do not use stays free for what is in the log already.
    """

    def __init__(self, share: float, recent: int = RECENT) -> None:
        self.share = share
        self._recent: deque[str] = deque(maxlen=recent)
        self._counts: Counter[str] = Counter()
        self._credit: dict[str, float] = {}  # of tenants that ask for more than their part

    def admits(self, tenant: str) -> bool:
        """Whether another request of this tenant may be logged. A tenant that is alone may fill the log."""
        self._count(tenant)
        share = max(self.share, 1 / len(self._counts))
        part = share * len(self._recent) / self._counts[tenant]
        if part >= 1:
            self._credit.pop(tenant, None)
            return True
        credit = self._credit.get(tenant, 0.0) + part
        self._credit[tenant] = credit - (credit >= 1)
        return credit >= 1

    def _count(self, tenant: str) -> None:
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
                self._credit.pop(oldest, None)
        self._recent.append(tenant)
        self._counts[tenant] += 1


def drafted_at(emission: Emission, place: int) -> Drafted:
    """What the draft model drafted where the emission's token `place` stands; a lookup's tokens are not its work."""
    tree, path = emission.tree, emission.path
    if len(tree) == 0 or tree.source == "lookup":
        return Drafted(PLAIN)
    parent = path[place - 1] if place else -1
    row = None if tree.rows is None else tree.rows.get(parent)
    if place < len(path):
        return Drafted(ACCEPTED, tree.tokens[path[place]], row)
    children = tree.children.get(parent)
    return Drafted(REJECTED, tree.tokens[children[0]], row) if children else Drafted(BONUS)


def acceptance_in(emission: Emission) -> tuple[int, int]:
    """The draft model's tokens judged and accepted in one window, stop token or not; a lookup's are not its work."""
    tree, path = emission.tree, emission.path
    if len(tree) == 0 or tree.source == "lookup":
        return 0, 0
    rejected = path[-1] in tree.children if path else True
    return len(path) + int(rejected), len(path)
