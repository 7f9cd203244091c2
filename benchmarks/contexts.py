"""Long contexts, and prompts that arrive beside decoding rows, in one process on this machine.

    python benchmarks/contexts.py --prompts math.jsonl [--draft RUN/draft] [--sections lengths,arrivals]

lengths    8 rows with so many cached tokens: tokens a second by fixed speculation lengths, taking turns step by step
arrivals   8 rows that decode while a prompt arrives every second: their time per token, beside that without arrivals,
           with prompts read whole and at the default pace (`engine.prefill_slowdown`), and the prompts' first token

Greedy. Writes `results/contexts_SECTION.json`, and a picture of the lengths.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy
import torch
from common import RESULTS, write_result
from matplotlib.figure import Figure
from sides import greedy, make_engine, read_prompts

from distillspec.config import TargetConfig
from distillspec.errors import RunError
from distillspec.files import write_png
from distillspec.models import LanguageModel, load_target
from distillspec.serving import Engine
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.requests import Request
from distillspec.serving.draft_loading import load_draft

ROWS, STEPS = 8, 24
LENGTHS = (256, 512, 1024, 2048, 4096)
SPECULATION = (0, 1, 2, 4)
SEGMENTS, SEGMENT_S, GOAL = 5, 6.0, 1.3
ANSWER = 1800  # tokens of a decoding row: more than a segment writes
PACES = {"whole": None, "paced": 0.3}  # as in conf/engine/default.yaml


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    machine = {"dtype": str(target.dtype), "threads": torch.get_num_threads()}
    for name in options.sections.split(","):
        write_result(
            f"contexts_{name}", {**machine, **{"lengths": lengths, "arrivals": arrivals}[name](options, target)}
        )


def lengths(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """Tokens a second by context and speculation length."""
    draft = load_draft(options.draft, target) if options.draft else None
    words = [token for prompt in read_prompts(options.prompts, target, 400) for token in prompt]
    by_length = {}
    for length in LENGTHS:
        settings = {"max_model_len": length + 512, "speculation_length": max(SPECULATION), "prefill_chunk": 2048}
        engine = make_engine(options, target, draft, ROWS, **settings)
        prompts = [list(islice(cycle(words[row * 997 :] + words), length)) for row in range(ROWS)]
        by_length[str(length)] = _by_speculation(engine, prompts, SPECULATION if draft is not None else (0,))
        engine.close()
    _plot({int(length): rates for length, rates in by_length.items()})
    return {"rows": ROWS, "context": by_length}


def _by_speculation(engine: Engine, prompts: Sequence[list[int]], speculation_lengths: Sequence[int]) -> dict[str, Any]:
    """Return tokens a second of the same running rows by speculation length."""
    for row, prompt in enumerate(prompts):
        engine.submit(Request(str(row), tuple(prompt), greedy(480)))
    while len(engine.sequences.decoding) < len(prompts):
        engine.step()
    rates: dict[int, list[float]] = {k: [] for k in speculation_lengths}
    written: dict[int, list[int]] = {k: [] for k in speculation_lengths}
    for step in range(STEPS + 2):
        for k in speculation_lengths if step % 2 else speculation_lengths[::-1]:
            engine.use_controller(FixedLength(k))
            started = time.perf_counter()
            output = engine.step()
            seconds = time.perf_counter() - started
            if step >= 2:
                written[k].append(sum(len(delta.token_ids) for delta in output.deltas))
                rates[k].append(written[k][-1] / seconds)
    plain = rates[0]
    return {
        str(k): {
            "tokens_per_s": statistics.fmean(length_rates),
            "gain": statistics.fmean(length_rates) / statistics.fmean(plain),
            "tokens_a_row": statistics.fmean(written[k]) / len(prompts),
        }
        for k, length_rates in rates.items()
    }


def _plot(by_length: dict[int, dict[str, Any]]) -> None:
    figure = Figure(figsize=(9, 3.4), dpi=120, layout="constrained")
    rates, gains = figure.subplots(1, 2)
    for k in next(iter(by_length.values())):
        label = "none" if k == "0" else f"{k} tokens"
        rates.plot(list(by_length), [by_k[k]["tokens_per_s"] for by_k in by_length.values()], marker="o", label=label)
        gains.plot(list(by_length), [by_k[k]["gain"] for by_k in by_length.values()], marker="o", label=label)
    rates.set(ylabel="tokens/s", title=f"{ROWS} rows")
    gains.set(ylabel="times no speculation", title="gain")
    for axes in (rates, gains):
        axes.set(xscale="log", xlabel="cached tokens a row")
        axes.set_xticks(list(by_length), [str(length) for length in by_length])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    rates.legend()
    write_png(RESULTS / "contexts_lengths.png", figure)


def arrivals(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """Quantiles of the decoding rows' time per token, with and without prompts that arrive."""
    prompts = read_prompts(options.prompts, target, ROWS + 200)
    by_pace = {}
    for name, share in PACES.items():
        settings = {"max_model_len": 2048, "speculation_length": 0, "prefill_slowdown": share}
        engine = make_engine(options, target, None, ROWS + 8, **settings)
        arriving = iter(prompts[ROWS:])
        alone, beside, first = [], [], []
        for _ in range(SEGMENTS):  # each over the same texts, begun anew
            alone += _segment(engine, prompts[:ROWS], iter(()))[0]
            times, firsts = _segment(engine, prompts[:ROWS], arriving)
            beside, first = beside + times, first + firsts
        quantiles = {side: _quantiles(step_times) for side, step_times in {"alone": alone, "beside": beside}.items()}
        ratios = {
            percentile: quantiles["beside"][percentile] / alone_ms
            for percentile, alone_ms in quantiles["alone"].items()
        }
        counts = {"steps": {"alone": len(alone), "beside": len(beside)}, "arrived": len(first)}
        by_pace[name] = {**quantiles, "ratio": ratios, "first_token": _quantiles(first), **counts}
        engine.close()
    met = {percentile: by_pace["paced"]["ratio"][percentile] <= GOAL for percentile in ("p95", "p99")}
    return {"rows": ROWS, "a_second": 1, "seconds": SEGMENTS * SEGMENT_S, **by_pace, "goal": GOAL, "met": met}


