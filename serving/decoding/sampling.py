"""Tokens and verdicts from logits, for rows of many requests with parameters of their own.

Three kinds of rows. Greedy and seeded ones *choose*: the target's own token is a function of its logits (and of keyed
noise), so a drafted token is accepted if it is that token. The others draw by rejection sampling.

A step's verdicts are launched together and read at once (`PendingVerdicts`). Where device reads cost nothing, only what
a verdict needs is computed: one position after another, up to a rejection. Verdicts are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distillspec.sampling import best_ids, policy_probs
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.transfer import rows_of, to_device, to_host, to_host_together
from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.decoding.chains import Chains, next_tokens
from distillspec.serving.decoding.drafting import Draws, make_draws, place_key
from distillspec.serving.decoding.logits import Columns, Place, needs_transform, transform
from distillspec.serving.decoding.noise import exponentials, hashed_ids, key_tensor
from distillspec.serving.decoding.verification import TreeVerdict, verify_by_level, verify_choices, verify_tree
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


@dataclass(frozen=True)
class Judgement:
    """Verdict on a window."""

    verdict: TreeVerdict | None  # None where the target's logits on the path are NaN
    sound: bool  # False where any of the window's logits is NaN, on the path or off it


@dataclass(frozen=True)
class PendingVerdicts:
    """Verdicts under way: `numbers [n]` int64 on the device, and what to make of them once they are read."""

    numbers: Tensor
    verdicts: Callable[[list[int]], list[TreeVerdict]]


class TokenSampler:
    """Judges windows, and makes drafts' draws. Proposal, acceptance and residual draws have streams of their own.

    Args:
        look: whether reading a number from the device costs nothing; None: on CPUs it does not. Without looks every
            position of a window is computed, and a step's verdicts are one read (trees wider than one: two).
    """

    def __init__(self, vocab_size: int, device: torch.device, seed: int = 0, *, look: bool | None = None) -> None:
        self.look = device.type == "cpu" if look is None else look
        self.columns = Columns(vocab_size)
        self.device = device
        self._hashed = hashed_ids(torch.arange(vocab_size, device=device))
        self._propose, self._accept, self._residual = (torch.Generator().manual_seed(3 * seed + i) for i in range(3))

    def draws(self, places: Sequence[Place], count: int, columns: Columns) -> Draws:
        """Return what a draft on `columns` chooses the next `count` tokens after `places` by."""
        drawn = any(not place.sequence.params.is_greedy for place in places)
        uniforms = torch.rand(len(places) if drawn else 0, count, generator=self._propose, dtype=torch.float64)
        return make_draws(places, columns, count, to_device(uniforms, self.device))

    def verify(self, logits: Tensor, windows: Sequence[VerificationWindow]) -> list[Judgement]:
        """A judgement of each window.

        `logits [Σ (1 + len(tree)), V]` of any float dtype, window by window, the row after the text first.
        """
        if any(needs_transform(window.sequence) for window in windows):
            logits = _transformed(logits, [place for window in windows for place in window.places()], self.columns)
        logits, finite = self._made_finite(logits)
        firsts = _firsts(windows)
        asked: list[tuple[list[int], PendingVerdicts]] = []
        for (policy, seeded), members in _by_kind([window.sequence for window in windows]):
            group = [windows[m] for m in members]
            part = rows_of(logits, [row for m in members for row in range(firsts[m], firsts[m] + _rows(windows[m]))])
            judge = _ask_greedy if policy.is_greedy else self._ask_seeded if seeded else self._ask_drawn
            asked.append((members, judge(part, group, policy)))
        numbers = to_host(torch.cat([finite.long(), *(asking.numbers for _, asking in asked)])).tolist()
        return _judgements(windows, [bool(sound) for sound in numbers[: len(logits)]], asked, numbers[len(logits) :])

    def _ask_seeded(
        self, logits: Tensor, windows: Sequence[VerificationWindow], policy: SamplingPolicy
    ) -> PendingVerdicts:
        places = [place for window in windows for place in window.places()]
        keys = to_device(key_tensor(map(place_key, places)), logits.device)

        def choose(logits: Tensor, keys: Tensor) -> Tensor:
            probs = policy_probs(logits, policy, sync=self.look)
            return best_ids(probs.div_(exponentials(keys, self._hashed)))

        if not self.look:
            return _choices(choose(logits, keys), windows)
        # Choices are made only where the paths come by.
        verdicts = verify_by_level(
            lambda rows: to_host(choose(rows_of(logits, rows), keys[rows])).tolist(),
            [window.tree for window in windows],
            _firsts(windows),
        )
        return _known(logits, verdicts)

    def _ask_drawn(
        self, logits: Tensor, windows: Sequence[VerificationWindow], policy: SamplingPolicy
    ) -> PendingVerdicts:
        if not all(window.tree.is_chain for window in windows):
            return self._ask_wide(logits, windows, policy)
        chains = Chains([window.tree for window in windows], logits.device)
        accept = self.uniforms(self._accept, len(windows) * chains.longest, logits).view(len(windows), -1)
        decide = chains.accept_by_level if self.look else chains.accept
        count, last = decide(logits, policy, accept)
        tokens = next_tokens(chains, last, count, self.uniforms(self._residual, len(windows), logits), self.look)

        def verdicts(numbers: list[int]) -> list[TreeVerdict]:
            counts, own = numbers[: len(windows)], numbers[len(windows) :]
            return [TreeVerdict(tuple(range(count)), token) for count, token in zip(counts, own, strict=True)]

        return PendingVerdicts(torch.cat([count, tokens]), verdicts)

    def _ask_wide(
        self, logits: Tensor, windows: Sequence[VerificationWindow], policy: SamplingPolicy
    ) -> PendingVerdicts:
        """Judge trees wider than one on the host, after a read of their whole distributions.

        `verify_tree` draws from rows that must be distributions. Rows with NaN are replaced by uniform ones, and their
        verdicts are discarded later.
        """
        if not self.look:  # else `_made_finite` has done so
            logits = logits.masked_fill(~torch.isfinite(logits.amax(-1, keepdim=True)), 0.0)
        own_probs = policy_probs(logits, policy, sync=self.look)
        probs, *drafted = to_host_together([own_probs, *_draft_probs(windows, logits)])
        verdicts = []
        for first, window in zip(_firsts(windows), windows, strict=True):
            tree = window.tree
            if tree.draft_probs is not None:
                tree = replace(tree, draft_probs=drafted.pop(0), kept_ids=None)
            accept = self.uniforms(self._accept, len(tree), probs)
            own = self.uniforms(self._residual, 1, probs)[0]
            verdicts.append(verify_tree(probs[first : first + _rows(window)], tree, accept, own))
        return _known(logits, verdicts)

    def _made_finite(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Set rows that define no distribution (NaN, +inf, −inf alone) to zero. Return `[N]` bool, True for sound rows.

        Where device reads are not free the rows stay, and their verdicts are dropped later.
        """
        finite = torch.isfinite(logits.amax(-1))
        if self.look and not bool(finite.all()):
            logits = logits.masked_fill(~finite[:, None], 0.0)
        return logits, finite

    @staticmethod
    def uniforms(stream: torch.Generator, count: int, like: Tensor) -> Tensor:
        """Draw `[count]` float64 in [0, 1) from a stream on the host, onto the device of `like`."""
        return to_device(torch.rand(count, generator=stream, dtype=torch.float64), like.device)


