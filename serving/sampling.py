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

from distillspec.sampling import draw, filtered_logits, policy_probs
from distillspec.serving.logits import Columns, Place, needs_transform, transform
from distillspec.serving.noise import NoiseBank
from distillspec.serving.requests import Sequence
from distillspec.serving.tree import ROOT, TokenTree
from distillspec.serving.verification import (
    Verdict,
    accepts,
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
class Judgement:
    """What becomes of a window."""

    verdict: Verdict | None  # None where the target's logits on the path are no numbers
    sound: bool  # False where any of the window's logits are no numbers, on the path or off it


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
        for (policy, seeded), rows in _by_kind([place.sequence for place in places]):
            scores = logits if len(rows) == len(places) else logits[rows]
            if policy.is_greedy:
                tokens[rows] = scores.argmax(-1)
            elif seeded:
                noise = torch.stack([self._noise_at(places[row]) for row in rows])
                noise = noise if columns.kept_ids is None else noise[:, columns.kept_ids]
                tokens[rows] = (filtered_logits(scores, policy) + noise).argmax(-1)
            else:
                drawn_from = policy_probs(scores, policy)
                tokens[rows] = draw(drawn_from, self._uniforms(self._propose, len(rows), scores))
                for row, row_probs in zip(rows, drawn_from, strict=True):
                    probs[row] = row_probs
        return Drafted(columns.ids(tokens).tolist(), probs, finite)

    def proposal_uniforms(self, rows: int, count: int, like: Tensor) -> Tensor:
        """`[rows, count]` float64 of the proposals' own stream, on `like`'s device: for drafting many at once."""
        return self._uniforms(self._propose, rows * count, like).view(rows, count)

    def verify(self, logits: Tensor, windows: Seq[Window]) -> list[Judgement]:
        """A judgement of each window.

        `logits [Σ (1 + len(tree)), V]` of any float dtype, window by window, the row after the text first.
        """
        if any(needs_transform(window.sequence) for window in windows):
            logits = _transformed(logits, [place for window in windows for place in window.places()], self.columns)
        logits, finite = _made_finite(logits)
        firsts = _firsts(windows)
        verdicts: dict[int, Verdict] = {}
        for (policy, seeded), members in _by_kind([window.sequence for window in windows]):
            group = [windows[m] for m in members]
            rows = [row for m in members for row in range(firsts[m], firsts[m] + 1 + len(windows[m].tree))]
            part = logits if len(rows) == len(logits) else logits[rows]
            judge = _verify_greedy if policy.is_greedy else self._verify_seeded if seeded else self._verify_drawn
            verdicts.update(zip(members, judge(part, group, policy), strict=True))
        return [
            Judgement(
                verdicts[i] if _path_is_finite(verdicts[i], finite, first) else None,
                all(finite[first : first + 1 + len(window.tree)]),
            )
            for i, (first, window) in enumerate(zip(firsts, windows, strict=True))
        ]

    def _verify_seeded(self, logits: Tensor, windows: Seq[Window], policy: SamplingPolicy) -> list[Verdict]:
        """Choices are made only where the path comes by."""
        verdicts = []
        for first, window in zip(_firsts(windows), windows, strict=True):
            places = window.places()

            def choose(row: int, first: int = first, places: list[Place] = places) -> int:
                scores = filtered_logits(logits[first + row], policy)
                return int((scores + self._noise_at(places[row])).argmax())

            verdicts.append(verify_choices(choose, window.tree))
        return verdicts

    def _verify_drawn(self, logits: Tensor, windows: Seq[Window], policy: SamplingPolicy) -> list[Verdict]:
        if all(window.tree.is_chain for window in windows):
            return self._verify_chains(logits, windows, policy)
        verdicts = []
        for first, window in zip(_firsts(windows), windows, strict=True):
            probs = policy_probs(logits[first : first + 1 + len(window.tree)], policy)
            accept = self._uniforms(self._accept, len(window.tree), probs)
            verdicts.append(verify_tree(probs, window.tree, accept, self._uniforms(self._residual, 1, probs)[0]))
        return verdicts

    def _verify_chains(self, logits: Tensor, windows: Seq[Window], policy: SamplingPolicy) -> list[Verdict]:
        """Many chains at once, level by level: the distribution after a rejected token is never computed."""
        longest = max(len(window.tree) for window in windows)
        accept = self._uniforms(self._accept, len(windows) * longest, logits).view(len(windows), longest)
        firsts = _firsts(windows)
        standing = [0] * len(windows)
        last = logits.new_empty(len(windows), logits.shape[-1], dtype=torch.float32)
        alive = list(range(len(windows)))
        for level in range(longest + 1):
            probs = policy_probs(logits[[firsts[b] + level for b in alive]], policy)
            judged = [i for i, b in enumerate(alive) if len(windows[b].tree) > level]
            stands = self._stand(probs, [alive[i] for i in judged], judged, windows, level, accept)
            fallen = [i for i in range(len(alive)) if i not in stands]
            last[[alive[i] for i in fallen]] = probs[fallen]
            alive = [alive[i] for i in sorted(stands)]
            for b in alive:
                standing[b] = level + 1
            if not alive:
                break
        for b, window in enumerate(windows):
            if standing[b] < len(window.tree):
                _take_away_rejected(last[b], window.tree, standing[b])
        next_tokens = draw(last, self._uniforms(self._residual, len(windows), logits)).tolist()
        return [Verdict(tuple(range(count)), token) for count, token in zip(standing, next_tokens, strict=True)]

    @staticmethod
    def _stand(
        probs: Tensor, members: Seq[int], rows: Seq[int], windows: Seq[Window], level: int, accept: Tensor
    ) -> set[int]:
        """Which `rows` of `probs` accept the drafted token of their window (of `members`) at `level`."""
        if not members:
            return set()
        tokens = [windows[b].tree.tokens[level] for b in members]
        target_at = probs[list(rows), tokens]
        draft_at = torch.stack([_draft_at(windows[b].tree, level, like=probs) for b in members])
        accepted = accepts(target_at, draft_at, accept[list(members), level])
        return {row for row, stands in zip(rows, accepted.tolist(), strict=True) if stands}

    def _noise_at(self, place: Place) -> Tensor:
        sequence = place.sequence
        assert sequence.params.seed is not None
        return self.noise.gumbel(sequence.params.seed, sequence.index, sequence.output_length + len(place.drafted))

    @staticmethod
    def _uniforms(stream: torch.Generator, count: int, like: Tensor) -> Tensor:
        return torch.rand(count, generator=stream, dtype=torch.float64).to(like.device)


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


def _draft_at(tree: TokenTree, node: int, like: Tensor) -> Tensor:
    """q(x) of a chain's drafted token `node`, `[]`; 1 where the proposer is deterministic."""
    if tree.draft_probs is None:
        return like.new_ones(())
    token = tree.tokens[node]
    column = token if tree.kept_ids is None else int(torch.searchsorted(tree.kept_ids, token))
    return tree.draft_probs[node, column].to(like.dtype)


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


def _by_kind(sequences: Seq[Sequence]) -> Iterator[tuple[tuple[SamplingPolicy, bool], list[int]]]:
    """Places of the sequences that share a policy and are, or are not, seeded."""
    groups: dict[tuple[SamplingPolicy, bool], list[int]] = {}
    for place, sequence in enumerate(sequences):
        groups.setdefault((sequence.params.policy, sequence.params.seed is not None), []).append(place)
    yield from groups.items()


def _verify_greedy(logits: Tensor, windows: Seq[Window], policy: SamplingPolicy) -> list[Verdict]:
    choices: list[int] = logits.argmax(-1).tolist()
    return [
        verify_choices(choices[first : first + 1 + len(window.tree)].__getitem__, window.tree)
        for first, window in zip(_firsts(windows), windows, strict=True)
    ]


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
