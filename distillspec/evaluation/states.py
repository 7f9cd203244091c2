"""The target's final hidden states on held-out text, kept between evaluations of one run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from distillspec.errors import RunError
from distillspec.files import write_atomic
from distillspec.models.features import pass_with_states
from distillspec.models.language_model import LanguageModel
from distillspec.models.unrolling import unrolled
from distillspec.types import Sample


@dataclass
class TargetStates:
    """Cache of the target's hidden states: it reads each sample once. A few MB save most of an evaluation's time.

    With a `folder` they outlive the run (`save`), in a file named by the target. The target must not change between
    uses: it is frozen wherever this is used.
    """

    target: LanguageModel
    folder: Path | None = None
    _known: dict[str, Tensor] = field(default_factory=dict)
    _features: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)  # never saved
    _saved: int = 0

    def __post_init__(self) -> None:
        if self.file is None or not self.file.is_file():
            return
        try:
            with safe_open(self.file, "pt") as stored:
                self._known = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError:
            return  # damaged: compute it again
        self._saved = len(self._known)

    @property
    def file(self) -> Path | None:
        """Return the file that keeps the states, or None without a folder."""
        if self.folder is None:
            return None
        kind = f"{self.target.identity.weights_hash[:16]}-{str(self.target.dtype).removeprefix('torch.')}"
        return self.folder / f"{kind}.safetensors"

    def hidden(self, sample: Sample) -> Tensor:
        """Return final hidden states `[R, D]` that predict the sample's R response tokens."""
        key = _key(sample.prompt_ids, sample.response_ids)
        if key not in self._known:
            self._known[key] = response_hidden(self.target, sample)
        return self._known[key].to(self.target.device)

    def features(self, sample: Sample, ids: tuple[int, ...]) -> Tensor:
        """Return the states `ids` `[1, L − 1, F]` of the sample's tokens but its last, which no draft reads.

        They came with the sample, or a pass of the target computes them.
        """
        recorded = None if sample.states is None else sample.states.of(ids)
        if recorded is not None:
            return recorded[None].to(self.target.device, self.target.dtype)
        text = _key(sample.prompt_ids, sample.response_ids)
        if (text, ids) not in self._features:
            with torch.no_grad():
                hidden, states = pass_with_states(self.target, *_read(self.target, sample), ids)
            self._features[text, ids] = states
            self._known.setdefault(text, hidden[0, len(sample.prompt_ids) - 1 :].clone())
        return self._features[text, ids]

    def forget(self) -> None:
        """Drop all states. Files that `save` wrote stay."""
        self._known.clear()
        self._features.clear()

    def save(self) -> None:
        """Write new states to the folder for later runs. Does nothing without a folder or new states.

        Where the folder cannot be written to, later runs compute them again.
        """
        if self.file is None or len(self._known) == self._saved:
            return
        tensors = {key: states.cpu().contiguous() for key, states in self._known.items()}
        with suppress(RunError, SafetensorError):  # the folder may be another's
            write_atomic(self.file, lambda temporary: save_file(tensors, temporary))
            self._saved = len(self._known)


def _key(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
    return hashlib.sha256(repr((tuple(prompt_ids), tuple(response_ids))).encode()).hexdigest()[:32]


@torch.no_grad()
def response_hidden(model: LanguageModel, sample: Sample) -> Tensor:
    """Return final hidden states `[R, D]` whose logits predict the response tokens, the first one included."""
    return model.hidden(*_read(model, sample))[0, len(sample.prompt_ids) - 1 :].clone()


@torch.no_grad()
def drafted_hidden(
    draft: LanguageModel, sample: Sample, states: TargetStates | None, speculation_length: int
) -> list[Tensor]:
    """Return `response_hidden` of a draft at each of `speculation_length` drafted positions: what its head reads there.

    Drafts that read tokens alone have the same states at all positions: one tensor is returned, and they need no
    `states`. Positions that a draft cannot draft are left out.
    """
    if draft.state_input is None:
        return [response_hidden(draft, sample)]
    assert states is not None, "a draft that reads states needs the target's"
    ids, position_ids = _read(draft, sample)
    features = states.features(sample, draft.state_ids)
    positions = min(speculation_length, draft.most_positions or speculation_length)
    return unrolled(draft, ids, position_ids, features, [position_ids[0, len(sample.prompt_ids) - 1 :]] * positions)


def _read(model: LanguageModel, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return ids and positions `[1, L − 1]` of all tokens but the last."""
    read = torch.tensor([[*sample.prompt_ids, *sample.response_ids[:-1]]], device=model.device)
    return read, torch.arange(read.shape[1], device=model.device)[None]
