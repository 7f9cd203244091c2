"""Which models the engine can serve: those whose passes over the slot cache give what their own passes give."""

from __future__ import annotations

from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from distillspec.errors import ConfigError, in_one_line
from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache, SlotView, is_hooked, slot_attention_in

TRIAL = (7, 4)  # tokens of the two rows that are tried
TOLERANCE = 0.05  # of the largest hidden state: right passes differ by rounding, wrong ones by much more
GROWING_ROPES = ("longrope", "dynamic")  # their frequencies depend on the longest row of a pass


def check_servable(model: LanguageModel, max_model_len: int) -> None:
    """Raise `ConfigError` for a model that the engine would serve wrongly, with the reason.

    A model seen for the first time reads two short rows of unlike lengths its own way and through slots; attention that
    needs more than the slots offer (sinks, compressed keys, …) shows there.
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


@torch.inference_mode()
def _try(model: LanguageModel) -> None:
    was_training = model.model.training
    model.model.eval()
    device = model.device
    tokens = torch.arange(2 * TRIAL[0], device=device).view(2, -1) % model.identity.vocab_size
    plain = model.hidden(tokens, torch.arange(TRIAL[0], device=device).expand(2, -1))
    counts = torch.tensor(TRIAL, device=device)
    view = SlotView.append(SlotCache(2, 64), [0, 1], torch.zeros_like(counts), counts, TRIAL[0], TRIAL[0])
    try:
        with slot_attention_in(model.model):
            slots = model.hidden(tokens, view.positions, slot_view=view)
    except Exception as error:
        reason = f"{type(error).__name__}: {in_one_line(error)}"
        raise ConfigError(f"{model.name} cannot use the engine's slots ({reason}), so it cannot be served") from error
    finally:
        model.model.train(was_training)
    real = view.places < view.cache.max_len
    difference, size = (slots - plain)[real].abs().max(), plain[real].abs().max()
    if bool(difference > TOLERANCE * size):  # false for weights that are no numbers, which are refused elsewhere
        raise ConfigError(
            f"{model.name} has other hidden states through the engine's slots, off by {float(difference / size):.0%}: "
            "its attention needs what the engine does not know, so it cannot be served"
        )


_tried: WeakSet[PreTrainedModel] = WeakSet()
