"""Samples on disk: exact, resumable, and refused when damaged or somebody else's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from distillspec.data.shard_file import METADATA
from distillspec.data.shards import ShardWriter, read_samples, recorded_seconds
from distillspec.errors import ConfigError, RunError
from distillspec.files import sha256_of, write_text
from distillspec.signals import HiddenSignal, Signal, TeacherSignal
from distillspec.types import ModelIdentity, Sample, StateRequest

IDENTITY = ModelIdentity("tokens", 100, "weights")
KEY: dict[str, Any] = {"target": {"tokenizer_hash": "tokens", "weights_hash": "weights"}, "seed": 0}


def sample(number: int, kind: str | None = "topk", length: int | None = None) -> Sample:
    length = number % 4 + 1 if length is None else length
    generator = torch.Generator().manual_seed(number)
    signal: Signal | None = None
    if kind == "hidden":
        signal = HiddenSignal(
            torch.randn(length, 5, generator=generator).to(torch.float16), torch.rand(length, generator=generator)
        )
    elif kind is not None:
        signal = TeacherSignal(
            kind,  # type: ignore[arg-type]
            torch.randint(0, 100, (length, 3), generator=generator, dtype=torch.int32),
            torch.randn(length, 3, generator=generator).to(torch.float16),
            torch.rand(length, generator=generator),
        )
    ids = torch.randint(0, 100, (length + 2,), generator=generator).tolist()
    return Sample(f"p{number}", f"d{number % 2}", tuple(ids[:2]), tuple(ids[2:]), signal, "teacher", number % 3 > 0)


def write(folder: Path, numbers: range, key: dict[str, Any] = KEY, kind: str | None = "topk") -> ShardWriter:
    writer = ShardWriter(folder, key, shard_sequences=3)
    for number in numbers:
        if f"p{number}" not in writer.done_ids:
            writer.add(sample(number, kind))
    writer.flush(complete=True)
    return writer


def assert_same(ours: Sample, theirs: Sample) -> None:
    assert replace(ours, signal=None) == replace(theirs, signal=None)
    assert (ours.signal is None) == (theirs.signal is None)
    if ours.signal is not None and theirs.signal is not None:
        assert ours.signal.kind == theirs.signal.kind
        for name in ("hidden", "log_z") if ours.signal.kind == "hidden" else ("ids", "logprobs", "tail"):
            assert torch.equal(getattr(ours.signal, name), getattr(theirs.signal, name))


@pytest.mark.parametrize("kind", ["topk", "sampled", "hidden", None])
def test_what_is_written_comes_back(tmp_path: Path, kind: str | None) -> None:
    writer = write(tmp_path, range(8), kind=kind)
    samples = read_samples(tmp_path, IDENTITY)
    assert len(samples) == 8
    for number, read in enumerate(samples):
        assert_same(read, sample(number, kind))
    assert writer.response_tokens == sum(len(s.response_ids) for s in samples)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 3


def test_writing_goes_on_after_an_interruption(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, KEY, shard_sequences=3)
    for number in range(7):
        writer.add(sample(number))  # 6 in two shards, the seventh is lost with the process
    (tmp_path / "shard-00002.safetensors").write_bytes(b"never entered in the manifest")
    again = ShardWriter(tmp_path, KEY, shard_sequences=3)
    assert again.done_ids == {f"p{i}" for i in range(6)}
    assert not again.complete
    write(tmp_path, range(9))
    assert sorted(s.prompt_id for s in read_samples(tmp_path, IDENTITY)) == [f"p{i}" for i in range(9)]
    assert ShardWriter(tmp_path, KEY, shard_sequences=3).complete


def test_a_folder_tells_how_long_its_samples_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded_seconds(tmp_path) is None
    clock = iter((10.0, 30.0, 100.0, 105.0))  # opened and written, twice
    monkeypatch.setattr("distillspec.data.shards.time", SimpleNamespace(monotonic=lambda: next(clock)))
    for number in (0, 1):
        writer = ShardWriter(tmp_path, KEY, shard_sequences=3)
        writer.add(sample(number))
        writer.flush()
    assert recorded_seconds(tmp_path) == 25.0


def test_a_finished_folder_is_written_only_if_something_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(4))
    finished = ShardWriter(tmp_path, KEY, shard_sequences=3)

    def refuse(*args: object) -> None:
        raise RunError("cannot write")

    monkeypatch.setattr("distillspec.data.shards.write_json", refuse)
    finished.flush(complete=True)
    with pytest.raises(RunError, match="cannot write"):
        finished.flush()  # it is finished no longer


@pytest.mark.parametrize("damage", ["cut", "missing", "flip"])
def test_a_damaged_shard_is_refused_when_read_and_made_again_when_written(tmp_path: Path, damage: str) -> None:
    write(tmp_path, range(8))
    shard = tmp_path / "shard-00001.safetensors"
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content[:-9] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"shard-00001\.safetensors is damaged or missing") as refused:
        read_samples(tmp_path, IDENTITY)
    assert "\n" not in str(refused.value)
    opened = ShardWriter(tmp_path, KEY, shard_sequences=3)
    assert opened.done_ids == {f"p{i}" for i in (0, 1, 2, 6, 7)}
    assert not opened.complete
    write(tmp_path, range(8))
    samples = {s.prompt_id: s for s in read_samples(tmp_path, IDENTITY)}
    assert len(samples) == 8
    for number in range(8):
        assert_same(samples[f"p{number}"], sample(number))


@pytest.mark.parametrize("name", ["tokenizer_hash", "weights_hash"])
def test_another_targets_samples_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, range(2))
    with pytest.raises(ConfigError, match=f"made with another target .{name} "):
        read_samples(tmp_path, replace(IDENTITY, **{name: "other"}))


def test_another_key_is_refused_by_the_setting_that_differs(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    with pytest.raises(ConfigError, match="holds samples of seed=0, not 1"):
        ShardWriter(tmp_path, {**KEY, "seed": 1}, shard_sequences=3)
    with pytest.raises(ConfigError, match="holds samples of policy=None"):
        ShardWriter(tmp_path, {**KEY, "policy": {"top_p": 0.5}}, shard_sequences=3)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no manifest\.json"):
        read_samples(tmp_path)


def test_an_unreadable_manifest_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    write_text(tmp_path / "manifest.json", '{"shards": [')
    for attempt in (lambda: read_samples(tmp_path), lambda: ShardWriter(tmp_path, KEY, 3)):
        with pytest.raises(ConfigError, match=r"manifest\.json is not readable"):
            attempt()


def test_a_full_disk_is_one_line_and_what_was_complete_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(3))

    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("distillspec.data.shard_file.save_file", full)
    with pytest.raises(RunError, match="the disk is full"):
        write(tmp_path, range(6))
    assert [s.prompt_id for s in read_samples(tmp_path, IDENTITY)] == ["p0", "p1", "p2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "shard-00000.safetensors"]


def test_samples_without_responses_make_no_shard(tmp_path: Path) -> None:
    ShardWriter(tmp_path, KEY, shard_sequences=3).flush(complete=True)
    assert read_samples(tmp_path, IDENTITY) == []


def test_how_likely_tokens_were_when_drawn_comes_back_where_it_is_known(tmp_path: Path) -> None:
    known = replace(sample(2, None), writer_logprobs=torch.tensor([-0.5, -2.0, -torch.inf]))
    writer = ShardWriter(tmp_path, KEY, shard_sequences=3)
    for one in (sample(1, None), known):
        writer.add(one)
    writer.flush()
    first, second = read_samples(tmp_path, IDENTITY)
    assert first.writer_logprobs is None
    assert second.writer_logprobs is not None
    assert known.writer_logprobs is not None
    assert torch.equal(second.writer_logprobs, known.writer_logprobs)


def test_a_shard_of_a_newer_version_is_refused_by_reader_and_writer(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    shard = tmp_path / "shard-00000.safetensors"
    content = {"version": 99, "samples": [], "common": {}}
    save_file({"finished": torch.zeros(0)}, shard, metadata={METADATA: json.dumps(content)})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["shards"][0]["sha256"] = sha256_of(shard)
    write_text(tmp_path / "manifest.json", json.dumps(manifest))
    for attempt in (lambda: read_samples(tmp_path), lambda: ShardWriter(tmp_path, KEY, 3)):
        with pytest.raises(ConfigError, match=r"shard-00000\.safetensors has shard version 99, .*; update") as refused:
            attempt()
        assert "\n" not in str(refused.value)


def with_states(number: int, precision: str = "bf16") -> Sample:
    own = sample(number)
    values = torch.randn(len(own) - 1, 6, generator=torch.Generator().manual_seed(number))
    return replace(own, states=StateRequest((2, 4), precision).record(values))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("room", "kept"), [(0, 0), (1, 3), (1e9, 8)])
def test_states_come_back_as_far_as_there_is_room(tmp_path: Path, room: float, kept: int, precision: str) -> None:
    writer = ShardWriter(tmp_path, KEY, shard_sequences=3)
    for number in range(8):
        writer.add(with_states(number, precision))
    writer.flush(complete=True)
    samples = read_samples(tmp_path, IDENTITY, room)
    for number, found in enumerate(samples):
        assert_same(replace(found, states=None), sample(number))
        wanted = with_states(number, precision).states
        assert (found.states is not None) == (number < kept)
        if found.states is not None and wanted is not None:
            assert found.states.ids == wanted.ids
            assert torch.equal(found.states.values.float(), wanted.values.float())
            assert found.states.values.dtype == wanted.values.dtype
            assert torch.equal(found.states.of((4, 2)), wanted.of((4, 2)))


def test_a_shard_with_states_of_some_samples_keeps_those(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, KEY, shard_sequences=3)
    for own in (with_states(0), sample(1), with_states(2), with_states(3)):
        writer.add(own)
    writer.flush(complete=True)
    assert [s.states is not None for s in read_samples(tmp_path, IDENTITY, 1e9)] == [True, False, True, True]


def test_a_shard_keeps_states_of_the_kind_that_most_have(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, KEY, shard_sequences=4)
    for own in (with_states(0, "fp8"), with_states(1), sample(2), with_states(3)):
        writer.add(own)
    writer.flush(complete=True)
    found = read_samples(tmp_path, IDENTITY, 1e9)
    assert [s.states is not None for s in found] == [False, True, False, True]
    assert found[3].states is not None
    assert found[3].states.scales is None
