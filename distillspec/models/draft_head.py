"""Heads of drafts with a truncated vocabulary: cutting one, and renewing its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from distillspec.errors import ConfigError
from distillspec.models.language_model import LanguageModel


@dataclass(frozen=True)
class HeadRows:
    """Where the rows of a renewed head were before."""

    old_rows: Tensor  # [n] int64, −1 for a new row

    @classmethod
    def between(cls, before: Tensor, after: Tensor) -> HeadRows:
        """Compare kept ids, sorted."""
        old_rows = torch.searchsorted(before, after).clamp(max=len(before) - 1)
        return cls(torch.where(before[old_rows] == after, old_rows, -1))

    def __len__(self) -> int:
        return len(self.old_rows)

    @property
    def new(self) -> int:
        """Number of rows that were not there."""
        return int((self.old_rows < 0).sum())

    def moved(self, before: Tensor, new: Tensor) -> Tensor:
        """Return `[n, …]`: the rows of `before [m, …]` that stay, in their new order, else those of `new`."""
        old_rows = self.old_rows.to(before.device)
        known = (old_rows >= 0).view(-1, *[1] * (before.dim() - 1))
        return torch.where(known, before[old_rows.clamp(min=0)], new)


def truncate_head(draft: LanguageModel, kept_ids: Tensor) -> LanguageModel:
    """Return the draft with an untied head of its rows `kept_ids` only. Input embeddings stay whole.

    Raises:
        ConfigError: the head is truncated already, and lacks some of them.
    """
    old = draft.model.get_output_embeddings()
    rows = kept_ids.to(old.weight.device)
    if draft.kept_ids is not None:
        if not bool(torch.isin(kept_ids, draft.kept_ids).all()):
            raise ConfigError(f"the head of {draft.name} lacks some of the ids to keep; choose among those it has")
        rows = torch.searchsorted(draft.kept_ids, kept_ids).to(old.weight.device)
    head = nn.Linear(old.weight.shape[1], len(kept_ids), bias=getattr(old, "bias", None) is not None)
    with torch.no_grad():
        head.weight = nn.Parameter(old.weight.detach()[rows].clone())
        if head.bias is not None:
            head.bias = nn.Parameter(old.bias.detach()[rows].clone())
    draft.model.config.tie_word_embeddings = False
    draft.model.set_output_embeddings(head)
    return LanguageModel(
        draft.model,
        draft.tokenizer,
        draft.identity,
        draft.name,
        kept_ids=kept_ids.cpu(),
        lineage=draft.lineage,
    )


def can_renew(draft: LanguageModel, target: LanguageModel) -> bool:
    """Return True if the draft's head can read rows of the target's."""
    return draft.model.get_output_embeddings().weight.shape[1] >= target.head.weight.shape[1]


def renew_head(draft: LanguageModel, kept_ids: Tensor, target: LanguageModel) -> LanguageModel:
    """Return a truncated draft, its model changed in place, with a head of the rows `kept_ids [n]` (int64, sorted).

    Rows that the old head lacks are the target's, as all were when it was made. For what the head reads beside a state
    they are zero. See `can_renew`.
    """
    assert draft.kept_ids is not None, "a whole head has all rows"
    old_head, source = draft.model.get_output_embeddings(), target.head.weight
    head = nn.Linear(old_head.weight.shape[1], len(kept_ids), bias=getattr(old_head, "bias", None) is not None)
    head.to(old_head.weight.device, old_head.weight.dtype)
    rows = HeadRows.between(draft.kept_ids, kept_ids)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        scale = target.head.scale / draft.head.scale  # rows that were copied have the target's in them
        head.weight[:, : source.shape[1]] = (source[kept_ids.to(source.device)] * scale).to(head.weight)
        for new_parameter, old_parameter in zip(head.parameters(), old_head.parameters(), strict=True):
            new_parameter.copy_(rows.moved(old_parameter, new_parameter))
    draft.model.set_output_embeddings(head)
    return replace(draft, kept_ids=kept_ids.cpu())
