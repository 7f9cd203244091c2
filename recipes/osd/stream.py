"""Stream of requests: recorded once by the engine into the product's own log, read by every arm."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from distillspec.config import AdaptConfig, DataConfig, EngineConfig, OnlineConfig, ReplayConfig, TargetConfig
from distillspec.data.prompts import read_prompts
from distillspec.errors import ConfigError, RunError
from distillspec.files import write_json
from distillspec.models import LanguageModel
from distillspec.models.draft import load_pretrained
from distillspec.progress import progress
from distillspec.provenance import provenance
from distillspec.recipes.osd.study import Segment, Study
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.online.adaptation import Adaptation, first_draft
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.types import Prompt

NO_END_DAYS = 36500.0
LARGE_MIB = 65536.0


@dataclass(frozen=True)
class Stream:
    """Recorded answers, in order of arrival in the log."""

    answers: tuple[LoggedAnswer, ...]
    key: LogKey
    target: LanguageModel

    def of(self, segment: int) -> list[LoggedAnswer]:
        return [answer for answer in self.answers if segment_of(answer) == segment]


def segment_of(answer: LoggedAnswer) -> int:
    """Return the segment of a recorded answer. Its request's id starts with it."""
    return int(answer.request_id.split("/")[0])


def record(study: Study, target: LanguageModel) -> None:
    """Serve the requests that are not in the log yet. `stream.json` has the figures of the last run.

    Raises:
        ConfigError: a file with too few prompts, or a draft that does not fit the target.
    """
    settings = recording_settings(study)
    requests = planned_requests(study, target)
    first_draft(settings, target, study.draft)
    waiting = [request for request in requests if request.id not in _recorded(settings)]
    if not waiting:
        return
    draft = load_pretrained(study.draft, target, target.dtype)
    # Not compiled: in so few minutes that costs as much as it saves.
    config = EngineConfig(
        max_slots=study.slots,
        controller="fixed",
        speculation_length=study.speculation_length,
        compile=False,
        seed=study.seed,
    )
    engine = Engine(target, draft, config)
    try:
        with Adaptation(engine, settings) as adaptation:
            seconds, tokens = _serve(engine, adaptation, waiting, study.slots)
            adaptation.writer.flush()
    finally:
        engine.close()
    figures = {"requests": len(waiting), "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
    write_json(study.part("stream"), {**figures, "provenance": provenance([], study.seed)})
    missing = len({request.id for request in requests} - _recorded(settings))
    if missing:
        raise RunError(f"{missing} answers are not in the log; run the study again to serve these requests")


def read_stream(study: Study, target: LanguageModel) -> Stream:
    """Return the recorded answers to the study's requests. A folder may hold more, from a larger study.

    Raises:
        ConfigError: nothing was recorded yet, or a file with too few prompts.
    """
    replay = ReplayLog(study.stream / "replay")
    planned = {request.id for request in planned_requests(study, target)}
    try:
        entries = [entry for entry in replay.entries() if entry.request_id in planned]
        return Stream(tuple(replay.load(entries)), replay.key, target)
    finally:
        replay.close()


def recording_settings(study: Study) -> OnlineSettings:
    """Return settings that log everything, rejected nodes too, and train nothing."""
    return OnlineSettings(
        OnlineConfig(mode="decoupled", folder=str(study.stream)),
        ReplayConfig(
            share=1.0,
            max_mib=LARGE_MIB,
            keep="fifo",
            retention_days=NO_END_DAYS,
            flush_s=10.0,
        ),
        AdaptConfig(positions="verified"),
        seed=study.seed,
        target=TargetConfig(path=study.target),
    )


def planned_requests(study: Study, target: LanguageModel) -> list[Request]:
    """Return the requests of all segments in order. A repeated domain continues with its next prompts."""
    params = SamplingParams(temperature=1.0, max_tokens=study.max_tokens)
    prompts: dict[str, Iterator[Prompt]] = {}
    requests = []
    for index, segment in enumerate(study.segments):
        if segment.domain not in prompts:
            prompts[segment.domain] = iter(_prompts(study, segment, target))
        for prompt in islice(prompts[segment.domain], study.requests):
            name = f"{index}/{segment.domain}/{prompt.id}"
            requests.append(Request(name, prompt.token_ids, params, domain=segment.domain))
    return requests


def _prompts(study: Study, segment: Segment, target: LanguageModel) -> tuple[Prompt, ...]:
    needed = study.requests * sum(other.domain == segment.domain for other in study.segments)
    prompts = prompts_of(segment, target, study.max_prompt_tokens, study.seed)
    if len(prompts) < needed:
        raise ConfigError(
            f"{segment.file} has {len(prompts)} usable prompts, but {segment.domain} needs {needed}; lower --requests"
        )
    return prompts[:needed]


def prompts_of(segment: Segment, target: LanguageModel, longest: int, seed: int) -> tuple[Prompt, ...]:
    """Return a segment's prompts of at most `longest` tokens, in random order."""
    read = read_prompts(DataConfig(prompts=segment.file), target.text_tokenizer)
    prompts = list({prompt.token_ids: prompt for prompt in read if 0 < len(prompt.token_ids) <= longest}.values())
    random.Random(seed).shuffle(prompts)
    return tuple(prompts[1:])  # without the first, as in the published figures


def _recorded(settings: OnlineSettings) -> set[str]:
    if not settings.layout.manifest.is_file():
        return set()
    replay = ReplayLog(settings.layout.replay)
    try:
        return {entry.request_id for entry in replay.entries()}
    finally:
        replay.close()


def _serve(engine: Engine, adaptation: Adaptation, requests: list[Request], slots: int) -> tuple[float, int]:
    """Serve the requests, as many at a time as there are slots. Return seconds and tokens."""
    waiting = iter(requests)
    started = time.monotonic()
    tokens = done = 0
    for request in islice(waiting, slots):
        engine.submit(request)
    with progress("recording the stream") as line:
        while done < len(requests):
            output = engine.step()
            adaptation.on_step(output)
            for finished in output.finished:
                tokens += len(finished.token_ids)
                done += 1
                if (following := next(waiting, None)) is not None:
                    engine.submit(following)
            share = done / len(requests)
            line.update(share, f"{tokens / line.elapsed_s:.0f} tokens/s, {line.left(share)} left")
    return time.monotonic() - started, tokens
