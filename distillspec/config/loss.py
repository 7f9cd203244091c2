"""Settings of the training loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from distillspec.config.checks import chosen_from, require
from distillspec.config.registry import LOSSES, find


@dataclass
class LossConfig:
    """The loss the draft minimises: one by name, or a weighted mix."""

    name: str = chosen_from(LOSSES, "jsd")
    beta: float = 0.5  # jsd, jsd_kl: weight of the target in the mixture
    kl: float = 0.1  # jsd_kl: weight of forward KL
    eta: float = 3.0  # lk_hybrid: rate at which forward KL gives way to tvd as α grows
    params: dict[str, Any] = field(default_factory=dict)  # other parameters of the named loss: +loss.params.scale=2
    mix: Any = None  # weights in place of a name: loss.mix={fkl:1,jsd:{weight:0.5,beta:0.1}}
    temperature: float = 1.0  # divides both models' logits; others than 1 need the live target
    chunk_tokens: int | None = None  # positions whose logits exist at a time; null: by memory
    select_fraction: float | None = None  # AdaSPEC: train on this share of the tokens
    reference: str | None = None  # AdaSPEC: folder of the reference draft

    def __post_init__(self) -> None:
        find("loss.name", self.name, LOSSES)
        require(0 < self.beta < 1, f"loss.beta={self.beta} must be in (0, 1)")
        # Typed Any, since Hydra cannot put new keys into a typed dictionary from the command line.
        require(
            self.mix is None or (isinstance(self.mix, dict) and bool(self.mix)),
            f"loss.mix={self.mix} must give losses a weight, as in 'loss.mix={{fkl:1,tvd:0.5}}', quoted",
        )
        require(0 <= self.eta < math.inf, f"loss.eta={self.eta} must be at least 0 and finite")
        require(0 <= self.kl < math.inf, f"loss.kl={self.kl} must be at least 0 and finite")
        require(0 < self.temperature < math.inf, f"loss.temperature={self.temperature} must be above 0 and finite")
        require(
            self.chunk_tokens is None or self.chunk_tokens >= 1,
            f"loss.chunk_tokens={self.chunk_tokens} must be at least 1",
        )
        if self.select_fraction is not None:
            require(
                0 < self.select_fraction <= 1,
                f"loss.select_fraction={self.select_fraction} must be in (0, 1]",
            )
            require(
                self.reference is not None,
                "loss.select_fraction needs loss.reference=FOLDER (a draft to compare)",
            )

    @property
    def terms(self) -> dict[str, Any]:
        """The mix as `LossMix.parse` reads it."""
        if self.mix:
            return dict(self.mix)
        own = {name: getattr(self, name) for name in LOSSES[self.name].reads}
        return {self.name: {"weight": 1.0, **own, **self.params}}
