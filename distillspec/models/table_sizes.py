"""Drafts whose embeddings have another number of ids than the target's: models of one family pad them differently."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from distillspec.errors import ConfigError
from distillspec.models.language_model import LanguageModel


def with_ids(draft: LanguageModel, target: LanguageModel) -> LanguageModel:
    """Return the draft, its model changed in place, with as many ids as the target, which has its tokenizer.

    Ids that the draft lacks are read as zeros and never proposed. Those that the target lacks are cut off.

    Raises:
        ConfigError: the draft keeps an id that the target lacks.
    """
    ids, kept = target.identity.vocab_size, draft.kept_ids
    proposed = min(draft.identity.vocab_size, len(draft.head.weight)) if kept is None else draft.identity.vocab_size
    if proposed == draft.identity.vocab_size == ids:
        return draft
    if kept is not None and int(kept.max()) >= ids:
        raise ConfigError(
            f"draft {draft.name} proposes token id {int(kept.max())}, and target {target.name} has ids below {ids}; "
            "use a draft of this target"
        )
    _grow_embeddings(draft.model, ids)
    if kept is None and proposed < ids:
        kept = torch.arange(proposed)
    return replace(draft, identity=replace(draft.identity, vocab_size=ids), kept_ids=kept)


def require_same_ids(draft: LanguageModel, target: LanguageModel) -> None:
    """Raise ConfigError for a draft without the target's ids. One that is loaded together with its target has them."""
    ids, read = target.identity.vocab_size, draft.model.get_input_embeddings().weight.shape[0]
    proposed = draft.head.weight.shape[0] if draft.kept_ids is None else 1 + int(draft.kept_ids.max())
    whole = draft.kept_ids is not None or proposed == ids
    if read < ids or proposed > ids or not whole or draft.identity.vocab_size != ids:
        raise ConfigError(
            f"draft {draft.name} reads {read} token ids and proposes {proposed}, target {target.name} has {ids}; "
            "load it with load_draft(path, target)"
        )


def _grow_embeddings(model: PreTrainedModel, ids: int) -> None:
    """Let a model read at least so many ids, new ones as zeros. A head that was the same table keeps the old one."""
    embeddings = model.get_input_embeddings()
    table = embeddings.weight
    lacking = ids - len(table)
    if lacking <= 0:
        return
    whole = torch.cat([table.detach(), table.new_zeros(lacking, table.shape[1])])
    embeddings.weight, embeddings.num_embeddings = nn.Parameter(whole, table.requires_grad), ids
    config = model.config.get_text_config()
    config.vocab_size, config.tie_word_embeddings = ids, False
