"""Columns of a shard: one schema for the teacher cache and for the replay log.

A shard holds S samples. A column joins the rows of all samples: `[rows, *shape]`. Its offsets column `[S + 1]` says
where each sample's rows begin. Columns without offsets have one row a sample: `[S, *shape]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

VERSION = 2
"""1: the two layouts that `shard_upgrade` reads. 2: this schema."""

Columns = dict[str, Tensor]
"""Column name → values of one sample (`pack` takes them, `unpack` returns them) or of a whole shard."""

IDS = (torch.int32, torch.uint16)
"""Token ids: int32 in memory, uint16 on disk where all of them fit. −1 marks a missing id and needs int32."""
REALS = (torch.float32, torch.float16, torch.bfloat16)
PROMPT, RESPONSE, FEATURES, NODES = "prompt_offsets", "response_offsets", "feature_offsets", "node_offsets"


@dataclass(frozen=True)
class Column:
    """Declaration of one column.

    A shard has an optional column if every sample has it. With `fill` a single sample is enough: the others are filled,
    and a sample with a filled value is read back without the column.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]  # allowed on disk
    shape: tuple[str, ...] = ()  # of one row. Equal names have equal sizes within a shard.
    offsets: str | None = RESPONSE
    required: bool = False
    fill: float | None = None

    @property
    def dims(self) -> int:
        return 1 + len(self.shape)


COLUMNS = (
    Column("prompt_tokens", IDS, offsets=PROMPT, required=True),
    Column("response_tokens", IDS, required=True),
    Column("finished", (torch.bool,), offsets=None, required=True),  # False: cut at the length limit
    # Teacher's signal (`TeacherSignal`): row t is the distribution that emits response token t.
    Column("signal_ids", IDS, ("entries",)),
    Column("signal_logprobs", (torch.float16,), ("entries",)),
    Column("signal_tail", (torch.float32, torch.float16)),
    Column("tail_ids", IDS, ("draws",)),
    Column("tail_logprobs", (torch.float16,), ("draws",)),
    Column("hidden", REALS, ("hidden_size",)),  # target's final hidden state before the head
    Column("log_z", (torch.float32,)),  # log-sum-exp of its logits, nats
    # Log-probability of each response token under the policy it was drawn with, nats.
    Column("writer_logprobs", (torch.float32,), fill=torch.nan),
    Column("group_id", (torch.int64,), offsets=None),  # samples with one id answer one prompt
    Column("features", (*REALS, torch.float8_e4m3fn), ("feature_size",), FEATURES),  # hidden states that a draft reads
    Column("feature_scales", (torch.float32,), ("feature_count",), FEATURES),  # of float8 features
    # Served speculation (`LoggedAnswer`).
    Column("policy_logprobs", (torch.float16,)),
    Column("policy_log_z", (torch.float16,)),
    Column("outcomes", (torch.uint8,)),
    Column("draft_tokens", (torch.int32,)),
    Column("draft_probs", (torch.float16,)),
    Column("draft_entropies", (torch.float16,)),
    Column("version_of", (torch.uint8,)),
    # Drafted tokens that were not accepted (`RejectedNodes`).
    Column("node_places", (torch.int32,), offsets=NODES),
    Column("node_parents", (torch.int32,), offsets=NODES),
    Column("node_tokens", (torch.int32,), offsets=NODES),
    Column("node_ids", (torch.int32,), ("node_entries",), NODES),
    Column("node_logprobs", (torch.float16,), ("node_entries",), NODES),
    Column("node_tail", (torch.float32,), offsets=NODES),
)
BY_NAME = {column.name: column for column in COLUMNS}


class SchemaError(ValueError):
    """Error for columns that do not fit the schema. The message names the column."""


