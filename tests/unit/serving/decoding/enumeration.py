"""The exact law of what a verifier emits: every draft that could be drawn, and every outcome of every trial.

Acceptance is scripted in place of uniforms, and its probability is multiplied in. The last draw adds its distribution.
Traversal verification tells the chance of each outcome by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.serving.base.tree import ROOT, DraftProbs, SiblingGroup, TokenTree, merged
from distillspec.serving.decoding import reference_verification, tree_rules
from distillspec.serving.decoding.reference_verification import verify_tree
from distillspec.serving.decoding.traversal import traversal
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.serving.decoding.tree_rules import RejectionRule
from distillspec.serving.decoding.verifier import Start, verify_all_levels, verify_by_level

CPU = torch.device("cpu")
Process = Iterator[tuple[float, TokenTree]]
Verify = Callable[[TokenTree, Tensor], Sequence[int]]


class Script:
    """Outcomes of acceptance trials in order, rejected where the script has ended, and the probability of them all."""

    def __init__(self, outcomes: tuple[bool, ...]) -> None:
        self.outcomes, self.probability = list(outcomes), 1.0
        self.certain: set[int] = set()  # places in the script that can have one outcome alone
        self.used = 0
        self.last = torch.empty(0)

    def accepts(self, target_at: Tensor, draft_at: Tensor, uniforms: Tensor) -> Tensor:
        p, q = float(target_at), float(draft_at)
        chance = min(1.0, p / q) if q > 0 else float(p > 0)
        if self.used == len(self.outcomes):
            self.outcomes.append(chance == 1)
        if chance in (0, 1):
            self.certain.add(self.used)
        outcome = self.outcomes[self.used]
        self.used += 1
        self.probability *= chance if outcome else 1 - chance
        return torch.full_like(target_at, outcome, dtype=torch.bool)

    def draw(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        self.last = (probs[0] / probs[0].sum()).double()
        return torch.zeros(1, dtype=torch.int64)


def outcomes_of(run: Callable[[Script], Sequence[int]]) -> Iterator[tuple[float, Sequence[int], Tensor]]:
    """Every outcome of one verification: its probability, the accepted path, and the law of the token after it."""
    waiting: list[tuple[bool, ...]] = [()]
    while waiting:
        given = waiting.pop()
        script = Script(given)
        path = run(script)
        yield script.probability, path, script.last
        for place in range(len(given), len(script.outcomes)):
            if place not in script.certain:
                waiting.append((*script.outcomes[:place], True))


def law(process: Process, first: Tensor, second: Tensor, verifier: str, patch: pytest.MonkeyPatch) -> Tensor:
    """The law `[V, V]` of the first two tokens emitted, completed from `second` where one alone is emitted.

    Args:
        process: every tree that could be drafted, with its probability.
        first, second: p(first) `[V]` and p(second | first) `[V, V]`.
        verifier: `oracle`, `by level` or `all levels` for the engine's, or `from the leaves`.
    """
    if verifier == "from the leaves":
        return traversed(process, torch.cat([first[None], second]))
    found = torch.zeros_like(second)
    for probability, tree in process:
        for chance, path, last in outcomes_of(
            lambda script, tree=tree: _run(script, tree, first, second, verifier, patch)
        ):
            written = [tree.tokens[node] for node in path[:2]]
            if chance == 0:
                continue
            if not written:
                found += probability * chance * last[:, None] * second
            elif len(written) == 1:
                found[written[0]] += probability * chance * last
            else:
                found[written[0], written[1]] += probability * chance
    return found


def traversed(process: Process, p: Tensor) -> Tensor:
    """The law `[V, V]` of the first two tokens that traversal verification emits. p(first) is `p[0]`."""
    found = torch.zeros_like(p[1:])
    for probability, tree in process:
        probs, reached = torch.stack([p[0], *(p[1 + token] for token in tree.tokens)]), probability
        for node, chance, following in traversal(probs, tree):
            written = [tree.tokens[n] for n in (tree.path(node) if node != ROOT else ())]
            if not written:
                found += reached * chance * following[:, None] * p[1:]
            elif len(written) == 1:
                found[written[0]] += reached * chance * following
            else:
                found[written[0], written[1]] += reached * chance
            reached *= 1 - chance
    return found


def _run(
    script: Script, tree: TokenTree, first: Tensor, second: Tensor, verifier: str, patch: pytest.MonkeyPatch
) -> Sequence[int]:
    probs = torch.stack([first, *(second[token] for token in tree.tokens)])
    with patch.context() as own:
        if verifier == "oracle":
            own.setattr(reference_verification, "accepts", script.accepts)
            own.setattr(reference_verification, "draw", script.draw)
            return verify_tree(probs, tree, torch.zeros(len(tree)), torch.zeros(())).path
        own.setattr(tree_rules, "accepts", script.accepts)
        own.setattr(tree_rules, "draw_unchecked", script.draw)
        batch, by_level = TreeBatch([tree], CPU), verifier == "by level"
        rule = RejectionRule(batch, lambda at: probs[at], torch.zeros(len(probs)), torch.zeros(1), by_level)
        pending = (verify_by_level if by_level else verify_all_levels)(batch, [Start(0, 0)], rule)
        return pending.verdicts(pending.numbers.tolist())[0].path


def drawn(width: int, probs: Tensor) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every ordered draw of `width` tokens without replacement from `probs [V]`, with its probability.

    Fewer are drawn where fewer have a probability.
    """
    law = probs.tolist()
    for tokens in permutations(range(len(law)), min(width, sum(p > 0 for p in law))):
        left, chance = 1.0, 1.0
        for token in tokens:
            chance *= law[token] / left if law[token] else 0.0
            left -= law[token]
        if chance > 0:
            yield chance, tokens


def sampled(widths: tuple[int, int], first: Tensor, second: Tensor, kept: Tensor | None = None) -> Process:
    """Trees of `widths[0]` first tokens and `widths[1]` after each, from q(first) and q(second | first) on `kept`."""
    ids = list(range(len(first))) if kept is None else kept.tolist()
    table = DraftProbs(torch.cat([first[None], second]).float(), kept)
    for chance, columns in drawn(widths[0], first):
        roots = SiblingGroup(ROOT, tuple(range(len(columns))), drawn_from=table, row=0)
        for more, leaves in _every([list(drawn(widths[1], second[column])) for column in columns] if widths[1] else []):
            tokens, groups = [ids[column] for column in columns], [roots]
            for node, (column, own) in enumerate(zip(columns, leaves, strict=False)):
                nodes = tuple(range(len(tokens), len(tokens) + len(own)))
                groups.append(SiblingGroup(node, nodes, drawn_from=table, row=1 + column))
                tokens += [ids[leaf] for leaf in own]
            yield chance * more, TokenTree(tuple(tokens), tuple(groups))


def _every(parts: Sequence[Sequence[tuple[float, Any]]]) -> Iterator[tuple[float, list[Any]]]:
    """Every combination of one element of each part."""
    if not parts:
        yield 1.0, []
        return
    for chance, head in parts[0]:
        for more, tail in _every(parts[1:]):
            yield chance * more, [head, *tail]


def side_by_side(*sources: Process) -> Process:
    """Trees of several sources, joined as the engine joins them: those of the first one are tried first."""
    for chance, trees in _every([list(source) for source in sources]):
        yield chance, merged(trees)


def fixed(tree: TokenTree) -> Process:
    """One tree, from a deterministic source."""
    yield 1.0, tree
