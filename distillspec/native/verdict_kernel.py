"""The C++ kernel of verdicts on drafted trees, and of maxima of rows of logits (`verdicts.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distillspec.native.library import SOURCES, library
from distillspec.native.vector_kernel import drawn_from, numbers
from distillspec.types import SamplingPolicy

COLDEST = 1e-30  # lower temperatures are raised to it


class GivenGroup(NamedTuple):
    """Siblings in the order in which they are tried."""

    parent: int  # node that they continue, −1: the text
    nodes: Sequence[int]
    probs: Tensor | None  # [R, width] float32, None: they were not drawn
    row: int  # of `probs`
    ids: Tensor | None  # [width] int64, the token of each column in ascending order. None: the same number


class Way(IntEnum):
    """Ways to verify a tree, as in `verdicts.cpp`.

    AS_A_WHOLE: a chain of drawn tokens, its groups in the order of its nodes (block verification).
    FROM_THE_LEAVES: any tree (traversal verification).
    BY_CHOICE: with noise keyed by row and token, as seeded requests choose.
    """

    BY_LEVEL = 0
    AS_A_WHOLE = 1
    FROM_THE_LEAVES = 2
    BY_CHOICE = 3


class GivenTree(NamedTuple):
    """One drafted tree."""

    row: int  # of the text's logits. Those of node i are `row` + 1 + i
    tokens: Sequence[int]
    groups: Sequence[GivenGroup]
    way: Way
    policy: SamplingPolicy  # not greedy


class Chances(NamedTuple):
    """Numbers that the verdicts on B trees follow."""

    accept_uniforms: Tensor  # [N] float64 in [0, 1), a node's at its row of logits
    next_uniforms: Tensor  # [B] float64 in [0, 1), for the target's own tokens
    keys: Tensor  # [N, 2] int32, of the noise of each row of logits. Empty without trees `BY_CHOICE`


class VerdictKernel(NamedTuple):
    """Functions by dtype of logits."""

    survey_rows: dict[torch.dtype, ctypes._NamedFuncPointer]
    judge_trees: dict[torch.dtype, ctypes._NamedFuncPointer]

    def survey(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest number of each row `[N]` float32, and the lowest id `[N]` int64 that has it.

        Rows with NaN give NaN and 0.

        Args:
            logits: `[N, V]`, contiguous in each row.
        """
        rows, width = logits.shape
        peaks, ids = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self.survey_rows[logits.dtype](
            *(logits.data_ptr(), rows, logits.stride(0), width),
            *(peaks.data_ptr(), ids.data_ptr(), torch.get_num_threads()),
        )
        return peaks, ids

    def judge(self, logits: Tensor, peaks: Tensor, trees: Sequence[GivenTree], chance: Chances) -> Tensor:
        """Verify B trees. Return `[B, 1 + nodes]` int64: the next token, the accepted nodes, −1.

        Args:
            logits: `[N, V]`, contiguous in each row.
            peaks: `[N]` float32, finite, from `survey`.
        """
        most = max(len(tree.tokens) for tree in trees)
        verdicts = torch.empty(len(trees), 1 + most, dtype=torch.int64)
        shapes, groups, nodes = _flat(trees)
        tokens = numbers([token for tree in trees for token in tree.tokens])
        arrays = [numbers(shapes), numbers(groups), numbers(nodes), tokens, _policies(trees)]
        given = [part.contiguous() for part in chance]
        asked = numbers(
            [
                *(logits.data_ptr(), logits.stride(0), logits.shape[1], peaks.data_ptr()),
                *(len(trees), most, *(ctypes.addressof(each) for each in arrays)),
                *(*(part.data_ptr() for part in given), verdicts.data_ptr()),
            ]
        )
        self.judge_trees[logits.dtype](asked, torch.get_num_threads())
        return verdicts


def _flat(trees: Sequence[GivenTree]) -> tuple[list[int], list[int], list[int]]:
    """Return trees, groups and the nodes of groups, as the kernel reads them."""
    shapes: list[int] = []
    groups: list[int] = []
    nodes: list[int] = []
    first = group = 0
    for tree in trees:
        shapes += (tree.row, first, len(tree.tokens), group, len(tree.groups), tree.way)
        for parent, group_nodes, probs, row, ids in tree.groups:
            groups += (parent, len(nodes), len(group_nodes), *drawn_from(probs, row, ids))
            nodes += group_nodes
        first, group = first + len(tree.tokens), group + len(tree.groups)
    return shapes, groups, nodes


def _policies(trees: Sequence[GivenTree]) -> Any:
    """Return the trees' policies as the kernel reads them."""
    policies = [tree.policy for tree in trees]
    flat = [
        number
        for policy in policies
        for number in (max(policy.temperature, COLDEST), policy.top_k, policy.top_p, policy.min_p)
    ]
    return (ctypes.c_double * len(flat))(*flat)


@cache
def verdict_kernel() -> VerdictKernel:
    """Return the kernel, built on first use.

    Raises:
        NotBuilt: there is no compiler, or it does not know the language.
    """
    kernels = library(SOURCES / "verdicts.cpp")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    surveys = {torch.float32: kernels.survey_float32, torch.bfloat16: kernels.survey_bfloat16}
    judges = {torch.float32: kernels.judge_float32, torch.bfloat16: kernels.judge_bfloat16}
    for survey, judge in zip(surveys.values(), judges.values(), strict=True):
        survey.argtypes = [pointer, number, number, number, pointer, pointer, ctypes.c_int]
        judge.argtypes = [pointer, ctypes.c_int]
        survey.restype = judge.restype = None
    return VerdictKernel(surveys, judges)
