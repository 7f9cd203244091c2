"""Export of a block draft as P-EAGLE, which vLLM and speculators hold: an EAGLE-3 draft and one mask for all positions.

Beside EAGLE-3's weights (`distillspec.export.eagle_folder`): `mask_hidden [1, 1, m · F]`, states that the fusion turns
into the mask's state, and `embed_tokens`, the target's table with the mask's embedding in a row that no text needs. Its
id is `pard_token` (vLLM) or `mask_token_id` (speculators). Drafted tokens are the most probable ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from distillspec.errors import ConfigError, RunError
from distillspec.export.compatibility import make_readable_for_transformers_4
from distillspec.export.eagle_folder import (
    MASK,
    TABLE,
    EagleForm,
    eagle_settings,
    head_rows,
    read_eagle,
    with_plain_table,
    write_eagle,
)
from distillspec.export.eagle_states import engine_states, fusion
from distillspec.export.probes import held_out_sequences
from distillspec.export.proof import agreement
from distillspec.export.result import ExportResult, write_record
from distillspec.export.serving import NOTES, length_warnings, serve_command, target_name
from distillspec.files import write_folder
from distillspec.models import LanguageModel
from distillspec.models.block import BlockInput
from distillspec.models.features import read_states
from distillspec.models.numerics import DTYPES
from distillspec.models.own_weights import WEIGHTS, own_embeddings
from distillspec.models.state_input import previous

FORMATS = ("vllm", "speculators")


def export_block(
    draft: LanguageModel, target: LanguageModel, folder: Path, form: str, *, dtype: str, speculation_length: int
) -> ExportResult:
    """Write the draft as a folder that `form` loads, complete and proved before it is visible. Rounds its weights.

    Raises:
        ConfigError: the format has no such draft.
        RunError: the folder did not load back to the draft's logits within 1e-4. Nothing is left behind.
    """
    draft = with_plain_table(draft)
    joins = check_block(draft, form)
    ids, mask_id = engine_states(form, draft.state_ids, len(target.layers)), free_id(draft, target)
    texts = [text.masked_fill(text == mask_id, 0) for text in held_out_sequences(target)]
    eagle_form = EagleForm(form, ids, dtype, min(speculation_length, joins.positions))
    exact = block_logits(draft, target, texts)
    if not torch.isfinite(exact).all():
        raise RunError(f"the draft {draft.name} gives logits that are not finite; nothing was exported")
    states = _round(draft, joins, ids, DTYPES[dtype])
    rounded = block_logits(draft, target, texts)
    measured: dict[str, float] = {}

    def write(temporary: Path) -> None:
        embeddings = draft.model.get_input_embeddings().weight.detach()
        mask_row = torch.tensor([mask_id], device=embeddings.device)
        table = embeddings.index_copy(0, mask_row, joins.masks.detach()[:, : embeddings.shape[1]])
        named = _settings(draft, target, eagle_form, mask_id)
        more = {MASK: states[None, None], TABLE: table}
        write_eagle(temporary, draft, target, eagle_form, more, named)
        draft.text_tokenizer.save_pretrained(temporary)
        make_readable_for_transformers_4(temporary)
        logits = folder_logits(temporary, draft, target, texts, mask_id)
        measured.update(agreement(logits, rounded, exact))
        write_record(temporary, draft, form, dtype, measured)

    write_folder(folder, write)
    notes = [f"the mask's embedding has the row of id {mask_id}, which texts of chat templates do not hold"]
    if joins.confidence is not None:
        notes.append("the confidence head is left out, for engines have none")
    return ExportResult(
        folder,
        form,
        dtype,
        head_rows(target),
        draft.width,
        **measured,
        stray_mass_before=0.0,
        serve=serve_command(form, folder, target_name(target), eagle_form.speculation_length, method="peagle"),
        warnings=length_warnings(draft, target),
        notes=(*NOTES["vllm"], *notes),
    )


def check_block(draft: LanguageModel, form: str) -> BlockInput:
    """Return how a draft reads, or refuse one that `form` cannot hold.

    Raises:
        ConfigError: it names the reason, and what takes the draft instead.
    """
    joins = draft.state_input
    assert isinstance(joins, BlockInput)
    if form not in FORMATS:
        holds = (
            "transformers has no such class" if form == "hf" else "SGLang's blocks (DFlash) read the text by its states"
        )
        raise ConfigError(
            f"{draft.name} drafts blocks behind the text's tokens and states, and {holds}; use format=vllm or "
            "speculators (distill serve takes the folder as it is)"
        )
    unsupported = [f"a Markov head of {joins.rank} (draft.markov=0 leaves it out)"] if joins.rank else []
    if len(joins.masks) > 1:
        unsupported.append("a mask for each position (draft.shared_mask=true makes one for all)")
    if joins.bidirectional:
        unsupported.append("masks that see each other in both directions (draft.bidirectional=false)")
    if unsupported:
        raise ConfigError(
            f"{draft.name} has {' and '.join(unsupported)}, which blocks of format={form} (P-EAGLE) have not; distill "
            "serve takes the folder as it is"
        )
    return joins


def free_id(draft: LanguageModel, target: LanguageModel) -> int:
    """Return an id whose embedding no text needs: one of the table's padding, or else a special token.

    Raises:
        ConfigError: there is none.
    """
    size = target.identity.vocab_size
    if draft.model.get_input_embeddings().weight.shape[0] > size:
        return size
    tokenizer = draft.text_tokenizer
    needed = {*target.stop_ids, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    if spare := [token for token in tokenizer.all_special_ids if token not in needed and token < size]:
        return int(max(spare))
    raise ConfigError(
        f"{target.name} has an id for text in each row of its embeddings, and P-EAGLE's mask needs one; distill serve "
        "takes the folder as it is"
    )


@torch.no_grad()
def block_logits(draft: LanguageModel, target: LanguageModel, texts: Sequence[Tensor]) -> Tensor:
    """Return our logits `[N, n]` float32 on the CPU at the tokens of `texts [B, L]` but the first, and at masks."""
    count = int(draft.most_positions or 1) - 1
    masks = -1 - torch.arange(count)
    return _logits(draft, _fused(draft, target, texts), texts, masks, torch.zeros(1))


@torch.no_grad()
def folder_logits(
    folder: Path, draft: LanguageModel, target: LanguageModel, texts: Sequence[Tensor], mask_id: int
) -> Tensor:
    """Return the same by the folder's weights: an EAGLE-3 draft, which reads the mask's id beside its state."""
    loaded, count = read_eagle(folder, draft, target), int(draft.most_positions or 1) - 1
    assert loaded.state_input is not None
    states = load_file(folder / WEIGHTS)[MASK].flatten()
    mask = loaded.state_input.fuse(states.to(loaded.device))
    return _logits(loaded, _fused(loaded, target, texts), texts, torch.full((count,), mask_id), mask)


def _round(draft: LanguageModel, joins: BlockInput, ids: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Round the draft's weights in place, its own copy of the table too. Return the mask's states `[m · F]` float32.

    The mask's state becomes what the fusion makes of them.
    """
    own_embeddings(draft.model)
    with torch.no_grad():
        for parameter in draft.model.parameters():
            parameter.copy_(parameter.to(dtype))
        weight = fusion(joins.fusion(), draft.state_ids, ids).double()
        wanted = joins.masks[0, -weight.shape[0] :].double()
        states = (torch.linalg.pinv(weight) @ wanted).to(dtype)
        joins.masks[0, -weight.shape[0] :] = weight @ states.double()
    return states.float()


