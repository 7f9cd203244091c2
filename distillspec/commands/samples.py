"""The training samples of a data folder: sampled, or taken from a file and scored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from distillspec.config import DataConfig
from distillspec.data.collect import (
    SampleWriter,
    check_responses,
    collection_key,
    fixed_samples,
    sample_responses,
    score,
    signal_request,
)
from distillspec.data.folder import DataFolder
from distillspec.data.scoring import ScoringWriter
from distillspec.data.shards import ShardWriter, read_samples, recorded_whole
from distillspec.data.signal_check import read_checked, strange_signals
from distillspec.data.writers import share_prompts
from distillspec.errors import RunError
from distillspec.models import LanguageModel
from distillspec.progress import TokenMeter, progress
from distillspec.types import Generator, Prompt, Sample

SCORED_TOGETHER = 32  # fixed responses between two reads of the clock
ROUNDS = 4  # answers a slot writes before the target scores its own text: slots wait empty for the end of each lot


def prepare_samples(
    config: DataConfig,
    target: LanguageModel,
    folder: DataFolder,
    seed: int,
    *,
    draft: LanguageModel | None = None,
    state_bytes: float = 0,
) -> list[Sample]:
    """Return the training samples of a data folder, and make those that are missing.

    `data.source=fixed` takes the file's responses, and the target scores them. Other sources sample.

    Args:
        draft: the writer of the draft's part.
        state_bytes: memory for the target's states, as far as they are stored with the text.

    Raises:
        ConfigError: `data.cache` holds signals that are not the target's: early versions wrote such on CPUs.
        RunError: new signals are not the target's.
    """
    prompts = folder.read_prompts().train
    if config.cache is not None:
        recorded = read_checked(folder.samples, target, f"data.cache={config.cache}", state_bytes)
        samples = in_prompt_order(recorded, prompts)
        if not recorded_whole(folder.samples):
            print(f"data.cache={config.cache} is unfinished: these are {len(samples)} of the answers asked for")
        # With data.signal=none the live target judges, whatever the cache has recorded.
        return [replace(s, signal=None) for s in samples] if config.signal == "none" else samples
    writer_hash = draft.identity.weights_hash if draft is not None else target.identity.weights_hash
    key = collection_key(target, config, config.policy, seed, writer_hash)
    writer = ShardWriter(folder.samples, key, config.shard_sequences)
    if not writer.complete:
        check_responses(config, prompts)
        if config.source == "fixed":
            _score_into(writer, prompts, target, config, seed)
        else:
            _sample_into(writer, prompts, target, draft, config, seed)
    samples = in_prompt_order(read_samples(folder.samples, target.identity, state_bytes), prompts)
    if strange := strange_signals(samples, target):
        raise RunError(f"{folder.samples}: {strange}; try data.generator=engine, and report this")
    return samples


def in_prompt_order(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Sample]:
    """Return samples in the order of their prompts, those of other prompts last.

    They lie in the order in which answers ended: short ones come first, and an interruption changes it. What is trained
    on, and what a draft is chosen by, is to be the same.
    """
    order = {prompt.id: place for place, prompt in enumerate(prompts)}
    return sorted(samples, key=lambda sample: order.get(sample.prompt_id, len(order)))


def _sample_into(
    writer: ShardWriter,
    prompts: Sequence[Prompt],
    target: LanguageModel,
    draft: LanguageModel | None,
    config: DataConfig,
    seed: int,
) -> None:
    limit_s = None if config.max_minutes is None else max(0.0, 60 * config.max_minutes - writer.spent_s)
    shares = [
        (generator, [p for p in share if p.id not in writer.done_ids])
        for generator, share in share_prompts(config, target, draft, prompts, seed)
    ]
    sizes = [len(share) for _, share in shares]
    left = 0
    with progress(f"sampling {len(prompts)} responses ({config.source})") as line:
        meter = TokenMeter(line, sum(sizes) * config.max_new_tokens, limit_s)
        deadlines = _deadlines(config, sizes, writer.spent_s)
        for turn, ((generator, share), deadline) in enumerate(zip(shares, deadlines, strict=True)):
            if (turn or writer.done_ids) and deadline is not None and deadline <= time.monotonic():
                left += len(share)  # answers of one token teach nothing
            elif generator is not None:
                alone = generator.source == "draft" and not (draft and draft.state_ids)
                left += _answer(writer, generator, share, target, config, seed, deadline, meter, alone=alone)
            elif share:
                fixed = fixed_samples(share, target, config.max_new_tokens)
                left += len(fixed) - max(_score_in_lots(writer, fixed, target, config, seed, deadline), default=0)
    _close(writer, left, config)


def _answer(
    writer: ShardWriter,
    generator: Generator,
    prompts: Sequence[Prompt],
    target: LanguageModel,
    config: DataConfig,
    seed: int,
    deadline: float | None,
    meter: TokenMeter,
    *,
    alone: bool,
) -> int:
    """Have a generator answer prompts until the deadline. Return the number left without an answer.

    Args:
        alone: the draft writes without the target.
    """
    signal = signal_request(config)
    scored: SampleWriter = writer
    lot = None
    # Drafts alone cannot record the target's signal, and no generator its final states: scored afterwards.
    if signal is not None and (alone or signal.kind == "hidden"):
        scored, signal = ScoringWriter(writer, target, signal, seed, at_flush=not alone), None
        lot = None if alone else max(config.shard_sequences, ROUNDS * config.batch_slots)
    return sample_responses(
        prompts,
        generator,
        scored,
        policy=config.policy,
        stop_ids=target.stop_ids,
        max_new_tokens=config.max_new_tokens,
        signal=signal,
        seed=seed,
        deadline=deadline,
        on_tokens=meter,
        lot=lot,
    )


def _score_into(
    writer: ShardWriter, prompts: Sequence[Prompt], target: LanguageModel, config: DataConfig, seed: int
) -> None:
    fixed = fixed_samples(prompts, target, config.max_new_tokens)
    if left := len(prompts) - len(fixed):
        print(f"left out {left} of {len(prompts)} prompts, which have no response or no room for one")
    waiting = [sample for sample in fixed if sample.prompt_id not in writer.done_ids]
    done = 0
    with progress(f"scoring {len(waiting)} fixed responses") as line:
        for done in _score_in_lots(writer, waiting, target, config, seed, _deadline(config, writer.spent_s)):
            line.update(done / len(waiting), f"{done} of {len(waiting)}")
    _close(writer, len(waiting) - done, config)


def _score_in_lots(
    writer: ShardWriter,
    samples: Sequence[Sample],
    target: LanguageModel,
    config: DataConfig,
    seed: int,
    deadline: float | None,
) -> Iterator[int]:
    """Write samples with the target's signal until the deadline, one lot at least. Yield how many after each lot."""
    request, done = signal_request(config), 0
    while done < len(samples) and (done == 0 or deadline is None or time.monotonic() < deadline):
        lot = samples[done : done + SCORED_TOGETHER]
        for sample in lot if request is None else score(lot, target, request, seed):
            writer.add(sample)
        done += len(lot)
        yield done


def _close(writer: ShardWriter, left: int, config: DataConfig) -> None:
    """Mark the folder as finished, and say how many responses the time limit left out."""
    if left and config.max_minutes is not None:
        print(f"left out {left} responses: data.max_minutes={config.max_minutes:g} were over")
    writer.flush(complete=True)


def _deadlines(config: DataConfig, sizes: Sequence[int], spent_s: float) -> Iterator[float | None]:
    """Yield the `_deadline` of each share of the prompts, when its turn comes.

    The time that is left is divided by numbers of prompts, so what a share does not use goes to the next ones.
    """
    end = _deadline(config, spent_s)
    for turn, size in enumerate(sizes):
        now = time.monotonic()
        yield None if end is None else now + (end - now) * size / max(1, sum(sizes[turn:]))


def _deadline(config: DataConfig, spent_s: float) -> float | None:
    """Return the end of sampling or scoring in seconds of `time.monotonic`, None without a limit.

    Args:
        spent_s: what an interrupted run has taken already.
    """
    return None if config.max_minutes is None else time.monotonic() + 60 * config.max_minutes - spent_s
