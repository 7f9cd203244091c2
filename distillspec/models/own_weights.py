"""Weights of drafts on disk: what is the draft's own.

Input embeddings that equal the target's are not written: they are read from the target when the draft is loaded. The
head has the kept rows only.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from distillspec.errors import ConfigError
from distillspec.models.block import BlockInput, block_model
from distillspec.models.eagle import eagle_model
from distillspec.models.heads import heads_model
from distillspec.models.language_model import LanguageModel
from distillspec.models.state_input import ADDED, BLOCK, JOINED, PARALLEL, SEQUENTIAL, StateInput, defer_norm

WEIGHTS = "model.safetensors"
STOPS = "generation_config.json"
CONVENTION = "state i is the hidden state after i layers, 0 the embeddings, the last one before the final norm"


def reading_record(draft: LanguageModel) -> dict[str, Any] | None:
    """Return how a draft reads states, for its `distillspec.json`. None for drafts that read tokens alone."""
    if (states := draft.state_input) is None:
        return None
    return {
        "way": states.way,
        "state_ids": list(states.state_ids),
        "convention": CONVENTION,
        "target_width": states.target_width,
        **({} if states.precision is None else {"precision": states.precision}),
        **({} if states.scale is None else {"scaled": True}),
        **({} if states.norms is None else {"norms": True}),
        **(_block_record(states) if isinstance(states, BlockInput) else {}),
    }


def _block_record(states: BlockInput) -> dict[str, Any]:
    record = {"positions": states.positions, "markov": states.rank, "confidence": states.confidence is not None}
    return {**record, "shared_mask": states.shared_mask, "bidirectional": states.bidirectional}


def reads_targets_embeddings(draft: LanguageModel, target: LanguageModel) -> bool:
    """Return True if the draft's input embeddings are the target's, bit for bit in its dtype, and not its head too.

    Embeddings that are the head too (tied weights) train, so that they are the draft's own.
    """
    draft_table, target_table = draft.model.get_input_embeddings(), target.model.get_input_embeddings()
    tied = draft.model.get_output_embeddings().weight is draft_table.weight
    if tied or type(draft_table) is not type(target_table) or draft_table.weight.shape != target_table.weight.shape:
        return False
    return bool(torch.equal(draft_table.weight, target_table.weight.to(draft_table.weight)))


def write_weights(draft: LanguageModel, folder: Path, embeddings: bool, dtype: torch.dtype | None = None) -> None:
    """Write configuration and weights, the input embeddings only if asked for. Wider weights are rounded to `dtype`."""
    parameters = {name: _rounded(value, dtype) for name, value in own_parameters(draft, embeddings).items()}
    named = {name for name, _ in draft.model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in draft.model.state_dict().items() if name not in named}
    tensors = {name: value.detach().cpu().contiguous() for name, value in (parameters | buffers).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    draft.model.config.save_pretrained(folder)
    if draft.model.generation_config is not None:
        draft.model.generation_config.save_pretrained(folder)


def _rounded(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight if dtype is None or weight.dtype.itemsize <= dtype.itemsize else weight.to(dtype)


def own_parameters(draft: LanguageModel, embeddings: bool) -> dict[str, Tensor]:
    """Return the draft's parameters by name, the input embeddings only if asked for."""
    left_out = set() if embeddings else set(map(id, draft.model.get_input_embeddings().parameters()))
    return {name: value for name, value in draft.model.named_parameters() if id(value) not in left_out}


