"""Checks a request must pass before it is queued."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from distillspec.errors import ConfigError
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request, RequestRefused
from distillspec.serving.sequences.scheduler import Limits


def check_request(
    request: Request,
    limits: Limits,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    id_taken: bool,
    verification: str = "exact",
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> None:
    """Refuse a request that could never run.

    Args:
        verification: of the engine.
        stop_ids: the model's own end-of-text ids.
        bad_words: of the parameters, as tokens.

    Raises:
        RequestRefused: its id is taken, its prompt does not fit, or a value is out of range.
        ConfigError: its parameters name tokens that do not exist, or need text and there is no tokenizer.
    """
    request.params.check_vocabulary(vocab_size)
    if tokenizer is None:
        request.params.check_needs_no_text()
    problem = "a request with this id is running already" if id_taken else _problem(request, limits, vocab_size)
    problem = problem or request.params.refused_by(verification) or _excluded(request.params, stop_ids, bad_words)
    if problem is not None:
        raise RequestRefused(f"request {request.id}: {problem}")


def _problem(request: Request, limits: Limits, vocab_size: int) -> str | None:
    length, most = len(request.prompt_ids), min(limits.max_len, limits.cache_tokens)
    if request.deadline_s is not None and not request.deadline_s >= 0:
        return f"deadline_s={request.deadline_s} must be at least 0"
    if length == 0:
        return "the prompt is empty; give at least one token"
    if length >= most:
        return (
            f"a prompt of {length} tokens leaves no room to answer: prompt and output together may have "
            f"{most} (max_model_len)"
        )
    if request.max_time_per_token_s is not None and not request.max_time_per_token_s > 0:
        return f"max_time_per_token_s={request.max_time_per_token_s} must be above 0 seconds"
    if bad := [token for token in request.prompt_ids if not 0 <= token < vocab_size]:
        return f"token id {bad[0]} is not in the model's vocabulary (0…{vocab_size - 1})"
    return None


def _excluded(params: SamplingParams, stop_ids: Sequence[int], bad_words: Sequence[Sequence[int]]) -> str | None:
    """Return a line if no allowed id may be the first one: all logits would be −∞."""
    if params.allowed_token_ids is None:
        return None
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        banned |= {*params.stop_token_ids, *(() if params.ignore_eos else stop_ids)}
    if any(token not in banned for token in params.allowed_token_ids):  # nearly always the first one
        return None
    return (
        f"allowed_token_ids={list(params.allowed_token_ids)[:8]} are all bad words, or stop tokens before "
        f"min_tokens={params.min_tokens}, so nothing may be written; allow another id"
    )


def bad_words(params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None) -> tuple[tuple[int, ...], ...]:
    """Return the bad words as token sequences, each spelt as at the start of a text and as after a space.

    Raises:
        ConfigError: the tokenizer cannot encode a word, or the model has no tokenizer.
    """
    if tokenizer is None:
        params.check_needs_no_text()
    if tokenizer is None or not params.bad_words:
        return params.banned_ids
    words = set(params.banned_ids)
    for word in params.bad_words:
        for spelt in (word, f" {word.lstrip()}"):
            try:
                words.add(tuple(tokenizer.encode(spelt, add_special_tokens=False)))
            except (TypeError, UnicodeError) as error:
                raise ConfigError(f"bad_words: the tokenizer cannot read {word!r}; give plain text") from error
    return tuple(sorted(words - {()}))  # a tokenizer may make nothing of a word
