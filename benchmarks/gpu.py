"""The serving engine on an accelerator, with Llama-shaped models of random bfloat16 weights.

    python benchmarks/gpu.py [--shapes 1b,8b] [--minutes 8] [--output results]

bandwidth   no speculation, batch 1: weight bytes read a second against the measured memory bandwidth (70 and 85 %)
verify      passes over 1 … 64 drafted tokens a row, chains and trees, against one over none (four: ≤ 1.1 at batch 1)
kernels     the attention of all layers: trees against chains of as many tokens
host        wall seconds of a step less the device's own work in it (< 0.3 ms), what else the host does while the
            device computes, and where else than in its read it waits
synthetic   speed-up when drafted tokens stand with a set probability α: over α, length and batch

Runs unattended and prints tables at the end. Nothing is begun after `--minutes`: what is left out is named.
`--compile` compiles passes before they are recorded: run it once with and once without.
`--shapes tiny --device cpu` runs the same code anywhere, to see that it works. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from bandwidth import read_bytes
from common import write_result
from gpu_models import random_model
from gpu_passes import attention_seconds, copy_bandwidth, pass_seconds, wait
from overlap import overlapped_seconds
from rich.console import Console
from rich.table import Table
from waits import hidden_waits

from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.decoding.synthetic import SyntheticAcceptance

DRAFT_SHARE = 16  # the draft has this fraction of the target's layers, at least one
GOALS = {"bandwidth": {"1b": 0.7, "8b": 0.85}, "verify": 1.1, "host_ms": 0.3}
ALPHAS, LENGTHS, BATCHES = (0.5, 0.7, 0.9), (1, 2, 4, 6), (1, 8, 32)
CONTEXT, NEW_TOKENS, ROUNDS = 64, 64, 3
NODES = (1, 2, 4, 8, 16, 32, 64)  # drafted tokens a row
DRAFTED = 4  # of which the goal of `verify` is
ROWS = (1, 8)
LEFT_OUT = "left out: no time"
CHECKS = (  # section, words, keys of the figure and of its goal
    ("bandwidth", "share of bandwidth", "share", "goal"),
    ("verify", "5 tokens / 1 token", "beta", "goal"),
    ("host", "host ms a step", "worst_ms", "goal"),
    ("host", "ms beside the device", "overlapped_worst_ms", ""),
)
T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """One target with its draft on a device, whether their passes are compiled, and until when to measure."""

    name: str
    target: LanguageModel
    draft: LanguageModel
    compiled: bool
    deadline: float

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def in_time(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items to measure, until the time is up."""
        for item in items:
            if self.late:
                return
            yield item

    @contextmanager
    def engine(
        self, batch: int, draft: LanguageModel | None = None, sampler: SyntheticAcceptance | None = None
    ) -> Iterator[Engine]:
        settings = EngineSettings(max_slots=batch, max_model_len=512, prefix_reuse=False, compile=self.compiled)
        engine = Engine(self.target, draft, settings, controller=FixedLength(max(LENGTHS)), sampler=sampler)
        try:
            yield engine
        finally:
            engine.close()


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    deadline = time.monotonic() + 60 * options.minutes
    result: dict[str, Any] = {"device": _device_name(device), "bandwidth_gb_s": copy_bandwidth(device) / 1e9}
    for name in options.shapes.split(","):
        result[name] = dict.fromkeys([section.__name__ for section in SECTIONS], LEFT_OUT)
        if time.monotonic() > deadline:
            continue
        draft = random_model(name, device, DRAFT_SHARE)
        bench = Bench(name, random_model(name, device), draft, options.compile, deadline)
        for section in bench.in_time(SECTIONS):
            result[name][section.__name__] = section(bench, result)
        del bench, draft
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.output:
        write_result(f"{options.output}{'_compiled' if options.compile else ''}", result)
    _show(result, options.shapes.split(","))


