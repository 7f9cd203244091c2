"""Logged answers as a shard: their columns in the common schema, the rest as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from distillspec.data.shard_file import ShardMetadata, ShardRefused, check_digest, read_shard, write_shard
from distillspec.data.shard_schema import Columns
from distillspec.data.shard_signal import signal_columns, signal_of
from distillspec.data.shard_states import state_columns, states_of
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.rejected_nodes import node_columns, nodes_of
from distillspec.signals import TeacherSignal
from distillspec.types import SamplingPolicy

LATER = ("policy_logprobs", "policy_log_z")  # columns that earlier releases did not write
ROW_FIELDS = (*LATER, "outcomes", "draft_tokens", "draft_probs", "draft_entropies", "version_of")
METADATA_FIELDS = ("request_id", "index", "tenant", "domain", "time_s", "draft_versions")


def save_shard(path: Path, answers: Sequence[LoggedAnswer], key: LogKey) -> None:
    """Write answers whose signals all have `key.entries` entries.

    Draws from the tail are kept if every answer has them.

    Raises:
        SchemaError: an answer's tensors differ in length from its response.
    """
    metadata = [{**{name: getattr(a, name) for name in METADATA_FIELDS}, "policy": asdict(a.policy)} for a in answers]
    states, shared = state_columns([answer.states for answer in answers])
    nodes = node_columns([answer.nodes for answer in answers])
    columns = [_columns(answer) | state | node for answer, state, node in zip(answers, states, nodes, strict=True)]
    write_shard(path, columns, ShardMetadata(metadata, {"key": asdict(key), "signal_kind": "topk", **shared}))


def load_shard(path: Path, key: LogKey, sha256: str | None = None) -> list[LoggedAnswer]:
    """Return all answers of a shard.

    Args:
        sha256: recorded digest. None: not compared.

    Raises:
        ShardRefused: unreadable, changed, of a newer version, or recorded with another target than `key`'s.
        FileNotFoundError: with `sha256`, there is no file.
    """
    if sha256 is not None:
        check_digest(path, sha256)
    samples, metadata = read_shard(path)
    recorded = metadata.common.get("key", {})
    differing = [name for name, value in asdict(key).items() if recorded.get(name) != value]
    if differing:
        raise ShardRefused(
            f"{path.name} was recorded with another {differing[0]}: {recorded.get(differing[0])}, "
            f"not {getattr(key, differing[0])}"
        )
    return [
        _answer(columns, recorded_answer, metadata.common)
        for columns, recorded_answer in zip(samples, metadata.samples, strict=True)
    ]


def _columns(answer: LoggedAnswer) -> Columns:
    return {
        "prompt_tokens": torch.tensor(answer.prompt_ids, dtype=torch.int32),
        "response_tokens": torch.tensor(answer.response_ids, dtype=torch.int32),
        "finished": torch.tensor(answer.finished),
        **signal_columns(answer.signal),
        "signal_tail": answer.signal.tail.to(torch.float16),  # half the bytes of the cache's
        **{name: getattr(answer, name) for name in ROW_FIELDS},
    }


def _answer(columns: Columns, recorded: dict[str, Any], common: dict[str, Any]) -> LoggedAnswer:
    signal = signal_of(columns, common)
    assert isinstance(signal, TeacherSignal), "every logged answer has a compressed signal"
    policy, versions = SamplingPolicy(**recorded["policy"]), tuple(recorded["draft_versions"])
    unknown = torch.full((len(columns["response_tokens"]),), math.nan, dtype=torch.float16)
    rows: dict[str, Any] = {name: columns.get(name, unknown) if name in LATER else columns[name] for name in ROW_FIELDS}
    metadata = {name: recorded[name] for name in METADATA_FIELDS}
    return LoggedAnswer(
        **{**metadata, "policy": policy, "draft_versions": versions, "finished": bool(columns["finished"])},
        prompt_ids=tuple(columns["prompt_tokens"].tolist()),
        response_ids=tuple(columns["response_tokens"].tolist()),
        signal=signal,
        states=states_of(columns, common),
        nodes=nodes_of(columns),
        **rows,
    )
