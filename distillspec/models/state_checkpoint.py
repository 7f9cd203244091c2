"""Weights on disk of drafts that read the target's states: what is the draft's own, and how it reads.

The input embeddings are the target's, frozen, and shared with it when the draft is loaded. They are written only if
they were trained. The head has the kept rows only.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from distillspec.errors import ConfigError
from distillspec.models.eagle import eagle_model
from distillspec.models.language_model import LanguageModel
from distillspec.models.state_input import ADDED, JOINED, StateInput, defer_norm

WEIGHTS = "model.safetensors"
CONVENTION = "state i is the hidden state after i layers, 0 the embeddings, the last one before the final norm"


def reading_record(draft: LanguageModel) -> dict[str, Any] | None:
    """Return how a draft reads states, for its `distillspec.json`. None for drafts that read tokens alone."""
    if (states := draft.state_input) is None:
        return None
    return {
        "way": states.way,
        "state_ids": list(states.state_ids),
        "convention": CONVENTION,
        "target_width": states.fc.in_features // len(states.state_ids),
        "embeddings": "own" if draft.lineage.get("own_embeddings") else "target",
    }


def write_weights(draft: LanguageModel, folder: Path) -> None:
    """Write configuration and weights of a draft that reads states."""
    own = own_parameters(draft)
    save_file({name: value.detach().cpu().contiguous() for name, value in own.items()}, folder / WEIGHTS)
    draft.model.config.save_pretrained(folder)


def own_parameters(draft: LanguageModel) -> dict[str, Tensor]:
    """Return the parameters by name of a draft that reads states, without embeddings that are the target's."""
    embeddings = draft.model.get_input_embeddings()
    shared = () if draft.lineage.get("own_embeddings") else set(map(id, embeddings.parameters()))
    return {name: value for name, value in draft.model.named_parameters() if id(value) not in shared}


def read_weights(
    folder: Path, reading: dict[str, Any], target: LanguageModel | None, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model that `write_weights` wrote, its embeddings shared with the target unless it has its own.

    Raises:
        ConfigError: the target is not given, or a weight is missing.
    """
    if target is None:
        raise ConfigError(f"{folder} reads its target's states and embeddings; load it together with its target")
    state = load_file(folder / WEIGHTS)
    model = _bare(AutoConfig.from_pretrained(folder), reading)
    _fit_head(model, state)
    share_embeddings(model, target, torch.float32)
    embeddings = model.get_input_embeddings()
    shared = reading["embeddings"] == "target"
    if not shared:
        embeddings.weight = nn.Parameter(embeddings.weight.detach().clone())
    missing, unknown = model.load_state_dict(state, strict=False)
    if shared:
        name = next(name for name, module in model.named_modules() if module is embeddings)
        missing = [key for key in missing if key != f"{name}.weight"]
    if missing or unknown:
        raise ConfigError(f"the draft {folder} lacks weights, or has unknown ones: {[*missing, *unknown][0]}")
    # Parameters alone: rotary frequencies are buffers, and stay in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if shared:
        share_embeddings(model, target, dtype)
    return model


def share_embeddings(model: PreTrainedModel, target: LanguageModel, dtype: torch.dtype) -> None:
    """Let a model read the target's input embeddings, without a copy if both have the same dtype."""
    theirs = target.model.get_input_embeddings()
    own = copy.copy(theirs)
    own._parameters = {**theirs._parameters, "weight": nn.Parameter(theirs.weight.detach().to(dtype), False)}
    model.set_input_embeddings(own)


def own_embeddings(draft: LanguageModel) -> None:
    """Give a draft that shares its target's embeddings its own copy, to be trained and stored."""
    embeddings = draft.model.get_input_embeddings()
    embeddings.weight = nn.Parameter(embeddings.weight.detach().clone())
    draft.lineage["own_embeddings"] = True


def add_state_input(model: PreTrainedModel, state_ids: list[int], target_width: int) -> None:
    """Let an ordinary model read the target's states too, with a projection that starts at zero."""
    defer_norm(model.get_decoder())
    width = model.config.get_text_config().hidden_size
    model.state_input = StateInput(ADDED, state_ids, target_width, width).to(model.device)


def _bare(config: Any, reading: dict[str, Any]) -> PreTrainedModel:
    if reading["way"] == JOINED:
        return eagle_model(config, reading["state_ids"], reading["target_width"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    add_state_input(model, reading["state_ids"], reading["target_width"])
    return model


def _fit_head(model: PreTrainedModel, state: dict[str, Tensor]) -> None:
    """Give the model an untied head of the rows that are stored."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    if (weight := state.get(f"{name}.weight")) is not None:
        new = nn.Linear(weight.shape[1], weight.shape[0], bias=f"{name}.bias" in state)
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(new)
