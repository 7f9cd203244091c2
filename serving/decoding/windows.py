"""Windows of a step: sequences with what was drafted for them, and the rows of logits that judge it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.transfer import rows_of
from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.decoding.drafting import place_key
from distillspec.serving.decoding.logits import Place
from distillspec.serving.decoding.noise import key_tensor
from distillspec.serving.decoding.row_kinds import Kind
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.types import SamplingPolicy


@dataclass(frozen=True)
class VerificationWindow:
    """One sequence and what was drafted for it: 1 + len(tree) rows of the target's logits."""

    sequence: SequenceState
    tree: TokenTree

    def places(self) -> list[Place]:
        tokens = self.tree.tokens
        return [
            Place(self.sequence, tuple(tokens[n] for n in self.tree.path(node))) for node in range(ROOT, len(tokens))
        ]


@dataclass
class StepLogits:
    """The windows of a step and their logits.

    peaks: `[N]`, the largest logit of each row.
    best: `[N]` int64, the lowest id that has it, None where nobody has looked for it.
    finite: `[N]` int64, 1 for rows that define a distribution, 0 for others.
    draw: returns `accept_uniforms` and `next_uniforms`. It is called at most once, whatever the kinds of the rows are.
    """

    windows: Sequence[VerificationWindow]
    logits: Tensor
    peaks: Tensor
    best: Tensor | None
    finite: Tensor
    draw: Callable[[StepLogits], tuple[Tensor, Tensor]]

    def __post_init__(self) -> None:
        self.trees = [window.tree for window in self.windows]
        self.sequences = [window.sequence for window in self.windows]
        sizes = [1 + len(tree) for tree in self.trees]
        self.firsts = list(accumulate(sizes[:-1], initial=0))  # rows of the texts' logits
        self.rows = sum(sizes)

    @cached_property
    def _uniforms(self) -> tuple[Tensor, Tensor]:
        return self.draw(self)

    @property
    def accept_uniforms(self) -> Tensor:
        """`[N]` float64 in [0, 1), for the acceptance of nodes."""
        return self._uniforms[0]

    @property
    def next_uniforms(self) -> Tensor:
        """`[B]` float64 in [0, 1), for the target's own tokens."""
        return self._uniforms[1]

    def noise_keys(self) -> Tensor:
        """Return the noise keys of all rows `[N, 2]` int32, on the host. Rows without a seed get (0, 0)."""
        return key_tensor(place_key(place) for window in self.windows for place in window.places())

    @cached_property
    def batch(self) -> TreeBatch:
        return TreeBatch(self.trees, self.logits.device)


@dataclass(frozen=True)
class KindWindows:
    """The windows of a step that are verified in one way: `members` by their places in the step."""

    kind: Kind
    members: Sequence[int]
    step: StepLogits

    @property
    def trees(self) -> list[TokenTree]:
        return [self.step.trees[member] for member in self.members]

    @property
    def next_uniforms(self) -> Tensor:
        """`[B]` float64 in [0, 1), for the target's own tokens."""
        return rows_of(self.step.next_uniforms, self.members)

    @property
    def rows(self) -> list[int]:
        """Rows of logits, in order."""
        firsts, trees = self.step.firsts, self.step.trees
        return [row for m in self.members for row in range(firsts[m], firsts[m] + 1 + len(trees[m]))]


def policies_of(windows: Sequence[VerificationWindow]) -> list[SamplingPolicy]:
    """Return the policy of each row of logits."""
    return [window.sequence.params.policy for window in windows for _ in range(1 + len(window.tree))]
