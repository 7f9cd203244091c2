"""Tokens and verdicts from logits: the engine's draws, for rows of many requests with parameters of their own.

Three kinds of rows. Greedy and seeded ones *choose*: the target's own token is a function of its logits (and of keyed
noise), so a drafted token stands when it is that token. The others draw by rejection sampling. Only what a verdict
needs is computed: a whole distribution for one position a row, not for the whole window.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.sampling import draw, filtered_logits
from distillspec.serving.logits import Columns, Place, needs_transform, transform
from distillspec.serving.noise import NoiseBank
from distillspec.serving.requests import Sequence
from distillspec.serving.tree import ROOT, TokenTree
from distillspec.serving.verification import (
    Verdict,
    chain_acceptance,
    residual_probs,
    verify_choices,
    verify_tree,
)
from distillspec.types import SamplingPolicy


@dataclass(frozen=True)
class Window:
    """One sequence and what was drafted for it: 1 + len(tree) rows of the target's logits."""

    sequence: Sequence
    tree: TokenTree

    def places(self) -> list[Place]:
        tokens = self.tree.tokens
        return [
            Place(self.sequence, tuple(tokens[n] for n in self.tree.path(node))) for node in range(ROOT, len(tokens))
        ]


@dataclass(frozen=True)
class Drafted:
    """One token a row from the draft: `tokens [B]` absolute ids; `probs[r]` where row r draws, else None."""

    tokens: list[int]
    probs: list[Tensor | None]  # [width] each, what the token was drawn from
    finite: list[bool]  # False: the row's logits are no numbers, its token means nothing


