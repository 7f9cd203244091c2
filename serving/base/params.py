"""Sampling parameters of one request, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from distillspec.config.engine import EXACT
from distillspec.errors import ConfigError
from distillspec.sampling import check_policy
from distillspec.types import SamplingPolicy

MAX_LOGPROBS = 64
LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0  # beyond them logits leave what a float can hold
MOST_BIAS = 1e9
SEED_LIMIT = 2**63


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. Every field holds at every position of a speculated window.

    Args:
        temperature: 0 is greedy.
        top_k, top_p, min_p: filters, applied in this order after the temperature. 0, 1 and 0 switch them off.
        max_tokens: the most tokens to write. None: as many as the context allows.
        min_tokens: no stop token is written and no stop string is looked for before so many tokens.
        stop: strings that end the text. Neither they nor anything after them is returned.
        stop_token_ids: more ids that end the text, beside the model's own.
        ignore_eos: continue past the model's own end-of-text ids.
        seed: with a seed, the output depends on the prompt, these parameters and the target alone (float32): not
            on the draft, the speculation length, the load or a draft swap.
        n: number of independent answers.
        logprobs: return the target's raw log-probability of each token and of so many best alternatives.
        repetition_penalty: multiplicative, > 1 discourages tokens of prompt and output (CTRL, Keskar et al. 2019).
        presence_penalty, frequency_penalty: subtracted from logits of output tokens, once and per occurrence.
        logit_bias: token id → what is added to its logit.
        bad_words: strings that must not appear (as their token sequences).
        bad_word_ids: the same as token ids.
        allowed_token_ids: nothing else may be written.
        speculate: False never drafts for this request.
        speculation_length: at most so many levels of drafted tokens a step. Trees may have several tokens a level.
        require_exact: refuse the request where the engine's verification is lossy.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    speculate: bool = True
    speculation_length: int | None = None
    require_exact: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if self.allowed_token_ids is not None:  # each once: they are gone through in every step
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
        object.__setattr__(self, "top_k", max(0, self.top_k))  # vLLM's -1 also switches it off
        check_policy(self.policy)
        self._check_counts()
        self._check_penalties()
        self._check_tokens()

    @property
    def policy(self) -> SamplingPolicy:
        """Return temperature and filters."""
        return SamplingPolicy(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def draws(self) -> bool:
        """True if tokens are drawn, and are no function of logits and seed."""
        return not self.is_greedy and self.seed is None

    @property
    def only_policy(self) -> bool:
        """True if nothing but temperature and filters changes the logits, at any position."""
        changed = self.penalises or self.logit_bias or self.bad_words or self.bad_word_ids or self.min_tokens
        return not changed and self.allowed_token_ids is None

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def refused_by(self, verification: str) -> str | None:
        """Return why an engine that verifies like this refuses the request, None if it does not."""
        if verification in EXACT or not self.require_exact:
            return None
        return (
            f"require_exact is refused: verification={verification} is lossy; leave it out, or use an engine with "
            "verification=exact"
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError for a token id that the model does not have."""
        for name, ends in self._extremes.items():
            for token in ends:
                _require(0 <= token < vocab_size, f"{name}: token id {token} is outside 0…{vocab_size - 1}")

    @cached_property
    def _extremes(self) -> dict[str, tuple[int, int]]:
        """Return the smallest and largest id of each field that holds ids. Cached, for it is checked once a prompt."""
        groups: dict[str, Any] = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_word_ids": [i for word in self.bad_word_ids for i in word],
        }
        return {name: (min(ids), max(ids)) for name, ids in groups.items() if ids}

    @cached_property
    def banned_ids(self) -> tuple[tuple[int, ...], ...]:
        """Return `bad_word_ids`, each once, sorted. Cached, for it is read once a prompt."""
        return tuple(sorted({tuple(word) for word in self.bad_word_ids}))

    def check_needs_no_text(self) -> None:
        """Raise ConfigError for parameters that need a tokenizer."""
        for name, ids in (("stop", "stop_token_ids"), ("bad_words", "bad_word_ids")):
            _require(not getattr(self, name), f"{name} needs a tokenizer, which this model lacks; use {ids}")

    def _check_counts(self) -> None:
        limit = self.max_tokens
        _require(limit is None or limit >= 1, f"max_tokens={limit} must be at least 1")
        _require(self.min_tokens >= 0, f"min_tokens={self.min_tokens} must be at least 0")
        _require(limit is None or self.min_tokens <= limit, f"min_tokens={self.min_tokens} is above max_tokens={limit}")
        _require(self.n >= 1, f"n={self.n} must be at least 1")
        count = self.logprobs
        _require(count is None or 0 <= count <= MAX_LOGPROBS, f"logprobs={count} must be between 0 and {MAX_LOGPROBS}")
        length = self.speculation_length
        _require(length is None or length >= 0, f"speculation_length={length} must be at least 0")
        seed = self.seed
        _require(seed is None or 0 <= seed < SEED_LIMIT, f"seed={seed} must be between 0 and 2**63 - 1")

    def _check_penalties(self) -> None:
        _require(
            LEAST_REPETITION <= self.repetition_penalty <= MOST_REPETITION,
            f"repetition_penalty={self.repetition_penalty} must be between {LEAST_REPETITION:g} and {MOST_REPETITION:g}"
            " (1 switches it off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, f"{name}={value} must be between -2 and 2")

    def _check_tokens(self) -> None:
        _require(all(self.stop), "stop: an empty string stops before anything is written; remove it")
        _require(all(self.bad_words) and all(self.bad_word_ids), "bad_words: an empty word would ban everything")
        _require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids is empty: nothing could be written; give at least one id or leave it out",
        )
        for token, bias in self.logit_bias.items():
            _require(
                bias <= MOST_BIAS, f"logit_bias[{token}]={bias} must be a number of at most {MOST_BIAS:g}, or -inf"
            )


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)
