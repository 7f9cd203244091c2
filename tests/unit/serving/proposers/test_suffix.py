"""Suffix decoding: matches, their continuations, the store of answers and its walls, and exact answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.proposers import answer_files
from distillspec.serving.proposers.answer_files import AnswerFiles
from distillspec.serving.proposers.suffix_index import LONGEST, SuffixIndex, continuation
from distillspec.serving.proposers.suffix_store import SuffixStore
from distillspec.serving.proposers.tenant_tables import OWNERS

from ..conftest import MakeEngine, hf_greedy, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def index_of(*texts: list[int], limit: int = 10_000) -> SuffixIndex:
    index = SuffixIndex(limit)
    for text in texts:
        index.add(text)
    return index


def places_of_the_longest_match(texts: list[list[int]], text: list[int]) -> tuple[list[list[int]], int]:
    """What follows each occurrence of the longest end of `text` of three tokens or more, and its length."""
    for match in range(min(len(text), LONGEST), 2, -1):
        rest = [
            other[end:]
            for other in texts
            for end in range(match, len(other))
            if other[end - match : end] == text[-match:]
        ]
        if rest:
            return rest, match
    return [], 0


def test_what_followed_the_longest_match_is_proposed() -> None:
    generator, lengths = torch.Generator().manual_seed(0), set()
    for _ in range(300):
        texts = [torch.randint(0, 4, (30,), generator=generator).tolist() for _ in range(4)]
        text = torch.randint(0, 4, (12,), generator=generator).tolist()
        found = continuation([index_of(*texts[:2]), index_of(*texts[2:])], text, 8, 0.3)
        alive, match = places_of_the_longest_match(texts, text)
        assert found.match == match
        count, expected = len(alive), 0.0
        for place in range(len(found.tokens) + 1):
            following = Counter(rest[place] for rest in alive if place < len(rest))
            best = max(following.values(), default=0)
            if place == len(found.tokens):
                assert place == min(8, match) or best < 0.3 * count or not best
                break
            assert following[found.tokens[place]] == best >= 0.3 * count
            alive = [rest for rest in alive if place < len(rest) and rest[place] == found.tokens[place]]
            expected += len(alive) / count
        assert found.expected == pytest.approx(expected)
        lengths.add(len(found.tokens))
    assert len(lengths) > 3


def test_the_most_frequent_token_is_proposed_and_a_rare_one_is_not() -> None:
    index = index_of(*[[7, 1, 2, 3, 4, 4, 4]] * 3, [7, 1, 2, 3, 5, 5, 5])
    found = continuation([index], [7, 1, 2, 3], 3, 0.1)
    assert (found.tokens, found.match, found.expected) == ((4, 4, 4), 4, 2.25)
    assert continuation([index], [7, 1, 2, 3], 3, 0.8).tokens == ()
    assert continuation([index], [9, 9, 2, 3], 3, 0.1).tokens == ()
    assert continuation([index], [1, 2], 3, 0.1).match == 0
    assert continuation([index], [4, 4, 4], 3, 0.1).tokens == (), "a text's end is no beginning of the next"


def test_a_match_bounds_the_proposal() -> None:
    index = index_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert continuation([index], [0, 1, 2, 3], 8, 0.1).tokens == (4, 5, 6)
    assert continuation([index], [1, 2, 3, 4, 5], 8, 0.1).tokens == (6, 7, 8, 9)


def test_old_texts_give_way() -> None:
    index = SuffixIndex(200)
    for number in range(100):
        index.add([number] * 3 + [1000 + number] * 6)
    assert len(index) <= 200
    assert continuation([index], [99] * 3, 4, 0.1).tokens == (1099,) * 3
    assert continuation([index], [5] * 3, 4, 0.1).tokens == ()


def test_texts_survive_a_restart_and_are_the_tenants_own(tmp_path: Path) -> None:
    store = SuffixStore(1000, 50, folder=str(tmp_path / "answers"))
    store.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    store.add(("b", ""), [1, 2, 3], [8, 8, 8, 8])
    again = SuffixStore(1000, 50, folder=str(tmp_path / "answers"))
    for tenant, wanted in (("a", (4, 5, 6)), ("b", (8, 8, 8)), ("c", ())):
        assert continuation([again.index((tenant, ""))], [1, 2, 3], 3, 0.1).tokens == wanted
    files = list((tmp_path / "answers").iterdir())
    assert len(files) == 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert (tmp_path / "answers").stat().st_mode & 0o777 == 0o700
    again.forget("a")
    assert len(list((tmp_path / "answers").iterdir())) == 1
    assert continuation([again.index(("a", ""))], [1, 2, 3], 3, 0.1).tokens == ()
    shared = SuffixStore(1000, 50, shared=True)
    shared.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    assert continuation([shared.index(("b", ""))], [1, 2, 3], 3, 0.1).tokens == (4, 5, 6)


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_text_that_a_crash_cut_off_is_left_out(tmp_path: Path, cut: int) -> None:
    files = AnswerFiles(tmp_path, 50)
    for text in ([1, 2, 3], [4, 5, 6]):
        files.append(("a", ""), text)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-cut])
    assert files.read(("a", ""), 100) == [[1, 2, 3]]
    files.append(("a", ""), [7, 8])
    assert files.read(("a", ""), 100) == [[1, 2, 3], [7, 8]]
    assert files.read(("a", ""), 3) == [[7, 8]], "the newest that fit"
    assert files.read(("a", ""), 100) == [[7, 8]]


def test_a_text_that_a_full_disk_cut_off_hides_none_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, owner = AnswerFiles(tmp_path, 50), ("a", "")
    files.append(owner, [1, 2, 3])
    opened = Path.open

    @contextmanager
    def full(path: Path, mode: str) -> Iterator[SimpleNamespace]:
        def write(packed: bytes) -> None:
            with opened(path, mode) as handle:
                handle.write(packed[:-5])
            raise OSError(28, "No space left on device")

        yield SimpleNamespace(write=write)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with pytest.raises(OSError, match="No space"):
            files.append(owner, [4, 5, 6])
    files.append(owner, [7, 8])
    assert files.read(owner, 100) == [[1, 2, 3], [7, 8]]


def test_no_text_of_a_deleted_tenant_stays(tmp_path: Path) -> None:
    """Nor in what a killed process left, nor in the files of a store that was shared before, or was not."""
    store = SuffixStore(1000, 50, folder=str(tmp_path))
    store.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    (own,) = tmp_path.iterdir()
    left = tmp_path / f".{own.name}.123.tmp"
    left.write_bytes(own.read_bytes())
    SuffixStore(1000, 50, folder=str(tmp_path), shared=True).add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    assert not left.exists(), "swept at the next start"
    left.write_bytes(own.read_bytes())
    store.forget("a")
    assert list(tmp_path.iterdir()) == []
    for shared in (False, True):
        SuffixStore(1000, 50, folder=str(tmp_path), shared=shared).add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    SuffixStore(1000, 50, folder=str(tmp_path), shared=True).forget("a")
    assert list(tmp_path.iterdir()) == []


def test_settings_that_cannot_be_are_refused(tmp_path: Path, target: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"proposer_options.tokens=5 must be at least 128"):
        SuffixStore(5, 50)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be used for answers"):
        SuffixStore(1000, 50, folder=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"proposer_options.merge=\['there'\] needs folder=FOLDER"):
        SuffixStore(1000, 50, merge=["there"])
    with pytest.raises(ConfigError, match="suffix has no option"):
        Engine(target, None, EngineSettings(proposer="suffix", proposer_options={"colour": 1}))


def test_a_folder_that_fails_ends_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SuffixStore(1000, 50, folder=str(tmp_path))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AnswerFiles, "append", full)
    store.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    assert continuation([store.index(("a", ""))], [1, 2, 3], 3, 0.1).tokens == (4, 5, 6)


@pytest.mark.parametrize("proposer", ["suffix", "suffix_else_model"])
def test_answers_are_those_without_and_a_repeated_prompt_takes_fewer_steps(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, proposer: str, tmp_path: Path
) -> None:
    asked = [prompt for prompt in prompts(6) if len(prompt) > 4]
    wanted = [hf_greedy(target, prompt, 24) for prompt in asked]
    options = {"folder": str(tmp_path)}
    with_model = draft if proposer == "suffix_else_model" else None
    steps = []
    for _ in range(2):  # a restart between them
        engine = make_engine(with_model, proposer=proposer, proposer_options=options, speculation_length=6)
        for _ in range(2):
            outputs = engine.generate(asked, replace(GREEDY, ignore_eos=False))
            assert [list(output.token_ids) for output in outputs] == wanted
            steps.append(sum(output.stats.steps for output in outputs))
        engine.check_integrity()
        engine.close()
    assert steps[0] > 1.3 * steps[1]
    assert steps[2] == steps[3] <= steps[1], "what was answered before the restart is known after it"


def test_tenants_see_nothing_of_each_other_and_deletion_reaches_the_store(
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(proposer="suffix", speculation_length=6)
    prompt = tuple(prompts(2)[1])

    def steps(name: str, tenant: str, **more: Any) -> int:
        engine.submit(Request(name, prompt, GREEDY, tenant=tenant, **more))
        while engine.has_work:
            for output in engine.step().finished:
                return output.stats.steps
        raise AssertionError

    first = steps("0", "a", log=False)
    assert steps("1", "a") == first, "what is kept out of logs is kept out of the store"
    known = steps("2", "a")
    assert known < first
    assert steps("3", "b") == first
    assert engine.keeps_answers
    engine.forget_tenant("a")
    assert steps("4", "a") == first
    assert steps("5", "b") < first, "another tenant's answers stay"


def test_a_new_draft_finds_the_answers_of_the_old_ones_time(
    target: LanguageModel, draft: LanguageModel, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(draft, proposer="suffix_else_model", speculation_length=6)
    prompt = prompts(2)[1]
    (first,) = engine.generate([prompt], GREEDY)
    engine.use_draft(initialise_draft(DraftConfig(layers=1), target))
    (again,) = engine.generate([prompt], GREEDY)
    assert again.token_ids == first.token_ids
    assert again.stats.steps < 24 / 2


def test_parties_of_one_tenant_and_excluded_tenants_are_kept_apart(tmp_path: Path) -> None:
    store = SuffixStore(1000, 50, folder=str(tmp_path), exclude=["secret"])
    store.add(("a", "x"), [1, 2, 3], [4, 5, 6, 7])
    store.add(("secret", ""), [1, 2, 3], [4, 5, 6, 7])
    assert continuation([store.index(("a", "y"))], [1, 2, 3], 3, 0.1).tokens == ()
    assert continuation([store.index(("secret", ""))], [1, 2, 3], 3, 0.1).tokens == ()
    assert len(list(tmp_path.iterdir())) == 1
    store.forget("a")
    assert list(tmp_path.iterdir()) == []


def test_texts_of_another_vocabulary_are_not_read(tmp_path: Path) -> None:
    for vocabulary in (100, 50):
        AnswerFiles(tmp_path, vocabulary).append(("a", ""), [1, 2, vocabulary - 1])
    assert AnswerFiles(tmp_path, 50).read(("a", ""), 100) == [[1, 2, 49]]
    AnswerFiles(tmp_path, 50).append(("a", ""), [1, 2, 70])
    assert AnswerFiles(tmp_path, 50).read(("a", ""), 100) == [[1, 2, 49]]


def test_files_are_cut_while_they_grow(tmp_path: Path) -> None:
    store = SuffixStore(128, 50, folder=str(tmp_path))
    for _ in range(200):
        store.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 3 * 128 * 4 * 2


def test_a_deletion_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SuffixStore(1000, 50, folder=str(tmp_path))
    store.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])

    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(AnswerFiles, "delete", refused)
    with pytest.raises(PermissionError, match="not permitted"):
        store.forget("a")


def test_a_client_with_a_new_salt_each_time_fills_neither_memory_nor_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_files, "FILES", 10)
    store = SuffixStore(1000, 50, folder=str(tmp_path))
    store.add(("quiet", ""), [1, 2, 3], [8, 8, 8, 8])
    kept = store.index(("quiet", ""))
    for salt in range(3 * OWNERS):
        store.add(("flood", str(salt)), [1, 2, 3], [4, 5, 6, 7])
    assert store.index(("quiet", "")) is kept, "a flood displaces its own texts in memory"
    assert len(list(tmp_path.iterdir())) == 10
    again = SuffixStore(1000, 50, folder=str(tmp_path))
    assert len(again.index(("quiet", ""))) > 0, "and on disk"
    newest = again.index(("flood", str(3 * OWNERS - 1)))
    assert continuation([newest], [1, 2, 3], 3, 0.1).tokens == (4, 5, 6)


def test_texts_of_replicas_are_merged_and_a_deletion_reaches_all_of_them(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("one", "two", "not there yet")]
    two = SuffixStore(1000, 50, folder=folders[1])
    two.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    two.add(("b", ""), [1, 2, 3], [8, 8, 8, 8])
    held = {file: file.read_bytes() for file in (tmp_path / "two").iterdir()}
    one = SuffixStore(1000, 50, folder=folders[0], merge=folders, exclude=["secret"])
    for tenant, wanted in (("a", (4, 5, 6)), ("b", (8, 8, 8)), ("c", ())):
        assert continuation([one.index((tenant, ""))], [1, 2, 3], 3, 0.1).tokens == wanted
    one.add(("a", ""), [11, 12, 13], [14, 15, 16])
    again = SuffixStore(1000, 50, folder=folders[0], merge=folders)
    for text, wanted in (([1, 2, 3], (4, 5, 6)), ([11, 12, 13], (14, 15, 16))):
        assert continuation([again.index(("a", ""))], text, 3, 0.1).tokens == wanted
    assert {file: file.read_bytes() for file in (tmp_path / "two").iterdir()} == held, "others' files stay as they are"
    again.forget("a")
    for folder in folders[:2]:
        assert len(SuffixStore(1000, 50, folder=folder, merge=folders).index(("a", ""))) == 0
    assert len(SuffixStore(1000, 50, folder=folders[0], merge=folders).index(("b", ""))) > 0
    assert len(SuffixStore(1000, 50, folder=folders[0], merge=folders, exclude=["b"]).index(("b", ""))) == 0


def test_merged_texts_have_the_room_that_its_own_leave(tmp_path: Path) -> None:
    owner, others = ("a", ""), [tmp_path / "two", tmp_path / "three"]
    for number, folder in enumerate(others):
        files = AnswerFiles(folder, 50)
        files.append(owner, [10 * number + 1, 10 * number + 2])
        files.append(owner, [10 * number + 3, 10 * number + 4])
        (file,) = folder.iterdir()
        os.utime(file, (1000 + number, 1000 + number))
    own = AnswerFiles(tmp_path / "one", 50, others)
    own.append(owner, [41, 42, 43])
    assert own.read(owner, 100) == [[1, 2], [3, 4], [11, 12], [13, 14], [41, 42, 43]]
    assert own.read(owner, 8) == [[11, 12], [13, 14], [41, 42, 43]]
    assert own.read(owner, 4) == [[41, 42, 43]]
    assert AnswerFiles(tmp_path / "one", 12, others).read(owner, 100) == []
