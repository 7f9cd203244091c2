"""The network that predicts acceptance: what it reads, and its way to disk and back with a draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.files import verify_folder
from distillspec.models import LanguageModel, initialise_draft, load_draft, save_draft
from distillspec.models.checkpoint import save_with_stop_head
from distillspec.models.stop_head import BEST, StopHead


def test_probabilities_and_entropy_are_read() -> None:
    head = StopHead("probs", 4, 8, 3)
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
    read = head.inputs(torch.zeros(2, 4), probs.log())
    assert read.tolist() == [pytest.approx([0.5, 0.25, 0.25, 1.0397208]), pytest.approx([1.0, 0.0, 0.0, 0.0])]
    assert StopHead("probs", 4, 8, 100).inputs(torch.zeros(2, 4), torch.zeros(2, 100)).shape == (2, BEST + 1)


def test_a_state_is_read_in_float32() -> None:
    states = torch.randn(3, 4).bfloat16()
    assert torch.equal(StopHead("state", 4, 8, 3).inputs(states, torch.zeros(3, 3)), states.float())


@pytest.mark.parametrize("reads", ["probs", "state"])
def test_predictions_are_probabilities_that_depend_on_what_is_read(reads: str) -> None:
    torch.manual_seed(0)
    head = StopHead(reads, 4, 8, 20)
    found = head.eval().acceptance(torch.randn(5, 4), torch.randn(5, 20))
    assert found.shape == (5,)
    assert bool(((found > 0) & (found < 1)).all())
    assert found.unique().numel() == 5


@pytest.mark.parametrize("reads", ["probs", "state"])
def test_a_folder_keeps_it(target: LanguageModel, tmp_path: Path, reads: str) -> None:
    torch.manual_seed(0)
    draft = initialise_draft(DraftConfig(layers=2), target)
    save_draft(draft, tmp_path / "draft", target)
    templates = tmp_path / "draft" / "additional_chat_templates"  # of a tokenizer with several
    templates.mkdir(mode=0o755)
    (templates / "tools.jinja").write_text("{{ messages }}")
    (templates / "tools.jinja").chmod(0o444)
    (tmp_path / "draft").chmod(0o555)
    head = StopHead(reads, 64, 8, draft.width).eval()
    save_with_stop_head(tmp_path / "draft", tmp_path / "taught", head)
    assert verify_folder(tmp_path / "taught") is None
    assert (tmp_path / "taught" / templates.name / "tools.jinja").read_text() == "{{ messages }}"
    taught = load_draft(tmp_path / "taught", target)
    assert taught.identity == load_draft(tmp_path / "draft", target).identity
    inputs = torch.randn(3, 64 if reads == "state" else BEST + 1)
    assert taught.stop_head is not None
    assert torch.equal(taught.stop_head(inputs), head(inputs))
    save_draft(taught, tmp_path / "again", target)
    again = load_draft(tmp_path / "again", target)
    assert again.stop_head is not None
    assert torch.equal(again.stop_head(inputs), head(inputs))


def test_drafts_without_one_are_as_before(target: LanguageModel, tmp_path: Path) -> None:
    save_draft(initialise_draft(DraftConfig(layers=2), target), tmp_path / "draft", target)
    assert "stop" not in json.loads((tmp_path / "draft/distillspec.json").read_text())
    assert load_draft(tmp_path / "draft", target).stop_head is None
