"""Samples from prompts: written by a model, or taken from the file and scored by the target."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from distillspec.config import DataConfig
from distillspec.data.chat import render_response
from distillspec.data.packing import collate
from distillspec.data.prompts import stable_seed
from distillspec.data.shards import ShardWriter, read_samples, recorded_key
from distillspec.errors import ConfigError
from distillspec.models.features import read_states
from distillspec.models.language_model import LanguageModel
from distillspec.models.state_input import previous
from distillspec.recording import SignalRecorder
from distillspec.sampling import policy_probs
from distillspec.signals import HiddenSignal, SignalRequest
from distillspec.types import GenerationRequest, Generator, OutputHead, Prompt, Sample, SamplingPolicy

SCORED_ROWS = 512  # positions whose logits exist at one time


class SampleWriter(Protocol):
    """Destination of samples: shards, or a step before them."""

    @property
    def done_ids(self) -> Collection[str]:
        """Return the ids of prompts that have been answered."""
        ...

    def add(self, sample: Sample) -> None: ...

    def flush(self, *, complete: bool = False) -> None: ...


def sample_responses(
    prompts: Sequence[Prompt],
    generator: Generator,
    writer: SampleWriter,
    *,
    policy: SamplingPolicy,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    signal: SignalRequest | None,
    seed: int,
    deadline: float | None = None,
    on_tokens: Callable[[int], None] | None = None,
    lot: int | None = None,
) -> int:
    """Answer the prompts that `writer` does not hold yet. Return the number left without an answer.

    Each answer depends on the seed and its prompt's id alone, so an interrupted run and a whole one agree. The caller
    marks the end. Nothing is written where no prompt waits.

    Args:
        deadline: seconds of `time.monotonic` at which the work ends. Unfinished answers are kept as they are.
        on_tokens: called with the number of tokens each step added.
        lot: prompts answered between two calls of `writer.flush`, None: all. A writer that runs the models itself does
            so in `flush` alone: there they have been given back.
    """
    waiting = [p for p in prompts if p.id not in writer.done_ids]
    requests = [GenerationRequest(p, max_new_tokens, stable_seed(seed, p.id)) for p in waiting]
    size, answered = lot or max(1, len(requests)), 0
    for first in range(0, len(requests), size):
        if first and deadline is not None and time.monotonic() >= deadline:
            break
        stream = generator.generate(
            requests[first : first + size],
            policy,
            stop_ids=stop_ids,
            signal=signal,
            on_tokens=on_tokens,
            deadline=deadline,
        )
        try:
            for _, sample in stream:
                writer.add(sample)
                answered += 1
        finally:
            writer.flush()
    return len(requests) - answered


def fixed_samples(prompts: Sequence[Prompt], target: LanguageModel, max_new_tokens: int) -> list[Sample]:
    """Return the file's own responses in the target's template. Prompts without one are left out.

    What the target cannot read behind a prompt is cut off.

    Raises:
        ConfigError: neither tokenizer nor target tells how a response ends.
    """
    reads = target.longest_text or sys.maxsize
    rooms = [min(max_new_tokens, reads - len(p.token_ids)) for p in prompts]
    return [
        _fixed(p, render_response(target.text_tokenizer, p.response, target.stop_ids), room)
        for p, room in zip(prompts, rooms, strict=True)
        if p.response and room > 0
    ]


def check_responses(config: DataConfig, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts of which none has a response, where the file's responses are wanted.

    Raises:
        ConfigError: naming the setting that wants them.
    """
    if not config.uses_fixed_responses or any(prompt.response for prompt in prompts):
        return
    wanted = "data.source=fixed" if config.source == "fixed" else "data.mixed_with=fixed"
    if config.cache is not None:
        raise ConfigError(
            f"{wanted}: no training prompt of data.cache={config.cache} has a response; name one of prompts that have"
        )
    raise ConfigError(
        f"{wanted} found no responses among the training prompts; name their column with data.response_field"
    )


def _fixed(prompt: Prompt, response: tuple[int, ...], limit: int) -> Sample:
    return Sample(prompt.id, prompt.domain, prompt.token_ids, response[:limit], None, finished=len(response) <= limit)


@torch.no_grad()
def score(samples: Sequence[Sample], target: LanguageModel, signal: SignalRequest, seed: int) -> list[Sample]:
    """Return the samples with the target's signal at every response token, from one forward pass each.

    A sample's random draws depend on `seed` and its prompt's id alone, as in `sample_responses`.
    """
    scored: dict[int, Sample] = {}
    by_length = sorted(range(len(samples)), key=lambda i: len(samples[i]))  # like lengths together pad little
    for start in range(0, len(samples), 8):
        indices = by_length[start : start + 8]
        chunk = [samples[i] for i in indices]
        batch = collate([[s] for s in chunk], max(len(s) for s in chunk), target.text_tokenizer.eos_token_id or 0)
        hidden = target.hidden(batch.input_ids.to(target.device), batch.position_ids.to(target.device))
        hidden = hidden.reshape(-1, hidden.shape[-1])[batch.loss_index.to(target.device)]
        if signal.kind == "hidden":
            lengths = [len(sample.response_ids) for sample in chunk]
            for index, states in zip(indices, hidden.split(lengths), strict=True):
                scored[index] = replace(samples[index], signal=hidden_signal(states, target.head))
            continue
        recorders = [SignalRecorder(signal, stable_seed(seed, sample.prompt_id)) for sample in chunk]
        owners = [recorder for recorder, s in zip(recorders, chunk, strict=True) for _ in s.response_ids]
        for first, part in zip(range(0, len(owners), SCORED_ROWS), hidden.split(SCORED_ROWS), strict=True):
            SignalRecorder.record(target.head.logits(part).float(), owners[first : first + SCORED_ROWS])
        for index, sample, recorder in zip(indices, chunk, recorders, strict=True):
            scored[index] = replace(sample, signal=recorder.finish())
    return [scored[index] for index in range(len(samples))]


