"""Shards of version 1, brought to the columns of version 2.

In version 1 the teacher cache had the columns of version 2, but its metadata was grouped by field. The replay log had
prompt and response in one column, and `finished` in the metadata.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

CACHE, REPLAY = "distillspec", "distillspec_replay"
OLD_KEYS = (CACHE, REPLAY)  # of the JSON in the metadata of version 1


def upgraded_metadata(metadata: dict[str, str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the metadata of each sample and that common to all, from version 1."""
    if REPLAY in metadata:
        recorded = json.loads(metadata[REPLAY])
        return recorded["answers"], {"key": recorded["key"], "signal_kind": "topk"}
    recorded = json.loads(metadata[CACHE])
    rows = zip(recorded["prompt_ids"], recorded["domains"], recorded["sources"], strict=True)
    samples = [{"prompt_id": name, "domain": domain, "source": source} for name, domain, source in rows]
    return samples, {name: recorded[name] for name in ("signal_kind",) if name in recorded}


def upgraded_columns(columns: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Tensor]:
    """Return columns in the layout of version 2. Those of version 2 are returned as they are."""
    if REPLAY not in metadata:
        return columns
    finished = [answer["finished"] for answer in json.loads(metadata[REPLAY])["answers"]]
    moved = ("tokens", "token_offsets", "row_offsets")
    return {
        **{name: values for name, values in columns.items() if name not in moved},
        **_split_texts(*(columns[name] for name in moved)),
        "finished": torch.tensor(finished, dtype=torch.bool),
    }


def _split_texts(tokens: Tensor, token_offsets: Tensor, row_offsets: Tensor) -> dict[str, Tensor]:
    """Divide the joined texts: each one's last tokens, as many as it has rows, are the response."""
    lengths, responses = token_offsets.diff(), row_offsets.diff()
    indices = torch.arange(len(tokens)) - token_offsets[:-1].repeat_interleave(lengths)
    in_prompt = indices < (lengths - responses).repeat_interleave(lengths)
    ids = tokens.to(torch.int32)
    return {
        "prompt_tokens": ids[in_prompt],
        "prompt_offsets": token_offsets - row_offsets,
        "response_tokens": ids[~in_prompt],
        "response_offsets": row_offsets,
    }
