"""Full trees: their size, what they give, and which are chosen."""

from __future__ import annotations

import itertools

import numpy
import pytest

from distillspec.config import WorkloadConfig
from distillspec.errors import ConfigError
from distillspec.recipes.smartspec.expected_length import full_tree, paper_eq10
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.simulation import Hardware, Simulation, make_policy, make_workload
from distillspec.serving.simulation.figures import figures_of
from distillspec.serving.simulation.trees import GoodputTree

COSTS = LatencyModel(CostTable.line(3e-7, 1.2e-4, 1e-2), draft_free_s=0.0)


def test_nodes_are_counted_without_the_root() -> None:
    assert TreeShape.full((3, 2, 2)).nodes == 21
    assert TreeShape().nodes == 0
    for widths in itertools.product((1, 2, 3), repeat=3):
        paths = [path for depth in range(4) for path in itertools.product(*[range(w) for w in widths[:depth]])]
        assert TreeShape.full(widths).nodes == len(paths) - 1


@pytest.mark.parametrize("widths", [(), (2,), (3, 2), (1, 1, 1), (3, 2, 2)])
def test_expected_tokens_are_those_of_every_outcome(widths: tuple[int, ...]) -> None:
    acceptance = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05], [0.6, 0.0, 0.1]]
    expected = 0.0
    for outcome in itertools.product(range(4), repeat=3):  # each head's right candidate, 3 for none
        chances = [[*head, 1 - sum(head)][right] for head, right in zip(acceptance, outcome, strict=True)]
        depth = 0
        while depth < len(widths) and outcome[depth] < widths[depth]:
            depth += 1
        expected += float(numpy.prod(chances)) * (1 + depth)
    assert full_tree(acceptance, widths) == pytest.approx(expected)


def test_a_chain_is_a_tree_of_width_one_and_the_paper_leaves_the_root_out() -> None:
    assert full_tree([[0.7]] * 3, (1, 1, 1)) == pytest.approx((1 - 0.7**4) / 0.3)
    root_alone = 1 - 0.7
    assert paper_eq10([0.7] * 3, (1, 1, 1)) + root_alone == pytest.approx((1 - 0.7**4) / 0.3)
    assert paper_eq10([0.7] * 3, (2, 2, 2)) != pytest.approx(full_tree([[0.7, 0.21]] * 3, (2, 2, 2)), rel=0.05)


def view(rows: int) -> BatchView:
    return BatchView(tuple(RowView(f"r{i}", 200, 50) for i in range(rows)))


def test_the_chosen_tree_is_the_best_of_all() -> None:
    controller = GoodputTree(3, 3, COSTS)
    sizes = []
    for rows in (1, 8, 64, 256):
        plan = controller.plan(view(rows))

        def goodput(shape: TreeShape, rows: int = rows) -> float:
            tokens = rows * full_tree(controller.acceptance.tolist(), shape.widths)
            return tokens / COSTS.step_s([200] * rows, [shape.nodes] * rows)

        best = max(controller.shapes, key=goodput)
        planned = plan.rows[0].trees[0].shape if plan.rows[0].trees else TreeShape()
        assert goodput(planned) == pytest.approx(goodput(best))
        assert plan.predicted_tokens == pytest.approx(goodput(best) * plan.predicted_s)
        sizes.append(planned.nodes)
    assert sizes[0] > sizes[2]
    assert sizes[-1] == 0  # nothing pays in a large batch


def test_ranks_are_learnt_as_they_are() -> None:
    requests = make_workload(WorkloadConfig(requests=60, alpha=0.6, sibling_alpha=None), 4.0)
    policy = make_policy("medusa", COSTS, requests)
    Simulation(requests, policy, Hardware(COSTS, 100_000)).run()
    assert isinstance(policy.controller, GoodputTree)
    # Independent tries of 0.6: 0.6, then 0.24 of all.
    assert policy.controller.acceptance[0][:2].tolist() == pytest.approx([0.6, 0.24], abs=0.06)


def test_adaptive_trees_are_near_the_best_fixed_ones_at_every_rate() -> None:
    for rate in (1.0, 30.0):
        requests = make_workload(WorkloadConfig(requests=80, output_tokens=64, alpha=0.7, sibling_alpha=None), rate)
        latency = {}
        for name in ("medusa", "medusa-top1", "medusa-top2", "medusa-top3", "none"):
            policy = make_policy(name, COSTS, requests)
            latency[name] = figures_of(
                name, rate, Simulation(requests, policy, Hardware(COSTS, 100_000, slots=64)).run()
            ).mean_latency_s
        assert latency["medusa"] < 1.03 * min(latency.values()), latency


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads=0"):
        GoodputTree(0, 3, COSTS)


def test_goodput_over_trees_is_never_behind_goodput_over_chains_where_a_draft_drafts() -> None:
    """With costs of a machine that reads its weights for a few tokens as fast as for one, trees are ahead."""
    costs = LatencyModel(CostTable(((1.0, 1e-2), (16.0, 1e-2), (256.0, 6e-2)), 3e-8), CostTable.line(0.0, 1e-6, 7e-4))
    for rate, most in ((1.0, 0.96), (30.0, 1.01)):
        requests = make_workload(WorkloadConfig(requests=80, output_tokens=64, alpha=0.5), rate)
        latency, nodes = {}, {}
        for name in ("goodput", "goodput-chains"):
            run = Simulation(requests, make_policy(name, costs, requests), Hardware(costs, 100_000, slots=64)).run()
            latency[name] = figures_of(name, rate, run).mean_latency_s
            nodes[name] = sum(stats.proposed for stats in run.stats) / sum(stats.steps for stats in run.stats)
        assert latency["goodput"] < most * latency["goodput-chains"], (rate, latency)
        assert nodes["goodput"] > nodes["goodput-chains"]
