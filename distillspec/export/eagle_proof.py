"""Proof of an EAGLE-3 export: its folder, read back, gives the draft's logits on real states of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distillspec.errors import RunError
from distillspec.export.eagle_folder import read_eagle
from distillspec.export.proof import agreement
from distillspec.models import LanguageModel
from distillspec.models.features import read_states
from distillspec.models.own_weights import own_parameters, reads_targets_embeddings
from distillspec.models.state_input import previous


@dataclass(frozen=True)
class StateProbe:
    """Texts `[B, L]` a batch, and logits `[N, n]` float32 of the draft at all their tokens but the first.

    Other engines begin a draft's text at its second token, beside the state of the first. Here the first token is read
    too, beside a state of zeros. `first_token` is the share of positions whose most probable id is the same either way.
    """

    texts: tuple[Tensor, ...]
    exact: Tensor  # of the draft without the first token
    rounded: Tensor  # the same with its weights rounded to the dtype of the export
    first_token: float


def make_state_probe(
    draft: LanguageModel, target: LanguageModel, texts: Sequence[Tensor], dtype: torch.dtype
) -> StateProbe:
    """Run the draft on `texts` and keep its logits. Rounds its own weights to `dtype`, in place.

    Raises:
        RunError: the draft's logits are not finite.
    """
    exact = rounded = engine_logits(draft, target, texts)
    if not torch.isfinite(exact).all():
        raise RunError(f"the draft {draft.name} gives logits that are not finite; nothing was exported")
    same = exact.argmax(-1) == engine_logits(draft, target, texts, first_token=True).argmax(-1)
    if dtype is not torch.float32:
        with torch.no_grad():  # not the embeddings: they are the target's, and no copy
            embeddings = not reads_targets_embeddings(draft, target)
            for parameter in own_parameters(draft, embeddings).values():
                parameter.copy_(parameter.to(dtype))
        rounded = engine_logits(draft, target, texts)
    return StateProbe(tuple(texts), exact, rounded, float(same.float().mean()))


def prove_eagle(folder: Path, probe: StateProbe, draft: LanguageModel, target: LanguageModel) -> dict[str, float]:
    """Read the folder, compare, and return the measured figures of `ExportResult` by name.

    Raises:
        RunError: logits differ by 1e-4 or more, or the folder does not hold such a draft.
    """
    logits = engine_logits(read_eagle(folder, draft, target), target, probe.texts)
    return agreement(logits, probe.rounded, probe.exact)


@torch.no_grad()
def engine_logits(
    draft: LanguageModel, target: LanguageModel, texts: Sequence[Tensor], *, first_token: bool = False
) -> Tensor:
    """Return logits `[N, n]` float32 on the CPU at all tokens of `texts [B, L]` but the first of each.

    Args:
        first_token: whether the draft reads the first token, beside a state of zeros, as in distillspec.
    """
    logits, begin = [], 0 if first_token else 1
    for ids in texts:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        assert draft.state_input is not None
        fused = draft.state_input.fuse(read_states(target, ids, positions, draft.state_ids))
        fed = previous(fused, positions)
        hidden = draft.hidden(ids[:, begin:], positions[:, begin:] - begin, fed[:, begin:])
        logits.append(draft.head.logits(hidden[:, 1 - begin :]).flatten(0, 1).float().cpu())
    return torch.cat(logits)
