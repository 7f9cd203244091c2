"""Seconds in which an engine's host works while the device runs the target's pass."""

from __future__ import annotations

import threading
from statistics import median

from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.server.bridge.engine_thread import EngineThread, StepReport

STEPS, WARM_UP = 40, 8
WAIT_S = 120.0


def overlapped_seconds(engine: Engine, batch: int) -> float:
    """Return the host's seconds beside the device in a plain step of `batch` greedy rows, the median.

    The steps run as in a server, in a thread of their own, with a listener that reads what was written. 0 on CPUs.
    """
    engine.use_controller(FixedLength(0))
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    for row in range(batch):
        engine.submit(Request(f"row-{row}", tuple(range(5, 69)), params))
    seconds = list[float]()
    done = list[str]()
    ended = threading.Event()

    def take(report: StepReport) -> None:
        result, output = report.output.result, report.output
        if result is not None and result.rows and not result.prefill_tokens:
            seconds.append(result.overlapped_s)
        done.extend(finished.request_id for finished in output.finished)
        if len(done) == batch:
            ended.set()

    thread = EngineThread(engine, take, lambda reason: ended.set())
    thread.start()
    ended.wait(WAIT_S)
    thread.stop()
    return median(seconds[WARM_UP:] or seconds or [0.0])
