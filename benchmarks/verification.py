"""Passes of the target over 8 rows, beside what their linear products alone take: the rest is the engine's."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from sides import alternating_seconds, make_engine
from torch import Tensor, nn

from distillspec.models import LanguageModel
from distillspec.serving import Engine
from distillspec.serving.execution.row_input import RowInput

CONTEXT = 256  # cached tokens a row
SHAPES = {"8 × 1": [1] * 8, "8 × 5": [5] * 8, "7 × 1, 1 × 5": [1] * 7 + [5]}  # tokens of each row
# A pass may take so many times its products' difference to 8 × 1 longer, and so many milliseconds more.
ALLOWED = {"8 × 5": (1.2, 2.0), "7 × 1, 1 × 5": (1.0, 1.0)}


def verify(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """Time passes and products by turns. `beta`: a pass over so many tokens a row against one token a row."""
    engine = make_engine(options, target, None, 8)
    with torch.inference_mode():
        engine.runner.read([RowInput(slot, 0, [5] * CONTEXT, 0) for slot in range(8)])
    passes = {name: _pass(engine, counts) for name, counts in SHAPES.items()}
    products = {f"products of {name}": _products(engine, sum(counts)) for name, counts in SHAPES.items()}
    alike = {f"{k} tokens": _pass(engine, [k] * 8) for k in (2, 3, 4)}
    times = alternating_seconds({**passes, **products, **alike}, 8 * options.rounds)
    ms = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    engine.close()
    beta = {1: 1.0, **{k: ms[f"{k} tokens"] / ms["8 × 1"] for k in (2, 3, 4)}, 5: ms["8 × 5"] / ms["8 × 1"]}
    shapes = {name: _judged(name, times) for name in ALLOWED}
    met = {name: judged["met"] for name, judged in shapes.items()}
    return {"median_ms": ms, "beta": beta, "shapes": shapes, "met": met}


def _judged(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return how much longer than 8 × 1 a pass takes, and its products, medians of the differences within rounds."""

    def more(kind: str) -> float:
        pairs = zip(times[f"{kind}{name}"], times[f"{kind}8 × 1"], strict=True)
        return 1e3 * statistics.median(seconds - base for seconds, base in pairs)

    factor, spare = ALLOWED[name]
    more_ms, products = more(""), more("products of ")
    allowed = factor * products + spare
    return {"more_ms": more_ms, "products_more_ms": products, "allowed_ms": allowed, "met": more_ms <= allowed}


def _pass(engine: Engine, counts: list[int]) -> Callable[[], int]:
    """Return a pass over so many tokens of each row, with the logits of all of them."""
    rows = [RowInput(slot, CONTEXT, [7] * count, count) for slot, count in enumerate(counts)]
    return torch.inference_mode()(lambda: len(engine.runner.logits(engine.runner.read(rows))))


def _products(engine: Engine, tokens: int) -> Callable[[], int]:
    """Return all linear products of a pass over so many tokens, the head's too, with the engine's packed weights."""
    model, runner = engine.target, engine.runner
    layers = [module for module in model.decoder.modules() if isinstance(module, nn.Linear)]
    inputs: dict[int, Tensor] = {layer.in_features: torch.ones(1, tokens, layer.in_features) for layer in layers}
    inputs = {width: x.to(model.dtype) for width, x in inputs.items()}
    hidden = torch.ones(tokens, model.head.weight.shape[1], dtype=model.dtype)

    @torch.inference_mode()
    def run() -> int:
        for layer in layers:
            layer(inputs[layer.in_features])
        return len(runner.logits(hidden))

    return run
