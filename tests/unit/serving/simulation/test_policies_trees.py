"""Trees of a draft and of heads by the engine's own controller, simulated."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from distillspec.config import EngineConfig, WorkloadConfig
from distillspec.errors import ConfigError
from distillspec.recipes.smartspec.expected_length import full_tree
from distillspec.serving.base.plans import Plan, RowPlan
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.shape import PlannedTree, TreeShape, chain_shape
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.simulation import Hardware, Policy, Simulation, make_policy, make_workload
from distillspec.serving.simulation.figures import figures_of

# Heads that cost nothing: a draft without passes whose levels come at once.
HEADS = LatencyModel(CostTable.line(3e-7, 1.2e-4, 1e-2), draft_free_s=0.0, drafts_block=True)


def view(rows: int) -> BatchView:
    return BatchView(tuple(RowView(f"r{i}", 200, 50, wide=True, drafts_block=True) for i in range(rows)))


def test_trees_of_heads_are_as_good_as_the_best_widths_and_shrink_with_the_batch() -> None:
    controller = make_policy("medusa", HEADS, []).controller
    assert isinstance(controller, GoodputController)
    heads = controller.acceptance.chances(["new"])[0].tolist()
    shapes = [TreeShape.full(own) for depth in range(4) for own in itertools.product((1, 2, 3), repeat=depth)]
    sizes = []
    for rows in (1, 8, 64, 256):

        def goodput(shape: TreeShape, rows: int = rows) -> float:
            return rows * full_tree(heads, shape.widths) / HEADS.step_s([200] * rows, [shape.nodes] * rows)

        plan = controller.plan(view(rows))
        assert plan.predicted_tokens is not None
        assert plan.predicted_s is not None
        assert plan.predicted_tokens / plan.predicted_s > 0.999 * max(map(goodput, shapes))
        sizes.append(sum(tree.shape.nodes for row in plan.rows for tree in row.trees) / rows)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 3
    assert sizes[-1] <= 1  # little pays in a large batch


def test_the_chances_of_candidates_are_learnt_from_what_was_tried() -> None:
    requests = make_workload(WorkloadConfig(requests=60, alpha=0.6, sibling_alpha=None), 4.0)
    policy = make_policy("medusa", HEADS, requests)
    Simulation(requests, policy, Hardware(HEADS, 100_000)).run()
    assert isinstance(policy.controller, GoodputController)
    # Independent tries of 0.6: 0.6, then 0.6 of the rest.
    assert policy.controller.acceptance.hazards()[0] == pytest.approx(0.6, abs=0.06)
    assert policy.controller.acceptance.sibling_shares()[0, 0] == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize("rate", [1.0, 30.0])
def test_adaptive_trees_are_near_the_best_fixed_ones(rate: float) -> None:
    requests = make_workload(WorkloadConfig(requests=80, output_tokens=64, alpha=0.7, sibling_alpha=None), rate)
    latency = {}
    for name in ("medusa", "medusa-top1", "medusa-top2", "medusa-top3", "none"):
        run = Simulation(requests, make_policy(name, HEADS, requests), Hardware(HEADS, 100_000, slots=64)).run()
        latency[name] = figures_of(name, rate, run).mean_latency_s
    assert latency["medusa"] < 1.03 * min(latency.values()), latency


def test_lookups_without_a_model_draft_chains() -> None:
    lookup = replace(HEADS, drafts_block=False)
    requests = make_workload(WorkloadConfig(requests=12, alpha=0.7, sibling_alpha=None), 4.0)
    simulation = Simulation(requests, make_policy("medusa", lookup, requests), Hardware(lookup, 100_000))
    plans = []
    while simulation.has_work:
        result = simulation.step()
        plans += [] if result is None else [tree.shape for row in result.plan.rows for tree in row.trees]
    assert plans
    assert all(shape.nodes == shape.depth for shape in plans)


@pytest.mark.parametrize(("rate", "most"), [(1.0, 0.96), (30.0, 1.01)])
def test_goodput_over_trees_is_never_behind_goodput_over_chains_where_a_draft_drafts(rate: float, most: float) -> None:
    """With costs of a machine that reads its weights for a few tokens as fast as for one, trees are ahead."""
    costs = LatencyModel(CostTable(((1.0, 1e-2), (16.0, 1e-2), (256.0, 6e-2)), 3e-8), CostTable.line(0.0, 1e-6, 7e-4))
    requests = make_workload(WorkloadConfig(requests=80, output_tokens=64, alpha=0.5), rate)
    latency, nodes = {}, {}
    for name in ("goodput", "goodput-chains"):
        run = Simulation(requests, make_policy(name, costs, requests), Hardware(costs, 100_000, slots=64)).run()
        latency[name] = figures_of(name, rate, run).mean_latency_s
        nodes[name] = sum(stats.proposed for stats in run.stats) / sum(stats.steps for stats in run.stats)
    assert latency["goodput"] < most * latency["goodput-chains"], latency
    assert nodes["goodput"] > nodes["goodput-chains"]


class Joined(GoodputController):
    """Plans two sources for each row."""

    def plan(self, view: BatchView) -> Plan:
        trees = tuple([PlannedTree(source, chain_shape(1)) for source in ("draft", "suffix")])
        return Plan(tuple([RowPlan(row.sequence_id, trees) for row in view.rows]))


def test_trees_of_several_sources_in_one_row_are_refused() -> None:
    requests = make_workload(WorkloadConfig(requests=1), 4.0)
    simulation = Simulation(requests, Policy("joined", Joined(2, HEADS)), Hardware(HEADS, 100_000))
    with pytest.raises(ConfigError, match="several sources in one row cannot be simulated"):
        simulation.run()


def test_named_trees_are_the_engines() -> None:
    """Ranks are all that a trace has, so nodes that a draft's scores choose cannot be simulated."""
    requests = make_workload(WorkloadConfig(requests=20, alpha=0.5, sibling_alpha=None), 4.0)
    seen = {}
    for name in ("topk-3-2", "fork-2x3"):
        simulation = Simulation(requests, make_policy(name, HEADS, requests), Hardware(HEADS, 100_000))
        shapes = set()
        while simulation.has_work:
            if result := simulation.step():
                shapes |= {tree.shape for row in result.plan.rows for tree in row.trees}
        seen[name] = max(shapes, key=lambda shape: shape.nodes)
    assert seen == {"topk-3-2": TreeShape.full((3, 2)), "fork-2x3": TreeShape.full((2, 1, 1))}
    for name in ("dynamic-8", "medusa-8"):
        with pytest.raises(ConfigError, match=f"policy {name} chooses nodes by a draft's scores"):
            make_policy(name, HEADS, requests)
    with pytest.raises(ConfigError, match="above nodes=4"):
        make_policy("topk-3-2", HEADS, requests, settings=EngineConfig(nodes=4))


def test_settings_bound_the_trees_of_goodput() -> None:
    requests = make_workload(WorkloadConfig(requests=12, alpha=0.3, sibling_alpha=None), 0.2)
    most = {}
    for key, settings in {
        "off": EngineConfig(tree="off"),
        "wide": EngineConfig(tree="topk", widths=[4, 4]),
        "few": EngineConfig(tree="topk", widths=[4, 4], nodes=3),
    }.items():
        policy = make_policy("goodput", HEADS, requests, speculation_length=2, settings=settings)
        simulation = Simulation(requests, policy, Hardware(HEADS, 100_000))
        shapes = list[TreeShape]()
        while simulation.has_work:
            if result := simulation.step():
                shapes += [tree.shape for row in result.plan.rows for tree in row.trees]
        most[key] = (max(shape.nodes for shape in shapes), max(max(shape.widths, default=0) for shape in shapes))
    assert most["off"][1] == 1
    assert most["wide"][1] > 1
    assert most["wide"][0] > 3 >= most["few"][0]
