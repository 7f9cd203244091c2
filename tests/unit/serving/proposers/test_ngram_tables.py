"""Tables by tenant: what is written when, and what outlives a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from distillspec.errors import RunError
from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.proposers.ngram_tables import KEEP_S, NgramTables

from ..conftest import MakeEngine, prompts

A, B = ("a", ""), ("b", "")
TEXT = [1, 2, 1, 3]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tables(folder: Path, clock: Clock | None = None) -> NgramTables:
    made = NgramTables(2, 101, clock or Clock())
    made.keep_in(folder, 50)
    return made


def files(folder: Path) -> int:
    return len(list(folder.glob("*.ngrams")))


def test_tables_that_changed_are_written_now_and_then_without_waiting(tmp_path: Path) -> None:
    clock = Clock()
    kept, until = tables(tmp_path, clock), time.monotonic() + 60
    kept.learn(A, TEXT, 1, 4)
    kept.learn(B, TEXT, 1, 4)
    assert files(tmp_path) == 0
    clock.now = KEEP_S
    while files(tmp_path) < 2 and time.monotonic() < until:
        kept.learn(A, TEXT, 1, 2)
        time.sleep(0.001)
    kept.flush()
    again = tables(tmp_path)
    for owner in (A, B):
        assert again.of(owner).shares([1]) == kept.of(owner).shares([1]) != {}
    assert again.of(("a", "salt")).shares([1]) == {}


def test_a_tenant_that_is_forgotten_is_in_no_table_and_no_file_again(tmp_path: Path) -> None:
    kept = tables(tmp_path)
    for owner in (A, B):
        kept.learn(owner, TEXT, 1, 4)
    kept.flush()
    kept.learn(A, TEXT, 1, 4)  # to be written
    kept.forget("a")
    kept.flush()
    assert files(tmp_path) == 1
    assert kept.of(A).shares([1]) == tables(tmp_path).of(A).shares([1]) == {}
    assert tables(tmp_path).of(B).shares([1]) != {}


def test_the_first_folder_is_kept_and_without_one_nothing_is_written(tmp_path: Path) -> None:
    kept = NgramTables(2, 101)
    kept.learn(A, TEXT, 1, 4)
    kept.flush()
    kept.keep_in(tmp_path / "one", 50)
    kept.keep_in(tmp_path / "two", 50)
    kept.learn(A, TEXT, 1, 4)
    kept.flush()
    assert [file.name for file in tmp_path.iterdir()] == ["one"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be used for answers"):
        NgramTables(2, 101).keep_in(tmp_path / "file", 50)


def test_an_engine_that_starts_again_proposes_what_it_had_learnt(
    target: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    prompt = tuple(prompts(2)[1])
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"folder": str(tmp_path)}

    def steps(engine: Engine, tenant: str) -> tuple[int, tuple[int, ...]]:
        engine.submit(Request(tenant, prompt, greedy, tenant=tenant))
        (output,) = engine.run_until_done([tenant]).values()
        return output.stats.steps, output.token_ids

    found = []
    for folder in (options, options, {}):
        engine = make_engine(proposer="ngram", proposer_options=folder, speculation_length=4)
        found.append(steps(engine, "a"))
        engine.close()
    assert len({text for _, text in found}) == 1
    assert found[1][0] < found[0][0] == found[2][0]
