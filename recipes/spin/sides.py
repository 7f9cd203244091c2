"""Sides of the live comparison: controllers that choose drafts, and the engines that they plan for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from distillspec.config import TargetConfig
from distillspec.config.registry import SELECTIONS
from distillspec.models import load_target
from distillspec.serving import Engine, EngineSettings
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.draft_loading import draft_names, evaluated, load_drafts
from distillspec.serving.selection.by_name import compared_selection
from distillspec.serving.selection.selecting import selecting

NONE = "none"  # no speculation
NGRAM = "ngram"  # the source without a model that stands beside drafts
BESIDE = "+ngram"  # after the name of a draft, or of goodput, that it stands beside
GOODPUT = "goodput"  # among the drafts alone
LOOKUP = "lookup_else_model"
OURS = (GOODPUT, f"{GOODPUT}{BESIDE}")
COMPARED = tuple(name for name in SELECTIONS if name not in ("fixed", GOODPUT, LOOKUP))


@dataclass(frozen=True)
class Side:
    """A controller and the engine that it plans for."""

    engine: Engine
    controller: LengthController


@dataclass(frozen=True)
class Engines:
    """Opens engines of one target.

    Attributes:
        batch: their slots.
        opened: closes them.
    """

    target: str
    batch: int
    opened: ExitStack

    def open(self, drafts: Sequence[str], **settings: Any) -> Engine:
        """Return an engine with drafts of these folders.

        Args:
            settings: see `EngineConfig`.
        """
        target = load_target(TargetConfig(path=self.target))
        engine_settings = {
            "max_slots": self.batch,
            "max_model_len": 1024,
            "prefix_reuse": False,
            "compile": False,
            **settings,
        }
        engine = Engine(
            target, load_drafts(list(drafts), target) if drafts else None, EngineSettings(**engine_settings)
        )
        self.opened.callback(engine.close)
        return engine


def all_sides(engines: Engines, drafts: Sequence[str], selections: Sequence[str]) -> dict[str, Side]:
    """Return all sides by name. Those with the same sources share an engine.

    Args:
        drafts: folders.
        selections: to compare with, among the drafts alone.
    """
    names = draft_names(drafts)
    alone, beside, looking, ngram = (
        engines.open(drafts if proposer != NGRAM else (), proposer=proposer)
        for proposer in ("draft_model", [NGRAM, "draft_model"], LOOKUP, NGRAM)
    )
    return {
        NONE: Side(alone, named_controller(NONE, alone.settings.speculation_length, alone.costs)),
        **{name: selecting_side(alone, name) for name in names},
        **{f"{name}{BESIDE}": selecting_side(beside, name) for name in names},
        NGRAM: Side(ngram, _inside(ngram)),
        GOODPUT: selecting_side(alone, GOODPUT),
        f"{GOODPUT}{BESIDE}": selecting_side(beside, GOODPUT),
        LOOKUP: selecting_side(looking, LOOKUP),
        **{name: selecting_side(alone, name) for name in selections},
    }


def selecting_side(engine: Engine, name: str) -> Side:
    """Return a side with a selection, or with a draft for every request. Lengths are by goodput."""
    expected = evaluated(engine.drafts)
    drafts = list(engine.drafts)
    return Side(engine, compared_selection(_inside(engine), name, drafts, {}, expected=expected, costs=engine.costs))


def choices(controller: LengthController) -> dict[str, Any]:
    """Return what a selection has chosen, and the tokens of its trials."""
    chosen = selecting(controller)
    assert chosen is not None
    figures = {name: dict(getattr(chosen.figures, name)) for name in ("requests", "tokens", "switches")}
    losses = chosen.figures.losses
    return {**figures, "explored": chosen.figures.explored, "lost": losses.trials, "regret": losses.regret}


def _inside(engine: Engine) -> LengthController:
    return named_controller(GOODPUT, engine.settings.speculation_length, engine.costs)
