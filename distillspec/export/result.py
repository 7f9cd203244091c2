"""Result of an export, as numbers and as lines for a terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distillspec.models import LanguageModel

RECORD = "distillspec_export.json"


@dataclass(frozen=True)
class ExportResult:
    """One finished export.

    Probabilities are at temperature 1, averaged over held-out probe positions. α of the exported folder is at
    least (1 − `stray_mass`) times the α of the draft: the stray mass is all that served proposals lose.
    """

    folder: Path
    format: str  # hf | vllm | sglang | speculators
    dtype: str
    rows: int  # rows of embeddings and head, the target's where a target is given
    learnt: int  # ids the draft was trained on (it must never propose others)
    max_abs_error: float  # logits of the reloaded folder against the draft's in the same dtype, learnt ids
    rounding_error: float  # the same against the float32 draft: what the dtype costs
    argmax_agreement: float  # positions whose most probable id is the float32 draft's
    stray_mass: float  # probability on ids the draft never learnt
    stray_mass_before: float  # what it would have been with the rows as they were saved
    serve: str  # the exact command to serve with
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for summary.json."""
        return {**asdict(self), "folder": str(self.folder), "command": "export"}

    def lines(self) -> list[str]:
        """Return the result for a terminal, the serving command last."""
        return [
            f"wrote {self.folder}: format {self.format}, {self.dtype}, {self.rows:,} rows",
            f"proved by reloading: logits differ by at most {self.max_abs_error:.1e} on {self.learnt:,} ids"
            f" ({self.rounding_error:.1e} from the float32 draft; most probable token the same at"
            f" {self.argmax_agreement:.1%} of positions)",
            *(f"warning: {line}" for line in self.warnings),
            *(f"note: {line}" for line in self.notes),
            "serve with:",
            self.serve,
        ]


def write_record(folder: Path, draft: LanguageModel, form: str, dtype: str, measured: dict[str, float]) -> None:
    """Write what was exported and how it was proved. The kept ids go into JSON: engines load every safetensors file."""
    kept = None if draft.kept_ids is None else draft.kept_ids.tolist()
    record = {"source": draft.name, "format": form, "dtype": dtype, **measured, "kept_ids": kept}
    (folder / RECORD).write_text(json.dumps(record) + "\n")
