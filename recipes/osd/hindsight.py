"""Hindsight: acceptance of any draft on a recorded answer.

Exact speculation does not change the target's text, whatever draft served. So one forward pass of a draft over the
logged tokens, against the logged signal, gives the acceptance it would have had, and the tokens it would have had
accepted. Before the draft learns from the answer this is progressive validation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.evaluation.positions import CHUNK_POSITIONS
from distillspec.evaluation.states import TargetStates, drafted_hidden
from distillspec.losses import BucketedPair
from distillspec.losses.pairs import columns_of, topk_pair
from distillspec.models import LanguageModel
from distillspec.recipes.osd.beside import NOTHING, bounds_beside
from distillspec.serving.online.log.records import ACCEPTED, BONUS, REJECTED, LoggedAnswer, share_of


@dataclass(frozen=True)
class Hindsight:
    """One draft on one recorded answer of R tokens. Columns are `[R]` float64, but for `in_tail`.

    The log holds the target's top tokens and the tail's mass. The tail taken as one token gives an upper bound of
    α = Σ min(p, q), left out it gives a lower one. w = min(1, q(x) / p(x)) is the probability that the text's token x
    was an accepted proposal, given that it was emitted. For x in the tail it is that of the whole tail.
    """

    upper: Tensor
    lower: Tensor
    accepted: Tensor  # w
    in_tail: Tensor  # bool: x is in the tail

    def __len__(self) -> int:
        return len(self.upper)


@torch.no_grad()
def look_back(
    draft: LanguageModel, answer: LoggedAnswer, states: TargetStates | None = None, named: Tensor | None = None
) -> Hindsight:
    """Run the draft over the answer.

    Args:
        states: the target's, where the log has none. Not needed for a draft that reads tokens alone.
        named: tokens `[R]` that a store names, tried before the draft's (`bounds_beside`). w is without them.

    Raises:
        ConfigError: the answer was not sampled at plain temperature 1, for which alone the log's signal holds.
    """
    if not (answer.policy.is_plain and answer.policy.temperature == 1.0):
        raise ConfigError(f"{answer.request_id} was not sampled at temperature 1 without filters: {answer.policy}")
    hidden = drafted_hidden(draft, answer.sample(), states, 1)[0]
    labels = torch.tensor(answer.response_ids)
    named = torch.full_like(labels, NOTHING) if named is None else named
    pieces = []
    for start in range(0, len(labels), CHUNK_POSITIONS):
        rows = slice(start, start + CHUNK_POSITIONS)
        signal = answer.signal.rows(start, start + CHUNK_POSITIONS)
        pair = topk_pair(draft.head.logits(hidden[rows]).cpu(), signal, draft.kept_ids)
        pieces.append(bounds_beside(pair, signal, named[rows]) + _accepted(pair, signal.ids, labels[rows], draft))
    upper, lower, accepted, in_tail = (torch.cat(column) for column in zip(*pieces, strict=True))
    return Hindsight(upper.double(), lower.double(), accepted.double(), in_tail)


def redraw(
    answer: LoggedAnswer, hindsight: Hindsight, version: str, length: int, seed: int, tail_share: float = 1.0
) -> LoggedAnswer:
    """Return the answer as the log would hold it, had this draft served at length `length`.

    Given the text, a drafted token was accepted with probability min(1, q(x)/p(x)). A rejection starts a new window, γ
    accepted tokens end with a bonus. Rejected proposals are not known, so their tokens are −1. The same answer, draft
    and seed give the same outcomes.

    Args:
        tail_share: share of the tail's possible overlap that is overlap (`bias.tail_shares`).
    """
    outcomes, accepted_in_a_row = [], 0
    generator = torch.Generator().manual_seed(int(share_of(answer.request_id, f"outcomes {seed}") * 2**62))
    uniforms = torch.rand(len(answer), generator=generator, dtype=torch.float64)
    chances = torch.where(hindsight.in_tail, tail_share * hindsight.accepted, hindsight.accepted)
    for is_accepted in (uniforms < chances).tolist():
        if accepted_in_a_row == length:
            outcome = BONUS
        else:
            outcome = ACCEPTED if is_accepted else REJECTED
        accepted_in_a_row = accepted_in_a_row + 1 if outcome == ACCEPTED else 0
        outcomes.append(outcome)
    drawn = torch.tensor(outcomes, dtype=torch.uint8)
    unknown = torch.full((len(answer),), torch.nan, dtype=torch.float16)
    return replace(
        answer,
        outcomes=drawn,
        draft_tokens=torch.where(drawn == ACCEPTED, torch.tensor(answer.response_ids), -1).to(torch.int32),
        draft_probs=unknown,
        draft_entropies=unknown,
        draft_versions=(version,),
        version_of=torch.zeros(len(answer), dtype=torch.uint8),
    )


def _accepted(pair: BucketedPair, ids: Tensor, labels: Tensor, draft: LanguageModel) -> tuple[Tensor, Tensor]:
    """Return w and whether the label is in the tail, for the pair's positions."""
    matches = (ids.long() == labels[:, None]).int()
    in_top = matches.any(-1)
    bucket = torch.where(in_top, matches.argmax(-1), ids.shape[1])[:, None]
    p, q = (probs.gather(-1, bucket)[:, 0] for probs in (pair.target_probs, pair.draft_probs))
    producible = columns_of(labels, draft.kept_ids, draft.width) >= 0
    return torch.where(producible, (q / p).clamp(max=1), 0), ~in_top
