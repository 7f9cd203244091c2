"""Parts of a length controller that others ask for: its costs, and the trees that it chooses from."""

from __future__ import annotations

import pytest

from distillspec.serving.base.acceptance import RowResult, Trial
from distillspec.serving.base.candidates import candidates
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.base.wrapped import WrappedController
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.known import known_costs, known_trees
from distillspec.serving.costs.latency import guessed

NODES = candidates((2, 2), 6)


def test_the_trees_of_a_controller_inside_others() -> None:
    inside = GoodputController(2, guessed(), trees=NODES)
    found = known_trees(WrappedController(inside))
    assert found is not None
    assert found.nodes is NODES
    assert found.shares.shape == (2, 1)
    before = float(found.shares[0, 0])
    sibling = Trial(1, 0, DRAFT, False), Trial(1, 1, DRAFT, True)
    inside.acceptance.observe([RowResult("1/0", 1, 2, 1, 2, sibling)] * 20)
    again = known_trees(inside)
    assert again is not None
    assert again.shares[0, 0] > before


@pytest.mark.parametrize(
    "controller", [FixedLength(3), GoodputController(3, guessed()), GoodputController(2, trees=NODES, lengths="step")]
)
def test_controllers_that_choose_from_no_trees(controller: LengthController) -> None:
    assert known_trees(controller) is None
    assert (known_costs(controller) is None) == isinstance(controller, FixedLength)
