"""A shard on disk: whole, of this version or an older one, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distillspec.data.shard_file import (
    METADATA,
    ShardMetadata,
    ShardRefused,
    check_digest,
    has_size,
    is_intact,
    read_metadata,
    read_shard,
    write_shard,
)
from distillspec.data.shard_schema import VERSION, pack
from distillspec.files import sha256_of

from .test_shard_schema import OPTIONAL, assert_equal, sample

METADATA_OF_TWO = ShardMetadata([{"name": "a"}, {"name": "b"}], {"signal_kind": "topk"})


def test_columns_and_metadata_come_back(tmp_path: Path) -> None:
    samples = [sample(number, *OPTIONAL) for number in range(2)]
    write_shard(tmp_path / "s", samples, METADATA_OF_TWO)
    columns, metadata = read_shard(tmp_path / "s")
    assert_equal(columns, samples)
    assert metadata == read_metadata(tmp_path / "s") == METADATA_OF_TWO


def written_as(path: Path, version: int) -> None:
    content = {"version": version, "samples": [{}], "common": {}}
    save_file(pack([sample(0)]), path, metadata={METADATA: json.dumps(content)})


@pytest.mark.parametrize("read", [read_shard, read_metadata])
def test_a_newer_version_is_refused_in_one_line_with_the_fix(tmp_path: Path, read) -> None:  # type: ignore[no-untyped-def]
    written_as(tmp_path / "s", VERSION)
    read(tmp_path / "s")
    written_as(tmp_path / "s", VERSION + 1)
    with pytest.raises(
        ShardRefused, match=f"s has shard version {VERSION + 1}, .* reads up to {VERSION}; update"
    ) as no:
        read(tmp_path / "s")
    assert "\n" not in str(no.value)


def test_what_is_no_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"no shard")
    with pytest.raises(ShardRefused, match="s is not readable"):
        read_shard(tmp_path / "s")
    save_file({"a": torch.zeros(2)}, tmp_path / "s")
    with pytest.raises(ShardRefused, match="s is not a shard"):
        read_shard(tmp_path / "s")
    save_file({"a": torch.zeros(2)}, tmp_path / "s", metadata={METADATA: json.dumps({"samples": []})})
    with pytest.raises(ShardRefused, match="s is not readable: 'version'"):
        read_shard(tmp_path / "s")


def test_metadata_of_other_samples_than_the_columns_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "s", [sample(0)], ShardMetadata([{}, {}]))
    with pytest.raises(ShardRefused, match="s has columns of 1 samples but metadata of 2"):
        read_shard(tmp_path / "s")


def test_size_and_digest_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_shard(path, [sample(0)], ShardMetadata([{}]))
    size, digest = path.stat().st_size, sha256_of(path)
    assert is_intact(path, digest)
    assert has_size(path, size)
    check_digest(path, digest)
    path.write_bytes(path.read_bytes()[:-1])
    assert not is_intact(path, digest)
    assert not has_size(path, size)
    with pytest.raises(ShardRefused, match="truncated or changed"):
        check_digest(path, digest)
    path.unlink()
    assert not is_intact(path, digest)
    assert not has_size(path, size)
