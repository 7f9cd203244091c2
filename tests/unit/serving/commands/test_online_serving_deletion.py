"""After a deletion a tenant's text is nowhere: not in an object of the server, a cache, a table or a file."""

from __future__ import annotations

import gc
import json
import random
import string
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses import FakeTensor

from distillspec.serving.proposers.base import caches_of

from ..server.conftest import ADMIN_KEY
from .conftest import KEYS, Learning, StartLearning

LETTERS, SEED = 24, 11  # of the marker
CLIENT = """
import json, random, string, sys, urllib.request
base, key, letters, seed, requests = json.loads(sys.stdin.read())
marker = "".join(random.Random(seed).choices(string.ascii_lowercase, k=letters))
turns = [{"role": "user", "content": marker}]
for number in range(requests):
    for path, text in (("completions", {"prompt": marker}), ("chat/completions", {"messages": turns})):
        body = {"model": "tiny", "max_tokens": 16, "seed": number, "ignore_eos": True, "stream": number == 1, **text}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{base}/v1/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=100) as reply:
            reply.read()
"""


def marker() -> str:
    return "".join(random.Random(SEED).choices(string.ascii_lowercase, k=LETTERS))


def plant(running: Learning, requests: int = 3) -> None:
    """Send the marker as alice's prompts, by completions and chat, whole and streamed, from another process."""
    order = json.dumps([running.url, KEYS["alice"], LETTERS, SEED, requests])
    subprocess.run([sys.executable, "-c", CLIENT], input=order, text=True, check=True, timeout=100)
    running.wait_until_idle()
    running.adaptation.writer.flush()


def in_memory(text: str, ids: Sequence[int]) -> list[str]:
    """Return the kinds of objects of this process that hold the text, or its token ids one after another."""
    gc.collect()
    mine = {id(text), id(ids)}
    found = []
    for holder in gc.get_objects():
        for value in (holder, *_untracked(holder)):
            if id(value) not in mine and _shows(value, text, ids):
                found.append(f"{type(value).__name__} in {type(holder).__qualname__}: {str(holder)[:200]}")
    return found


def _untracked(holder: Any) -> Iterator[Any]:
    """Yield what an object refers to and the collector does not list by itself, tuples in tuples too."""
    for value in gc.get_referents(holder):
        if not gc.is_tracked(value):
            yield value
            if type(value) is tuple:
                yield from _untracked(value)


def _shows(value: Any, text: str, ids: Sequence[int]) -> bool:
    if isinstance(value, str):
        return text in value
    if isinstance(value, bytes | bytearray):
        return text.encode() in value
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return _has(_numbers(value), ids)
    if isinstance(value, list | tuple | deque | array) and len(value) >= len(ids) and type(value[0]) is int:
        return _has(list(value), ids)
    return False


def _numbers(value: torch.Tensor | numpy.ndarray) -> list[int]:
    """Return the integers of a tensor or an array, nothing of one that holds others."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor):  # of code that was compiled before, without values
            return []
        read = value.layout is torch.strided and value.device.type == "cpu" and value.dtype is not torch.bool
        return value.flatten().tolist() if read and not (value.is_floating_point() or value.is_complex()) else []
    return value.ravel().tolist() if value.dtype.kind in "iu" else []


def _has(values: list[Any], ids: Sequence[int]) -> bool:
    start = -1
    while ids[0] in values[start + 1 :]:
        start = values.index(ids[0], start + 1)
        if values[start : start + len(ids)] == list(ids):
            return True
    return False


def in_files(folder: Path, text: str, ids: Sequence[int]) -> list[str]:
    kinds = (torch.uint8, torch.uint16, torch.int32, torch.int64)
    marks = [text.encode(), *(torch.tensor(ids).to(kind).numpy().tobytes() for kind in kinds)]
    marks += [separator.join(map(str, ids)).encode() for separator in (",", ", ")]
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [str(file) for file in files if any(mark in file.read_bytes() for mark in marks)]


def values_in_caches(running: Learning) -> int:
    engine = running.state.engine
    caches = [engine.runner.cache, *caches_of(engine.proposer)]
    return sum(int(held.count_nonzero()) for cache in caches for held in cache.tensors())


@pytest.mark.parametrize("proposer", [["suffix", "ngram", "draft_model"]])
def test_a_tenants_text_is_nowhere_after_its_deletion(
    learn: StartLearning, tmp_path: Path, proposer: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    running = learn("decoupled", engine={"proposer": proposer}, positions="verified")
    plant(running)
    running.state.engine.proposer.flush()  # type: ignore[union-attr]
    text = marker()
    ids = running.state.engine.target.text_tokenizer(text)["input_ids"][-LETTERS:]
    assert len(ids) == LETTERS
    assert running.adaptation.replay.export(tmp_path / "exported" / "all") == 6
    assert in_files(tmp_path / "exported", text, ids)
    assert in_memory(text, ids), "the search finds what is there"
    assert in_files(tmp_path, text, ids)
    assert values_in_caches(running) > 0
    reply = running.admin("POST", "replay/delete", {"tenant": "alice"})
    assert reply == {"tenant": "alice", "deleted": 6}
    running.wait_until_idle()
    assert in_memory(text, ids) == []
    assert in_files(tmp_path, text, ids) == []
    assert values_in_caches(running) == 0
    assert text not in caplog.text
    for path in ("/metrics", "/"):
        page = running.http.get(path, headers={"Authorization": f"Bearer {ADMIN_KEY}"}).text
        assert text not in page
    assert running.admin("GET", "replay")["tenants"] == {}
    running.ask(2, "bob")
