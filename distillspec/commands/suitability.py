"""Whether the data can teach what the loss asks for: told before a run that would learn nothing."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.config import DataConfig
from distillspec.errors import ConfigError
from distillspec.losses import LossMix
from distillspec.types import Sample


def check_plan(mix: LossMix, data: DataConfig) -> None:
    """Refuse a loss that the data to be made cannot feed.

    Raises:
        ConfigError: sampled teacher tokens for a loss over distributions, or no draft-written text for `tvdpp`.
    """
    if data.signal == "sampled" and mix.needs_distribution:
        raise ConfigError(_unfed(mix, "data.signal=sampled records drawn tokens only"))
    by_draft = data.source == "draft" or (data.source == "mixed" and data.mixed_by == "sequence")
    if mix.needs_draft_samples and not by_draft and (data.on_policy or data.cache is None):
        raise ConfigError(_unwritten(f"data.source={data.source} gives none that is all its own"))


def check_samples(mix: LossMix, samples: Sequence[Sample]) -> None:
    """The same for samples at hand, which a cache may have brought; none are an on-policy run's that come later."""
    if mix.needs_distribution and any(s.signal is not None and s.signal.request.kind == "sampled" for s in samples):
        raise ConfigError(_unfed(mix, "the cache holds drawn tokens only"))
    if mix.needs_draft_samples and samples and not any(s.source == "draft" for s in samples):
        raise ConfigError(_unwritten("the cache holds none"))


def _unfed(mix: LossMix, why: str) -> str:
    names = " and ".join(name for name in mix.names if name not in ("ce", "fkl"))
    return f"loss {names} needs the target's distribution, and {why}; use data.signal=topk or none, or loss=fkl"


def _unwritten(why: str) -> str:
    return (
        f"loss tvdpp learns only from text that the draft wrote, and {why}; use data=draft, or data=mixed by sequence"
    )