def _segment(
    engine: Engine, prompts: Sequence[list[int]], arriving: Iterator[list[int]]
) -> tuple[list[float], list[float]]:
    """Let rows decode for a while, with a prompt a second while there are some. The engine is idle before and after.

    Returns:
        Seconds of each step, and to the first token of each prompt that arrived and was read.

    Raises:
        RunError: a row did not decode in one of the steps.
    """
    rows = [f"row{row}" for row in range(len(prompts))]
    for row, prompt in zip(rows, prompts, strict=True):
        engine.submit(Request(row, tuple(prompt), greedy(ANSWER)))
    while len(engine.sequences.decoding) < len(rows):
        engine.step()
    measured = _steps(engine, len(rows), arriving)
    for row in rows:
        engine.abort(row)
    while engine.has_work:  # prompts that arrived last
        engine.step()
    return measured


def _steps(engine: Engine, rows: int, arriving: Iterator[list[int]]) -> tuple[list[float], list[float]]:
    """Run the steps of a segment. Prompts ask for one token, so that they never decode."""
    started = before = time.perf_counter()
    times: list[float] = []
    first: list[float | None] = []
    due = started
    while before - started < SEGMENT_S:
        if before >= due and (prompt := next(arriving, None)) is not None:
            engine.submit(Request(f"new{before}", tuple(prompt), greedy(1)))
            due += 1.0
        output = engine.step()
        now = time.perf_counter()
        decoding = 0 if output.result is None else len(output.result.view.rows)
        if decoding != rows:
            raise RunError(f"{decoding} of {rows} rows decoded in a step; make ANSWER, {ANSWER} tokens, longer")
        first += [done.stats.time_to_first_token_s for done in output.finished]
        times.append(now - before)
        before = now
    return times, [seconds for seconds in first if seconds is not None]


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return medians and tails in milliseconds."""
    return {f"p{percentile}": 1e3 * float(numpy.quantile(seconds, percentile / 100)) for percentile in (50, 95, 99)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sections", default="lengths,arrivals")
    parser.add_argument("--compile", action="store_true", help="compile passes first")
    return parser.parse_args()


if __name__ == "__main__":
    main()
