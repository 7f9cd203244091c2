"""Drafted tokens that the target has read and not accepted, with its distribution behind each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.data.shard_schema import Columns
from distillspec.serving.base.tree import ROOT
from distillspec.signals import TeacherSignal

ENTRIES = 16  # log-probabilities kept at each, at most: with the other columns 112 bytes a node


class RejectedNode(NamedTuple):
    """A node of a window's tree that is no part of the text."""

    text_tokens: int  # response tokens before its branch leaves the text
    parent: int  # number of the node before it among those of the window, −1: the text
    token: int
    row: int  # of the step's logits, behind it


class Branch(NamedTuple):
    """Nodes one after another, from the text to a last one. Those before `new` are in an earlier branch too."""

    text_tokens: int
    nodes: list[int]
    new: int


@dataclass(frozen=True)
class RejectedNodes:
    """M nodes of an answer's windows, parents first."""

    text_tokens: Tensor  # [M] int32: response tokens before the node's branch leaves the text
    parents: Tensor  # [M] int32: the node before it, −1: the text
    tokens: Tensor  # [M] int32
    signal: TeacherSignal  # topk, raw: row m is the distribution behind node m

    def __len__(self) -> int:
        return len(self.tokens)

    def branches(self) -> list[Branch]:
        """Return a branch for every node without children. Together they hold all nodes."""
        parents, text_tokens = self.parents.tolist(), self.text_tokens.tolist()
        inner, seen, branches = set(parents), set[int](), list[Branch]()
        for last in [node for node in range(len(self)) if node not in inner]:
            nodes, node = list[int](), last
            while node != ROOT:
                nodes.insert(0, node)
                node = parents[node]
            branches.append(Branch(text_tokens[last], nodes, sum(node in seen for node in nodes)))
            seen.update(nodes)
        return branches


def collected(nodes: Sequence[RejectedNode], signal: TeacherSignal) -> RejectedNodes | None:
    """Return the nodes of an answer, whose parents are counted over all of its windows. None: one is not finite."""
    if not bool(torch.isfinite(signal.logprobs[:, 0]).all()):
        return None
    text_tokens, parents, tokens = (
        torch.tensor([getattr(node, name) for node in nodes], dtype=torch.int32)
        for name in ("text_tokens", "parent", "token")
    )
    return RejectedNodes(text_tokens, parents, tokens, signal)


def node_columns(nodes: Sequence[RejectedNodes | None]) -> list[Columns]:
    """Return the columns of a shard's answers, empty ones for all where none has nodes."""
    example = next((answer_nodes for answer_nodes in nodes if answer_nodes is not None), None)
    if example is None:
        return [{} for _ in nodes]
    pairs = [(example, 0) if answer_nodes is None else (answer_nodes, len(answer_nodes)) for answer_nodes in nodes]
    return [
        {
            "node_places": answer_nodes.text_tokens[:rows],
            "node_parents": answer_nodes.parents[:rows],
            "node_tokens": answer_nodes.tokens[:rows],
            "node_ids": answer_nodes.signal.ids[:rows],
            "node_logprobs": answer_nodes.signal.logprobs[:rows],
            "node_tail": answer_nodes.signal.tail[:rows],
        }
        for answer_nodes, rows in pairs
    ]


def nodes_of(columns: Columns) -> RejectedNodes | None:
    """Return the nodes in an answer's columns, None for an answer without."""
    if "node_places" not in columns or not len(columns["node_places"]):
        return None
    signal = TeacherSignal("topk", columns["node_ids"], columns["node_logprobs"], columns["node_tail"])
    return RejectedNodes(columns["node_places"], columns["node_parents"], columns["node_tokens"], signal)
