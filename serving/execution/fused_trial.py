"""Trial of layers in few launches on the device: whether they are right, and whether they are faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from distillspec.errors import in_one_line
from distillspec.models import LanguageModel
from distillspec.models.flat_view import FlatView
from distillspec.models.fused_layers import FusedLayers
from distillspec.models.ragged_attention import is_ragged
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.transfer import on_device
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.graphs import Recorder
from distillspec.serving.execution.row_input import RowInput

log = logging.getLogger(__name__)

ROWS, WINDOW, MAX_LEN = 3, 4, 64  # of the trial's passes, and of its cache
OFF = 0.25  # largest error of a token's state, as a share of it: rounding grows with every layer, and in bfloat16 far
REPEATS = 20  # passes that are timed

Layers = Callable[[FlatView, Tensor], Tensor]


@torch.inference_mode()
def working(model: LanguageModel, fused: FusedLayers, cache: SlotCache) -> FusedLayers | None:
    """Return the layers in few launches if they give what the model's own give. The log says if they do not."""
    if not is_ragged(cache.attend):
        return None
    try:
        with slot_attention_in(model.model), on_device(model.device):
            if (off := _error(model, fused, cache)) > OFF:
                raise ValueError(f"they are off by {off:.0%}")
    except Exception as error:  # a compiler has many ways to fail
        log.warning("%s: layers run as transformers launches them (%s)", model.name, in_one_line(error, 300))
        return None
    return fused


@torch.inference_mode()
def faster(model: LanguageModel, fused: FusedLayers, cache: SlotCache, recorder: Recorder) -> FusedLayers | None:
    """Return the layers in few launches if a recorded pass takes less time with them. The log says how much.

    Args:
        recorder: one for the trial alone. The engine's keeps all recordings in one memory, and none may be dropped.
    """
    with slot_attention_in(model.model), on_device(model.device):
        plain_s, fused_s = (_seconds(model, layers, cache, recorder) for layers in (_plain(model), fused.hidden))
    log.info("%s: layers in few launches take %.2f of transformers' own time", model.name, fused_s / max(plain_s, 1e-9))
    return fused if fused_s < plain_s else None


def _plain(model: LanguageModel) -> Layers:
    return lambda view, tokens: view.hidden(model, tokens)


def _passes(model: LanguageModel, cache: SlotCache) -> list[FlatBatch]:
    """Return a pass over windows at the start of some slots, and one over a token behind each."""
    size = model.identity.vocab_size
    tokens = [[(7 * index + 31 * row) % size for index in range(WINDOW + 1)] for row in range(ROWS)]
    begins = [RowInput(row, 0, text[:WINDOW], WINDOW) for row, text in enumerate(tokens)]
    goes_on = [RowInput(row, WINDOW, text[WINDOW:]) for row, text in enumerate(tokens)]
    return [FlatBatch.of(cache, rows, model.device) for rows in (begins, goes_on)]


def _error(model: LanguageModel, fused: FusedLayers, like: SlotCache) -> float:
    """Return the error of a token's last state as a share of it: of two passes the larger median."""
    states = []
    for layers in (_plain(model), fused.hidden):
        passes = _passes(model, SlotCache(ROWS, MAX_LEN, like.attend))
        states.append([layers(batch.view, batch.tokens).float() for batch in passes])
    pairs = zip(*states, strict=True)
    errors = [((tried - plain).norm(dim=1) / plain.norm(dim=1)).median() for plain, tried in pairs]
    return float(torch.stack(errors).nan_to_num(torch.inf).max())


def _seconds(model: LanguageModel, layers: Layers, like: SlotCache, recorder: Recorder) -> float:
    """Return the seconds of a recorded pass over one token of each of some slots."""
    batch = _passes(model, SlotCache(ROWS, MAX_LEN, like.attend))[1]
    tokens, view = batch.tokens, batch.view
    replay = recorder.record(lambda: layers(view, tokens))

    def run_all() -> float:
        started = time.perf_counter()
        for _ in range(REPEATS):
            replay()
        _wait(model.device)
        return (time.perf_counter() - started) / REPEATS

    run_all()  # to warm up
    return run_all()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
