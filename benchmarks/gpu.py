"""The serving engine on an accelerator, with Llama-shaped models of random bfloat16 weights.

    python benchmarks/gpu.py [--shapes 1b,8b] [--minutes 8] [--output results]

bandwidth   no speculation, batch 1: weight bytes read a second against the measured memory bandwidth (70 and 85 %)
verify      a pass over 5 tokens a row against one over 1 (≤ 1.1 at batch 1)
host        wall seconds of a step less the device's own work in it (< 0.3 ms), and where else than in its read it waits
synthetic   speed-up when drafted tokens stand with a set probability α: over α, length and batch

Runs unattended and prints tables at the end. Sections that no longer fit into `--minutes` are left out and named.
`--compile` compiles passes before they are recorded: run it once with and once without.
`--shapes tiny --device cpu` runs the same code anywhere, to see that it works. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bandwidth import read_bytes
from common import write_result
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from waits import hidden_waits

from distillspec.models import LanguageModel
from distillspec.models.tiny import tiny_tokenizer
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.decoding.synthetic import SyntheticAcceptance
from distillspec.serving.execution.flat_batch import RowInput
from distillspec.types import ModelIdentity

# hidden, feed-forward, layers, heads, key/value heads, vocabulary: Llama 3.2 1B and 3.1 8B, and one for a trial
SHAPES = {
    "tiny": (64, 128, 4, 4, 2, 512),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
DRAFT_SHARE = 16  # the draft has this fraction of the target's layers, at least one
GOALS = {"bandwidth": {"1b": 0.7, "8b": 0.85}, "verify": 1.1, "host_ms": 0.3}
ALPHAS, LENGTHS, BATCHES = (0.5, 0.7, 0.9), (1, 2, 4, 6), (1, 8, 32)
CONTEXT, NEW_TOKENS, ROUNDS = 64, 64, 3


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


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    deadline = time.monotonic() + 60 * options.minutes
    result: dict[str, Any] = {"device": _device_name(device), "bandwidth_gb_s": copy_bandwidth(device) / 1e9}
    for name in options.shapes.split(","):
        draft = random_model(name, device, DRAFT_SHARE)
        bench = Bench(name, random_model(name, device), draft, options.compile, deadline)
        result[name] = {}
        for section in (bandwidth, verify, host, synthetic):
            result[name][section.__name__] = "left out: no time" if bench.late else section(bench, result)
        del bench, draft
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.output:
        write_result(f"{options.output}{'_compiled' if options.compile else ''}", result)
    _show(result, options.shapes.split(","))


def bandwidth(bench: Bench, result: dict[str, Any]) -> dict[str, Any]:
    """Bytes of weights read a second in plain decoding at batch 1, as a share of what a copy reaches."""
    engine = make_engine(bench, 1, None)
    rate = statistics.median(_decode_rate(engine, 1, 0) for _ in range(ROUNDS))
    engine.close()
    share = rate * read_bytes(bench.target) / (1e9 * result["bandwidth_gb_s"])
    goal = GOALS["bandwidth"].get(bench.name)
    return {"tokens_per_s": rate, "share": share, "goal": goal, "met": None if goal is None else share >= goal}


def verify(bench: Bench, result: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a pass by tokens a row, relative to one token, for one row and eight."""
    found: dict[str, Any] = {}
    for batch in (1, 8):
        engine = make_engine(bench, batch, None)
        seconds = {k + 1: _pass_seconds(engine, batch, k + 1) for k in range(8)}
        found[str(batch)] = {"seconds": seconds, "beta": {n: s / seconds[1] for n, s in seconds.items()}}
        engine.close()
    return {**found, "goal": GOALS["verify"], "met": found["1"]["beta"][5] <= GOALS["verify"]}


def host(bench: Bench, result: dict[str, Any]) -> dict[str, Any]:
    """Measure the host's part of a plain greedy step: its wall time less that of the same passes queued up."""
    found, waits = {}, list[str]()
    for batch in (1, 8):
        engine = make_engine(bench, batch, None)
        step_s = batch / statistics.median(_decode_rate(engine, batch, 0) for _ in range(ROUNDS))
        found[str(batch)] = 1e3 * (step_s - _pass_seconds(engine, batch, 1))
        engine.close()
        engine = make_engine(bench, batch, bench.draft)
        waits += [place for length in (0, 2) for place in hidden_waits(engine, batch, length)]
        engine.close()
    met = max(found.values()) < GOALS["host_ms"] and not waits
    return {"host_ms": found, "goal_ms": GOALS["host_ms"], "hidden_waits": waits, "met": met}


