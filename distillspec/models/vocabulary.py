"""Truncated draft vocabularies: the tokens that the draft's head keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distillspec.signals import TeacherSignal
from distillspec.types import Sample


def count_tokens(sequences: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Return the number of times each id occurs, `[V]` int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        if len(sequence):
            counts += torch.bincount(torch.tensor(sequence, dtype=torch.int64), minlength=vocab_size)[:vocab_size]
    return counts


def expected_counts(samples: Iterable[Sample], vocab_size: int, *, prompts: bool = True) -> Tensor:
    """Return the expected number of times each id occurs, `[V]` float64.

    Prompt tokens count once. Response positions count by the tokens of a recorded signal, if there are any: these say
    more than the one token that was drawn.

    Args:
        prompts: count their tokens too.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for sample in samples:
        signal = sample.signal if isinstance(sample.signal, TeacherSignal) else None
        counts += count_tokens(
            [sample.prompt_ids if prompts else (), () if signal is not None else sample.response_ids], vocab_size
        )
        if signal is not None:
            counts.index_add_(0, signal.ids.flatten().long().clamp(min=0), _weights(signal).flatten())
    return counts


def choose_kept_ids(
    counts: Tensor, size: int, tokenizer: PreTrainedTokenizerBase, stop_ids: Iterable[int] = ()
) -> Tensor:
    """Return the `size` most frequent ids, sorted, with all `lasting_ids`. Ties go to lower ids.

    Lower ids of a BPE tokenizer are the earlier, more common merges, so unseen tokens are filled in by id. Lasting ids
    are kept even if they are more than `size`. Ids with a negative count are left out.
    """
    counts = counts.to(torch.float64, copy=True)
    lasting = [token for token in lasting_ids(tokenizer, stop_ids, counts.numel()) if counts[token] >= 0]
    counts[lasting] = counts.max() + 1
    order = torch.argsort(counts, descending=True, stable=True)
    return torch.sort(order[: max(size, len(lasting))]).values


def _weights(signal: TeacherSignal) -> Tensor:
    """Return each recorded entry's count, `[T, K]` float64: its probability, or its share of the draws."""
    if signal.kind == "topk":
        return signal.logprobs.double().exp()
    return torch.full(signal.ids.shape, 1 / max(1, signal.ids.shape[1]), dtype=torch.float64)


def lasting_ids(tokenizer: PreTrainedTokenizerBase | None, stop_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return the ids below `vocab_size` that a head never loses: stop ids, and special tokens with a role.

    Special tokens without one count as often as they occur: gemma's tokenizer reserves 6,200, Llama 3's 250.
    """
    special = () if tokenizer is None else tokenizer.all_special_ids
    return sorted(i for i in {*special, *stop_ids} if i < vocab_size)
