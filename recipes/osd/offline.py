"""Offline rivals: drafts distilled on a part of one segment, as in the paper's comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distillspec.config import AdaptConfig, LossConfig
from distillspec.files import write_json
from distillspec.provenance import provenance
from distillspec.recipes.osd.arms import common
from distillspec.recipes.osd.held_out import HeldOutSets
from distillspec.recipes.osd.stream import Stream, recording_settings
from distillspec.recipes.osd.study import Study
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.base_drafts import BaseDrafts
from distillspec.serving.online.training.examples import training_example_of
from distillspec.serving.online.training.learning import learn
from distillspec.serving.online.training.loaded_target import LoadedTarget


def distil_offline(study: Study, stream: Stream, held_out: HeldOutSets) -> None:
    """Fill `offline.json`: the static draft trained on the first 10 % (20, …) of each segment's answers.

    Finished cells are kept, so that an interrupted study continues.
    """
    file = study.part("offline")
    cells = study.finished("offline")
    settings, replay = recording_settings(study), ReplayLog(study.stream / "replay")
    registry = VersionRegistry(study.stream / "versions")
    drafts = BaseDrafts(registry, replay, LoadedTarget.of(settings, replay.key))
    try:
        for segment, fraction in _cells(study):
            name = f"{segment}/{fraction:g}"
            if name in cells:
                continue
            cells[name] = _cell(study, stream, held_out, drafts, segment, fraction)
            write_json(file, cells)
            print(f"offline, segment {segment}, {fraction:.0%}: {cells[name]['requests']} requests", flush=True)
    finally:
        registry.close()
        replay.close()


def _cells(study: Study) -> Iterator[tuple[int, float]]:
    """Yield (segment, fraction), the largest fractions first, since the goals refer to them."""
    for fraction in sorted(study.fractions, reverse=True):
        for segment in range(len(study.segments)):
            yield segment, fraction


def _cell(
    study: Study, stream: Stream, held_out: HeldOutSets, drafts: BaseDrafts, segment: int, fraction: float
) -> dict[str, Any]:
    """Distil as an update of the product does: the vocabulary follows the text, states come from the log."""
    usable = [answer for answer in stream.of(segment) if not study.holds_out(answer.request_id)]
    config = AdaptConfig(**common(study))
    examples = [training_example_of(answer, config) for answer in usable[: max(1, round(fraction * len(usable)))]]
    draft, _ = drafts.renewed(drafts.load(drafts.current()), examples, config.vocabulary)
    states = drafts.states_for(draft)
    result, _ = learn(draft, examples, config, LossConfig(name=study.loss), states=states, seed=study.seed)
    exam = held_out.evaluate(draft, segment)
    return {
        "requests": len(examples),
        "learnt": result.to_json(),
        "exam": exam,
        "provenance": provenance([], study.seed),
    }
