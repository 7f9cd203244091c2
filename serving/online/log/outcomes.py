"""Outcomes of a window: the draft model's token at each emitted position, and drafted tokens that are no text."""

from __future__ import annotations

from distillspec.serving.base.tree import ROOT
from distillspec.serving.online.log.records import ACCEPTED, BONUS, PLAIN, REJECTED
from distillspec.serving.online.log.rejected_nodes import RejectedNode
from distillspec.serving.online.log.signal import LoggedDraft
from distillspec.serving.step.commit import Emission


def drafted_at(emission: Emission, index: int) -> LoggedDraft:
    """Return a draft model's first token at the position of the emission's token `index`. Others do not count."""
    tree, path, models = emission.tree, emission.path, emission.versions
    if not any(group.source in models for group in tree.groups):
        return LoggedDraft(PLAIN)
    groups = tree.groups_at(path[index - 1] if index else ROOT)
    if index < len(path):
        accepted = path[index]
        group = next(group for group in groups if accepted in group.nodes)
        if group.source not in models:
            return LoggedDraft(PLAIN)
        outcome = ACCEPTED if accepted == group.nodes[0] else REJECTED  # a sibling of the first was right
        return LoggedDraft(outcome, tree.tokens[group.nodes[0]], group.drawn_from, group.row)
    rejected = next((group for group in groups if group.source in models), None)
    if rejected is None:
        return LoggedDraft(PLAIN if groups else BONUS)
    return LoggedDraft(REJECTED, tree.tokens[rejected.nodes[0]], rejected.drawn_from, rejected.row)


def rejected_in(emission: Emission) -> list[RejectedNode]:
    """Return the nodes of a step's tree that are no part of the text, parents first.

    Where a node of another source names the same token as the text does, the text goes on behind it.
    """
    sequence, tree = emission.sequence, emission.tree
    before, first = sequence.output_length - len(emission.rows), emission.rows[0]
    response = sequence.tokens[sequence.prompt_length :]
    of_text = {ROOT: before} | {node: before + index for index, node in enumerate(emission.path, 1)}
    rejected, numbers = list[RejectedNode](), dict[int, int]()
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        text_tokens = of_text.get(parent)
        if node in of_text:
            continue
        if text_tokens is not None and response[text_tokens : text_tokens + 1] == [token]:
            of_text[node] = text_tokens + 1
        elif text_tokens is None or text_tokens <= len(response):  # the path may go on behind a stop token
            if text_tokens is None and parent not in numbers:
                continue
            above = ROOT if text_tokens is not None else numbers[parent]
            numbers[node] = len(rejected)
            if text_tokens is None:
                text_tokens = rejected[above].text_tokens
            rejected.append(RejectedNode(text_tokens, above, token, first + 1 + node))
    return rejected
