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

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.shape import PlannedTree, TreeShape
from distillspec.serving.base.tree import SUFFIX
from distillspec.serving.proposers import answer_files
from distillspec.serving.proposers.answer_files import AnswerFiles
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.suffix import SuffixLookup
from distillspec.serving.proposers.suffix_index import find_matches
from distillspec.serving.proposers.suffix_store import SuffixStore
from distillspec.serving.proposers.tenant_tables import OWNERS

from ..conftest import MakeEngine, hf_greedy, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def text_of(tokens: list[int], name: str = "t", stop: frozenset[int] = frozenset()) -> SequenceState:
    return SequenceState(name, Request(name, (1,)), 0, 0, list(tokens), stop, 20)


def known(*texts: list[int], **options: Any) -> SuffixLookup:
    """A proposer that has answered with these texts."""
    store = SuffixStore(1000, 50)
    for text in texts:
        store.add(("default", ""), [], text)
    return SuffixLookup(store, **options)


def test_what_followed_is_proposed_in_trees_that_are_named_with_their_chances() -> None:
    proposer = known(*[[1, 2, 3, 4, 5]] * 3, [1, 2, 3, 6, 7], [1, 2, 3, 6, 8])
    text = text_of([9, 1, 2, 3])
    (option,) = proposer.foreseen(text)
    likely = option.likely
    assert option.wide
    assert likely is not None
    kept = likely.chances[0] / (3 / 5)
    assert likely.chances == pytest.approx([kept * 3 / 5, kept**2 * 3 / 5, kept * 2 / 5, *[kept**2 / 5] * 2])
    assert (likely.parents, likely.depths) == ((-1, 0, -1, 2, 2), (1, 2, 1, 2, 2))
    for count in range(1, 6):
        (found,) = proposer.propose([ProposalRequest(text, (PlannedTree(SUFFIX, likely.first(count).shape),))])
        assert len(found) == count, "what is named is what is proposed"
    assert dict(zip(found.tokens, found.parents, strict=True)).keys() == {4, 5, 6, 7, 8}
    assert {(group.source, group.kind) for group in found.groups} == {(SUFFIX, "deterministic")}
    (ended,) = proposer.propose(
        [ProposalRequest(text_of([1, 2, 3], "s", frozenset([4])), (PlannedTree(SUFFIX, TreeShape.full((1, 1))),))]
    )
    assert ended.tokens == (4,)


def test_chains_alone_are_named_without_siblings_and_a_match_bounds_them() -> None:
    texts = [*[[1, 2, 3, 4, 5, 6, 7]] * 3, [1, 2, 3, 9, 9, 9, 9]]
    (option,) = known(*texts, wide=False, depth=8).foreseen(text_of([0, 1, 2, 3]))
    assert not option.wide
    assert option.likely is not None
    assert (option.likely.parents, option.limit) == ((-1, 0, 1), 3), "as many as match"


def test_chances_follow_what_is_accepted_behind_matches_as_long() -> None:
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 3
    proposer, short, long = known(*texts), text_of([0, 1, 2, 3], "a"), text_of([1, 2, 3, 4, 5, 6], "b")
    chance = {}
    for moment in ("before", "after"):
        for name, text in (("short", short), ("long", long)):
            likely = proposer.foreseen(text)[0].likely
            chance[name, moment] = likely.chances[0] if likely is not None and likely.chances else 0.0
        for _ in range(20):
            (found,) = proposer.propose([ProposalRequest(short, (PlannedTree(SUFFIX, TreeShape.full((1,))),))])
            proposer.committed(short, found, ())
    assert chance["short", "after"] < 0.6 * chance["short", "before"]
    assert chance["long", "after"] == chance["long", "before"] > 0.5


def test_texts_survive_a_restart_and_are_the_tenants_own(tmp_path: Path) -> None:
    store = SuffixStore(1000, 50, folder=str(tmp_path / "answers"))
    store.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    store.add(("b", ""), [1, 2, 3], [8, 8, 8, 8])
    again = SuffixStore(1000, 50, folder=str(tmp_path / "answers"))
    for tenant, wanted in (("a", (4, 5, 6)), ("b", (8, 8, 8)), ("c", ())):
        assert find_matches([again.index((tenant, ""))], [1, 2, 3]).continuation(3, 0.1).tokens == wanted
    files = list((tmp_path / "answers").iterdir())
    assert len(files) == 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert (tmp_path / "answers").stat().st_mode & 0o777 == 0o700
    again.forget("a")
    assert len(list((tmp_path / "answers").iterdir())) == 1
    assert find_matches([again.index(("a", ""))], [1, 2, 3]).continuation(3, 0.1).tokens == ()
    shared = SuffixStore(1000, 50, shared=True)
    shared.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    assert find_matches([shared.index(("b", ""))], [1, 2, 3]).continuation(3, 0.1).tokens == (4, 5, 6)


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
    assert find_matches([store.index(("a", ""))], [1, 2, 3]).continuation(3, 0.1).tokens == (4, 5, 6)


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


@pytest.mark.parametrize(
    "options",
    [
        {"proposer": "suffix", "lengths": "step"},
        {"proposer": "suffix", "max_time_per_token_s": 10.0},
        {"proposer": ["ngram", "suffix", "draft_model"]},
        {"proposer": ["suffix", "draft_model"], "tree": "off"},
    ],
)
def test_it_drafts_in_chains_within_bounds_and_beside_others(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    asked = [prompt for prompt in prompts(6) if len(prompt) > 4]
    wanted = [hf_greedy(target, prompt, 24) for prompt in asked]
    settings = {"controller": "goodput", "speculation_length": 6, "measure_costs_s": 0.0, **options}
    engine = make_engine(draft if "draft_model" in options["proposer"] else None, **settings)
    drafted = Counter[str]()
    for _ in range(3):
        for prompt, tokens in zip(asked, wanted, strict=True):
            (output,) = engine.generate([prompt], replace(GREEDY, ignore_eos=False))
            assert list(output.token_ids) == tokens
            drafted.update(output.stats.accepted_by_source)
    assert drafted["suffix"] + drafted["ngram"] > 10
    engine.check_integrity()


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
    assert find_matches([store.index(("a", "y"))], [1, 2, 3]).continuation(3, 0.1).tokens == ()
    assert find_matches([store.index(("secret", ""))], [1, 2, 3]).continuation(3, 0.1).tokens == ()
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
    assert find_matches([newest], [1, 2, 3]).continuation(3, 0.1).tokens == (4, 5, 6)


def test_texts_of_replicas_are_merged_and_a_deletion_reaches_all_of_them(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("one", "two", "not there yet")]
    two = SuffixStore(1000, 50, folder=folders[1])
    two.add(("a", ""), [1, 2, 3], [4, 5, 6, 7])
    two.add(("b", ""), [1, 2, 3], [8, 8, 8, 8])
    held = {file: file.read_bytes() for file in (tmp_path / "two").iterdir()}
    one = SuffixStore(1000, 50, folder=folders[0], merge=folders, exclude=["secret"])
    for tenant, wanted in (("a", (4, 5, 6)), ("b", (8, 8, 8)), ("c", ())):
        assert find_matches([one.index((tenant, ""))], [1, 2, 3]).continuation(3, 0.1).tokens == wanted
    one.add(("a", ""), [11, 12, 13], [14, 15, 16])
    again = SuffixStore(1000, 50, folder=folders[0], merge=folders)
    for text, wanted in (([1, 2, 3], (4, 5, 6)), ([11, 12, 13], (14, 15, 16))):
        assert find_matches([again.index(("a", ""))], text).continuation(3, 0.1).tokens == wanted
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