def bandwidth(bench: Bench, result: dict[str, Any]) -> dict[str, Any] | str:
    """Bytes of weights read a second in plain decoding at batch 1, as a share of what a copy reaches."""
    with bench.engine(1) as engine:
        rates = [_decode_rate(engine, 1, 0) for _ in bench.in_time(range(ROUNDS))]
    if not rates:
        return LEFT_OUT
    rate = statistics.median(rates)
    share = rate * read_bytes(bench.target) / (1e9 * result["bandwidth_gb_s"])
    goal = GOALS["bandwidth"].get(bench.name)
    return {"tokens_per_s": rate, "share": share, "goal": goal, "met": None if goal is None else share >= goal}


def verify(bench: Bench, result: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a pass by drafted tokens a row, chains and trees, relative to none, for one row and eight."""
    by_rows: dict[str, Any] = {}
    for batch in bench.in_time(ROWS):
        with bench.engine(batch) as engine:
            seconds = {
                kind: {n: pass_seconds(engine, batch, n, tree=kind == "tree") for n in bench.in_time(nodes)}
                for kind, nodes in (("chain", (0, *NODES)), ("tree", NODES))
            }
        plain = seconds["chain"].get(0, math.nan)
        beta = {kind: {n: pass_s / plain for n, pass_s in by_nodes.items()} for kind, by_nodes in seconds.items()}
        by_rows[str(batch)] = {"seconds": seconds, "beta": beta}
    beta = by_rows.get("1", {}).get("beta", {}).get("chain", {}).get(DRAFTED)
    return {
        "rows": by_rows,
        "beta": beta,
        "goal": GOALS["verify"],
        "met": None if beta is None else beta <= GOALS["verify"],
    }


def kernels(bench: Bench, result: dict[str, Any]) -> dict[str, Any]:
    """Microseconds that the attention of all layers takes, for trees and for chains of as many tokens."""
    by_rows = dict[str, Any]()
    attend = None
    for batch in bench.in_time(ROWS):
        with bench.engine(batch) as engine:
            attend = engine.runner.cache.attend
            microseconds = {
                kind: {n: 1e6 * attention_seconds(engine, batch, n, tree=kind == "tree") for n in bench.in_time(NODES)}
                for kind in ("chain", "tree")
            }
        chain, tree = microseconds["chain"], microseconds["tree"]
        by_rows[str(batch)] = {"us": microseconds, "tree_over_chain": {n: tree[n] / chain[n] for n in tree}}
    return {"attention": getattr(getattr(attend, "func", attend), "__name__", None), "rows": by_rows}


def host(bench: Bench, result: dict[str, Any]) -> dict[str, Any]:
    """Measure the host's part of a plain greedy step: its wall time less that of the same passes queued up.

    `overlapped_ms` is other work of the host in a step: learning from the step before, and its outputs, which go to a
    server's listeners. The device computes meanwhile, so it is in no wall time. On CPUs nothing is done so.
    """
    host_ms = dict[str, float]()
    overlapped_ms = dict[str, float]()
    waits = list[str]()
    for batch in bench.in_time(ROWS):
        with bench.engine(batch) as engine:
            rates = [_decode_rate(engine, batch, 0) for _ in bench.in_time(range(ROUNDS))]
            if rates and not bench.late:
                step_s = batch / statistics.median(rates)
                host_ms[str(batch)] = 1e3 * (step_s - pass_seconds(engine, batch, 0))
                overlapped_ms[str(batch)] = 1e3 * overlapped_seconds(engine, batch)
        with bench.engine(batch, bench.draft) as engine:
            waits += [caller for length in bench.in_time((0, 2)) for caller in hidden_waits(engine, batch, length)]
    worst = max(host_ms.values(), default=None)
    met = None if worst is None else worst < GOALS["host_ms"] and not waits
    return {
        "host_ms": host_ms,
        "worst_ms": worst,
        "overlapped_ms": overlapped_ms,
        "overlapped_worst_ms": max(overlapped_ms.values(), default=None),
        "hidden_waits": waits,
        "goal": GOALS["host_ms"],
        "met": met,
    }


def synthetic(bench: Bench, result: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second over plain decoding, by batch, α and length."""
    table: dict[str, Any] = {}
    # A trial takes the first of each.
    batches, alphas, lengths = (grid[:1] if bench.name == "tiny" else grid for grid in (BATCHES, ALPHAS, LENGTHS))
    for batch in bench.in_time(batches):
        sampler = SyntheticAcceptance(bench.target.identity.vocab_size, bench.target.device, 0.0)
        with bench.engine(batch, bench.draft, sampler) as engine:
            plain = _decode_rate(engine, batch, 0)
            table[str(batch)] = {}
            for alpha in bench.in_time(alphas):
                sampler.alpha = alpha
                rates = {k: _decode_rate(engine, batch, k) for k in bench.in_time(lengths)}
                table[str(batch)][str(alpha)] = {k: rate / plain for k, rate in rates.items()}
    return {"draft_layers": len(bench.draft.layers), "speedup": table}


SECTIONS = (bandwidth, verify, kernels, host, synthetic)


def _decode_rate(engine: Engine, batch: int, length: int) -> float:
    """Return decoded tokens a second. Prompts are read, and the first steps run, before the clock starts."""
    engine.use_controller(FixedLength(length))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS + 40, ignore_eos=True)
    for row in range(batch):
        engine.submit(Request(f"row-{row}", tuple(range(5, 5 + CONTEXT)), params))
    gained = lambda: sum(len(delta.token_ids) for delta in engine.step().deltas)  # noqa: E731
    for _ in range(5):
        gained()
    wait(engine.target.device)
    started, tokens = time.perf_counter(), 0
    while tokens < NEW_TOKENS * batch and engine.has_work:
        tokens += gained()
    wait(engine.target.device)
    rate = tokens / (time.perf_counter() - started)
    for row in range(batch):
        engine.abort(f"row-{row}")
    engine.step()
    return rate


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _show(result: dict[str, Any], names: list[str]) -> None:
    console = Console()
    checks = Table("model", "check", "seen", "goal", title=result["device"])
    for name in names:
        sections = {section: figures if isinstance(figures, dict) else {} for section, figures in result[name].items()}
        for section, about, seen, goal in CHECKS:
            value = sections[section].get(seen)
            text = LEFT_OUT if value is None else f"{value:.2f}"
            checks.add_row(name, about, text, str(sections[section].get(goal, "–")))
        _show_passes(console, name, sections)
        if "speedup" in sections["synthetic"]:
            table = Table("batch", "α", *(f"k={k}" for k in LENGTHS), title=f"{name}: speed-up over plain decoding")
            for batch, by_alpha in sections["synthetic"]["speedup"].items():
                for alpha, by_length in by_alpha.items():
                    table.add_row(batch, alpha, *(_cell(by_length, k) for k in LENGTHS))
            console.print(table)
    console.print(checks)


def _show_passes(console: Console, name: str, sections: dict[str, Any]) -> None:
    """Print passes over drafted tokens against one over none, and the attention of trees against that of chains."""
    table = Table("rows", "what", *map(str, NODES), title=f"{name}: passes by drafted tokens a row")
    for batch, figures in sections["verify"].get("rows", {}).items():
        for kind, beta in figures["beta"].items():
            table.add_row(batch, f"{kind}s / none", *(_cell(beta, n) for n in NODES))
    for batch, figures in sections["kernels"].get("rows", {}).items():
        table.add_row(batch, "attention, trees / chains", *(_cell(figures["tree_over_chain"], n) for n in NODES))
    console.print(table)


def _cell(values: dict[int, float], key: int) -> str:
    return f"{values[key]:.2f}" if key in values else "–"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true", help="compile passes first")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--output", default="gpu", help="name of the file under results/; empty: none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
