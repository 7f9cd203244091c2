"""On-policy data: text that the current draft wrote, alone or in turns with the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from distillspec.config import DataConfig
from distillspec.data.collect import fixed_samples, score, signal_request
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import stable_seed
from distillspec.data.signal_check import read_checked
from distillspec.data.writers import answerable, share_prompts
from distillspec.models import LanguageModel
from distillspec.types import GenerationRequest, Generator, Prompt, Sample


def fresh_samples(
    config: DataConfig,
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Prompt],
    seed: int,
    step: int,
    recorded: Sequence[Sample] = (),
) -> list[Sample]:
    """Return answers to `data.refresh_prompts` prompts, drawn by `seed` and `step`, by the current draft.

    With `data.source=mixed` the teacher or the file answers some of them, see `share_prompts`. Prompts that
    the file should answer and does not are passed over. By token, both models write each answer in turn. With a stored
    signal (`data.signal`) the target scores the text here, once.

    Args:
        recorded: answers by the teacher, from which its share is drawn. Empty: it writes.
    """
    turn = stable_seed(seed, "refresh", step)
    prompts = answerable(config, prompts, turn)
    chooser = torch.Generator().manual_seed(turn % (1 << 62))
    order = torch.randperm(len(prompts), generator=chooser)[: config.refresh_prompts].tolist()
    chosen = [prompts[i] for i in order]
    written: list[Sample] = []
    for generator, share in share_prompts(config, target, draft, chosen, turn):
        if recorded and generator is not None and generator.source == "teacher":
            drawn = torch.randint(len(recorded), (len(share),), generator=chooser).tolist()
            written += [recorded[i] for i in drawn]
        elif generator is not None:
            written += _answer(generator, share, config, target, seed, step)
        elif share:
            written += fixed_samples(share, target, config.max_new_tokens)
    return _with_signal(written, target, config, stable_seed(seed, "score", step))


def _with_signal(samples: Sequence[Sample], target: LanguageModel, config: DataConfig, seed: int) -> list[Sample]:
    """Return the samples with the signal that `data.signal` names. Recorded signals of that kind are kept."""
    wanted = signal_request(config)
    if wanted is None:
        return [replace(sample, signal=None) for sample in samples]
    recorded = [s for s in samples if s.signal is not None and s.signal.request == wanted]
    unknown = [s for s in samples if s.signal is None or s.signal.request != wanted]
    return recorded + score(unknown, target, wanted, seed)


def recorded_answers(config: DataConfig, target: LanguageModel, folder: DataFolder) -> list[Sample]:
    """Return the cache's answers by the teacher for a run that is mixed by sequence with it, else nothing."""
    mixes = config.source == "mixed" and config.mixed_by == "sequence" and config.mixed_with == "teacher"
    if not mixes or config.cache is None or not folder.samples.is_dir():
        return []
    samples = read_checked(folder.samples, target, f"data.cache={config.cache}")
    return [sample for sample in samples if sample.source == "teacher"]


def _answer(
    generator: Generator,
    prompts: Sequence[Prompt],
    config: DataConfig,
    target: LanguageModel,
    seed: int,
    step: int,
) -> list[Sample]:
    requests = [GenerationRequest(p, config.max_new_tokens, stable_seed(seed, step, p.id)) for p in prompts]
    answers = dict(generator.generate(requests, config.policy, stop_ids=target.stop_ids))
    return [answers[i] for i in sorted(answers)]
