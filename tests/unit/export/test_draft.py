"""Export round trips: whatever goes out gives the draft's logits when loaded by anyone else."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import distillspec.export.draft as export_module
from distillspec.config import DraftConfig, TargetConfig
from distillspec.errors import ConfigError, RunError
from distillspec.export import export_draft
from distillspec.models import LanguageModel, initialise_draft, load_draft, load_target, save_draft
from distillspec.models.checkpoint import TargetRecord
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model, tiny_tokenizer
from distillspec.models.tokenizers import tokenizer_hash, tokenizer_size

IDS = torch.tensor([[1, 72, 80, 91, 40, 3], [5, 9, 200, 17, 33, 250]])
KEPT = torch.arange(0, 259, 3)  # the special token 0 and 86 others
TOKENS = tokenizer_size(tiny_tokenizer())  # 259 (the tiny target pads its head to 264 rows)


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def saved(target: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a whole and of a truncated draft."""
    folders = {}
    for name, kept in (("whole", None), ("truncated", KEPT)):
        draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=kept)
        folders[name] = tmp_path_factory.mktemp("drafts") / name
        save_draft(draft, folders[name], target)
    return folders


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=IDS).logits


@pytest.mark.parametrize("name", ["whole", "truncated"])
def test_an_hf_export_gives_the_drafts_logits_and_silences_all_other_ids(
    name: str, saved: dict[str, Path], target: LanguageModel, tmp_path: Path
) -> None:
    result = export_draft(saved[name], tmp_path / "out", "hf", target)

    draft = load_draft(saved[name], target)
    learnt = torch.arange(TOKENS) if draft.kept_ids is None else draft.kept_ids
    exported = logits_of(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(exported[..., learnt], draft.logits(IDS), atol=1e-4, rtol=0)
    outside = torch.ones(exported.shape[-1], dtype=torch.bool).index_fill(0, learnt, False)
    assert exported[0].softmax(-1)[:, outside].sum(-1).max() < 1e-2  # text that starts as prompts do
    assert result.stray_mass < result.stray_mass_before
    assert result.stray_mass < 0.02
    assert result.max_abs_error < 1e-4
    assert (result.dtype, result.rows, result.learnt) == ("float32", 264, len(learnt))


def test_an_engine_export_is_bfloat16_and_compared_with_the_rounded_draft(
    saved: dict[str, Path], target: LanguageModel, tmp_path: Path
) -> None:
    result = export_draft(saved["whole"], tmp_path / "out", "vllm", target)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert result.max_abs_error < 1e-4 < result.rounding_error
    assert result.argmax_agreement > 0.9


@pytest.mark.parametrize("rows", [TOKENS, 288])
def test_rows_follow_the_target_up_and_down(
    rows: int, saved: dict[str, Path], tmp_path: Path, target: LanguageModel
) -> None:
    other = wrap(tiny_model(rows), tiny_tokenizer(), "other")
    record = TargetRecord(target.name, target.identity)
    save_draft(load_draft(saved["whole"], target), tmp_path / "own", record)  # its embeddings go with it
    result = export_draft(tmp_path / "own", tmp_path / "out", "hf", other)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert result.rows == config["vocab_size"] == logits_of(tmp_path / "out").shape[-1] == rows
    with torch.no_grad():
        ours = load_draft(saved["whole"], target).logits(IDS)
    torch.testing.assert_close(logits_of(tmp_path / "out")[..., :TOKENS], ours, atol=1e-4, rtol=0)


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    model = tiny_model(270)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    tied = wrap(model, tiny_tokenizer(), "tied")
    save_draft(initialise_draft(DraftConfig(layers=2), tied), tmp_path / "draft", tied)
    export_draft(tmp_path / "draft", tmp_path / "out", "hf", wrap(tiny_model(300), tiny_tokenizer(), "padded"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    with torch.no_grad():
        ours = load_draft(tmp_path / "draft").logits(IDS)
    torch.testing.assert_close(logits_of(tmp_path / "out")[..., :TOKENS], ours, atol=1e-4, rtol=0)


def test_a_target_with_fewer_rows_than_tokens_is_refused(
    saved: dict[str, Path], target: LanguageModel, tmp_path: Path
) -> None:
    short = wrap(tiny_model(200), tiny_tokenizer(), "short")
    save_draft(load_draft(saved["whole"], target), tmp_path / "own", TargetRecord(target.name, target.identity))
    with pytest.raises(ConfigError, match="200 rows, but the draft's tokenizer needs 259"):
        export_draft(tmp_path / "own", tmp_path / "out", "hf", short)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_engines_find_no_stray_weight_files_and_older_names(
    saved: dict[str, Path], target: LanguageModel, tmp_path: Path
) -> None:
    export_draft(saved["truncated"], tmp_path / "out", "sglang", target)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "distillspec_export.json").read_text())["kept_ids"] == KEPT.tolist()
    assert tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path / "out")) == tokenizer_hash(target.tokenizer)


