"""The best trees that one draft drafts for the rows of a step, at a price of a second in tokens.

Rows share the target's pass and each pass of the draft, so nodes of all rows are chosen together. They are put in the
order of their gains. For each number of levels the first ones are taken, as many as pay by the target's table. It is
exact where the rows of a pass of the draft cost a line, and what they cost does not change the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from distillspec.serving.base.shape import TreeShape
from distillspec.serving.control.candidates import Candidates
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import Floats

NO_TREE = TreeShape()


class Drafted(NamedTuple):
    """The tree of one source for one row."""

    tokens: float = 0.0  # expected to be accepted, where no node that it is behind is
    seconds: float = 0.0  # its share of the step's
    shape: TreeShape = NO_TREE


@dataclass(frozen=True)
class SharedPasses:
    """Costs of a draft's passes, and of the target's, over the rows that the draft can draft for.

    loop_s: `[V]`, seconds in which the draft drafts 1, 2, … V levels, without what each node that it reads adds.
    read_s: seconds that a node adds which the draft reads.
    added_s: `[n · U + 1]`, seconds that 0, 1, … nodes of these rows add to the target's pass.
    """

    loop_s: Floats
    read_s: float
    added_s: Floats

    @classmethod
    def of(
        cls, latency: LatencyModel, levels: int, nodes: int, rows: int, tokens: float, context: float, share: float
    ) -> SharedPasses:
        """Return the costs for some of the rows that a draft can draft for, as if the others drafted alike.

        Args:
            latency: with the draft's own passes. A draft of None: the source needs no model.
            levels, nodes: the most that are drafted.
            rows, context: of all rows that it can draft for.
            tokens: of the target's pass, besides those that are drafted.
            share: of these rows that nodes are chosen for.
        """
        places = tokens + numpy.arange(nodes + 1.0) / share
        added = latency.target.by_tokens(places)
        depths, draft = numpy.arange(1, levels + 1), latency.draft
        if draft is None:
            loop, read = numpy.full(levels, latency.draft_free_s), 0.0
        elif latency.at_once:
            loop, read = numpy.array([latency.loop_s(rows, context, int(depth)) for depth in depths]), 0.0
        else:
            alone, all_s = draft.seconds(0, 1), draft.seconds(0, max(rows, 2))
            token_s = (all_s - alone) / (max(rows, 2) - 1)
            loop = draft.first + depths * max(0.0, alone - token_s)
            read = token_s + draft.per_row + draft.per_context * context / rows
        return cls(share * loop, read, share * (added - added[0]))


def grow(nodes: Candidates, gains: Floats, missed: Floats, passes: SharedPasses, price: float) -> tuple[Drafted, ...]:
    """Return the tree of each row.

    Args:
        gains: `[n, U]`, P(the node is on the accepted path), 0 for nodes that a row may not have. None has a higher
            one than its parent or an elder sibling.
        missed: `[n]`, P(none of the nodes before is accepted), in which a row's tree is behind others.
        price: tokens a second.
    """
    least = price * float(numpy.diff(passes.added_s).min(initial=numpy.inf))
    worth = gains * missed[:, None]
    order = (-worth).argsort(axis=None, kind="stable")[: numpy.count_nonzero(worth > max(least, 0.0))]
    if not len(order):
        return (Drafted(),) * len(gains)
    node = order % len(nodes)
    inside = nodes.depths[node] <= numpy.arange(1, len(passes.loop_s) + 1)[:, None]  # [levels, items]
    net = worth.take(order) - price * passes.read_s * nodes.firsts[node]
    values = (inside * net).cumsum(1) - price * (passes.added_s[inside.cumsum(1)] + passes.loop_s[:, None])
    level, last = divmod(int(values.argmax()), len(order))
    if values[level, last] <= 0:
        return (Drafted(),) * len(gains)
    taken = numpy.zeros(gains.shape, dtype=bool)
    taken.put(order[: last + 1][inside[level, : last + 1]], True)
    counts = taken.sum(1)
    node_s = float(passes.added_s[counts.sum()]) / counts.sum()
    pass_s = float(passes.loop_s[level]) / numpy.count_nonzero(counts)
    seconds = counts * node_s + (taken & nodes.firsts).sum(1) * passes.read_s + pass_s
    columns = zip(taken, counts.tolist(), (gains * taken).sum(1).tolist(), seconds.tolist(), strict=True)
    return tuple(
        [Drafted(tokens, own_s, nodes.shape(own)) if count else Drafted() for own, count, tokens, own_s in columns]
    )


def within(gains: Floats, rooms: Sequence[int]) -> Floats:
    """Return the gains `[n, U]` of the best nodes of each row, as many as it has room for, and 0 for the others."""
    if min(rooms, default=0) >= gains.shape[1]:
        return gains
    places = (-gains).argsort(axis=1, kind="stable").argsort(axis=1)
    return gains * (places < numpy.array(rooms)[:, None])
