"""Drive an engine in this process with a load, and record requests and steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from distillspec.serving.base.requests import Request, RequestOutput
from distillspec.serving.bench.load import Arrival
from distillspec.serving.bench.records import LoadRecord, RequestRecord
from distillspec.serving.bench.step_record import StepRecord
from distillspec.serving.engine import Engine
from distillspec.types import Prompt


def drive(
    engine: Engine,
    arrivals: Sequence[Arrival[Prompt]],
    *,
    sleep: Callable[[float], None] = time.sleep,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> LoadRecord:
    """Submit every arrival at its time, and step until all are answered.

    Args:
        engine: an idle one. Times are on its clock.
        arrivals: the load.
        sleep: passes time while there is nothing to do.
        on_progress: called with the number of ended requests.
    """
    clock = engine.clock
    waiting = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
    sent: dict[str, Arrival[Prompt]] = {}
    requests: list[RequestRecord] = []
    steps: list[StepRecord] = []
    failed, start = 0, clock()
    while waiting or engine.has_work:
        now = clock() - start
        while waiting and waiting[0].at_s <= now:
            arrival = waiting.popleft()
            name = f"load-{len(sent)}"
            sent[name] = arrival
            engine.submit(Request(name, arrival.prompt.token_ids, arrival.params))
        if not engine.has_work:
            sleep(max(0.0, waiting[0].at_s - now))
            continue
        output = engine.step()
        if output.result is not None:
            steps.append(StepRecord.of(output.result, now))
        for finished in output.finished:
            if finished.finish_reason == "error":
                failed += 1
            else:
                requests.append(_request_record(finished, sent[finished.request_id], start))
        if output.finished:
            on_progress(len(requests) + failed)
    return LoadRecord(tuple(requests), tuple(steps), clock() - start, failed)


def _request_record(output: RequestOutput, arrival: Arrival[Prompt], start: float) -> RequestRecord:
    stats = output.stats
    assert stats.first_token_s is not None
    assert stats.finished_s is not None
    return RequestRecord(
        id=output.request_id,
        domain=arrival.prompt.domain,
        arrived_s=arrival.at_s,
        first_token_s=stats.first_token_s - start,
        finished_s=stats.finished_s - start,
        prompt_tokens=len(output.prompt_ids),
        output_tokens=len(output.token_ids),
        proposed=stats.proposed,
        accepted=stats.accepted,
        accepted_by_source=stats.accepted_by_source,
    )
