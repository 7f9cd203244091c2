"""Commands with which vLLM, SGLang and transformers speculate with an exported draft."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from transformers import PreTrainedModel

from distillspec.models import LanguageModel

NOTES = {
    "hf": (),
    "vllm": (
        "vLLM drafts greedily by default, so it accepts p(argmax q) rather than alpha; versions "
        'that know it take "draft_sample_method":"probabilistic" in the same JSON',
        "the draft runs at the target's tensor-parallel size",
    ),
    "sglang": (
        "do not add --speculative-token-map: STANDALONE drafts keep their own full-width head, and the map "
        "renames its columns without cutting it",
    ),
}


def serve_command(form: str, folder: Path, target: str, speculation_length: int, *, method: str = "draft_model") -> str:
    """Return the command (for plain transformers, the code) that serves `target` with the draft in `folder`.

    Args:
        method: what vLLM calls the draft: `draft_model`, `eagle3` or `medusa`. `peagle`: `eagle3` drafting in parallel.
    """
    path = str(folder.resolve())
    if form in ("vllm", "speculators"):
        parallel = {"parallel_drafting": True} if method == "peagle" else {}
        name = "eagle3" if parallel else method
        speculative = {"method": name, "model": path, "num_speculative_tokens": speculation_length, **parallel}
        compact = json.dumps(speculative, separators=(",", ":"))
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(compact)}"
    if form == "sglang":
        algorithm = "EAGLE3" if method == "eagle3" else "STANDALONE"
        # With one candidate a step, SGLang verifies the root and the speculation_length drafted tokens together.
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)}"
            f" --speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(path)}"
            f" --speculative-num-steps {speculation_length} --speculative-eagle-topk 1"
            f" --speculative-num-draft-tokens {speculation_length + 1}"
        )
    return (
        f"draft = AutoModelForCausalLM.from_pretrained({path!r}); "
        f"draft.generation_config.num_assistant_tokens = {speculation_length}; "
        "target.generate(..., assistant_model=draft)"
    )


def target_name(target: LanguageModel | None) -> str:
    """Return the path or id that the target was loaded from, or a placeholder to fill in."""
    return (getattr(target.model.config, "_name_or_path", "") if target is not None else "") or "TARGET"


def warn(
    draft: LanguageModel, target: LanguageModel | None, rows: int, stray_before: float, stray: float
) -> tuple[str, ...]:
    """Return warnings about what this draft loses outside distillspec. Output stays exact in every case."""
    lines = []
    if draft.kept_ids is not None:
        lines.append(
            f"served drafts need all {rows:,} rows, so the {len(draft.kept_ids):,}-token head is written at "
            f"full width and its speed is lost outside distillspec; ids it never learnt keep {stray:.2%} of its "
            f"probability ({stray_before:.2%} with the rows as saved)"
        )
    if stray > 0.01:
        lines.append(
            f"ids the draft never learnt get {stray:.1%} of its probability: served alpha may fall to "
            f"{1 - stray:.3f} of the measured one"
        )
    if target is None:
        lines.append("no target was given, so the row count is the draft's own; engines want the target's")
    else:
        lines += length_warnings(draft, target)
    return tuple(lines)


def length_warnings(draft: LanguageModel, target: LanguageModel) -> tuple[str, ...]:
    """Return a warning if the draft reads fewer positions than its target."""
    draft_length, target_length = _length(draft.model), _length(target.model)
    if draft_length >= target_length:
        return ()
    return (f"the draft reads {draft_length:,} positions, the target {target_length:,}; limit the context",)


def _length(model: PreTrainedModel) -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 62)
