"""A shard as a safetensors file: its columns as tensors, what is no tensor as JSON in the metadata."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from distillspec.data.shard_schema import VERSION, Columns, SchemaError, pack, unpack
from distillspec.data.shard_upgrade import OLD_KEYS, upgraded_columns, upgraded_metadata
from distillspec.files import sha256_of

METADATA = "distillspec_shard"  # key of the JSON in the file's metadata


class ShardRefused(Exception):
    """A shard cannot be read. The message names the file and the reason in one line."""


@dataclass(frozen=True)
class ShardMetadata:
    """Values of a shard that are no tensors, stored as JSON."""

    samples: list[dict[str, Any]]  # one a sample: ids, domain, …
    common: dict[str, Any] = field(default_factory=dict)  # of all samples: kind of signal, target, …


def write_shard(path: Path, samples: list[Columns], metadata: ShardMetadata) -> None:
    """Write samples with their columns (see `shard_schema.COLUMNS`).

    Raises:
        SchemaError: the columns do not fit the schema.
    """
    content = {"version": VERSION, "samples": metadata.samples, "common": metadata.common}
    save_file(pack(samples), path, metadata={METADATA: json.dumps(content)})


def read_shard(path: Path, without: Collection[str] = ()) -> tuple[list[Columns], ShardMetadata]:
    """Read the samples of a shard of this version or an older one.

    Args:
        without: columns to leave out.

    Raises:
        ShardRefused: unreadable, or written by a newer version.
    """
    with _refusing(path), safe_open(path, framework="pt") as stream:
        metadata = stream.metadata() or {}
        parsed = _parse(path, metadata)
        columns = {name: stream.get_tensor(name) for name in stream.keys() if name not in without}  # noqa: SIM118
        samples = unpack(upgraded_columns(columns, metadata))
    if len(samples) != len(parsed.samples):
        raise ShardRefused(f"{path.name} has columns of {len(samples)} samples but metadata of {len(parsed.samples)}")
    return samples, parsed


def read_metadata(path: Path) -> ShardMetadata:
    """Read the metadata of a shard without its columns.

    Raises:
        ShardRefused: see `read_shard`.
    """
    with _refusing(path), safe_open(path, framework="pt") as stream:
        return _parse(path, stream.metadata() or {})


def is_intact(path: Path, sha256: str) -> bool:
    """Return True if the file exists and has this digest."""
    return path.is_file() and sha256_of(path) == sha256


def has_size(path: Path, size: int) -> bool:
    """Return True if the file exists and has this many bytes."""
    return path.is_file() and path.stat().st_size == size


def check_digest(path: Path, sha256: str) -> None:
    """Compare a file with its recorded digest.

    Raises:
        ShardRefused: they differ. FileNotFoundError: there is no file.
    """
    if sha256_of(path) != sha256:
        raise ShardRefused(f"{path.name} does not match its sha256 (truncated or changed)")


def _parse(path: Path, metadata: dict[str, str]) -> ShardMetadata:
    if any(key in metadata for key in OLD_KEYS):
        return ShardMetadata(*upgraded_metadata(metadata))
    if METADATA not in metadata:
        raise ShardRefused(f"{path.name} is not a shard: its metadata has no {METADATA}")
    content = json.loads(metadata[METADATA])
    if content["version"] > VERSION:
        raise ShardRefused(
            f"{path.name} has shard version {content['version']}, this distillspec reads up to {VERSION}; "
            "update distillspec or write the shard again"
        )
    return ShardMetadata(content["samples"], content["common"])


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, SchemaError, OSError, KeyError, TypeError, ValueError) as error:
        raise ShardRefused(f"{path.name} is not readable: {error}") from error