def _settings(draft: LanguageModel, target: LanguageModel, eagle_form: EagleForm, mask_id: int) -> dict[str, Any]:
    """Return what `config.json` says of blocks."""
    if eagle_form.form == "vllm":
        return {"pard_token": mask_id, "ptd_token_id": mask_id}
    plain = eagle_settings(draft, target, eagle_form)["speculators_config"]
    return {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_config": {**plain, "algorithm": "peagle"},
        "mask_token_id": mask_id,
    }


def _fused(draft: LanguageModel, target: LanguageModel, texts: Sequence[Tensor]) -> list[Tensor]:
    """Return the fused states `[B, L − 1, D]` before the tokens of each batch but the first."""
    fused = []
    for ids in texts:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        assert draft.state_input is not None
        states = read_states(target, ids, positions, draft.state_ids)
        fused.append(previous(draft.state_input.fuse(states), positions)[:, 1:])
    return fused


def _logits(
    draft: LanguageModel, fused: Sequence[Tensor], texts: Sequence[Tensor], masks: Tensor, state: Tensor
) -> Tensor:
    """Return logits at tokens and masks, as engines read them: texts begin at their second token."""
    logits = []
    for ids, fed in zip(texts, fused, strict=True):
        read = torch.cat([ids[:, 1:], masks.to(ids).expand(len(ids), -1)], 1)
        behind = state.to(fed).expand(len(ids), len(masks), fed.shape[-1])
        positions = torch.arange(read.shape[1], device=ids.device).expand_as(read)
        last = draft.last_states(read, positions, torch.cat([fed, behind], 1))
        logits.append(draft.head.logits(draft.head_input(last)).flatten(0, 1).float().cpu())
    return torch.cat(logits)
