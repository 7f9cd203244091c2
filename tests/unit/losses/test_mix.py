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
        ({"fkl": {}}, [LossTerm("fkl")]),
        ({"fkl": 0.7, "ce": 0.3, "lk": 0}, [LossTerm("fkl", 0.7), LossTerm("ce", 0.3)]),
        ({"jsd": {"weight": 2.0, "beta": 0.1}}, [JSD]),
        (OmegaConf.create({"fkl": 1.0}), [LossTerm("fkl", 1.0)]),
    ],
)
def test_every_way_to_write_a_mix(config: Any, terms: list[LossTerm]) -> None:
    assert LossMix.parse(config).terms == tuple(terms)


@pytest.mark.parametrize(
    ("config", "teacher", "samples"),
    [
        ({"ce": 1}, False, False),
        ({"fkl": 1, "ce": 1}, True, False),
        ({"lk": 1}, True, False),
        ({"tvdpp": 1}, True, True),
    ],
)
def test_what_a_mix_needs(config: Any, teacher: bool, samples: bool) -> None:
    mix = LossMix.parse(config)
    assert (mix.needs_teacher, mix.needs_draft_samples) == (teacher, samples)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kl": 1}, "unknown loss 'kl'; known: fkl, rkl, jsd, jsd_kl, tvd, lk, lk_hybrid, ce, tvdpp"),
        ({"fkl": -1}, "weight of loss fkl must be finite and >= 0"),
        ({"fkl": "much"}, "weight of loss fkl must be a number"),
        ({"fkl": {"beta": 1}}, "loss fkl has no parameter 'beta'; it has: none"),
        ({"fkl": 0}, "empty"),
        ({}, "empty"),
    ],
)
def test_mistakes_are_named(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossMix.parse(config)


def test_a_loss_has_one_weight() -> None:
    with pytest.raises(ConfigError, match="loss jsd appears twice in the mix; give it one weight"):
        LossMix((JSD, LossTerm("jsd")))
