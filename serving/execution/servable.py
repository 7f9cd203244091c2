"""Check that a model can be served: its attention over slots must equal its own attention, up to rounding."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distillspec.errors import ConfigError, in_one_line
from distillspec.models import LanguageModel
from distillspec.models.slot_attention import is_hooked
from distillspec.serving.execution.attention_check import AttentionCheck

TEXTS = (
    "The river rose all night, and by morning the lower fields were under water, as the old people had said.",
    "To bake bread, mix flour, water, salt and yeast, wait for an hour, and heat the oven well before it goes in.",
)
LENGTHS = (20, 14)  # tokens of the two rows of the check
FIRST = 8  # tokens of the first pass, the others follow in a second
GROWING_ROPES = ("longrope", "dynamic")  # frequencies depend on the longest row of a pass


def check_servable(model: LanguageModel, max_model_len: int) -> None:
    """Refuse a model that the engine would serve wrongly.

    At its first use a model reads two short rows of unlike lengths with its own attention and over slots
    (`AttentionCheck`). Attention that needs more than slots offer (sinks, compressed keys, …) differs there.

    Raises:
        ConfigError: the message gives the reason.
    """
    if getattr(model.model, "_is_stateful", False):
        raise ConfigError(f"{model.name} keeps recurrent state, which cannot roll back: the engine cannot serve it")
    _check_lengths(model, max_model_len)
    if model.attends and model.model not in _tried and not is_hooked(model.model):
        _try(model)
        _tried.add(model.model)


def _check_lengths(model: LanguageModel, max_model_len: int) -> None:
    config = model.model.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [
        ropes,
        *(value for value in ropes.values() if isinstance(value, dict)),
    ]:  # one, or one for each kind of layer
        longest = getattr(config, "max_position_embeddings", max_model_len)
        trained = rope.get("original_max_position_embeddings") or longest
        if rope.get("rope_type") in GROWING_ROPES and max_model_len > trained:
            raise ConfigError(
                f"{model.name} has rotary embeddings of type {rope['rope_type']}, which change for all rows when one "
                f"is longer than {trained} tokens; set max_model_len={trained} or less, not {max_model_len}"
            )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and max_model_len > chunk:
        raise ConfigError(
            f"{model.name} attends within chunks of {chunk} tokens, which the engine does not; set "
            f"max_model_len={chunk} or less, not {max_model_len}"
        )


def _try(model: LanguageModel) -> None:
    try:
        problem = try_slots(model)
    except Exception as error:
        reason = f"{type(error).__name__}: {in_one_line(error)}"
        raise ConfigError(f"{model.name} cannot use the engine's slots ({reason}), so it cannot be served") from error
    if problem is not None:
        raise ConfigError(
            f"{model.name} has other hidden states through the engine's slots, {problem}: "
            "its attention needs something that the engine does not have, so it cannot be served"
        )


def try_slots(model: LanguageModel) -> str | None:
    """Return the problem that `AttentionCheck` finds with the model's attention over slots, None if it is right."""
    was_training = model.model.training
    model.model.eval()
    try:
        return AttentionCheck(model, _readable(model), torch.tensor(LENGTHS, device=model.device), FIRST).run()
    finally:
        model.model.train(was_training)


def _readable(model: LanguageModel) -> Tensor:
    """Return ids of ordinary text `[2, LENGTHS[0]]`: rounding changes the states of special tokens most."""
    size, length = model.identity.vocab_size, LENGTHS[0]
    rows = [[(size // 3 + 7 * i) % size for i in range(length)]] * len(TEXTS)
    if model.tokenizer is not None:
        read = [model.tokenizer(text)["input_ids"] for text in TEXTS]
        rows = [(ids * length)[:length] or row for ids, row in zip(read, rows, strict=True)]
    return torch.tensor(rows, device=model.device).clamp(max=size - 1)


_tried: WeakSet[PreTrainedModel] = WeakSet()
