"""The training samples of a data folder: sampled, or taken from a file and scored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from distillspec.config import DataConfig
from distillspec.data.collect import collection_key, fixed_samples, sample_responses, score, signal_request
from distillspec.data.folder import DataFolder
from distillspec.data.scoring import ScoringWriter
from distillspec.data.shards import ShardWriter, read_samples, recorded_whole
from distillspec.data.signal_check import read_checked, strange_signals
from distillspec.data.writers import share_prompts
from distillspec.errors import RunError
from distillspec.models import LanguageModel
from distillspec.progress import TokenMeter, progress
from distillspec.types import Prompt, Sample

SCORED_TOGETHER = 32  # fixed responses between two reads of the clock


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
    writer_hash = draft.identity.weights_hash if draft is not None else target.identity.weights_hash
    key = collection_key(target, config, config.policy, seed, writer_hash)
    if config.cache is not None:
        recorded = read_checked(folder.samples, target, f"data.cache={config.cache}", state_bytes)
        samples = _in_order(recorded, prompts)
        if not recorded_whole(folder.samples):
            print(f"data.cache={config.cache} is unfinished: these are {len(samples)} of the answers asked for")
        # With data.signal=none the live target judges, whatever the cache has recorded.
        return [replace(s, signal=None) for s in samples] if config.signal == "none" else samples
    writer = ShardWriter(folder.samples, key, config.shard_sequences)
    if not writer.complete:
        if config.source == "fixed":
            _score_into(writer, prompts, target, config, seed)
        else:
            _sample_into(writer, prompts, target, draft, config, seed)
    samples = _in_order(read_samples(folder.samples, target.identity, state_bytes), prompts)
    if strange := strange_signals(samples, target):
        raise RunError(f"{folder.samples}: {strange}; try data.generator=engine, and report this")
    return samples


def _in_order(samples: list[Sample], prompts: Sequence[Prompt]) -> list[Sample]:
    """Return samples in the order of their prompts.

    They lie in the order in which answers ended, which an interruption changes. Training is to be the same.
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
    limit_s = None if config.max_minutes is None else 60 * config.max_minutes
    deadline = _deadline(config)
    wanted = len([p for p in prompts if p.id not in writer.done_ids]) * config.max_new_tokens
    with progress(f"sampling {len(prompts)} responses ({config.source})") as line:
        meter = TokenMeter(line, wanted, limit_s)
        signal = signal_request(config)
        scored = writer if signal is None else ScoringWriter(writer, target, signal, seed)
        for generator, share in share_prompts(config, target, draft, prompts, seed):
            if generator is None:
                waiting = [p for p in share if p.id not in writer.done_ids]
                for sample in fixed_samples(waiting, target, config.max_new_tokens) if waiting else []:
                    scored.add(sample)
                scored.flush()
                continue
            # Drafts cannot record the target's signal, and no generator its final states: scored afterwards.
            later = generator.source == "draft" or config.signal == "hidden"
            done = sample_responses(
                share,
                generator,
                scored if later else writer,
                policy=config.policy,
                stop_ids=target.stop_ids,
                max_new_tokens=config.max_new_tokens,
                signal=None if later else signal,
                seed=seed,
                deadline=deadline,
                on_tokens=meter,
            )
            if not done:
                break
    writer.flush(complete=True)


def _score_into(
    writer: ShardWriter, prompts: Sequence[Prompt], target: LanguageModel, config: DataConfig, seed: int
) -> None:
    waiting = [s for s in fixed_samples(prompts, target, config.max_new_tokens) if s.prompt_id not in writer.done_ids]
    request = signal_request(config)
    deadline = _deadline(config)
    done = 0
    with progress(f"scoring {len(waiting)} fixed responses") as line:
        while done < len(waiting) and (done == 0 or deadline is None or time.monotonic() < deadline):
            lot = waiting[done : done + SCORED_TOGETHER]
            for sample in lot if request is None else score(lot, target, request, seed):
                writer.add(sample)
            done += len(lot)
            line.update(done / len(waiting), f"{done} of {len(waiting)}")
    if done < len(waiting):
        print(f"left out {len(waiting) - done} responses: data.max_minutes={config.max_minutes:g} were over")
    writer.flush(complete=True)


def _deadline(config: DataConfig) -> float | None:
    """Return the end of sampling or scoring in seconds of `time.monotonic`, None without a limit."""
    return None if config.max_minutes is None else time.monotonic() + 60 * config.max_minutes
