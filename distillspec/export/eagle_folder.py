"""Folder of an EAGLE-3 draft under the names that vLLM, SGLang and speculators read.

Weights: `fc` fuses the states, `midlayer` (speculators: `layers.0`) is the layer that reads them, `lm_head` has one row
a drafted id, `d2t` adds to a row's number what makes it the target's id, and `t2d` marks these ids. `embed_tokens` is
there only if the draft does not read the target's own table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from distillspec.errors import RunError
from distillspec.export.compatibility import add_older_names
from distillspec.export.eagle_states import fusion
from distillspec.export.serving import target_name
from distillspec.models import LanguageModel
from distillspec.models.eagle import eagle_model
from distillspec.models.own_weights import WEIGHTS, own_parameters, reads_targets_embeddings, share_embeddings

CONFIG = "config.json"
LAYER, MIDLAYER = "layers.0.", "midlayer."
OTHER_NAMES = {"state_input.fc.weight": "fc.weight", "model.norm.norm.weight": "norm.weight"}  # ours: theirs
TABLE = "embed_tokens.weight"
IDS = "eagle_aux_hidden_state_layer_ids"
MASK = "mask_hidden"  # of blocks (`distillspec.export.block`)


class EagleForm(NamedTuple):
    """Settings of a folder: its format, and how the draft is used."""

    form: str  # `vllm`, `sglang` or `speculators`
    ids: Sequence[int]  # states that the engine hands over (`engine_states`)
    dtype: str  # name of the weights' number format
    speculation_length: int  # drafted tokens a step that the folder proposes (speculators)


def write_eagle(
    folder: Path,
    draft: LanguageModel,
    target: LanguageModel,
    eagle_form: EagleForm,
    more: Mapping[str, Tensor] | None = None,
    named: Mapping[str, Any] | None = None,
) -> None:
    """Write weights and configuration of an EAGLE-3 draft. `more` and `named` are further weights and settings."""
    floats = eagle_weights(draft, target, eagle_form.form, eagle_form.ids) | dict(more or {})
    weights = {name: value.to(getattr(torch, eagle_form.dtype)) for name, value in floats.items()}
    rows = head_rows(target)
    if draft.width < rows:
        weights |= id_maps(draft, rows)
    save_file({name: value.cpu().contiguous() for name, value in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    settings = eagle_settings(draft, target, eagle_form) | dict(named or {})
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def eagle_weights(draft: LanguageModel, target: LanguageModel, form: str, ids: Sequence[int]) -> dict[str, Tensor]:
    """Return the draft's weights by the names of `form`, the fusion's on the states `ids`."""
    parameters = own_parameters(draft, embeddings=not reads_targets_embeddings(draft, target))
    kept = {
        name: value for name, value in parameters.items() if name in OTHER_NAMES or not name.startswith("state_input.")
    }
    weights = {_their_name(name, form): value.detach() for name, value in kept.items()}
    assert draft.state_input is not None
    weights["fc.weight"] = fusion(draft.state_input.fusion(), draft.state_ids, ids)
    return weights


def with_plain_table(draft: LanguageModel) -> LanguageModel:
    """Return the draft with a table of its own if the module of its input embeddings scales the rows (gemma3)."""
    embeddings = draft.model.get_input_embeddings()
    if type(embeddings).forward is nn.Embedding.forward:
        return draft
    with torch.no_grad():
        rows = embeddings(torch.arange(embeddings.weight.shape[0], device=embeddings.weight.device))
    draft.model.set_input_embeddings(nn.Embedding.from_pretrained(rows))
    return draft


def id_maps(draft: LanguageModel, rows: int) -> dict[str, Tensor]:
    """Return `d2t [Vd]` int64, offsets from head row to target id, and `t2d [rows]` bool, the ids that have a row."""
    kept = torch.arange(draft.width) if draft.kept_ids is None else draft.kept_ids
    drafted = torch.zeros(rows, dtype=torch.bool)
    drafted[kept] = True
    return {"d2t": kept - torch.arange(len(kept)), "t2d": drafted}


def head_rows(target: LanguageModel) -> int:
    """Return the number of ids that the target's head has rows for, padding included."""
    return int(target.model.get_output_embeddings().weight.shape[0])


