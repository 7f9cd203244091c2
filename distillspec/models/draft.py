"""Making drafts: from another checkpoint, from the target's own layers, or from scratch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from distillspec.config import DraftConfig
from distillspec.config.registry import DRAFT_KINDS, find
from distillspec.errors import ConfigError
from distillspec.models.block import block_model
from distillspec.models.checkpoint import draft_folder, load_draft, matched, read_kept_ids
from distillspec.models.draft_head import truncate_head
from distillspec.models.eagle import begin_from, copy_ends, eagle_config, eagle_model
from distillspec.models.features import check_feature_ids, default_state_ids
from distillspec.models.heads import heads_model
from distillspec.models.language_model import LanguageModel
from distillspec.models.own_weights import add_state_input, share_embeddings
from distillspec.models.pruning import check_layers, evenly_spaced, prune, select_by_acceptance
from distillspec.models.state_input import PARALLEL, SEQUENTIAL
from distillspec.models.target import load_causal_lm, load_tokenizer, resolve_path, wrap
from distillspec.models.tokenizers import require_same_tokenizer

DEFAULT_LAYERS = 4


@dataclass(frozen=True)
class LayerSelection:
    """Measurement of the target with layers taken out, for `draft.select=acceptance`.

    `on_step` is called with the number of layers left.
    """

    acceptance: Callable[[], float] | None = None
    on_step: Callable[[int], None] | None = None


def initialise_draft(
    config: DraftConfig,
    target: LanguageModel,
    *,
    kept_ids: Tensor | None = None,
    acceptance: Callable[[], float] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> LanguageModel:
    """Return an untrained draft in float32 on the target's device.

    Args:
        kept_ids: `[Vd]` ids that the head keeps. None keeps all.
        acceptance: measures the target with layers taken out. Needed for `draft.select=acceptance`.

    Raises:
        ConfigError: the layers do not exist, or the tokenizer is not the target's.
    """
    make = find("draft.kind", config.kind, DRAFT_KINDS).load()
    draft: LanguageModel = make(config, target, LayerSelection(acceptance, on_step))
    return draft if kept_ids is None else truncate_head(draft, kept_ids)


def check_draft(config: DraftConfig, target: LanguageModel) -> None:
    """Refuse a draft that does not fit this target, before anything is sampled for it.

    Raises:
        ConfigError: layers or vocabulary that the target does not have, or a path without the target's tokenizer.
    """
    size, total = target.identity.vocab_size, len(target.layers)
    if config.vocabulary is not None and config.vocabulary > size:
        raise ConfigError(f"draft.vocabulary={config.vocabulary} exceeds the target's vocabulary of {size}")
    if config.feature_ids is not None:
        check_feature_ids(target, config.feature_ids)
    if config.kind == "pruned" and config.keep is not None:
        check_layers(config.keep, total)
    elif config.kind == "pruned" and config.layers is not None:
        evenly_spaced(total, config.layers)
    elif config.kind == "pretrained":
        path = str(draft_folder(str(config.path)) or config.path)
        require_same_tokenizer(load_tokenizer(resolve_path(path)), target.tokenizer, path, target.name)
        kept_ids = kept_ids_of(config, target)
        if config.vocabulary is not None and kept_ids is not None and config.vocabulary > len(kept_ids):
            raise ConfigError(
                f"draft.vocabulary={config.vocabulary}: the draft {config.path} keeps {len(kept_ids)} tokens already; "
                "give fewer, or leave it out"
            )


def kept_ids_of(config: DraftConfig, target: LanguageModel) -> Tensor | None:
    """Return the ids that the draft to start from can propose, or None if these are all or there is none."""
    if config.kind != "pretrained":
        return None
    if (folder := draft_folder(str(config.path))) is not None:
        return read_kept_ids(folder)
    source_config = AutoConfig.from_pretrained(resolve_path(str(config.path)), trust_remote_code=False)
    rows = int(source_config.get_text_config().vocab_size)
    return torch.arange(rows) if rows < target.identity.vocab_size else None


def load_pretrained(path: str, target: LanguageModel, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Load a draft (its folder, or the run that made it) or any causal language model with the target's tokenizer.

    It lies on the target's device.

    Raises:
        ConfigError: it cannot be loaded, or its tokenizer is not the target's.
    """
    if (folder := draft_folder(path)) is not None:
        return load_draft(folder, target, dtype=dtype)
    model, tokenizer = load_causal_lm(resolve_path(path), dtype)
    require_same_tokenizer(tokenizer, target.tokenizer, path, target.name)
    return matched(wrap(model.eval().to(target.device), tokenizer, path), target)


def make_pretrained(config: DraftConfig, target: LanguageModel, layers: LayerSelection) -> LanguageModel:
    """Load the draft at `draft.path`, with `draft.features` one that begins to read the target's states."""
    draft = load_pretrained(str(config.path), target)
    return _reading(draft, config, target) if config.features and draft.state_input is None else draft


