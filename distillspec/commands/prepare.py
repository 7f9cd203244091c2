"""The steps that several commands share: prompts, samples, held-out answers, the draft's vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from distillspec.commands.unseen import unseen
from distillspec.config import DataConfig, DraftConfig
from distillspec.data.collect import (
    collection_key,
    fixed_samples,
    held_out_samples,
    sample_responses,
    score,
    signal_request,
)
from distillspec.data.folder import DataFolder, find_data_folder
from distillspec.data.prompts import check_prompts, load_prompts, split_prompts, stable_seed
from distillspec.data.scoring import ScoringWriter
from distillspec.data.selfprompt import DEFAULT_PROMPTS, write_prompts
from distillspec.data.shards import ShardWriter, read_samples
from distillspec.errors import ConfigError
from distillspec.generation import SlotGenerator, make_generator
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.draft import DEFAULT_LAYERS, kept_ids_of
from distillspec.models.vocabulary import choose_kept_ids, expected_counts
from distillspec.progress import TokenMeter, progress
from distillspec.types import GenerationRequest, Generator, Prompt, Sample, SamplingPolicy

CALIBRATION_PROMPTS = 4
TINY = torch.finfo(torch.float32).tiny
SCORED_TOGETHER = 32  # fixed responses between two looks at the clock


def prepare_folder(
    config: DataConfig, target: LanguageModel, own: Path, seed: int, trained: frozenset[str] = frozenset()
) -> DataFolder:
    """The data folder to use: the cache, or the run's own with its prompts written.

    `trained` are keys of prompts that must not be held out (`unseen`).
    """
    _check_room(config, target)
    if config.cache is not None:
        return find_data_folder(config.cache)
    folder = DataFolder(own)
    if folder.has_prompts:
        return folder
    if config.prompts == "selfprompt":
        wanted = (config.num_prompts or DEFAULT_PROMPTS) + config.eval_prompts
        with progress(f"{target.name} writes {wanted} prompts") as line:
            found = 0

            def count(new: int) -> None:
                nonlocal found
                found += new
                line.update(found / wanted, f"{found} of {wanted}")

            generator = make_generator(config.generator, target, slots=config.batch_slots)
            # A draft that knows prompts gets others, so none need to be reserved.
            seed = stable_seed(seed, "unseen", *sorted(trained)) if trained else seed
            prompts = split_prompts(write_prompts(target, generator, config, seed, count), config, trained, reserved=0)
    else:
        prompts = load_prompts(config, target.text_tokenizer, trained)
        if prompts.dropped_long:
            print(f"left out {prompts.dropped_long} prompts above data.max_prompt_tokens={config.max_prompt_tokens}")
    folder.write_prompts(prompts)
    return folder


def check_sources(config: DataConfig) -> None:
    """Refuse files that do not exist, whether or not the command comes to read them.

    Raises:
        ConfigError: `data.cache` is no data folder, or `data.prompts` no file.
    """
    if config.cache is not None:
        find_data_folder(config.cache)
    else:
        check_prompts(config)


def _check_room(config: DataConfig, target: LanguageModel) -> None:
    limit = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.max_new_tokens >= limit:
        raise ConfigError(
            f"data.max_new_tokens={config.max_new_tokens} leaves no room for a prompt: {target.name} reads at most "
            f"{limit} tokens"
        )


def prepare_samples(
    config: DataConfig,
    target: LanguageModel,
    folder: DataFolder,
    seed: int,
    *,
    draft: LanguageModel | None = None,
) -> list[Sample]:
    """The training samples of a data folder, made if they are missing.

    `source=fixed` takes the file's responses and has the target score them; other sources sample, the draft's
    part with `draft`.
    """
    prompts = folder.read_prompts().train
    writer_hash = draft.identity.weights_hash if draft is not None else target.identity.weights_hash
    key = collection_key(target, config, config.policy, seed, writer_hash)
    if config.cache is not None:
        samples = read_samples(folder.samples, target.identity)
        # Asked for no stored signal, the live target judges whatever the cache has recorded.
        return [replace(s, signal=None) for s in samples] if config.signal == "none" else samples
    writer = ShardWriter(folder.samples, key, config.shard_sequences)
    if not writer.complete:
        if config.source == "fixed":
            _score_into(writer, prompts, target, config, seed)
        else:
            _sample_into(writer, prompts, target, draft, config, seed)
    return read_samples(folder.samples, target.identity)


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
        for generator, share in _shares(config, target, draft, prompts, seed):
            if generator is None:
                waiting = [p for p in share if p.id not in writer.done_ids]
                for sample in fixed_samples(waiting, target, config.max_new_tokens) if waiting else []:
                    scored.add(sample)
                scored.flush()
                continue
            by_draft = generator.source == "draft"  # which cannot tell what the target thinks
            done = sample_responses(
                share,
                generator,
                scored if by_draft else writer,
                policy=config.policy,
                stop_ids=target.stop_ids,
                max_new_tokens=config.max_new_tokens,
                signal=None if by_draft else signal,
                seed=seed,
                deadline=deadline,
                on_tokens=meter,
            )
            if not done:
                break
    writer.flush(complete=True)


def _shares(
    config: DataConfig, target: LanguageModel, draft: LanguageModel | None, prompts: Sequence[Prompt], seed: int
) -> list[tuple[Generator | None, list[Prompt]]]:
    """Who answers which prompts; None is the file. Mixed by sequence, a prompt's id decides with probability λ."""
    if draft is None or config.source != "mixed" or config.mixed_by == "token":
        return [(choose_generator(config, target, draft), list(prompts))]
    by_draft = [stable_seed(seed, "mixed", p.id) < config.mixed_lambda * 2**63 for p in prompts]
    ours = [p for p, mine in zip(prompts, by_draft, strict=True) if mine]
    theirs = [p for p, mine in zip(prompts, by_draft, strict=True) if not mine]
    writes_rest = None if config.mixed_with == "fixed" else _teacher(config, target, draft)
    return [(_draft_writer(config, draft), ours), (writes_rest, theirs)]


