"""Export of a draft that reads the target's states: EAGLE-3 as vLLM, SGLang and speculators hold it."""

from __future__ import annotations

from pathlib import Path

from distillspec.errors import ConfigError
from distillspec.export.compatibility import make_readable_for_transformers_4
from distillspec.export.eagle_folder import EagleForm, head_rows, with_plain_table, write_eagle
from distillspec.export.eagle_proof import make_state_probe, prove_eagle
from distillspec.export.eagle_states import engine_states
from distillspec.export.probes import held_out_sequences
from distillspec.export.result import ExportResult, write_record
from distillspec.export.serving import NOTES, length_warnings, serve_command, target_name
from distillspec.files import write_folder
from distillspec.models import LanguageModel
from distillspec.models.numerics import DTYPES
from distillspec.models.own_weights import reads_targets_embeddings
from distillspec.models.state_input import JOINED


def export_eagle(
    draft: LanguageModel, target: LanguageModel, folder: Path, format: str, *, dtype: str, speculation_length: int
) -> ExportResult:
    """Write the draft as a folder that `format` loads, complete and proved before it is visible.

    The head keeps its own rows, and the target's embeddings are not written. Rounds the draft's weights to `dtype`.

    Raises:
        ConfigError: the format has no such draft.
        RunError: the folder did not load back to the draft's logits within 1e-4. Nothing is left behind.
    """
    draft = with_plain_table(draft)
    check_shape(draft, target, format)
    ids = engine_states(format, draft.state_ids, len(target.layers))
    probe = make_state_probe(draft, target, held_out_sequences(target), DTYPES[dtype])
    measured: dict[str, float] = {}

    def write(temporary: Path) -> None:
        write_eagle(temporary, draft, target, EagleForm(format, ids, dtype, speculation_length))
        draft.text_tokenizer.save_pretrained(temporary)
        make_readable_for_transformers_4(temporary)
        measured.update(prove_eagle(temporary, probe, draft, target))
        write_record(temporary, draft, format, dtype, measured)

    write_folder(folder, write)
    return ExportResult(
        folder,
        format,
        dtype,
        head_rows(target),
        draft.width,
        **measured,
        stray_mass_before=0.0,
        serve=serve_command(format, folder, target_name(target), speculation_length, method="eagle3"),
        warnings=length_warnings(draft, target),
        notes=(
            *(NOTES["vllm"] if format != "sglang" else ()),
            "engines begin the draft's text at its second token, distillspec at the first: the most probable token is "
            f"the same at {probe.first_token:.1%} of positions",
        ),
    )


def check_shape(draft: LanguageModel, target: LanguageModel, format: str) -> None:
    """Refuse drafts that `format` cannot hold.

    Raises:
        ConfigError: it names the reason, and what takes the draft instead.
    """
    assert draft.state_input is not None
    if draft.state_input.way != JOINED:
        raise ConfigError(
            f"{draft.name} adds the target's states to its embeddings (draft.features=true), and no other engine has "
            "such drafts; distill serve takes the folder as it is, and draft=eagle makes one that can be exported"
        )
    if format == "hf":
        raise ConfigError(
            f"{draft.name} reads the target's hidden states, and transformers has no such class; use format=vllm, "
            "sglang or speculators (distill serve takes the folder as it is)"
        )
    if draft.state_input.norms is not None:
        raise ConfigError(
            f"{draft.name} norms each state before they are fused (draft.state_norms=true), and no draft of "
            f"format={format} does; distill serve takes the folder as it is, and training with "
            "draft.state_norms=false makes one that can be exported"
        )
    if format == "sglang" and len(draft.layers) > 1:
        raise ConfigError(
            f"{draft.name} has {len(draft.layers)} layers, and SGLang joins those behind the first in another way; use "
            "format=vllm or speculators, or train one with draft.layers=1"
        )
    if format == "sglang" and not reads_targets_embeddings(draft, target):
        raise ConfigError(
            f"{draft.name} has input embeddings of its own (trained, or scaled), and SGLang puts the target's in their "
            "place; use format=vllm or speculators"
        )