class TokenSampler:
    """Draws for both models. Proposal, acceptance and residual draws have streams of their own."""

    def __init__(self, vocab_size: int, device: torch.device, seed: int = 0) -> None:
        self.columns = Columns(vocab_size)
        self.noise = NoiseBank(vocab_size, device)
        self._propose, self._accept, self._residual = (torch.Generator().manual_seed(3 * seed + i) for i in range(3))

    def propose(self, logits: Tensor, places: Seq[Place], columns: Columns) -> Drafted:
        """One drafted token for each row of the draft's `logits [B, width]`."""
        logits, finite = _made_finite(_transformed(logits, places, columns))
        tokens = torch.zeros(len(places), dtype=torch.int64, device=logits.device)
        probs: list[Tensor | None] = [None] * len(places)
        for policy, rows in _by_policy([place.sequence for place in places]):
            scores = logits if len(rows) == len(places) else logits[rows]
            if policy.is_greedy:
                tokens[rows] = scores.argmax(-1)
                continue
            scores = filtered_logits(scores, policy)
            seeded = [i for i, row in enumerate(rows) if places[row].sequence.params.seed is not None]
            free = [i for i, row in enumerate(rows) if places[row].sequence.params.seed is None]
            for i in seeded:
                noise = self._noise_at(places[rows[i]])
                noise = noise if columns.kept_ids is None else noise[columns.kept_ids]
                tokens[rows[i]] = (scores[i] + noise).argmax()
            if free:
                drawn_from = torch.softmax(scores[free], -1)
                uniforms = torch.rand(len(free), generator=self._propose, dtype=torch.float64)
                drawn = draw(drawn_from, uniforms.to(scores.device))
                for place, (i, token) in enumerate(zip(free, drawn, strict=True)):
                    tokens[rows[i]] = token
                    probs[rows[i]] = drawn_from[place]
        return Drafted(columns.ids(tokens).tolist(), probs, finite)

    def verify(self, logits: Tensor, windows: Seq[Window]) -> list[Verdict | None]:
        """A verdict for each window; None where the target's logits on its path are no numbers.

        `logits [Σ (1 + len(tree)), V]` of any float dtype, window by window, the row after the text first.
        """
        if any(needs_transform(window.sequence) for window in windows):
            logits = _transformed(logits, [place for window in windows for place in window.places()], self.columns)
        logits, finite = _made_finite(logits)
        firsts = _firsts(windows)
        verdicts: list[Verdict | None] = [None] * len(windows)
        for policy, members in _by_policy([window.sequence for window in windows]):
            group = [windows[m] for m in members]
            rows = [row for m in members for row in range(firsts[m], firsts[m] + 1 + len(windows[m].tree))]
            scores = logits if len(rows) == len(logits) else logits[rows]
            for m, verdict in zip(members, self._verify_group(scores, group, policy), strict=True):
                verdicts[m] = verdict
        return [
            verdict if verdict is not None and _path_is_finite(verdict, finite, first) else None
            for verdict, first in zip(verdicts, firsts, strict=True)
        ]

    def _verify_group(self, scores: Tensor, windows: Seq[Window], policy: SamplingPolicy) -> list[Verdict]:
        """Windows of one policy; `scores` are their rows."""
        if policy.is_greedy:
            return _verify_chosen(scores.argmax(-1).tolist(), windows)
        seeded = [w.sequence.params.seed is not None for w in windows]
        verdicts: list[Verdict | None] = [None] * len(windows)
        firsts = _firsts(windows)
        for wanted, judge in ((True, self._verify_seeded), (False, self._verify_drawn)):
            members = [i for i, has_seed in enumerate(seeded) if has_seed is wanted]
            if not members:
                continue
            group = [windows[i] for i in members]
            rows = [row for i in members for row in range(firsts[i], firsts[i] + 1 + len(windows[i].tree))]
            part = scores if len(rows) == len(scores) else scores[rows]
            for i, verdict in zip(members, judge(part, group, policy), strict=True):
                verdicts[i] = verdict
        return [verdict for verdict in verdicts if verdict is not None]

    def _verify_seeded(self, scores: Tensor, windows: Seq[Window], policy: SamplingPolicy) -> list[Verdict]:
        scores = filtered_logits(scores, policy)
        places = [place for window in windows for place in window.places()]
        choices = [int((row + self._noise_at(place)).argmax()) for row, place in zip(scores, places, strict=True)]
        return _verify_chosen(choices, windows)

    def _verify_drawn(self, scores: Tensor, windows: Seq[Window], policy: SamplingPolicy) -> list[Verdict]:
        scores = filtered_logits(scores, policy)
        if all(window.tree.is_chain for window in windows):
            return self._verify_chains(scores, windows)
        verdicts = []
        for first, window in zip(_firsts(windows), windows, strict=True):
            probs = torch.softmax(scores[first : first + 1 + len(window.tree)], -1)
            accept = self._uniforms(self._accept, len(window.tree), probs)
            verdicts.append(verify_tree(probs, window.tree, accept, self._uniforms(self._residual, 1, probs)[0]))
        return verdicts

    def _verify_chains(self, scores: Tensor, windows: Seq[Window]) -> list[Verdict]:
        """Many chains at once; `scores` are filtered logits, −inf where a filter removes."""
        device, count = scores.device, len(windows)
        lengths = torch.tensor([len(window.tree) for window in windows], device=device)
        longest = int(lengths.max())
        firsts = torch.tensor(_firsts(windows), device=device)
        accepted = torch.zeros_like(lengths)
        if longest > 0:
            drafted = [[*window.tree.tokens, *[0] * (longest - len(window.tree))] for window in windows]
            tokens = torch.tensor(drafted, device=device)
            steps = torch.arange(longest, device=device)
            rows = firsts[:, None] + torch.minimum(steps, lengths[:, None])
            normaliser = scores.logsumexp(-1)
            target_at = (scores[rows, tokens] - normaliser[rows]).exp()
            draft_at = torch.ones_like(target_at)
            for b, window in enumerate(windows):
                if window.tree.kind == "sampled":
                    draft_at[b, : len(window.tree)] = _draft_at_drafted(window.tree)
            uniforms = self._uniforms(self._accept, count * longest, scores).view(count, longest)
            accepted = chain_acceptance(target_at, draft_at, lengths, uniforms)
        final = torch.softmax(scores[firsts + accepted], -1)
        for b, (stands, window) in enumerate(zip(accepted.tolist(), windows, strict=True)):
            if stands < len(window.tree):
                _take_away_rejected(final[b], window.tree, stands)
        next_tokens = draw(final, self._uniforms(self._residual, count, scores)).tolist()
        return [
            Verdict(tuple(range(stands)), token) for stands, token in zip(accepted.tolist(), next_tokens, strict=True)
        ]

    def _noise_at(self, place: Place) -> Tensor:
        sequence = place.sequence
        assert sequence.params.seed is not None
        return self.noise.gumbel(sequence.params.seed, sequence.index, sequence.output_length + len(place.drafted))

    @staticmethod
    def _uniforms(stream: torch.Generator, count: int, like: Tensor) -> Tensor:
        return torch.rand(count, generator=stream, dtype=torch.float64).to(like.device)