def _judgements(
    windows: Sequence[VerificationWindow],
    finite: list[bool],
    asked: Sequence[tuple[list[int], PendingVerdicts]],
    numbers: list[int],
) -> list[Judgement]:
    """Return the judgements. Verdicts that depend on rows with NaN become None."""
    found: dict[int, TreeVerdict] = {}
    for members, asking in asked:
        own, numbers = numbers[: len(asking.numbers)], numbers[len(asking.numbers) :]
        found.update(zip(members, asking.verdicts(own), strict=True))
    judgements = []
    for i, (first, window) in enumerate(zip(_firsts(windows), windows, strict=True)):
        rows = finite[first : first + _rows(window)]
        decided = rows[0] and all(rows[1 + node] for node in found[i].path)
        judgements.append(Judgement(found[i] if decided else None, all(rows)))
    return judgements


def _ask_greedy(logits: Tensor, windows: Sequence[VerificationWindow], policy: SamplingPolicy) -> PendingVerdicts:
    return _choices(best_ids(logits), windows)


def _choices(choices: Tensor, windows: Sequence[VerificationWindow]) -> PendingVerdicts:
    """The target's own token at every row, `[N]`."""
    return PendingVerdicts(choices, lambda read: _walk(read.__getitem__, windows))


def _known(like: Tensor, verdicts: list[TreeVerdict]) -> PendingVerdicts:
    """Verdicts that need no more numbers."""
    return PendingVerdicts(torch.empty(0, dtype=torch.int64, device=like.device), lambda _: verdicts)


def _walk(choice: Callable[[int], int], windows: Sequence[VerificationWindow]) -> list[TreeVerdict]:
    """Return verdicts from the target's own token at each row, computed only along the accepted paths."""
    return [
        verify_choices(lambda row, first=first: choice(first + row), window.tree)  # type: ignore[misc]
        for first, window in zip(_firsts(windows), windows, strict=True)
    ]


def _draft_probs(windows: Sequence[VerificationWindow], like: Tensor) -> Iterator[Tensor]:
    """Return the distributions that sampled trees were drawn from, over the whole vocabulary."""
    for tree in (window.tree for window in windows):
        if tree.draft_probs is not None and tree.kept_ids is not None:
            full = tree.draft_probs.new_zeros(len(tree.draft_probs), like.shape[-1])
            yield full.index_copy_(1, tree.kept_ids, tree.draft_probs).float()
        elif tree.draft_probs is not None:
            yield tree.draft_probs.float()


def _transformed(logits: Tensor, places: Sequence[Place], columns: Columns) -> Tensor:
    if not any(needs_transform(place.sequence) for place in places):
        return logits
    logits = logits.to(torch.float32, copy=True)
    transform(logits, places, columns)
    return logits


def _by_kind(sequences: Sequence[SequenceState]) -> Iterator[tuple[tuple[SamplingPolicy, bool], list[int]]]:
    """Places of the sequences that share a policy and are, or are not, seeded."""
    groups: dict[tuple[SamplingPolicy, bool], list[int]] = {}
    for place, sequence in enumerate(sequences):
        groups.setdefault((sequence.params.policy, sequence.params.seed is not None), []).append(place)
    yield from groups.items()


def _rows(window: VerificationWindow) -> int:
    return 1 + len(window.tree)


def _firsts(windows: Sequence[VerificationWindow]) -> list[int]:
    """The first row of each window."""
    firsts, row = [], 0
    for window in windows:
        firsts.append(row)
        row += _rows(window)
    return firsts
