"""Per-position statistics against the same sums written out over full-width distributions."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from distillspec.evaluation.positions import Positions, measure_positions
from distillspec.evaluation.states import TargetStates
from distillspec.models import LanguageModel
from distillspec.sampling import NonFiniteLogits, policy_probs
from distillspec.types import Sample, SamplingPolicy

from ..models.state_drafts import drafted_logits, state_draft

SAMPLE = Sample("p", "d", (5, 9, 11), (40, 41, 2, 250, 6, 7, 12))
POLICIES = [
    SamplingPolicy(),
    SamplingPolicy(0.7, top_p=0.8),
    SamplingPolicy(1.0, top_k=5),
    SamplingPolicy(0.0),
]


def written_out(draft: LanguageModel, target: LanguageModel, policy: SamplingPolicy) -> dict[str, list[float]]:
    """Every statistic by a loop over positions, each from a forward pass over its own prefix."""
    out: dict[str, list[float]] = {
        name: [] for name in Positions.__dataclass_fields__ if name not in ("deeper", "by_rank")
    }
    for i, token in enumerate(SAMPLE.response_ids):
        prefix = torch.tensor([[*SAMPLE.prompt_ids, *SAMPLE.response_ids[:i]]])
        target_logits, draft_logits = target.logits(prefix)[0, -1], draft.logits(prefix)[0, -1]
        p = policy_probs(target_logits, policy)
        draft_logits = draft.full_width(draft_logits)
        q = policy_probs(draft_logits, policy)
        overlap = torch.minimum(p, q)
        kept = torch.arange(len(p)) if draft.kept_ids is None else draft.kept_ids
        out["alpha"].append(float(overlap.sum()))
        out["continuing"].append(float(overlap.sum() - overlap[list(target.stop_ids)].sum()))
        out["agreement"].append(float(target_logits.argmax() == draft_logits.argmax()))
        out["p_of_draft_argmax"].append(float(p[draft_logits.argmax()]))
        out["ceiling"].append(float(p[kept].sum()))
        out["accepted"].append(float(min(1.0, q[token] / p[token])) if p[token] > 0 else 0.0)
    return out


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("which", ["draft", "truncated_draft"])
def test_every_statistic_equals_its_definition(
    which: str, policy: SamplingPolicy, target: LanguageModel, request: pytest.FixtureRequest
) -> None:
    draft = request.getfixturevalue(which)
    positions = measure_positions(draft, target, SAMPLE, policy, chunk_positions=3)
    with torch.no_grad():
        expected = written_out(draft, target, policy)
    assert len(positions) == len(SAMPLE.response_ids)  # the first drafted position is the first row
    for name, values in expected.items():
        torch.testing.assert_close(
            getattr(positions, name), torch.tensor(values, dtype=torch.float64), atol=2e-5, rtol=0, msg=name
        )


def test_text_that_the_policy_cannot_write_has_no_accepted_token(draft: LanguageModel, target: LanguageModel) -> None:
    """Text sampled at temperature 1, judged under top-k 1: 0/0 counts as never emitted, not as NaN."""
    positions = measure_positions(draft, target, SAMPLE, SamplingPolicy(1.0, top_k=1))
    assert (positions.accepted == 0).any()
    assert torch.isfinite(positions.accepted).all()


def test_truncation_lowers_the_ceiling_and_bounds_alpha(
    draft: LanguageModel, truncated_draft: LanguageModel, target: LanguageModel
) -> None:
    whole = measure_positions(draft, target, SAMPLE, SamplingPolicy())
    cut = measure_positions(truncated_draft, target, SAMPLE, SamplingPolicy())
    assert (whole.ceiling == 1).all()
    assert (cut.ceiling < 0.99).all()
    assert (cut.alpha <= cut.ceiling + 1e-6).all()


def test_an_empty_response_has_no_positions(draft: LanguageModel, target: LanguageModel) -> None:
    assert len(measure_positions(draft, target, Sample("p", "d", (5,), ()), SamplingPolicy())) == 0


def test_a_draft_of_nan_is_an_error_not_an_acceptance_of_zero(draft: LanguageModel, target: LanguageModel) -> None:
    broken = copy.deepcopy(draft)
    broken.model.get_output_embeddings().weight.data[7] = float("nan")
    with pytest.raises(NonFiniteLogits):
        measure_positions(broken, target, SAMPLE, SamplingPolicy())


def test_remembered_target_states_spare_the_target_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch, target: LanguageModel, draft: LanguageModel
) -> None:
    states = TargetStates(target)
    first = measure_positions(draft, target, SAMPLE, SamplingPolicy(), states=states)
    reads = []
    hidden = LanguageModel.hidden
    monkeypatch.setattr(LanguageModel, "hidden", lambda self, *a, **k: reads.append(self.name) or hidden(self, *a, **k))
    again = measure_positions(draft, target, SAMPLE, SamplingPolicy(), states=states)
    assert reads == [draft.name]
    assert torch.equal(first.alpha, again.alpha)


def test_target_states_outlive_a_run_unless_damaged(
    monkeypatch: pytest.MonkeyPatch, target: LanguageModel, draft: LanguageModel, tmp_path: Path
) -> None:
    first = TargetStates(target, tmp_path)
    wanted = first.hidden(SAMPLE)
    first.save()
    reads = []
    hidden = LanguageModel.hidden
    monkeypatch.setattr(LanguageModel, "hidden", lambda self, *a, **k: reads.append(self.name) or hidden(self, *a, **k))
    assert torch.equal(TargetStates(target, tmp_path).hidden(SAMPLE), wanted)
    assert reads == []
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    assert torch.equal(TargetStates(target, tmp_path).hidden(SAMPLE), wanted)
    assert reads == [target.name]
    other = target.with_identity(weights_hash="another")
    assert TargetStates(other, tmp_path).file != first.file


@pytest.mark.parametrize("kind", ["eagle", "features"])
def test_every_drafted_position_of_a_draft_that_reads_states_has_its_own_values(
    kind: str, target: LanguageModel
) -> None:
    draft, policy = state_draft(kind, target), SamplingPolicy()
    positions = measure_positions(draft, target, SAMPLE, policy, chunk_positions=3, speculation_length=3)
    text = [*SAMPLE.prompt_ids, *SAMPLE.response_ids]
    for depth in range(3):
        values = positions.at(depth)
        for place, token in enumerate(SAMPLE.response_ids):
            end = len(SAMPLE.prompt_ids) + place
            if end - depth < 1:
                continue
            p = policy_probs(target.logits(torch.tensor([text[:end]]))[0, -1].detach(), policy)
            drafted = drafted_logits(draft, target, text[: end - depth], text[end - depth : end + 1])
            q = policy_probs(drafted[depth], policy)
            assert float(values.alpha[place]) == pytest.approx(float(torch.minimum(p, q).sum()), abs=2e-5)
            assert float(values.accepted[place]) == pytest.approx(min(1.0, float(q[token] / p[token])), abs=2e-4)
    assert not torch.allclose(positions.alpha, positions.at(1).alpha)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_have_the_targets_probability_of_each_rank(kind: str, target: LanguageModel) -> None:
    draft, policy = state_draft(kind, target), SamplingPolicy(0.7)
    positions = measure_positions(draft, target, SAMPLE, policy, chunk_positions=3, speculation_length=6)
    text = [*SAMPLE.prompt_ids, *SAMPLE.response_ids]
    for depth in range(4):
        by_rank = positions.at(depth).by_rank
        assert by_rank is not None
        for place in range(depth, len(SAMPLE.response_ids)):
            end = len(SAMPLE.prompt_ids) + place
            p = policy_probs(target.logits(torch.tensor([text[:end]]))[0, -1].detach(), policy)
            drafted = drafted_logits(draft, target, text[: end - depth], text[end - depth : end + 1])
            torch.testing.assert_close(by_rank[place], p[drafted[depth].topk(10).indices].double(), atol=2e-5, rtol=0)
    assert positions.at(5).by_rank is None, "there are four heads"
