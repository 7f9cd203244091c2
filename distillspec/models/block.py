"""Input of block drafts, which draft a whole block in one pass (as DFlash and P-EAGLE do, with DSpark's Markov head).

The pass reads the newest token, and masks in place of the tokens behind it. The k-th mask gives drafted position k
(the newest token gives position 0). A mask sees the text and the masks before it, so a block of fewer tokens is the
beginning of a longer one, and training and serving agree at every length. Where masks see each other in both directions
(as DFlash's do), all of a block are read whatever number of tokens is drafted, and later ones are left out.

Positions know nothing of the tokens that are drawn before them in the block. A Markov head tells the one before: the
head reads a projection of its embedding beside the state. With it, q is the distribution of a token given the one
before, and verification is exact as it is. Without it, q is independent of the drawn tokens, and exact too, but tokens
that do not fit together are drawn at temperatures above 0.

A confidence head predicts from the state alone how probable it is that a position's token is accepted (DSpark's: it
learns α = Σ min(p, q)), so that serving need not verify what would be rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import LlamaConfig, PreTrainedModel

from distillspec.models.eagle import eagle_model
from distillspec.models.state_input import BLOCK, EPS, StateInput

MASK_SCALE = 0.02  # of masks at the start: norms bring them to the size of states


class BlockInput(StateInput):
    """`StateInput` whose tokens may be masks: id −k is the mask of drafted position k.

    Attributes:
        masks: `[positions − 1, 2 · width]`, embedding and state of each mask, or `[1, 2 · width]` of all.
        markov: projection of the newest token's embedding to `rank`, None without a Markov head.
        confidence: logit of the probability that a position's token is accepted, None without a confidence head.
    """

    def __init__(
        self,
        state_ids: Sequence[int],
        target_width: int,
        width: int,
        positions: int,
        rank: int,
        confident: bool = False,
        shared_mask: bool = False,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(BLOCK, state_ids, target_width, width)
        self.positions = positions
        self.shared_mask = shared_mask
        self.bidirectional = bidirectional
        rows = 1 if shared_mask else max(positions - 1, 1)
        self.masks = nn.Parameter(MASK_SCALE * torch.randn(rows, 2 * width))
        self.markov = nn.Linear(width, rank, bias=False) if rank else None
        self.confidence = nn.Linear(width, 1) if confident else None

    @property
    def each_mask(self) -> Tensor:
        """Return `[positions − 1, 2 · width]`, at least one row: embedding and state of each position's mask."""
        return self.masks.expand(max(self.positions - 1, 1), -1)

    @property
    def rank(self) -> int:
        """Width of what the Markov head reads, 0 without one."""
        return 0 if self.markov is None else self.markov.out_features

    def forward(self, embeddings: Tensor, fed: Tensor, input_ids: Tensor | None = None) -> Tensor:
        joined = super().forward(embeddings, fed)
        if input_ids is None:
            return joined
        masks = self.masks[(-1 - input_ids).clamp(0, len(self.masks) - 1)].to(joined.dtype)
        return torch.where((input_ids < 0).unsqueeze(-1), masks, joined)

    def head_input(self, states: Tensor, newest: Tensor | None) -> Tensor:
        """Return what the head reads: normed `states […, width]`, and the embedding before, if there is a Markov head.

        Args:
            newest: `[…, width]` embedding of the token before the drafted one.
        """
        if self.markov is None:
            return states
        assert newest is not None, "a Markov head reads the token before"
        return torch.cat([states, self.markov(rms_norm(newest, newest.shape[-1:], eps=EPS).to(states.dtype))], -1)

    def confidence_logits(self, states: Tensor) -> Tensor:
        """Return the logits `[…]` float32 of the probability that each position's token is accepted.

        They may decide what is verified at any temperature, for they know none of the drawn tokens.

        Args:
            states: `[…, width + rank]` what the head reads. The part of the token before is left out.
        """
        assert self.confidence is not None, "made with draft.confidence"
        logits: Tensor = self.confidence(states[..., : self.confidence.in_features])
        return logits[..., 0].float()


def block_model(
    config: LlamaConfig,
    state_ids: list[int],
    target_width: int,
    positions: int,
    rank: int,
    confident: bool = False,
    shared_mask: bool = False,
    bidirectional: bool = False,
) -> PreTrainedModel:
    """Return an EAGLE-3 model with masks, a Markov head that starts without effect, and a confidence head if asked."""
    model = eagle_model(config, state_ids, target_width)
    width, rows = config.hidden_size, config.vocab_size
    ways = shared_mask, bidirectional
    model.state_input = BlockInput(state_ids, target_width, width, positions, rank, confident, *ways)
    if rank:
        head = nn.Linear(width + rank, rows, bias=False)
        with torch.no_grad():
            head.weight[:, width:] = 0
        model.set_output_embeddings(head)
    return model
