"""Export of a draft: align it with the target, write it, and prove the folder by loading it back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distillspec.errors import ConfigError
from distillspec.export.block import export_block
from distillspec.export.compatibility import make_readable_for_transformers_4
from distillspec.export.eagle import export_eagle
from distillspec.export.medusa import export_medusa
from distillspec.export.probes import HELD_OUT, probe_sequences
from distillspec.export.proof import make_probe, model_logits, prove
from distillspec.export.result import RECORD, ExportResult, write_record
from distillspec.export.serving import NOTES, serve_command, target_name, warn
from distillspec.export.vocabulary import align_rows, improbable_row, learnt_ids, stray_mass, suppress_rows
from distillspec.files import write_folder
from distillspec.models import LanguageModel, load_draft
from distillspec.models.numerics import DTYPES
from distillspec.models.own_weights import full_width
from distillspec.models.tokenizers import identify

FORMATS = ("hf", "vllm", "sglang", "speculators")
EXPORTED_DTYPES = ("float32", "bfloat16", "float16")


def export_draft(
    draft_folder: Path,
    output_folder: Path,
    format: str,
    target: LanguageModel | None = None,
    *,
    dtype: str = "auto",
    speculation_length: int = 4,
) -> ExportResult:
    """Write the draft as a plain folder that `format` loads, complete and proved before it is visible.

    Embeddings and head get the target's row count (engines compare vocabulary sizes). Ids that the draft
    never learnt (outside a truncated vocabulary, or padding) get a row fitted to be improbable, if that
    measurably leaves them less probability than the rows the draft was saved with. A draft that reads the target's
    states keeps its own rows, and its format names their ids (`distillspec.export.eagle`). Heads of kind medusa get the
    target's rows.

    Args:
        format: `hf` (plain transformers), `vllm`, `sglang`, or `speculators` (drafts of kind eagle and block alone).
        target: the target that the draft will serve. None leaves the row count as it is.
        dtype: of the weights. `auto` is float32 for `hf` and bfloat16 for the engines, which cast anyway.
        speculation_length: drafted tokens a step in the printed command.

    Raises:
        ConfigError: not a sound draft of this target, or the output folder holds other files.
        RunError: the folder did not load back to the draft's logits within 1e-4. Nothing is left behind.
    """
    draft_folder, output_folder = Path(draft_folder), Path(output_folder)
    _check(draft_folder, output_folder, format, dtype)
    dtype = ("float32" if format == "hf" else "bfloat16") if dtype == "auto" else dtype
    draft = load_draft(draft_folder, target)
    if draft.state_input is not None:
        assert target is not None, "load_draft refuses such a draft without its target"
        export = export_block if draft.drafts_block else export_eagle if draft.attends else export_medusa
        return export(draft, target, output_folder, format, dtype=dtype, speculation_length=speculation_length)
    if format == "speculators":
        raise ConfigError(
            f"format=speculators holds drafts of kind eagle or block, and {draft_folder} reads tokens alone; use "
            "format=vllm, sglang or hf"
        )
    model, rows = _aligned(draft, target)
    sequences = probe_sequences(draft)
    stray_before = _silence_unlearnt(draft, model, sequences)
    probe = make_probe(draft, sequences[-HELD_OUT:], DTYPES[dtype])
    model.to(DTYPES[dtype])
    measured: dict[str, float] = {}

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        draft.text_tokenizer.save_pretrained(temporary)
        make_readable_for_transformers_4(temporary)
        measured.update(prove(temporary, probe))
        write_record(temporary, draft, format, dtype, measured)

    write_folder(output_folder, write)
    return ExportResult(
        output_folder,
        format,
        dtype,
        rows,
        len(probe.learnt),
        **measured,
        stray_mass_before=stray_before,
        serve=serve_command(format, output_folder, target_name(target), speculation_length),
        warnings=warn(draft, target, rows, stray_before, measured["stray_mass"]),
        notes=NOTES[format],
    )


def _check(draft_folder: Path, output_folder: Path, format: str, dtype: str) -> None:
    if format not in FORMATS:
        raise ConfigError(f"format={format} is not known; use one of {', '.join(FORMATS)}")
    if dtype != "auto" and dtype not in EXPORTED_DTYPES:
        raise ConfigError(f"dtype={dtype} is not known; use auto, {', '.join(EXPORTED_DTYPES)}")
    if output_folder.resolve() == draft_folder.resolve():
        raise ConfigError(f"the export would replace the draft {draft_folder} itself; give another folder")
    if output_folder.is_file():
        raise ConfigError(f"{output_folder} is a file; give a folder")
    if output_folder.is_dir() and any(output_folder.iterdir()) and not (output_folder / RECORD).is_file():
        raise ConfigError(f"{output_folder} exists and is not an earlier export; give a new folder")


def _aligned(draft: LanguageModel, target: LanguageModel | None) -> tuple[PreTrainedModel, int]:
    """Return the draft at full width in float32 with as many rows as the target, and that number."""
    model = full_width(draft)
    model.requires_grad_(False)
    source = model if target is None else target.model
    rows = int(source.get_output_embeddings().weight.shape[0])
    # Of the ids that the draft was made with. Loaded with a target that has fewer, it is cut to them.
    needed = identify(draft.tokenizer, model.get_input_embeddings().weight.shape[0], "").vocab_size
    align_rows(model, rows, needed)
    return model, rows


def _silence_unlearnt(draft: LanguageModel, model: PreTrainedModel, sequences: Sequence[Tensor]) -> float:
    """Make ids the draft never learnt improbable in `model`, if that helps. Return the probability they had before."""
    learnt = learnt_ids(draft)
    head = model.get_output_embeddings().weight
    unlearnt = torch.ones(head.shape[0], dtype=torch.bool)
    unlearnt[learnt] = False
    ids = unlearnt.nonzero().flatten().to(head.device)
    if not len(ids):
        return 0.0
    held_out, saved = sequences[-HELD_OUT:], head[ids].clone()
    before = stray_mass(model_logits(model, held_out), learnt)
    suppress_rows(model, ids, improbable_row(draft, _hidden(draft, sequences[:-HELD_OUT]), len(ids)))
    if stray_mass(model_logits(model, held_out), learnt) > before:
        suppress_rows(model, ids, saved)
    return before


@torch.no_grad()
def _hidden(draft: LanguageModel, batches: Sequence[Tensor]) -> Tensor:
    batch_positions = [torch.arange(ids.shape[1], device=ids.device).expand_as(ids) for ids in batches]
    states = [
        draft.hidden(ids, positions).flatten(0, 1) for ids, positions in zip(batches, batch_positions, strict=True)
    ]
    return torch.cat(states).float()
