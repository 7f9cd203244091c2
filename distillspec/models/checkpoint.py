"""Drafts on disk: configuration, tokenizer, the draft's own weights and `distillspec.json` (and `d2t.json`)."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from distillspec.errors import ConfigError
from distillspec.files import DIGESTS, verify_folder, write_folder
from distillspec.models import own_weights
from distillspec.models.language_model import LanguageModel, fingerprint
from distillspec.models.own_weights import reading_record, reads_targets_embeddings, write_weights
from distillspec.models.stop_head import StopHead, read_stop_head, write_stop_head
from distillspec.models.table_sizes import with_ids
from distillspec.models.target import load_tokenizer, one_line_failures, read_weights
from distillspec.models.tokenizers import identify, require_same_tokenizer
from distillspec.types import ModelIdentity

log = logging.getLogger(__name__)

METADATA = "distillspec.json"
SERVED = torch.bfloat16  # precision of weights in the folders of drafts to serve
KEPT_IDS = "d2t.json"  # not safetensors: other engines load every such file of a folder as weights
FORMAT_VERSION = 2  # 1: plain drafts were whole Hugging Face folders


@dataclass(frozen=True)
class TargetRecord:
    """The target that a draft folder was made for, as the folder records it."""

    name: str
    identity: ModelIdentity


def save_draft(
    draft: LanguageModel,
    folder: Path,
    target: LanguageModel | TargetRecord,
    extra: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write what is the draft's own. The folder is complete before it is visible.

    Input embeddings that are the target's are left out (a `TargetRecord` has none to compare: all are written). A
    truncated head has its kept rows only: `d2t.json` gives their ids. `distill export` writes whole folders.

    Args:
        dtype: that wider weights are rounded to, `SERVED` for drafts to serve. None keeps every bit.
    """
    reading = reading_record(draft)
    has_embeddings = not isinstance(target, LanguageModel) or not reads_targets_embeddings(draft, target)
    record = {
        "format_version": FORMAT_VERSION,
        "identity": asdict(draft.with_identity(weights_hash=fingerprint(draft.model)).identity),
        "target": {"name": target.name, **asdict(target.identity)},
        "kept_vocabulary": None if draft.kept_ids is None else int(draft.kept_ids.numel()),
        "lineage": draft.lineage,
        "embeddings": "own" if has_embeddings else "target",
        **({} if reading is None else {"reads": reading}),
        **({} if draft.stop_head is None else {"stop": draft.stop_head.record}),
        **(extra or {}),
    }

    def write(temporary: Path) -> None:
        if draft.kept_ids is not None:
            (temporary / KEPT_IDS).write_text(json.dumps({"d2t": draft.kept_ids.tolist()}) + "\n")
        write_weights(draft, temporary, embeddings=has_embeddings, dtype=dtype)
        if draft.stop_head is not None:
            write_stop_head(draft.stop_head, temporary)
        if draft.tokenizer is not None:
            draft.tokenizer.save_pretrained(temporary)
        (temporary / METADATA).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")

    write_folder(folder, write)


def save_with_stop_head(source: Path, folder: Path, head: StopHead) -> None:
    """Write the draft in the folder `source` again, with a `StopHead`. Its weights stay as they are."""

    def write(temporary: Path) -> None:
        for file in [file for file in source.rglob("*") if file.is_file() and file.name not in (METADATA, DIGESTS)]:
            copied = temporary / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)  # not its mode: the source may be read-only
        record = {**read_metadata(source), "stop": head.record}
        (temporary / METADATA).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        write_stop_head(head, temporary)

    write_folder(folder, write)


def load_draft(
    folder: Path | str, target: LanguageModel | None = None, *, dtype: torch.dtype | None = None
) -> LanguageModel:
    """Read a saved draft and slice its head to the kept vocabulary.

    Raises:
        ConfigError: not a draft folder, damaged, made for another tokenizer than `target`'s, or `target` is not the one
            whose embeddings or states it reads.
    """
    folder = Path(folder)
    if not (folder / METADATA).is_file():
        raise ConfigError(f"{folder} is not a distillspec draft: it has no {METADATA}")
    if problem := verify_folder(folder):
        raise ConfigError(f"the draft {folder} is damaged: {problem}")
    record = json.loads((folder / METADATA).read_text())
    tokenizer = load_tokenizer(str(folder))
    if target is not None:
        require_same_tokenizer(tokenizer, target.tokenizer, str(folder), target.name)
    kept_ids, dtype = read_kept_ids(folder), dtype or torch.float32
    reading, embeddings = record.get("reads"), embeddings_of(record)
    if target is not None and (embeddings == "target" or reading is not None):  # its states may have another basis
        check_target(folder, target)
    with one_line_failures(str(folder)):
        if embeddings is None:
            model = read_weights(folder, dtype)
        else:
            model = own_weights.read_weights(folder, reading, embeddings == "own", target, dtype)
    rows = model.get_input_embeddings().weight.shape[0]
    if kept_ids is not None and embeddings is None:
        _slice_head(model, kept_ids)
    if target is not None:
        model.to(target.device)
    identity = identify(tokenizer, rows, fingerprint(model))
    stop_head = read_stop_head(folder, record.get("stop"), model.device)
    lineage, measured = record.get("lineage", {}), (_evaluated(record), _rank_acceptance(record))
    draft = LanguageModel(model.eval(), tokenizer, identity, str(folder), kept_ids, lineage, stop_head, *measured)
    return draft if target is None else matched(draft, target)