def make_pruned(config: DraftConfig, target: LanguageModel, layers: LayerSelection) -> LanguageModel:
    """Copy some of the target's layers, with its embeddings and head."""
    total, count = len(target.layers), config.layers or DEFAULT_LAYERS
    if config.keep is not None:
        keep = list(config.keep)
    elif config.select == "acceptance":
        if layers.acceptance is None:
            raise ConfigError("draft.select=acceptance needs calibration text")
        keep = select_by_acceptance(target, count, layers.acceptance, layers.on_step)
    else:
        keep = evenly_spaced(total, min(count, total) if config.layers is None else count)
    lineage = {"kind": "pruned", "target_layers": keep, "select": config.select}
    draft = _untrained(prune(target, keep), target, lineage)
    return _reading(draft, config, target) if config.features else draft


def make_eagle(config: DraftConfig, target: LanguageModel, layers: LayerSelection) -> LanguageModel:
    """Make an EAGLE-3 draft that starts from the target's last layers where shapes allow, elsewhere random."""
    width, ids = target.model.config.get_text_config().hidden_size, state_ids_of(config, target)
    model = eagle_model(eagle_config(target, config.layers or 1), list(ids), width, norms=config.state_norms)
    share_embeddings(model, target, torch.float32)
    copied = begin_from(model, target)
    return _untrained(model, target, {"kind": "eagle", "layers": config.layers or 1, "copied": copied})


def make_block(config: DraftConfig, target: LanguageModel, layers: LayerSelection) -> LanguageModel:
    """Make a draft of whole blocks that starts as `make_eagle`'s does."""
    width, ids = target.model.config.get_text_config().hidden_size, state_ids_of(config, target)
    shape = eagle_config(target, config.layers or 1)
    heads = config.markov, config.confidence, config.shared_mask, config.bidirectional
    model = block_model(shape, list(ids), width, config.positions, *heads)
    share_embeddings(model, target, torch.float32)
    copied = begin_from(model, target)
    lineage = {"kind": "block", "layers": config.layers or 1, "positions": config.positions, "copied": copied}
    return _untrained(model, target, lineage)


def make_medusa(config: DraftConfig, target: LanguageModel, layers: LayerSelection) -> LanguageModel:
    """Make heads on the target's states, which start as the target's own head where shapes allow."""
    width, ids = target.model.config.get_text_config().hidden_size, state_ids_of(config, target)
    way = SEQUENTIAL if config.sequential else PARALLEL
    model = heads_model(eagle_config(target, config.positions), way, list(ids), width)
    share_embeddings(model, target, torch.float32)
    copied = copy_ends(model, target)
    lineage = {"kind": "medusa", "positions": config.positions, "sequential": config.sequential, "copied": copied}
    return _untrained(model, target, lineage)


def state_ids_of(config: DraftConfig, target: LanguageModel) -> tuple[int, ...]:
    """Return the states of the target that a new draft reads: by default the last one for heads, else three."""
    if config.feature_ids is not None:
        return tuple(config.feature_ids)
    return (len(target.layers),) if config.kind == "medusa" else default_state_ids(target)


def _reading(draft: LanguageModel, config: DraftConfig, target: LanguageModel) -> LanguageModel:
    """Return the draft, which from now on reads the target's states too. What it computes does not change yet."""
    target_weight, weight = (model.model.get_input_embeddings().weight for model in (target, draft))
    same = target_weight.shape == weight.shape and bool(torch.equal(target_weight.to(weight.dtype), weight))
    if draft.model.get_output_embeddings().weight is weight:  # tied: the head trains, the embeddings are shared
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
        head.weight = nn.Parameter(weight.detach().clone())
        draft.model.config.tie_word_embeddings = False
        draft.model.set_output_embeddings(head)
    if same:
        share_embeddings(draft.model, target, torch.float32)
    add_state_input(draft.model, list(state_ids_of(config, target)), target.model.config.get_text_config().hidden_size)
    return replace(draft, lineage={**draft.lineage, "features": True})


def make_scratch(config: DraftConfig, target: LanguageModel, layers: LayerSelection) -> LanguageModel:
    """Make a random Llama of `draft.layers` layers with the target's vocabulary."""
    rows = target.identity.vocab_size
    special = target.tokenizer or target.model.config.get_text_config()
    eos, pad = special.eos_token_id, special.pad_token_id
    if pad is None:
        pad = eos[0] if isinstance(eos, list) else eos
    llama = LlamaConfig(
        vocab_size=rows,
        hidden_size=config.hidden_size,
        intermediate_size=config.hidden_size * 8 // 3 // 8 * 8,
        num_hidden_layers=config.layers or DEFAULT_LAYERS,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=getattr(target.model.config.get_text_config(), "max_position_embeddings", 2048),
        bos_token_id=special.bos_token_id,
        eos_token_id=eos,
        pad_token_id=pad,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(llama, dtype=torch.float32).eval()
    lineage = {"kind": "scratch", "layers": llama.num_hidden_layers, "hidden_size": config.hidden_size}
    return _untrained(model, target, lineage)


def _untrained(model: PreTrainedModel, target: LanguageModel, lineage: dict[str, Any]) -> LanguageModel:
    """Wrap a new draft with the target's tokenizer, on its device."""
    draft = wrap(model.to(target.device), target.tokenizer, lineage["kind"])
    return LanguageModel(draft.model, draft.tokenizer, draft.identity, draft.name, lineage=lineage)