def _verify_chosen(choices: list[int], windows: Seq[Window]) -> list[Verdict]:
    return [
        verify_choices(choices[first : first + 1 + len(window.tree)], window.tree)
        for first, window in zip(_firsts(windows), windows, strict=True)
    ]


def _take_away_rejected(probs: Tensor, tree: TokenTree, node: int) -> None:
    """Turn the target's `probs [V]` into the residual after the chain's `node` fell, in place, unnormalised."""
    if tree.kind == "one_hot":
        token = tree.tokens[node]
        if float(probs.sum() - probs[token]) > 0:
            probs[token] = 0
        return
    assert tree.draft_probs is not None
    assert tree.rows is not None
    q = tree.draft_probs[tree.rows[node - 1]]
    if tree.kept_ids is not None:
        q = torch.zeros_like(probs).index_copy_(0, tree.kept_ids, q.to(probs))
    probs.copy_(residual_probs(probs, q))


def _draft_at_drafted(tree: TokenTree) -> Tensor:
    """q(x) of every drafted token of a sampled chain, `[n]`."""
    assert tree.draft_probs is not None
    tokens = torch.tensor(tree.tokens, device=tree.draft_probs.device)
    columns = tokens if tree.kept_ids is None else torch.searchsorted(tree.kept_ids, tokens)
    return tree.draft_probs[: len(tree)].gather(-1, columns[:, None])[:, 0]


def _made_finite(logits: Tensor) -> tuple[Tensor, list[bool]]:
    """Rows that define no distribution (NaN, +inf, nothing but −inf) become zeros; which rows were sound."""
    finite = torch.isfinite(logits.amax(-1))
    if not bool(finite.all()):
        logits = logits.masked_fill(~finite[:, None], 0.0)
    return logits, finite.tolist()


def _transformed(logits: Tensor, places: Seq[Place], columns: Columns) -> Tensor:
    if not any(needs_transform(place.sequence) for place in places):
        return logits
    logits = logits.float().clone()
    transform(logits, places, columns)
    return logits


def _by_policy(sequences: Seq[Sequence]) -> Iterator[tuple[SamplingPolicy, list[int]]]:
    """Places of the sequences that share a policy."""
    groups: dict[SamplingPolicy, list[int]] = {}
    for place, sequence in enumerate(sequences):
        groups.setdefault(sequence.params.policy, []).append(place)
    yield from groups.items()


def _firsts(windows: Seq[Window]) -> list[int]:
    """The first row of each window."""
    firsts, row = [], 0
    for window in windows:
        firsts.append(row)
        row += 1 + len(window.tree)
    return firsts


def _path_is_finite(verdict: Verdict, finite: list[bool], first: int) -> bool:
    """Whether every row that decided the verdict was sound."""
    return finite[first] and all(finite[first + 1 + node] for node in verdict.path)
