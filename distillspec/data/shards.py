"""Teacher cache: training samples in shards, and a manifest that lists them.

A folder holds `manifest.json` and `shard-00000.safetensors`, …. Each file is complete before it is visible. The columns
of a shard are those of `shard_schema`.
"""

from __future__ import annotations

import json
import time
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillspec.data.packing import joined_draws
from distillspec.data.shard_file import ShardMetadata, ShardRefused, is_intact, read_metadata, read_shard, write_shard
from distillspec.data.shard_schema import Columns
from distillspec.data.shard_signal import signal_columns, signal_of
from distillspec.data.shard_states import state_columns, states_of
from distillspec.errors import ConfigError
from distillspec.files import sha256_of, write_atomic, write_json
from distillspec.signals import Signal, TeacherSignal
from distillspec.types import ModelIdentity, Sample

MANIFEST = "manifest.json"
FORMAT_VERSION = 1  # of the manifest


class ShardWriter:
    """Writes samples to a folder, one shard at a time. Opened again, it continues after the last intact shard.

    Args:
        key: how the samples are made (target identity, policy, signal). A folder with another key is refused.
        shard_sequences: samples a shard.

    Raises:
        ConfigError: the folder has another key, an unreadable manifest, or shards of a newer version.
    """

    def __init__(self, folder: Path, key: dict[str, Any], shard_sequences: int) -> None:
        self.folder = folder
        self.shard_sequences = shard_sequences
        self._pending: list[Sample] = []
        self._written: dict[str, Any] | None = None  # the manifest on disk
        self._opened = time.monotonic()
        self._manifest = self._open(json.loads(json.dumps(key)))
        self.spent_s = float(self._manifest.get("seconds", 0.0))  # on the folder, before this opening
        self.done_ids = {
            sample["prompt_id"] for shard in self._manifest["shards"] for sample in _metadata_of(folder / shard["file"])
        }

    def add(self, sample: Sample) -> None:
        self._pending.append(sample)
        if len(self._pending) >= self.shard_sequences:
            self.flush()

    def flush(self, *, complete: bool = False) -> None:
        """Write the pending samples as a shard. `complete` marks the folder as holding every requested sample.

        Without new samples nothing is written: a finished folder may be read-only.
        """
        if self._pending or complete != self._manifest["complete"]:
            self._manifest["seconds"] = self.spent_s + time.monotonic() - self._opened
        if self._pending:
            name = f"shard-{self._next_number():05d}.safetensors"
            write_atomic(self.folder / name, lambda temporary: _save(self._pending, temporary))
            self._manifest["shards"].append(
                {
                    "file": name,
                    "sha256": sha256_of(self.folder / name),
                    "sequences": len(self._pending),
                    "response_tokens": sum(len(s.response_ids) for s in self._pending),
                }
            )
            self._pending = []
        self._manifest["complete"] = complete
        if self._manifest != self._written:
            write_json(self.folder / MANIFEST, self._manifest)
            self._written = deepcopy(self._manifest)

    @property
    def complete(self) -> bool:
        """True when the folder holds every requested sample, or all that the time limit allowed."""
        return bool(self._manifest["complete"])

    @property
    def response_tokens(self) -> int:
        return sum(shard["response_tokens"] for shard in self._manifest["shards"])

    def _open(self, key: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / MANIFEST
        if not path.is_file():
            return {"format_version": FORMAT_VERSION, "key": key, "shards": [], "complete": False}
        self._written = _read_manifest(path)
        manifest = deepcopy(self._written)
        differing = sorted(k for k in {*manifest["key"], *key} if manifest["key"].get(k) != key.get(k))
        if differing:
            first = differing[0]
            raise ConfigError(
                f"{self.folder} holds samples of {first}={manifest['key'].get(first)!r}, not {key.get(first)!r}; "
                "use another folder or the same settings"
            )
        # A damaged shard is left out: its prompts are answered again.
        intact = [s for s in manifest["shards"] if is_intact(self.folder / s["file"], s["sha256"])]
        manifest["complete"] = manifest["complete"] and len(intact) == len(manifest["shards"])
        manifest["shards"] = intact
        return manifest

    def _next_number(self) -> int:
        numbers = [int(path.stem.split("-")[1]) for path in self.folder.glob("shard-*.safetensors")]
        return max(numbers, default=-1) + 1


def recorded_whole(folder: Path) -> bool:
    """Return True if a folder holds every sample that was asked for."""
    return bool(_read_manifest(folder / MANIFEST)["complete"])


def is_whole(folder: Path) -> bool:
    """Return the same, False where there are no samples yet."""
    return (folder / MANIFEST).is_file() and recorded_whole(folder)


def read_samples(
    folder: Path, identity: ModelIdentity | None = None, state_bytes: float = 0, setting: str | None = None
) -> list[Sample]:
    """Return all samples of a folder.

    Args:
        setting: the one that names the folder, where that is not `data.cache`.
        state_bytes: memory for recorded states. Those of later shards are left out.

    Raises:
        ConfigError: no manifest, a damaged shard, one of a newer version, or another target than `identity`.
    """
    path, setting = folder / MANIFEST, setting or f"data.cache={folder}"
    if not path.is_file():
        raise ConfigError(f"{setting} has no {MANIFEST}; make the folder with distill generate")
    manifest = _read_manifest(path)
    made_by = manifest["key"].get("target", {})
    for name in ("tokenizer_hash", "weights_hash"):
        if identity is not None and made_by.get(name) != asdict(identity)[name]:
            raise ConfigError(
                f"{setting} was made with another target ({name} {made_by.get(name)}, this target's is "
                f"{asdict(identity)[name]}); generate it again with this one"
            )
    samples: list[Sample] = []
    for shard in manifest["shards"]:
        if not is_intact(folder / shard["file"], shard["sha256"]):
            raise ConfigError(
                f"{folder / shard['file']} is damaged or missing; run the distill generate that made it again"
            )
        samples += _load(folder / shard["file"], states=state_bytes > 0)
        state_bytes -= sum(0 if s.states is None else s.states.nbytes for s in samples[-shard["sequences"] :])
    return samples


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not readable ({error}); remove its folder and make it again") from error


def recorded_key(folder: Path) -> dict[str, Any]:
    """Return the key that the samples of a folder were made with. Empty without a manifest."""
    path = folder / MANIFEST
    return _read_manifest(path)["key"] if path.is_file() else {}


def recorded_seconds(folder: Path) -> float | None:
    """Return the seconds in which the samples of a folder were made. None: it has no manifest, or an older one."""
    path = folder / MANIFEST
    seconds: float | None = _read_manifest(path).get("seconds") if path.is_file() else None
    return seconds


def _save(samples: list[Sample], path: Path) -> None:
    signals = [s.signal for s in samples if s.signal is not None]
    whole = len(signals) == len(samples)
    columns = [_columns(sample) for sample in samples]
    if whole:
        for sample_columns, signal in zip(columns, _aligned(signals), strict=True):
            sample_columns |= signal
    common: dict[str, Any] = {"signal_kind": signals[0].kind} if whole else {}
    states, shared = state_columns([sample.states for sample in samples])
    common |= shared
    for sample_columns, features in zip(columns, states, strict=True):
        sample_columns |= features
    records = [{"prompt_id": s.prompt_id, "domain": s.domain, "source": s.source} for s in samples]
    write_shard(path, columns, ShardMetadata(records, common))


def _columns(sample: Sample) -> Columns:
    columns = {
        "prompt_tokens": torch.tensor(sample.prompt_ids, dtype=torch.int32),
        "response_tokens": torch.tensor(sample.response_ids, dtype=torch.int32),
        "finished": torch.tensor(sample.finished),
    }
    if sample.writer_logprobs is not None:
        columns["writer_logprobs"] = sample.writer_logprobs.float()
    return columns


def _aligned(signals: list[Signal]) -> list[Columns]:
    """Return the signals' columns. Those with fewer draws than others are padded."""
    columns = [signal_columns(signal) for signal in signals]
    compressed = [signal for signal in signals if isinstance(signal, TeacherSignal)]
    tail_ids, tail_logprobs = joined_draws(compressed)
    if tail_ids is not None and tail_logprobs is not None:
        lengths = [len(signal) for signal in signals]
        draws = zip(tail_ids.int().split(lengths), tail_logprobs.half().split(lengths), strict=True)
        for signal_of_sample, (ids, logprobs) in zip(columns, draws, strict=True):
            signal_of_sample |= {"tail_ids": ids, "tail_logprobs": logprobs}
    return columns


def _load(path: Path, states: bool) -> list[Sample]:
    try:
        samples, metadata = read_shard(path, without=() if states else ("features", "feature_scales"))
    except ShardRefused as refused:
        raise ConfigError(f"{path.parent}: {refused}") from refused
    return [
        Sample(
            prompt_id=record["prompt_id"],
            domain=record["domain"],
            prompt_ids=_ids(columns["prompt_tokens"]),
            response_ids=_ids(columns["response_tokens"]),
            signal=signal_of(columns, metadata.common),
            source=record["source"],
            finished=bool(columns["finished"]),
            writer_logprobs=columns.get("writer_logprobs"),
            states=states_of(columns, metadata.common) if states else None,
        )
        for columns, record in zip(samples, metadata.samples, strict=True)
    ]


def _metadata_of(path: Path) -> list[dict[str, Any]]:
    try:
        return read_metadata(path).samples
    except ShardRefused as refused:
        raise ConfigError(f"{path.parent}: {refused}") from refused


def _ids(tokens: Tensor) -> tuple[int, ...]:
    return tuple(tokens.tolist())
