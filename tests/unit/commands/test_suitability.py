"""Data that cannot teach what a loss needs, and signals that a cache does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.commands.suitability import check_plan, check_recorded
from distillspec.config import DataConfig
from distillspec.data.folder import DataFolder
from distillspec.data.shards import ShardWriter
from distillspec.errors import ConfigError
from distillspec.losses import LossMix
from distillspec.types import Sample


def test_a_policy_gradient_needs_drawn_tokens() -> None:
    mix = LossMix.parse({"tvdpp": 1.0})
    check_plan(mix, DataConfig(source="draft", temperature=0.1))
    check_plan(LossMix.parse({"rkl": 1.0}), DataConfig(source="draft", temperature=0.0))
    for source in ("draft", "mixed"):
        with pytest.raises(ConfigError, match=r"data\.temperature=0: loss tvdpp learns from tokens that are drawn"):
            check_plan(mix, DataConfig(source=source, temperature=0.0))


def test_a_signal_that_the_cache_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    writer = ShardWriter(folder.samples, {"signal": "topk"}, shard_sequences=4)
    writer.add(Sample("a", "d", (1,), (2,)))
    writer.flush(complete=True)
    cache = str(tmp_path)
    for fine in (
        DataConfig(cache=cache),
        DataConfig(cache=cache, signal="none"),
        DataConfig(cache=cache, signal="hidden", source="mixed"),  # fresh text is scored
        DataConfig(signal="hidden"),
    ):
        check_recorded(fine, folder)
    with pytest.raises(ConfigError, match=r"data\.signal=hidden: the text of data\.cache=.* with data\.signal=topk; "):
        check_recorded(DataConfig(cache=cache, signal="hidden"), folder)
