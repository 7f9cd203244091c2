"""Which models the engine can serve: those whose passes over the slot cache give what their own passes give."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distillspec.errors import ConfigError, in_one_line
from distillspec.models import LanguageModel
from distillspec.models.slot_cache import is_hooked
from distillspec.serving.trial import Trial

TEXTS = (
    "The river rose all night, and by morning the lower fields were under water, as the old people had said.",
    "To bake bread, mix flour, water, salt and yeast, wait for an hour, and heat the oven well before it goes in.",
)
LENGTHS = (20, 14)  # tokens of the two rows that are tried
FIRST = 8  # of them in the first pass, the others in a second
GROWING_ROPES = ("longrope", "dynamic")  # their frequencies depend on the longest row of a pass


def check_servable(model: LanguageModel, max_model_len: int) -> None:
    """Raise `ConfigError` for a model that the engine would serve wrongly, with the reason.

    A model seen for the first time reads two short rows of unlike lengths its own way and through slots (`Trial`);
    attention that needs more than the slots offer (sinks, compressed keys, …) shows there.
    """
    if getattr(model.model, "_is_stateful", False):
        raise ConfigError(f"{model.name} keeps recurrent state, which cannot roll back: the engine cannot serve it")
    _check_lengths(model, max_model_len)
    if model.model not in _tried and not is_hooked(model.model):
        _try(model)
        _tried.add(model.model)


def _check_lengths(model: LanguageModel, max_model_len: int) -> None:
    config = model.model.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, dict))]:  # one, or one a kind of layer
        own = getattr(config, "max_position_embeddings", max_model_len)
        trained = rope.get("original_max_position_embeddings") or own
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
            "its attention needs what the engine does not know, so it cannot be served"
        )


def try_slots(model: LanguageModel) -> str | None:
    """What `Trial` finds wrong with the model's attention over slots; None where nothing is."""
    was_training = model.model.training
    model.model.eval()
    try:
        return Trial(model, _readable(model), torch.tensor(LENGTHS, device=model.device), FIRST).run()
    finally:
        model.model.train(was_training)


def _readable(model: LanguageModel) -> Tensor:
    """Ids of what the model may meet, `[2, LENGTHS[0]]`: rounding moves the states of special tokens most of all."""
    size, length = model.identity.vocab_size, LENGTHS[0]
    rows = [[(size // 3 + 7 * i) % size for i in range(length)]] * len(TEXTS)
    if model.tokenizer is not None:
        read = [model.tokenizer(text)["input_ids"] for text in TEXTS]
        rows = [(ids * length)[:length] or row for ids, row in zip(read, rows, strict=True)]
    return torch.tensor(rows, device=model.device).clamp(max=size - 1)


_tried: WeakSet[PreTrainedModel] = WeakSet()