def choose_generator(config: DataConfig, target: LanguageModel, draft: LanguageModel | None) -> Generator:
    """Who writes: the target, the draft, or (mixed by token) both in turn."""
    if draft is None or config.source == "teacher":
        return _teacher(config, target, draft)
    if config.source == "draft":
        return _draft_writer(config, draft)
    return SlotGenerator(target, slots=config.batch_slots, source="mixed", other=draft, other_share=config.mixed_lambda)


def _teacher(config: DataConfig, target: LanguageModel, draft: LanguageModel | None) -> Generator:
    return make_generator(
        config.generator,
        target,
        slots=config.batch_slots,
        draft=draft,
    )


def _draft_writer(config: DataConfig, draft: LanguageModel) -> Generator:
    return make_generator(config.generator, draft, slots=config.batch_slots, source="draft")


def fresh_samples(
    config: DataConfig,
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Prompt],
    seed: int,
    step: int,
    recorded: Sequence[Sample] = (),
) -> list[Sample]:
    """On-policy data: `data.refresh_prompts` prompts answered by the current draft, or by it and another.

    `mixed` by sequence lets the draft answer each prompt with probability λ and the teacher (or the file)
    the rest; by token both write every answer together. Where the teacher's answers are `recorded`, its share is
    taken from them. The target judges live (`data.signal=none`) or once, here, for text that is learnt from
    several times.
    """
    chooser = torch.Generator().manual_seed(stable_seed(seed, "refresh", step) % (1 << 62))
    order = torch.randperm(len(prompts), generator=chooser)[: config.refresh_prompts].tolist()
    chosen = [prompts[i] for i in order]
    written: list[Sample] = []
    for generator, share in _shares(config, target, draft, chosen, stable_seed(seed, "refresh", step)):
        if recorded and generator is not None and generator.source == "teacher":
            places = torch.randint(len(recorded), (len(share),), generator=chooser).tolist()
            written += [recorded[i] for i in places]
        elif generator is not None:
            written += _answer(generator, share, config, target, seed, step)
        elif share:
            written += fixed_samples(share, target, config.max_new_tokens)
    return _judged(written, target, config, stable_seed(seed, "score", step))


