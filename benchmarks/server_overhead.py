"""Measure what HTTP costs: tokens a second of 8 streams, and the first token of an idle server.

    python benchmarks/server_overhead.py --target smollm2 --rounds 8

Both sides take turns: the engine alone in this process (`generate`), and `distill serve` with the same settings in
another. The client is a bare socket: a heavier one would take processor time from the server on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import numpy
import psutil
from common import write_result

from distillspec.recipes.served import Served, served
from distillspec.serving import Engine, Request, SamplingParams

GOALS = {"tokens_per_s_ratio": 0.95, "first_token_added_s": 0.005}
SETTINGS: dict[str, Any] = {"max_slots": 8, "max_model_len": 512, "compile": False}
PROMPTS = [f"{number} things that everybody should know about the sea:" for number in range(3, 11)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--first-tokens", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--name", default="server_overhead")
    options = parser.parse_args()
    words = [f"engine.{name}={value}" for name, value in SETTINGS.items()]
    engine = Engine.from_pretrained(options.target, **SETTINGS)
    try:
        with served(f"target={options.target}", *words) as server:
            result = measure(engine, server, options)
    finally:
        engine.close()
    write_result(options.name, result)


def measure(engine: Engine, server: Served, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result: throughput and first tokens of both sides."""
    alone, through, loop_s = throughput(engine, server, options)
    first_alone, first_through = first_tokens(engine, server, options)
    return {
        "target": options.target,
        "streams": len(PROMPTS),
        "max_tokens": options.max_tokens,
        "engine_tokens_per_s": alone,
        "http_tokens_per_s": through,
        "tokens_per_s_ratio": spread(numpy.divide(through, alone)),
        "event_loop_cpu_s_per_token": spread(loop_s),
        "engine_first_token_s": spread(first_alone),
        "http_first_token_s": spread(first_through),
        "first_token_added_s": spread(numpy.subtract(first_through, first_alone)),
        "goals": GOALS,
    }


def throughput(
    engine: Engine, server: Served, options: argparse.Namespace
) -> tuple[list[float], list[float], list[float]]:
    """Measure tokens a second of the engine and of the server, and the event loop's seconds a token, by round."""
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    alone, through, loop_s = [], [], []
    tokens = len(PROMPTS) * options.max_tokens
    for round_ in range(options.rounds + 1):
        started_s = time.perf_counter()
        engine.generate(PROMPTS, params)
        middle_s = time.perf_counter()
        cpu_before_s = loop_cpu_s(server)
        asyncio.run(all_streams(server, options.target, options.max_tokens))
        if round_:  # the first one warms both up
            alone.append(tokens / (middle_s - started_s))
            through.append(tokens / (time.perf_counter() - middle_s))
            loop_s.append((loop_cpu_s(server) - cpu_before_s) / tokens)
    return alone, through, loop_s


def first_tokens(engine: Engine, server: Served, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Measure the seconds to the first token of the engine and of the server, in turn. Two of each warm up."""
    seconds = [
        (first_token_alone(engine, number), asyncio.run(stream(server, options.target, PROMPTS[0], 4)))
        for number in range(options.first_tokens + 2)
    ]
    return [alone for alone, _ in seconds[2:]], [through for _, through in seconds[2:]]


def spread(values: Any) -> dict[str, float]:
    """Return the median and its 95 % percentile bootstrap interval."""
    values = numpy.asarray(values)
    draws = numpy.median(numpy.random.default_rng(0).choice(values, (2000, len(values))), axis=1)
    low, high = numpy.quantile(draws, (0.025, 0.975))
    return {"median": float(numpy.median(values)), "low": float(low), "high": float(high)}


def loop_cpu_s(server: Served) -> float:
    """Return the processor time of the server's event loop so far. It does not depend on the machine's other load."""
    main = next(thread for thread in psutil.Process(server.process.pid).threads() if thread.id == server.process.pid)
    return main.user_time + main.system_time


def first_token_alone(engine: Engine, number: int) -> float:
    """Measure the seconds from submission to the first token, on an idle engine."""
    started_s = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.submit(Request(f"first-{number}", engine.encode(PROMPTS[0]), params))
    first = None
    while engine.has_work:
        if any(delta.text for delta in engine.step().deltas) and first is None:  # a client sees text
            first = time.perf_counter() - started_s
    assert first is not None
    return first


async def all_streams(server: Served, model: str, max_tokens: int) -> None:
    await asyncio.gather(*(stream(server, model, prompt, max_tokens) for prompt in PROMPTS))


async def stream(server: Served, model: str, prompt: str, max_tokens: int) -> float:
    """Read a streamed completion to its end. Return the seconds until its first event."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    raw = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    started_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(*server.host_and_port)
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    first, last = None, b""
    while piece := await reader.read(1 << 16):
        last = (last + piece)[-100:]
        if first is None and b"data: {" in piece:
            first = time.perf_counter() - started_s
    writer.close()
    assert first is not None
    assert b"data: [DONE]" in last
    return first


if __name__ == "__main__":
    main()
