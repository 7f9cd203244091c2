"""Recording of an engine's passes: with what, in which numbers of tokens, and what the log says of it."""

from __future__ import annotations

from distillspec.config.engine import EngineConfig
from distillspec.models import LanguageModel
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.ladder import UNRECORDED, Recorded
from distillspec.serving.execution.graphs import CudaRecorder, Recorder
from distillspec.serving.execution.prepared import PreparedModel


def choose_recorder(settings: EngineConfig, target: LanguageModel) -> Recorder | None:
    """Return the recorder of a device, None where passes run as they are."""
    return CudaRecorder() if target.device.type == "cuda" and settings.cuda_graphs else None


def recorded_tokens(
    settings: EngineConfig, recorder: Recorder | None, controller: LengthController | None = None
) -> Recorded:
    """Return the numbers of tokens that passes will be recorded in, for costs. Trees are not recorded.

    Args:
        controller: in place of the one that settings name. It may draft more.
    """
    if recorder is None or settings.chosen_tree != "off":
        return UNRECORDED
    length = settings.speculation_length if controller is None else controller.speculation_length
    return Recorded.of(settings.max_slots, length)  # with fewer slots, for want of memory, it has the same steps


def describe_passes(attention: str, target: PreparedModel, recorder: Recorder | None) -> str:
    """Describe for the log how forward passes run."""
    words = [f"attention by {attention}"]
    if target.packs is not None and target.packs.packing is not None:
        words.append(f"weights packed by {target.packs.packing.name}")
    if recorder is not None:
        words.append("graphs")
    if target.compiled is not None:
        words.append("passes compiled" if target.compiled.ready else "passes to be compiled")
    elif recorder is None:
        words.append("passes run as they are")
    return ", ".join(words)
