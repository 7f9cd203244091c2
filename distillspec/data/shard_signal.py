"""A teacher's signal as columns of a shard."""

from __future__ import annotations

from typing import Any

import torch

from distillspec.data.shard_schema import Columns
from distillspec.signals import HiddenSignal, Signal, TeacherSignal


def signal_columns(signal: Signal) -> Columns:
    """Return a signal in the dtypes of the shard schema. The tail keeps float32."""
    if isinstance(signal, HiddenSignal):
        return {"hidden": signal.hidden, "log_z": signal.log_z}
    columns = {
        "signal_ids": signal.ids.to(torch.int32),
        "signal_logprobs": signal.logprobs.to(torch.float16),
        "signal_tail": signal.tail.to(torch.float32),
    }
    if signal.tail_ids is not None and signal.tail_logprobs is not None:
        columns |= {
            "tail_ids": signal.tail_ids.to(torch.int32),
            "tail_logprobs": signal.tail_logprobs.to(torch.float16),
        }
    return columns


def signal_of(columns: Columns, common: dict[str, Any]) -> Signal | None:
    """Return the signal in a sample's columns. None: its shard has none."""
    if "hidden" in columns:
        return HiddenSignal(columns["hidden"], columns["log_z"])
    if "signal_ids" not in columns:
        return None
    return TeacherSignal(
        common["signal_kind"],
        columns["signal_ids"],
        columns["signal_logprobs"],
        columns["signal_tail"].float(),
        columns.get("tail_ids"),
        columns.get("tail_logprobs"),
    )
