"""Drafting level by level, with a device read each: trees of any shape, rows of unlike shapes, and rules.

A draft that attends reads the whole tree so far again at every level: as the last tokens of one window, in which each
node sees its ancestors. Trees are small, and a pass costs much the same for a few tokens more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from distillspec.serving.base.transfer import to_device, to_host
from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.decoding.drafting import choose
from distillspec.serving.decoding.logits import Columns
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.proposers.continue_rule import ContinueRule, accepted_prefix
from distillspec.serving.proposers.growth import Growth, TreePolicy


class LevelDrafting:
    """Grows the trees of many rows, a level at a time.

    Args:
        hashed: `hashed_ids` of the draft's columns.
        rule: which nodes' children are drafted behind, None: all that the shapes have.
        least_acceptance: draft no level, and none behind it, that the draft expects to be accepted with at most this
            probability, if it predicts any.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: TokenSampler,
        columns: Columns,
        hashed: Tensor,
        *,
        rule: ContinueRule | None,
        least_acceptance: float = 0.0,
    ) -> None:
        self.runner, self.sampler, self.columns, self.hashed = runner, sampler, columns, hashed
        self.rule, self.least_acceptance = rule, least_acceptance

    def draft(
        self, rows: Sequence[Growth], texts: Sequence[RowInput], trees: TreePolicy
    ) -> tuple[Tensor | None, list[Growth]]:
        """Grow all trees.

        Args:
            texts: what the draft has not read of each row's text, its newest token last, and the row's guess.
            trees: how nodes are chosen.

        Returns:
            What drawn tokens were drawn from `[n, width]`, None if none were, and the rows whose logits are NaN. Those
            keep the levels before.
        """
        tables: list[Tensor] = []
        failed: list[Growth] = []
        self._begin(rows, texts)
        growing, step = [row for row in rows if row.shape.depth], 0
        while growing:
            if step:
                self._read(growing, step)
            table = self._add(growing, step, sum(map(len, tables)), failed, trees)
            if table is not None:
                tables.append(table)
            growing, step = [row for row in growing if row.frontier], step + 1
        return torch.cat(tables) if tables else None, failed

    def _begin(self, rows: Sequence[Growth], texts: Sequence[RowInput]) -> None:
        """Read the texts and the guesses."""
        count = max(row.shape.depth for row in rows)
        carried = self.runner.begin(self.runner.prepare(texts, count), count)
        for row, end in zip(rows, accumulate(1 + len(row.guess) for row in rows), strict=True):
            row.carried[ROOT], *row.ahead = carried[end - 1 - len(row.guess) : end]
        predicted = self.runner.predicted_acceptance(carried) if self.least_acceptance > 0 else None
        if predicted is not None:
            accepted = to_host(accepted_prefix(predicted, self.least_acceptance).sum(1)).tolist()
            for row, levels in zip(rows, accepted, strict=True):
                row.shape = row.shape.shortened(levels)

    def _read(self, rows: Sequence[Growth], step: int) -> None:
        """Read the frontiers of all rows in one pass, but those that were guessed."""
        if self.runner.drafts_block:
            for row in rows:
                row.carried |= dict.fromkeys(row.frontier, row.carried[ROOT])
            return
        rows = [row for row in rows if not row.is_read_ahead()]
        if not rows:
            return
        read = [row.read if self.runner.model.attends else row.frontier for row in rows]
        batch = self.runner.prepare([self._window(row, nodes) for row, nodes in zip(rows, read, strict=True)])
        before = [row.carried[row.parents[node]] for row, nodes in zip(rows, read, strict=True) for node in nodes]
        after = self.runner.follow(batch, torch.stack(before), step)
        for row, end in zip(rows, accumulate(map(len, read)), strict=True):
            row.carried |= dict(zip(row.frontier, after[end - len(row.frontier) : end], strict=True))

    def _window(self, row: Growth, nodes: Sequence[int]) -> RowInput:
        """Return some nodes of a tree as tokens that continue the text."""
        tokens, start = [row.tokens[node] for node in nodes], len(row.sequence.tokens)
        if not self.runner.model.attends:
            return RowInput(row.slot, start, tokens, len(tokens))
        at = {ROOT: ROOT, **{node: place for place, node in enumerate(nodes)}}
        tree = TokenTree.of_parents(tokens, [at[row.parents[node]] for node in nodes])
        return RowInput(row.slot, start, tokens, len(row.frontier), tree, rooted=False)

    def _add(
        self, rows: Sequence[Growth], step: int, first: int, failed: list[Growth], trees: TreePolicy
    ) -> Tensor | None:
        """Choose the children of all frontiers. Their distributions, returned, are rows `first` … of the table."""
        nodes = [(row, node) for row in rows for node in row.frontier]
        carried = torch.stack([row.carried[node] for row, node in nodes])
        newest = [row.sequence.tokens[-1] if node == ROOT else row.tokens[node] for row, node in nodes]
        logits = self.runner.logits(carried, step, to_device(newest, carried.device))
        siblings = max(max(row.children) for row in rows)
        places = [row.place(node) for row, node in nodes]
        device = self.runner.model.device
        draws = self.sampler.draws(places, 1, self.columns, siblings, best=trees.most_probable, device=device)
        choice = choose(logits.float(), draws, 0, self.hashed, siblings)
        seen = to_host(torch.cat([choice.finite[:, None], self.columns.ids(choice.columns)], 1)).tolist()
        goes_on = self.rule.keeps(logits, carried) if self.rule is not None else [True] * len(nodes)
        scores = self._scores(logits, choice.columns) if trees.width is not None else [[]] * len(nodes)
        start = 0
        for row in rows:
            frontier = slice(start, start + len(row.frontier))  # among the nodes of all rows
            start = frontier.stop
            if not all(finite for finite, *_ in seen[frontier]):
                row.stop()
                failed.append(row)
                continue
            chosen = [tokens for _, *tokens in seen[frontier]]
            row.add(chosen, range(first + frontier.start, first + frontier.stop), goes_on[frontier], scores[frontier])
        return choice.probs

    @staticmethod
    def _scores(logits: Tensor, columns: Tensor) -> list[list[float]]:
        """Return log q of columns `[n, siblings]`."""
        scores = torch.log_softmax(logits.float(), -1).gather(1, columns.clamp(min=0))
        listed: list[list[float]] = to_host(scores).tolist()
        return listed
