"""Making drafts and keeping them on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from distillspec.commands.prepare import prepare_draft
from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.files import sha256_of
from distillspec.models import LanguageModel, check_draft, initialise_draft, load_draft, read_metadata, save_draft
from distillspec.models.draft import truncate_head
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model
from distillspec.models.tokenizers import tokenizer_size
from distillspec.models.vocabulary import choose_kept_ids, count_tokens, coverage, expected_counts
from distillspec.types import Sample, TeacherSignal

IDS = torch.tensor([[1, 20, 30, 40, 50, 60]])


@pytest.fixture
def kept_ids(target: LanguageModel) -> Tensor:
    return choose_kept_ids(count_tokens([[100, 100, 101, 5]], target.identity.vocab_size), 40, target.tokenizer)


@pytest.fixture
def truncated(target: LanguageModel, kept_ids: Tensor) -> LanguageModel:
    return initialise_draft(DraftConfig(layers=2), target, kept_ids=kept_ids)


def test_the_most_frequent_ids_and_all_special_tokens_are_kept(target: LanguageModel) -> None:
    counts = count_tokens([[200, 200, 200, 150, 150, 90], []], target.identity.vocab_size)
    kept = choose_kept_ids(counts, 5, target.tokenizer)
    assert kept.tolist() == [0, 1, 2, 150, 200]  # the tiny tokenizer's special tokens were never counted
    assert coverage(counts, kept) == pytest.approx(5 / 6)
    assert choose_kept_ids(counts, 1, target.tokenizer).tolist() == [0, 1, 2]
    assert len(choose_kept_ids(counts, 10**6, target.tokenizer)) == target.identity.vocab_size


def test_unseen_places_are_filled_from_the_lowest_ids(target: LanguageModel) -> None:
    kept = choose_kept_ids(count_tokens([[200]], target.identity.vocab_size), 20, target.tokenizer).tolist()
    assert kept == [*range(19), 200]


def test_a_truncated_draft_gives_its_rows_of_the_whole_head(target: LanguageModel, truncated: LanguageModel) -> None:
    whole = initialise_draft(DraftConfig(layers=2), target)
    assert truncated.kept_ids is not None
    assert truncated.width == 40
    torch.testing.assert_close(truncated.logits(IDS), whole.logits(IDS)[..., truncated.kept_ids])
    full = truncated.full_width(truncated.logits(IDS))
    assert full.shape[-1] == target.identity.vocab_size
    assert int(torch.isfinite(full[0, 0]).sum()) == 40
    assert truncated.absolute_ids(torch.tensor([0, 39])).tolist() == truncated.kept_ids[[0, 39]].tolist()


@pytest.mark.parametrize("cut", [False, True])
def test_a_saved_draft_comes_back_bit_for_bit(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path, cut: bool
) -> None:
    draft = truncated if cut else initialise_draft(DraftConfig(keep=[0, 2]), target)
    save_draft(draft, tmp_path / "draft", target, {"note": 1})
    again = load_draft(tmp_path / "draft", target)
    ours, theirs = draft.model.state_dict(), again.model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(again.logits(IDS), draft.logits(IDS))
    assert again.identity.tokenizer_hash == target.identity.tokenizer_hash
    assert again.lineage == draft.lineage
    if cut:
        assert again.kept_ids is not None
        assert truncated.kept_ids is not None
        assert torch.equal(again.kept_ids, truncated.kept_ids)
    record = read_metadata(tmp_path / "draft")
    assert record["note"] == 1
    assert record["kept_vocabulary"] == (40 if cut else None)
    assert record["target"]["weights_hash"] == target.identity.weights_hash


def test_any_loader_reads_a_truncated_draft_at_full_width(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    plain, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "draft", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert truncated.kept_ids is not None
    head = plain.get_output_embeddings().weight
    assert head.shape[0] == plain.config.vocab_size == plain.get_input_embeddings().weight.shape[0]
    assert torch.equal(head[truncated.kept_ids], truncated.model.get_output_embeddings().weight)
    logits = plain(IDS).logits
    assert torch.equal(logits[..., truncated.kept_ids], truncated.logits(IDS))
    others = torch.ones(head.shape[0], dtype=torch.bool).index_fill(0, truncated.kept_ids, False)
    assert not logits[..., others].any()
    assert AutoTokenizer.from_pretrained(tmp_path / "draft").get_vocab() == target.tokenizer.get_vocab()


def test_saving_over_an_older_draft_leaves_only_the_new_one(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    save_draft(initialise_draft(DraftConfig(layers=2), target), tmp_path / "draft", target)
    assert load_draft(tmp_path / "draft", target).kept_ids is None
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("damage", ["cut", "flip", "missing"])
def test_a_damaged_draft_is_refused(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path, damage: str
) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    file = tmp_path / "draft" / "model.safetensors"
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-1000])
    elif damage == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        file.unlink()
    with pytest.raises(ConfigError, match=r"draft is damaged: .*model\.safetensors"):
        load_draft(tmp_path / "draft", target)


def test_a_draft_of_another_tokenizer_is_refused(target: LanguageModel, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(_plain_folder(target, tmp_path / "plain"))
    tokenizer.add_tokens(["<new>"])
    other = wrap(tiny_model(tokenizer_size(tokenizer), layers=1), tokenizer, "other")
    save_draft(other, tmp_path / "other", other)
    with pytest.raises(ConfigError, match="id 259 is '<new>' in the draft and None in the target"):
        load_draft(tmp_path / "other", target)
    with pytest.raises(ConfigError, match="do not share a tokenizer"):
        initialise_draft(DraftConfig(kind="pretrained", path=str(tmp_path / "other")), target)


def test_a_folder_that_is_no_draft_is_refused(target: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a distillspec draft: it has no distillspec\.json"):
        load_draft(_plain_folder(target, tmp_path / "plain"), target)
    with pytest.raises(ConfigError, match="is not a distillspec draft"):
        read_metadata(tmp_path / "nowhere")


def test_a_pretrained_draft_comes_from_a_plain_folder(target: LanguageModel, tmp_path: Path) -> None:
    folder = _plain_folder(target, tmp_path / "plain", layers=1)
    draft = initialise_draft(DraftConfig(kind="pretrained", path=str(folder)), target)
    assert len(draft.layers) == 1
    assert draft.width == target.identity.vocab_size
    assert draft.dtype == torch.float32


def test_a_pretrained_draft_comes_from_an_earlier_draft(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    draft = initialise_draft(DraftConfig(kind="pretrained", path=str(tmp_path / "draft")), target)
    assert draft.width == 40
    assert torch.equal(draft.logits(IDS), truncated.logits(IDS))


def test_a_pretrained_draft_comes_from_a_run_folder(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    save_draft(truncated, tmp_path / "run" / "draft", target)
    config = DraftConfig(kind="pretrained", path=str(tmp_path / "run"))
    check_draft(config, target)
    assert torch.equal(initialise_draft(config, target).logits(IDS), truncated.logits(IDS))


def test_a_truncated_draft_can_be_truncated_further(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    assert truncated.kept_ids is not None
    save_draft(truncated, tmp_path / "draft", target)
    config = DraftConfig(kind="pretrained", path=str(tmp_path / "draft"), vocabulary=20)
    check_draft(config, target)
    text = [Sample("a", "d", (1,), (100, 100, 101, 200, 200, 200, 200))]  # the draft has no row for 200
    draft = prepare_draft(config, target, lambda: text)
    assert draft.width == 20
    assert draft.kept_ids is not None
    assert {100, 101} <= set(draft.kept_ids.tolist()) <= set(truncated.kept_ids.tolist())
    columns = torch.searchsorted(truncated.kept_ids, draft.kept_ids)
    torch.testing.assert_close(draft.logits(IDS), truncated.logits(IDS)[..., columns])
    save_draft(draft, tmp_path / "smaller", target)
    assert torch.equal(load_draft(tmp_path / "smaller", target).logits(IDS), draft.logits(IDS))


def test_a_truncated_draft_cannot_grow(target: LanguageModel, truncated: LanguageModel, tmp_path: Path) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    config = DraftConfig(kind="pretrained", path=str(tmp_path / "draft"), vocabulary=41)
    with pytest.raises(ConfigError, match=r"draft\.vocabulary=41: the draft .* keeps 40 tokens already; give fewer"):
        check_draft(config, target)


def test_a_scratch_draft_has_the_asked_shape_and_the_targets_ids(target: LanguageModel) -> None:
    config = DraftConfig(kind="scratch", layers=3, hidden_size=48, heads=3)
    draft = initialise_draft(config, target)
    assert len(draft.layers) == 3
    assert draft.model.config.hidden_size == 48
    assert draft.logits(IDS).shape[-1] == target.identity.vocab_size
    assert draft.stop_ids == target.stop_ids
    assert draft.model.config.max_position_embeddings == target.model.config.max_position_embeddings


def test_a_scratch_draft_can_be_truncated_and_saved(target: LanguageModel, kept_ids: Tensor, tmp_path: Path) -> None:
    draft = initialise_draft(DraftConfig(kind="scratch", layers=1, hidden_size=32, heads=2), target, kept_ids=kept_ids)
    save_draft(draft, tmp_path / "draft", target)
    assert torch.equal(load_draft(tmp_path / "draft", target).logits(IDS), draft.logits(IDS))


def test_a_tied_draft_keeps_its_embeddings_when_its_head_is_cut(random_model, kept_ids: Tensor, tmp_path: Path) -> None:
    """Gemma ties its head to the embeddings; cutting one must not cut the other, on disk either."""
    target = random_model("gemma2")
    assert target.model.get_output_embeddings().weight is target.model.get_input_embeddings().weight
    draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=kept_ids)
    whole = initialise_draft(DraftConfig(layers=2), target)
    torch.testing.assert_close(draft.logits(IDS), whole.logits(IDS)[..., kept_ids])
    save_draft(draft, tmp_path / "draft", target)
    assert torch.equal(load_draft(tmp_path / "draft", target).logits(IDS), draft.logits(IDS))


def test_a_tied_whole_draft_survives_saving(random_model, tmp_path: Path) -> None:
    target = random_model("gemma3_text")
    draft = initialise_draft(DraftConfig(layers=2), target)
    save_draft(draft, tmp_path / "draft", target)
    again = load_draft(tmp_path / "draft", target)
    assert torch.equal(again.logits(IDS), draft.logits(IDS))
    assert "lm_head.weight" not in load_file(tmp_path / "draft" / "model.safetensors")


def test_the_recorded_digests_are_the_files(target: LanguageModel, truncated: LanguageModel, tmp_path: Path) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    digests = json.loads((tmp_path / "draft" / "sha256.json").read_text())
    assert {"model.safetensors", "config.json", "d2t.json", "distillspec.json"} <= set(digests)
    assert digests["config.json"] == sha256_of(tmp_path / "draft" / "config.json")


def test_a_moved_draft_still_loads(target: LanguageModel, truncated: LanguageModel, tmp_path: Path) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    shutil.move(tmp_path / "draft", tmp_path / "elsewhere")
    assert load_draft(tmp_path / "elsewhere", target).width == 40


def _plain_folder(target: LanguageModel, folder: Path, layers: int = 4) -> Path:
    tiny_model(target.identity.vocab_size + 5, layers=layers).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def test_recorded_signals_count_by_probability_and_unrecorded_responses_by_token(target: LanguageModel) -> None:
    probs = torch.tensor([[0.5, 0.25], [0.7, 0.2]])
    ids = torch.tensor([[7, 8], [7, 9]], dtype=torch.int32)
    topk = TeacherSignal("topk", ids, probs.log().half(), 1 - probs.sum(-1))
    sampled = TeacherSignal("sampled", torch.tensor([[3, 3, 4]], dtype=torch.int32), torch.zeros(1, 3), torch.zeros(1))
    samples = [
        Sample("a", "x", (1, 1), (7, 9), topk),
        Sample("b", "x", (2,), (3,), sampled),
        Sample("c", "x", (2,), (6, 6)),
    ]
    counts = expected_counts(samples, 12)
    wanted = {1: 2.0, 2: 2.0, 7: 1.2, 8: 0.25, 9: 0.2, 3: 2 / 3, 4: 1 / 3, 6: 2.0}
    expected = torch.zeros(12, dtype=torch.float64)
    expected[list(wanted)] = torch.tensor(list(wanted.values()), dtype=torch.float64)
    torch.testing.assert_close(counts, expected, atol=1e-3, rtol=0)
    before = counts.clone()
    choose_kept_ids(counts, 5, target.tokenizer)
    assert torch.equal(counts, before)


def test_a_truncated_head_cannot_get_back_what_it_lacks(target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(layers=1), target, kept_ids=torch.arange(10))
    with pytest.raises(ConfigError, match="lacks some of the ids"):
        truncate_head(draft, torch.arange(11))
