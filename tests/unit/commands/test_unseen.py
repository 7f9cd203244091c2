"""A draft is not judged on prompts it was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.commands.held_out import prepare_held_out
from distillspec.commands.init_draft import read_texts
from distillspec.commands.prompt_folder import prepare_folder
from distillspec.commands.unseen import known_before
from distillspec.config import DataConfig, DraftConfig, InitDraftCommand
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet, prompt_key
from distillspec.data.trained_prompts import trained_prompts, with_trained_prompts
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, load_draft, save_draft
from distillspec.types import Prompt, SamplingPolicy

PROMPTS = [Prompt(str(i), (1, 20 + i)) for i in range(8)]
CONFIG = DataConfig(eval_prompts=4, max_new_tokens=4)


def keys(prompts: list[Prompt]) -> frozenset[str]:
    return frozenset(prompt_key(p.token_ids) for p in prompts)


def ids(prompts: list[Prompt]) -> list[tuple[int, ...]]:
    return [p.token_ids for p in prompts]


def test_a_draft_remembers_its_prompts_on_disk_and_those_it_began_with(target: LanguageModel, tmp_path: Path) -> None:
    first = with_trained_prompts(initialise_draft(DraftConfig(layers=1), target), ids(PROMPTS[:2]))
    save_draft(first, tmp_path / "run" / "draft", target)
    begun_with = DraftConfig(kind="pretrained", path=str(tmp_path / "run"))
    assert known_before(begun_with) == keys(PROMPTS[:2])
    assert known_before(DraftConfig()) == frozenset()
    second = with_trained_prompts(initialise_draft(begun_with, target), ids(PROMPTS[1:5]))
    save_draft(second, tmp_path / "second", target)
    assert trained_prompts(load_draft(tmp_path / "second", target).lineage) == keys(PROMPTS[:5])


def test_held_out_prompts_of_a_folder_that_were_trained_on_are_left_out(
    target: LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = DataFolder(tmp_path)
    folder.write_prompts(PromptSet((), tuple(PROMPTS)))
    judged = prepare_held_out(CONFIG, SamplingPolicy(), target, folder, 0, keys(PROMPTS[:3]))
    assert [sample.prompt_id for sample in judged] == ["3", "4", "5", "6"]
    assert "left out 3 held-out prompts: a draft was trained on or chosen by them" in capsys.readouterr().out
    fewer = prepare_held_out(CONFIG, SamplingPolicy(), target, folder, 0, keys(PROMPTS[:6]))
    assert len(fewer) == 2
    assert "only 2 held-out prompts of data.eval_prompts=4" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a draft was trained on or chosen by all held-out prompts; give others"):
        prepare_held_out(CONFIG, SamplingPolicy(), target, folder, 0, keys(PROMPTS))


def test_text_to_choose_a_vocabulary_by_is_not_the_held_out(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DataFolder(tmp_path)
    folder.write_prompts(PromptSet(tuple(PROMPTS[:3]), tuple(PROMPTS[3:])))
    monkeypatch.setattr("distillspec.commands.init_draft.prepare_folder", lambda *args: folder)
    config = InitDraftCommand(data=DataConfig(max_new_tokens=4))
    assert {sample.prompt_id for sample in read_texts(config, target, tmp_path)} == {"0", "1", "2"}


def test_the_target_writes_other_prompts_for_a_draft_that_knows_some(target: LanguageModel, tmp_path: Path) -> None:
    config = DataConfig(num_prompts=12, eval_prompts=4)
    first = prepare_folder(config, target, tmp_path / "first", 0).read_prompts()
    known = keys([*first.train, *first.held_out])
    again = prepare_folder(config, target, tmp_path / "again", 0).read_prompts()
    assert keys([*again.train, *again.held_out]) == known
    other = prepare_folder(config, target, tmp_path / "other", 0, known).read_prompts()
    assert (len(other.train), len(other.held_out)) == (12, 4)
    assert not keys([*other.train, *other.held_out]) & known
