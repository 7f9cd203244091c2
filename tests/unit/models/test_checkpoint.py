"""Drafts on disk: what is saved comes back, and damage is refused."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.files import sha256_of
from distillspec.models import LanguageModel, initialise_draft, load_draft, read_metadata, save_draft
from distillspec.models.checkpoint import METADATA, SERVED, TargetRecord
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model
from distillspec.models.tokenizers import tokenizer_size

from .draft_folders import plain_folder, version_1

IDS = torch.tensor([[1, 20, 30, 40, 50, 60]])


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
    version_1(truncated, tmp_path / "draft", target)
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
    tokenizer = AutoTokenizer.from_pretrained(plain_folder(target, tmp_path / "plain"))
    tokenizer.add_tokens(["<new>"])
    other = wrap(tiny_model(tokenizer_size(tokenizer), layers=1), tokenizer, "other")
    save_draft(other, tmp_path / "other", other)
    with pytest.raises(ConfigError, match="id 259 is '<new>' in the draft and None in the target"):
        load_draft(tmp_path / "other", target)
    with pytest.raises(ConfigError, match="do not share a tokenizer"):
        initialise_draft(DraftConfig(kind="pretrained", path=str(tmp_path / "other")), target)


def test_a_folder_that_is_no_draft_is_refused(target: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a distillspec draft: it has no distillspec\.json"):
        load_draft(plain_folder(target, tmp_path / "plain"), target)
    with pytest.raises(ConfigError, match="is not a distillspec draft"):
        read_metadata(tmp_path / "nowhere")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / METADATA).write_text('{"kind": "ea')
    with pytest.raises(ConfigError, match=r"cut is damaged: distillspec\.json is no JSON"):
        read_metadata(tmp_path / "cut")


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


@pytest.mark.parametrize("cut", [False, True])
def test_a_folder_of_version_1_still_loads(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path, cut: bool
) -> None:
    draft = truncated if cut else initialise_draft(DraftConfig(keep=[0, 2]), target)
    version_1(draft, tmp_path / "old", target)
    stored = load_file(tmp_path / "old" / "model.safetensors")
    assert stored["lm_head.weight"].shape == stored["model.embed_tokens.weight"].shape
    for given in (None, target):
        old = load_draft(tmp_path / "old", given)
        assert torch.equal(old.logits(IDS), draft.logits(IDS))
        assert old.width == draft.width
    save_draft(load_draft(tmp_path / "old", target), tmp_path / "new", target)
    assert torch.equal(load_draft(tmp_path / "new", target).logits(IDS), draft.logits(IDS))
    assert _weights_bytes(tmp_path / "new") < _weights_bytes(tmp_path / "old")


def _weights_bytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_holds_what_is_the_drafts_own(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Layers, the final norm and 40 rows of the head, each number in the draft's own precision."""
    model = copy.deepcopy(truncated.model).to(dtype)
    save_draft(replace(truncated, model=model), tmp_path / "draft", target)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert not any("embed_tokens" in name for name in stored)
    assert stored["lm_head.weight"].shape[0] == 40
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    embeddings = truncated.model.get_input_embeddings().weight.numel()
    own = sum(parameter.numel() for parameter in truncated.model.parameters()) - embeddings
    assert own * dtype.itemsize < _weights_bytes(tmp_path / "draft") < own * dtype.itemsize + 8192  # names and shapes
    assert read_metadata(tmp_path / "draft")["embeddings"] == "target"
    again = load_draft(tmp_path / "draft", target, dtype=dtype).model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_a_draft_to_serve_has_16_bits_a_weight(target: LanguageModel, truncated: LanguageModel, tmp_path: Path) -> None:
    save_draft(truncated, tmp_path / "exact", target)
    save_draft(truncated, tmp_path / "served", target, dtype=SERVED)
    exact, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("exact", "served"))
    assert {tensor.dtype for tensor in stored.values()} == {SERVED}
    assert all(torch.equal(stored[name], weight.to(SERVED)) for name, weight in exact.items())
    again = load_draft(tmp_path / "served", target)  # in float32, as on machines that have no bfloat16
    read = again.model.state_dict()
    assert all(torch.equal(read[name], weight.float()) for name, weight in stored.items())
    assert again.identity == load_draft(tmp_path / "exact", target).identity
    save_draft(again, tmp_path / "again", target, dtype=SERVED)
    assert sha256_of(tmp_path / "again" / "model.safetensors") == sha256_of(tmp_path / "served" / "model.safetensors")


