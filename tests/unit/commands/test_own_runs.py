"""`distill eval` takes from a draft's own run what nobody typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.commands.own_runs import OwnRun, data_of, typed_settings
from distillspec.config import DataConfig
from distillspec.data.folder import DataFolder

RUN = OwnRun(Path("run"), DataFolder(Path("run/data")), 24)


@pytest.mark.parametrize(
    ("words", "cache", "length"),
    [
        ([], "run/data", 24),
        (["data.max_new_tokens=256"], "run/data", 256),
        (["data.prompts=selfprompt"], None, 256),
        (["+data.prompts=selfprompt", "seed=1"], None, 256),
    ],
)
def test_a_typed_default_is_kept(tmp_path: Path, words: list[str], cache: str | None, length: int) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words) or "[]\n")
    config = data_of(DataConfig(), [RUN], typed_settings(tmp_path))
    assert (config.cache, config.max_new_tokens) == (cache, length)


def test_nothing_is_typed_without_a_record(tmp_path: Path) -> None:
    assert typed_settings(tmp_path) == frozenset()
