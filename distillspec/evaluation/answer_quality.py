"""Quality of answers: their share of right ones, and their distance to the target's distribution."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from distillspec.evaluation.bootstrap import interval
from distillspec.models import LanguageModel
from distillspec.sampling import policy_probs
from distillspec.types import Interval, Prompt, SamplingPolicy

BINS = 20
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SAMPLES = 1000  # of the bootstrap


@dataclass(frozen=True)
class Answer:
    """One answer. `token_ids`: without the prompt."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Likelihood:
    """An answer's n tokens as the target sees them, under the policy that they were sampled with.

    Attributes:
        surprise: Σ −log p(token), nats, over the tokens that the policy allows.
        entropy: Σ H(p), nats, over the same: what the target's own tokens would have on average.
        ruled_out: tokens that the policy rules out. An engine's pass rounds differently from this one, so a token at
            the edge of a filter may lie on either side.
        best: tokens that are the target's most probable one.
        quantiles: `[n]` in [0, 1], the probability of more probable tokens plus a random share of that of the tokens as
            probable as this one, which is among them: uniform if and only if the tokens were drawn from p.
    """

    surprise: float
    entropy: float
    ruled_out: int
    best: int
    quantiles: Tensor

    @property
    def tokens(self) -> int:
        return len(self.quantiles)


@dataclass(frozen=True)
class Quality:
    """Figures of one verification. Intervals are over prompts.

    Attributes:
        accuracy: share of the answers that end with the right number, None without such references.
        perplexity: exp of the target's mean surprise a token.
        surprise_over_entropy: nats a token. 0 for the target's own answers, below 0 for more probable ones.
        ruled_out: share of the tokens that the policy rules out, which these two leave out.
        agreement: share of the tokens that are the target's most probable one.
        distance: total variation between `Likelihood.quantiles` in 20 bins and uniform ones.
        distance_by_chance: what so many tokens of the target's own would give on average.
        distinct: share of the answers' bigrams that occur once.
    """

    answers: int
    tokens: int
    accuracy: Interval | None
    perplexity: float
    surprise_over_entropy: Interval
    ruled_out: float
    agreement: Interval
    distance: float
    distance_by_chance: float
    distinct: float


@torch.inference_mode()
def likelihood(target: LanguageModel, answer: Answer, policy: SamplingPolicy, chance: torch.Generator) -> Likelihood:
    """Score one answer of at least one token by one pass of the target."""
    tokens = torch.tensor(answer.token_ids)
    text = torch.tensor([[*answer.prompt.token_ids, *answer.token_ids]], device=target.device)
    logits = target.logits(text)[0, len(answer.prompt.token_ids) - 1 : -1].float()
    probs = policy_probs(logits, policy).cpu()
    probs_of_tokens = probs.gather(1, tokens[:, None])
    above = probs.masked_fill(probs <= probs_of_tokens, 0.0).sum(1, dtype=torch.float64)
    allowed = probs_of_tokens[:, 0] > 0
    tied = probs.masked_fill(probs != probs_of_tokens, 0.0).sum(1, dtype=torch.float64)
    share = torch.rand(len(tokens), generator=chance, dtype=torch.float64)
    return Likelihood(
        float(-probs_of_tokens[allowed].double().log().sum()),
        float(torch.special.entr(probs[allowed]).sum(dtype=torch.float64)),
        int((~allowed).sum()),
        int((probs.argmax(1) == tokens).sum()),
        (above + share * tied).clamp_(0, 1),
    )


def quality(answers: Sequence[Answer], scores: Sequence[Likelihood], seed: int) -> Quality:
    """Return the figures of answers, each of at least one token, and of their scores."""
    counts = [score.tokens for score in scores]
    allowed = [score.tokens - score.ruled_out for score in scores]
    excess = [score.surprise - score.entropy for score in scores]
    quantiles = torch.cat([score.quantiles for score in scores])
    right = [correct(answer) for answer in answers]
    judged = [is_right for is_right in right if is_right is not None]
    return Quality(
        len(answers),
        sum(counts),
        interval(judged, [1] * len(judged), SAMPLES, seed) if judged else None,
        float(numpy.exp(sum(score.surprise for score in scores) / max(1, sum(allowed)))),
        interval(excess, allowed, SAMPLES, seed),
        1 - sum(allowed) / sum(counts),
        interval([score.best for score in scores], counts, SAMPLES, seed),
        uneven(quantiles.numpy()),
        _uneven_by_chance(len(quantiles), seed),
        _distinct([answer.token_ids for answer in answers]),
    )


def correct(answer: Answer) -> bool | None:
    """Return True if an answer's last number is the reference's, None where the reference has none."""
    wanted = last_number(answer.prompt.response or "")
    return None if wanted is None else last_number(answer.text) == wanted


def last_number(text: str) -> float | None:
    """Return the last number of a text, None without one. "#### 1,200" gives 1200."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def uneven(quantiles: NDArray[numpy.float64]) -> float:
    """Return the total variation between numbers in [0, 1], in 20 bins, and uniform ones."""
    counts = numpy.histogram(quantiles, BINS, (0, 1))[0]
    return float(numpy.abs(counts / len(quantiles) - 1 / BINS).sum() / 2)


def _uneven_by_chance(count: int, seed: int, rounds: int = 100) -> float:
    drawn = numpy.random.default_rng(seed).multinomial(count, [1 / BINS] * BINS, size=rounds)
    return float(numpy.abs(drawn / count - 1 / BINS).sum(1).mean() / 2)


def _distinct(answers: Sequence[Sequence[int]]) -> float:
    """Return the share of bigrams that are different ones. 1 where there is none."""
    bigrams = [pair for tokens in answers for pair in pairwise(tokens)]
    return len(set(bigrams)) / len(bigrams) if bigrams else 1.0
