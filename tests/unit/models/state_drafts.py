"""Drafts that read states, with weights that use everything they read, and their recursion written out."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.features import read_states

KINDS = {
    "eagle": DraftConfig(kind="eagle", feature_ids=[1, 3]),
    "scaled eagle": DraftConfig(kind="eagle", feature_ids=[1, 3]),  # as for targets whose layers are not copied
    "normed eagle": DraftConfig(kind="eagle", feature_ids=[1, 3], state_norms=True),
    "two layers of eagle": DraftConfig(kind="eagle", layers=2),
    "features": DraftConfig(kind="pruned", layers=2, features=True),
    "medusa": DraftConfig(kind="medusa"),
    "block": DraftConfig(kind="block"),
    "confident block": DraftConfig(kind="block", confidence=True),
    "block both ways": DraftConfig(kind="block", bidirectional=True),
    "block of one mask": DraftConfig(kind="block", markov=0, shared_mask=True, feature_ids=[1, 3]),
    "hydra": DraftConfig(kind="medusa", sequential=True, feature_ids=[1, 3]),
}
ATTENDING = [kind for kind, config in KINDS.items() if config.kind != "medusa"]


def state_draft(
    kind: str | DraftConfig, target: LanguageModel, kept_ids: Tensor | None = None, noise: float = 0.1
) -> LanguageModel:
    """Return a draft in the target's dtype. Noise lets it use what begins at zero."""
    draft = initialise_draft(KINDS[kind] if isinstance(kind, str) else kind, target, kept_ids=kept_ids)
    if isinstance(kind, str) and kind.startswith("scaled"):
        assert draft.state_input is not None
        columns = len(draft.state_ids) * draft.state_input.target_width
        draft.state_input.scale = torch.exp2(-(torch.arange(columns) % 5).float())
    if draft.state_input is not None and draft.state_input.norms is not None:
        weight = draft.state_input.norms.weight
        weight.data = 1 + (torch.arange(len(weight)) % 3) / 2
    draft.model.to(target.dtype)
    generator = torch.Generator().manual_seed(1)
    embeddings = draft.model.get_input_embeddings().weight
    with torch.no_grad():
        for parameter in draft.model.parameters():
            if parameter is not embeddings and parameter.ndim == 2:
                parameter += noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return draft


def drafted_logits(draft: LanguageModel, target: LanguageModel, text: list[int], drafted: list[int]) -> list[Tensor]:
    """Return the logits that each drafted token was chosen by: a pass over the text, then one token after another.

    The last token of `text` is the newest: the target has not read it.
    """
    states = read_states(target, torch.tensor([text]), torch.arange(len(text))[None], draft.state_ids)
    return logits_behind(draft, states[0], text, drafted)


@torch.no_grad()
def logits_behind(draft: LanguageModel, states: Tensor, text: list[int], drafted: list[int]) -> list[Tensor]:
    """Return the same where the target's states of the text's tokens are these `[len(text), states · D]`."""
    assert draft.state_input is not None
    if draft.sees_both_ways:
        return _both_ways(draft, states, text, drafted)
    attention = {"past_key_values": DynamicCache(), "use_cache": True} if draft.attends else {}
    logits = []
    fused = draft.state_input.fuse(states[None])
    fed = torch.cat([torch.zeros_like(fused[:, :1]), fused[:, :-1]], 1)
    read = torch.tensor([text]), torch.arange(len(text))[None]
    last = draft.last_states(*read, fed, **attention)[:, -1:]
    for position, token in enumerate(drafted):
        newest = torch.tensor([[[*text, *drafted][len(text) - 1 + position]]])
        logits.append(draft.head.logits(draft.head_input(last, position, newest))[0, 0])
        if position + 1 < len(drafted):
            read_next = -1 - position if draft.drafts_block else token
            at = torch.tensor([[read_next]]), torch.tensor([[len(text) + position]])
            last = draft.last_states(*at, last, **(attention or {"drafted": position + 1}))
    return logits


def _both_ways(draft: LanguageModel, states: Tensor, text: list[int], drafted: list[int]) -> list[Tensor]:
    """Return the same for blocks whose masks see each other: one pass over the text and all masks."""
    assert draft.state_input is not None
    count, masks = len(text), int(draft.most_positions or 1) - 1
    fused = draft.state_input.fuse(states)
    fed = torch.cat([torch.zeros_like(fused[:1]), fused[:-1], fused.new_zeros(masks, fused.shape[1])])[None]
    ids = torch.tensor([[*text, *(-1 - k for k in range(masks))]])
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    seen[count:, count:] = True
    term = torch.zeros(1, 1, *seen.shape, dtype=fused.dtype).masked_fill(~seen, -torch.inf)
    last = draft.last_states(ids, torch.arange(ids.shape[1])[None], fed, attention_mask=term)[0]
    before = [text[-1], *drafted]
    return [
        draft.head.logits(draft.head_input(last[None, count - 1 + k, None], k, torch.tensor([[before[k]]])))[0, 0]
        for k in range(len(drafted))
    ]
