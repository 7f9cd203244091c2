"""Choosing layers by acceptance."""

from __future__ import annotations

import pytest
import torch

from distillspec.commands.untrained import make_acceptance_probe
from distillspec.models import LanguageModel
from distillspec.types import Sample

TEXT = [Sample("a", "d", (1, 20, 30), (40, 50, 60, 70))]


def test_layers_are_told_apart_where_little_is_accepted(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model is less wrong at every token but one; the mean of α sees that one alone."""
    ids = torch.tensor([[*TEXT[0].prompt_ids, *TEXT[0].response_ids]])
    whole = target.logits(ids).detach()
    probe = make_acceptance_probe(target, TEXT)
    worst = -whole  # what the target likes least comes first
    scores = {}
    for name, likes in (("lucky", 60.0), ("near", 3.0)):
        logits = worst * likes
        if name == "lucky":
            logits[0, 0] = worst[0, 0]
        monkeypatch.setattr(type(target), "logits", lambda self, ids, logits=logits: logits)
        scores[name] = (probe(), _mean_acceptance(logits, whole))
    assert scores["lucky"][1] > scores["near"][1]
    assert scores["near"][0] > scores["lucky"][0]


def _mean_acceptance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(torch.minimum(torch.softmax(ours, -1), torch.softmax(theirs, -1)).sum(-1).mean())
