"""The target's answers to held-out prompts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from distillspec.commands.unseen import unseen
from distillspec.config import DataConfig
from distillspec.data.collect import held_out_samples
from distillspec.data.folder import DataFolder
from distillspec.data.shards import recorded_key
from distillspec.data.signal_check import strange_text
from distillspec.errors import ConfigError
from distillspec.generation import make_generator
from distillspec.models import LanguageModel
from distillspec.progress import TokenMeter, progress
from distillspec.types import Sample, SamplingPolicy

CHECKED = "checked"  # marks a folder whose answers are the target's: looking takes seconds, in each process of a run


def prepare_held_out(
    config: DataConfig,
    policy: SamplingPolicy,
    target: LanguageModel,
    folder: DataFolder,
    seed: int,
    trained: frozenset[str] = frozenset(),
) -> list[Sample]:
    """Return the target's answers under `policy` to `data.eval_prompts` held-out prompts, made once.

    Args:
        trained: keys of prompts to leave out, see `unseen`.

    Raises:
        ConfigError: answers that were kept are not the target's own: early versions wrote such on CPUs.
    """
    prompts = unseen(folder.read_prompts().held_out, trained)[: config.eval_prompts]
    if len(prompts) < config.eval_prompts:
        print(f"only {len(prompts)} held-out prompts of data.eval_prompts={config.eval_prompts}")
    place = _place(config, policy, target, folder)
    checked = place / CHECKED
    kept = place.is_dir() and not checked.is_file()
    with progress(f"the target answers {len(prompts)} held-out prompts") as line:
        samples = held_out_samples(
            prompts,
            target,
            make_generator(config.generator, target, slots=config.batch_slots),
            place,
            policy=policy,
            max_new_tokens=config.max_new_tokens,
            seed=seed,
            on_tokens=TokenMeter(line, len(prompts) * config.max_new_tokens),
        )
    if kept and (strange := strange_text(samples, target, policy)):
        raise ConfigError(f"held-out answers in {place}: {strange}; remove this folder, and they are written again")
    with suppress(OSError):  # a folder that is not ours is checked again
        checked.touch()
    return samples


def _place(config: DataConfig, policy: SamplingPolicy, target: LanguageModel, folder: DataFolder) -> Path:
    """Return the folder of the answers. A second target of the same prompts gets one of its own."""
    first, identity = folder.held_out(policy, config.max_new_tokens), asdict(target.identity)
    if recorded_key(first).get("target", identity) == identity:
        return first
    return folder.held_out(policy, config.max_new_tokens, target.identity)
