"""Nodes that were verified and not accepted: their branches, and their way through a shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.rejected_nodes import Branch, RejectedNode, RejectedNodes, collected, nodes_of
from distillspec.serving.online.log.shard import load_shard, save_shard
from distillspec.signals import TeacherSignal

from ..conftest import Answer


def nodes(parents: list[int], places: list[int], entries: int = 4) -> RejectedNodes:
    count = len(parents)
    signal = TeacherSignal(
        "topk",
        torch.arange(count * entries, dtype=torch.int32).view(count, entries) % 50,
        torch.full((count, entries), -2.0, dtype=torch.float16),
        torch.full((count,), 0.4),
    )
    listed = [
        RejectedNode(place, parent, 10 + m, m) for m, (parent, place) in enumerate(zip(parents, places, strict=True))
    ]
    found = collected(listed, signal)
    assert found is not None
    return found


def test_branches_hold_every_node_and_tell_those_that_came_before() -> None:
    """Node 0 has children 1 and 2, node 2 has 3, and node 4 leaves the text elsewhere."""
    found = nodes([-1, 0, 0, 2, -1], [3, 3, 3, 3, 5]).branches()
    assert found == [Branch(3, [0, 1], 0), Branch(3, [0, 2, 3], 1), Branch(5, [4], 0)]


def test_a_shard_keeps_the_nodes_of_answers_that_have_some(tmp_path: Path, answer: Answer, key: LogKey) -> None:
    own = nodes([-1, 0], [2, 2])
    save_shard(tmp_path / "shard", [answer("a"), replace(answer("b"), nodes=own), answer("c")], key)
    first, second, third = load_shard(tmp_path / "shard", key)
    assert first.nodes is third.nodes is None
    assert second.nodes is not None
    for name in ("text_tokens", "parents", "tokens"):
        assert torch.equal(getattr(second.nodes, name), getattr(own, name))
    for name in ("ids", "logprobs", "tail"):
        assert torch.equal(getattr(second.nodes.signal, name), getattr(own.signal, name))
    save_shard(tmp_path / "without", [answer("a")], key)
    assert load_shard(tmp_path / "without", key)[0].nodes is None
    assert nodes_of({}) is None


def test_what_is_not_finite_is_not_kept() -> None:
    own = nodes([-1, 0], [2, 2])
    logprobs = own.signal.logprobs.clone()
    logprobs[1] = torch.nan
    listed = [RejectedNode(2, -1, 10, 0), RejectedNode(2, 0, 11, 1)]
    assert collected(listed, replace(own.signal, logprobs=logprobs)) is None
