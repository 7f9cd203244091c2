"""Tokenizer identity: two models may speculate together only when every id means the same token."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedTokenizerBase

from distillspec.errors import ConfigError
from distillspec.types import ModelIdentity


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of the id → token map with added tokens. File bytes and settings do not count."""
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True).encode()).hexdigest()[:32]


def tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest id the tokenizer can produce."""
    return max(tokenizer.get_vocab().values()) + 1


def identify(tokenizer: PreTrainedTokenizerBase | None, head_rows: int, weights_hash: str) -> ModelIdentity:
    """Return a model's identity. Without a tokenizer, or with a shorter head, the head's rows bound the vocabulary."""
    if tokenizer is None:
        return ModelIdentity("", head_rows, weights_hash)
    size = min(tokenizer_size(tokenizer), head_rows)
    return ModelIdentity(tokenizer_hash(tokenizer), size, weights_hash)


def require_same_tokenizer(
    draft: PreTrainedTokenizerBase | None, target: PreTrainedTokenizerBase | None, draft_name: str, target_name: str
) -> None:
    """Raise ConfigError for tokenizers that differ, naming the first difference. Without one of them, pass."""
    if draft is None or target is None or tokenizer_hash(draft) == tokenizer_hash(target):
        return
    raise ConfigError(
        f"draft {draft_name} and target {target_name} do not share a tokenizer: "
        f"{first_difference(draft, target)}; use a draft with the target's tokenizer (draft=pruned makes one)"
    )


def first_difference(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> str:
    """Describe the first difference between two vocabularies."""
    draft_tokens = {index: token for token, index in draft.get_vocab().items()}
    target_tokens = {index: token for token, index in target.get_vocab().items()}
    for index in range(max(len(draft_tokens), len(target_tokens))):
        draft_token, target_token = draft_tokens.get(index), target_tokens.get(index)
        if draft_token != target_token:
            return f"id {index} is {draft_token!r} in the draft and {target_token!r} in the target"
    return f"the draft has {len(draft_tokens)} tokens and the target {len(target_tokens)}"
