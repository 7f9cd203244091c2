"""Checks that the data can teach what the loss needs, before a run that would learn nothing."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.config import DataConfig, DraftConfig
from distillspec.data.folder import DataFolder
from distillspec.data.shards import recorded_key
from distillspec.errors import ConfigError
from distillspec.losses import LossMix
from distillspec.models import read_metadata
from distillspec.types import Sample

NOISE = 0.1  # acceptance below which a draft's own text teaches little (drafts at 0.02 learnt nothing from theirs)


def check_plan(mix: LossMix, data: DataConfig) -> None:
    """Refuse a loss that the data settings cannot feed.

    Raises:
        ConfigError: sampled teacher tokens for a loss over distributions, or no text drawn from the draft for `tvdpp`.
    """
    if data.signal == "sampled" and mix.needs_distribution:
        raise ConfigError(_unfed(mix, "data.signal=sampled records drawn tokens only"))
    by_draft = data.source == "draft" or (data.source == "mixed" and data.mixed_by == "sequence")
    if mix.needs_draft_samples and not by_draft and (data.on_policy or data.cache is None):
        raise ConfigError(_unwritten(f"data.source={data.source} gives none that is all its own"))
    if mix.needs_draft_samples and data.on_policy and data.policy.is_greedy:
        raise ConfigError(
            "data.temperature=0: loss tvdpp learns from tokens that are drawn from the draft, and greedy ones are not; "
            "use a temperature above 0"
        )
    if mix.needs_draft_samples and (data.refresh_keep or 1) > 1:
        raise ConfigError(
            f"data.refresh_keep={data.refresh_keep}: loss tvdpp learns only from what the current draft wrote; "
            "leave it out"
        )


def check_recorded(data: DataConfig, folder: DataFolder) -> None:
    """Refuse a signal that was asked for and that a cache does not have.

    Raises:
        ConfigError: naming the one that it has.
    """
    recorded = recorded_key(folder.samples).get("signal", data.signal)
    if data.cache is not None and not data.on_policy and data.signal not in ("none", recorded):
        raise ConfigError(
            f"data.signal={data.signal}: the text of data.cache={data.cache} was written with "
            f"data.signal={recorded}; leave it out, or write the text again"
        )


def check_confidence(mix: LossMix, draft: DraftConfig) -> None:
    """Refuse a confidence head that nothing would teach.

    Raises:
        ConfigError: it learns how much the target accepts, and the loss reads no distribution of the target.
    """
    if draft.confidence and not mix.needs_teacher:
        raise ConfigError(
            f"draft.confidence=true learns from the target's probabilities, and loss {' and '.join(mix.names)} reads "
            "none; leave it out, or use another loss"
        )


def check_reference(reference: str | None) -> None:
    """Refuse a reference draft (`loss.reference`) that reads the target's states.

    Raises:
        ConfigError: it does, or it is no draft folder.
    """
    if reference is not None and "reads" in read_metadata(reference):
        raise ConfigError(f"loss.reference={reference} reads the target's hidden states; name a draft that does not")


def refreshes_kept(mix: LossMix, data: DataConfig) -> int:
    """Return the number of refreshes of on-policy text that training draws from at a time.

    Sampling and scoring a text takes far longer than a step on it, so the refresh before is kept. A policy gradient is
    right only on text of the current draft.
    """
    return data.refresh_keep or (1 if mix.needs_draft_samples else 2)


def warn_of_noise(data: DataConfig, alpha: float) -> None:
    """Warn if a draft that the target hardly accepts would learn from its own text. `alpha` is that before training."""
    if data.source == "draft" and alpha < NOISE:
        print(
            f"warning: data=draft, and the draft's acceptance rate is {alpha:.3f}: what it writes is noise, and little "
            "is learnt from it; train with data=teacher first, then go on with draft=pretrained draft.path=RUN"
        )


def check_samples(mix: LossMix, samples: Sequence[Sample]) -> None:
    """Refuse a loss that these samples cannot feed. An on-policy run has none yet, which passes.

    Raises:
        ConfigError: see `check_plan`.
    """
    if mix.needs_distribution and any(s.signal is not None and s.signal.request.kind == "sampled" for s in samples):
        raise ConfigError(_unfed(mix, "the cache holds drawn tokens only"))
    if mix.needs_draft_samples and samples and not any(s.source == "draft" for s in samples):
        raise ConfigError(_unwritten("the cache holds none"))


def _unfed(mix: LossMix, why: str) -> str:
    names = " and ".join(mix.distribution_losses)
    return f"loss {names} needs the target's distribution, and {why}; use data.signal=topk or none, or loss=fkl"


def _unwritten(why: str) -> str:
    return (
        f"loss tvdpp learns only from text that the draft wrote, and {why}; use data=draft, or data=mixed by sequence"
    )
