"""A shard of the log: an old one reads as a new one does, a newer one is skipped by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distillspec.data.shard_file import METADATA, ShardRefused
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.shard import LATER, ROW_FIELDS, load_shard, save_shard

from ..conftest import Answer


def save_old(path: Path, answers: Sequence[LoggedAnswer], key: LogKey) -> None:
    """Write a shard in the layout of version 1."""
    texts = [(*a.prompt_ids, *a.response_ids) for a in answers]
    tensors = {
        "tokens": torch.tensor(list(itertools.chain(*texts))).to(torch.uint16),
        "token_offsets": torch.tensor([0, *map(len, texts)]).cumsum(0),
        "row_offsets": torch.tensor([0, *map(len, answers)]).cumsum(0),
        "signal_ids": torch.cat([a.signal.ids for a in answers]).to(torch.uint16),
        "signal_logprobs": torch.cat([a.signal.logprobs for a in answers]).half(),
        "signal_tail": torch.cat([a.signal.tail for a in answers]).half(),
        **{name: torch.cat([getattr(a, name) for a in answers]) for name in ROW_FIELDS if name not in LATER},
    }
    names = ("request_id", "index", "tenant", "domain", "time_s", "finished", "draft_versions")
    own = [{name: getattr(a, name) for name in names} for a in answers]
    words = [{**each, "split": "train", "policy": asdict(a.policy)} for each, a in zip(own, answers, strict=True)]
    save_file(tensors, path, metadata={"distillspec_replay": json.dumps({"key": asdict(key), "answers": words})})


def assert_same(ours: LoggedAnswer, theirs: LoggedAnswer) -> None:
    for name in ROW_FIELDS:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=0, rtol=0, equal_nan=True)
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype, name
    for name in ("ids", "logprobs", "tail", "tail_ids", "tail_logprobs"):
        mine, other = getattr(ours.signal, name), getattr(theirs.signal, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert torch.equal(mine, other), name
            assert mine.dtype == other.dtype, name
    plain = dict.fromkeys(ROW_FIELDS)
    assert replace(ours, signal=None, **plain) == replace(theirs, signal=None, **plain)  # type: ignore[arg-type]


def test_an_old_shard_reads_as_a_new_one(tmp_path: Path, answer: Answer, key: LogKey) -> None:
    answers = [answer(f"r{i}", tokens=3 + i, finished=i == 1) for i in range(3)]
    save_old(tmp_path / "old", answers, key)
    unknown = [torch.full((len(a),), torch.nan, dtype=torch.float16) for a in answers]
    later = [replace(a, policy_logprobs=own, policy_log_z=own) for a, own in zip(answers, unknown, strict=True)]
    save_shard(tmp_path / "new", later, key)
    for old, new, was in zip(
        load_shard(tmp_path / "old", key), load_shard(tmp_path / "new", key), answers, strict=True
    ):
        assert_same(old, new)
        assert (old.request_id, old.finished, old.response_ids) == (was.request_id, was.finished, was.response_ids)
        assert old.signal.tail_ids is None


def test_redacted_ids_and_draws_come_back(tmp_path: Path, answer: Answer, key: LogKey) -> None:
    one = answer("a", tokens=4)
    one.signal.ids[1, 2] = -1
    draws = {
        "tail_ids": torch.tensor([[1], [-1], [2], [3]], dtype=torch.int32),
        "tail_logprobs": torch.zeros(4, 1).half(),
    }
    one = replace(one, signal=replace(one.signal, **draws))
    save_shard(tmp_path / "s", [one], key)
    (back,) = load_shard(tmp_path / "s", key)
    assert_same(back, replace(one, signal=replace(one.signal, tail=one.signal.tail.half().float())))


def test_a_newer_version_is_refused_by_its_number(tmp_path: Path, key: LogKey) -> None:
    content = {"version": 99, "samples": [], "common": {}}
    save_file({"finished": torch.zeros(0)}, tmp_path / "s", metadata={METADATA: json.dumps(content)})
    with pytest.raises(ShardRefused, match=r"s has shard version 99, .*; update distillspec or write the shard again"):
        load_shard(tmp_path / "s", key)


@pytest.mark.parametrize(("vocab_size", "limit"), [(49152, 320), (151_936, 500)])
def test_a_token_takes_less_than_half_a_kilobyte(answer: Answer, tmp_path: Path, vocab_size: int, limit: int) -> None:
    answers = [answer(f"r{i}", tokens=100, entries=64) for i in range(20)]
    save_shard(tmp_path / "s", answers, LogKey("w", "t", vocab_size, 64))
    assert (tmp_path / "s").stat().st_size / sum(map(len, answers)) <= limit