def hidden_signal(hidden: Tensor, head: OutputHead) -> HiddenSignal:
    """Return the signal of a text's final states `[T, D]`, on the CPU. log Z is that of the rounded states' logits."""
    kept = hidden.to(torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float16)
    parts = kept.to(head.weight.dtype).split(SCORED_ROWS)
    log_z = torch.cat([torch.logsumexp(head.logits(part).float(), -1) for part in parts])
    return HiddenSignal(kept.to("cpu", copy=True), log_z.cpu())


@torch.no_grad()
def with_writer_logprobs(
    samples: Sequence[Sample], draft: LanguageModel, policy: SamplingPolicy, target: LanguageModel
) -> list[Sample]:
    """Return the samples, those of `draft` with each token's log-probability when it was drawn.

    This takes one more forward pass over the draft's text, in evaluation mode: text is drawn without dropout. A draft
    that reads the target's states needs a pass of the target too.
    """
    was_training = draft.model.training
    draft.model.eval()
    try:
        return [
            replace(s, writer_logprobs=_drawn_with(s, draft, policy, target)) if s.source == "draft" else s
            for s in samples
        ]
    finally:
        draft.model.train(was_training)


def response_logits(sample: Sample, model: LanguageModel, target: LanguageModel | None = None) -> Iterator[Tensor]:
    """Yield the float32 logits `[≤ SCORED_ROWS, width]` that a pass over the whole text gives for its response.

    Args:
        target: hands out the states that a draft reads. Its logits are those of first drafted positions.
    """
    ids = torch.tensor([sample.prompt_ids + sample.response_ids], device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    fed = None
    if model.state_input is not None:
        assert target is not None, "a draft that reads states needs the target's"
        fed = previous(model.state_input.fuse(read_states(target, ids, positions, model.state_ids)), positions)
    hidden = model.hidden(ids, positions, fed)[0, len(sample.prompt_ids) - 1 : -1]
    for part in hidden.split(SCORED_ROWS):
        yield model.head.logits(part).float()


def _drawn_with(sample: Sample, draft: LanguageModel, policy: SamplingPolicy, target: LanguageModel) -> Tensor:
    probs = torch.cat([policy_probs(part, policy) for part in response_logits(sample, draft, target)])
    labels = torch.tensor(sample.response_ids, device=draft.device)
    columns = labels if draft.kept_ids is None else torch.searchsorted(draft.kept_ids.to(labels.device), labels)
    return probs.gather(-1, columns[:, None])[:, 0].log().cpu()


def collection_key(
    target: LanguageModel, config: DataConfig, policy: SamplingPolicy, seed: int, writer_hash: str
) -> dict[str, Any]:
    """Return the identity of a folder of samples: their writer, their signal, and all settings that change them."""
    mixed = {name: getattr(config, name) for name in ("mixed_lambda", "mixed_by", "mixed_with")}
    return {
        "target": asdict(target.identity),
        **(mixed if config.source == "mixed" else {}),
        "source": config.source,
        "writer": writer_hash,
        "policy": asdict(policy),
        "signal": config.signal,
        "signal_entries": config.signal_entries,
        **_recorded_draws(config),
        "max_new_tokens": config.max_new_tokens,
        "seed": seed,
    }


def signal_request(config: DataConfig) -> SignalRequest | None:
    if config.signal == "none":
        return None
    if config.signal == "hidden":
        return SignalRequest("hidden")
    if config.signal == "sampled":
        return SignalRequest("sampled", config.signal_entries)
    return SignalRequest("topk", config.signal_entries, config.tail_draws)


def _recorded_draws(config: DataConfig) -> dict[str, int]:
    """Return the key's entry for tail draws, empty without any: older folders have no such entry and stay valid."""
    draws = config.tail_draws if config.signal == "topk" else 0
    return {"tail_draws": draws} if draws else {}


def held_out_samples(
    prompts: Sequence[Prompt],
    target: LanguageModel,
    generator: Generator,
    folder: Path,
    *,
    policy: SamplingPolicy,
    max_new_tokens: int,
    seed: int,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Sample]:
    """Return the target's own answers to held-out prompts under the deployed policy, made once a folder.

    Existing answers are used whatever `seed` is: runs that share a data folder share them.
    """
    seed = recorded_key(folder).get("seed", seed)
    key = {
        "target": asdict(target.identity),
        "policy": asdict(policy),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    writer = ShardWriter(folder, key, shard_sequences=max(1, len(prompts)))
    sample_responses(
        prompts,
        generator,
        writer,
        policy=policy,
        stop_ids=target.stop_ids,
        max_new_tokens=max_new_tokens,
        signal=None,
        seed=stable_seed(seed, "held-out"),
        on_tokens=on_tokens,
    )
    writer.flush(complete=True)
    order = {p.id: i for i, p in enumerate(prompts)}
    samples = [s for s in read_samples(folder, target.identity) if s.prompt_id in order]
    return sorted(samples, key=lambda s: order[s.prompt_id])
