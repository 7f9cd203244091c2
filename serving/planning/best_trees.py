"""The best trees that one draft drafts for the rows of a step, at a price of a second in tokens.

Rows share the target's pass and each pass of the draft, so nodes of all rows are chosen together. They are put in the
order of their gains, less what it takes to read the row once more. For each number of levels the first ones are taken,
as many as pay by the tables. For chains it is exact where a pass of the draft costs a line by its rows. Of trees a
draft reads the parents of first children alone, which the order does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy

from distillspec.serving.base.candidates import Candidates
from distillspec.serving.base.shape import NO_TREE, TreeShape
from distillspec.serving.costs.drafted import DraftedCosts
from distillspec.types import Floats


class Drafted(NamedTuple):
    """The tree of one source for one row."""

    tokens: float = 0.0  # expected accepted tokens, given that none of the likely nodes before it is accepted
    seconds: float = 0.0  # its share of the step's
    shape: TreeShape = NO_TREE


def best_trees(
    nodes: Candidates, gains: Floats, missed: Floats, costs: DraftedCosts, price: float, times: int = 1
) -> tuple[Drafted, ...]:
    """Return the best tree of each row.

    Args:
        gains: `[n, U]`, P(the node is on the accepted path), 0 for nodes that a row may not have. None has a higher
            one than its parent or an elder sibling.
        missed: `[n]`, P(none of the nodes before is accepted), in which a row's tree is behind others.
        costs: of up to `times · U` nodes a row.
        price: tokens a second.
        times: rows that draft as each of these does, itself included.
    """
    worth = gains * missed[:, None]
    loss = price * costs.read_s[:, None] - worth
    loss[worth <= price * costs.verified_s] = numpy.inf
    order = loss.argsort(axis=None, kind="stable")[: numpy.count_nonzero(loss < numpy.inf)]
    if not len(order):
        return (Drafted(),) * len(gains)
    row, node = numpy.divmod(order, len(nodes))
    depths = numpy.arange(1, nodes.depth + 1)[:, None]
    at, inside = nodes.depths[node] == depths, nodes.depths[node] <= depths  # [levels, items]
    reads = (at & nodes.firsts[node]).cumsum(1)
    read_s = (at * (costs.read_s[row] * nodes.spine[node])).cumsum(1)
    drafting_s = costs.by_depth(times * reads, times * read_s).cumsum(0) / times
    shared_s = costs.target_s[times * inside.cumsum(1)] / times + drafting_s + costs.draft_free_s * (not costs.drafts)
    values = (inside * worth.take(order)).cumsum(1) - price * shared_s
    level, last = divmod(int(values.argmax()), len(order))
    if values[level, last] <= 0:
        return (Drafted(),) * len(gains)
    taken = numpy.zeros(gains.shape, dtype=bool)
    taken.put(order[: last + 1][inside[level, : last + 1]], True)
    tokens = (gains * taken).sum(1)
    # What rows share is divided by what it brings them: where it pays for all together, it does for each.
    seconds = float(shared_s[level, last]) * tokens * missed / float((tokens * missed).sum())
    columns = zip(taken, taken.sum(1).tolist(), tokens.tolist(), seconds.tolist(), strict=True)
    return tuple(
        [
            Drafted(row_tokens, row_s, nodes.shape(row_taken)) if count else Drafted()
            for row_taken, count, row_tokens, row_s in columns
        ]
    )


def within(gains: Floats, rooms: Sequence[int]) -> Floats:
    """Return the gains `[n, U]` of the best nodes of each row, as many as it has room for, and 0 for the others."""
    if min(rooms, default=0) >= gains.shape[1]:
        return gains
    places = (-gains).argsort(axis=1, kind="stable").argsort(axis=1)
    return gains * (places < numpy.array(rooms)[:, None])
