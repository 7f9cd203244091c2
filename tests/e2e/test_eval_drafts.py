"""Several drafts in one evaluation: the same prompts, unseen by all of them, and paired differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.data.folder import find_data_folder
from distillspec.data.trained_prompts import with_trained_prompts
from distillspec.models import LanguageModel, initialise_draft, load_target, save_draft
from distillspec.models.tiny import tiny_model, tiny_tokenizer

from .conftest import Distill

QUICK = (
    "target=tiny",
    "evaluation.bootstrap_samples=10",
    "evaluation.cost_batches=[1]",
    "evaluation.speculation_length=3",
)
KINDS = {
    "plain": DraftConfig(layers=2),
    "reading": DraftConfig(kind="eagle"),
}


@pytest.fixture
def target() -> LanguageModel:
    return load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))


def save_trained(target: LanguageModel, folder: Path, kind: str, data: Path, held_out: slice) -> None:
    """Save a draft whose record says that these held-out prompts of `data` trained it."""
    prompts = find_data_folder(str(data)).read_prompts().held_out[held_out]
    draft = with_trained_prompts(initialise_draft(KINDS[kind], target), [prompt.token_ids for prompt in prompts])
    save_draft(draft, folder / "draft", target)


def test_all_are_judged_on_prompts_that_none_has_seen(
    distill: Distill, tmp_path: Path, target: LanguageModel, data_folder: Path
) -> None:
    save_trained(target, tmp_path / "plain", "plain", data_folder, slice(0, 1))
    save_trained(target, tmp_path / "reading", "reading", data_folder, slice(1, 2))
    words = ("drafts=[plain,reading]", f"data.cache={data_folder}", "hydra.run.dir=judged")
    judged = distill("eval", *QUICK, *words)
    assert judged.code == 0, judged.err
    assert "left out 2 held-out prompts" in judged.out
    assert "judged on 2 held-out prompts" in judged.out
    found = json.loads((tmp_path / "judged" / "summary.json").read_text())
    plain, reading = found["results"]
    assert [plain["kind"], reading["kind"]] == ["pruned", "eagle"]
    assert plain["prompts"] == reading["prompts"] == 2
    assert plain["positions"] == reading["positions"]
    assert plain["alpha_by_position"] == [plain["alpha"]] * 3
    assert reading["alpha_by_position"][0] == reading["alpha"] != reading["alpha_by_position"][1]
    (pair,) = found["pairs"]
    for position in range(3):
        less = reading["alpha_by_position"][position]["mean"] - plain["alpha_by_position"][position]["mean"]
        assert pair["alpha_by_position"][position]["mean"] == pytest.approx(less)
    best = [max(one["speedup"]["1"]["predicted"]) for one in (plain, reading)]
    assert pair["speedup"]["mean"] == pytest.approx(best[1] - best[0])
    assert "reading/draft against plain/draft on the same 2 prompts: α " in judged.out


def test_no_prompt_that_all_have_not_seen_is_one_line(
    distill: Distill, tmp_path: Path, target: LanguageModel, data_folder: Path
) -> None:
    save_trained(target, tmp_path / "first", "plain", data_folder, slice(0, 2))
    save_trained(target, tmp_path / "second", "plain", data_folder, slice(2, 4))
    refused = distill("eval", *QUICK, "drafts=[first,second]", f"data.cache={data_folder}")
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "a draft was trained on or chosen by all held-out prompts; give others with data.prompts" in refused.err


def test_one_draft_named_twice_is_refused(distill: Distill, tmp_path: Path, given: Path) -> None:
    refused = distill("eval", *QUICK, f"drafts=[{given},{given.parent}]")
    assert refused.code == 2
    assert refused.err == f"distill: drafts= names {given} twice (again as {given.parent}); name each draft once\n"
    assert list(tmp_path.iterdir()) == []


def test_another_targets_draft_is_refused(distill: Distill, tmp_path: Path, given: Path) -> None:
    tiny_model(264, layers=1).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    refused = distill("eval", *QUICK, "target.path=other", f"drafts=[{given}]")
    assert refused.code == 2
    reason = (
        "was made for tiny, whose weights differ from other's; give the target that it was made for as target.path="
    )
    assert refused.err == f"distill: the draft {given} {reason}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
