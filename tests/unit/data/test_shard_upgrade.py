"""Shards written before version 2 are read as they were meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from distillspec.data.shard_file import read_metadata, read_shard
from distillspec.data.shards import MANIFEST, ShardWriter, read_samples
from distillspec.files import sha256_of, write_json

KEY = {"seed": 0}
SIGNAL = {
    "signal_ids": torch.tensor([[5, 6], [7, 8], [9, 10]], dtype=torch.int32),
    "signal_logprobs": torch.tensor([[-1.0, -2.0]] * 3, dtype=torch.float16),
    "signal_tail": torch.tensor([0.1, 0.2, 0.3]),
}
DRAWS = {
    "tail_ids": torch.tensor([[1], [2], [-1]], dtype=torch.int32),
    "tail_logprobs": torch.tensor([[-4.0], [-5.0], [0.0]], dtype=torch.float16),
}


def old_cache(folder: Path, tensors: dict[str, Tensor], **fields: object) -> Path:
    """Write the folder as version 1 did: prompts (3, 4) and (), responses (11,) and (12, 70000)."""
    path = folder / "shard-00000.safetensors"
    texts = {
        "prompt_tokens": torch.tensor([3, 4], dtype=torch.int32),
        "prompt_offsets": torch.tensor([0, 2, 2]),
        "response_tokens": torch.tensor([11, 12, 70000], dtype=torch.int32),
        "response_offsets": torch.tensor([0, 1, 3]),
        "finished": torch.tensor([True, False]),
    }
    records = {"prompt_ids": ["p0", "p1"], "domains": ["a", "b"], "sources": ["teacher", "draft"], **fields}
    save_file(texts | tensors, path, metadata={"distillspec": json.dumps(records)})
    shard = {"file": path.name, "sha256": sha256_of(path), "sequences": 2, "response_tokens": 3}
    write_json(folder / MANIFEST, {"format_version": 1, "key": KEY, "shards": [shard], "complete": True})
    return path


def test_an_old_cache_is_read_and_continued(tmp_path: Path) -> None:
    old_cache(tmp_path, SIGNAL | DRAWS, signal_kind="topk")
    first, second = read_samples(tmp_path)
    assert (first.prompt_id, first.domain, first.source, first.finished) == ("p0", "a", "teacher", True)
    assert (second.prompt_id, second.domain, second.source, second.finished) == ("p1", "b", "draft", False)
    assert (first.prompt_ids, first.response_ids) == ((3, 4), (11,))
    assert (second.prompt_ids, second.response_ids) == ((), (12, 70000))
    assert first.writer_logprobs is None
    assert second.signal is not None
    assert second.signal.kind == "topk"
    assert torch.equal(second.signal.ids, SIGNAL["signal_ids"][1:])
    assert torch.equal(second.signal.logprobs, SIGNAL["signal_logprobs"][1:])
    assert torch.equal(second.signal.tail, SIGNAL["signal_tail"][1:])
    assert second.signal.tail_ids is not None
    assert second.signal.tail_logprobs is not None
    assert torch.equal(second.signal.tail_ids, DRAWS["tail_ids"][1:])
    assert torch.equal(second.signal.tail_logprobs, DRAWS["tail_logprobs"][1:])
    writer = ShardWriter(tmp_path, KEY, shard_sequences=3)
    assert writer.done_ids == {"p0", "p1"}
    writer.add(first)
    writer.flush(complete=True)
    assert [s.prompt_id for s in read_samples(tmp_path)] == ["p0", "p1", "p0"]


def test_an_old_cache_without_a_signal_knows_its_log_probabilities_in_part(tmp_path: Path) -> None:
    written = torch.tensor([torch.nan, -0.5, -2.0])
    old_cache(tmp_path, {"writer_logprobs": written})
    first, second = read_samples(tmp_path)
    assert first.signal is second.signal is None
    assert first.writer_logprobs is None
    assert second.writer_logprobs is not None
    assert torch.equal(second.writer_logprobs, written[1:])


@pytest.mark.parametrize("ids", [torch.uint16, torch.int32])
def test_an_old_log_is_split_into_prompts_and_responses(tmp_path: Path, ids: torch.dtype) -> None:
    tensors = {
        "tokens": torch.tensor([3, 4, 11, 12, 13, 14]).to(ids),  # (3, 4 | 11), (12 | 13, 14)
        "token_offsets": torch.tensor([0, 3, 6]),
        "row_offsets": torch.tensor([0, 1, 3]),
        "signal_ids": SIGNAL["signal_ids"].to(ids),
        "signal_logprobs": SIGNAL["signal_logprobs"],
        "signal_tail": SIGNAL["signal_tail"].half(),
    }
    recorded = {
        "key": {"entries": 2},
        "answers": [{"request_id": "r0", "finished": True}, {"request_id": "r1", "finished": False}],
    }
    save_file(tensors, tmp_path / "s", metadata={"distillspec_replay": json.dumps(recorded)})
    (first, second), read = read_shard(tmp_path / "s")
    assert read == read_metadata(tmp_path / "s")
    assert read.common == {"key": {"entries": 2}, "signal_kind": "topk"}
    assert [own["request_id"] for own in read.samples] == ["r0", "r1"]
    assert (first["prompt_tokens"].tolist(), first["response_tokens"].tolist()) == ([3, 4], [11])
    assert (second["prompt_tokens"].tolist(), second["response_tokens"].tolist()) == ([12], [13, 14])
    assert [bool(own["finished"]) for own in (first, second)] == [True, False]
    assert torch.equal(second["signal_ids"], SIGNAL["signal_ids"][1:])
    assert torch.equal(second["signal_tail"], SIGNAL["signal_tail"][1:].half())
