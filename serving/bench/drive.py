"""Send a load to an engine in this process and write down what happens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from distillspec.serving.bench.load import Arrival
from distillspec.serving.bench.records import LoadRecord, RequestRecord
from distillspec.serving.engine import Engine
from distillspec.serving.requests import Request, RequestOutput
from distillspec.serving.step_record import StepRecord
from distillspec.types import Prompt


def drive(
    engine: Engine,
    arrivals: Seq[Arrival[Prompt]],
    *,
    sleep: Callable[[float], None] = time.sleep,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> LoadRecord:
    """Submit every arrival at its time, step until all are answered.

    The engine's own clock is used, and must be idle; `sleep` passes the time while there is nothing to do.
    """
    clock = engine.core.clock
    waiting = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
    sent: dict[str, Arrival[Prompt]] = {}
    requests: list[RequestRecord] = []
    steps: list[StepRecord] = []
    failed, begun = 0, clock()
    while waiting or engine.has_work:
        now = clock() - begun
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
                requests.append(_request_record(finished, sent[finished.request_id], begun))
        if output.finished:
            on_progress(len(requests) + failed)
    return LoadRecord(tuple(requests), tuple(steps), clock() - begun, failed)


def _request_record(output: RequestOutput, arrival: Arrival[Prompt], begun: float) -> RequestRecord:
    stats = output.stats
    assert stats.first_token_s is not None
    assert stats.finished_s is not None
    return RequestRecord(
        id=output.request_id,
        domain=arrival.prompt.domain,
        arrived_s=arrival.at_s,
        first_token_s=stats.first_token_s - begun,
        finished_s=stats.finished_s - begun,
        prompt_tokens=len(output.prompt_ids),
        output_tokens=len(output.token_ids),
        proposed=stats.proposed,
        accepted=stats.accepted,
    )