def matched(draft: LanguageModel, target: LanguageModel) -> LanguageModel:
    """Return the draft with the target's ids: those of a common tokenizer, or without tokenizers as many ids.

    Raises:
        ConfigError: without both tokenizers the numbers of ids differ, or the draft keeps an id that the target lacks.
    """
    if draft.tokenizer is not None and target.tokenizer is not None:
        return with_ids(draft, target)
    draft_ids, target_ids = (model.model.get_input_embeddings().weight.shape[0] for model in (draft, target))
    if draft_ids != target_ids:
        raise ConfigError(
            f"draft {draft.name} reads {draft_ids} token ids and target {target.name} {target_ids}, and without both "
            "tokenizers only their number can be compared; use a draft of this target, or add the tokenizer files"
        )
    without = draft.name if draft.tokenizer is None else target.name
    log.warning(
        "%s has no tokenizer: draft and target are taken to share one, for both have %d ids", without, draft_ids
    )
    draft = with_ids(draft, target)
    identity = replace(target.identity, weights_hash=draft.identity.weights_hash)
    return replace(draft, tokenizer=target.tokenizer, identity=identity)


def embeddings_of(record: dict[str, Any]) -> str | None:
    """Return whose embeddings the draft of a `distillspec.json` reads: `target` or `own`. None: all are in the folder.

    Before version 2 only drafts that read states recorded it, beside how they read.
    """
    source: str | None = record.get("embeddings", (record.get("reads") or {}).get("embeddings"))
    return source


def draft_folder(path: Path | str) -> Path | None:
    """Return the draft folder at `path`, or inside the run folder `path`, or None."""
    candidates = (Path(path), Path(path) / "draft", Path(path) / "best")
    return next((folder for folder in candidates if (folder / METADATA).is_file()), None)


def read_kept_ids(folder: Path) -> Tensor | None:
    """Return the ids `[Vd]` that the head of the draft in `folder` keeps, or None if it keeps all."""
    if not (folder / KEPT_IDS).is_file():
        return None
    return torch.tensor(json.loads((folder / KEPT_IDS).read_text())["d2t"], dtype=torch.int64)


def read_metadata(folder: Path | str) -> dict[str, Any]:
    """Return the contents of `distillspec.json`."""
    path = Path(folder) / METADATA
    if not path.is_file():
        raise ConfigError(f"{folder} is not a distillspec draft: it has no {METADATA}")
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"the draft {folder} is damaged: {METADATA} is no JSON ({error})") from error
    return record


def check_target(path: Path | str, target: LanguageModel) -> None:
    """Refuse a draft folder that records another target. Models that record none pass.

    Raises:
        ConfigError: the draft was made for other weights.
    """
    if (folder := draft_folder(path)) is None:
        return
    made_for = read_metadata(folder).get("target", {})
    recorded = made_for.get("weights_hash")
    if recorded and recorded != target.identity.weights_hash:
        raise ConfigError(
            f"the draft {path} was made for {made_for.get('name')}, whose weights differ from {target.name}'s; "
            "give the target that it was made for as target.path="
        )


def recorded_target(folder: Path | str) -> TargetRecord:
    """Return the target a draft was made for, to save another version of it where the target is not loaded."""
    made_for = read_metadata(folder)["target"]
    return TargetRecord(made_for["name"], ModelIdentity(**{f.name: made_for[f.name] for f in fields(ModelIdentity)}))


def _slice_head(model: Any, kept_ids: Tensor) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach()[kept_ids].clone())
    if getattr(head, "bias", None) is not None:
        head.bias = nn.Parameter(head.bias.detach()[kept_ids].clone())
    head.out_features = len(kept_ids)


def _evaluated(record: Mapping[str, Any]) -> float | None:
    """Return the acceptance rate that a draft's own run measured on held-out text, None without one."""
    alpha = record.get("evaluation")
    for key in ("alpha", "mean"):
        alpha = alpha.get(key) if isinstance(alpha, Mapping) else None
    return float(alpha) if _is_chance(alpha) else None


def _rank_acceptance(record: Mapping[str, Any]) -> tuple[tuple[float, ...], ...]:
    """Return what a draft's own run measured of its heads, by drafted position and rank, empty without it."""
    evaluation = record.get("evaluation")
    recorded = evaluation.get("rank_acceptance") if isinstance(evaluation, Mapping) else None
    levels = recorded if isinstance(recorded, list) else []
    sound = all(isinstance(level, list) and level and all(map(_is_chance, level)) for level in levels)
    return tuple(tuple(map(float, level)) for level in levels) if sound else ()


def _is_chance(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 <= value <= 1
