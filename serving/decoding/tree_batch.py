"""Drafted trees of many rows as tensors. A node is numbered by its row in the step's logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from distillspec.serving.base.transfer import to_device
from distillspec.serving.base.tree import DraftProbs, TokenTree

NO_NODE = -1  # in place of a node, or of its row
NO_TOKEN = -1


class TreeBatch:
    """B trees, n nodes of them in all: N = B + n rows of logits, a root and then its nodes for each tree.

    Attributes:
        firsts: the row of each root.
        child_count: children of each row, on the host.
        tokens: `[N]` int64, the drafted token of each row, 0 for roots.
        children: `[N, S]` int64, rows of the children in the order in which they are tried, −1 where there are none.
        elder: `[N, S − 1]` int64, rows of the siblings of the same group that are tried before a row, −1 for none.
        drawn: the distributions that tokens were drawn from.
    """

    def __init__(self, trees: Sequence[TokenTree], device: torch.device) -> None:
        self.trees, self.device = trees, device
        sizes = [1 + len(tree) for tree in trees]
        self.firsts = list(accumulate(sizes[:-1], initial=0))
        self.rows = sum(sizes)
        self.child_count = [0] * self.rows
        plan = _Plan(self, trees)
        uploaded = to_device(plan.columns(), device)
        self.tokens = uploaded[0]
        self.children = uploaded[1 : 1 + plan.widest].T
        self.elder = uploaded[1 + plan.widest : 2 * plan.widest].T
        table_rows = uploaded[2 * plan.widest :]
        self.drawn = [DrawnRows(table, table_rows[i]) for i, table in enumerate(plan.tables)]

    def widest(self, rows: Sequence[int] | None = None) -> int:
        """Return the most children of any row, or of any of `rows`."""
        counts = self.child_count if rows is None else [self.child_count[row] for row in rows]
        return max(counts, default=0)


class DrawnRows:
    """Nodes that were drawn from the distributions of one table.

    Attributes:
        rows: `[N]` int64, the table's row that each node was drawn from, −1 for nodes of other origin.
    """

    def __init__(self, table: DraftProbs, rows: Tensor) -> None:
        self.probs = table.probs
        self.kept_ids = table.kept_ids
        self.rows = rows

    def columns(self, tokens: Tensor) -> Tensor:
        """Return the columns of token ids. Ids without one get a column that means nothing."""
        if self.kept_ids is None:
            return tokens
        return torch.searchsorted(self.kept_ids, tokens).clamp(max=len(self.kept_ids) - 1)

    def probs_at(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Return q `[m]` of the tokens of `nodes [m]`, for nodes that are the first of their group."""
        return self.probs[self.rows[nodes].clamp(min=0), self.columns(tokens)].float()

    def probs_of(self, nodes: Tensor, elder_tokens: Tensor | None) -> Tensor:
        """Return a copy of q `[m, width]` float32 of `nodes [m]`, 0 for nodes of other origin.

        Args:
            elder_tokens: `[m, s]` the tokens of earlier siblings, which q has lost, −1 for none.
        """
        rows = self.rows[nodes]
        q = self.probs.index_select(0, rows.clamp(min=0)).float()
        if elder_tokens is not None:
            at = self.columns(elder_tokens.clamp(min=0))
            q.scatter_add_(1, at, q.gather(1, at).mul_(elder_tokens >= 0).neg_())
            q.div_(q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny))
        return q.masked_fill_((rows < 0)[:, None], 0.0)  # never a product: rows of others may be NaN


class _Plan:
    """Columns of a batch on the host."""

    def __init__(self, batch: TreeBatch, trees: Sequence[TokenTree]) -> None:
        rows = batch.rows
        self.tables: list[DraftProbs] = []
        self._tokens = [0] * rows
        self._children: list[list[int]] = [[] for _ in range(rows)]
        self._elder: dict[int, list[int]] = {}
        self._drawn: list[list[int]] = []
        numbers: dict[int, int] = {}  # of the tables, by id
        for first, tree in zip(batch.firsts, trees, strict=True):
            self._tokens[first + 1 : first + 1 + len(tree)] = tree.tokens
            for group in tree.groups:
                nodes = [first + 1 + node for node in group.nodes]
                self._children[first + 1 + group.parent] += nodes
                if len(nodes) > 1:
                    self._elder.update({node: nodes[:place] for place, node in enumerate(nodes)})
                if group.drawn_from is not None:
                    number = numbers.setdefault(id(group.drawn_from), len(numbers))
                    if number == len(self.tables):
                        self.tables.append(group.drawn_from)
                        self._drawn.append([NO_NODE] * rows)
                    for node in nodes:
                        self._drawn[number][node] = group.row
        batch.child_count[:] = map(len, self._children)
        self.widest = max(1, *batch.child_count)

    def columns(self) -> list[list[int]]:
        """Return tokens, children by rank, elder siblings by place, and rows in each table, `[N]` each."""
        ranks, elder = range(self.widest), self._elder
        children = [[nodes[rank] if rank < len(nodes) else NO_NODE for nodes in self._children] for rank in ranks]
        rows = range(len(self._tokens))
        older = [[elder[n][place] if place < len(elder.get(n, ())) else NO_NODE for n in rows] for place in ranks[:-1]]
        return [self._tokens, *children, *older, *self._drawn]
