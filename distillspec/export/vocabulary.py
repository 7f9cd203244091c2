"""Rows of embeddings and head: as many as the target has, none proposing an id that the draft never learnt."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import PreTrainedModel

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel

CHUNK = 256  # states whose logits are held at once
RIDGE = 1e-5  # on the square of a logit (1e-6 to 1e-4 leave much the same mass on held-out text)


def learnt_ids(draft: LanguageModel) -> Tensor:
    """Return the ids the draft was trained on, `[n]` int64: the kept ones, or all that the tokenizer can produce."""
    return torch.arange(draft.identity.vocab_size) if draft.kept_ids is None else draft.kept_ids.cpu()


def align_rows(model: PreTrainedModel, rows: int, needed: int) -> None:
    """Give embeddings and head exactly `rows` rows, in place. New rows are zero.

    Args:
        needed: ids that must fit.

    Raises:
        ConfigError: the target has fewer rows than the tokenizer has ids.
    """
    if rows < needed:
        raise ConfigError(f"the target has {rows} rows, but the draft's tokenizer needs {needed}; is it its target?")
    tied = model.config.get_text_config().tie_word_embeddings
    # Changed in place: Gemma's embeddings scale what they give out.
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings.weight = nn.Parameter(_resized(embeddings.weight, rows), requires_grad=False)
    embeddings.num_embeddings = rows
    embeddings.padding_idx = None  # it may lie past the end, which is refused, and only matters to gradients
    head.weight = embeddings.weight if tied else nn.Parameter(_resized(head.weight, rows), requires_grad=False)
    if getattr(head, "bias", None) is not None:
        head.bias = nn.Parameter(_resized(head.bias, rows), requires_grad=False)
    head.out_features = rows
    model.config.get_text_config().vocab_size = rows
    model.config.vocab_size = rows
    model.vocab_size = rows


@torch.no_grad()
def suppress_rows(model: PreTrainedModel, unlearnt: Tensor, row: Tensor) -> None:
    """Write `row` (`[D]`, or one an id) to the head at the ids `unlearnt`, in place.

    A tied head shares it with input embeddings: of padding, which is never read.
    """
    head = model.get_output_embeddings()
    head.weight[unlearnt.to(head.weight.device)] = row.to(head.weight)


def improbable_row(draft: LanguageModel, hidden: Tensor, unlearnt: int) -> Tensor:
    """Return a head row `[D]` float32 that gives `unlearnt` ids little probability together at all `hidden [N, D]`.

    A head without bias cannot give a constant low logit, but final hidden states share directions along which
    they hardly vary, and one of those does nearly as well. The row minimises the mean over positions of
    softplus(row · h + log unlearnt − logsumexp of the draft's logits), an upper bound on the probability that
    such ids take. It is convex in the row. A small ridge keeps the row from fitting single positions.
    """
    states = hidden.detach().double()
    odds = math.log(unlearnt) - learnt_mass(draft, hidden)
    size = RIDGE * states.pow(2).sum(-1).mean()
    row = torch.zeros(states.shape[1], dtype=states.dtype, device=states.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([row], max_iter=200, line_search_fn="strong_wolfe")

    def bound() -> Tensor:
        optimizer.zero_grad()
        loss = softplus(draft.head.scale * (states @ row) + odds).mean() + size * row.pow(2).sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(bound)
    return row.detach().float()


@torch.no_grad()
def learnt_mass(draft: LanguageModel, hidden: Tensor) -> Tensor:
    """Return logsumexp of the draft's logits `[N]` float64 at `hidden [N, D]`, a part at a time: heads are wide."""
    return torch.cat([draft.head.logits(part).double().logsumexp(-1) for part in hidden.detach().split(CHUNK)])


@torch.no_grad()
def stray_mass(logits: Tensor, learnt: Tensor) -> float:
    """Return the mean probability that `logits [N, rows]` give to ids outside `learnt`."""
    inside = torch.logsumexp(logits[:, learnt].double(), -1) - torch.logsumexp(logits.double(), -1)
    return float((-torch.expm1(inside)).clamp(min=0).mean())


def _resized(weight: Tensor, rows: int) -> Tensor:
    old = weight.detach()
    if rows <= old.shape[0]:
        return old[:rows].clone()
    return torch.cat([old, old.new_zeros(rows - old.shape[0], *old.shape[1:])])
