"""Curves of the engine without speculation: by the number of requests and by the length of a prompt."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from common import RESULTS
from matplotlib.figure import Figure
from sides import generate, greedy, make_engine, rate_of, read_prompts

from distillspec.files import write_png
from distillspec.models import LanguageModel


def scaling(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """Tokens a second by batch (short prompts), and milliseconds to the first and each later token by prompt length."""
    prompt = read_prompts(options.prompts, target, 1)[0]
    by_batch, by_length = {}, {}
    for batch in (1, 2, 4, 8, 16, 32):
        engine = make_engine(options, target, None, batch)
        prompts = [prompt] * batch
        rates = [
            rate_of(lambda engine=engine, prompts=prompts: generate(engine, prompts, greedy(32))) for _ in range(3)
        ]
        by_batch[batch] = statistics.median(rates)
        engine.close()
    limit = target.model.config.get_text_config().max_position_embeddings
    for length in (64, 256, 1024, 4096):
        engine = make_engine(options, target, None, 1, max_model_len=min(limit, length + 40))
        ids = (prompt * (length // len(prompt) + 1))[: min(length, limit - 40)]
        engine.generate([ids], greedy(2))
        engine.sequences.pool.forget(0)  # its prompt must be read again
        (output,) = engine.generate([ids], greedy(32))
        first, total = output.stats.time_to_first_token_s, output.stats.total_s
        by_length[len(ids)] = {"first_ms": 1e3 * first, "later_ms": 1e3 * (total - first) / 31}
        engine.close()
    _plot_scaling(by_batch, by_length, RESULTS / f"engine_scaling{'_compiled' if options.compile else ''}.png")
    return {"tokens_per_s_by_batch": by_batch, "by_prompt_length": by_length}


def _plot_scaling(by_batch: dict[int, float], by_length: dict[int, dict[str, float]], path: Path) -> None:
    figure = Figure(figsize=(9, 3.4), dpi=120, layout="constrained")
    batches, lengths = figure.subplots(1, 2)
    batches.plot(list(by_batch), list(by_batch.values()), marker="o")
    batches.set(xscale="log", xlabel="requests at once", ylabel="tokens/s", title="no speculation, short prompts")
    lengths.plot(list(by_length), [times["first_ms"] for times in by_length.values()], marker="o", label="first token")
    lengths.plot(
        list(by_length), [times["later_ms"] for times in by_length.values()], marker="s", label="each later one"
    )
    lengths.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="ms", title="one request")
    lengths.legend()
    for axes, ticks in ((batches, list(by_batch)), (lengths, list(by_length))):
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    write_png(path, figure)
