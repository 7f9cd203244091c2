"""Device seconds of passes over chains and trees, and of their attention alone, for `gpu.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from distillspec.errors import in_one_line
from distillspec.models.language_model import attention_heads
from distillspec.serving import Engine
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.execution.graphs import CudaRecorder
from distillspec.serving.execution.row_input import RowInput

START = 128  # cached tokens a row
TOKEN = 7  # any token costs the same


@torch.inference_mode()
def pass_seconds(engine: Engine, batch: int, nodes: int, *, tree: bool = False) -> float:
    """Return the seconds of one pass over a newest token and `nodes` drafted ones a row, with logits and argmax.

    Args:
        tree: every node has two children. Else the nodes are a chain.
    """
    runner = engine.runner
    inputs = runner.prepare(_rows(engine, batch, nodes, tree))
    return _seconds_recorded(lambda: runner.logits(runner.eager(inputs)).argmax(-1), engine.target.device)


@torch.inference_mode()
def attention_seconds(engine: Engine, batch: int, nodes: int, *, tree: bool = False) -> float:
    """Return the seconds of the attention of all layers in such a pass."""
    runner, device, heads = engine.runner, engine.target.device, attention_heads(engine.target)
    inputs = runner.prepare(_rows(engine, batch, nodes, tree))
    runner.eager(inputs)  # the first pass makes the layers' caches
    (group,) = inputs.view.groups
    query = torch.randn(batch, heads.query, 1 + nodes, heads.dim, device=device, dtype=engine.target.dtype)
    layers = list(runner.cache.layers.values())

    def run() -> None:
        for keys, values in layers:
            runner.cache.attend(query, keys, values, group.view)

    return _seconds_recorded(run, device)


def device_seconds(run: Callable[[], object], device: torch.device, count: int) -> float:
    """Return the seconds of one `run`: the median of five series of `count` runs, after a warm-up.

    On a CPU single runs suffice.
    """
    count, series = (count, 5) if device.type == "cuda" else (1, 5)
    for _ in range(3):
        run()
    seconds = []
    for _ in range(series):
        wait(device)
        started = time.perf_counter()
        for _ in range(count):
            run()
        wait(device)
        seconds.append((time.perf_counter() - started) / count)
    return statistics.median(seconds)


def wait(device: torch.device) -> None:
    """Wait until a device has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rows(engine: Engine, batch: int, nodes: int, tree: bool) -> list[RowInput]:
    """Return rows whose slots hold what they read: without pages nothing would be read."""
    engine.runner.cache.commit(batch, START + 1 + nodes)
    shape = TokenTree.of_parents([TOKEN] * nodes, [node // 2 - 1 for node in range(nodes)]) if tree else None
    return [RowInput(slot, START, [TOKEN] * (1 + nodes), 1 + nodes, shape) for slot in range(batch)]


def _seconds_recorded(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `run` as one CUDA graph: the host launches it faster than it computes, trees too."""
    if device.type != "cuda":
        return device_seconds(run, device, 20)
    try:
        replay = CudaRecorder().record(run)
    except RuntimeError as error:  # recording has many ways to fail, and what runs still has a time
        print(f"not recorded, so the host's launches may count: {in_one_line(error, 200)}")
        replay = run
    return device_seconds(replay, device, 20)


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second that a large copy reads and writes: the most that decoding could reach."""
    size = size if device.type == "cuda" else size >> 4
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * size / device_seconds(lambda: copy.copy_(source), device, 20)