def eagle_settings(draft: LanguageModel, target: LanguageModel, eagle_form: EagleForm) -> dict[str, Any]:
    """Return the contents of `config.json`: a Llama's settings for the layer, and what it reads.

    `speculators` has the layer's settings under a key of their own.
    """
    form, ids, dtype, speculation_length = eagle_form
    layer = draft.model.config.to_dict()
    layer |= {"vocab_size": head_rows(target), "dtype": dtype, "rope_parameters": _rope(layer["rope_parameters"])}
    add_older_names(layer)
    reading: dict[str, Any] = {
        "draft_vocab_size": draft.width,
        "target_hidden_size": int(target.model.config.get_text_config().hidden_size),
        "norm_before_residual": False,
    }
    if form == "sglang":
        named = {"use_aux_hidden_state": True, IDS: [state - 1 for state in ids]}
        return {**layer, **reading, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": named}
    reading[IDS] = list(ids)
    layer["num_aux_hidden_states"] = len(ids)  # vLLM; 3 where it does not know this setting
    if form == "vllm":
        return {**layer, **reading, "architectures": ["LlamaForCausalLMEagle3"]}
    return {
        **reading,
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": _speculators(target, speculation_length),
        "transformer_layer_config": layer,
        "dtype": dtype,
        "tie_word_embeddings": False,
    }


def read_eagle(folder: Path, draft: LanguageModel, target: LanguageModel) -> LanguageModel:
    """Return the draft that the folder holds, in float32, by what its files say. `draft` lends tokenizer and identity.

    Raises:
        RunError: a weight is missing, or one is unknown.
    """
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    model = eagle_model(
        LlamaConfig.from_dict(settings.get("transformer_layer_config", settings)),
        _states_of(settings),
        settings["target_hidden_size"],
    )
    weights = load_file(folder / WEIGHTS)
    offsets, table, _, _ = (weights.pop(name, None) for name in ("d2t", TABLE, "t2d", MASK))
    model.set_output_embeddings(nn.Linear(model.config.hidden_size, settings["draft_vocab_size"], bias=False))
    missing, unknown = model.load_state_dict({_our_name(name): value for name, value in weights.items()}, strict=False)
    if unknown or missing != [f"model.{TABLE}"]:
        raise RunError(f"the export lacks weights, or has unknown ones: {[*unknown, *missing]}; nothing was written")
    if table is None:
        share_embeddings(model, target, torch.float32)
    else:
        model.set_input_embeddings(nn.Embedding.from_pretrained(table.float()))
    kept = None if offsets is None else offsets + torch.arange(len(offsets))
    return replace(draft, model=model.to(target.device).eval(), kept_ids=kept, name=str(folder))


def _their_name(name: str, form: str) -> str:
    name = OTHER_NAMES.get(name, name.removeprefix("model."))
    return name if form == "speculators" else name.replace(LAYER, MIDLAYER)


def _our_name(name: str) -> str:
    ours = {their_name: our_name for our_name, their_name in OTHER_NAMES.items()}
    name = name.replace(MIDLAYER, LAYER)
    return ours.get(name, name if name.startswith("lm_head") else f"model.{name}")


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters without those that a Llama ignores and engines obey (a partial rotation)."""
    if parameters.get("rope_type", "default") != "default":
        return parameters
    return {name: parameters[name] for name in ("rope_type", "rope_theta") if name in parameters}


def _speculators(target: LanguageModel, speculation_length: int) -> dict[str, Any]:
    """Return how the draft is used: greedily drafted chains, for this target."""
    architectures = target.model.config.architectures or [type(target.model).__name__]
    return {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculation_length}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": target_name(target), "architectures": list(architectures)},
    }


def _states_of(settings: dict[str, Any]) -> list[int]:
    if (named := settings.get("eagle_config")) is not None:
        return [layer + 1 for layer in named[IDS]]
    return list(settings[IDS])
