"""The target's answers to held-out prompts."""

from __future__ import annotations

from distillspec.commands.unseen import unseen
from distillspec.config import DataConfig
from distillspec.data.collect import held_out_samples
from distillspec.data.folder import DataFolder
from distillspec.generation import make_generator
from distillspec.models import LanguageModel
from distillspec.progress import TokenMeter, progress
from distillspec.types import Sample, SamplingPolicy


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
    """
    prompts = unseen(folder.read_prompts().held_out, trained)[: config.eval_prompts]
    if len(prompts) < config.eval_prompts:
        print(f"only {len(prompts)} held-out prompts of data.eval_prompts={config.eval_prompts}")
    with progress(f"the target answers {len(prompts)} held-out prompts") as line:
        return held_out_samples(
            prompts,
            target,
            make_generator(config.generator, target, slots=config.batch_slots),
            folder.held_out(policy, config.max_new_tokens),
            policy=policy,
            max_new_tokens=config.max_new_tokens,
            seed=seed,
            on_tokens=TokenMeter(line, len(prompts) * config.max_new_tokens),
        )