def pack(samples: Sequence[Mapping[str, Tensor]]) -> Columns:
    """Join the samples' columns, each `[rows, *shape]` or `[*shape]` without offsets, and add the offsets.

    Raises:
        SchemaError: an unknown or missing column, a wrong dtype, shape or number of rows.
    """
    unknown = sorted({name for sample in samples for name in sample} - set(BY_NAME))
    if unknown:
        raise SchemaError(f"column {unknown[0]} is not in the shard schema; declare it in shard_schema.COLUMNS")
    packed: Columns = {}
    for column in COLUMNS:
        rows = _of_all(column, samples)
        if rows is None:
            continue
        packed[column.name] = _join(column, rows)
        if column.offsets is not None:
            offsets = _offsets([len(values) for values in rows])
            if not torch.equal(packed.setdefault(column.offsets, offsets), offsets):
                raise SchemaError(f"column {column.name} has not as many rows as the others along {column.offsets}")
    check(packed)
    return {name: _narrow(name, values) for name, values in packed.items()}


def unpack(columns: Mapping[str, Tensor]) -> list[Columns]:
    """Split a shard's columns into those of its samples. Token ids become int32.

    Raises:
        SchemaError: see `check`.
    """
    check(columns)
    samples: list[Columns] = [{} for _ in columns["finished"]]
    for column in COLUMNS:
        if column.name not in columns:
            continue
        values = columns[column.name]
        values = values.to(torch.int32) if values.dtype == torch.uint16 else values
        for sample, rows in zip(samples, _rows(column, values, columns), strict=True):
            if column.fill is None or not _is_filled(rows, column.fill):
                sample[column.name] = rows
    return samples


def check(columns: Mapping[str, Tensor]) -> None:
    """Check a shard's columns.

    Raises:
        SchemaError: a required column is missing, or one has a wrong dtype, shape or number of rows.
    """
    for column in COLUMNS:
        values = columns.get(column.name)
        if values is None:
            if column.required:
                raise SchemaError(f"column {column.name} is missing")
            continue
        if values.dtype not in column.dtypes or values.dim() != column.dims:
            raise SchemaError(f"column {column.name} is {values.dtype} with {values.dim()} dimensions")
        rows = len(columns["finished"]) if column.offsets is None else int(_known(columns, column.offsets)[-1])
        if len(values) != rows:
            raise SchemaError(f"column {column.name} has {len(values)} rows, not {rows}")


def _known(columns: Mapping[str, Tensor], offsets: str) -> Tensor:
    if offsets not in columns:
        raise SchemaError(f"column {offsets} is missing")
    return columns[offsets]


def _of_all(column: Column, samples: Sequence[Mapping[str, Tensor]]) -> list[Tensor] | None:
    """Return the column of every sample. Gaps get the fill value. None: the shard leaves the column out."""
    of_samples = [sample.get(column.name) for sample in samples]
    present = [values for values in of_samples if values is not None]
    if len(present) == len(of_samples):
        return present
    if not present or column.fill is None:
        if column.required:
            raise SchemaError(f"column {column.name} is missing")
        return None
    lengths = [len(sample["response_tokens"]) for sample in samples]
    gaps = (torch.full((n, *present[0].shape[1:]), column.fill, dtype=present[0].dtype) for n in lengths)
    return [gap if values is None else values for values, gap in zip(of_samples, gaps, strict=True)]


def _join(column: Column, values: list[Tensor]) -> Tensor:
    try:
        return torch.stack(values) if column.offsets is None else torch.cat(values)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(f"column {column.name} differs in shape between samples: {error}") from error


def _narrow(name: str, values: Tensor) -> Tensor:
    """Store ids in two bytes where all fit."""
    column = BY_NAME.get(name)
    if column is None or torch.uint16 not in column.dtypes or values.dtype != torch.int32 or values.numel() == 0:
        return values.contiguous()
    fits = int(values.min()) >= 0 and int(values.max()) < 1 << 16
    return values.to(torch.uint16) if fits else values.contiguous()


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _rows(column: Column, values: Tensor, columns: Mapping[str, Tensor]) -> list[Tensor]:
    if column.offsets is None:
        return list(values)
    return [values[first:last] for first, last in itertools.pairwise(columns[column.offsets].tolist())]


def _is_filled(rows: Tensor, fill: float) -> bool:
    return bool((rows.isnan() if fill != fill else rows == fill).any())
