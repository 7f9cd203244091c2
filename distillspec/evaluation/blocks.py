"""Block efficiency: the tokens that one run of the target yields when γ tokens are drafted for it.

The estimator needs only text sampled from the target under the policy, and no speculative decoding, which
emits such text too: given the text x, each emitted token was an accepted proposal with probability

    w_t = P(accepted, x_t) / P(x_t) = min(p(x_t), q(x_t)) / p(x_t) = min(1, q(x_t) / p(x_t)),

else the residual draw. So, given x, a block that starts at t accepts its first i proposals with probability
w_t ··· w_{t+i−1}, and emits n tokens with probability

    w_t ··· w_{t+n−2} (1 − w_{t+n−1})  for n ≤ γ,        w_t ··· w_{t+γ−1}  for n = γ + 1 (the bonus).

where w_{t+i} is that of the (i + 1)-th drafted position: a draft that reads the target's states predicts token t + i
otherwise when the states end at t than when they end later.

Averaged over x this is the sum over all paths of Π min(p, q): E_{x~p}[Π min(1, q/p)] = Σ_x Π min(p, q).
Two things follow that averages of acceptance rates miss:

- Survival of i proposals is the product along one path, S_i(t) = w_t ··· w_{t+i−2} · α_{t+i−1} (its last
  factor replaced by its expectation α = Σ min(p, q), for less variance), never a product of averages.
- Blocks do not start everywhere alike: long blocks skip over easy text, so that hard text holds more
  starts. The probability v_t that a block starts at t follows by recursion from v_0 = 1 and the emission
  probabilities above. With all starts weighted alike, half a text at 5 tokens a block and half at 1 would
  average 3. Decoding it takes N/10 + N/2 blocks for N tokens: 1.67.

τ(γ) = Σ_t v_t (1 + Σ_{i≤γ} S_i(t)) / Σ_t v_t = expected tokens / expected blocks, sums over prompts too.

The end of a response. A response that stopped by itself ends its last block too, as in real decoding. Nothing
comes after a stop token, so α there counts only tokens that continue (`Positions.continuing`). A response cut at
the length limit does not show what its last blocks would have yielded, so only blocks that start at least
γ + 1 tokens before the cut count. That rule depends on positions, not on outcomes, so it favours neither easy text
nor hard. (A response cut before even one whole window counts its first block with what there is: too low.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.evaluation.positions import Positions


@dataclass(frozen=True)
class BlockCounts:
    """Expected counts on one response for γ = 1 … G, `[G]` float64 each. τ = Σ tokens / Σ blocks."""

    tokens: Tensor
    blocks: Tensor


def count_blocks(positions: Positions, finished: bool, speculation_length: int) -> BlockCounts:
    """Return the expected blocks and tokens that speculative decoding spends on this response (see the module).

    Args:
        finished: the response ended by itself, not at a length limit.
    """
    length = len(positions)
    depths = [positions.at(depth) for depth in range(speculation_length)]
    reached = _reached(_along([each.accepted for each in depths]))
    survival = reached[:, :-1] * _along([each.continuing for each in depths])
    tokens = torch.zeros(speculation_length, dtype=torch.float64)
    blocks = torch.zeros(speculation_length, dtype=torch.float64)
    for gamma in range(1, speculation_length + 1):
        starts = _start_probabilities(reached, gamma)
        counted = length if finished else max(length - gamma, 1)
        starts = starts[:counted]
        tokens[gamma - 1] = starts @ (1 + survival[:counted, :gamma].sum(-1))
        blocks[gamma - 1] = starts.sum()
    return BlockCounts(tokens, blocks)


def _along(values: list[Tensor]) -> Tensor:
    """Return `[R, G]`: what a block from t meets of G depths' values `[R]`. Depth i is at t + i, zero past the end."""
    return torch.stack(
        [
            torch.cat([depth_values[i:], depth_values.new_zeros(min(i, len(depth_values)))])
            for i, depth_values in enumerate(values)
        ],
        -1,
    )


def _reached(accepted: Tensor) -> Tensor:
    """Return `[R, G + 1]`: w_t ··· w_{t+i−1} for i = 0 … G, given `_along` of w."""
    return torch.cat([accepted.new_ones(len(accepted), 1), accepted.cumprod(-1)], dim=-1)


def _start_probabilities(reached: Tensor, gamma: int) -> Tensor:
    """Return v `[R]`: the probability that a block starts at each position."""
    length = len(reached)
    emits = torch.cat([reached[:, :gamma] - reached[:, 1 : gamma + 1], reached[:, gamma, None]], dim=-1)
    starts = reached.new_zeros(length + gamma + 1)
    starts[0] = 1
    for t in range(length):
        starts[t + 1 : t + gamma + 2] += starts[t] * emits[t]
    return starts[:length]
