"""Samples on disk: safetensors shards and a manifest, each complete before it is visible.

A folder holds `manifest.json` and `shard-00000.safetensors`, …; a shard has flat token arrays with offsets,
the teacher's signal, and its sequences' ids, domains and sources as JSON in the metadata.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from distillspec.data.packing import joined_draws, joined_writer_logprobs
from distillspec.errors import ConfigError
from distillspec.files import sha256_of, write_atomic, write_json
from distillspec.types import ModelIdentity, Sample, TeacherSignal

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


class ShardWriter:
    """Adds samples to a folder, a shard at a time; opening it again goes on where it stopped.

    `key` says what the samples are (target identity, policy, signal); a folder with another key is refused.
    """

    def __init__(self, folder: Path, key: dict[str, Any], shard_sequences: int) -> None:
        self.folder = folder
        self.shard_sequences = shard_sequences
        self._pending: list[Sample] = []
        self._manifest = self._open(json.loads(json.dumps(key)))
        self.done_ids = {name for shard in self._manifest["shards"] for name in _prompt_names(folder / shard["file"])}

    def add(self, sample: Sample) -> None:
        self._pending.append(sample)
        if len(self._pending) >= self.shard_sequences:
            self.flush()

    def flush(self, *, complete: bool = False) -> None:
        """Write what is pending as a shard; `complete` marks the folder as holding all that was asked for."""
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
        write_json(self.folder / MANIFEST, self._manifest)

    @property
    def complete(self) -> bool:
        """Whether the folder holds all that was asked for (or all that the time allowed)."""
        return bool(self._manifest["complete"])

    @property
    def response_tokens(self) -> int:
        return sum(shard["response_tokens"] for shard in self._manifest["shards"])

    def _open(self, key: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / MANIFEST
        if not path.is_file():
            return {"format_version": FORMAT_VERSION, "key": key, "shards": [], "complete": False}
        manifest = _read_manifest(path)
        differing = sorted(k for k in {*manifest["key"], *key} if manifest["key"].get(k) != key.get(k))
        if differing:
            first = differing[0]
            raise ConfigError(
                f"{self.folder} holds samples of {first}={manifest['key'].get(first)!r}, not {key.get(first)!r}; "
                "use another folder or the same settings"
            )
        # A damaged shard is left out: its prompts are simply answered again.
        intact = [s for s in manifest["shards"] if _intact(self.folder, s)]
        manifest["complete"] = manifest["complete"] and len(intact) == len(manifest["shards"])
        manifest["shards"] = intact
        return manifest

    def _next_number(self) -> int:
        numbers = [int(path.stem.split("-")[1]) for path in self.folder.glob("shard-*.safetensors")]
        return max(numbers, default=-1) + 1


def read_samples(folder: Path, identity: ModelIdentity | None = None) -> list[Sample]:
    """All samples of a folder.

    Raises:
        ConfigError: no manifest, a damaged shard, or made by another target than `identity`.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"data.cache={folder} has no {MANIFEST}; make the folder with distill generate")
    manifest = _read_manifest(path)
    made_by = manifest["key"].get("target", {})
    for name in ("tokenizer_hash", "weights_hash"):
        if identity is not None and made_by.get(name) != asdict(identity)[name]:
            raise ConfigError(
                f"data.cache={folder} was made with another target ({name} {made_by.get(name)}, this target's is "
                f"{asdict(identity)[name]}); generate it again with this one"
            )
    samples: list[Sample] = []
    for shard in manifest["shards"]:
        if not _intact(folder, shard):
            raise ConfigError(
                f"{folder / shard['file']} is damaged or missing; run the distill generate that made it again"
            )
        samples.extend(_load(folder / shard["file"]))
    return samples


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not readable ({error}); remove its folder and make it again") from error


def recorded_key(folder: Path) -> dict[str, Any]:
    """What the samples of a folder were made with; empty when there are none."""
    path = folder / MANIFEST
    return _read_manifest(path)["key"] if path.is_file() else {}


def _intact(folder: Path, shard: dict[str, Any]) -> bool:
    path = folder / shard["file"]
    return path.is_file() and sha256_of(path) == shard["sha256"]


def _save(samples: list[Sample], path: Path) -> None:
    tensors = {
        "prompt_tokens": _flat(s.prompt_ids for s in samples),
        "prompt_offsets": _offsets(len(s.prompt_ids) for s in samples),
        "response_tokens": _flat(s.response_ids for s in samples),
        "response_offsets": _offsets(len(s.response_ids) for s in samples),
        "finished": torch.tensor([s.finished for s in samples]),
    }
    records: dict[str, Any] = {
        "prompt_ids": [s.prompt_id for s in samples],
        "domains": [s.domain for s in samples],
        "sources": [s.source for s in samples],
    }
    written = joined_writer_logprobs(samples)
    if written is not None:
        tensors["writer_logprobs"] = written
    signals = [s.signal for s in samples if s.signal is not None]
    if len(signals) == len(samples):
        records["signal_kind"] = signals[0].kind
        tensors["signal_ids"] = torch.cat([s.ids for s in signals]).to(torch.int32)
        tensors["signal_logprobs"] = torch.cat([s.logprobs for s in signals]).to(torch.float16)
        tensors["signal_tail"] = torch.cat([s.tail for s in signals]).to(torch.float32)
        tail_ids, tail_logprobs = joined_draws(signals)
        if tail_ids is not None and tail_logprobs is not None:
            tensors |= {"tail_ids": tail_ids, "tail_logprobs": tail_logprobs.to(torch.float16)}
    save_file(tensors, path, metadata={"distillspec": json.dumps(records)})


def _load(path: Path) -> list[Sample]:
    with safe_open(path, framework="pt") as stream:
        records = json.loads(stream.metadata()["distillspec"])
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a mapping)
    prompts = _ragged(tensors["prompt_tokens"], tensors["prompt_offsets"])
    responses = _ragged(tensors["response_tokens"], tensors["response_offsets"])
    offsets = tensors["response_offsets"].tolist()
    whole = None
    if "signal_kind" in records:
        whole = TeacherSignal(
            records["signal_kind"],
            tensors["signal_ids"],
            tensors["signal_logprobs"],
            tensors["signal_tail"],
            tensors.get("tail_ids"),
            tensors.get("tail_logprobs"),
        )
    return [
        Sample(
            prompt_id=records["prompt_ids"][i],
            domain=records["domains"][i],
            prompt_ids=prompts[i],
            response_ids=responses[i],
            signal=None if whole is None else whole.rows(offsets[i], offsets[i + 1]),
            source=records["sources"][i],
            finished=bool(tensors["finished"][i]),
            writer_logprobs=_known(tensors.get("writer_logprobs"), offsets[i], offsets[i + 1]),
        )
        for i in range(len(prompts))
    ]


def _known(values: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The part of one sample, None where it is not known."""
    part = None if values is None else values[start:stop]
    return None if part is None or bool(part.isnan().any()) else part


def _prompt_names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as stream:
        return json.loads(stream.metadata()["distillspec"])["prompt_ids"]


def _flat(sequences: Iterable[tuple[int, ...]]) -> Tensor:
    return torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32)


def _offsets(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _ragged(flat: Tensor, offsets: Tensor) -> list[tuple[int, ...]]:
    values, ends = flat.tolist(), offsets.tolist()
    return [tuple(values[a:b]) for a, b in itertools.pairwise(ends)]
