"""Token values equal the references on whole logits."""

from __future__ import annotations

import pytest
import torch

from distillspec.losses import (
    DenseTeacher,
    chunked_token_values,
    per_token_loss,
)

from .chunked_cases import KEPT, T, make


@pytest.mark.parametrize("teacher", ["dense", "topk"])
def test_token_values_equal_the_reference(teacher: str) -> None:
    case = make(teacher, truncated=True)
    kwargs = {name: case.kwargs[name] for name in ("labels", "from_draft", "kept_ids")}
    tokens = chunked_token_values(case.hidden, case.head, case.teacher, "jsd", {"beta": 0.3}, chunk_tokens=4, **kwargs)
    assert tokens.values is not None
    assert tokens.labels is not None
    assert not tokens.values.requires_grad
    torch.testing.assert_close(tokens.values, per_token_loss("jsd", case.inputs(), beta=0.3).values)
    valid = torch.isin(case.kwargs["labels"], KEPT)
    assert torch.equal(tokens.labels.valid, valid)
    draft_logp = torch.log_softmax(case.head.logits(case.hidden), -1)
    column = {int(token): index for index, token in enumerate(KEPT)}
    for row in valid.nonzero().flatten().tolist():
        label = int(case.kwargs["labels"][row])
        torch.testing.assert_close(tokens.labels.draft_logp[row], draft_logp[row, column[label]])
        if isinstance(case.teacher, DenseTeacher):
            target_logp = torch.log_softmax(case.teacher.chunk(0, T).logits, -1)[row, label]
            torch.testing.assert_close(tokens.labels.target_logp[row], target_logp)
            assert tokens.labels.reward[row] == float(target_logp > draft_logp[row, column[label]])


def test_labels_need_no_loss_but_a_distribution() -> None:
    dense, sampled = make("dense"), make("sampled")
    labels = dense.kwargs["labels"]
    view = chunked_token_values(dense.hidden, dense.head, dense.teacher, labels=labels)
    assert view.values is None
    assert view.labels is not None
    fkl = chunked_token_values(sampled.hidden, sampled.head, sampled.teacher, "fkl", labels=labels)
    assert fkl.values is not None
    assert fkl.labels is None
