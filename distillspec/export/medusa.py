"""Export of Medusa's heads as vLLM holds them: residual blocks on the state that the target's head reads, one head.

Weights: `blocks.K.layers.0.weight [D, D]` of drafted position K, and `lm_head.weight [rows, D]` for all of them, with a
row for each of the target's. A truncated head needs a `token_map`, and vLLM 0.32 refuses every folder that has one
("weights were not initialized from checkpoint: {'token_map'}").
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from distillspec.errors import ConfigError, RunError
from distillspec.export.compatibility import make_readable_for_transformers_4
from distillspec.export.eagle_folder import CONFIG, head_rows
from distillspec.export.probes import HELD_OUT, probe_sequences
from distillspec.export.proof import full_agreement
from distillspec.export.result import ExportResult, write_record
from distillspec.export.serving import NOTES, serve_command, target_name, warn
from distillspec.export.vocabulary import improbable_row, learnt_ids, learnt_mass
from distillspec.files import write_folder
from distillspec.models import LanguageModel
from distillspec.models.eagle import final_scale
from distillspec.models.features import read_states
from distillspec.models.numerics import DTYPES
from distillspec.models.own_weights import WEIGHTS
from distillspec.models.state_input import PARALLEL, deferred_scale


def export_medusa(
    draft: LanguageModel, target: LanguageModel, folder: Path, form: str, *, dtype: str, speculation_length: int
) -> ExportResult:
    """Write the draft as a folder that vLLM loads, complete and proved before it is visible.

    Raises:
        ConfigError: the format has no such draft.
        RunError: the folder did not load back to the draft's logits within 1e-4. Nothing is left behind.
    """
    check_heads(draft, target, form)
    texts = probe_sequences(target)
    held_out = [text[:1] for text in texts[-HELD_OUT:]]  # logits over all rows take much memory
    exact = rounded = _draft_logits(draft, target, held_out)
    if not torch.isfinite(exact).all():
        raise RunError(f"the draft {draft.name} gives logits that are not finite; nothing was exported")
    if DTYPES[dtype] is not torch.float32:
        with torch.no_grad():
            for parameter in (*_blocks(draft).values(), draft.head.weight):
                parameter.copy_(parameter.to(DTYPES[dtype]))
        rounded = _draft_logits(draft, target, held_out)
    rows, learnt = head_rows(target), learnt_ids(draft)
    row, stray_before = _unlearnt_row(draft, target, texts, rows - len(learnt))
    head = row.to(draft.head.weight).repeat(rows, 1)
    head[learnt.to(head.device)] = draft.head.weight.detach()
    measured: dict[str, float] = {}

    def write(temporary: Path) -> None:
        write_medusa(temporary, draft, head, dtype)
        draft.text_tokenizer.save_pretrained(temporary)
        make_readable_for_transformers_4(temporary)
        measured.update(full_agreement(_folder_logits(temporary, target, held_out), rounded, exact, learnt))
        write_record(temporary, draft, form, dtype, measured)

    write_folder(folder, write)
    serve = serve_command(form, folder, target_name(target), len(draft.layers), method="medusa")
    notes = ("vLLM drafts as many tokens as there are heads, each greedily",)
    return ExportResult(
        folder,
        form,
        dtype,
        rows,
        len(learnt),
        **measured,
        stray_mass_before=stray_before,
        serve=serve,
        warnings=warn(draft, target, rows, stray_before, measured["stray_mass"]),
        notes=(*NOTES["vllm"][1:], *notes),
    )


def check_heads(draft: LanguageModel, target: LanguageModel, form: str) -> None:
    """Refuse heads that the format cannot hold.

    Raises:
        ConfigError: it names the reason, and what takes the draft instead.
    """
    assert draft.state_input is not None
    if draft.state_input.way != PARALLEL:
        raise ConfigError(
            f"{draft.name} has heads that read drafted tokens (draft.sequential=true), and no other engine has such "
            "drafts; distill serve takes the folder as it is, and draft=medusa alone can be exported"
        )
    if form != "vllm":
        raise ConfigError(
            f"{draft.name} has Medusa's heads, and format={form} has no such draft; use format=vllm (distill serve "
            "takes the folder as it is)"
        )
    target_scale, draft_scale = final_scale(target), deferred_scale(draft.decoder)
    same = target_scale is not None and torch.allclose(draft_scale, target_scale.to(draft_scale))
    if draft.state_ids != (len(target.layers),) or not same:
        raise ConfigError(
            f"{draft.name} reads other states than the one that the target's head reads, and vLLM hands over that one "
            "alone; distill serve takes the folder as it is"
        )


def write_medusa(folder: Path, draft: LanguageModel, head: Tensor, dtype: str) -> None:
    """Write weights in `dtype`, with a `head [rows, D]` for all blocks, and configuration."""
    weights = {**_blocks(draft), "lm_head.weight": head}
    stored = {name: value.detach().to(DTYPES[dtype]).cpu().contiguous() for name, value in weights.items()}
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    settings = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": draft.model.config.hidden_size,
        "vocab_size": len(head),
        "truncated_vocab_size": len(head),
        "num_heads": len(draft.layers),
        "num_hidden_layers": 1,
        "medusa_fc_bias": False,
        "original_lm_head": True,
        "dtype": dtype,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _blocks(draft: LanguageModel) -> dict[str, Tensor]:
    return {f"blocks.{k}.layers.0.weight": head.down_proj.weight for k, head in enumerate(draft.layers)}  # type: ignore[union-attr,misc]


def _unlearnt_row(
    draft: LanguageModel, target: LanguageModel, texts: Sequence[Tensor], unlearnt: int
) -> tuple[Tensor, float]:
    """Return a head row `[D]` for ids never learnt, and the probability that `unlearnt` ids would have with zeros.

    It is fitted to be improbable on all but the last texts. Zeros are taken where they are less probable on these.
    """
    zeros = torch.zeros_like(draft.head.weight[0])
    if not unlearnt:
        return zeros, 0.0
    row = improbable_row(draft, _read_states(draft, target, texts[:-HELD_OUT]), unlearnt).to(zeros)
    states = _read_states(draft, target, texts[-HELD_OUT:])
    odds = math.log(unlearnt) - learnt_mass(draft, states)
    before, after = (
        float((draft.head.scale * (states @ each.float()) + odds).sigmoid().mean()) for each in (zeros, row)
    )
    return (row if after < before else zeros), before


@torch.no_grad()
def _read_states(draft: LanguageModel, target: LanguageModel, texts: Sequence[Tensor]) -> Tensor:
    """Return what the head reads `[positions · N, D]` float32 after every token of `texts`, position by position."""
    assert draft.state_input is not None
    states = draft.state_input.fuse(_last_states(target, texts))
    return torch.cat([draft.head_input(states, k) for k in range(len(draft.layers))]).float()


@torch.no_grad()
def _draft_logits(draft: LanguageModel, target: LanguageModel, texts: Sequence[Tensor]) -> Tensor:
    """Return our logits `[positions · N, Vd]` float32 on the CPU after every token of `texts`."""
    return draft.head.logits(_read_states(draft, target, texts)).float().cpu()


@torch.no_grad()
def _folder_logits(folder: Path, target: LanguageModel, texts: Sequence[Tensor]) -> Tensor:
    """Return logits `[positions · N, rows]` by vLLM's arithmetic on the folder's weights and the target's norm."""
    weights = {name: value.float() for name, value in load_file(folder / WEIGHTS).items()}
    heads = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["num_heads"]
    x = target.decoder.norm(_last_states(target, texts)).float().cpu()  # type: ignore[operator]
    read = [x + silu(x @ weights[f"blocks.{k}.layers.0.weight"].T) for k in range(heads)]
    return torch.cat(read) @ weights["lm_head.weight"].T


def _last_states(target: LanguageModel, texts: Sequence[Tensor]) -> Tensor:
    """Return the target's states `[N, D]` float32 before the final norm."""
    layers = [len(target.layers)]
    batch_positions = [torch.arange(ids.shape[1], device=ids.device).expand_as(ids) for ids in texts]
    states = [
        read_states(target, ids, positions, layers).flatten(0, 1)
        for ids, positions in zip(texts, batch_positions, strict=True)
    ]
    return torch.cat(states).float()
