"""Machines from figures, policies by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import distillspec.conf
from distillspec.config import HardwareConfig, ModelFigures
from distillspec.errors import ConfigError
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.simulation import POLICY_NAMES, derive_hardware, load_hardware, load_workload, make_policy
from distillspec.serving.simulation.hardware import loaded_experts

MACHINES = sorted(file.stem for file in (Path(next(iter(distillspec.conf.__path__))) / "hardware").glob("*.yaml"))


def test_costs_follow_from_figures() -> None:
    hardware = derive_hardware(
        HardwareConfig(
            bandwidth=1e12,
            bandwidth_share=0.5,
            flops=1e14,
            flops_share=0.5,
            memory=6e10,
            memory_share=0.5,
            target=ModelFigures(params=5e9, kv_bytes=1e6, overhead_s=0.001),
            max_len=1000,
        )
    )
    target = hardware.latency.target
    assert target.seconds(0, 0) == pytest.approx(0.021)
    assert target.seconds(0, 9) == pytest.approx(0.021 + 9 * 2e-4)
    assert target.per_context == pytest.approx(2e-6)
    assert hardware.latency.draft is None
    assert hardware.cache_tokens == 20_000


def test_machines_that_record_passes_compute_what_they_pad_to() -> None:
    """Up to 64 tokens: 33 take as long as 40, and 70 are not padded. Drafts' passes too."""
    own = {"target": ModelFigures(params=5e9), "draft": ModelFigures(params=1e8)}
    exact, padded = (derive_hardware(HardwareConfig(**own, recorded_tokens=most)).latency for most in (0, 64))
    assert exact.draft is not None
    assert padded.draft is not None
    for seconds, other in ((exact.target.seconds, padded.target.seconds), (exact.draft.seconds, padded.draft.seconds)):
        assert [other(0, n) for n in (5, 33, 40, 64, 70)] == [seconds(0, n) for n in (5, 40, 40, 64, 70)]
    assert padded.step_s([9] * 11, [2] * 11) == pytest.approx(
        exact.target.seconds(99, 40) + 2 * exact.draft.seconds(99, 12)
    )
    with pytest.raises(ConfigError, match=r"hardware.recorded_tokens=-1"):
        HardwareConfig(recorded_tokens=-1)


def test_experts_are_loaded_as_they_are_needed() -> None:
    assert loaded_experts(8, 2, 1) == pytest.approx(2)
    assert loaded_experts(8, 2, 6) == pytest.approx(6.58, abs=0.01)
    target = load_hardware("mixtral-8x7b").latency.target
    per_token = (target.seconds(0, 1000) - target.seconds(0, 900)) / 100
    all_weights = 46.7e9 * 2 / (4.078e12 * 0.75)
    assert target.seconds(0, 1000) - per_token * 1000 - 0.0043 == pytest.approx(all_weights, rel=1e-3)
    without_experts = target.seconds(0, 0)
    read_s = (all_weights + 0.0043 - without_experts) / 8
    for tokens in (1, 2, 6, 17, 40):
        assert target.seconds(0, tokens) == pytest.approx(
            without_experts + per_token * tokens + read_s * loaded_experts(8, 2, tokens), rel=1e-3
        )


# What the files' comments work out by hand: fixed ms, µs a token, thousands of cached tokens.
@pytest.mark.parametrize(
    ("name", "fixed", "per_token", "cache"),
    [
        ("a100-7b", 8.26 + 2.5, 123, 103.7),
        ("a100-7b-five", 8.26 + 2.5, 123, 58.0),
        ("a100-13b-five", 15.94 + 3.1, 238, 33.0),
        ("a100x2-30b-five", 19.92 + 4.7, 298, 36.8),
        ("a100x4-33b", 10.63 + 4.8, 149, 136.3),
        ("a100x8-70b", 12.09 + 7.2, 158, 498.3),
        ("mistral-7b", 8.88 + 2.5, 133, 438.8),
        ("mixtral-8x7b", 1.05 + 4.3, 138, 386.0),
        ("h200-8b", 4.18 + 1.5, 46, 661.4),
    ],
)
def test_the_comments_arithmetic_is_right(name: str, fixed: float, per_token: float, cache: float) -> None:
    hardware = load_hardware(name)
    target = hardware.latency.target
    assert 1e3 * target.seconds(0, 0) == pytest.approx(fixed, abs=0.01)
    assert 1e6 * (target.seconds(0, 1001) - target.seconds(0, 1000)) == pytest.approx(per_token, abs=0.5)
    assert hardware.cache_tokens / 1e3 == pytest.approx(cache, abs=0.1)


def test_the_table_above_has_every_machine() -> None:
    (mark,) = (m for m in test_the_comments_arithmetic_is_right.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert sorted(row[0] for row in mark.args[1]) == MACHINES


def test_impossible_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"hardware=a100-8b is not known; use one of a100-13b-five, a100-7b"):
        load_hardware("a100-8b")
    with pytest.raises(ConfigError, match=r"workload=poems is not known; use one of chat, context-qa"):
        load_workload("poems")
    with pytest.raises(ConfigError, match=r"workload=chat: Value 'high'"):
        load_workload("chat", alpha="high")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"hardware.target.params=0"):
        derive_hardware(HardwareConfig())
    with pytest.raises(ConfigError, match="not even one request"):
        derive_hardware(HardwareConfig(target=ModelFigures(params=7e10, kv_bytes=3e5)))
    with pytest.raises(ConfigError, match=r"hardware.bandwidth=-1"):
        HardwareConfig(bandwidth=-1)
    with pytest.raises(ConfigError, match="belong together"):
        HardwareConfig(target=ModelFigures(params=1e9, experts=8))
    with pytest.raises(ConfigError, match="does not exist"):
        derive_hardware(HardwareConfig(profile="nowhere.json"))


# The oracle knows the requests of one simulation only.
@pytest.mark.parametrize(
    "name", [name.translate({ord(each): "2" for each in "KWD"}) for name in POLICY_NAMES if name != "oracle"]
)
def test_every_policy_plans_within_the_limits_and_purely(name: str) -> None:
    hardware = load_hardware("mistral-7b" if name.startswith("medusa") else "a100-7b")
    view = BatchView((RowView("a/0", 130, 9), RowView("b/0", 140, 1), RowView("c/0", 150, 0)))
    controller = make_policy(name, hardware.latency, []).controller
    plan = controller.plan(view)
    assert plan == controller.plan(view)
    assert all(0 <= row.speculation_length <= controller.speculation_length for row in plan.rows)
    assert plan.rows[2].speculation_length == 0
    if not name.startswith("medusa"):
        assert plan.rows[1].speculation_length <= 1
    other = (BatchView((RowView("a/0", 100 + place, 9),)) for place in range(20))  # a random length may be 0
    drafted = [controller.plan(seen).rows[0].speculation_length for seen in (view, *other)]
    assert any(drafted) == (name != "none")
    if not name.startswith("random"):
        assert all(drafted) == (name != "none")


@pytest.mark.parametrize("name", ["fixed", "fixed--1", "fixed-x", "goodness", "tree-0", "medusa-top0", "confidence-2"])
def test_unknown_policies_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{name} is not known; use some of none, fixed-K, siblings-W-W, tree-W-W, goodput"
    ):
        make_policy(name, load_hardware("a100-7b").latency, [])
