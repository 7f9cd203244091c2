"""Whole sequences of a few letters: how often each was written, and how often the target itself would write it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.sampling import policy_probs
from distillspec.serving import SamplingParams

LENGTH = 4  # tokens of a sequence
# Of right engines 3 p-values in 100,000 are below it: with the 70 that tests compute, one new set of random numbers in
# 500 would fail. Seeds are fixed, so that what has passed once passes again. Mutants must be far below.
LIKELY = 3e-5
CAUGHT = 1e-6


@torch.no_grad()
def law(
    model: LanguageModel, prompt: Sequence[int], letters: Sequence[int], params: SamplingParams | None = None
) -> Tensor:
    """Return P of every sequence of the letters behind a prompt `[letters ** LENGTH]` float64, the last token fastest.

    Args:
        params: temperature, filters, frequency penalty, bad words and stop tokens are kept. What ends early goes on
            with its last token.
    """
    params, ids = params or SamplingParams(), torch.tensor(letters)
    texts, probs = torch.tensor([list(prompt)]), torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        written = texts[:, len(prompt) :]
        logits = model.logits(texts)[:, -1, ids].float()
        logits -= params.frequency_penalty * (written[..., None] == ids).sum(1)
        for *before, last in params.bad_word_ids:
            if written.shape[1] >= len(before):
                begun = (written[:, -len(before) :] == torch.tensor(before)).all(1)
                logits.masked_fill_(begun[:, None] & (ids == last), -torch.inf)
        stops = torch.tensor(params.stop_token_ids, dtype=torch.int64)
        over = logits.isinf().all(1) | torch.isin(written, stops).any(1)
        following = policy_probs(logits.masked_fill(over[:, None], 0.0), params.policy).double()
        following = torch.where(over[:, None], (texts[:, -1:] == ids).double(), following)
        probs = (probs[:, None] * following).flatten()
        texts = torch.cat([texts.repeat_interleave(len(ids), 0), ids.repeat(len(texts))[:, None]], 1)
    return probs


def counted(answers: Iterable[Sequence[int]], letters: Sequence[int]) -> Tensor:
    """Count sequences `[letters ** LENGTH]` float64. Short ones go on with their last token."""
    place = {letter: number for number, letter in enumerate(letters)}
    counts = torch.zeros(len(letters) ** LENGTH, dtype=torch.float64)
    for answer in answers:
        number = 0
        for token in [*answer, *answer[-1:] * (LENGTH - len(answer))]:
            number = number * len(letters) + place[token]
        counts[number] += 1
    return counts


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Return the probability that right counts are as far from `probs` as these, by χ².

    It is 0 if something impossible was counted. The rarest sequences are counted together: at least five are expected.
    """
    wanted, order = (probs * counts.sum()).sort()
    seen = counts[order]
    if bool((seen[wanted == 0] > 0).any()):
        return 0.0
    cells = [[0.0, 0.0]]
    for expected, own in zip(wanted.tolist(), seen.tolist(), strict=True):
        if cells[-1][0] >= 5:
            cells.append([0.0, 0.0])
        cells[-1] = [cells[-1][0] + expected, cells[-1][1] + own]
    if cells[-1][0] < 5:  # too few for a cell of their own
        left = cells.pop()
        cells[-1] = [cells[-1][0] + left[0], cells[-1][1] + left[1]]
    statistic = sum((own - expected) ** 2 / expected for expected, own in cells)
    degrees = torch.tensor(len(cells) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, torch.tensor(statistic / 2, dtype=torch.float64)))
