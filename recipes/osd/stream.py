"""The stream: recorded once by the engine through the product's own log, read by every arm."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from distillspec.config import DataConfig, EngineConfig, OnlineConfig, ReplayConfig
from distillspec.data.prompts import read_prompts
from distillspec.errors import ConfigError, RunError
from distillspec.files import write_json
from distillspec.models import LanguageModel
from distillspec.models.draft import load_pretrained
from distillspec.progress import progress
from distillspec.recipes.osd.study import Segment, Study
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.online.adaptation import Adaptation, first_draft
from distillspec.serving.online.layout import OnlineSettings
from distillspec.serving.online.records import LoggedAnswer, LogKey
from distillspec.serving.online.replay_log import ReplayLog
from distillspec.types import Prompt

FOR_EVER_DAYS = 36500.0
LARGE_MIB = 65536.0


@dataclass(frozen=True)
class Stream:
    """What was recorded, in order of arrival in the log."""

    answers: tuple[LoggedAnswer, ...]
    key: LogKey

    def of(self, segment: int) -> list[LoggedAnswer]:
        return [answer for answer in self.answers if segment_of(answer) == segment]


def segment_of(answer: LoggedAnswer) -> int:
    """Which segment a recorded answer belongs to; its request's id begins with it."""
    return int(answer.request_id.split("/")[0])


def record(study: Study, target: LanguageModel) -> None:
    """Serve what is not in the log yet; `stream.json` tells of the last run.

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
    # Not compiled: that costs as long as it could save in so few minutes.
    config = EngineConfig(
        max_slots=study.slots, controller="fixed", speculation_length=study.gamma, compile=False, seed=study.seed
    )
    engine = Engine(target, draft, config)
    try:
        with Adaptation(engine, settings) as adaptation:
            seconds, tokens = _serve(engine, adaptation, waiting, study.slots)
            adaptation.writer.flush()
    finally:
        engine.close()
    figures = {"requests": len(waiting), "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
    write_json(study.part("stream"), figures)
    missing = len({request.id for request in requests} - _recorded(settings))
    if missing:
        raise RunError(f"{missing} answers are not in the log; run the study again to serve these requests")


def read_stream(study: Study, target: LanguageModel) -> Stream:
    """What was recorded of the study's requests; a folder may hold more, from a study with more of them.

    Raises:
        ConfigError: nothing was recorded yet, or a file with too few prompts.
    """
    replay = ReplayLog(study.stream / "replay")
    planned = {request.id for request in planned_requests(study, target)}
    try:
        entries = [entry for entry in replay.entries() if entry.request_id in planned]
        return Stream(tuple(replay.load(entries)), replay.key)
    finally:
        replay.close()


def recording_settings(study: Study) -> OnlineSettings:
    """Everything is logged, and nobody trains."""
    return OnlineSettings(
        OnlineConfig(mode="decoupled", folder=str(study.stream)),
        ReplayConfig(
            share=1.0,
            held_out=study.held_out,
            max_mib=LARGE_MIB,
            keep="fifo",
            retention_days=FOR_EVER_DAYS,
            flush_s=10.0,
        ),
        seed=study.seed,
    )


def planned_requests(study: Study, target: LanguageModel) -> list[Request]:
    """The requests of all segments in order; a domain that comes again goes on with its next prompts."""
    params = SamplingParams(temperature=1.0, max_tokens=study.max_tokens)
    prompts: dict[str, Iterator[Prompt]] = {}
    requests = []
    for place, segment in enumerate(study.segments):
        if segment.domain not in prompts:
            prompts[segment.domain] = iter(_prompts(study, segment, target))
        for prompt in islice(prompts[segment.domain], study.requests):
            name = f"{place}/{segment.domain}/{prompt.id}"
            requests.append(Request(name, prompt.token_ids, params, domain=segment.domain))
    return requests


def _prompts(study: Study, segment: Segment, target: LanguageModel) -> tuple[Prompt, ...]:
    wanted = study.requests * sum(other.domain == segment.domain for other in study.segments)
    found = prompts_of(segment, target, study.max_prompt_tokens, study.seed)
    if len(found) < wanted:
        raise ConfigError(
            f"{segment.file} has {len(found)} usable prompts, but {wanted} are asked of {segment.domain}; lower "
            "--requests"
        )
    return found[:wanted]


def prompts_of(segment: Segment, target: LanguageModel, longest: int, seed: int) -> tuple[Prompt, ...]:
    """A segment's prompts of at most `longest` tokens, in random order."""
    found = read_prompts(DataConfig(prompts=segment.file), target.text_tokenizer)
    prompts = list({p.token_ids: p for p in found if 0 < len(p.token_ids) <= longest}.values())
    random.Random(seed).shuffle(prompts)
    return tuple(prompts[1:])  # without the first, as when the study's figures were made


def _recorded(settings: OnlineSettings) -> set[str]:
    if not settings.layout.manifest.is_file():
        return set()
    replay = ReplayLog(settings.layout.replay)
    try:
        return {entry.request_id for entry in replay.entries()}
    finally:
        replay.close()


def _serve(engine: Engine, adaptation: Adaptation, requests: list[Request], slots: int) -> tuple[float, int]:
    """As many at a time as there are slots, one in as one goes out; seconds and tokens."""
    waiting = iter(requests)
    started, tokens, done = time.monotonic(), 0, 0
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
