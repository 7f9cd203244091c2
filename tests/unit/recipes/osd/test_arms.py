"""Arms of the study: the product's own is what `distill serve online=on` does by default."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from distillspec.config import AdaptConfig, LossConfig
from distillspec.config.registry import BESIDE_DRAFT
from distillspec.recipes.osd.arms import ARMS, PRODUCT, arms
from distillspec.recipes.osd.study import Segment, Study

STUDY = Study(Path("out"), "tiny", "draft", (Segment("a", "a.jsonl"), Segment("b", "b.jsonl")))


def test_the_products_arm_has_its_defaults() -> None:
    (product,) = [arm for arm in arms(STUDY) if arm.name == PRODUCT]
    assert product.adapt is not None
    usual = asdict(AdaptConfig())
    changed = {name for name, value in asdict(product.adapt).items() if value != usual[name]}
    assert changed <= {"min_requests", "max_steps"}, "all arms may learn from less, and from all that is new"
    assert product.loss == LossConfig()
    assert product.gated
    assert (product.store, "draft_model") == BESIDE_DRAFT


def test_every_arm_has_its_name_once() -> None:
    assert tuple(arm.name for arm in arms(STUDY)) == ARMS
