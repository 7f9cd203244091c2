"""Untrained drafts, and the target's text that their vocabulary and layers are chosen by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distillspec.commands.samples import in_prompt_order
from distillspec.config import DataConfig, DraftConfig
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import stable_seed
from distillspec.data.signal_check import read_checked
from distillspec.errors import ConfigError
from distillspec.generation import make_generator
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.draft import DEFAULT_LAYERS, kept_ids_of
from distillspec.models.eagle import begin_at_size, begin_evenly, channel_scale, lends_layers
from distillspec.models.features import read_states
from distillspec.models.vocabulary import choose_kept_ids, expected_counts
from distillspec.progress import TokenMeter, progress
from distillspec.types import GenerationRequest, Sample

CALIBRATION_PROMPTS = 4
SCALE_TEXTS = 16
TINY = torch.finfo(torch.float32).tiny


def prepare_draft(
    config: DraftConfig,
    target: LanguageModel,
    texts: Callable[[], list[Sample]],
) -> LanguageModel:
    """Return the untrained draft.

    Args:
        texts: returns target-written samples, which choose the vocabulary, the layers with `draft.select=acceptance`,
            and the scale or the norms of states. Called at most once, and only where something is to be chosen.
    """
    by_acceptance = config.kind == "pruned" and config.select == "acceptance" and config.keep is None
    by_states = config.kind == "eagle" and (config.state_norms or not lends_layers(target))
    samples = texts() if by_acceptance or by_states or config.vocabulary is not None else []
    kept_ids = None
    if config.vocabulary is not None:
        kept_ids = vocabulary_of(samples, target, config.vocabulary, among=kept_ids_of(config, target))
    if by_acceptance:
        with progress("choosing layers by measured acceptance") as line:
            total, count = len(target.layers), config.layers or DEFAULT_LAYERS

            def show(left: int) -> None:
                line.update((total - left) / max(1, total - count), f"{left} layers left")

            return initialise_draft(
                config,
                target,
                kept_ids=kept_ids,
                acceptance=make_acceptance_probe(target, samples[:CALIBRATION_PROMPTS]),
                on_step=show,
            )
    draft = initialise_draft(config, target, kept_ids=kept_ids)
    if by_states:
        states = _states_of(target, samples[:SCALE_TEXTS], draft.state_ids)
        if lends_layers(target):
            begin_at_size(draft, states)
        else:
            begin_evenly(draft, channel_scale(states))
    return draft


def _states_of(target: LanguageModel, samples: Sequence[Sample], state_ids: Sequence[int]) -> Tensor:
    """Return these states of a text's tokens `[n, F]`. The first token is left out: its states are unlike.

    Raises:
        ConfigError: there is no text.
    """
    found = []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=target.device)
        places = torch.arange(ids.shape[1], device=target.device)[None]
        found.append(read_states(target, ids, places, state_ids)[0, 1:])
    if not sum(map(len, found)):
        raise ConfigError(f"draft=eagle needs text, to scale the states of {target.name} by; give data.prompts")
    return torch.cat(found)


def target_texts(config: DataConfig, target: LanguageModel, folder: DataFolder, seed: int) -> list[Sample]:
    """Return the samples of `data.cache` that tell of the target, or its answers to a few training prompts without any.

    They come in the order of their prompts.

    Raises:
        ConfigError: the samples are damaged, or not this target's.
    """
    if config.cache is not None and folder.samples.is_dir():  # an on-policy run leaves no samples
        recorded = read_checked(folder.samples, target, f"data.cache={config.cache}")
        if answers := _of_target(recorded):
            return in_prompt_order(answers, folder.read_prompts().train)
    return answered_training_prompts(config, target, folder, seed)


def texts_of_run(
    config: DataConfig, target: LanguageModel, folder: DataFolder, seed: int, samples: list[Sample]
) -> list[Sample]:
    """Return the text that chooses the vocabulary and layers of a run's draft, never the held-out answers.

    Args:
        samples: those to train on, none of an on-policy run.
    """
    if answers := _of_target(samples):
        return answers
    if config.source == "fixed":  # others' text: the target's own is added
        return samples + answered_training_prompts(config, target, folder, seed)
    return target_texts(config, target, folder, seed)


def _of_target(samples: Sequence[Sample]) -> list[Sample]:
    """Return the text that the target wrote, and that of others with its signal."""
    return [sample for sample in samples if sample.source == "teacher" or sample.signal is not None]


def answered_training_prompts(config: DataConfig, target: LanguageModel, folder: DataFolder, seed: int) -> list[Sample]:
    """Return the target's answers to the first `data.refresh_prompts` training prompts, in their order."""
    prompts = folder.read_prompts().train[: config.refresh_prompts]
    requests = [GenerationRequest(p, config.max_new_tokens, stable_seed(seed, "vocabulary", p.id)) for p in prompts]
    generator = make_generator(config.generator, target, slots=config.batch_slots)
    with progress(f"the target answers {len(prompts)} training prompts") as line:
        meter = TokenMeter(line, len(prompts) * config.max_new_tokens)
        answers = dict(generator.generate(requests, config.policy, stop_ids=target.stop_ids, on_tokens=meter))
    return [answers[i] for i in sorted(answers)]


def vocabulary_of(samples: Sequence[Sample], target: LanguageModel, size: int, among: Tensor | None = None) -> Tensor:
    """Return the ids `[size]` that a truncated draft keeps: those most expected in prompts and answers of the target.

    Args:
        among: the ids of a draft that was truncated before, or has fewer.
    """
    counts = expected_counts(samples, target.identity.vocab_size)
    if among is not None:
        counts[~torch.isin(torch.arange(len(counts)), among)] = -1
    return choose_kept_ids(counts, size, target.text_tokenizer, target.stop_ids)


def make_acceptance_probe(target: LanguageModel, samples: Sequence[Sample]) -> Callable[[], float]:
    """Return a function that measures mean log α of the target, with layers taken out, against the whole target.

    The logarithm separates layers where α is tiny: after a few layers are gone it is about .0002 at most tokens, and
    a mean of α would depend on the few tokens where it is not.
    """
    if not samples:
        raise ConfigError("draft.select=acceptance needs calibration text; give prompts")
    inputs = [torch.tensor([s.prompt_ids + s.response_ids], device=target.device) for s in samples]
    with torch.no_grad():
        whole = [torch.softmax(target.logits(ids).float(), -1) for ids in inputs]

    @torch.no_grad()
    def acceptance() -> float:
        overlap = [
            torch.minimum(torch.softmax(target.logits(ids).float(), -1), probs).sum(-1).clamp(min=TINY).log().mean()
            for ids, probs in zip(inputs, whole, strict=True)
        ]
        return float(torch.stack(overlap).mean())

    return acceptance