def _judged(samples: Sequence[Sample], target: LanguageModel, config: DataConfig, seed: int) -> list[Sample]:
    """The samples with the signal that `data.signal` asks for, the target's recorded one where it is of that kind."""
    wanted = signal_request(config)
    if wanted is None:
        return [replace(sample, signal=None) for sample in samples]
    recorded = [s for s in samples if s.signal is not None and s.signal.request == wanted]
    unknown = [s for s in samples if s.signal is None or s.signal.request != wanted]
    return recorded + score(unknown, target, wanted, seed)


def recorded_answers(config: DataConfig, target: LanguageModel, folder: DataFolder) -> list[Sample]:
    """The cache's answers by the teacher, for the teacher's share of a run mixed by sequence; empty without a cache."""
    mixes = config.source == "mixed" and config.mixed_by == "sequence" and config.mixed_with == "teacher"
    if not mixes or config.cache is None or not folder.samples.is_dir():
        return []
    return [sample for sample in read_samples(folder.samples, target.identity) if sample.source == "teacher"]


def answered_training_prompts(config: DataConfig, target: LanguageModel, folder: DataFolder, seed: int) -> list[Sample]:
    """The target's answers to `data.refresh_prompts` training prompts: text to choose vocabulary and layers by."""
    prompts = folder.read_prompts().train[: config.refresh_prompts]
    requests = [GenerationRequest(p, config.max_new_tokens, stable_seed(seed, "vocabulary", p.id)) for p in prompts]
    generator = make_generator(config.generator, target, slots=config.batch_slots)
    with progress(f"the target answers {len(prompts)} training prompts") as line:
        meter = TokenMeter(line, len(prompts) * config.max_new_tokens)
        written = generator.generate(requests, config.policy, stop_ids=target.stop_ids, on_tokens=meter)
        return [sample for _, sample in written]


def prepare_held_out(
    config: DataConfig,
    policy: SamplingPolicy,
    target: LanguageModel,
    folder: DataFolder,
    seed: int,
    trained: frozenset[str] = frozenset(),
) -> list[Sample]:
    """The target's answers under the deployed policy to the held-out prompts that are not among the `trained`."""
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


def prepare_draft(
    config: DraftConfig,
    target: LanguageModel,
    texts: Callable[[], list[Sample]],
) -> LanguageModel:
    """The untrained draft; `texts` (target-written samples) choose its vocabulary and, if asked, its layers."""
    by_acceptance = config.kind == "pruned" and config.select == "acceptance" and config.keep is None
    samples = texts() if by_acceptance or config.vocabulary is not None else []  # may have to be sampled: ask once
    kept_ids = None
    if config.vocabulary is not None:
        kept_ids = vocabulary_of(samples, target, config.vocabulary, among=kept_ids_of(config))
    if by_acceptance:
        with progress("choosing layers by measured acceptance") as line:
            total, count = len(target.layers), config.layers or DEFAULT_LAYERS

            def show(left: int) -> None:
                line.update((total - left) / max(1, total - count), f"{left} layers left")

            return initialise_draft(
                config,
                target,
                kept_ids=kept_ids,
                acceptance=_acceptance_probe(target, samples[:CALIBRATION_PROMPTS]),
                on_step=show,
            )
    return initialise_draft(config, target, kept_ids=kept_ids)


def vocabulary_of(samples: Sequence[Sample], target: LanguageModel, size: int, among: Tensor | None = None) -> Tensor:
    """The ids a truncated draft keeps: the most to be expected in prompts and target samples.

    `among` are the ids to choose from where the draft has been truncated before (special tokens are among them).
    """
    counts = expected_counts(samples, target.identity.vocab_size)
    if among is not None:
        counts[~torch.isin(torch.arange(len(counts)), among)] = -1
    return choose_kept_ids(counts, size, target.text_tokenizer)


def _acceptance_probe(target: LanguageModel, samples: Sequence[Sample]) -> Callable[[], float]:
    """Mean log α, on a few samples, of the target with layers taken out against the whole target.

    The logarithm, since after a few layers α is about .0002 wherever one more is taken out, and only its order of
    magnitude still tells layers apart. A mean of α would be decided by the few tokens that are left.
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
    """When sampling or scoring has to end, in seconds of `time.monotonic`."""
    return None if config.max_minutes is None else time.monotonic() + 60 * config.max_minutes


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