def test_the_commands_name_the_folder_and_the_length(
    saved: dict[str, Path], target: LanguageModel, tmp_path: Path
) -> None:
    out = tmp_path / "a folder"
    vllm = shlex.split(export_draft(saved["whole"], out, "vllm", target, speculation_length=3).serve)
    speculative = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert speculative == {"method": "draft_model", "model": str(out), "num_speculative_tokens": 3}

    sglang = shlex.split(export_draft(saved["whole"], out, "sglang", target, speculation_length=3).serve)
    flags = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert flags["--speculative-algorithm"] == "STANDALONE"
    assert flags["--speculative-draft-model-path"] == str(out)
    assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("3", "4")


def test_the_result_says_what_truncation_costs(saved: dict[str, Path], target: LanguageModel, tmp_path: Path) -> None:
    result = export_draft(saved["truncated"], tmp_path / "out", "vllm", target)
    lines = result.lines()
    assert any("87-token head is written at full width" in line for line in lines)
    assert lines[-1] == result.serve
    assert json.loads(json.dumps(result.to_json()))["learnt"] == 87
    assert export_draft(saved["whole"], tmp_path / "out", "vllm", target).warnings == ()


def test_a_damaged_draft_is_refused(saved: dict[str, Path], target: LanguageModel, tmp_path: Path) -> None:
    save_draft(load_draft(saved["whole"], target), tmp_path / "draft", target)
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="damaged"):
        export_draft(tmp_path / "draft", tmp_path / "out", "hf", target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def test_a_folder_that_loads_back_differently_leaves_nothing_behind(
    saved: dict[str, Path], target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] *= 1.01
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(export_module, "make_readable_for_transformers_4", corrupt)
    with pytest.raises(RunError, match="does not give the draft's logits"):
        export_draft(saved["whole"], tmp_path / "out", "hf", target)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_that_is_not_finite_is_an_error_of_the_run(target: LanguageModel, tmp_path: Path) -> None:
    draft = initialise_draft(DraftConfig(layers=1), target)
    with torch.no_grad():
        draft.model.model.norm.weight.fill_(float("nan"))
    save_draft(draft, tmp_path / "draft", target)
    with pytest.raises(RunError, match="not finite"):
        export_draft(tmp_path / "draft", tmp_path / "out", "hf", target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "gguf"}, "format=gguf is not known; use one of hf, vllm, sglang, speculators"),
        ({"dtype": "int8"}, "dtype=int8 is not known"),
        ({"output": "draft"}, "would replace the draft"),
        ({"output": "thesis"}, "is not an earlier export"),
        ({"output": "thesis/notes.txt"}, "is a file"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_written(
    changes: dict[str, str], message: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "notes.txt").write_text("years of work")
    output = saved["whole"] if changes.get("output") == "draft" else tmp_path / changes.get("output", "out")
    with pytest.raises(ConfigError, match=message):
        export_draft(saved["whole"], output, changes.get("format", "hf"), dtype=changes.get("dtype", "auto"))
    assert (tmp_path / "thesis" / "notes.txt").read_text() == "years of work"
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis"]