def synthetic(bench: Bench, result: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second over plain decoding, by batch, α and length."""
    table: dict[str, Any] = {}
    # A trial takes the first of each.
    batches, alphas, lengths = (grid[:1] if bench.name == "tiny" else grid for grid in (BATCHES, ALPHAS, LENGTHS))
    for batch in batches:
        if bench.late:
            break
        sampler = SyntheticAcceptance(bench.target.identity.vocab_size, bench.target.device, 0.0)
        engine = make_engine(bench, batch, bench.draft, sampler)
        plain = _decode_rate(engine, batch, 0)
        table[str(batch)] = {}
        for alpha in alphas:
            sampler.alpha = alpha
            rates = {k: _decode_rate(engine, batch, k) for k in lengths if not bench.late}
            table[str(batch)][str(alpha)] = {k: rate / plain for k, rate in rates.items()}
        engine.close()
    return {"draft_layers": len(bench.draft.layers), "speedup": table}


def random_model(name: str, device: torch.device, layer_share: int = 1) -> LanguageModel:
    """Make a Llama of random weights on the device. Its ids need not be the tokenizer's."""
    hidden, feed_forward, layers, heads, kv_heads, vocabulary = SHAPES[name]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=max(1, layers // layer_share),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=name != "8b",
        dtype=torch.bfloat16,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    identity = ModelIdentity("random", vocabulary, f"{name}-{layer_share}")
    return LanguageModel(model, tiny_tokenizer(), identity, f"{name}-shaped random model")


def make_engine(
    bench: Bench, batch: int, draft: LanguageModel | None, sampler: SyntheticAcceptance | None = None
) -> Engine:
    settings = EngineSettings(max_slots=batch, max_model_len=512, prefix_reuse=False, compile=bench.compiled)
    return Engine(bench.target, draft, settings, controller=FixedLength(max(LENGTHS)), sampler=sampler)


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second that a large copy reads and writes: the most that decoding could reach."""
    size = size if device.type == "cuda" else size >> 4
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * size / _device_seconds(lambda: copy.copy_(source), device, 20)


def _decode_rate(engine: Engine, batch: int, length: int) -> float:
    """Return decoded tokens a second. Prompts are read, and the first steps run, before the clock starts."""
    engine.use_controller(FixedLength(length))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS + 40, ignore_eos=True)
    for row in range(batch):
        engine.submit(Request(f"row-{row}", tuple(range(5, 5 + CONTEXT)), params))
    gained = lambda: sum(len(d.token_ids) for d in engine.step().deltas)  # noqa: E731
    for _ in range(5):
        gained()
    _wait(engine.target.device)
    started, tokens = time.perf_counter(), 0
    while tokens < NEW_TOKENS * batch and engine.has_work:
        tokens += gained()
    _wait(engine.target.device)
    rate = tokens / (time.perf_counter() - started)
    for row in range(batch):
        engine.abort(f"row-{row}")
    engine.step()
    return rate


def _pass_seconds(engine: Engine, batch: int, tokens: int) -> float:
    """Device seconds of one pass over `tokens` a row with its logits and their argmax, many queued up: inputs lie on
    the device, so that launching takes less time than computing."""
    runner = engine.runner
    rows = [RowInput(slot, 2 * CONTEXT, [7] * tokens, tokens) for slot in range(batch)]

    def run() -> None:
        runner.logits(runner.hidden(inputs)).argmax(-1)

    with torch.inference_mode():
        inputs = runner.prepare(rows)
        return _device_seconds(run, engine.target.device, 20)


def _device_seconds(run: Callable[[], object], device: torch.device, count: int) -> float:
    """Return the seconds of one `run`: the median of five series of `count` runs, after a warm-up.

    On a CPU one series suffices.
    """
    count, rows = (count, 5) if device.type == "cuda" else (1, 1)
    for _ in range(3):
        run()
    found = []
    for _ in range(rows):
        _wait(device)
        started = time.perf_counter()
        for _ in range(count):
            run()
        _wait(device)
        found.append((time.perf_counter() - started) / count)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _show(result: dict[str, Any], names: list[str]) -> None:
    console = Console()
    checks = Table("model", "check", "seen", "goal", title=result["device"])
    for name in names:
        found = {key: value for key, value in result[name].items() if isinstance(value, dict)}
        if "bandwidth" in found:
            checks.add_row(
                name, "share of bandwidth", f"{found['bandwidth']['share']:.2f}", str(found["bandwidth"]["goal"])
            )
        if "verify" in found:
            checks.add_row(name, "5 tokens / 1 token", f"{found['verify']['1']['beta'][5]:.2f}", str(GOALS["verify"]))
        if "host" in found:
            checks.add_row(
                name, "host ms a step", f"{max(found['host']['host_ms'].values()):.2f}", str(GOALS["host_ms"])
            )
        if "synthetic" in found:
            table = Table("batch", "α", *(f"k={k}" for k in LENGTHS), title=f"{name}: speed-up over plain decoding")
            for batch, by_alpha in found["synthetic"]["speedup"].items():
                for alpha, by_length in by_alpha.items():
                    table.add_row(batch, alpha, *(f"{by_length[k]:.2f}" if k in by_length else "–" for k in LENGTHS))
            console.print(table)
    console.print(checks)


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
