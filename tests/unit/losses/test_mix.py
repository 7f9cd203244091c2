from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from distillspec.errors import ConfigError
from distillspec.losses import LossMix, LossTerm

JSD = LossTerm("jsd", 2.0, {"beta": 0.1})


@pytest.mark.parametrize(
    ("config", "terms"),
    [
        ("fkl", [LossTerm("fkl")]),
        ({"fkl": 0.7, "ce": 0.3, "lk": 0}, [LossTerm("fkl", 0.7), LossTerm("ce", 0.3)]),
        ({"jsd": {"weight": 2.0, "beta": 0.1}}, [JSD]),
        (["tvd", {"name": "jsd", "weight": 2.0, "beta": 0.1}], [LossTerm("tvd"), JSD]),
        ([JSD], [JSD]),
        (LossMix((JSD,)), [JSD]),
        (OmegaConf.create({"fkl": 1.0}), [LossTerm("fkl", 1.0)]),
    ],
)
def test_every_way_to_write_a_mix(config: Any, terms: list[LossTerm]) -> None:
    assert LossMix.parse(config).terms == tuple(terms)


def test_parameters_may_be_given_apart() -> None:
    assert LossMix.parse({"jsd": 2.0}, {"jsd": {"beta": 0.1}}).terms == (JSD,)
    with pytest.raises(ConfigError, match="'lk_hybrid', which is not in the mix"):
        LossMix.parse({"jsd": 2.0}, {"lk_hybrid": {"eta": 1}})


@pytest.mark.parametrize(
    ("config", "teacher", "samples", "labels"),
    [
        ("ce", False, False, True),
        ({"fkl": 1, "ce": 1}, True, False, True),
        ("lk", True, False, False),
        ("tvdpp", True, True, True),
    ],
)
def test_what_a_mix_needs(config: Any, teacher: bool, samples: bool, labels: bool) -> None:
    mix = LossMix.parse(config)
    assert (mix.needs_teacher, mix.needs_draft_samples, mix.needs_labels) == (teacher, samples, labels)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("kl", "unknown loss 'kl'; known: fkl, rkl, jsd, jsd_kl, tvd, lk, lk_hybrid, ce, tvdpp"),
        ({"fkl": -1}, "weight of loss fkl must be finite and >= 0"),
        ({"fkl": "much"}, "weight of loss fkl must be a number"),
        ({"fkl": {"beta": 1}}, "loss fkl has no parameter 'beta'; it has: none"),
        ({"fkl": 0}, "empty"),
        ([], "empty"),
        (["fkl", "fkl"], "twice"),
        ([3], "not 3"),
    ],
)
def test_mistakes_are_named(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossMix.parse(config)