def read_weights(
    folder: Path, reading: dict[str, Any] | None, has_embeddings: bool, target: LanguageModel | None, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model that `write_weights` wrote.

    A draft that reads states shares the target's embeddings, and other drafts get a copy. A draft that began as another
    model has embeddings of its own, and of its own width.

    Args:
        reading: the record of `reading_record`.
        has_embeddings: the folder has the input embeddings.

    Raises:
        ConfigError: the target is not given, or a weight is missing.
    """
    if target is None and not (has_embeddings and reading is None):
        raise ConfigError(f"{folder} reads its target's embeddings; load it together with its target")
    state = load_file(folder / WEIGHTS)
    with torch.random.fork_rng(devices=[]):  # weights are random until they are loaded
        model = _bare(AutoConfig.from_pretrained(folder), reading)
        if reading is not None:
            model.state_input.precision = reading.get("precision")
            if reading.get("scaled"):
                model.state_input.scale = state["state_input.scale"]
        _fit_head(model, state)
    if target is not None and (not has_embeddings or (reading is not None and reading["way"] != ADDED)):
        share_embeddings(model, target, dtype)
        if has_embeddings or reading is None:
            own_embeddings(model)
    # Parameters alone: rotary frequencies are buffers, and stay in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    _load(model, state, folder, has_embeddings)
    if (folder / STOPS).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def share_embeddings(model: PreTrainedModel, target: LanguageModel, dtype: torch.dtype) -> None:
    """Let a model read the target's input embeddings, without a copy if both have the same dtype."""
    target_embeddings = target.model.get_input_embeddings()
    shared = copy.copy(target_embeddings)
    for name, value in vars(target_embeddings).items():
        if isinstance(value, dict):  # parameters, and hooks: those of one (DeepSpeed's) are not the other's
            setattr(shared, name, copy.copy(value))
    shared._parameters["weight"] = nn.Parameter(target_embeddings.weight.detach().to(dtype), False)
    model.set_input_embeddings(shared)


def own_embeddings(model: PreTrainedModel) -> None:
    """Give a model that shares its target's embeddings its own copy, to be changed."""
    embeddings = model.get_input_embeddings()
    embeddings.weight = nn.Parameter(embeddings.weight.detach().clone())


def full_width(draft: LanguageModel) -> PreTrainedModel:
    """Return a copy of the draft's model that any loader knows: a head row for each id, zero for ids it lacks."""
    model = copy.deepcopy(draft.model)
    if draft.kept_ids is None:
        return model
    old, rows = model.get_output_embeddings(), model.get_input_embeddings().weight.shape[0]
    head = nn.Linear(old.weight.shape[1], rows, bias=getattr(old, "bias", None) is not None)
    ids = draft.kept_ids.to(old.weight.device)
    for name, kept in old.named_parameters():
        whole = kept.new_zeros(rows, *kept.shape[1:]).index_copy(0, ids, kept.detach()[: len(ids)])
        setattr(head, name, nn.Parameter(whole))
    model.set_output_embeddings(head)
    return model


def add_state_input(model: PreTrainedModel, state_ids: list[int], target_width: int) -> None:
    """Let an ordinary model read the target's states too, with a projection that starts at zero."""
    defer_norm(model.get_decoder())
    width = model.config.get_text_config().hidden_size
    model.state_input = StateInput(ADDED, state_ids, target_width, width).to(model.device)


def _bare(config: Any, reading: dict[str, Any] | None) -> PreTrainedModel:
    way = None if reading is None else reading["way"]
    if reading is not None and way == JOINED:
        norms = reading.get("norms", False)
        return eagle_model(config, reading["state_ids"], reading["target_width"], norms=norms)
    if reading is not None and way == BLOCK:
        heads = (reading.get(name, False) for name in ("confidence", "shared_mask", "bidirectional"))
        shape = reading["positions"], reading["markov"], *heads
        return block_model(config, reading["state_ids"], reading["target_width"], *shape)
    if reading is not None and way in (PARALLEL, SEQUENTIAL):
        return heads_model(config, way, reading["state_ids"], reading["target_width"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if reading is not None:
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


def _load(model: PreTrainedModel, state: dict[str, Tensor], folder: Path, has_embeddings: bool) -> None:
    """Load the stored weights. Those that are the same object under another name (tied) are stored once."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if other := [name for name in state if name in named and named[name].shape != state[name].shape]:
        raise ConfigError(f"in the draft {folder} {other[0]} has another shape than config.json says")
    missing, unknown = model.load_state_dict(state, strict=False)
    known = {id(named[name]) for name in state if name in named}
    if not has_embeddings:
        known.add(id(model.get_input_embeddings().weight))
    missing = [name for name in missing if name not in named or id(named[name]) not in known]
    if missing or unknown:
        raise ConfigError(f"the draft {folder} lacks weights, or has unknown ones: {[*missing, *unknown][0]}")
