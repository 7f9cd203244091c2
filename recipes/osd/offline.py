"""Rivals: drafts distilled offline on a part of one segment, as in the paper's comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distillspec.config import AdaptConfig, LossConfig
from distillspec.files import write_json
from distillspec.models import load_draft
from distillspec.recipes.osd.arms import common, first_version
from distillspec.recipes.osd.exams import Exams
from distillspec.recipes.osd.stream import Stream
from distillspec.recipes.osd.study import Study
from distillspec.serving.online.learning import learn, lesson_of


def distil_offline(study: Study, stream: Stream, exams: Exams) -> None:
    """Fill `offline.json`, from the static draft on the first 10 % (20, …) of each segment's answers; kept cell by
    cell, so that an interrupted study goes on."""
    file = study.part("offline")
    found = study.finished("offline")
    for segment, fraction in _cells(study):
        name = f"{segment}/{fraction:g}"
        if name in found:
            continue
        found[name] = _cell(study, stream, exams, segment, fraction)
        write_json(file, found)
        print(f"offline, segment {segment}, {fraction:.0%}: {found[name]['requests']} requests", flush=True)


def _cells(study: Study) -> Iterator[tuple[int, float]]:
    """The largest parts first: they are what the goals are about."""
    for fraction in sorted(study.fractions, reverse=True):
        for segment in range(len(study.segments)):
            yield segment, fraction


def _cell(study: Study, stream: Stream, exams: Exams, segment: int, fraction: float) -> dict[str, Any]:
    usable = [answer for answer in stream.of(segment) if answer.split == "train"]
    config = AdaptConfig(**common(study))
    lessons = [lesson_of(answer, config) for answer in usable[: max(1, round(fraction * len(usable)))]]
    draft = load_draft(first_version(study).path)
    learnt = learn(draft, lessons, config, LossConfig(name=study.loss), seed=study.seed)
    return {"requests": len(lessons), "learnt": learnt.to_json(), "exam": exams.sit(draft, segment)}