def test_narrow_weights_are_stored_as_they_are(target: LanguageModel, truncated: LanguageModel, tmp_path: Path) -> None:
    model = copy.deepcopy(truncated.model).half()
    save_draft(replace(truncated, model=model), tmp_path / "draft", target, dtype=SERVED)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], model.get_output_embeddings().weight)


def test_it_is_read_with_the_target_it_was_made_for(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    with pytest.raises(ConfigError, match=r"reads its target's embeddings; load it together with its target"):
        load_draft(tmp_path / "draft")
    other = wrap(tiny_model(target.identity.vocab_size + 5, layers=1), target.tokenizer, "other")
    with pytest.raises(ConfigError, match=r"was made for tiny, whose weights differ from other's"):
        load_draft(tmp_path / "draft", other)


def test_changed_embeddings_are_stored(target: LanguageModel, truncated: LanguageModel, tmp_path: Path) -> None:
    changed = replace(truncated, model=copy.deepcopy(truncated.model))
    with torch.no_grad():
        changed.model.get_input_embeddings().weight[7] += 1
    save_draft(changed, tmp_path / "draft", target)
    assert read_metadata(tmp_path / "draft")["embeddings"] == "own"
    for given in (None, target):
        again = load_draft(tmp_path / "draft", given)
        assert torch.equal(again.model.get_input_embeddings().weight, changed.model.get_input_embeddings().weight)
    save_draft(truncated, tmp_path / "unknown", TargetRecord(target.name, target.identity))
    assert torch.equal(load_draft(tmp_path / "unknown").logits(IDS), truncated.logits(IDS))


def test_loading_draws_no_random_numbers_and_shares_no_memory(
    target: LanguageModel, truncated: LanguageModel, tmp_path: Path
) -> None:
    save_draft(truncated, tmp_path / "draft", target)
    before = torch.get_rng_state()
    again = load_draft(tmp_path / "draft", target)
    assert torch.equal(torch.get_rng_state(), before)
    storages = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert not storages & {parameter.data_ptr() for parameter in again.model.parameters()}


@pytest.mark.parametrize(
    ("record", "evaluated"),
    [({"alpha": {"mean": 0.41}}, 0.41), ({"alpha": 0.4}, None), (None, None), ({"alpha": {"mean": 7}}, None)],
)
def test_a_draft_knows_what_its_run_measured(
    target: LanguageModel, tmp_path: Path, record: Any, evaluated: float | None
) -> None:
    draft = initialise_draft(DraftConfig(layers=1), target)
    save_draft(draft, tmp_path / "draft", target, {} if record is None else {"evaluation": record})
    assert load_draft(tmp_path / "draft", target).evaluated == evaluated


@pytest.mark.parametrize(
    ("record", "chances"),
    [
        ([[0.5, 0.2], [0.25, 0.0]], ((0.5, 0.2), (0.25, 0.0))),
        ([], ()),
        ([[0.5], []], ()),
        ([[0.5], 3], ()),
        ([["a"]], ()),
        ([[1.5]], ()),
    ],
)
def test_heads_know_what_they_accepted_by_rank(
    target: LanguageModel, tmp_path: Path, record: Any, chances: tuple[tuple[float, ...], ...]
) -> None:
    draft = initialise_draft(DraftConfig(kind="medusa", positions=2), target)
    save_draft(draft, tmp_path / "draft", target, {"evaluation": {"rank_acceptance": record}})
    assert load_draft(tmp_path / "draft", target).rank_acceptance == chances
